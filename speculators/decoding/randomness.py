"""Counter-based random numbers: every draw is a pure function of what it is for.

The counter is (seed, purpose, row, round, slot). There is no generator state, so a row's numbers do not depend on
the other rows of its batch, on how far they are, or on the device.
"""

from __future__ import annotations

from enum import IntEnum

from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, the increment of the splitmix64 generator


class Purpose(IntEnum):
    """What a number decides. Numbers of different purposes are independent."""

    DRAFT = 0
    ACCEPT = 1
    CORRECT = 2
    GENERATE = 3


def uniform(seed: int, purpose: Purpose, rows: Tensor, rounds: Tensor, slots: Tensor) -> Tensor:
    """Uniform numbers, one for each counter (seed, purpose, row, round, slot).

    The counter's parts are absorbed one after the other by the finaliser of splitmix64 (Steele, Lea and Flood 2014),
    whose top 53 bits become the number.

    Args:
        seed: any integer; taken modulo 2^64.
        purpose: what the numbers decide.
        rows: int64, row of the request.
        rounds: int64, 0 for the token after the prompt, then counting verify forwards.
        slots: int64, position inside the block. The three tensors broadcast against one another.

    Returns:
        float64 in [0, 1), a multiple of 2^-53, of the broadcast shape.
    """
    return _as_uniform(_state(seed, purpose, rows, rounds, slots))


def gumbel(seed: int, purpose: Purpose, rows: Tensor, rounds: Tensor, slots: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel numbers -log(-log(u)), one for each counter (seed, purpose, row, round, slot, token).

    The token with the largest logit / temperature + number is distributed as the softmax (the Gumbel-max trick): drawing so
    needs neither a normalised distribution nor a cumulative sum.

    Args:
        seed, purpose, rows, rounds, slots: as for `uniform`.
        tokens: int64; broadcasts against the three other tensors.

    Returns:
        float64 of the broadcast shape.
    """
    state = _mix(_state(seed, purpose, rows, rounds, slots) + (tokens + 1) * signed(_GOLDEN))
    return -(-(_as_uniform(state) + 2.0**-54).log()).log()  # the middle of each step, so that u is never 0


def _state(seed: int, purpose: Purpose, rows: Tensor, rounds: Tensor, slots: Tensor) -> Tensor:
    state = rows.new_full((), signed(seed))
    for part in (rows.new_full((), purpose), rows, rounds, slots):
        state = _mix(state + (part + 1) * signed(_GOLDEN))
    return state


def _as_uniform(state: Tensor) -> Tensor:
    """The top 53 bits, in [0, 1)."""
    return _shift_right(state, 11).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: int64's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def signed(value: int) -> int:
    """The int64 with the same lowest 64 bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
