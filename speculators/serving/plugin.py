"""The vLLM plugin: walks THE registry and makes vLLM accept every algorithm in it.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). Afterwards

- our method strings stand wherever vLLM takes one: they are translated before vLLM validates them, and where none is
  given, the checkpoint says which algorithm it is;
- keys of our checkpoints that vLLM drops reach its drafter models (`PluginParts.complete`);
- drafter models and speculators of ours draft inside vLLM, over its paged key/value cache (`PluginParts.models`,
  `.speculator`);
- algorithms that vLLM has no method for draft through vLLM's `custom_class` interface (`PluginParts.proposer`).

Nothing here knows an algorithm by name.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any

from speculators.errors import SpeculatorsError
from speculators.registry import Algorithm, PluginParts, algorithms
from speculators.serving.context_graphs import replay_context
from speculators.serving.cpu_repairs import repair_cpu
from speculators.serving.pass_graphs import replay_passes
from speculators.serving.translation import translate
from speculators.serving.versions import installed

_logger = logging.getLogger("vllm.speculators")
DONE = "_speculators_plugin"  # marks what is replaced already


def register() -> None:
    """Extend the vLLM of this process; a second call changes nothing.

    Raises nothing: a server that would start without the plugin starts with it. What could not be extended is logged.
    """
    if installed() is None:
        _logger.warning("the speculators plugin found no vLLM; nothing is extended")
        return
    try:
        registered = algorithms()
    except SpeculatorsError as error:
        _logger.warning("the speculators plugin extends nothing: %s", error)
        return
    for what, extend in _EXTENSIONS.items():
        try:
            extend(registered)
        except (ImportError, AttributeError, NotImplementedError) as error:  # this vLLM keeps it elsewhere, or has none
            _logger.warning("the speculators plugin cannot extend %s of vLLM %s (%s)", what, installed(), error)


def load(name: str) -> Any:
    """The object that "module:name" names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _accept_method_strings(registered: dict[str, Algorithm]) -> None:
    """Translate the user's speculative config before vLLM validates it."""
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_speculative_config
    if hasattr(create, DONE):
        return

    @functools.wraps(create)
    def create_translated(self: Any, *args: Any, **kwargs: Any) -> Any:
        for flag, key in (("spec_method", "method"), ("spec_model", "model"), ("spec_tokens", "num_speculative_tokens")):
            value = getattr(self, flag, None)  # vLLM's short options
            if value is not None and key not in (self.speculative_config or {}):
                self.speculative_config = {**(self.speculative_config or {}), key: value}
                setattr(self, flag, None)
        if self.speculative_config is not None:
            self.speculative_config, extra = translate(self.speculative_config)
            self.additional_config = {**(self.additional_config or {}), **extra}
        return create(self, *args, **kwargs)

    setattr(create_translated, DONE, True)
    EngineArgs.create_speculative_config = create_translated


def _complete_configs(registered: dict[str, Algorithm]) -> None:
    """Let each algorithm add what vLLM leaves out when it turns a checkpoint's config.json into a transformers config."""
    from vllm.transformers_utils.configs.speculators.algos import SUPPORTED_SPECULATORS_TYPES as updaters

    for name, algorithm in registered.items():
        complete = algorithm.serving.plugin.complete
        if complete is not None and name in updaters and not hasattr(updaters[name], DONE):
            updaters[name] = _completed(updaters[name], complete)


def _completed(update: Callable[..., None], complete: Callable[[dict[str, Any], dict[str, Any]], None]) -> Callable[..., None]:
    @functools.wraps(update)
    def both(config_dict: dict[str, Any], pre_trained_config: dict[str, Any]) -> None:
        update(config_dict=config_dict, pre_trained_config=pre_trained_config)
        complete(config_dict, pre_trained_config)

    setattr(both, DONE, True)
    return both


def _add_models(registered: dict[str, Algorithm]) -> None:
    """Register drafter models; vLLM imports them when a checkpoint names their architecture."""
    from vllm.model_executor.models.registry import ModelRegistry

    for algorithm in registered.values():
        for architecture, name in algorithm.serving.plugin.models.items():
            ModelRegistry.register_model(architecture, name)


def _add_speculators(registered: dict[str, Algorithm]) -> None:
    """Build our subclass of vLLM's speculator where an algorithm declares one, and let vLLM's V2 runner take it."""
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu import spec_decode

    init, unsupported = spec_decode.init_speculator, VllmConfig._get_v2_model_runner_unsupported_features
    if hasattr(init, DONE):
        return

    @functools.wraps(init)
    def init_ours(vllm_config: Any, device: Any, *args: Any, **kwargs: Any) -> Any:  # 0.26 passes less than 0.32
        name = parts_for(registered, vllm_config.speculative_config).speculator
        return init(vllm_config, device, *args, **kwargs) if name is None else load(name)(vllm_config, device)

    @functools.wraps(unsupported)
    def unsupported_with_ours(self: Any) -> list[str]:
        lifted = parts_for(registered, self.speculative_config).lifts
        return [feature for feature in unsupported(self) if feature not in lifted]

    setattr(init_ours, DONE, True)
    spec_decode.init_speculator = init_ours
    runner = sys.modules.get("vllm.v1.worker.gpu.model_runner")
    if runner is not None:  # it was imported before, and holds the function under its own name
        setattr(runner, "init_speculator", init_ours)  # noqa: B010 (unknown to type checkers)
    VllmConfig._get_v2_model_runner_unsupported_features = unsupported_with_ours


def parts_for(registered: dict[str, Algorithm], settings: Any) -> PluginParts:
    """What the plugin adds for vLLM's speculative config; of several algorithms with its method, the one that declares most of it."""
    described = [algorithm.serving for algorithm in registered.values() if algorithm.serving.describes(settings)]
    return max(described, key=lambda serving: len(serving.options)).plugin if described else PluginParts()


def _replay_context(registered: dict[str, Algorithm]) -> None:
    replay_context()


def _replay_passes(registered: dict[str, Algorithm]) -> None:
    replay_passes()


def _repair_cpu(registered: dict[str, Algorithm]) -> None:
    repair_cpu()


_EXTENSIONS: dict[str, Callable[[dict[str, Algorithm]], None]] = {
    "the method strings": _accept_method_strings,
    "the checkpoint configurations": _complete_configs,
    "the drafter models": _add_models,
    "the speculators": _add_speculators,
    "the injection of context": _replay_context,
    "the later passes of a draft": _replay_passes,
    "the CPU kernels": _repair_cpu,
}
