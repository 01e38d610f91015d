"""Head rotation: transformers' own norm and rotation, and the kernel against the definition."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from speculators.kernels.head_rotation import rotate_heads

pytestmark = pytest.mark.usefixtures("garbage_in_new_memory")  # no result may depend on what memory held

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def tables(tokens: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(7, 7 + tokens)[:, None] * 10 ** -torch.linspace(0, 3, size // 2)
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos().to(DEVICE), angles.sin().to(DEVICE)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "size", "dtype"), [(5, 3, 12, torch.float32), (2, 17, 16, torch.bfloat16), (1, 1, 2, torch.float32)]
)
def test_the_kernel_equals_the_definition_and_transformers(tokens: int, heads: int, size: int, dtype: torch.dtype, normalise: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, heads, size, generator=generator).to(DEVICE, dtype)
    norm = Qwen3RMSNorm(size, eps=1e-5).to(DEVICE, dtype)
    norm.weight.data = torch.randn(size, generator=generator).to(DEVICE, dtype)
    cosine, sine = tables(tokens, size)
    weight = norm.weight.data if normalise else None
    reference = rotate_heads(x, cosine, sine, weight, 1e-5, implementation="reference")
    kernel = rotate_heads(x, cosine, sine, weight, 1e-5, implementation="triton")
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(kernel, reference, rtol=tolerance, atol=tolerance)
    with torch.no_grad():
        expected, _ = apply_rotary_pos_emb(norm(x) if normalise else x, x, cosine.to(dtype), sine.to(dtype), unsqueeze_dim=0)
    torch.testing.assert_close(kernel, expected.view_as(kernel), rtol=max(tolerance, 1e-4), atol=max(tolerance, 1e-4))


def test_heads_of_a_wider_projection_are_read_as_they_lie() -> None:
    wide = torch.randn(2, 3, 8, 12, device=DEVICE)
    cosine, sine = tables(3, 12)
    part = wide[:, :, 2:5]
    expected = rotate_heads(part, cosine, sine, implementation="reference")
    torch.testing.assert_close(rotate_heads(part, cosine, sine, implementation="triton"), expected)
