"""THE registry: a method string finds an algorithm, how it is configured and how it is served.

Everything looks an algorithm up here and nowhere else: `Speculator.from_pretrained`, the commands'
`--method`, the notebooks, the trainer and the vLLM plugin. Adding an algorithm is one decorated class:

    @register_algorithm("dflash", serving=VllmServing(method="dflash"))
    class DFlash(Speculator): ...

Third parties register through the entry-point group `speculators.algorithms`; each entry point names a
module whose import registers its algorithms.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, TypeVar

from speculators.errors import ConfigError

if TYPE_CHECKING:
    from speculators.speculator import Speculator

ENTRY_POINT_GROUP = "speculators.algorithms"
SpeculatorClass = TypeVar("SpeculatorClass", bound="type[Speculator]")


@dataclass(frozen=True)
class Need:
    """Something in a checkpoint that not every vLLM serves as it is.

    Attributes:
        what: the key, its value and what vLLM makes of it, as one clause.
        since: the release from which vLLM serves it without help; None for none yet.
        runner: the only model runner that serves it; None for any.
        plugin: whether this library's vLLM plugin supplies it.
        remedy: another way out, as one clause; empty for none.
    """

    what: str
    since: str | None = None
    runner: str | None = None
    plugin: bool = False
    remedy: str = ""

    def __str__(self) -> str:
        """One sentence without its full stop."""
        ways = ["this library's vLLM plugin serves it"] if self.plugin else []
        ways += [self.remedy] if self.remedy else []
        return f"{self.what}; {', or '.join(ways)}" if ways else self.what


@dataclass(frozen=True)
class PluginParts:
    """What this library's vLLM plugin adds to vLLM for an algorithm. Classes are named "module:Class", imported inside vLLM only.

    Attributes:
        models: drafter models by the architecture under which vLLM looks them up.
        speculator: subclass of vLLM's own speculator (V2 runner) that drafts for the algorithm's method with its options.
        lifts: what vLLM says its V2 runner does not support, in its words, and `speculator` does.
        complete: called as complete(config.json, transformers config made of it) to add what vLLM does not take over;
            edits the second in place.
        proposer: drafts for algorithms that vLLM has no method for (V1 runner).
    """

    models: dict[str, str] = field(default_factory=dict)
    speculator: str | None = None
    lifts: tuple[str, ...] = ()
    complete: Callable[[dict[str, Any], dict[str, Any]], None] | None = None
    proposer: str = "speculators.serving.proposer:SpeculatorProposer"


@dataclass(frozen=True)
class VllmServing:
    """How vLLM serves an algorithm.

    Attributes:
        method: the `method` of vLLM's `--speculative-config`; None when vLLM has no native drafter for it.
        architecture: the name written into `architectures` of config.json.
        options: further keys of the speculative config, e.g. `{"parallel_drafting": True}`.
        runners: vLLM model runners that can serve it without the plugin, best first.
        parallel: whether all K tokens come from one pass, for which vLLM keeps up to K slots of a step's budget a sequence.
        minimum_version: the oldest vLLM that is known to serve it.
        needs: from a configuration, everything in it that not every vLLM serves as it is.
        plugin: what the plugin adds.
        sglang: arguments that choose the algorithm in SGLang, `{k}` standing for K; empty when it has none.
    """

    method: str | None
    architecture: str
    options: dict[str, Any] = field(default_factory=dict)
    runners: tuple[str, ...] = ("V1", "V2")
    parallel: bool = False
    minimum_version: str | None = None
    needs: Callable[[Any], Sequence[Need]] = lambda _: ()
    plugin: PluginParts = field(default_factory=PluginParts)
    sglang: tuple[str, ...] = ()

    def describes(self, settings: Any) -> bool:
        """Whether vLLM's speculative config has the algorithm's method and options."""
        absent = object()
        own = {"method": self.method, **self.options}
        return all(getattr(settings, key, absent) == value for key, value in own.items())

    @property
    def runners_with_plugin(self) -> tuple[str, ...]:
        """The model runners that can serve it where vLLM finds the plugin, best first."""
        added = ("V2",) if self.plugin.speculator is not None and "V2" not in self.runners else ()
        return (*added, *self.runners)

    def caveats(self, config: Any) -> list[str]:
        """What no vLLM release serves by itself in a configuration, or one model runner only; a sentence each."""
        return [str(need) for need in self.needs(config) if need.since is None or need.runner is not None]

    def minimum_version_for(self, config: Any) -> str | None:
        """The oldest vLLM that serves this configuration without the plugin, as far as any does."""
        versions = [need.since for need in self.needs(config) if need.since is not None]
        versions += [self.minimum_version] if self.minimum_version is not None else []
        return max(versions, key=lambda text: [int(part) for part in text.split(".")], default=None)

    def speculative_config(self, model: str, num_draft_tokens: int) -> dict[str, Any]:
        """What `vllm serve --speculative-config` takes for a checkpoint of this algorithm.

        Args:
            model: folder or Hub name of the checkpoint.
            num_draft_tokens: K.
        """
        return {"method": self.method, "model": model, "num_speculative_tokens": num_draft_tokens, **self.options}

    def command(self, verifier: str, model: str, num_draft_tokens: int) -> str:
        """The shell command that serves a verifier with a checkpoint of this algorithm; arguments as `speculative_config`."""
        settings = json.dumps(self.speculative_config(model, num_draft_tokens))
        runner = "" if "V1" in self.runners else "VLLM_USE_V2_MODEL_RUNNER=1 "
        return f"{runner}vllm serve {shlex.quote(verifier)} --speculative-config {shlex.quote(settings)}"


@dataclass(frozen=True)
class Algorithm:
    """One registered algorithm."""

    name: str
    speculator_class: type[Speculator]
    serving: VllmServing
    summary: str


_ALGORITHMS: dict[str, Algorithm] = {}
_loaded = False


def register_algorithm(name: str, *, serving: VllmServing) -> Callable[[SpeculatorClass], SpeculatorClass]:
    """Register a `Speculator` subclass under a method string.

    Args:
        name: the method string, also `speculators_model_type` on disk.
        serving: what vLLM needs to know.

    Raises:
        ConfigError: another class already holds this name.
    """

    def decorate(cls: SpeculatorClass) -> SpeculatorClass:
        known = _ALGORITHMS.get(name)
        # The same module and name again is a reload, e.g. a notebook cell that was run twice.
        if known is not None and _full_name(known.speculator_class) != _full_name(cls):
            raise ConfigError(
                f"the method name {name!r} is already registered by {_full_name(known.speculator_class)}; choose another name for"
                f" {_full_name(cls)}"
            )
        cls.method, cls.serving = name, serving
        summary = (cls.__doc__ or "").strip().splitlines()
        _ALGORITHMS[name] = Algorithm(name, cls, serving, summary[0] if summary else "")
        return cls

    return decorate


def _full_name(cls: type[Speculator]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _load_all() -> None:
    """Import the built-in algorithm modules and every installed third-party one, once.

    Raises:
        ConfigError: a third-party module cannot be imported.
    """
    global _loaded
    if _loaded:
        return
    _loaded = True  # first, so that a module may look up another algorithm while it is being imported
    try:
        package = importlib.import_module("speculators.algorithms")
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"speculators.algorithms.{module.name}")
        for entry_point in entry_points(group=ENTRY_POINT_GROUP):
            _load_entry_point(entry_point)
    except BaseException:
        _loaded = False  # the next lookup says the same again, instead of working with half a registry
        raise


def _load_entry_point(entry_point: EntryPoint) -> None:
    try:
        entry_point.load()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the installed algorithm {entry_point.name!r} ({entry_point.value}) cannot be imported: {error}; mend or uninstall its package"
        ) from error


def algorithms() -> dict[str, Algorithm]:
    """Every registered algorithm by method string, in alphabetical order."""
    _load_all()
    return dict(sorted(_ALGORITHMS.items()))


def get_algorithm(name: str) -> Algorithm:
    """Look one algorithm up.

    Raises:
        ConfigError: no algorithm has this name; the message lists those that exist.
    """
    known = algorithms()
    if name not in known:
        raise ConfigError(f"unknown method {name!r}: registered methods are {', '.join(known)}")
    return known[name]
