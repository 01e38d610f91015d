"""Conversion between formats: nothing changes but names and meanings, and what does not fit is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import foreign_checkpoints as foreign
import pytest
import torch
from foreign_checkpoints import copies, deepspec_config, write
from tiny_checkpoints import config_of, frozen_embedding, reduced, tensors_of
from tiny_drafters import TAPS, decode_logits, drafter, packed_batch, verifier_weights
from tiny_models import tiny_verifier
from typer.testing import CliRunner

from speculators.checkpoint import load, save
from speculators.checkpoint.convert import FORMATS, convert, detect_format, format_names
from speculators.checkpoint.convert.fields import native_taps
from speculators.cli.main import app
from speculators.errors import CheckpointError, ConfigError, PairingError

SOURCES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "z-lab": (foreign.zlab, "dflash"),
    "deepspec dspark": (foreign.deepspec_dspark, "dspark"),
    "deepspec dflash": (foreign.deepspec_dflash, "dspark"),
    "deepspec eagle3": (foreign.deepspec_eagle3, "eagle3"),
    "safeailab": (foreign.safeailab, "eagle3"),
    "aws-peagle": (foreign.aws_peagle, "peagle"),
    "specforge dspark": (foreign.specforge, "dspark"),
    "specforge dflash": (lambda folder: foreign.specforge(folder, "dflash"), "dflash"),
}


@pytest.fixture(params=list(SOURCES))
def source(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, str]:
    """Format name, folder, algorithm."""
    make, method = SOURCES[request.param]
    return request.param.split()[0], make(tmp_path / "source"), method


# SafeAILab's format cannot be told taps: see test_default_taps_return_to_the_format_that_implies_them.
returning = pytest.mark.parametrize("source", [name for name in SOURCES if name != "safeailab"], indirect=True)


def assert_same_bytes(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


# -- every format ----------------------------------------------------------------------------------------------


def test_every_source_is_detected_and_becomes_a_loadable_drafter(source: tuple[str, Path, str], tmp_path: Path) -> None:
    name, folder, method = source
    done = convert(folder, tmp_path / "native", verifier=verifier_weights())
    assert (done.source_format, done.target_format, done.method) == (name, "speculators", method)
    assert load(tmp_path / "native", verifier_weights(torch.bfloat16)).method == method


@returning
def test_conversion_there_and_back_changes_no_byte_of_any_tensor(source: tuple[str, Path, str], tmp_path: Path) -> None:
    name, folder, _ = source
    verifier = verifier_weights()
    convert(folder, tmp_path / "native", verifier=verifier)
    convert(tmp_path / "native", tmp_path / "back", to=name, verifier=verifier)
    renamed = {key.replace("midlayer.", "layers.0."): tensor for key, tensor in tensors_of(folder).items()}
    assert_same_bytes(tensors_of(tmp_path / "back"), renamed)


def test_dtype_is_kept_and_the_config_agrees(source: tuple[str, Path, str], tmp_path: Path) -> None:
    _, folder, _ = source
    convert(folder, tmp_path / "native", verifier=verifier_weights())
    stored = {tensor.dtype for tensor in tensors_of(tmp_path / "native").values() if tensor.is_floating_point()}
    assert stored == {torch.bfloat16} and config_of(tmp_path / "native")["dtype"] == "bfloat16"


@returning
def test_keys_return_as_they_were(source: tuple[str, Path, str], tmp_path: Path) -> None:
    name, folder, _ = source
    verifier = verifier_weights()
    convert(folder, tmp_path / "native", verifier=verifier)
    convert(tmp_path / "native", tmp_path / "back", to=name, verifier=verifier)
    before, after = config_of(folder), config_of(tmp_path / "back")
    inner = before.pop("dflash_config", {})
    for key in set(before) - {"architectures", "eagle_config", "step_loss_decay"}:
        assert after[key] == before[key], key
    lifted = after | after.get("dflash_config", {})
    assert all(lifted[key] == value for key, value in inner.items())


def test_both_rope_spellings_are_written_whichever_came(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    folder = foreign.zlab(tmp_path / "old", rope_scaling=yarn)
    convert(folder, tmp_path / "native", verifier=verifier_weights())
    convert(tmp_path / "native", tmp_path / "back", to="z-lab", verifier=verifier_weights())
    for keys in (config_of(tmp_path / "native")["transformer_layer_config"], config_of(tmp_path / "back")):
        assert keys["rope_theta"] == 10000.0 and keys["rope_scaling"] == yarn
        assert keys["rope_parameters"] == {**yarn, "rope_theta": 10000.0}


# -- anchor rule and block size --------------------------------------------------------------------------------


def test_a_block_of_b_gives_b_minus_one_drafts_in_z_lab_and_b_in_deepspec(tmp_path: Path) -> None:
    convert(foreign.zlab(tmp_path / "z", block_size=6), tmp_path / "from-z", verifier=verifier_weights())
    convert(foreign.deepspec_dflash(tmp_path / "d", block_size=6), tmp_path / "from-d", verifier=verifier_weights())
    z, d = load(tmp_path / "from-z", verifier_weights()), load(tmp_path / "from-d", verifier_weights())
    assert (z.default_draft_tokens, z.max_draft_tokens, config_of(tmp_path / "from-z")["sample_from_anchor"]) == (5, 5, False)
    assert (d.default_draft_tokens, d.max_draft_tokens, config_of(tmp_path / "from-d")["sample_from_anchor"]) == (6, 6, True)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, True),
        ({"sample_from_anchor": False}, False),
        ({"dspark_bonus_anchor": True}, False),
        ({"dspark_bonus_anchor": False}, True),
        ({"shift_label": False}, False),
        ({"sample_from_anchor": True, "dspark_bonus_anchor": False}, True),
    ],
)
def test_an_explicit_anchor_key_overrules_the_formats_rule(keys: dict[str, bool], expected: bool, tmp_path: Path) -> None:
    convert(foreign.specforge(tmp_path / "source", **keys), tmp_path / "native", verifier=verifier_weights())
    config = config_of(tmp_path / "native")
    assert config["sample_from_anchor"] is expected
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == (6 if expected else 5)


def test_contradicting_anchor_keys_are_refused(tmp_path: Path) -> None:
    folder = foreign.deepspec_dspark(tmp_path / "source", sample_from_anchor=True, dspark_bonus_anchor=True)
    with pytest.raises(CheckpointError, match="sample_from_anchor = True: dspark_bonus_anchor = True says the opposite"):
        convert(folder, tmp_path / "native", verifier=verifier_weights())


@pytest.mark.parametrize("predicts", [True, False])
def test_exports_spell_the_anchor_rule_for_new_and_old_engines(predicts: bool, tmp_path: Path) -> None:
    save(drafter("dspark", markov_rank=3, sample_from_anchor=predicts), tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "out", to="specforge", verifier=verifier_weights())
    config = config_of(tmp_path / "out")
    for keys in (config, config["dflash_config"]):
        assert keys["sample_from_anchor"] is predicts and keys["dspark_bonus_anchor"] is not predicts


# -- layer ids -------------------------------------------------------------------------------------------------


def test_converted_layer_ids_read_the_outputs_that_the_foreign_ids_name() -> None:
    verifier = tiny_verifier("llama")
    outputs: dict[int, torch.Tensor] = {}
    ids = [0, verifier.num_layers - 1]
    decoder: Any = verifier.model.get_decoder()
    for index in ids:
        layer = decoder.layers[index]
        layer.register_forward_hook(
            lambda module, args, out, index=index: outputs.update({index: out[0] if isinstance(out, tuple) else out})
        )
    tokens = torch.tensor([[5, 3, 8, 1]])
    taps = native_taps({"target_layer_ids": [-1, *ids]}, "target_layer_ids", verifier.num_layers)
    read = verifier.encode(tokens, torch.arange(4)[None], torch.zeros_like(tokens), taps).hidden_states.chunk(3, dim=-1)
    assert torch.equal(read[0], verifier.weights.embed(tokens))
    assert torch.equal(read[1], outputs[ids[0]]) and torch.equal(read[2], outputs[ids[1]])


def test_layer_ids_shift_by_one_each_way_and_minus_one_is_the_embeddings(tmp_path: Path) -> None:
    folder = foreign.zlab(tmp_path / "source", dflash_config={"target_layer_ids": [-1, 2, 5], "mask_token_id": 3})
    convert(folder, tmp_path / "native", verifier=verifier_weights())
    assert config_of(tmp_path / "native")["aux_hidden_state_layer_ids"] == [0, 3, 6]
    convert(tmp_path / "native", tmp_path / "back", to="z-lab")
    assert config_of(tmp_path / "back")["dflash_config"]["target_layer_ids"] == [-1, 2, 5]


@pytest.mark.parametrize("ids", [[0, 2, 6], [-2, 0, 1]])
def test_a_layer_id_beyond_the_verifier_is_refused(ids: list[int], tmp_path: Path) -> None:
    folder = foreign.deepspec_dspark(tmp_path / "source", target_layer_ids=ids)
    with pytest.raises(CheckpointError, match=r"target_layer_ids = .* from -1 \(embeddings\) to 5 in a verifier of 6 layers"):
        convert(folder, tmp_path / "native", verifier=verifier_weights())


def test_a_verifier_of_another_depth_is_refused_naming_both(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="num_target_layers = 36: 'tiny-verifier' has 6 layers"):
        convert(foreign.zlab(tmp_path / "source", num_target_layers=36), tmp_path / "native", verifier=verifier_weights())


def test_default_taps_return_to_the_format_that_implies_them(tmp_path: Path) -> None:
    # Of an 8-layer verifier the format implies [2, 4, 5].
    verifier = replace(verifier_weights(), num_layers=8)
    folder = foreign.safeailab(tmp_path / "source", eagle_config=None)
    convert(folder, tmp_path / "native", verifier=verifier)
    assert config_of(tmp_path / "native")["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    convert(tmp_path / "native", tmp_path / "back", to="safeailab", verifier=verifier)
    assert_same_bytes(tensors_of(tmp_path / "back"), tensors_of(folder))
    with pytest.raises(CheckpointError, match="no key for taps"):
        convert(tmp_path / "native", tmp_path / "other", to="safeailab", verifier=replace(verifier, num_layers=9))


# -- meaning ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_a_deepspec_drafter_gives_the_same_logits_after_conversion(kind: str, tmp_path: Path) -> None:
    original, batch = drafter("dspark", markov_rank=3, markov_head_type=kind), packed_batch([16])
    tensors = {**original.state_dict(), **copies(torch.float32)}
    folder = write(tmp_path / "deepspec", deepspec_config(rank=3, kind=kind), tensors)
    done = convert(folder, tmp_path / "native", verifier=verifier_weights())
    assert done.dropped == ("embed_tokens.weight", "lm_head.weight")
    converted = load(tmp_path / "native", verifier_weights())
    expected = decode_logits(original, batch, 8, 5, [8])
    assert torch.equal(decode_logits(converted, batch, 8, 5, [8]), expected)


def test_an_eagle3_drafter_keeps_its_logits_through_the_safeailab_format(tmp_path: Path) -> None:
    verifier = replace(verifier_weights(), num_layers=8)
    original, batch = drafter("eagle3", num_layers=1, norm_before_fc=False, aux_hidden_state_layer_ids=[2, 4, 5]), packed_batch([16])
    save(original, tmp_path / "native", dtype="float32")
    convert(tmp_path / "native", tmp_path / "foreign", to="safeailab", verifier=verifier)
    assert not any(name.startswith("layers.") for name in tensors_of(tmp_path / "foreign"))
    convert(tmp_path / "foreign", tmp_path / "again", verifier=verifier)
    restored = load(tmp_path / "again", verifier)
    assert torch.equal(decode_logits(restored, batch, 8, 5, [8]), decode_logits(original, batch, 8, 5, [8]))


def test_a_peagle_drafter_keeps_its_logits_through_the_aws_format(tmp_path: Path) -> None:
    original, batch = drafter("peagle", norm_before_fc=False), packed_batch([16])
    save(original, tmp_path / "native", dtype="float32")
    convert(tmp_path / "native", tmp_path / "aws", to="aws-peagle", verifier=verifier_weights())
    convert(tmp_path / "aws", tmp_path / "again", verifier=verifier_weights())
    restored = load(tmp_path / "again", verifier_weights())
    assert restored.default_draft_tokens == 5 and list(restored.aux_hidden_state_layer_ids) == TAPS
    assert torch.equal(decode_logits(restored, batch, 8, 5, [8]), decode_logits(original, batch, 8, 5, [8]))


@pytest.mark.parametrize("layers", [2, 3])
def test_deepspecs_layout_counts_the_taps_for_vllm_where_they_are_not_as_many_as_the_layers(layers: int, tmp_path: Path) -> None:
    """vLLM 0.26 takes the drafter's layers for the number of taps unless `eagle_config.layer_ids` says otherwise."""
    save(drafter("dspark", num_layers=layers), tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "deepspec", to="deepspec", verifier=verifier_weights())
    assert len(TAPS) == 3 and config_of(tmp_path / "deepspec").get("eagle_config") == (None if layers == 3 else {"layer_ids": TAPS})
    convert(tmp_path / "deepspec", tmp_path / "again", verifier=verifier_weights())
    again = config_of(tmp_path / "again")
    assert again["aux_hidden_state_layer_ids"] == TAPS and "eagle_config" not in again


def test_causal_blocks_stay_causal(tmp_path: Path) -> None:
    save(drafter("dflash", is_causal=True), tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "z", to="z-lab", verifier=verifier_weights())
    assert config_of(tmp_path / "z")["dflash_config"]["causal"] is True
    convert(tmp_path / "z", tmp_path / "again", verifier=verifier_weights())
    assert config_of(tmp_path / "again")["is_causal"] is True


# -- embedded heads --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [foreign.deepspec_dspark, foreign.deepspec_eagle3])
@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_an_embedded_table_that_is_not_the_verifiers_is_an_error(name: str, make: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = make(tmp_path / "source")
    tensors = tensors_of(folder)
    tensors[name][17] += 1
    write(folder, config_of(folder), tensors)
    with pytest.raises((PairingError, CheckpointError), match=rf"{name} .* in row 17"):
        convert(folder, tmp_path / "native", verifier=verifier_weights())
    assert not (tmp_path / "native").exists()


def test_without_a_verifier_the_copies_stay_and_are_compared_when_paired(tmp_path: Path) -> None:
    folder = foreign.deepspec_dspark(tmp_path / "source", target_model_name_or_path="tiny-verifier")
    convert(folder, tmp_path / "native")
    assert {"embed_tokens.weight", "lm_head.weight"} <= tensors_of(tmp_path / "native").keys()
    load(tmp_path / "native", verifier_weights())
    with pytest.raises(PairingError):
        load(tmp_path / "native", verifier_weights(seed=9))


def test_an_embedding_that_eagle3_trained_itself_is_kept_as_its_own(tmp_path: Path) -> None:
    folder = foreign.safeailab(tmp_path / "source")
    table = copies()["embed_tokens.weight"] + 1
    write(folder, config_of(folder), {**tensors_of(folder), "embed_tokens.weight": table})
    convert(folder, tmp_path / "native", verifier=verifier_weights())
    assert config_of(tmp_path / "native")["embed_requires_grad"] is True
    assert torch.equal(tensors_of(tmp_path / "native")["embed_tokens.weight"], table)


def test_a_head_that_eagle3_trained_itself_is_kept_as_its_own(tmp_path: Path) -> None:
    own = torch.randn(20, 32, generator=torch.Generator().manual_seed(3)).bfloat16()
    folder = foreign.safeailab(tmp_path / "source", head=own)
    convert(folder, tmp_path / "native", verifier=verifier_weights())
    assert config_of(tmp_path / "native")["lm_head_requires_grad"] is True
    drafter_of_its_own = load(tmp_path / "native", verifier_weights(torch.bfloat16))
    assert torch.equal(drafter_of_its_own.get_parameter("lm_head.weight"), own)


def test_a_source_with_d2t_alone_gets_the_t2d_that_follows_from_it(tmp_path: Path) -> None:
    folder = foreign.safeailab(tmp_path / "source")
    tensors = tensors_of(folder)
    t2d = tensors.pop("t2d")
    write(folder, config_of(folder), tensors)
    convert(folder, tmp_path / "native", verifier=verifier_weights())
    assert torch.equal(tensors_of(tmp_path / "native")["t2d"], t2d)


def test_absolute_ids_in_d2t_are_refused(tmp_path: Path) -> None:
    folder = foreign.safeailab(tmp_path / "source")
    tensors = tensors_of(folder)
    write(folder, config_of(folder), tensors | {"d2t": tensors["t2d"].nonzero().flatten()})
    with pytest.raises(CheckpointError, match="verifier ids instead of offsets"):
        convert(folder, tmp_path / "native", verifier=verifier_weights())


def test_a_sharded_source_converts_like_a_single_file(tmp_path: Path) -> None:
    save(drafter("dspark", markov_rank=3), tmp_path / "single")
    save(drafter("dspark", markov_rank=3), tmp_path / "sharded", max_shard_bytes=20_000)
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    for name in ("single", "sharded"):
        convert(tmp_path / name, tmp_path / f"{name}-out", to="deepspec", verifier=verifier_weights())
    assert_same_bytes(tensors_of(tmp_path / "sharded-out"), tensors_of(tmp_path / "single-out"))


def test_include_shared_expands_a_compact_checkpoint_to_the_full_form(tmp_path: Path) -> None:
    speculator = frozen_embedding("peagle")
    save(speculator, tmp_path / "compact", form="compact", dtype="float32")
    save(speculator, tmp_path / "full", dtype="float32")
    done = convert(tmp_path / "compact", tmp_path / "expanded", verifier=verifier_weights(), include_shared=True)
    assert done.added == ("embed_tokens.weight", "lm_head.weight")
    assert_same_bytes(tensors_of(tmp_path / "expanded"), tensors_of(tmp_path / "full"))
    assert config_of(tmp_path / "expanded") == config_of(tmp_path / "full")
    load(tmp_path / "expanded")


def test_a_compact_checkpoint_is_not_expanded_from_another_verifier(tmp_path: Path) -> None:
    save(frozen_embedding("peagle"), tmp_path / "compact", form="compact")
    with pytest.raises(PairingError, match="borrows the embedding"):
        convert(tmp_path / "compact", tmp_path / "full", verifier=verifier_weights(seed=9), include_shared=True)
    with pytest.raises(CheckpointError, match="give the verifier"):
        convert(tmp_path / "compact", tmp_path / "full", include_shared=True)


# -- what a format cannot hold ---------------------------------------------------------------------------------

REFUSALS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "Markov head": (lambda: drafter("dspark", markov_rank=3, enable_confidence_head=False), "z-lab", "Markov head of rank 3"),
    "confidence head": (lambda: drafter("dspark", markov_rank=0), "z-lab", "confidence head"),
    "predicting anchor": (lambda: drafter("dflash", sample_from_anchor=True), "z-lab", "anchor slot predicts"),
    "conditioning anchor": (lambda: drafter("dflash"), "deepspec", "anchor slot only conditions"),
    "reduced vocabulary in z-lab": (lambda: reduced("dflash"), "z-lab", "20 of 61 tokens"),
    "reduced vocabulary in DeepSpec": (lambda: reduced("dspark", markov_rank=3), "deepspec", "20 of 61 tokens"),
    "reduced vocabulary in SpecForge": (lambda: reduced("dflash"), "specforge", "20 of 61 tokens"),
    "sliding window": (lambda: drafter("dspark", sliding_window=4), "deepspec", "sliding windows"),
    "causal block": (lambda: drafter("dspark", is_causal=True), "deepspec", "causally"),
    "norm before fc": (lambda: drafter("eagle3", num_layers=1), "safeailab", "norm_before_fc"),
    "norm per tap": (lambda: drafter("peagle", norm_before_fc=False, fc_norm=True), "aws-peagle", "fc_norm"),
    "normed feedback": (lambda: drafter("eagle3", num_layers=1, norm_before_fc=False, norm_output=True), "safeailab", "norm_output"),
    "two layers": (lambda: drafter("eagle3", norm_before_fc=False), "safeailab", "2 layers"),
    "other taps": (lambda: drafter("eagle3", num_layers=1, norm_before_fc=False), "safeailab", "no key for taps"),
    "Llama layers": (lambda: drafter("eagle3", num_layers=1, norm_before_fc=False), "deepspec", "Llama layers"),
    "another algorithm": (lambda: drafter("eagle3"), "z-lab", "eagle3 drafter"),
    "autoregressive": (lambda: drafter("eagle3"), "aws-peagle", "eagle3 drafter"),
    "parallel": (lambda: drafter("peagle"), "safeailab", "peagle drafter"),
    "own head": (lambda: drafter("eagle3", num_layers=1, norm_before_fc=False, train_head=True), "deepspec", "its own output head"),
}


@pytest.mark.parametrize("case", list(REFUSALS))
def test_what_a_format_cannot_hold_is_refused_in_one_sentence_and_nothing_is_written(case: str, tmp_path: Path) -> None:
    make, target, reason = REFUSALS[case]
    save(make(), tmp_path / "native")
    with pytest.raises(CheckpointError, match=rf"cannot convert to the .* format: .*{reason}") as error:
        convert(tmp_path / "native", tmp_path / "out", to=target, verifier=verifier_weights())
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["native"]


def test_a_markov_head_is_refused_between_foreign_formats_too(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="Markov head of rank 3"):
        convert(foreign.deepspec_dspark(tmp_path / "source"), tmp_path / "z", to="z-lab", verifier=verifier_weights())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dflash_config": {"target_layer_ids": [0, 2, 5], "mask_token_id": 3, "use_swa": True}}, "dflash_config.use_swa = True"),
        ({"dflash_config": {"target_layer_ids": [0, 2, 5]}}, "mask_token_id = None"),
        ({"dflash_config": {"target_layer_ids": [2, 0, 5], "mask_token_id": 3}}, "unique, ascending"),
        ({"dflash_config": {"target_layer_ids": [0, 5], "mask_token_id": 3}}, "fc.weight"),
        ({"dflash_config": {"target_layer_ids": [0, 2, 5], "mask_token_id": 3, "block_size": 16}}, "contradicts"),
        ({"rope_theta": None}, "rope_parameters"),
        ({"rope_theta": "10000"}, "rope_theta '10000' must be a positive number"),
        ({"rope_scaling": 4}, "rope_scaling 4 must be an object"),
        ({"dflash_config": [0, 2, 5]}, "no drafter checkpoint of a format known here"),
    ],
)
def test_a_source_that_contradicts_itself_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        convert(foreign.zlab(tmp_path / "source", **change), tmp_path / "native", verifier=verifier_weights())
    assert not (tmp_path / "native").exists()


def test_a_bias_of_fc_passes_only_when_it_is_zero(tmp_path: Path) -> None:
    folder = foreign.zlab(tmp_path / "source")
    tensors = tensors_of(folder)
    bias = torch.zeros(32, dtype=torch.bfloat16)
    write(folder, config_of(folder), {**tensors, "fc.bias": bias})
    convert(folder, tmp_path / "zero", verifier=verifier_weights())
    assert "fc.bias" not in tensors_of(tmp_path / "zero")
    write(folder, config_of(folder), {**tensors, "fc.bias": bias + 1})
    with pytest.raises(CheckpointError, match=r"fc\.bias = up to 1"):
        convert(folder, tmp_path / "other", verifier=verifier_weights())


def test_gemma_layers_of_deepspec_are_refused_as_what_they_are(tmp_path: Path) -> None:
    folder = foreign.deepspec_dspark(tmp_path / "source", architectures=["Gemma4DSparkModel"])
    write(folder, config_of(folder), {**tensors_of(folder), "layers.0.layer_scalar": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"Gemma4DSparkModel.*no algorithm here has"):
        convert(folder, tmp_path / "native", verifier=verifier_weights())


def test_a_source_that_names_no_verifier_needs_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not name the verifier of this z-lab DFlash drafter"):
        convert(foreign.zlab(tmp_path / "source"), tmp_path / "native")


def test_converting_to_the_same_format_or_place_or_an_unknown_format_is_refused(tmp_path: Path) -> None:
    folder = foreign.zlab(tmp_path / "source")
    with pytest.raises(CheckpointError, match="already is in the z-lab format"):
        convert(folder, tmp_path / "out", to="z-lab")
    with pytest.raises(CheckpointError, match="is the source itself"):
        convert(folder, folder, verifier=verifier_weights())
    with pytest.raises(ConfigError, match="'onnx'; choose one of speculators, z-lab"):
        convert(folder, tmp_path / "out", to="onnx")


@pytest.mark.parametrize("present", ["config.json", "model.safetensors"])
def test_converting_onto_a_model_is_refused_and_leaves_it_alone(present: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / present).write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=rf"model holds a model \({present}\), which the converted one would replace"):
        convert(foreign.zlab(tmp_path / "source"), tmp_path / "model", verifier=verifier_weights())
    assert [(file.name, file.read_bytes()) for file in (tmp_path / "model").iterdir()] == [(present, b"{}")]


# -- detection and the command ---------------------------------------------------------------------------------


def test_a_language_model_is_no_drafter() -> None:
    with pytest.raises(CheckpointError, match="no drafter checkpoint of a format known here"):
        detect_format({"model_type": "llama"}, ["model.embed_tokens.weight"], "folder")


def test_no_two_formats_claim_the_same_checkpoint(source: tuple[str, Path, str]) -> None:
    name, folder, _ = source
    claims = [adapter.name for adapter in FORMATS if adapter.detect(config_of(folder), tensors_of(folder).keys())]
    assert claims == [name]


def test_the_command_converts_and_writes_json(tmp_path: Path) -> None:
    folder = foreign.zlab(tmp_path / "source", target_model_name_or_path="tiny-verifier")
    arguments = ["convert", str(folder), str(tmp_path / "native"), "--json", str(tmp_path / "result.json")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "dflash drafter for tiny-verifier, from z-lab to speculators, 5 draft tokens" in result.output
    written = json.loads((tmp_path / "result.json").read_text())
    assert (written["source_format"], written["target_format"], written["num_draft_tokens"]) == ("z-lab", "speculators", 5)


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_the_command_says_in_one_line_that_there_is_no_checkpoint(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    result = CliRunner().invoke(app, ["convert", str(tmp_path / name), str(tmp_path / "out")])
    assert result.exit_code == 2 and result.output.startswith("error: ") and result.output.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_help_names_every_format() -> None:
    text = CliRunner().invoke(app, ["convert", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    assert all(name in text for name in format_names())
