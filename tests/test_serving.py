"""What `speculators serve` prints, refuses and writes; nothing here needs vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import toy_algorithm  # noqa: F401 (registers the toy)
from tiny_checkpoints import edit_config, edit_layers
from tiny_drafters import drafter, verifier_weights
from transformers import LlamaConfig
from typer.testing import CliRunner

from speculators.checkpoint import read_config, save
from speculators.checkpoint.calibration import store_calibrations
from speculators.cli.main import app
from speculators.decoding.calibration import Calibration
from speculators.decoding.step_times import StepTimes
from speculators.errors import CheckpointError, ConfigError, DataError, PairingError
from speculators.registry import PluginParts, algorithms, get_algorithm
from speculators.serving import plan, speculative_config
from speculators.serving.deployment import deploy
from speculators.serving.pairing import check_pair
from speculators.serving.plan import ServingPlan
from speculators.serving.plugin import parts_for
from speculators.serving.translation import CHECKPOINT_KEY, translate
from speculators.serving.versions import installed, outside_tested, release

METHODS = ("dflash", "dspark", "eagle3", "peagle")
QUIET: dict[str, str] = {}  # an environment without vLLM's variables


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint a method, and the configuration of their verifier, as folders."""
    root = tmp_path_factory.mktemp("serving")
    weights = verifier_weights()
    for method in METHODS:
        save(drafter(method), root / method)
    save(get_algorithm("toy").speculator_class.from_verifier(weights), root / "toy")
    LlamaConfig(
        vocab_size=weights.vocab_size, hidden_size=weights.hidden_size, num_hidden_layers=weights.num_layers, num_attention_heads=4
    ).save_pretrained(root / "verifier")
    return root


def checked(folder: Path, method: str, **settings: Any) -> ServingPlan:
    return plan(folder / method, **{"verifier": str(folder / "verifier"), "environment": QUIET, **settings})


# -- the speculative config ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("eagle3", {"method": "eagle3"}),
        ("peagle", {"method": "eagle3", "parallel_drafting": True}),  # vLLM has no method "peagle"
        ("dflash", {"method": "dflash"}),
        ("dspark", {"method": "dspark"}),
        ("toy", {"method": "toy"}),  # the plugin's
    ],
)
def test_the_speculative_config_leaves_vllm_nothing_to_guess(method: str, expected: dict[str, Any], folder: Path) -> None:
    k = 3 if method == "toy" else 5
    assert speculative_config(folder / method) == {**expected, "model": str(folder / method), "num_speculative_tokens": k}


def test_options_are_added_and_k_is_checked(folder: Path) -> None:
    settings = speculative_config(folder / "dflash", num_draft_tokens=2, draft_sample_method="probabilistic")
    assert settings["num_speculative_tokens"] == 2 and settings["draft_sample_method"] == "probabilistic"
    with pytest.raises(ConfigError, match=r"num_draft_tokens = 6: this dflash drafter proposes 1 to 5 tokens a round"):
        speculative_config(folder / "dflash", num_draft_tokens=6)
    with pytest.raises(ConfigError, match="method follows from the checkpoint"):
        speculative_config(folder / "dflash", method="eagle3")


def test_a_fill_in_block_drafts_one_token_fewer_than_it_has_slots(tmp_path: Path) -> None:
    """vLLM alone would take the block size, K + 1 (for DSpark without a number of draft tokens)."""
    save(drafter("dspark", sample_from_anchor=False), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["block_size"] == 6
    assert speculative_config(tmp_path)["num_speculative_tokens"] == 5


# -- the command -----------------------------------------------------------------------------------------------


def test_the_command_pins_the_runner_where_one_alone_serves(folder: Path) -> None:
    runner = {method: checked(folder, method).environment.get("VLLM_USE_V2_MODEL_RUNNER") for method in (*METHODS, "toy")}
    assert runner == {"dflash": None, "dspark": "1", "eagle3": None, "peagle": None, "toy": "0"}
    with pytest.raises(ConfigError, match="VLLM_USE_V2_MODEL_RUNNER=0 chooses a model runner that does not serve this dspark drafter"):
        checked(folder, "dspark", environment={"VLLM_USE_V2_MODEL_RUNNER": "0"})


@pytest.mark.parametrize(
    ("arguments", "k", "added"),
    [
        ([], 5, []),  # 6 tokens a sequence: vLLM's own defaults leave 8
        (["--max-num-seqs", "100"], 5, ["--max-num-batched-tokens", "8192"]),
        (["--max-num-seqs=4096"], 5, ["--max-num-batched-tokens", "24576"]),
        (["--max_num_batched_tokens", "100"], 4, ["--max-num-seqs", "20"]),
        (["--max-num-seqs", "8", "--max-num-batched-tokens", "48"], 5, []),
    ],
)
def test_every_step_has_room_for_the_drafts_of_every_sequence(arguments: list[str], k: int, added: list[str], folder: Path) -> None:
    assert checked(folder, "eagle3", arguments=arguments, num_draft_tokens=k).arguments == (*added, *arguments)


@pytest.mark.parametrize("method", ["peagle", "dflash", "dspark"])
def test_what_vllm_keeps_for_drafts_of_one_pass_is_left_besides(method: str, folder: Path) -> None:
    """It takes up to K slots off a step's budget for every sequence that may run, whether it does or not."""

    def added(*arguments: str, k: int = 5) -> tuple[str, ...]:
        own = checked(folder, method, arguments=list(arguments), num_draft_tokens=k).arguments
        return own[: len(own) - len(arguments)]

    assert added() == ("--max-num-seqs", "256", "--max-num-batched-tokens", "8192")
    assert added(k=3) == ()  # 7 slots a sequence: vLLM's own defaults leave 8
    assert added("--max-num-seqs", "4096") == ("--max-num-batched-tokens", "45056")
    assert added("--max-num-batched-tokens", "110") == ("--max-num-seqs", "10")
    assert added("--max-num-batched-tokens", "6") == ("--max-num-seqs", "1")
    for tokens, said in (("88", False), ("87", True)):
        notes = checked(folder, method, arguments=["--max-num-seqs", "8", "--max-num-batched-tokens", tokens], num_draft_tokens=5).notes
        assert any("88 would let a step verify them all" in note for note in notes) is said


def test_more_than_eight_tokens_a_sequence_exceed_vllms_defaults(folder: Path) -> None:
    assert checked(folder, "eagle3", num_draft_tokens=63).arguments == ("--max-num-seqs", "256", "--max-num-batched-tokens", "16384")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-num-seqs", "8", "--max-num-batched-tokens", "47"], r"47 is below --max-num-seqs x \(K \+ 1\) = 8 x 6 = 48"),
        (["--max-num-batched-tokens", "5"], r"5 is below K \+ 1 = 6"),
        (["--max-num-seqs", "many"], "'many' must be a whole number"),
        (["--speculative-config", "{}"], "--speculative-config is what this command works out"),
        (["--speculative_config.method", "ngram"], r"--speculative-config\.method is what this command works out"),
        (["--model=elsewhere"], "--model is what this command works out"),
    ],
)
def test_arguments_that_contradict_the_drafter_are_refused(arguments: list[str], message: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(folder, "eagle3", arguments=arguments)


# -- the pair --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 60}, "vocabulary 61, but .* has 60"),
        ({"hidden_size": 64}, "hidden size 32, but .* has 64"),
        ({"num_hidden_layers": 3}, "reads layer 4, but .* has 3 layers"),
    ],
)
def test_a_verifier_that_the_drafter_was_not_made_for_is_refused(
    change: dict[str, int], message: str, folder: Path, tmp_path: Path
) -> None:
    LlamaConfig.from_pretrained(folder / "verifier", **change).save_pretrained(tmp_path)
    with pytest.raises(PairingError, match=message):
        checked(folder, "dflash", verifier=str(tmp_path))


def test_a_verifier_that_cannot_be_one_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no folder .*nowhere; pass an existing folder"):
        checked(folder, "dflash", verifier=str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text('{"model_type": "resnet"}')
    with pytest.raises(CheckpointError, match="has no vocab_size: it is no language model"):
        checked(folder, "dflash", verifier=str(tmp_path))
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / "verifier" / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no complete safetensors file"):
        check_pair(read_config(folder / "dflash"), "0" * 64, str(tmp_path))


def test_a_verifier_that_is_not_here_is_said_to_be_unchecked(folder: Path) -> None:
    notes = checked(folder, "dflash", verifier="nobody/no-such-model").notes
    assert any("the pair could not be checked: no configuration of 'nobody/no-such-model' here" in note for note in notes)


# -- releases, runners and the plugin --------------------------------------------------------------------------


def test_dspark_with_a_predicting_anchor_needs_a_newer_vllm_or_the_plugin(folder: Path) -> None:
    assert not checked(folder, "dspark", version="0.32.0").plugin
    assert checked(folder, "dspark", version="0.26.0").plugin
    with pytest.raises(ConfigError, match=r"before 0\.32 does not read it .* `speculators convert --to deepspec`"):
        checked(folder, "dspark", version="0.26.0", plugin=False)
    with pytest.raises(ConfigError, match="let VLLM_PLUGINS name 'speculators'"):
        checked(folder, "dspark", version="0.26.0", environment={"VLLM_PLUGINS": "another"})


def test_a_fill_in_dspark_with_a_layer_a_tap_is_served_by_both_releases_alone(folder: Path, tmp_path: Path) -> None:
    save(drafter("dspark", num_layers=3, sample_from_anchor=False), tmp_path)
    for version in ("0.26.0", "0.32.0"):
        assert not plan(tmp_path, verifier=str(folder / "verifier"), environment=QUIET, version=version, plugin=False).plugin


def test_taps_that_the_older_vllm_takes_for_layers_are_counted_by_the_plugin(folder: Path, tmp_path: Path) -> None:
    """vLLM 0.26 gives `fc` one input a drafter layer, unless this key says otherwise."""
    save(drafter("dspark", num_layers=2, sample_from_anchor=False), tmp_path)
    served: dict[str, Any] = {"verifier": str(folder / "verifier"), "environment": QUIET}
    assert not plan(tmp_path, **served, version="0.32.0", plugin=False).plugin
    with pytest.raises(ConfigError, match="3 tapped layers for 2 drafter layers"):
        plan(tmp_path, **served, version="0.26.0", plugin=False)
    assert plan(tmp_path, **served, version="0.26.0").plugin
    complete = get_algorithm("dspark").serving.plugin.complete
    assert complete is not None
    config = json.loads((tmp_path / "config.json").read_text())
    complete(config, completed := {})
    assert completed["eagle_config"] == {"layer_ids": config["aux_hidden_state_layer_ids"]}


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_heads_that_vllm_would_misread_need_the_plugin(kind: str, folder: Path, tmp_path: Path) -> None:
    save(drafter("dspark", markov_head_type=kind), tmp_path)
    assert plan(tmp_path, verifier=str(folder / "verifier"), environment=QUIET).plugin
    with pytest.raises(ConfigError, match=f"markov_head_type = '{kind}': it is read as 'vanilla'"):
        plan(tmp_path, verifier=str(folder / "verifier"), environment=QUIET, plugin=False)


def test_a_drafter_without_a_sequential_head_needs_the_plugin(folder: Path, tmp_path: Path) -> None:
    save(drafter("dspark", markov_rank=0), tmp_path)
    with pytest.raises(ConfigError, match="markov_rank = 0: vLLM builds a sequential head of no columns"):
        plan(tmp_path, verifier=str(folder / "verifier"), environment=QUIET, plugin=False)


def test_peagle_is_served_by_the_second_runner_where_the_plugin_is(folder: Path) -> None:
    variable = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    assert checked(folder, "peagle", environment=variable).notes[-1] == "model runner V2 through the plugin or V1"
    alone = checked(folder, "peagle", plugin=False)
    assert alone.environment == {"VLLM_USE_V2_MODEL_RUNNER": "0"} and alone.notes[-1] == "model runner V1"
    with pytest.raises(ConfigError, match="VLLM_USE_V2_MODEL_RUNNER=1 chooses a model runner that does not serve this peagle drafter"):
        checked(folder, "peagle", plugin=False, environment=variable)


def test_a_speculator_belongs_to_the_drafters_that_have_its_method_and_options() -> None:
    def speculator(method: str, *, parallel_drafting: bool) -> str | None:
        return parts_for(algorithms(), SimpleNamespace(method=method, parallel_drafting=parallel_drafting)).speculator

    assert speculator("eagle3", parallel_drafting=False) is None  # vLLM's own
    assert speculator("eagle3", parallel_drafting=True) == get_algorithm("peagle").serving.plugin.speculator
    assert speculator("dspark", parallel_drafting=True) == get_algorithm("dspark").serving.plugin.speculator
    assert speculator("ngram", parallel_drafting=False) is None
    assert parts_for(algorithms(), None) == PluginParts()  # vLLM without a drafter


def test_a_third_party_algorithm_needs_the_plugin_and_runs_eagerly(folder: Path) -> None:
    served = checked(folder, "toy")
    assert served.plugin and served.arguments == ("--enforce-eager",)
    with pytest.raises(ConfigError, match="vLLM has no drafter of its own for toy"):
        checked(folder, "toy", plugin=False)
    with pytest.raises(ConfigError, match="takes no draft probabilities from toy"):
        checked(folder, "toy", draft_sampling="probabilistic")


def test_dflash_with_a_predicting_anchor_is_served_by_no_vllm(folder: Path, tmp_path: Path) -> None:
    save(drafter("dflash", sample_from_anchor=True), tmp_path)
    with pytest.raises(ConfigError, match="train the drafter as dspark"):
        plan(tmp_path, verifier=str(folder / "verifier"), environment=QUIET)


def test_full_attention_is_saved_so_that_vllm_reads_it_as_bidirectional(folder: Path, tmp_path: Path) -> None:
    """vLLM takes `not sliding_window_non_causal` for every layer: the format's default, false, would make it draft causally."""
    written = json.loads((folder / "dflash" / "config.json").read_text())
    assert written["sliding_window_non_causal"] is True and "is_causal" not in written
    save(drafter("dflash"), tmp_path)
    edit_config(tmp_path, sliding_window_non_causal=False)
    assert plan(tmp_path, verifier=str(folder / "verifier"), environment=QUIET).plugin
    with pytest.raises(ConfigError, match="vLLM takes it for every layer, whatever its attention"):
        plan(tmp_path, verifier=str(folder / "verifier"), environment=QUIET, plugin=False)


def test_mixed_attention_is_pinned_to_the_runner_that_serves_it(folder: Path, tmp_path: Path) -> None:
    save(drafter("dflash"), tmp_path)
    edit_layers(tmp_path, layer_types=["sliding_attention", "full_attention"], sliding_window=8)
    served = plan(tmp_path, verifier=str(folder / "verifier"), environment=QUIET)
    assert served.environment == {"VLLM_USE_V2_MODEL_RUNNER": "1"}


def test_adaptive_verification_needs_a_confidence_head_and_a_release_that_has_it(folder: Path) -> None:
    assert checked(folder, "dspark", adaptive_verification=True).speculative_config["enable_adaptive_verification"] is True
    with pytest.raises(ConfigError, match="this dflash checkpoint has none"):
        checked(folder, "dflash", adaptive_verification=True)
    with pytest.raises(ConfigError, match=r"vLLM 0\.26\.0 has no adaptive verification"):
        checked(folder, "dspark", adaptive_verification=True, version="0.26.0")


def test_k_follows_the_batch_size_by_measured_times_and_calibrated_acceptance(folder: Path, tmp_path: Path) -> None:
    """A round of n requests and K drafts: n (1 + 1/2 + .. + 2^-K) tokens in 1 + 0.11 n (1 + K) seconds; the best K by hand."""
    times = tmp_path / "times.json"
    StepTimes.affine(1.0, 0.11, max_rows=16, max_drafts=3).save(times)
    save(drafter("dflash"), tmp_path / "drafter")
    served = {"verifier": str(folder / "verifier"), "environment": QUIET, "step_times": times, "arguments": ["--max-num-seqs", "16"]}
    with pytest.raises(ConfigError, match="needs the acceptance that `speculators calibrate` measures"):
        plan(tmp_path / "drafter", **served)
    store_calibrations(tmp_path / "drafter", [Calibration(1.0, "all", "probability", (1.0,) * 3, (0.0,) * 3, (0.5,) * 3, rounds=100)])
    found = plan(tmp_path / "drafter", **served)
    assert found.speculative_config["num_speculative_tokens_per_batch_size"] == [[1, 2, 2], [3, 9, 1], [10, 16, 0]]
    assert "K by batch size: 2 for 1 to 2, 1 for 3 to 9, 0 for 10 to 16 (acceptance calibrated at temperature 1)" in found.notes
    with pytest.raises(ConfigError, match=r"vLLM 0\.26\.0 was not seen to choose K by batch size"):
        plan(tmp_path / "drafter", **served, version="0.26.0")
    with pytest.raises(ConfigError, match="ask for one of them"):
        checked(folder, "dspark", step_times=times, adaptive_verification=True)
    with pytest.raises(DataError, match="the file does not exist"):
        plan(tmp_path / "drafter", **{**served, "step_times": tmp_path / "none.json"})


def test_releases_outside_the_tested_ones_are_named() -> None:
    assert release("0.32.0+cpu") == (0, 32, 0) and release("v0.26") == (0, 26, 0)
    assert outside_tested("0.26.0") is outside_tested("0.32.1") is None
    assert "0.33.0 is newer" in (outside_tested("0.33.0") or "") and "0.19.1 is older" in (outside_tested("0.19.1") or "")
    with pytest.raises(ConfigError, match="'latest' cannot be read"):
        release("latest")


def test_a_release_without_the_drafter_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"vLLM 0\.19\.1 has no dflash drafter; 0\.26\.0 is the oldest"):
        checked(folder, "dflash", version="0.19.1")


# -- translation for the plugin --------------------------------------------------------------------------------


def test_our_method_strings_become_vllms_before_it_validates_them(folder: Path) -> None:
    path = str(folder / "peagle")
    expected = {"method": "eagle3", "parallel_drafting": True, "model": path, "num_speculative_tokens": 5}
    assert translate({"method": "peagle", "model": path}) == (expected, {})
    assert translate({"model": path}) == (expected, {})  # the checkpoint says what it is
    assert translate({"method": "eagle3", "model": path}) == (expected, {})  # alone, vLLM would draft autoregressively
    with pytest.raises(ConfigError, match=r"method 'dflash' and the peagle checkpoint .* contradict each other"):
        translate({"method": "dflash", "model": path})


def test_an_algorithm_without_a_vllm_method_goes_through_the_proposer(folder: Path) -> None:
    path = str(folder / "toy")
    settings, extra = translate({"method": "toy", "model": path, "num-speculative-tokens": 2})
    proposer = "speculators.serving.proposer.SpeculatorProposer"
    assert settings == {"method": "custom_class", "model": proposer, "num_speculative_tokens": 2}
    assert extra == {CHECKPOINT_KEY: path}


@pytest.mark.parametrize("settings", [{"method": "ngram", "num_speculative_tokens": 3}, {"model": "owner/model"}, {"method": "mtp"}])
def test_what_is_not_ours_passes_unchanged(settings: dict[str, Any]) -> None:
    assert translate(settings) == (settings, {})


@pytest.mark.skipif(installed() is not None, reason="vLLM is installed")
def test_the_plugin_without_vllm_says_so_and_returns(caplog: pytest.LogCaptureFixture) -> None:
    from speculators.serving import plugin

    plugin.register()
    assert "found no vLLM" in caplog.text


def test_a_vllm_that_has_moved_is_logged_and_does_not_stop_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from speculators.serving import plugin

    monkeypatch.setattr(plugin, "installed", lambda: "9.9.9")
    moved = dict.fromkeys(plugin._EXTENSIONS, lambda _: __import__("a_module_of_vllm_that_is_elsewhere_now"))
    monkeypatch.setattr(plugin, "_EXTENSIONS", moved)
    plugin.register()
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
        f"the speculators plugin cannot extend {what} of vLLM 9.9.9" for what in moved
    ]


# -- deployment ------------------------------------------------------------------------------------------------


def test_docker_and_compose_mount_both_models_where_the_command_looks(folder: Path, tmp_path: Path) -> None:
    deploy(checked(folder, "dspark"), "compose", tmp_path / "compose")
    dockerfile = (tmp_path / "compose" / "Dockerfile").read_text().splitlines()
    assert dockerfile[0] == "FROM vllm/vllm-openai:v0.32.0" and "ENV VLLM_USE_V2_MODEL_RUNNER=1" in dockerfile
    model, flag, settings, *budget = json.loads(dockerfile[-1].removeprefix("CMD "))
    assert (model, flag) == ("/models/verifier", "--speculative-config")
    assert json.loads(settings) == {"method": "dspark", "model": "/models/drafter", "num_speculative_tokens": 5}
    assert budget == ["--max-num-seqs", "256", "--max-num-batched-tokens", "8192"]
    service = json.loads((tmp_path / "compose" / "compose.yaml").read_text())["services"]["vllm"]
    assert service["volumes"] == [f"{folder}/verifier:/models/verifier:ro", f"{folder}/dspark:/models/drafter:ro"]
    deploy(checked(folder, "toy"), "docker", tmp_path / "docker")
    assert "pip install --no-cache-dir --no-deps unified-speculators==" in (tmp_path / "docker" / "Dockerfile").read_text()
    assert f"--volume {folder}/toy:/models/drafter:ro" in (tmp_path / "docker" / "run.sh").read_text()
    with pytest.raises(ConfigError, match="exists already"):
        deploy(checked(folder, "toy"), "docker", tmp_path / "docker")


def test_sagemaker_gets_every_argument_as_a_variable(folder: Path, tmp_path: Path) -> None:
    deploy(checked(folder, "eagle3", arguments=["--max-num-seqs", "8", "--enforce-eager"]), "sagemaker", tmp_path)
    environment = json.loads((tmp_path / "sagemaker.json").read_text())["Environment"]
    assert environment.pop("SM_VLLM_SPECULATIVE_CONFIG").endswith('"model": "/opt/ml/model/drafter", "num_speculative_tokens": 5}')
    assert environment == {
        "SM_VLLM_MODEL": "/opt/ml/model/verifier",
        "SM_VLLM_MAX_NUM_BATCHED_TOKENS": "8192",
        "SM_VLLM_MAX_NUM_SEQS": "8",
        "SM_VLLM_ENFORCE_EAGER": "true",
    }


@pytest.mark.parametrize("stray", [["-tp", "2"], ["--enforce-eager", "-tp", "2"], ["--seed=1", "2"], ["--seed", "1", "2"]])
def test_sagemaker_refuses_arguments_that_no_variable_can_hold(stray: list[str], folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="takes arguments as --name value"):
        deploy(checked(folder, "eagle3", arguments=stray), "sagemaker", tmp_path)
    assert not list(tmp_path.iterdir())


def test_sglang_counts_the_anchor_among_the_draft_tokens(folder: Path) -> None:
    (command,) = deploy(checked(folder, "dflash"), "sglang", None)
    assert "--speculative-algorithm DFLASH --speculative-num-draft-tokens 6" in command
    (command,) = deploy(checked(folder, "eagle3"), "sglang", None)
    assert "--speculative-num-steps 5 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6" in command
    with pytest.raises(ConfigError, match="SGLang has no drafter for peagle; it has dflash, dspark, eagle3"):
        deploy(checked(folder, "peagle"), "sglang", None)
    with pytest.raises(ConfigError, match="target 'podman' is unknown; there are docker, compose, sagemaker, sglang"):
        deploy(checked(folder, "dflash"), "podman", None)


# -- the command line ------------------------------------------------------------------------------------------


def test_a_dry_run_prints_the_command_a_shell_takes(folder: Path) -> None:
    arguments = ["serve", str(folder / "dspark"), "--verifier", str(folder / "verifier"), "--vllm-version", "0.32.0", "--dry-run"]
    result = CliRunner().invoke(app, [*arguments, "--", "--port", "9000"])
    assert result.exit_code == 0, result.output
    settings = json.dumps(speculative_config(folder / "dspark"))
    budget = "--max-num-seqs 256 --max-num-batched-tokens 8192"
    command = f"vllm serve {folder}/verifier --speculative-config '{settings}' {budget} --port 9000\n"
    assert result.stdout == f"VLLM_USE_V2_MODEL_RUNNER=1 {command}"


def test_only_what_follows_the_dashes_is_passed_to_vllm(folder: Path) -> None:
    arguments = ["serve", str(folder / "dspark"), "--verifier", str(folder / "verifier"), "--vllm-version", "0.32.0", "--dry-run"]
    result = CliRunner().invoke(app, [*arguments, "extra", "--", "--port", "9000"])
    assert result.exit_code == 2
    assert result.stderr == "error: serve takes one CHECKPOINT, so it has no use for 'extra'; vLLM's own arguments go behind `--`\n"
    assert CliRunner().invoke(app, [*arguments, "--port", "9000"]).exit_code == 2
    passed = CliRunner().invoke(app, [*arguments, "--", "--lora-modules", "a=b", "c=d", "--", "e"]).stdout
    assert passed.endswith(" --max-num-batched-tokens 8192 --lora-modules a=b c=d -- e\n")


def test_bad_input_is_one_sentence_and_exit_code_two(folder: Path) -> None:
    result = CliRunner().invoke(app, ["serve", str(folder / "verifier"), "--dry-run"])
    assert result.exit_code == 2 and "has no speculators_model_type" in result.output
