"""The notebooks as files: valid, without outputs, and every code cell compiles. `make notebook` executes them."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def code_cells(notebook: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]


def test_the_comparison_notebook_exists() -> None:
    assert "compare_algorithms.ipynb" in [path.name for path in NOTEBOOKS]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_without_outputs(notebook: Path) -> None:
    for cell in code_cells(notebook):
        assert cell["outputs"] == [] and cell["execution_count"] is None


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_name_a_notebook_imports_from_the_library_exists(notebook: Path) -> None:
    import importlib

    imported = 0
    for cell in code_cells(notebook):
        source = "".join(line for line in cell["source"] if not line.startswith(("%", "!")))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("speculators"):
                module = importlib.import_module(str(node.module))
                for name in node.names:
                    assert hasattr(module, name.name), f"{node.module} has no {name.name}"
                    imported += 1
    assert imported > 0
