"""Layouts and runners beyond the one case a method."""

from __future__ import annotations

import pytest
import served
from claims import assert_serves

from speculators.serving import speculative_config


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_the_first_runner_serves_it_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert_serves(name)


def test_a_block_whose_anchor_slot_only_conditions_is_served_as_the_drafter_of_its_verifier() -> None:
    settings = speculative_config(served.checkpoint("dspark-fill-in"))
    assert_serves("dspark-fill-in", served.verifier().weights.name_or_path, speculative_config=settings)


@pytest.mark.parametrize("name", ["eagle3-reduced", "dflash-reduced", "dspark-reduced"])
def test_a_reduced_draft_vocabulary_is_served(name: str) -> None:
    assert_serves(name)
