"""Training that starts from another drafter: what comes from its checkpoint, what is new, and what may be changed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import config_of, edit_config
from tiny_models import tiny_verifier
from tiny_training import packed_rows, tiny_config

from speculators.checkpoint.calibration import store_calibrations
from speculators.data.rows import PackedRows
from speculators.decoding.calibration import Calibration
from speculators.errors import ConfigError, PairingError, TrainingInterrupted
from speculators.registry import algorithms, get_algorithm
from speculators.speculator import Speculator
from speculators.training.build import build_speculator, most_frequent_tokens
from speculators.training.trainer import train
from speculators.verifier import Verifier

BLOCK: dict[str, Any] = {"num_layers": 2, "num_draft_tokens": 3, "aux_hidden_state_layer_ids": [0, 3], "mask_token_id": 5}
CHAIN: dict[str, Any] = {"num_layers": 1, "num_draft_tokens": 3, "aux_hidden_state_layer_ids": [0, 3]}
OPTIONS = {"dflash": BLOCK, "dspark": BLOCK, "eagle3": CHAIN, "peagle": {**CHAIN, "mask_token_id": 5}}


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return tiny_verifier("llama")


def first(verifier: Verifier, method: str, rows: PackedRows | None = None, **options: Any) -> Speculator:
    """A drafter to start from, its weights drawn with another seed than those of the runs below."""
    config = tiny_config(method=method, options={**OPTIONS[method], **options}, seed=3)
    return build_speculator(config, verifier, packed_rows() if rows is None else rows, None)


def started(verifier: Verifier, method: str, start: Speculator | Path, rows: PackedRows | None = None, **options: Any) -> Speculator:
    config = tiny_config(method=method, options=options)
    return build_speculator(config, verifier, packed_rows(seed=7) if rows is None else rows, start)


def interrupt_after(steps: int) -> Callable[[dict[str, Any]], None]:
    def stop(record: dict[str, Any]) -> None:
        if record["step"] == steps:
            os.kill(os.getpid(), signal.SIGTERM)

    return stop


def new_names(speculator: Speculator, start: Speculator) -> set[str]:
    """Tensors the start does not have, after checking that the others are its own."""
    weights, theirs = speculator.state_dict(), start.state_dict()
    assert theirs.keys() <= weights.keys()
    for name, tensor in theirs.items():
        assert torch.equal(weights[name], tensor), name
    return weights.keys() - theirs.keys()


# -- what is copied and what is new ------------------------------------------------------------------------------


@pytest.mark.parametrize("anchor", [False, True])
def test_dspark_takes_backbone_and_anchor_rule_of_a_dflash_drafter(anchor: bool, verifier: Verifier) -> None:
    start = first(verifier, "dflash", sample_from_anchor=anchor)
    speculator: Any = started(verifier, "dspark", start, markov_rank=4)
    assert new_names(speculator, start) == {
        *("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"),
        *("confidence_head.proj.weight", "confidence_head.proj.bias"),
    }
    config = speculator.config
    assert (config.sample_from_anchor, config.block_size, config.mask_token_id) == (anchor, 3 + (not anchor), 5)
    assert (config.num_draft_tokens, config.max_draft_tokens, config.tapped_layers, config.markov_rank) == (3, 3, [0, 3], 4)
    assert config.speculators_model_type == config.speculators_config.algorithm == "dspark"
    assert config.architectures == ["DSparkDraftModel"]
    assert config.training_options.l1 == 0.9, "its own objective, not DFlash's"


def test_keys_a_dflash_file_leaves_out_mean_what_they_mean_for_dflash(verifier: Verifier, tmp_path: Path) -> None:
    first(verifier, "dflash", num_draft_tokens=7).save_pretrained(tmp_path, dtype="float32")
    data = {key: value for key, value in config_of(tmp_path).items() if key not in ("sample_from_anchor", "block_size")}
    (tmp_path / "config.json").write_text(json.dumps(data))
    config: Any = started(verifier, "dspark", tmp_path, markov_rank=4).config
    assert (config.sample_from_anchor, config.block_size) == (False, 8), "DSpark's own defaults are True and 7"


def test_peagle_takes_the_backbone_of_an_eagle3_drafter_and_the_embedding_of_the_verifier(verifier: Verifier) -> None:
    start = first(verifier, "eagle3")
    speculator: Any = started(verifier, "peagle", start, num_draft_tokens=5)
    assert new_names(speculator, start) == {"mask_hidden", "embed_tokens.weight"}
    assert torch.equal(speculator.embed_tokens.weight, verifier.weights.embedding)
    assert float(speculator.mask_hidden.detach().std()) == pytest.approx(1.0, abs=0.4)
    assert (speculator.config.num_draft_tokens, speculator.config.training_options.num_depths) == (5, 5)
    assert speculator.config.layers.num_hidden_layers == 1, "the checkpoint's depth, not P-EAGLE's default of 4"
    kept: Any = started(verifier, "peagle", start, train_embedding=False)
    assert new_names(kept, start) == {"mask_hidden"}


@pytest.mark.parametrize("method", sorted(OPTIONS))
def test_the_same_method_continues_with_every_tensor_and_setting(method: str, verifier: Verifier, tmp_path: Path) -> None:
    start = first(verifier, method)
    assert new_names(started(verifier, method, start), start) == set()
    start.save_pretrained(tmp_path, dtype="float32")
    edit_config(tmp_path, somebody_elses_key=[1, 2])
    again = started(verifier, method, tmp_path)
    assert new_names(again, start) == set()
    assert getattr(again.config, "somebody_elses_key") == [1, 2]  # noqa: B009
    assert again.config.model_dump(exclude={"somebody_elses_key"})["transformer_layer_config"]["rope_theta"] == 10000.0


def test_a_calibration_stays_behind_with_the_weights_it_was_fitted_to(verifier: Verifier, tmp_path: Path) -> None:
    start = first(verifier, "dspark")
    start.save_pretrained(tmp_path)
    fitted = Calibration(0.0, "all", "head", (1.5, 2.0, 1.0), (0.0, 0.0, 0.0), (0.7, 0.6, 0.5), rounds=100)
    edit_config(tmp_path, unified_speculators={"note": "kept"})
    store_calibrations(tmp_path, [fitted])
    assert Speculator.from_pretrained(tmp_path, verifier.weights).calibrations == [fitted]
    again = started(verifier, "dspark", tmp_path)
    assert again.calibrations == [] and getattr(again.config, "unified_speculators") == {"note": "kept"}  # noqa: B009


def test_a_float32_checkpoint_starts_training_in_float32_under_a_bfloat16_verifier(verifier: Verifier, tmp_path: Path) -> None:
    start = first(verifier, "dflash")
    start.save_pretrained(tmp_path, dtype="float32")
    coarse = tiny_verifier("llama", dtype=torch.bfloat16)
    assert new_names(started(coarse, "dflash", tmp_path), start) == set()


def test_a_start_trains_and_its_checkpoint_says_what_it_is(verifier: Verifier, tmp_path: Path) -> None:
    start = first(verifier, "dflash", training={"anchors": 4})
    config = tiny_config(method="dspark", steps=2, output=tmp_path / "run", options={"markov_rank": 4, "training": {"anchors": 4}})
    trained = train(verifier, packed_rows(), config, init_from=start)
    assert not torch.equal(trained.state_dict()["fc.weight"], start.state_dict()["fc.weight"])
    written = config_of(tmp_path / "run")
    assert (written["speculators_model_type"], written["sample_from_anchor"], written["block_size"]) == ("dspark", False, 4)
    assert Speculator.from_pretrained(tmp_path / "run", verifier.weights).method == "dspark"


def test_a_run_that_started_from_a_drafter_resumes_without_it(verifier: Verifier, tmp_path: Path) -> None:
    start = first(verifier, "dflash", training={"anchors": 4}, draft_vocab_size=16)
    options = {"markov_rank": 4, "training": {"anchors": 4}}

    def run(output: Path, steps: int, **arguments: Any) -> Speculator:
        config = tiny_config(method="dspark", steps=4, output=output, options=options)
        stop = None if steps == 4 else interrupt_after(steps)
        return train(verifier, packed_rows(), config, on_record=stop, **arguments)

    whole = run(tmp_path / "whole", 4, init_from=start)
    with pytest.raises(TrainingInterrupted):
        run(tmp_path / "parts", 2, init_from=start)
    resumed = run(tmp_path / "parts", 4, resume=True)
    assert resumed.aux_hidden_state_layer_ids == (0, 3)
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], tensor, rtol=0, atol=0)


# -- what the checkpoint decides ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), [("dflash", "dflash"), ("dflash", "dspark"), ("eagle3", "peagle")])
def test_the_vocabulary_mapping_is_the_checkpoints_whatever_the_new_data_uses(source: str, target: str, verifier: Verifier) -> None:
    old, new = packed_rows(seed=0), packed_rows(seed=7, vocab_size=30)
    start = first(verifier, source, rows=old, draft_vocab_size=16)
    mapping = most_frequent_tokens(old, 16, 64)
    assert not torch.equal(mapping, most_frequent_tokens(new, 16, 64)), "or this test shows nothing"
    speculator = started(verifier, target, start, rows=new)
    assert torch.equal(speculator.draft_token_ids(), mapping)
    assert torch.equal(started(verifier, target, start, rows=new, draft_vocab_size=16).draft_token_ids(), mapping)
    with pytest.raises(ConfigError, match=r"draft_vocab_size = 20 contradicts .* trained with draft_vocab_size = 16"):
        started(verifier, target, start, rows=new, draft_vocab_size=20)


@pytest.mark.parametrize(
    ("source", "target", "option", "wanted", "has"),
    [
        ("dflash", "dflash", "aux_hidden_state_layer_ids", [1, 3], [0, 3]),
        ("dflash", "dspark", "aux_hidden_state_layer_ids", [1, 3], [0, 3]),
        ("eagle3", "peagle", "aux_hidden_state_layer_ids", [0, 4], [0, 3]),
        ("dflash", "dspark", "sample_from_anchor", True, False),
        ("dspark", "dspark", "sample_from_anchor", False, True),
        ("dflash", "dspark", "num_draft_tokens", 7, 3),
        ("dflash", "dspark", "num_layers", 5, 2),
        ("dflash", "dflash", "mask_token_id", 6, 5),
        ("dflash", "dflash", "sliding_window", 8, None),
        ("dspark", "dspark", "markov_rank", 8, 256),
        ("dspark", "dspark", "markov_head_type", "rnn", "vanilla"),
        ("eagle3", "peagle", "norm_before_fc", False, True),
    ],
)
def test_a_contradicting_option_is_refused_naming_both_values(
    source: str, target: str, option: str, wanted: object, has: object, verifier: Verifier
) -> None:
    start = first(verifier, source)
    with pytest.raises(ConfigError) as raised:
        started(verifier, target, start, **{option: wanted})
    message = str(raised.value)
    assert f"{target} option {option} = {wanted!r} contradicts the {source} checkpoint" in message
    assert f"trained with {option} = {has!r}; leave the option out" in message


@pytest.mark.parametrize(("source", "target"), [("dflash", "dspark"), ("dspark", "dspark"), ("eagle3", "peagle"), ("eagle3", "eagle3")])
def test_options_that_repeat_the_checkpoint_are_no_contradiction(source: str, target: str, verifier: Verifier) -> None:
    start = first(verifier, source)
    repeated = {name: value for name, value in OPTIONS[source].items() if name != "mask_token_id" or source != "eagle3"}
    speculator = started(verifier, target, start, **repeated)
    assert speculator.config.tapped_layers == [0, 3]


# -- what may be changed -----------------------------------------------------------------------------------------


def test_the_objective_may_be_changed_and_what_is_not_named_stays(verifier: Verifier) -> None:
    start = first(verifier, "dflash", training={"anchors": 4, "cross_entropy": 0.5})
    speculator: Any = started(verifier, "dflash", start, training={"cross_entropy": 0.25})
    assert (speculator.config.training_options.anchors, speculator.config.training_options.cross_entropy) == (4, 0.25)
    assert start.config.training_options.cross_entropy == 0.5  # type: ignore[attr-defined]


def test_eagle3_may_draft_and_unroll_another_number_of_tokens(verifier: Verifier) -> None:
    start = first(verifier, "eagle3", training={"anchors": 4})
    speculator: Any = started(verifier, "eagle3", start, num_draft_tokens=6)
    options = speculator.config.training_options
    assert (speculator.config.num_draft_tokens, options.passes, options.anchors) == (6, 6, 4)


def test_a_trained_embedding_is_not_thrown_away(verifier: Verifier) -> None:
    start = first(verifier, "peagle")
    with pytest.raises(ConfigError, match=r"\['train_embedding'\] leave embed_tokens.weight of the peagle drafter"):
        started(verifier, "peagle", start, train_embedding=False)


def test_an_unknown_option_is_refused_as_for_a_new_drafter(verifier: Verifier) -> None:
    with pytest.raises(ConfigError, match="dspark has no option 'markov'"):
        started(verifier, "dspark", first(verifier, "dflash"), markov=3)


# -- who may start from whom -------------------------------------------------------------------------------------


def test_every_method_declares_what_it_can_start_from() -> None:
    declared = {name: get_algorithm(name).speculator_class.warm_start_from for name in OPTIONS}
    assert declared == {"dflash": (), "dspark": ("dflash",), "eagle3": (), "peagle": ("eagle3",)}
    assert all(set(sources) <= algorithms().keys() for sources in declared.values())


@pytest.mark.parametrize(("source", "target", "possible"), [("dspark", "dflash", "dflash"), ("dflash", "peagle", "peagle or eagle3")])
def test_other_starts_are_refused_with_the_possible_ones(source: str, target: str, possible: str, verifier: Verifier) -> None:
    start = first(verifier, source)
    with pytest.raises(ConfigError, match=f"training {target} cannot start from a {source} drafter, only from {possible};"):
        started(verifier, target, start)


def test_a_start_for_another_verifier_is_refused(verifier: Verifier) -> None:
    start = first(tiny_verifier("llama", vocab_size=48), "dflash", rows=packed_rows(vocab_size=48))
    with pytest.raises(PairingError, match="vocabulary 48"):
        started(verifier, "dspark", start)
