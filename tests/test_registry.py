"""One lookup finds every algorithm, the library's own and those of other packages."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from speculators import registry
from speculators.errors import ConfigError
from speculators.registry import ENTRY_POINT_GROUP, VllmServing, algorithms, get_algorithm, register_algorithm
from speculators.speculator import Speculator

BUILT_IN = ("dflash", "dspark", "eagle3", "peagle")
SERVING = VllmServing(method=None, architecture="Toy")


@pytest.fixture(autouse=True)
def restore_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test works on a copy of the registry, without what other test modules registered."""
    monkeypatch.setattr(registry, "_ALGORITHMS", {name: algorithms()[name] for name in BUILT_IN})


def toy_class(name: str = "Toy", module: str = __name__) -> type[Speculator]:
    return type(name, (Speculator,), {"__doc__": "Drafts nothing.\n\nAt length.", "__module__": module, "__qualname__": name})


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, source: str) -> None:
    """Install a third-party package holding one module `toy_package` with this source."""
    (folder / "toy_package.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "toy_package", raising=False)
    installed = EntryPoint(name="toy", value="toy_package", group=ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda *, group: [installed] if group == ENTRY_POINT_GROUP else [])
    monkeypatch.setattr(registry, "_loaded", False)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_method_string_finds_its_class_and_how_it_is_served(name: str) -> None:
    algorithm = get_algorithm(name)
    assert algorithm.name == algorithm.speculator_class.method == name
    assert issubclass(algorithm.speculator_class, Speculator)
    assert algorithm.serving.method is not None  # vLLM serves all four
    assert algorithm.summary == (algorithm.speculator_class.__doc__ or "").splitlines()[0]


def test_algorithms_are_listed_in_alphabetical_order() -> None:
    register_algorithm("aardvark", serving=SERVING)(toy_class())
    assert list(algorithms()) == ["aardvark", *BUILT_IN]


def test_an_unknown_method_is_answered_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"unknown method 'medusa': registered methods are dflash, dspark, eagle3, peagle$"):
        get_algorithm("medusa")


def test_a_name_belongs_to_one_class() -> None:
    known = get_algorithm("dflash").speculator_class
    with pytest.raises(ConfigError, match=r"'dflash' is already registered by speculators\.algorithms\.dflash\.DFlash"):
        register_algorithm("dflash", serving=SERVING)(toy_class())
    # A class of the same name elsewhere is another class all the same.
    with pytest.raises(ConfigError, match=r"choose another name for elsewhere\.DFlash"):
        register_algorithm("dflash", serving=SERVING)(toy_class("DFlash", "elsewhere"))
    assert get_algorithm("dflash").speculator_class is known


def test_the_same_class_may_be_registered_again_so_that_notebook_cells_can_be_rerun() -> None:
    register_algorithm("toy", serving=SERVING)(toy_class())
    second = register_algorithm("toy", serving=SERVING)(toy_class())
    assert get_algorithm("toy").speculator_class is second


def test_an_installed_package_adds_an_algorithm_by_its_entry_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = '''
from speculators.registry import VllmServing, get_algorithm, register_algorithm

@register_algorithm("toy", serving=VllmServing(method=None, architecture="Toy"))
class Toy(get_algorithm("dflash").speculator_class):
    """Drafts as DFlash does."""
'''
    install(monkeypatch, tmp_path, source)
    algorithm = get_algorithm("toy")
    assert algorithm.speculator_class.__module__ == "toy_package"
    assert algorithm.summary == "Drafts as DFlash does."
    assert list(algorithms()) == [*BUILT_IN, "toy"]


def test_a_broken_package_is_named_at_every_lookup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, "import a_package_that_is_not_there")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"'toy' \(toy_package\) cannot be imported: No module named 'a_package_that_is_not_there'"):
            get_algorithm("dflash")
