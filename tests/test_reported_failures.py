"""What the public reported broken in checkpoints and vocabulary mappings of other libraries, where no other test says it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_checkpoints import config_of, edit_config, edit_layers, tensors_of
from tiny_drafters import HIDDEN, decode_logits, drafter, packed_batch, verifier_weights
from tiny_models import tiny_verifier
from torch import Tensor

from speculators.checkpoint import load, save
from speculators.decoding.engine import generate
from speculators.decoding.sampling import SamplingParams
from speculators.errors import CheckpointError, ConfigError
from speculators.kernels.distillation_loss import distillation_loss
from speculators.kernels.markov_sampling import TableFactors
from speculators.registry import get_algorithm

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"

# -- vocabulary mapping ----------------------------------------------------------------------------------------


def test_targets_are_compared_over_the_draft_vocabulary() -> None:
    """Draft logits equal to the verifier's rows 0, 3, 7: nothing is lost but the probability of what cannot be proposed."""
    hidden, head, rows = torch.randn(4, 6), torch.randn(10, 6), torch.tensor([0, 3, 7])
    labels = torch.tensor([3, 0, 7, 3])
    out = distillation_loss(hidden, head, hidden, labels, torch.ones(4), cross_entropy=1.0, l1=1.0, kl=1.0, draft_rows=rows)
    q = (hidden @ head.T).softmax(-1)
    kept = q[:, rows].sum(-1)
    torch.testing.assert_close(out.kl, torch.zeros(4), atol=1e-6, rtol=0)
    torch.testing.assert_close(out.acceptance, kept)
    torch.testing.assert_close(out.cross_entropy, -(q.gather(1, labels[:, None])[:, 0] / kept).log())


def test_the_markov_table_is_asked_for_verifier_tokens_not_for_draft_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = tiny_verifier("llama")
    kept = torch.arange(1, 64, 3)
    options: dict[str, Any] = {"num_layers": 1, "num_draft_tokens": 4, "aux_hidden_state_layer_ids": [1, 2], "mask_token_id": 3}
    speculator = get_algorithm("dspark").speculator_class.from_verifier(
        verifier.weights, **options, draft_vocab_size=len(kept), markov_rank=4, enable_confidence_head=False
    )
    speculator.set_draft_vocabulary(kept)
    asked: list[Tensor] = []
    look_up = TableFactors.__call__

    def recorded(factors: TableFactors, k: int, previous: Tensor) -> Tensor:
        asked.append(previous.clone())
        return look_up(factors, k, previous)

    monkeypatch.setattr(TableFactors, "__call__", recorded)
    reply = generate(verifier, speculator.eval(), [[5, 9, 11]], SamplingParams(max_new_tokens=12, ignore_eos=True)).token_ids[0]
    drafted = {int(token) for ids in asked for token in ids.flatten()} - set(reply)  # anchors are the verifier's own tokens
    assert len(asked) > 8 and drafted and drafted <= set(kept.tolist())


# -- layer ids -------------------------------------------------------------------------------------------------


def test_the_last_hidden_state_is_never_one_of_the_taps_unless_it_is_asked_for() -> None:
    verifier = tiny_verifier("llama")
    ids = torch.tensor([[5, 3, 8, 1]])
    arguments = ids, torch.arange(4)[None], torch.zeros_like(ids)
    two, three = verifier.encode(*arguments, [1, 2]), verifier.encode(*arguments, [1, 2, verifier.num_layers])
    assert two.hidden_states.shape[-1] == 2 * HIDDEN and three.hidden_states.shape[-1] == 3 * HIDDEN
    assert torch.equal(three.hidden_states[..., : 2 * HIDDEN], two.hidden_states)
    assert torch.equal(three.hidden_states[..., 2 * HIDDEN :], three.last_hidden_state)
    assert torch.equal(two.last_hidden_state, three.last_hidden_state)


# -- what a file repeats of the verifier -----------------------------------------------------------------------


@pytest.mark.parametrize("left_out", [(), (EMBEDDING,), (HEAD,), (EMBEDDING, HEAD)], ids=["neither", "embedding", "head", "both"])
@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_embedding_and_head_may_be_in_the_file_or_not(method: str, left_out: tuple[str, ...], tmp_path: Path) -> None:
    speculator, batch, verifier = drafter(method), packed_batch([16]), verifier_weights()
    save(speculator, tmp_path, dtype="float32")
    stored = tensors_of(tmp_path) | {EMBEDDING: verifier.embedding, HEAD: verifier.head}
    save_file({name: tensor for name, tensor in stored.items() if name not in left_out}, tmp_path / "model.safetensors")
    expected = decode_logits(speculator, batch, 8, 5, [8])
    assert torch.equal(decode_logits(load(tmp_path, verifier), batch, 8, 5, [8]), expected)
    alone = load(tmp_path)
    alone.attach(verifier)
    assert torch.equal(decode_logits(alone, batch, 8, 5, [8]), expected)


def narrow(method: str = "eagle3", **keys: Any) -> Any:
    """A drafter half as wide as its verifier."""
    config = drafter(method).config.model_dump()
    config["transformer_layer_config"] |= {"hidden_size": 16, "head_dim": 4}
    return get_algorithm(method).speculator_class.config_class.parse(config | {"target_hidden_size": HIDDEN} | keys)


def test_a_drafter_of_another_width_than_its_verifier_keeps_its_own_embedding_and_head(tmp_path: Path) -> None:
    config = narrow(embed_requires_grad=True, lm_head_requires_grad=True)
    torch.manual_seed(0)
    speculator = get_algorithm("eagle3").speculator_class(config)
    speculator.attach(verifier_weights())
    save(speculator, tmp_path, dtype="float32")
    assert tensors_of(tmp_path)[EMBEDDING].shape == tensors_of(tmp_path)[HEAD].shape == (61, 16)
    restored, batch = load(tmp_path, verifier_weights()), packed_batch([16])
    assert torch.equal(decode_logits(restored, batch, 8, 5, [8]), decode_logits(speculator, batch, 8, 5, [8]))


@pytest.mark.parametrize(("method", "keys"), [("eagle3", {"embed_requires_grad": True}), ("dflash", {})])
def test_a_drafter_of_another_width_cannot_borrow(method: str, keys: dict[str, Any], tmp_path: Path) -> None:
    config = narrow(method, **keys)
    save(drafter(method), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
    with pytest.raises(CheckpointError, match=r"config\.json: target_hidden_size = 32: .* 16 wide, .*embedding and head of its own"):
        load(tmp_path, verifier_weights())


def test_a_quantised_sibling_of_the_verifier_is_as_good(tmp_path: Path) -> None:
    save(drafter("eagle3"), tmp_path)
    sibling = verifier_weights()
    packed = sibling.config | {"quantization_config": {"quant_method": "fp8"}}
    paired = load(tmp_path, replace(sibling, name_or_path="org/verifier-FP8", config=packed))
    assert paired.is_attached
    again = type(paired).from_verifier(replace(sibling, config=packed), num_layers=1, aux_hidden_state_layer_ids=[1, 4])
    save(again, tmp_path / "again")
    assert "quantization_config" not in json.dumps(config_of(tmp_path / "again"))


# -- keys ------------------------------------------------------------------------------------------------------


def test_of_a_rope_for_each_layer_type_the_drafters_own_is_read_and_none_is_made_up(tmp_path: Path) -> None:
    save(drafter("dflash", sliding_window=8), tmp_path)
    local, everywhere = ({"rope_type": "default", "rope_theta": theta} for theta in (10000.0, 1e6))
    edit_layers(tmp_path, ("rope_theta",), rope_parameters={"sliding_attention": local, "full_attention": everywhere})
    assert load(tmp_path).config.layers.rope_parameters == local
    edit_layers(tmp_path, rope_parameters={"sliding_attention": {"rope_type": "default"}, "full_attention": everywhere})
    with pytest.raises(CheckpointError, match="rope_parameters must hold rope_theta"):
        load(tmp_path)


@pytest.mark.parametrize(("method", "block", "tokens"), [("dflash", 8, 7), ("dspark", 8, 8)])
def test_a_block_of_eight_drafts_seven_tokens_or_eight(method: str, block: int, tokens: int, tmp_path: Path) -> None:
    save(drafter(method, num_draft_tokens=tokens), tmp_path)
    config = config_of(tmp_path)
    assert config["block_size"] == block and config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == tokens


def test_a_confidence_head_without_the_markov_table_it_reads_is_refused(tmp_path: Path) -> None:
    save(drafter("dspark"), tmp_path)
    edit_config(tmp_path, markov_rank=0)
    with pytest.raises(CheckpointError, match=r"config\.json: confidence_head_with_markov needs markov_rank of at least 1"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="confidence_head_with_markov needs markov_rank"):
        type(drafter("dspark")).config_class.parse(config_of(tmp_path))
