"""P-EAGLE's training: depth 0 does not depend on chains, and partitioned sequences give the same gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_drafters import drafter, packed_batch
from torch import Tensor

from speculators.algorithms.anchors import Anchors, Supervision
from speculators.algorithms.objective import block_loss
from speculators.algorithms.peagle import PEagle, partition_chains
from speculators.training.batch import TrainingBatch

# Figure 4 of arXiv 2602.01469: sampled positions of depths 0 to 3 in a sequence of 16.
LENGTH, DEPTHS = 16, 4
SAMPLED = [list(range(16)), [1, 3, 4, 6, 7, 9, 10, 12, 14, 15], [2, 5, 7, 8, 11, 13, 15], [3, 6, 9, 12, 14]]


def example() -> tuple[PEagle, TrainingBatch, Anchors]:
    """A float64 drafter and one row on which every position of the figure is a pair: pair a precedes anchor token a + 1."""
    speculator = drafter("peagle", torch.float64, training={"keep_rate": 1.0, "num_depths": DEPTHS}, num_draft_tokens=DEPTHS)
    assert isinstance(speculator, PEagle)
    batch = packed_batch([LENGTH + DEPTHS + 1], prompt=0, dtype=torch.float64)
    return speculator, batch, Anchors.at(batch, torch.arange(1, LENGTH + 1)[None])


def element_mask(positions: list[list[int]]) -> Tensor:
    """[1, N, K] bool: element (position p, depth d) belongs to chain p - d."""
    mask = torch.zeros(1, LENGTH, DEPTHS, dtype=torch.bool)
    for depth, sampled in enumerate(positions):
        for position in sampled:
            mask[0, position - depth, depth] = True
    return mask


def loss_sum(speculator: PEagle, batch: TrainingBatch, anchors: Anchors, mask: Tensor) -> Tensor:
    """Unnormalised loss of the masked elements."""
    hidden = speculator.training_hidden(batch, anchors)
    supervision = Supervision.of(batch, anchors, DEPTHS)
    output, _, _ = block_loss(speculator, speculator.config.training_options, batch, supervision, hidden, mask=mask)
    return output.loss * mask.sum()


def gradients(speculator: PEagle, loss: Tensor) -> dict[str, Tensor]:
    """Gradient of every parameter."""
    names, parameters = zip(*speculator.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.parametrize("segments", [2, 3, 4])
def test_c17_segments_add_up_to_the_unpartitioned_loss_and_gradients(segments: int) -> None:
    speculator, batch, anchors = example()
    total = sum(len(sampled) for sampled in SAMPLED)
    assert total == 38
    whole = loss_sum(speculator, batch, anchors, element_mask(SAMPLED)) / total
    expected = gradients(speculator, whole)
    summed = torch.zeros((), dtype=torch.float64)
    added = {name: torch.zeros_like(value) for name, value in expected.items()}
    for number, part in enumerate(partition_chains(SAMPLED, LENGTH, segments)):
        # A segment needs no depth-0 position beyond its end: other features there change nothing.
        hidden = batch.hidden_states.clone()
        hidden[:, (number + 1) * LENGTH // segments + (LENGTH * (number + 1) % segments > 0) :] = 7.0
        loss = loss_sum(speculator, replace(batch, hidden_states=hidden), anchors, element_mask(part)) / total
        summed += loss.detach()
        for name, gradient in gradients(speculator, loss).items():
            added[name] += gradient
    torch.testing.assert_close(summed, whole.detach(), atol=1e-12, rtol=1e-12)
    for name, gradient in expected.items():
        torch.testing.assert_close(added[name], gradient, atol=1e-12, rtol=1e-10)


def test_detaching_the_context_of_chains_keeps_the_loss_and_breaks_the_gradients() -> None:
    """Why gradients are compared: the loss alone cannot tell."""
    speculator, batch, anchors = example()
    mask = element_mask([[], *SAMPLED[1:]])
    right = loss_sum(speculator, batch, anchors, mask)
    expected = gradients(speculator, right)
    stream = speculator.depth_zero

    def detached(batch: TrainingBatch) -> object:
        full = stream(batch)
        return replace(full, keys=[k.detach() for k in full.keys], values=[v.detach() for v in full.values])

    speculator.depth_zero = detached  # type: ignore[method-assign, assignment]
    wrong = loss_sum(speculator, batch, anchors, mask)
    torch.testing.assert_close(wrong, right)
    names, parameters = zip(*speculator.named_parameters(), strict=True)
    found = dict(zip(names, torch.autograd.grad(wrong, parameters, allow_unused=True), strict=True))
    fc = found["fc.weight"]
    assert fc is None or (fc - expected["fc.weight"]).norm() > 0.1 * expected["fc.weight"].norm()


def test_c18_depth_zero_outputs_are_independent_of_deeper_elements() -> None:
    speculator, batch, anchors = example()
    before = speculator.training_hidden(batch, anchors)[:, :, 0]
    with torch.no_grad():
        speculator.mask_hidden.add_(1.0)
    after = speculator.training_hidden(batch, anchors)
    assert torch.equal(after[:, :, 0], before)


def test_chains_cut_off_by_cod_are_left_out_of_the_loss() -> None:
    speculator = drafter("peagle", training={"keep_rate": 0.5, "num_depths": 4, "anchors": 16}, num_draft_tokens=4)
    batch = packed_batch([60])
    output = speculator.loss_at(batch, Anchors.at(batch, torch.arange(5, 21)[None]))  # type: ignore[operator]
    assert output.metrics["acceptance"][1].tolist() == [16.0, 8.0, 4.0, 2.0]
