"""Real servers: `vllm serve CHECKPOINT` alone, and `speculators serve` where the plugin drafts; one HTTP request each."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import served

HERE = Path(__file__).parent
ARGUMENTS = ["--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "4", "--enforce-eager", "--block-size", "32"]
NATIVE = ["eagle3", "peagle", "dflash", "dspark", "dspark-fill-in"]
PLUGIN = ["peagle", "dspark-gated", "dspark-rnn", "toy"]


@contextmanager
def server(command: list[str], log: Path, **variables: str) -> Iterator[str]:
    """Start it, wait until it answers, and end it; yields its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **variables}
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", *({"VLLM_PLUGINS"} - variables.keys())):
        environment.pop(name, None)
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *ARGUMENTS, "--port", str(port)], stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(1)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=60)


def ask(address: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def accepted_tokens(address: str) -> float:
    with urllib.request.urlopen(f"{address}/metrics", timeout=60) as response:
        text = response.read().decode()
    (value,) = re.findall(r"^vllm:spec_decode_num_accepted_tokens_total\{[^}]*\} (\S+)$", text, re.MULTILINE)
    return float(value)


def assert_answers(address: str) -> None:
    """The greedy replies of the verifier alone, with accepted drafts."""
    body = {"prompt": served.prompts(), "max_tokens": served.REPLY_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    choices = sorted(ask(address, body)["choices"], key=lambda choice: choice["index"])
    assert [choice["token_ids"] for choice in choices] == served.replies()
    assert accepted_tokens(address) > len(served.prompts())


@pytest.mark.parametrize("name", NATIVE)
def test_vllm_serves_the_bare_checkpoint(name: str, tmp_path: Path) -> None:
    command = [str(Path(sys.executable).parent / "vllm"), "serve", served.checkpoint(name)]
    with server(command, tmp_path / "log", VLLM_PLUGINS="") as address:
        assert_answers(address)


@pytest.mark.parametrize("name", PLUGIN)
def test_speculators_serve_starts_what_the_plugin_drafts(name: str, tmp_path: Path) -> None:
    """The toy is installed as a third party's package would be: a module, and an entry point that names it."""
    package = tmp_path / "toy-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[speculators.algorithms]\ntoy = toy_algorithm\n")
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(HERE.parent), str(tmp_path)])
    command = [str(Path(sys.executable).parent / "speculators"), "serve", served.checkpoint(name), "--"]
    with server(command, tmp_path / "log", PYTHONPATH=path) as address:
        assert_answers(address)
