"""`speculators serve`: check that vLLM will serve a checkpoint as it was trained, and say with which command."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculators.checkpoint import inspect, read_config
from speculators.checkpoint.native import EXTRA_KEY, compact_hash
from speculators.checkpoint.storage import CONFIG_FILE
from speculators.config import SpeculatorConfig
from speculators.decoding.batch_schedule import num_speculative_tokens_per_batch_size
from speculators.decoding.calibration import ALL_DOMAINS, stored_calibrations
from speculators.decoding.step_times import StepTimes
from speculators.errors import CheckpointError, ConfigError
from speculators.registry import Need, VllmServing, get_algorithm
from speculators.serving.arguments import budget_arguments, number_of_sequences, refuse_ours
from speculators.serving.config import build, check_draft_tokens
from speculators.serving.pairing import check_pair
from speculators.serving.versions import NEWEST, outside_tested, release

RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
PLUGINS_VARIABLE = "VLLM_PLUGINS"
PLUGIN_NAME = "speculators"  # the entry point in pyproject.toml
ADAPTIVE_SINCE = "0.32.0"
SCHEDULE_SINCE = "0.32.0"
DRAFT_SAMPLING = ("greedy", "probabilistic")


@dataclass(frozen=True)
class ServingPlan:
    """One checked deployment.

    Attributes:
        method: the algorithm's method string.
        verifier: what vLLM is given as the model: a folder or a Hub name.
        checkpoint: the drafter, likewise.
        num_draft_tokens: K.
        speculative_config: for `--speculative-config`.
        arguments: the rest of vLLM's arguments.
        environment: variables that vLLM needs.
        version: the vLLM release it was checked for.
        plugin: whether vLLM must find this library's plugin.
        notes: worth knowing, a sentence each.
    """

    method: str
    verifier: str
    checkpoint: str
    num_draft_tokens: int
    speculative_config: dict[str, Any]
    arguments: tuple[str, ...]
    environment: dict[str, str]
    version: str
    plugin: bool
    notes: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """The command, `environment` aside."""
        return ["vllm", "serve", self.verifier, "--speculative-config", json.dumps(self.speculative_config), *self.arguments]

    @property
    def shell(self) -> str:
        """The command as a shell takes it."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, *map(shlex.quote, self.command)])


def plan(
    checkpoint: str | Path,
    *,
    verifier: str | None = None,
    num_draft_tokens: int | None = None,
    draft_sampling: str = "greedy",
    attention_backend: str | None = None,
    adaptive_verification: bool = False,
    step_times: Path | None = None,
    plugin: bool = True,
    version: str = NEWEST,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
) -> ServingPlan:
    """Check a checkpoint, its verifier and the settings against a vLLM release.

    Args:
        checkpoint: a folder, or a Hub repository.
        verifier: another place of the verifier than the checkpoint names.
        num_draft_tokens: K; the checkpoint's when None.
        draft_sampling: "greedy", or "probabilistic" to draw drafts from their distribution at temperature above 0.
        attention_backend: of the drafter, in vLLM's spelling; vLLM chooses when None.
        adaptive_verification: let the drafter's confidence decide how many drafts are verified.
        step_times: a file of measured `StepTimes`: K then follows the batch size, by them and the checkpoint's calibration.
        plugin: whether this library's plugin may be relied on where vLLM runs.
        version: of the vLLM that will serve.
        arguments: further arguments of `vllm serve`.
        environment: the variables vLLM will start with.

    Raises:
        CheckpointError, PairingError: the checkpoint is unusable, or not made for this verifier.
        DataError: `step_times` cannot be read.
        ConfigError: vLLM would not serve it as it was trained, or a setting is out of range; the message says the way out.
    """
    refuse_ours(arguments)
    config = _sound_config(checkpoint)
    method = config.speculators_model_type
    serving = get_algorithm(method).serving
    notes = [note] if (note := outside_tested(version)) else []
    if serving.minimum_version is not None and release(version) < release(serving.minimum_version):
        raise ConfigError(f"vLLM {version} has no {method} drafter; {serving.minimum_version} is the oldest release that has")

    plugin_usable = plugin and PLUGIN_NAME in environment.get(PLUGINS_VARIABLE, PLUGIN_NAME).split(",")
    uses_plugin = serving.method is None
    runners = list(serving.runners_with_plugin if plugin_usable else serving.runners) if serving.method is not None else ["V1"]
    if uses_plugin:
        _require_plugin(Need(f"vLLM has no drafter of its own for {method}", plugin=True), plugin_usable)
        notes.append("the drafter reads its context anew in every round and runs without CUDA graphs, on one GPU")
    for need in serving.needs(config):
        if need.runner is not None:
            runners = [need.runner]
        if need.since is None or release(version) < release(need.since):
            _require_plugin(need, plugin_usable)
            notes.append(f"through the plugin: {need.what}")
            uses_plugin = True

    count = check_draft_tokens(config, num_draft_tokens)
    options = _options(config, draft_sampling, attention_backend, adaptive_verification, version, own_drafter=serving.method is not None)
    added, said = budget_arguments(arguments, count, parallel=serving.parallel)
    if serving.method is None and "--enforce-eager" not in arguments:
        added.append("--enforce-eager")
    if step_times is not None:
        schedule, note = _batch_schedule(config, step_times, count, [*added, *arguments], adaptive_verification, version)
        options["num_speculative_tokens_per_batch_size"] = schedule
        notes.append(note)
    name = _verifier_name(config, verifier, checkpoint)
    embedding_hash = compact_hash(config, Path(CONFIG_FILE))
    if (note := check_pair(config, embedding_hash, name)) is not None:
        notes.append(note)
    return ServingPlan(
        method=method,
        verifier=name,
        checkpoint=str(checkpoint),
        num_draft_tokens=count,
        speculative_config=build(config, str(checkpoint), count, options),
        arguments=(*added, *arguments),
        environment=_runner_variable(runners, method, environment),
        version=version,
        plugin=uses_plugin,
        notes=(*notes, *said, _runner_note(runners, serving)),
    )


def _sound_config(checkpoint: str | Path) -> SpeculatorConfig:
    """The configuration of a checkpoint in which no rule is broken."""
    config = read_config(checkpoint)  # first: that a folder is no checkpoint at all explains more than what it lacks
    problems = inspect(checkpoint).problems
    if problems:
        raise CheckpointError(problems[0] + (f" (the first of {len(problems)} problems)" if len(problems) > 1 else ""))
    return config


def _require_plugin(need: Need, usable: bool) -> None:
    if usable and need.plugin:
        return
    if need.plugin:
        way = f"install this library where vLLM runs and let {PLUGINS_VARIABLE} name {PLUGIN_NAME!r}"
        raise ConfigError(f"{need.what}; {way}{f', or {need.remedy}' if need.remedy else ''}")
    raise ConfigError(str(need))


def _options(
    config: SpeculatorConfig,
    draft_sampling: str,
    attention_backend: str | None,
    adaptive_verification: bool,
    version: str,
    *,
    own_drafter: bool,
) -> dict[str, Any]:
    """Keys of the speculative config beyond those that the checkpoint decides."""
    if draft_sampling not in DRAFT_SAMPLING:
        raise ConfigError(f"draft sampling {draft_sampling!r} is unknown; vLLM knows {' and '.join(DRAFT_SAMPLING)}")
    method = config.speculators_model_type
    options: dict[str, Any] = {}
    if draft_sampling != "greedy":
        if not own_drafter:
            raise ConfigError(f"vLLM takes no draft probabilities from {method}; its drafts are greedy (lossless at any temperature)")
        options["draft_sample_method"] = draft_sampling
    if attention_backend is not None:
        options["attention_backend"] = attention_backend
    if adaptive_verification:
        if not getattr(config, "enable_confidence_head", False):
            raise ConfigError(f"adaptive verification needs a drafter with a confidence head, and this {method} checkpoint has none")
        if release(version) < release(ADAPTIVE_SINCE):
            raise ConfigError(f"vLLM {version} has no adaptive verification; {ADAPTIVE_SINCE} has")
        options["enable_adaptive_verification"] = True
    return options


def _batch_schedule(
    config: SpeculatorConfig, step_times: Path, count: int, arguments: Sequence[str], adaptive_verification: bool, version: str
) -> tuple[list[list[int]], str]:
    """K for ranges of batch sizes, where vLLM does not weigh each request's confidence, and a sentence that says where it comes from."""
    if adaptive_verification:
        raise ConfigError("adaptive verification chooses lengths by confidence, step times by batch size; ask for one of them")
    if release(version) < release(SCHEDULE_SINCE):
        raise ConfigError(f"vLLM {version} was not seen to choose K by batch size; {SCHEDULE_SINCE} does")
    fitted = [one for one in stored_calibrations(getattr(config, EXTRA_KEY, None)) if one.domain == ALL_DOMAINS]
    if not fitted:
        raise ConfigError("choosing K by batch size needs the acceptance that `speculators calibrate` measures; run it on this checkpoint")
    used = min(fitted, key=lambda one: one.temperature)
    sequences = number_of_sequences(arguments)
    ranges = num_speculative_tokens_per_batch_size(used.acceptance[:count], StepTimes.load(step_times), max_batch_size=sequences)
    said = ", ".join(f"{k} for {low}" + (f" to {high}" if high > low else "") for low, high, k in ranges)
    return [list(one) for one in ranges], f"K by batch size: {said} (acceptance calibrated at temperature {used.temperature:g})"


def _verifier_name(config: SpeculatorConfig, given: str | None, checkpoint: str | Path) -> str:
    """What vLLM is to load: the embedded default is a folder, other names stay as they are."""
    from speculators.data.default_verifier import DEFAULT_VERIFIER_NAME, default_verifier_folder

    name = given or config.speculators_config.verifier.name_or_path
    if name is None:
        raise ConfigError(f"{checkpoint} does not name its verifier; pass --verifier")
    return str(default_verifier_folder()) if name == DEFAULT_VERIFIER_NAME else name


def _runner_note(runners: Sequence[str], serving: VllmServing) -> str:
    """The runners that vLLM may take, and which of them only the plugin makes fit."""
    only_there = set(serving.runners_with_plugin) - set(serving.runners)
    names = [f"{name} through the plugin" if name in only_there else name for name in runners]
    return f"model runner {' or '.join(names)}"


def _runner_variable(runners: Sequence[str], method: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Pin the runner where only one serves the drafter."""
    chosen = environment.get(RUNNER_VARIABLE)
    if chosen is not None and ("V2" if chosen == "1" else "V1") not in runners:
        raise ConfigError(
            f"{RUNNER_VARIABLE}={chosen} chooses a model runner that does not serve this {method} drafter; only {runners[0]} does:"
            " unset the variable"
        )
    return {} if len(runners) > 1 else {RUNNER_VARIABLE: "1" if runners[0] == "V2" else "0"}
