"""Every tensor that vLLM's drafter classes need comes from our checkpoints: `load_drafters.py`, which also runs where vLLM cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import served


def test_the_weights_of_every_drafter_load_into_vllms_classes() -> None:
    """Taps and layers of these drafters differ in number, so that a class sized by the wrong one would not take the weights."""
    names = [name for name in served.DRAFTERS if name != "toy"]
    folders = [served.checkpoint(name) for name in names]
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
    script = Path(__file__).with_name("load_drafters.py")
    run = subprocess.run([sys.executable, str(script), *folders], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    lines = run.stdout.splitlines()
    assert all(any(line.startswith(f"{name}, plugin: ") and line.endswith(" tensors filled") for line in lines) for name in names)
