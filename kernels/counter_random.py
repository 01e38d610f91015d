"""The counter-based random numbers of `speculators.decoding.randomness`, inside kernels: the same bits for the same counter.

A kernel that draws computes its numbers itself: as tensors they would cost some thirty launches a round.
"""

# Triton's kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from speculators.decoding.randomness import signed

try:
    import triton
    import triton.language as tl
except ImportError:  # no build for this platform: references serve it
    triton = None

__all__ = ["seed_argument"]


def seed_argument(seed: int) -> int:
    """A seed of any size as the int64 that kernels take."""
    return signed(seed)


if triton is not None:
    _GOLDEN = tl.constexpr(-7046029254386353131)  # 0x9E3779B97F4A7C15 as int64
    _FIRST = tl.constexpr(-4658895280553007687)  # 0xBF58476D1CE4E5B9
    _SECOND = tl.constexpr(-7723592293110705685)  # 0x94D049BB133111EB

    @triton.jit
    def absorb(state, part):
        """One part of the counter, int64, into the state: splitmix64's finaliser. Right shifts are logical."""
        x = state + (part + tl.full((), 1, tl.int64)) * _GOLDEN
        x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _FIRST
        x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _SECOND
        return x ^ ((x >> 31) & 0x1FFFFFFFF)

    @triton.jit
    def as_uniform(state):
        """float64 in [0, 1), a multiple of 2^-53."""
        return ((state >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16

    @triton.jit
    def as_gumbel(state):
        """float32 -log(-log(u)) of u = as_uniform(state) + 2^-54, to 2e-6.

        float64 logarithms cost ten times as much. Near u = 1, where the largest numbers come from, 1 - u is what must be exact.
        """
        bits = (state >> 11) & 0x1FFFFFFFFFFFFF
        rest = tl.minimum(bits, 0x1FFFFFFFFFFFFF - bits)
        smaller = rest.to(tl.float32) * 1.1102230246251565e-16 + 5.551115123125783e-17  # of u and 1 - u
        low = bits == rest
        series = smaller * (1.0 + smaller * (0.5 + smaller * (1 / 3 + smaller * (0.25 + smaller * (0.2 + smaller * (1 / 6))))))
        energy = -tl.log(tl.where(low, smaller, 1.0 - smaller))
        return -tl.log(tl.where(low | (smaller > 0.0625), energy, series))
