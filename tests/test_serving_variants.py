"""How `benchmarks/serving.py` reads its variants, and which engines it makes of them."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_drafters import drafter, verifier_weights
from transformers import LlamaConfig

from speculators.checkpoint import save


@pytest.fixture
def configurations(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import from benchmarks/, which is no package."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    yield importlib.import_module("serving_configurations")
    sys.modules.pop("serving_configurations")


def test_a_variant_names_its_settings_by_where_they_go(configurations: Any) -> None:
    variant = configurations.Variant.parse("lean:k=3,draft.attention_backend=TRITON_ATTN,max_num_seqs=8,enforce_eager,VLLM_A=1")
    assert (variant.name, variant.k, variant.environment) == ("lean", 3, {"VLLM_A": "1"})
    assert variant.speculative == {"attention_backend": "TRITON_ATTN"}
    assert configurations.as_settings(variant.arguments) == {"max_num_seqs": 8, "enforce_eager": True}
    with pytest.raises(argparse.ArgumentTypeError, match="no NAME:SETTING"):
        configurations.Variant.parse("lean")


def test_plain_decoding_is_measured_again_only_where_a_variant_changes_it(
    configurations: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = verifier_weights()
    save(drafter("eagle3"), tmp_path / "eagle3")
    LlamaConfig(vocab_size=weights.vocab_size, hidden_size=weights.hidden_size, num_hidden_layers=weights.num_layers).save_pretrained(
        tmp_path / "verifier"
    )
    monkeypatch.setattr(configurations, "installed", lambda: "0.26.0")
    variants = ["short:k=2", "triton:attention_backend=TRITON_ATTN", "graphs:attention_backend=TRITON_ATTN,SPECULATORS_X=1"]
    options = argparse.Namespace(
        only_variants=False,
        methods=["eagle3"],
        layouts=[],
        ks=None,
        checkpoints=tmp_path,
        verifier=str(tmp_path / "verifier"),
        variants=[configurations.Variant.parse(text) for text in variants],
    )
    made, refused = configurations.planned(options, ["--max-num-seqs", "4"])
    assert refused == {}
    assert [str(one) for one in made if one.k is None] == ["none", "none triton"]
    assert [str(one) for one in made if one.k is not None] == [
        "eagle3 K = 5",
        "eagle3 K = 2 short",
        "eagle3 K = 5 triton",
        "eagle3 K = 5 graphs",
    ]
