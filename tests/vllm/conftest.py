"""Tests against real vLLM, in a venv of its own: `make test-vllm`. Elsewhere nothing here is collected."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, entry_points, version

# Set before vLLM is imported. One process, so that its rounds can be watched; small caches; no threads pinned to cores.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# No plugin by itself: what vLLM does alone is tested first, and tests of the plugin call it.
os.environ["VLLM_PLUGINS"] = ""


def _runs_here() -> bool:
    try:
        version("vllm")
    except PackageNotFoundError:
        return False
    return bool(entry_points(group="triton.backends", name="cpu"))


if not _runs_here():
    collect_ignore_glob = ["*"]
