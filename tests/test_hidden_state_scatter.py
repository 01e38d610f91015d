"""Hidden state scatter: a copy, exact in every dtype."""

from __future__ import annotations

import pytest
import torch

from speculators.kernels.hidden_state_scatter import hidden_state_scatter

pytestmark = pytest.mark.usefixtures("garbage_in_new_memory")  # no result may depend on what memory held

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize(("size", "dtype"), [(1, torch.float32), (60, torch.bfloat16), (2049, torch.float32)])
def test_every_slot_holds_its_feature_or_the_placeholder(size: int, dtype: torch.dtype, implementation: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, placeholder = (torch.randn(*shape, generator=generator).to(DEVICE, dtype) for shape in ((5, size), (size,)))
    rows = [3, -1, 0, 4, -1, 3, -7]
    out = hidden_state_scatter(hidden, torch.tensor(rows, device=DEVICE), placeholder, implementation=implementation)  # type: ignore[arg-type]
    assert out.dtype == dtype
    for slot, row in enumerate(rows):
        assert torch.equal(out[slot], hidden[row] if row >= 0 else placeholder)
