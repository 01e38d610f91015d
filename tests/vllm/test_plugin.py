"""What this library's plugin adds to vLLM. These tests change the vLLM of their process, so they come after those of vLLM alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import served
from claims import assert_serves

from speculators.serving import plugin, speculative_config


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    plugin.register()
    plugin.register()  # vLLM does so in every process, sometimes twice
    yield


def drafted_with(settings: dict[str, Any], name: str, **options: Any) -> Any:
    return assert_serves(name, served.verifier().weights.name_or_path, speculative_config=settings, **options)


@pytest.mark.parametrize("name", ["dspark-gated", "dspark-rnn", "dspark-rnn-fill-in", "dspark-no-head"])
def test_heads_that_vllm_does_not_know_draft_inside_it_over_its_paged_cache(name: str) -> None:
    config = drafted_with(speculative_config(served.checkpoint(name)), name)
    assert config.use_v2_model_runner and config.speculative_config.method == "dspark"


def test_a_third_party_algorithm_drafts_inside_vllm() -> None:
    config = drafted_with({"method": "toy", "model": served.checkpoint("toy")}, "toy", enable_prefix_caching=True)
    assert config.speculative_config.method == "custom_class"
    assert config.speculative_config.num_speculative_tokens == served.K  # from the checkpoint


@pytest.mark.parametrize("name", ["peagle", "peagle-reduced"])
def test_peagle_drafts_in_the_second_runner_under_our_method_string(name: str) -> None:
    config = drafted_with({"method": "peagle", "model": served.checkpoint(name), "num_speculative_tokens": served.K}, name)
    assert config.speculative_config.method == "eagle3" and config.speculative_config.parallel_drafting
    assert config.use_v2_model_runner


def test_a_checkpoint_without_a_method_says_itself_what_it_is() -> None:
    config = drafted_with({"model": served.checkpoint("dspark-fill-in")}, "dspark-fill-in")
    assert config.speculative_config.method == "dspark"
    assert config.speculative_config.num_speculative_tokens == served.K  # vLLM alone would take the block size, K + 1


def test_a_checkpoint_that_says_bidirectional_for_sliding_layers_only_is_read_as_meant(tmp_path: Path) -> None:
    """Files of other writers hold `sliding_window_non_causal: false` beside full attention; vLLM alone would draft causally."""
    copy = tmp_path / "drafter"
    shutil.copytree(served.checkpoint("dflash"), copy)
    config = json.loads((copy / "config.json").read_text())
    assert config["sliding_window_non_causal"] is True
    (copy / "config.json").write_text(json.dumps({**config, "sliding_window_non_causal": False}))
    drafted_with(speculative_config(copy), "dflash")
