"""A checked plan as files for other hosts: Docker, Compose, SageMaker; and as SGLang's command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from speculators.errors import ConfigError
from speculators.files import check_output_folder, make_folder, write_text_atomically
from speculators.registry import algorithms, get_algorithm
from speculators.serving.plan import ServingPlan
from speculators.serving.versions import release

_PORT = 8000
_VERIFIER, _DRAFTER = "/models/verifier", "/models/drafter"


@dataclass(frozen=True)
class Mounted:
    """Where a container finds the models, and which folders of the host that needs.

    Attributes:
        verifier, checkpoint: folder inside the container, or Hub name.
        folders: host folder -> folder inside the container.
    """

    verifier: str
    checkpoint: str
    folders: dict[str, str]


def deploy(plan: ServingPlan, target: str, output: Path | None) -> list[str]:
    """Write a target's files, or make its command.

    Args:
        plan: the checked deployment.
        target: docker, compose, sagemaker or sglang.
        output: folder for the files; sglang needs none.

    Returns:
        Lines to print: the command, or the files written.

    Raises:
        ConfigError: the target is unknown, has no place for this algorithm, or lacks its folder.
        DataError: the folder cannot be written.
    """
    if target == "sglang":
        return [sglang_command(plan)]
    if target not in _WRITERS:
        raise ConfigError(f"target {target!r} is unknown; there are {', '.join([*_WRITERS, 'sglang'])}")
    if output is None:
        raise ConfigError(f"--target {target} writes files: name their folder with --output")
    files = _WRITERS[target](plan)
    check_output_folder(output)
    if existing := [name for name in files if (output / name).exists()]:
        raise ConfigError(f"{output / existing[0]} exists already; name another folder, or remove it first")
    make_folder(output)
    for name, text in files.items():
        write_text_atomically(output / name, text)
    return [str(output / name) for name in files]


def sglang_command(plan: ServingPlan) -> str:
    """`sglang.launch_server` for the plan. Its number of draft tokens includes the anchor: K + 1.

    Raises:
        ConfigError: SGLang has no such drafter.
    """
    arguments = get_algorithm(plan.method).serving.sglang
    if not arguments:
        known = [name for name, algorithm in algorithms().items() if algorithm.serving.sglang]
        raise ConfigError(f"SGLang has no drafter for {plan.method}; it has {', '.join(known)}")
    command = ["python", "-m", "sglang.launch_server", "--model-path", plan.verifier]
    command += ["--speculative-draft-model-path", plan.checkpoint, *(text.format(k=plan.num_draft_tokens) for text in arguments)]
    command += ["--speculative-num-draft-tokens", str(plan.num_draft_tokens + 1)]
    return " ".join(map(shlex.quote, command))


def _mounted(plan: ServingPlan) -> Mounted:
    folders: dict[str, str] = {}

    def inside(source: str, mount: str) -> str:
        if not Path(source).is_dir():
            return source
        folders[str(Path(source).resolve())] = mount
        return mount

    return Mounted(inside(plan.verifier, _VERIFIER), inside(plan.checkpoint, _DRAFTER), folders)


def _arguments(plan: ServingPlan, mounted: Mounted) -> list[str]:
    """Arguments after `vllm serve`, with the models where the container finds them."""
    settings = {**plan.speculative_config, "model": mounted.checkpoint}
    return [mounted.verifier, "--speculative-config", json.dumps(settings), *plan.arguments]


def _image(plan: ServingPlan) -> str:
    return f"vllm/vllm-openai:v{'.'.join(map(str, release(plan.version)))}"


def _dockerfile(plan: ServingPlan) -> str:
    lines = [f"FROM {_image(plan)}"]
    if plan.plugin:
        lines.append(f"RUN pip install --no-cache-dir --no-deps unified-speculators=={version('unified-speculators')}")
    lines += [f"ENV {name}={value}" for name, value in plan.environment.items()]
    lines.append(f"CMD {json.dumps(_arguments(plan, _mounted(plan)))}")
    return "\n".join(lines) + "\n"  # the image's entry point is `vllm serve`


def _docker(plan: ServingPlan) -> dict[str, str]:
    command = ["docker", "run", "--rm", "--gpus", "all", "--ipc", "host", "--publish", f"{_PORT}:{_PORT}"]
    for host, inside in _mounted(plan).folders.items():
        command += ["--volume", f"{host}:{inside}:ro"]
    script = [
        "#!/bin/sh",
        "set -eu",
        'docker build --tag speculators-vllm "$(dirname "$0")"',
        " ".join(["exec", *map(shlex.quote, command), "speculators-vllm"]),
    ]
    return {"Dockerfile": _dockerfile(plan), "run.sh": "\n".join(script) + "\n"}


def _compose(plan: ServingPlan) -> dict[str, str]:
    volumes = [f"{host}:{inside}:ro" for host, inside in _mounted(plan).folders.items()]
    service = {
        "build": ".",
        "ports": [f"{_PORT}:{_PORT}"],
        "ipc": "host",
        "volumes": volumes,
        "healthcheck": {"test": ["CMD", "curl", "--fail", f"http://localhost:{_PORT}/health"], "start_period": "10m"},
        "deploy": {"resources": {"reservations": {"devices": [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]}}},
    }
    # JSON is YAML, and needs no YAML library.
    return {"Dockerfile": _dockerfile(plan), "compose.yaml": json.dumps({"services": {"vllm": service}}, indent=2) + "\n"}


def _sagemaker(plan: ServingPlan) -> dict[str, str]:
    """Environment of SageMaker's vLLM container, which turns SM_VLLM_NAME into --name. Models come from the Hub or from model.tar.gz."""
    if plan.plugin:
        raise ConfigError(
            f"this {plan.method} checkpoint needs the plugin, which SageMaker's vLLM image does not hold; build your own image"
            " with --target docker"
        )
    inside = {_VERIFIER: "/opt/ml/model/verifier", _DRAFTER: "/opt/ml/model/drafter"}
    mounted = _mounted(plan)
    settings = {**plan.speculative_config, "model": inside.get(mounted.checkpoint, mounted.checkpoint)}
    environment = {
        **plan.environment,
        "SM_VLLM_MODEL": inside.get(mounted.verifier, mounted.verifier),
        "SM_VLLM_SPECULATIVE_CONFIG": json.dumps(settings),
    }
    name, complete = "", True
    for argument in plan.arguments:
        if argument.startswith("--"):
            option, equals, value = argument.partition("=")
            name, complete = _sagemaker_name(option), bool(equals)
            environment[name] = value or "true"
        elif complete or (argument[:1] == "-" and argument[1:2].isalpha()):
            raise ConfigError(f"SageMaker's container takes arguments as --name value, which {argument!r} is not part of; spell it out")
        else:
            environment[name], complete = argument, True
    packed = {host: inside[folder].rpartition("/")[2] for host, folder in mounted.folders.items()}
    return {"sagemaker.json": json.dumps({"Environment": environment, "ModelDataFolders": packed}, indent=2) + "\n"}


def _sagemaker_name(option: str) -> str:
    return "SM_VLLM_" + option.removeprefix("--").replace("-", "_").upper()


_WRITERS: dict[str, Callable[[ServingPlan], dict[str, str]]] = {"docker": _docker, "compose": _compose, "sagemaker": _sagemaker}
