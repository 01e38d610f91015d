"""Do the weights of drafters load into the drafter classes of the vLLM that is installed? Starts no engine and needs no GPU.

    python tests/vllm/load_drafters.py                                 # the committed drafters
    python tests/vllm/load_drafters.py CHECKPOINT ... --verifier FOLDER

Every checkpoint gets the configuration that `speculators serve` would start vLLM with, and vLLM's own loader fills the class that
vLLM chooses: alone where that is how it is served, and with the plugin; DSpark's also from DeepSpec's layout, alone. A CUDA build
of vLLM serves for this too: it is told that it runs on a CPU. Prints a line a case; exit code 1 if one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from speculators.checkpoint import read_config
from speculators.checkpoint.convert import convert
from speculators.checkpoint.verifier_files import read_verifier_weights
from speculators.errors import SpeculatorsError
from speculators.registry import get_algorithm
from speculators.serving import plan, plugin
from speculators.serving.plan import ServingPlan
from speculators.serving.versions import installed

COMMITTED = Path(__file__).parents[2] / "checkpoints" / "smollm2-135m-instruct"
# Tensors of vLLM's classes that no checkpoint of ours fills: the verifier's, which vLLM puts in their place after loading; a mask
# vector beside the vocabulary; and the norm of the fused half in layers that have none.
NOT_STORED = re.compile(r"(embed_tokens|lm_head)\.|mask_embedding|layers\.[1-9]\d*\.hidden_norm\.")
VOCABULARY = "draft_id_to_target_id"  # filled where the draft vocabulary is reduced


@dataclass(frozen=True)
class Case:
    """One way to serve one drafter.

    Attributes:
        name: the drafter, and how.
        model: what the speculative config names.
        plan: how it is served otherwise.
    """

    name: str
    model: str
    plan: ServingPlan


def cases_alone(checkpoints: Sequence[Path], verifier: str | None, scratch: Path) -> list[Case]:
    """What vLLM serves without the plugin: the checkpoint where it can, and DSpark in DeepSpec's layout."""
    found = []
    for checkpoint in checkpoints:
        try:
            found.append(Case(f"{checkpoint.name}, alone", str(checkpoint), planned(checkpoint, verifier, plugin=False)))
        except SpeculatorsError as error:
            print(f"{checkpoint.name}, alone: not served ({error})")
        checked = planned(checkpoint, verifier)
        needs = get_algorithm(checked.method).serving.needs(read_config(checkpoint))
        if checked.method != "dspark" or any(need.since is None for need in needs):  # no release reads it alone, in any layout
            continue
        try:
            convert(checkpoint, scratch / checkpoint.name, to="deepspec", verifier=read_verifier_weights(checked.verifier))
        except SpeculatorsError as error:
            print(f"{checkpoint.name}, DeepSpec's layout: not written ({error})")
            continue
        found.append(Case(f"{checkpoint.name}, DeepSpec's layout", str(scratch / checkpoint.name), checked))
    return found


def planned(checkpoint: Path, verifier: str | None, *, plugin: bool = True) -> ServingPlan:
    """The plan for the installed release, whatever variables this process has."""
    return plan(checkpoint, verifier=verifier, version=str(installed()), plugin=plugin, environment={})


def filled(case: Case) -> tuple[int, list[str]]:
    """Let vLLM make the drafter and fill it.

    Returns:
        How many tensors were filled, and the names of those that were left as they were made.
    """
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.utils.torch_utils import set_default_torch_dtype

    settings = {**case.plan.speculative_config, "model": case.model}
    command = ["--model", case.plan.verifier, "--speculative-config", json.dumps(settings), *case.plan.arguments]
    arguments = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(["--max-model-len", "128", *command])
    os.environ.update(case.plan.environment)
    config = EngineArgs.from_cli_args(arguments).create_engine_config()
    drafter = config.speculative_config.draft_model_config
    with set_current_vllm_config(config), set_default_torch_dtype(drafter.dtype):
        model = initialize_model(vllm_config=config, model_config=drafter)
        parameters: dict[str, Tensor] = dict(model.named_parameters())
        for tensor in parameters.values():
            tensor.data.fill_(unlike(tensor))
        get_model_loader(config.load_config).load_weights(model, drafter)
    left = [name for name, tensor in parameters.items() if torch.isclose(tensor, unlike(tensor), equal_nan=True).any()]
    whole = drafter.hf_config.draft_vocab_size == drafter.hf_config.vocab_size
    needed = [name for name in left if not NOT_STORED.search(name) and not (whole and name.endswith(VOCABULARY))]
    return len(parameters) - len(left), needed


def unlike(tensor: Tensor) -> Tensor:
    """What no stored tensor holds."""
    return torch.tensor(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min, dtype=tensor.dtype)


def on_a_cpu() -> None:
    """Let vLLM take this for a CPU, whatever it was built for, and be one process of one."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    if not vllm.platforms.current_platform.is_cpu():
        import_module("vllm._C_stable_libtorch")  # layers look their kernels up when they are made
        vllm.platforms._current_platform = CpuPlatform()
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    with tempfile.NamedTemporaryFile() as file, set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{file.name}", 0, "gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)


def fill_all(cases: Sequence[Case]) -> int:
    """Fill every case's drafter, say what came of it, and count the failures."""
    failures = 0
    for case in cases:
        try:
            count, left = filled(case)
        except (AssertionError, RuntimeError, ValueError, KeyError) as error:
            count, left = 0, [f"{type(error).__name__}: {' '.join(str(error).split())}"]
        failures += bool(left)
        print(f"{case.name}: " + (f"NOT LOADED: {', '.join(left)}" if left else f"{count} tensors filled"), flush=True)
    return failures


def main() -> None:
    """Check the checkpoints that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="*", type=Path, help="folders; the committed drafters by default")
    parser.add_argument("--verifier", help="another place of the verifier than the checkpoints name")
    options = parser.parse_args()
    checkpoints = options.checkpoints or sorted(file.parent for file in COMMITTED.glob("*/model*.index.json"))
    os.environ["VLLM_PLUGINS"] = ""  # vLLM calls none by itself
    on_a_cpu()
    print(f"vLLM {installed()}")
    with tempfile.TemporaryDirectory() as scratch:
        failures = fill_all(cases_alone(checkpoints, options.verifier, Path(scratch)))
        plugin.register()
        failures += fill_all([Case(f"{one.name}, plugin", str(one), planned(one, options.verifier)) for one in checkpoints])
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
