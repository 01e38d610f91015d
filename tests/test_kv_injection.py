"""K/V injection: every layer's own projections, norm and rotation, written where they belong and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from speculators.algorithms.layers import Attention, RotaryEmbedding
from speculators.config import LayerConfig
from speculators.kernels.kv_injection import InjectionWeights, kv_injection

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def config(head_dim: int, key_heads: int, bias: bool = False) -> LayerConfig:
    return LayerConfig(
        vocab_size=11,
        hidden_size=24,
        intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=key_heads,
        num_key_value_heads=key_heads,
        head_dim=head_dim,
        attention_bias=bias,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )


def layers(settings: LayerConfig, dtype: torch.dtype) -> list[Attention]:
    torch.manual_seed(0)
    made = [Attention(settings, settings.hidden_size, normalise_heads=True).to(DEVICE, dtype) for _ in range(3)]
    with torch.no_grad():
        for layer in made:
            for parameter in layer.parameters():
                parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 1.0))
    return made


def weights_of(settings: LayerConfig, attentions: list[Attention], slots: int) -> InjectionWeights:
    rotation = RotaryEmbedding(settings)(torch.arange(slots, device=DEVICE))
    half = settings.head_dim // 2
    biases = [b for a in attentions for b in (a.k_proj.bias, a.v_proj.bias)] if settings.attention_bias else None
    return InjectionWeights.stack(
        [a.k_proj.weight for a in attentions],
        [a.v_proj.weight for a in attentions],
        [a.k_norm.weight for a in attentions if a.k_norm is not None],
        settings.rms_norm_eps,
        rotation.cosine[:, 0, :half],
        rotation.sine[:, 0, :half],
        biases,
    )


def written_by_layers(
    settings: LayerConfig, attentions: list[Attention], features: Tensor, start: Tensor, counts: Tensor, memory: Tensor
) -> Tensor:
    """What the layers' own `key_value` gives, one counted column at a time."""
    expected, rotary = memory.clone(), RotaryEmbedding(settings)
    for row in range(features.shape[0]):
        for column in range(int(counts[row])):
            position = start[row] + column
            for index, attention in enumerate(attentions):
                key, value = attention.key_value(features[row, column][None], rotary(position[None]))
                expected[index, 0, row, position], expected[index, 1, row, position] = key[0], value[0]
    return expected


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize(
    ("head_dim", "key_heads", "bias", "dtype"),
    [(8, 2, False, torch.float32), (12, 3, True, torch.float32), (16, 1, False, torch.bfloat16)],
)
def test_every_layer_finds_its_keys_and_values(head_dim: int, key_heads: int, bias: bool, dtype: torch.dtype, implementation: str) -> None:
    settings = config(head_dim, key_heads, bias)
    attentions = layers(settings, dtype)
    features = torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    start, counts = torch.tensor([0, 15, 16], device=DEVICE), torch.tensor([5, 0, 3], device=DEVICE)
    memory = torch.full((3, 2, 3, 19, key_heads, head_dim), 7.0, device=DEVICE, dtype=dtype)  # row 2 ends in the last slot
    with torch.no_grad():
        expected = written_by_layers(settings, attentions, features, start, counts, memory)
        kv_injection(features, weights_of(settings, attentions, 19), start, counts, memory, implementation=implementation)  # type: ignore[arg-type]
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2  # one rounding of bfloat16 at values of up to about 4
    torch.testing.assert_close(memory, expected, rtol=tolerance, atol=tolerance)
    untouched = expected == 7.0
    assert untouched.sum() == (3 * 19 - 8) * 3 * 2 * key_heads * head_dim
    assert torch.equal(memory[untouched], expected[untouched]), "columns that do not count, and all other slots, stay as they are"


def test_a_cache_longer_than_the_rotation_table_is_refused() -> None:
    settings = config(8, 2)
    attentions = layers(settings, torch.float32)
    memory = torch.zeros(3, 2, 1, 20, 2, 8, device=DEVICE)
    with pytest.raises(ValueError, match="20 slots of a row, and these in 19 rotations"):
        kv_injection(
            torch.zeros(1, 2, 24, device=DEVICE),
            weights_of(settings, attentions, 19),
            torch.zeros(1, dtype=torch.int64, device=DEVICE),
            torch.ones(1, dtype=torch.int64, device=DEVICE),
            memory,
        )
