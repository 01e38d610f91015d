"""What the layout promises: two top-level folders that exist only under `speculators`, and a tree fit to publish."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points, metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CODE_FOLDERS = ("speculators", "algorithms", "kernels")
PICKLED = {".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"}
MEBIBYTE = 2**20

IMPORT_WITH_ROOT_ON_PATH = """
import importlib.util, os, sys
assert os.path.dirname(importlib.util.find_spec("kernels").origin) == os.path.join(os.getcwd(), "kernels")
import torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(config).eval()
logits = model(torch.tensor([[1, 2, 3]])).logits
assert logits.shape == (1, 3, 32) and bool(logits.isfinite().all())
print("ran")
"""


def run_python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter whose sys.path starts with `folder`."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def project_files() -> list[Path]:
    """Files that git tracks or would track; all files where the tree is no git checkout."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode != 0:
        return [path for path in ROOT.rglob("*") if path.is_file() and not {".venv", "build"} & set(path.relative_to(ROOT).parts)]
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_a_source_tree_on_the_path_imports_whole_without_being_installed() -> None:
    # What `python -m` at its root finds before anything installed.
    code = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder).lower()]
import speculators.algorithms.dflash, speculators.kernels.dot, os
for module in (speculators.algorithms.dflash, speculators.kernels.dot):
    assert os.path.dirname(os.path.dirname(module.__file__)) == os.getcwd(), module.__file__
print("found")
"""
    result = run_python(code, ROOT)
    assert result.stdout.strip() == "found", result.stderr


@pytest.mark.parametrize("name", ["algorithms", "kernels"])
def test_no_top_level_package_is_installed_beside_speculators(name: str, tmp_path: Path) -> None:
    code = f"import importlib.util as u; print(u.find_spec({name!r}), u.find_spec('speculators.{name}').name)"
    result = run_python(code, tmp_path)
    assert result.stdout == f"None speculators.{name}\n", result.stderr


def test_transformers_runs_with_the_repository_root_on_the_path() -> None:
    # transformers probes for a package called `kernels`, finds our folder there and imports it.
    result = run_python(IMPORT_WITH_ROOT_ON_PATH, ROOT)
    assert result.stdout == "ran\n", result.stderr


@pytest.mark.parametrize("path", python_files("algorithms", "kernels"), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_are_absolute_so_that_a_module_works_under_either_name(path: Path) -> None:
    imported = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            imported.append("." * node.level + (node.module or ""))
        elif isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
    assert [name for name in imported if name.startswith(".") or name.split(".")[0] in ("algorithms", "kernels")] == []


def test_every_package_folder_is_listed_in_pyproject() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent.relative_to(ROOT).parts for path in python_files(*CODE_FOLDERS)}
    names = {".".join(parts if parts[0] == "speculators" else ("speculators", *parts)) for parts in folders}
    assert set(settings["packages"]) == names
    assert settings["package-dir"] == {
        "speculators": "speculators",
        "speculators.algorithms": "algorithms",
        "speculators.kernels": "kernels",
    }


def test_nothing_in_the_library_unpickles() -> None:
    offences = []
    for path in python_files(*CODE_FOLDERS):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            pickles = bool({"pickle", "dill", "cloudpickle", "joblib"} & set(modules))
            call = ast.unparse(node) if isinstance(node, ast.Call) else ""
            if pickles or (call.startswith("torch.load(") and "weights_only=True" not in call):
                offences.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert offences == []


def test_the_tree_holds_no_pickled_weights_and_no_file_over_16_mebibytes() -> None:
    files = project_files()
    assert ROOT / "pyproject.toml" in files
    assert [path for path in files if path.suffix in PICKLED or path.stat().st_size > 16 * MEBIBYTE] == []


def test_the_tree_names_no_path_of_anybodys_machine() -> None:
    absolute = re.compile(rb"(?<![\w.])/(work|root|home|Users)/[\w.-]+")
    texts = [path for path in project_files() if path.suffix != ".safetensors"]
    assert [f"{path}: {found[0].decode()}" for path in texts if (found := absolute.search(path.read_bytes()))] == []


def test_the_distribution_is_typed_licensed_and_has_its_extras() -> None:
    facts = metadata("unified-speculators")
    assert (ROOT / "speculators" / "py.typed").is_file()
    assert facts["License-Expression"] == "Apache-2.0"
    assert (ROOT / "LICENSE").read_text().lstrip().startswith("Apache License")
    assert {"demo", "train", "notebooks", "vllm", "dev"} <= set(facts.get_all("Provides-Extra") or [])


def test_the_console_script_starts_the_command_line() -> None:
    (script,) = [point for point in entry_points(group="console_scripts") if point.name == "speculators"]
    assert script.value == "speculators.cli.main:app"
    assert callable(script.load())
