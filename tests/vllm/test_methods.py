"""Checkpoints saved by this library, served by vLLM without a plugin's help: one case a method.

The checkpoint alone is what vLLM is given, as in `vllm serve CHECKPOINT`; it names its verifier.
"""

from __future__ import annotations

import pytest
from claims import assert_serves
from vllm.engine.arg_utils import EngineArgs

from speculators.serving import plugin


@pytest.mark.parametrize("name", ["eagle3", "peagle", "dflash", "dspark"])
def test_vllm_drafts_as_our_engine_does_and_answers_as_without_a_drafter(name: str) -> None:
    assert not hasattr(EngineArgs.create_speculative_config, plugin.DONE), "the plugin is not what is tested here"
    assert_serves(name)
