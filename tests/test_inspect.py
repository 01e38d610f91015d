"""`speculators inspect`: what a checkpoint is, what vLLM will do with it, and every problem, without running it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import foreign_checkpoints as foreign
import pytest
import torch
from safetensors.torch import save_file
from tiny_checkpoints import METHODS, config_of, edit_config, edit_layers, frozen_embedding, reduced, tensors_of
from tiny_drafters import TAPS, VOCABULARY, drafter, verifier_weights
from tiny_models import tiny_verifier
from typer.testing import CliRunner

from speculators.checkpoint import load, save
from speculators.checkpoint.calibration import store_calibrations
from speculators.checkpoint.card import serving_command
from speculators.checkpoint.inspection import SharedTensor, inspect
from speculators.cli.inspect import described
from speculators.cli.main import app
from speculators.decoding.calibration import Calibration
from speculators.errors import CheckpointError
from speculators.registry import get_algorithm
from speculators.verifier import Verifier


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def save_verifier(folder: Path, **settings: Any) -> Path:
    tiny_verifier("llama", **settings).model.save_pretrained(folder)
    return folder


def drafter_of(folder: Path, checkpoint: Path, method: str = "dflash", **options: Any) -> None:
    """Save a drafter for the verifier in `folder`."""
    chosen = {"num_layers": 1, "num_draft_tokens": 3, "aux_hidden_state_layer_ids": [1, 4], **options}
    weights = Verifier.from_pretrained(folder, dtype="float32", device="cpu").weights
    speculator = get_algorithm(method).speculator_class.from_verifier(weights, **chosen)
    if speculator.has_reduced_vocabulary:
        speculator.set_draft_vocabulary(torch.arange(speculator.config.draft_vocab_size))
    speculator.save_pretrained(checkpoint)


# -- what it tells -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_is_told_as_it_was_made(method: str, tmp_path: Path) -> None:
    speculator = drafter(method)
    save(speculator, tmp_path)
    found = inspect(tmp_path)
    assert (found.method, found.num_draft_tokens, found.taps, found.form) == (method, 5, TAPS, "full")
    assert (found.verifier, found.vocab_size, found.draft_vocab_size) == ("tiny-verifier", VOCABULARY, VOCABULARY)
    assert found.parameters == sum(parameter.numel() for parameter in speculator.parameters())
    assert found.weight_bytes == (tmp_path / "model.safetensors").stat().st_size
    assert (found.dtypes, found.weight_files, found.problems) == (("bfloat16",), ("model.safetensors",), ())


def test_the_largest_draft_follows_the_block_and_the_anchor_rule(tmp_path: Path) -> None:
    for method, anchor, block in (("dflash", False, 6), ("dspark", True, 5), ("dspark", False, 6)):
        folder = tmp_path / f"{method}-{anchor}"
        save(drafter(method, sample_from_anchor=anchor), folder)
        assert config_of(folder)["block_size"] == block
        assert inspect(folder).max_draft_tokens == 5


def test_vllm_facts_are_those_the_algorithm_declares(tmp_path: Path) -> None:
    expected: dict[str, tuple[str, dict[str, Any], tuple[str, ...], str]] = {
        "eagle3": ("eagle3", {}, ("V1", "V2"), "0.26.0"),
        "peagle": ("eagle3", {"parallel_drafting": True}, ("V1",), "0.26.0"),
        "dflash": ("dflash", {}, ("V1", "V2"), "0.26.0"),
        "dspark": ("dspark", {}, ("V2",), "0.32.0"),
    }
    for method, (served_as, flags, runners, version) in expected.items():
        save(drafter(method), tmp_path / method)
        vllm = inspect(tmp_path / method).vllm
        assert vllm is not None
        assert (vllm.method, vllm.runners, vllm.minimum_version, vllm.caveats) == (served_as, runners, version, ())
        model = {"method": served_as, "model": str(tmp_path / method), "num_speculative_tokens": 5}
        assert vllm.speculative_config == {**model, **flags}
        assert vllm.command.startswith("VLLM_USE_V2_MODEL_RUNNER=1 ") == (runners == ("V2",))


@pytest.mark.parametrize(
    ("method", "options", "caveat"),
    [
        ("dflash", {"sample_from_anchor": True}, "the V1 runner ignores it"),
        ("dspark", {"markov_head_type": "gated"}, "read as 'vanilla'"),
        ("peagle", {"fc_norm": True, "norm_before_fc": False}, "fc_norm = true: it is ignored"),
    ],
)
def test_what_vllm_reads_differently_is_a_caveat_and_no_problem(method: str, options: dict[str, Any], caveat: str, tmp_path: Path) -> None:
    save(drafter(method, **options), tmp_path)
    found = inspect(tmp_path)
    assert found.vllm is not None and len(found.vllm.caveats) == 1 and caveat in found.vllm.caveats[0]
    assert found.problems == ()


def test_a_llama_head_with_two_taps_needs_the_nested_key_vllm_reads(tmp_path: Path) -> None:
    save(drafter("eagle3", aux_hidden_state_layer_ids=[1, 4]), tmp_path)
    vllm = inspect(tmp_path).vllm
    assert vllm is not None and vllm.caveats == (), "the key is written on save"
    edit_layers(tmp_path, remove=("num_aux_hidden_states",))
    vllm = inspect(tmp_path).vllm
    assert vllm is not None and "2 taps need transformer_layer_config.num_aux_hidden_states = 2" in vllm.caveats[0]


def test_mixed_attention_needs_the_second_runner(tmp_path: Path) -> None:
    save(drafter("dflash"), tmp_path)
    edit_layers(tmp_path, layer_types=["sliding_attention", "full_attention"], sliding_window=8)
    vllm = inspect(tmp_path).vllm
    assert vllm is not None and "only the V2 runner" in vllm.caveats[0]


def test_what_is_shared_with_the_verifier_is_compared_with_it(tmp_path: Path) -> None:
    embedding, head = "embed_tokens.weight", "lm_head.weight"
    save(drafter("peagle"), tmp_path / "trained")  # its embedding was trained, the head is a copy
    save(frozen_embedding("peagle"), tmp_path / "compact", form="compact")
    save(reduced("dflash"), tmp_path / "reduced")
    shared = inspect(tmp_path / "trained", verifier_weights()).shared
    assert shared == {embedding: SharedTensor(True, True, False), head: SharedTensor(True, False, True)}
    found = inspect(tmp_path / "compact", verifier_weights())
    assert found.form == "compact" and found.problems == ()
    assert found.shared == dict.fromkeys((embedding, head), SharedTensor(False, False, None))
    found = inspect(tmp_path / "reduced", verifier_weights())
    assert (found.draft_vocab_size, found.vocab_size) == (20, 61)
    assert found.shared == {embedding: SharedTensor(False, False, None), head: SharedTensor(True, False, True)}
    assert inspect(tmp_path / "reduced").shared[head].equals_verifier is None, "no verifier, no comparison"


def test_a_stored_calibration_is_told_with_its_error_before_and_after(tmp_path: Path) -> None:
    save(drafter("dspark"), tmp_path)
    card = (tmp_path / "README.md").read_text()
    fits = ([1.5] * 5, [0.0] * 5, [0.7] * 5)
    known = Calibration(1.0, "all", "head", *map(tuple, fits), rounds=12_345, raw_ece=0.0912, calibrated_ece=0.0104)  # type: ignore[arg-type]
    store_calibrations(tmp_path, [known, replace(known, temperature=0.0, raw_ece=None, calibrated_ece=None)])
    assert inspect(tmp_path).calibrations[1] == known
    lines = [value for name, value in described(inspect(tmp_path)) if name == "calibration"]
    assert lines == [
        "temperature 0, all prompts, confidence head: 12,345 rounds, mean ECE not recorded before, not recorded after (decode)",
        "temperature 1, all prompts, confidence head: 12,345 rounds, mean ECE 9.12% before, 1.04% after (decode)",
    ]
    told = (tmp_path / "README.md").read_text()
    assert "| 1 | all | confidence head | 12,345 | 9.12% | 1.04% |" in told
    section = told[told.index("## Calibration") : told.index("## Use")]
    assert told.replace(section, "") == card, "everything else stays"
    store_calibrations(tmp_path, [replace(known, calibrated_ece=0.02)])
    assert (tmp_path / "README.md").read_text() == told.replace("1.04%", "2.00%")
    edit_config(tmp_path, unified_speculators={"calibration": [{**known.to_json(), "source": "guess"}]})
    assert "source 'guess' must be one of head, probability, none" in inspect(tmp_path).problems[0]


# -- what it finds -----------------------------------------------------------------------------------------------


def test_all_problems_are_listed_not_the_first_alone(tmp_path: Path) -> None:
    save(drafter("dflash", mask_token_id=3), tmp_path)
    tensors = tensors_of(tmp_path)
    tensors["layers.0.mlp.up_proj.weight"][2, 3] = float("nan")
    tensors["surprise.weight"] = torch.zeros(2)
    tensors["fc.weight"] = torch.zeros(32, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    problems = inspect(tmp_path).problems
    expected = ("need 96 input columns, not 64", "surprise.weight", "layers.0.mlp.up_proj.weight = nan at [2, 3]")
    assert len(problems) == 3, problems
    assert all(part in problem for part, problem in zip(expected, problems, strict=True))


def test_a_pair_is_checked(tmp_path: Path) -> None:
    save(drafter("peagle"), tmp_path)
    other = verifier_weights(seed=9)
    assert inspect(tmp_path, verifier_weights()).problems == ()
    problems = inspect(tmp_path, other).problems
    assert len(problems) == 1 and "lm_head.weight of this checkpoint" in problems[0]
    edit_config(tmp_path, mask_token_id=2)
    assert "it must not be a stop token of 'tiny-verifier' [2]" in inspect(tmp_path, verifier_weights()).problems[0]


def test_a_compact_checkpoint_of_a_look_alike_is_a_problem(tmp_path: Path) -> None:
    save(drafter("dflash"), tmp_path, form="compact")
    assert inspect(tmp_path).problems == ()
    problems = inspect(tmp_path, verifier_weights(seed=9)).problems
    assert len(problems) == 1 and "borrows the embedding" in problems[0]


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        inspect(tmp_path / "nowhere")


def test_a_drafter_of_the_embedded_verifier_is_served_by_the_command_that_knows_its_folder() -> None:
    serving = get_algorithm("dspark").serving
    assert serving_command(serving, "smollm2-135m-instruct", "my drafters/one", 7) == "speculators serve 'my drafters/one'"
    assert "vllm serve org/verifier --speculative-config " in serving_command(serving, "org/verifier", "drafter", 7)


# -- the command -------------------------------------------------------------------------------------------------


def test_a_sound_pair_is_printed_and_exits_with_zero(tmp_path: Path) -> None:
    drafter_of(save_verifier(tmp_path / "verifier"), tmp_path / "drafter", draft_vocab_size=16)
    result = run(tmp_path / "drafter", "--verifier", tmp_path / "verifier", "--json", tmp_path / "found.json")
    assert result.exit_code == 0, result.output
    lines = {line[:22].strip(): line[22:] for line in result.stdout.splitlines()}
    assert (lines["method"], lines["draft tokens (K)"], lines["taps"]) == ("dflash", "3, at most 3", "1, 4")
    assert lines["draft vocabulary"] == "16 of 64 tokens (25.0%)" and lines["problems"] == "none found"
    assert lines["lm_head.weight"] == "stored, a copy of the verifier's, equal to that of this verifier"
    assert lines["vLLM runner"] == "V1 or V2" and lines["vLLM version"] == "0.26.0 or later"
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["vllm"]["speculative_config"]["num_speculative_tokens"] == 3 and written["problems"] == []


def test_a_verifier_that_does_not_fit_exits_with_two_and_says_why(tmp_path: Path) -> None:
    drafter_of(save_verifier(tmp_path / "verifier"), tmp_path / "drafter")
    shallow = save_verifier(tmp_path / "shallow", layers=3)
    result = run(tmp_path / "drafter", "--verifier", shallow)
    assert result.exit_code == 2 and "reads layer 4" in result.stderr
    assert "dflash" in result.stdout, "what could be read is printed all the same"


def test_a_broken_configuration_still_prints_what_can_be_read(tmp_path: Path) -> None:
    save(drafter("dspark"), tmp_path)
    edit_config(tmp_path, draft_vocab_size=99)
    result = run(tmp_path, "--json", tmp_path / "found.json")
    assert result.exit_code == 2 and "draft_vocab_size 99 exceeds" in result.stderr
    written = json.loads((tmp_path / "found.json").read_text())
    assert (written["method"], written["num_draft_tokens"], written["taps"]) == ("dspark", 5, TAPS)
    assert written["parameters"] == sum(parameter.numel() for parameter in drafter("dspark").parameters())
    assert len(written["problems"]) == 1


FOREIGN: dict[str, tuple[Callable[[Path], Path], str, str, int, list[int]]] = {
    "z-lab": (foreign.zlab, "z-lab", "dflash", 5, [1, 3, 6]),
    "deepspec dspark": (foreign.deepspec_dspark, "deepspec", "dspark", 5, [1, 2, 4]),
    "deepspec eagle3": (foreign.deepspec_eagle3, "deepspec", "eagle3", 7, [1, 2, 3, 4, 5]),
    "safeailab": (foreign.safeailab, "safeailab", "eagle3", 3, [1, 2, 4]),
    "aws-peagle": (foreign.aws_peagle, "aws-peagle", "peagle", 8, [1, 2, 4]),
    "specforge": (foreign.specforge, "specforge", "dspark", 6, [1, 3, 6]),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_other_formats_are_read_and_the_command_that_converts_them_is_told(case: str, tmp_path: Path) -> None:
    make, name, method, count, taps = FOREIGN[case]
    folder = make(tmp_path / "source")
    found = inspect(folder, verifier_weights())
    assert (found.format, found.method, found.num_draft_tokens, found.taps) == (name, method, count, taps)
    assert (found.problems, found.vllm, found.verifier) == ((), None, "tiny-verifier")
    assert f"`speculators convert {folder} DST --verifier VERIFIER`" in found.notes[0]
    with pytest.raises(CheckpointError, match=rf"in the .* format: run `speculators convert {folder} DST --verifier VERIFIER`"):
        load(folder, verifier_weights())


def test_what_is_wrong_in_another_format_is_a_problem_there_too(tmp_path: Path) -> None:
    folder = foreign.zlab(tmp_path, dflash_config={"target_layer_ids": [0, 2, 5]})
    result = run(folder)
    assert result.exit_code == 2 and "mask_token_id = None" in result.stderr
    assert "z-lab" in result.stdout and "speculators convert" in result.stdout and "bfloat16" in result.stdout
    nameless = run(foreign.zlab(tmp_path / "nameless"))
    assert nameless.exit_code == 2 and "does not name the verifier" in nameless.stderr and "give the verifier" in nameless.stderr


def test_a_language_model_is_no_drafter_of_any_format(tmp_path: Path) -> None:
    folder = save_verifier(tmp_path / "verifier")
    assert "is no drafter checkpoint of a format known here" in inspect(folder).problems[0]
    with pytest.raises(CheckpointError, match=r"no drafter in the speculators format, nor in one that `speculators convert` knows"):
        load(folder)


def test_weights_cut_short_still_print_the_configuration(tmp_path: Path) -> None:
    save(drafter("eagle3"), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    result = run(tmp_path)
    assert result.exit_code == 2 and "no complete safetensors file" in result.stderr
    assert "eagle3" in result.stdout and "1, 2, 4" in result.stdout


def test_values_of_the_wrong_kind_do_not_stop_it(tmp_path: Path) -> None:
    save(drafter("dflash"), tmp_path)
    edit_config(tmp_path, speculators_config="yes", transformer_layer_config=[1], aux_hidden_state_layer_ids=7)
    result = run(tmp_path)
    assert result.exit_code == 2 and not isinstance(result.exception, TypeError | AttributeError | KeyError)
    assert "error: " in result.stderr
