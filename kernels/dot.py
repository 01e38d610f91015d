"""Matrix products inside Triton kernels that also hold in Triton's interpreter.

The interpreter keeps bfloat16 numbers as 16-bit integers and multiplies those; there the operands go in as float32,
which is what the tensor cores do with them: exact products, summed in float32.
"""

# Triton's functions are typed by what they are called with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import os

try:
    import triton
    import triton.language as tl
except ImportError:  # no build for this platform: references serve it
    triton = None

if triton is not None:
    INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

    @triton.jit
    def dot(left, right):
        """[m, k] x [k, n] -> [m, n] float32; 16-bit operands on the tensor cores, float32 ones exactly."""
        if INTERPRETED:
            return tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
        return tl.dot(left, right, input_precision="ieee")
