"""While the public speculators library trains, ours finds its loss at every step from the weights it has there."""

from __future__ import annotations

import json
import math
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_jobs import CASES, DOCUMENTS, PEER_PYTHON, Case, K, kept_chains, our_drafter, peer_batch, pinned_draws, save_verifier
from safetensors.torch import load_file, save_file
from tiny_drafters import packed_batch
from torch import Tensor

from speculators.algorithms.anchors import Anchors
from speculators.algorithms.peagle import ChainLayout, PEagle
from speculators.checkpoint import save
from speculators.speculator import Speculator
from speculators.training.batch import TrainingBatch

pytestmark = pytest.mark.skipif(PEER_PYTHON is None, reason="needs the public speculators library: make test-parity")

STEPS, CHAINS = 100, 6
# Anchors whose blocks end inside their document's reply: there both libraries supervise the same slots.
CHOICES = [t for start, length in zip((0, DOCUMENTS[0]), DOCUMENTS, strict=True) for t in range(start + 4, start + length - K)]
# Our objective that is the peer's, and the peer's own arguments. Its total variation is half of L1.
OBJECTIVES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "peagle": ({"kl": 1.0, "num_depths": K}, {"loss_fn": "kl_div"}),
    "dflash": (
        {"cross_entropy": 1.0, "labels": "verifier", "position_weights": "dpace", "dpace_alpha": 0.5},
        {"loss_fn": "ce", "per_position_loss_weight": "dpace", "dpace_alpha": 0.5},
    ),
    "dspark-vanilla": (
        {"cross_entropy": 0.1, "labels": "verifier", "l1": 0.45, "decay": 4.0, "confidence": 1.0},
        {"loss_fn": json.dumps({"ce": 0.1, "tv": 0.9}), "dflash_decay_gamma": 4.0, "confidence_head_alpha": 1.0},
    ),
}


def anchors_of_step(step: int) -> list[int]:
    """Six anchors; for P-EAGLE the order decides whose chain goes deeper."""
    order = torch.randperm(len(CHOICES), generator=torch.Generator().manual_seed(step))
    return [CHOICES[i] for i in order[:CHAINS]]


def labelled_slots(batch: TrainingBatch) -> TrainingBatch:
    """For input fusion the peer masks a slot by the token it reads; this masks it by the token it predicts, as we do."""
    following = batch.loss_mask.roll(-1, 1) & (batch.document_ids.roll(-1, 1) == batch.document_ids)
    following[:, -1] = False
    return replace(batch, loss_mask=following)


def peer_run(name: str, case: Case, folder: Path, checkpoint: Path) -> dict[str, Tensor]:
    """The peer's weights before every step, and its losses."""
    batches, draws = {}, []
    for step in range(STEPS):
        batch, anchors = packed_batch(DOCUMENTS, seed=1000 + step), anchors_of_step(step)
        if case.is_block:
            anchors = sorted(anchors)
        given = peer_batch(case, batch if case.is_block else labelled_slots(batch))
        batches.update({f"{step}.{key}": values.clone() for key, values in given.items()})
        draws.append(pinned_draws(case, batch, anchors))
    save_file(batches, folder / f"{name}-batches.safetensors")
    job = {
        "checkpoint": str(checkpoint),
        "arguments": {"max_anchors": CHAINS, "num_depths": K, "down_sample_ratio": 1.0, **OBJECTIVES[name][1]},
        "attention": "sdpa",
        "batches": str(folder / f"{name}-batches.safetensors"),
        "draws": draws,
        "output": str(folder / f"{name}-weights.safetensors"),
    }
    (folder / f"{name}.json").write_text(json.dumps(job))
    command = [str(PEER_PYTHON), "-I", str(Path(__file__).with_name("peer_training.py")), str(folder / f"{name}.json")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert run.returncode == 0, run.stdout[-4000:]
    return load_file(folder / f"{name}-weights.safetensors")


def our_loss(speculator: Speculator, case: Case, batch: TrainingBatch, anchors: list[int]) -> float:
    """Our objective as a mean over supervised slots, which is how the peer divides."""
    if case.is_block:
        output = speculator.loss_at(batch, Anchors.at(batch, torch.tensor([sorted(anchors)])))  # type: ignore[operator]
        supervised = output.metrics["cross_entropy"][1].sum()
        return float(output.loss * output.metrics["loss"][1] / supervised)
    assert isinstance(speculator, PEagle)
    # Depth 0 of every pair, deeper elements of the chosen chains only: those rank first.
    every = [t for t in range(sum(DOCUMENTS)) if batch.position_ids[0, t] > 0]
    rank = {anchor: number for number, anchor in enumerate([*anchors, *(t for t in every if t not in anchors)])}
    all_pairs = Anchors.at(batch, torch.tensor([every]), rank=torch.tensor([[rank[t] for t in every]]))
    layout = ChainLayout.of(all_pairs, [len(every), *kept_chains(anchors)[1:]])
    return float(speculator._segment_loss(batch, layout, speculator.depth_zero(batch), *speculator.masked_inputs())[0].loss)


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_a_hundred_losses_of_the_peers_training_are_ours(name: str, tmp_path: Path) -> None:
    case, verifier = CASES[name], save_verifier(tmp_path / "verifier")
    speculator = our_drafter(case, verifier)
    save(speculator, tmp_path / "drafter", dtype="float32")
    theirs = peer_run(name, case, tmp_path, tmp_path / "drafter")
    training = speculator.config.training_options  # type: ignore[attr-defined]
    speculator.config = speculator.config.model_copy(
        update={"training_options": type(training).model_validate({**OBJECTIVES[name][0], "anchors": CHAINS})}
    )
    losses = theirs.pop("losses")
    assert len(losses) == STEPS and losses[-1] < losses[0]
    parameters, different = dict(speculator.named_parameters()), 0
    for step in range(STEPS):
        with torch.no_grad():
            for key, value in theirs.items():
                if key.startswith(f"{step}."):
                    ours = parameters[key.partition(".")[2]]
                    different += step > 0 and not torch.equal(ours, value)
                    ours.copy_(value)
            found = our_loss(speculator, case, packed_batch(DOCUMENTS, seed=1000 + step), anchors_of_step(step))
        assert math.isclose(found, float(losses[step]), rel_tol=1e-4, abs_tol=1e-4), (step, found, float(losses[step]))
    assert different > STEPS  # the weights moved: these are a hundred different drafters
