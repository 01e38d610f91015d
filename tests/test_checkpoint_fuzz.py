"""Whatever a config.json says, a checkpoint loads or is refused in one sentence of ours: no other exception escapes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_checkpoints import METHODS, reduced
from tiny_drafters import verifier_weights

from speculators.checkpoint import inspect, load, save
from speculators.errors import SpeculatorsError
from speculators.speculator import Speculator

VERIFIER = verifier_weights()
NUMBERS = st.sampled_from(
    [-1, 0, 1, 2, 3, 5, 7, 20, 61, 62, 10**6, 10**9, 2**31, 2**63, 10**30, 0.5, -2.0, 1e-300, 1e300, math.inf, math.nan]
)
SCALARS = st.none() | st.booleans() | NUMBERS | st.sampled_from(["", "yarn", "linear", "sliding_attention", "gelu", "rnn", "eagle3", "1"])
VALUES = (
    SCALARS
    | st.lists(SCALARS, max_size=3)
    | st.dictionaries(st.sampled_from(["rope_type", "rope_theta", "factor", "x"]), SCALARS, max_size=3)
)
REMOVED = object()


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One good checkpoint a method, of a reduced vocabulary: it has every kind of tensor there is."""
    root = tmp_path_factory.mktemp("originals")
    for method in METHODS:
        save(reduced(method), root / method)
    return {method: root / method for method in METHODS}


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where a JSON value holds anything: a path of keys and indices each."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def put(data: Any, path: tuple[str | int, ...], value: Any) -> None:
    """Replace what stands at a path, or remove it; nothing where an earlier change took the place away."""
    for key in path[:-1]:
        try:
            data = data[key]
        except (KeyError, IndexError, TypeError):
            return
    key = path[-1]
    if isinstance(data, dict) and value is REMOVED:
        data.pop(key, None)
    elif isinstance(data, dict) or (isinstance(data, list) and isinstance(key, int) and key < len(data)):
        data[key] = None if value is REMOVED else value  # type: ignore[index]


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_configuration_loads_or_is_refused_as_such(data: st.DataObject, originals: dict[str, Path], tmp_path: Path) -> None:
    method = data.draw(st.sampled_from(METHODS), label="method")
    config = json.loads((originals[method] / "config.json").read_text())
    for path in data.draw(st.lists(st.sampled_from(sorted(places(config), key=str)), min_size=1, max_size=3), label="places"):
        put(config, path, data.draw(VALUES | st.just(REMOVED), label="value"))
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = tmp_path / "model.safetensors"
    if weights.exists():
        weights.unlink()
    weights.symlink_to(originals[method] / weights.name)
    try:
        speculator = load(tmp_path, VERIFIER)
    except SpeculatorsError as error:
        assert "\n" not in str(error) and len(str(error)) < 700
    else:
        assert isinstance(speculator, Speculator) and speculator.is_attached
        assert inspect(tmp_path, VERIFIER).problems == ()


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255), cut=st.booleans())
def test_any_damaged_header_loads_or_is_refused_as_such(
    place: float, byte: int, cut: bool, originals: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((originals["dspark"] / "config.json").read_bytes())
    content = bytearray((originals["dspark"] / "model.safetensors").read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    if cut:
        del content[int(place * len(content)) :]
    else:
        content[int(place * header)] = byte
    (tmp_path / "model.safetensors").write_bytes(content)
    try:
        speculator = load(tmp_path, VERIFIER)
    except SpeculatorsError as error:
        assert "\n" not in str(error) and "model.safetensors" in str(error)
    else:
        assert not cut and speculator.is_attached
