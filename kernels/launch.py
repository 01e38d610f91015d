"""Programmatic dependent launch: a kernel starts while the one before it drains, and waits only where it needs results.

Between two kernels of a stream a GPU stands still for some microseconds: the last programs of one drain, those of the next start
and wait for their first bytes. A drafter's round is a chain of a hundred kernels, so that adds up. From compute capability 9.0 on
(CUDA C++ programming guide, "Programmatic Dependent Launch and Synchronization") a kernel may start early; captured graphs keep it.

Every kernel launched with `dependent_launch` calls `wait_for_inputs` unconditionally, and before that it touches no memory, except
that it may ask for lines to be brought into the L2 cache (`fetch_ahead`). That is all that correctness takes; `let_next_start` is
about speed alone:

- The wait returns when the kernel launched before has ended and its writes are visible. That one waited too, or was launched the
  ordinary way, so all kernels before it have ended as well: nothing is read too early, and nothing written that is still read.
- A fetch into L2 returns no value, and L2 is where a GPU's memory is coherent: a later write changes what was fetched.
- An ordinary launch after it waits for everything, as ever. Other devices and the interpreter launch the ordinary way.

The next kernel may start once every program has called `let_next_start` or ended. Programs that wait occupy multiprocessors, so a
program calls it when it has read what it needs: called at the beginning, kernels of several waves got slower by a tenth.
"""

# Triton's functions are typed by what they are called with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import os
from functools import cache

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # no build for this platform: references serve it
    triton = None

__all__ = ["dependent_launch"]

# SPECULATORS_PDL=0 launches the ordinary way, as `--no-pdl` of benchmarks/draft.py and benchmarks/round_profile.py does.
enabled = os.environ.get("SPECULATORS_PDL", "1") == "1"

_SHARED_MEMORY = 163_840  # bytes, compute capability 8.0: where no GPU says otherwise


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have."""
    if device.type != "cuda":
        return _SHARED_MEMORY
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", _SHARED_MEMORY))


if triton is not None:
    _LINE = tl.constexpr(128)  # bytes of a line of L2

    @triton.jit
    def wait_for_inputs(PDL: tl.constexpr):
        """Wait for the kernel before. Nothing may touch memory before this."""
        if PDL:
            tl.extra.cuda.gdc_wait()

    @triton.jit
    def let_next_start(PDL: tl.constexpr):
        """Let the next kernel start: this program is about to write its results."""
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()

    @triton.jit
    def fetch_ahead(starts, BYTES: tl.constexpr, room):
        """Bring the first BYTES, a power of two, of every row into L2.

        starts: [rows], pointers to the rows. room: bytes that each row has; nothing beyond them is asked for.
        """
        at = tl.minimum(tl.arange(0, BYTES // _LINE) * _LINE, room - 1)
        lines = starts.to(tl.int64)[:, None] + at[None, :]
        tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1)


@cache
def _supported(device: torch.device) -> bool:
    if triton is None or device.type != "cuda" or torch.version.cuda is None or not hasattr(tl.extra.cuda, "gdc_wait"):
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def dependent_launch(tensor: Tensor) -> dict[str, bool]:
    """Options of a launch on a tensor's device, for a kernel with the constant PDL that begins with `wait_for_inputs(PDL)`."""
    return {"PDL": True, "launch_pdl": True} if enabled and _supported(tensor.device) else {"PDL": False}
