"""A tensor times a scalar on the device: the kernel against torch's product."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from speculators.kernels.scaled import scaled

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = pytest.mark.usefixtures("garbage_in_new_memory")


@pytest.mark.parametrize("implementation", ["reference", "triton", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(0, 3), (1,), (37, 5), (5, 4097)])
def test_every_element_is_multiplied_and_rounded_once(shape: tuple[int, ...], dtype: torch.dtype, implementation: Any) -> None:
    """1/3 is no number of 16 bits: rounding the factor first would show."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    factor = torch.tensor(1 / 3, device=DEVICE)
    result = scaled(x, factor, implementation=implementation)
    assert result.dtype == dtype and result.shape == x.shape
    cut = DEVICE == "cpu" and implementation == "triton"  # Triton's interpreter cuts bfloat16 instead of rounding
    torch.testing.assert_close(result, (x.float() * factor).to(dtype), rtol=torch.finfo(dtype).eps if cut else 0.0, atol=0.0)
