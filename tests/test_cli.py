"""The commands, on tiny models in temporary folders: the main path, and one clear sentence for every bad input."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizer import chat_tokenizer
from tiny_models import tiny_model, tiny_verifier
from typer.core import TyperGroup
from typer.testing import CliRunner

from speculators import files
from speculators.cli.common import parse_settings
from speculators.cli.demo import METHODS, own_replies, smoke_drafter
from speculators.cli.main import app
from speculators.decoding.engine import generate
from speculators.decoding.sampling import SamplingParams
from speculators.errors import ConfigError
from speculators.evaluation.evaluate import PromptSet
from speculators.registry import get_algorithm
from speculators.training.config import TrainingConfig
from speculators.verifier import Verifier

VOCAB_SIZE = len(chat_tokenizer())
ROW_KEYS = {
    *("method", "checkpoint", "prompts", "k", "temperature", "acceptance_length", "acceptance_by_position"),
    *("conditional_acceptance_by_position", "tokens_per_second", "baseline_tokens_per_second", "speedup"),
    *("token_identical", "near_ties", "degenerate_prompts", "parameters", "kind"),
}


def save_chat_model(folder: Path, **settings: Any) -> Path:
    """A tiny random model with a chat tokenizer, as a transformers folder."""
    tiny_model("llama", **{"vocab_size": VOCAB_SIZE, **settings}).save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class World:
    """What the commands work on: a verifier, a drafter for it, prompts; and models that do not fit."""

    verifier: Path
    drafter: Path
    prompts: Path
    wide: Path
    large_vocabulary: Path
    shallow: Path
    empty: Path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("world")
    verifier = save_chat_model(root / "verifier")
    loaded = Verifier.from_pretrained(verifier, dtype="float32", device="cpu")
    options = {"num_layers": 1, "num_draft_tokens": 3, "aux_hidden_state_layer_ids": [1, 2, 4]}
    get_algorithm("dflash").speculator_class.from_verifier(loaded.weights, **options).save_pretrained(root / "drafter")
    prompts = root / "toy.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"toy/{i}", "turns": [f"w{i} w{i + 1} w{2 * i}"]}) + "\n" for i in range(3)))
    (root / "empty.jsonl").write_text("\n")
    return World(
        verifier=verifier,
        drafter=root / "drafter",
        prompts=prompts,
        wide=save_chat_model(root / "wide", hidden_size=48),
        large_vocabulary=save_chat_model(root / "large", vocab_size=VOCAB_SIZE + 12),
        shallow=save_chat_model(root / "shallow", layers=3),
        empty=root / "empty.jsonl",
    )


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def succeed(*arguments: object, json_path: Path) -> dict[str, Any]:
    result = run(*arguments, "--json", json_path)
    assert result.exit_code == 0, result.output
    return json.loads(json_path.read_text())  # type: ignore[no-any-return]


def files_below(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


# -- the main path -----------------------------------------------------------------------------------------------


def test_importing_the_commands_does_not_import_torch() -> None:
    code = "import sys, speculators.cli.main; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_methods_lists_the_registry_and_prompt_lookup(tmp_path: Path) -> None:
    listed = succeed("methods", json_path=tmp_path / "methods.json")["methods"]
    names = [entry["method"] for entry in listed]
    assert {"dflash", "dspark", "eagle3", "peagle"} <= set(names) and names[-1] == "prompt_lookup"
    assert all(entry["summary"] for entry in listed)


def test_train_takes_every_field_of_its_config_as_an_option() -> None:
    text = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "300"}).output
    for field in TrainingConfig.model_fields:
        assert f"--{'option' if field == 'options' else field.replace('_', '-')}" in text
    assert "Factors on it for parameters whose name contains a key" in text, "descriptions come from the config's docstring"


def test_prompts_become_replies_a_drafter_text_and_a_table(world: World, tmp_path: Path) -> None:
    data, drafter = tmp_path / "data", tmp_path / "drafter"
    common = ("--verifier", world.verifier, "--dtype", "float32", "--device", "cpu")
    made = succeed(
        *("data", "synthesize", *common, "--prompts", world.prompts, "--output", data, "--max-reply-tokens", 24),
        json_path=tmp_path / "data.json",
    )
    assert made["reply_tokens"] > 0 and made["verifier"] == str(world.verifier)

    trained = succeed(
        *("train", *common, "--method", "dflash", "--data", data, "--output", drafter, "--held-out", 0, "--no-progress"),
        *("--option", "num_layers=1", "--option", "num_draft_tokens=4", "--option", "aux_hidden_state_layer_ids=[1, 2, 4]"),
        *("--steps", 2, "--rows-per-step", 1, "--row-length", 128),
        json_path=tmp_path / "train.json",
    )
    assert trained["parameters"] > 0 and trained["records"][-1]["step"] == 2
    assert (drafter / "config.json").is_file()

    answer = succeed(*("generate", "w1 w2", *common, "--speculator", drafter, "--max-new-tokens", 12), json_path=tmp_path / "generate.json")
    assert len(answer["token_ids"]) <= 12 and answer["kind"] == "decode"
    plain = succeed("generate", "w1 w2", *common, "--max-new-tokens", 12, json_path=tmp_path / "plain.json")
    assert plain["token_ids"] == answer["token_ids"] and plain["acceptance_length"] == 1.0

    result = succeed(
        *("evaluate", *common, "--speculator", drafter, "--prompts", world.prompts, "--max-new-tokens", 16, "--k", 3, "--batch-size", 2),
        *("--runs", tmp_path / "runs.json"),
        json_path=tmp_path / "evaluate.json",
    )
    rows = result["rows"]
    assert [row["method"] for row in rows] == ["dflash", "dflash", "prompt_lookup", "prompt_lookup"]
    assert all(set(row) == ROW_KEYS for row in rows)
    assert rows[1]["checkpoint"] == str(drafter) and rows[1]["prompts"] == "toy, all prompts, 16 tokens"
    assert rows[1]["token_identical"] is True and rows[1]["k"] == 3
    assert (tmp_path / "runs.json").is_file()


def test_generate_streams_the_reply_it_reports(world: World, tmp_path: Path) -> None:
    common = ("--verifier", world.verifier, "--dtype", "float32", "--device", "cpu")
    result = run("generate", "w5 w6", *common, "--speculator", "prompt_lookup", "--max-new-tokens", 20, "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == json.loads((tmp_path / "out.json").read_text())["text"].strip()
    assert re.search(r"acceptance length \d\.\d\d \(decode\)", result.stderr)


def test_settings_are_json_where_they_can_be() -> None:
    assert parse_settings(["a=7", "b=[2, 15]", "c=gated", "d=true"], "--option") == {"a": 7, "b": [2, 15], "c": "gated", "d": True}
    with pytest.raises(ConfigError, match="--option 'layers' must have the form key=value"):
        parse_settings(["layers"], "--option")
    with pytest.raises(ConfigError, match=r"'a=2': a was given before, as 1; keep one"):
        parse_settings(["a=1", "b=2", "a=2"], "--option")
    for broken in ("training={anchors: 8}", "taps=[2, 15", "deep=" + 5000 * "["):
        with pytest.raises(ConfigError, match="is no JSON; names and texts inside need double quotes"):
            parse_settings([broken], "--option")


def test_the_demo_decodes_the_first_prompt_of_each_benchmark_set() -> None:
    root = Path(__file__).parents[1]
    demo = (root / "speculators" / "data" / "demo_prompts.jsonl").read_text().splitlines()
    sets = sorted((root / "benchmarks" / "prompts").glob("*.jsonl"))
    assert len(demo) == len(sets) == 4
    assert {path.read_text().splitlines()[0] for path in sets} == set(demo)


@pytest.mark.parametrize("method", METHODS)
def test_a_smoke_drafter_trains_for_seconds_and_decodes_losslessly(method: str) -> None:
    verifier = tiny_verifier(layers=8)  # deep enough for the default taps
    prompts = PromptSet("toy", ("a", "b"), ((1, 2, 3), (4, 5, 6, 7)))
    drafter = smoke_drafter(method, verifier, own_replies(verifier, prompts, 16), seconds=0.2)
    plain = generate(verifier, None, prompts.token_ids, SamplingParams(max_new_tokens=16))
    assert generate(verifier, drafter, prompts.token_ids, SamplingParams(max_new_tokens=16)).token_ids == plain.token_ids


# -- bad input ---------------------------------------------------------------------------------------------------


def refused(tmp_path: Path, *arguments: object) -> str:
    """Run a command that must fail: exit code 2, one sentence on standard error, no file written. Returns the sentence."""
    before = files_below(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in result.output
    assert files_below(tmp_path) == before
    return lines[0]


def evaluate_arguments(world: World, tmp_path: Path, **changes: object) -> list[object]:
    given = {"verifier": world.verifier, "speculator": world.drafter, "prompts": world.prompts, "max-new-tokens": 8, "device": "cpu"}
    given |= {"json": tmp_path / "out.json", "runs": tmp_path / "runs.json"} | {
        key.replace("_", "-"): value for key, value in changes.items()
    }
    return ["evaluate", *(part for key, value in given.items() for part in (f"--{key}", value))]


def test_k_above_the_block_is_one_sentence(world: World, tmp_path: Path) -> None:
    sentence = refused(tmp_path, *evaluate_arguments(world, tmp_path, k=9))
    assert "k 9 exceeds the 3 tokens" in sentence
    sentence = refused(
        tmp_path, "generate", "w1", "--verifier", world.verifier, "--speculator", world.drafter, "--k", 9, "--json", tmp_path / "a.json"
    )
    assert "9" in sentence and "3" in sentence


def test_another_hidden_size_is_one_sentence(world: World, tmp_path: Path) -> None:
    sentence = refused(tmp_path, *evaluate_arguments(world, tmp_path, verifier=world.wide))
    assert "hidden" in sentence and "32" in sentence and "48" in sentence


def test_another_vocabulary_is_one_sentence(world: World, tmp_path: Path) -> None:
    sentence = refused(tmp_path, *evaluate_arguments(world, tmp_path, verifier=world.large_vocabulary))
    assert str(VOCAB_SIZE) in sentence and str(VOCAB_SIZE + 12) in sentence


def test_taps_beyond_the_depth_are_one_sentence_when_decoding(world: World, tmp_path: Path) -> None:
    sentence = refused(tmp_path, *evaluate_arguments(world, tmp_path, verifier=world.shallow))
    assert "4" in sentence and "3" in sentence and "layers" in sentence


def test_an_empty_prompt_file_is_one_sentence(world: World, tmp_path: Path) -> None:
    assert "holds no prompts" in refused(tmp_path, *evaluate_arguments(world, tmp_path, prompts=world.empty))
    sentence = refused(
        tmp_path, "data", "synthesize", "--verifier", world.verifier, "--prompts", world.empty, "--output", tmp_path / "data"
    )
    assert "holds no prompts" in sentence


@pytest.mark.parametrize("option", ["verifier", "speculator", "prompts"])
def test_a_missing_folder_or_file_is_one_sentence(world: World, tmp_path: Path, option: str) -> None:
    missing = tmp_path / "nowhere"
    assert str(missing) in refused(tmp_path, *evaluate_arguments(world, tmp_path, **{option: missing}))


def test_a_missing_output_folder_is_refused_before_any_work(world: World, tmp_path: Path) -> None:
    sentence = refused(tmp_path, *evaluate_arguments(world, tmp_path, json=tmp_path / "nowhere" / "out.json", verifier="never looked at"))
    assert "nowhere does not exist" in sentence


def test_prompt_files_of_one_name_are_refused_instead_of_merged(world: World, tmp_path: Path) -> None:
    twin = tmp_path / "twin" / world.prompts.name
    twin.parent.mkdir()
    twin.write_text(world.prompts.read_text())
    sentence = refused(tmp_path, *evaluate_arguments(world, tmp_path), "--prompts", twin)
    assert str(world.prompts) in sentence and str(twin) in sentence and "'toy'" in sentence


def test_two_results_in_one_file_are_refused(world: World, tmp_path: Path) -> None:
    sentence = refused(tmp_path, *evaluate_arguments(world, tmp_path, json=tmp_path / "out.json", runs=tmp_path / "." / "out.json"))
    assert "--json and --runs" in sentence


def test_an_output_folder_below_a_file_is_one_sentence(world: World, data: Path, tmp_path: Path) -> None:
    output = world.prompts / "below" / "run"
    assert f"{world.prompts} is a file" in refused(
        tmp_path, *train_arguments(world, data, output, {"option": "aux_hidden_state_layer_ids=[1, 2, 4]"})
    )
    common = ("--verifier", "never looked at", "--conversations", 1)
    assert f"{world.prompts} is a file" in refused(tmp_path, "data", "synthesize", *common, "--output", output)


def test_an_output_that_the_file_system_refuses_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*arguments: object, **settings: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(files.tempfile, "mkstemp", refuse)
    assert "out.json (Permission denied)" in refused(tmp_path, "methods", "--json", tmp_path / "out.json")


def test_a_full_disk_is_one_sentence_whatever_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "model.safetensors")

    monkeypatch.setattr(TyperGroup, "invoke", full)
    assert "cannot write model.safetensors (No space left on device); make room and start again" in refused(tmp_path, "methods")


def test_a_threshold_without_confidence_is_refused_before_the_reply_begins(world: World, tmp_path: Path) -> None:
    arguments = ("generate", "w5 w6", "--verifier", world.verifier, "--speculator", "prompt_lookup", "--confidence-threshold", 0.5)
    assert "PromptLookup has none" in refused(tmp_path, *arguments)
    assert run(*arguments).stdout == ""


def test_draft_tokens_without_a_drafter_are_refused(world: World, tmp_path: Path) -> None:
    arguments = ("generate", "w5 w6", "--verifier", "never looked at")
    assert "--k needs --speculator" in refused(tmp_path, *arguments, "--k", 3)
    assert "--confidence-threshold needs --speculator" in refused(tmp_path, *arguments, "--confidence-threshold", 0.5)
    assert "'several' must be a number or 'auto'" in refused(tmp_path, *arguments, "--speculator", "prompt_lookup", "--k", "several")


def test_an_error_after_the_reply_has_begun_stands_on_its_own_line(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*arguments: object) -> None:
        raise ConfigError("the third round failed")

    monkeypatch.setattr("speculators.decoding.batch.Batch.round", broken)
    result = run("generate", "w5 w6", "--verifier", world.verifier, "--dtype", "float32", "--device", "cpu")
    assert result.exit_code == 2 and "the third round failed" in result.stderr
    assert result.stdout.endswith("\n")


def train_arguments(world: World, data: Path, output: Path, changes: dict[str, object]) -> list[object]:
    given = {"method": "dflash", "verifier": world.verifier, "data": data, "output": output, "steps": 1, "row-length": 128, "device": "cpu"}
    given |= changes
    return ["train", *(part for key, value in given.items() for part in (f"--{key}", value))]


@pytest.fixture(scope="module")
def data(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "conversations"
    arguments = ("--verifier", world.verifier, "--dtype", "float32", "--device", "cpu", "--max-reply-tokens", 24)
    assert run("data", "synthesize", *arguments, "--prompts", world.prompts, "--output", folder).exit_code == 0
    return folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"option": "aux_hidden_state_layer_ids=[1, 2, 5]"}, ("[1, 2, 5]", "4 layers")),
        ({"method": "medusa"}, ("unknown method 'medusa'", "dspark")),
        ({"option": "depth=3"}, ("no option 'depth'",)),
        ({"learning-rate": -1}, ("learning_rate", "-1")),
        ({"data": "nowhere"}, ("nowhere",)),
        ({"held-out": 1.5}, ("1.5",)),
        ({"init-from": "no/such-drafter-here"}, ("no/such-drafter-here",)),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_bad_training_input_is_one_sentence_and_no_folder(
    world: World, data: Path, tmp_path: Path, changes: dict[str, object], words: tuple[str, ...]
) -> None:
    sentence = refused(tmp_path, *train_arguments(world, data, tmp_path / "run", changes))
    assert all(word in sentence for word in words), sentence


def test_training_on_data_of_a_larger_vocabulary_is_one_sentence(
    world: World, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from speculators.data.rows import Conversation
    from speculators.data.storage import save_conversations

    folder = tmp_path_factory.mktemp("other") / "data"
    save_conversations(folder, [Conversation([1, 299, 271], [False, True, True])], {"verifier": "another model"}, vocab_size=300)
    sentence = refused(tmp_path, *train_arguments(world, folder, tmp_path / "run", {}))
    assert "token id 299" in sentence and f"{VOCAB_SIZE} tokens" in sentence and "another model" in sentence


def test_synthesis_does_not_overwrite(world: World, data: Path, tmp_path: Path) -> None:
    sentence = refused(tmp_path, "data", "synthesize", "--verifier", "never looked at", "--conversations", 1, "--output", data)
    assert "exists already" in sentence


def test_an_unknown_device_or_dtype_is_one_sentence(world: World, tmp_path: Path) -> None:
    assert "'warp'" in refused(tmp_path, *evaluate_arguments(world, tmp_path, device="warp"))
    assert "'float13'" in refused(tmp_path, *evaluate_arguments(world, tmp_path, dtype="float13"))
