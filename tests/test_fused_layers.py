"""Fused decoding steps: exact where a layer is of the common kind, and nowhere else."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_drafters import attend_few, on_kernels
from tiny_models import tiny_verifier

from speculators import fused_layers
from speculators.fused_layers import FusedSteps, fuse_final_norm, fuse_layers
from speculators.verifier import Verifier


def steps(verifier: Verifier) -> list[torch.Tensor]:
    """Logits and taps of a prompt, of a step of 3 tokens over rows of unequal length, and of one token."""
    generator, cache, out = torch.Generator().manual_seed(0), verifier.new_cache(2, 24), []
    for width, lengths in ((6, (0, 0)), (3, (6, 4)), (1, (7, 7)), (2, (8, 8))):
        cache.lengths = torch.tensor(lengths, device=verifier.device)
        token_ids = torch.randint(verifier.vocab_size, (2, width), generator=generator).to(verifier.device)
        result = verifier.forward(token_ids, cache, taps=(1, 4), static_length=None if width != 1 else 16)
        out += [verifier.logits(result.last_hidden_state), result.hidden_states]
    return out


def fuse(verifier: Verifier) -> int:
    return fuse_layers(verifier._decoder, verifier.layers, verifier._masks.kinds)


@pytest.mark.parametrize("kernels", [False, True], ids=["references", "kernels"])
@pytest.mark.parametrize(("family", "options"), [("llama", {}), ("llama", {"attention_bias": True, "mlp_bias": True}), ("qwen3", {})])
def test_fused_steps_compute_what_the_model_computes(
    family: str, options: dict[str, bool], kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier = tiny_verifier(family, **options)
    with torch.no_grad():  # biases and norms that are not zeros and ones
        for name, parameter in verifier.model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))).to(parameter) * 0.3)
    names = [name for name, _ in verifier.model.named_parameters()]
    expected = steps(verifier)
    if kernels and torch.cuda.is_available():
        verifier = Verifier(verifier.model.cuda(), name_or_path="on a GPU")
        assert verifier.fused_layers == verifier.num_layers
        for fused, plain in zip(steps(verifier), expected, strict=True):
            torch.testing.assert_close(fused.cpu(), plain, rtol=1e-4, atol=1e-4)
        return
    if kernels:
        on_kernels(monkeypatch, fused_layers, "attention_heads", "add_rms_norm", "rms_norm", "skinny_linear", "skinny_gated_linear")
        monkeypatch.setattr(fused_layers, "attention", attend_few)
    assert fuse(verifier) == verifier.num_layers and fuse_final_norm(verifier._final_norm)
    step, ran = fused_layers._step, []
    monkeypatch.setattr(fused_layers, "_step", lambda *arguments: ran.append(arguments[0]) or step(*arguments))
    for fused, plain in zip(steps(verifier), expected, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)
    assert ran == 3 * list(verifier.layers), "every step but the prompt's"
    assert [name for name, _ in verifier.model.named_parameters()] == names


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3", "mistral", "cohere", "phi", "granite"])
def test_layers_of_another_kind_stay_as_they_are(family: str) -> None:
    verifier = tiny_verifier(family)
    before = [type(layer) for layer in verifier.layers]
    assert fuse(verifier) == 0 and [type(layer) for layer in verifier.layers] == before
    if family in ("gemma3", "cohere", "phi"):
        assert not fuse_final_norm(verifier._final_norm)


def test_a_layer_that_computes_something_else_with_the_same_parts_stays_as_it_is() -> None:
    verifier = tiny_verifier("llama")
    own = type(verifier.layers[1])

    class Scaled(own):  # type: ignore[valid-type, misc]
        def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
            out: torch.Tensor = super().forward(hidden_states, *args, **kwargs)
            return hidden_states + 0.5 * (out - hidden_states)

    verifier.layers[1].__class__ = Scaled
    assert fuse(verifier) == verifier.num_layers - 1
    assert type(verifier.layers[1]) is Scaled and isinstance(verifier.layers[0], FusedSteps)


def test_a_copy_has_steps_of_its_own_weights() -> None:
    verifier = tiny_verifier("llama")
    fuse(verifier)
    expected = steps(verifier)
    other = Verifier(copy.deepcopy(verifier.model), name_or_path="copy")
    with torch.no_grad():
        for parameter in verifier.model.parameters():
            parameter.zero_()
    for copied, plain in zip(steps(other), expected, strict=True):
        torch.testing.assert_close(copied, plain, rtol=1e-4, atol=1e-4)


def test_a_fused_model_and_a_copy_of_it_can_be_fused_again() -> None:
    verifier = tiny_verifier("llama")
    expected = steps(verifier)
    for model in (verifier.model, verifier.model, copy.deepcopy(verifier.model)):
        again = Verifier(model, name_or_path="again")
        assert fuse(again) == again.num_layers and fuse_final_norm(again._final_norm)
        for actual, plain in zip(steps(again), expected, strict=True):
            torch.testing.assert_close(actual, plain, rtol=1e-4, atol=1e-4)
