"""Exact values computed by hand from the papers' definitions (arXiv 2602.01469, 2602.06036, 2607.05147)."""

from __future__ import annotations

import torch
from tiny_drafters import drafter, packed_batch

from speculators.algorithms.anchors import Anchors, Supervision, eligible_anchors
from speculators.algorithms.heads import MarkovHead
from speculators.algorithms.objective import decay_weights, dpace_weights, expected_acceptance_length
from speculators.algorithms.peagle import chain_visibility, depth_counts, partition_chains
from speculators.training.batch import TrainingBatch


def row(loss_mask: str) -> TrainingBatch:
    """One document whose token ids are its positions."""
    length = len(loss_mask)
    ids = torch.arange(length)[None]
    features = torch.zeros(1, length, 1)
    mask = torch.tensor([[c == "1" for c in loss_mask]])
    return TrainingBatch(ids, features, features, mask, ids.clone(), torch.zeros_like(ids))


def test_c4_eligible_anchors_and_contiguous_supervision() -> None:
    batch = row("0011110110")
    assert eligible_anchors(batch.loss_mask, batch.document_ids)[0].nonzero().flatten().tolist() == [2, 3, 4, 7]
    supervision = Supervision.of(batch, Anchors.at(batch, torch.tensor([[2, 3, 4, 7]])), 4)
    assert supervision.mask[0].int().tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]
    assert supervision.labels[0, 0].tolist() == [3, 4, 5, 6]


def test_c4_every_eligible_token_is_drawn_when_enough_anchors_are_asked_for() -> None:
    batch = row("0011110110")
    anchors = Anchors.sample(batch, 6)
    assert sorted(anchors.index[anchors.valid].tolist()) == [2, 3, 4, 7]
    assert anchors.valid.sum() == 4


def test_c5_alignment_of_both_anchor_rules() -> None:
    batch = row("1111111111")
    anchors = Anchors.at(batch, torch.tensor([[3]]))
    supervision = Supervision.of(batch, anchors, 3)
    assert supervision.labels[0, 0].tolist() == [4, 5, 6]
    assert supervision.previous[0, 0].tolist() == [3, 4, 5]
    assert supervision.teacher_rows[0, 0].tolist() == [3, 4, 5]
    predicts = drafter("dspark", num_draft_tokens=3, markov_rank=4)
    assert predicts.config.block_size == 3  # type: ignore[attr-defined]
    conditions = drafter("dflash", num_draft_tokens=3)
    assert conditions.config.block_size == 4  # type: ignore[attr-defined]
    slots = torch.arange(4.0)[:, None]
    assert conditions.draft_slots(slots)[:, 0].tolist() == [1, 2, 3]  # type: ignore[operator]
    assert predicts.draft_slots(slots[:3])[:, 0].tolist() == [0, 1, 2]  # type: ignore[operator]


def test_c6_decay_weights() -> None:
    torch.testing.assert_close(decay_weights(7, 4.0), torch.tensor([1, 0.7788, 0.6065, 0.4724, 0.3679, 0.2865, 0.2231]), atol=5e-5, rtol=0)
    assert abs(decay_weights(7, 4.0).sum().item() - 3.7352) < 5e-5
    fifteen = decay_weights(15, 7.0)
    torch.testing.assert_close(fifteen[[0, 1, 2, 14]], torch.tensor([1, 0.8669, 0.7515, 0.1353]), atol=5e-5, rtol=0)
    assert abs(fifteen.sum().item() - 6.6306) < 5e-5
    assert abs(decay_weights(9, 5.0).sum().item() - 4.6048) < 5e-5


def test_c6_fewer_supervised_slots_change_the_denominator_not_the_weights() -> None:
    speculator = drafter("dflash")
    long, short = packed_batch([40]), packed_batch([40])
    short.loss_mask[0, 12:] = False
    anchors = Anchors.at(long, torch.tensor([[9]]))
    weights = decay_weights(5, 4.0)
    full = speculator.loss_at(long, anchors).metrics["loss"]  # type: ignore[operator]
    cut = speculator.loss_at(short, anchors).metrics["loss"]  # type: ignore[operator]
    torch.testing.assert_close(full[1], weights.sum())
    torch.testing.assert_close(cut[1], weights[:2].sum())


def test_dpace_weights() -> None:
    cross_entropy = torch.tensor([0.3, 1.2, 0.5])
    weights = dpace_weights(-cross_entropy, torch.tensor([True, True, True]), 0.5)
    torch.testing.assert_close(weights, torch.tensor([1.8915724, 1.0211633, 0.4548776]), atol=1e-6, rtol=0)
    assert abs((weights * cross_entropy).sum().item() - 2.0203065) < 1e-6


def example_head(kind: str) -> MarkovHead:
    """The head of checks C8 and C9."""
    head = MarkovHead(kind, vocab_size=3, draft_vocab_size=3, hidden_size=2, rank=2)  # type: ignore[arg-type]
    with torch.no_grad():
        head.markov_w1.weight.copy_(torch.tensor([[1.0, 0], [0, 1], [1, 1]]))
        head.markov_w2.weight.copy_(torch.tensor([[2.0, -1], [0, 1], [-1, 0.5]]))
    return head


def test_c8_vanilla_markov_head() -> None:
    head = example_head("vanilla")
    logits = torch.tensor([[0.2, 0.1, 0.0], [0.0, 0.3, 0.1], [0.5, 0.4, 0.45]])
    assert logits.argmax(-1).tolist() == [0, 1, 0]
    previous, tokens, steps = torch.tensor(1), [], []
    state = head.initial_state(previous)
    for slot in logits:
        factors, state = head.step(previous, torch.zeros(2), state)
        steps.append(slot + head.bias(factors))
        previous = steps[-1].argmax()
        tokens.append(int(previous))
    torch.testing.assert_close(torch.stack(steps), torch.tensor([[-0.8, 1.1, 0.5], [-1, 1.3, 0.6], [-0.5, 1.4, 0.95]]))
    assert tokens == [1, 1, 1]
    forced = logits + head.bias(head.factors(torch.tensor([1, 1, 1]), torch.zeros(3, 2)))
    torch.testing.assert_close(forced, torch.stack(steps))


def test_c9_gated_markov_head() -> None:
    head = example_head("gated")
    with torch.no_grad():
        head.gate_proj.weight.copy_(torch.tensor([[0.1, 0.2, 0.3, 0.4], [-0.4, 0.3, 0.2, 0.1]]))
        head.gate_proj.bias.copy_(torch.tensor([0.05, -0.05]))
    factors = head.factors(torch.tensor([2]), torch.tensor([[0.5, -1.0]]))
    torch.testing.assert_close(factors, torch.tensor([[0.64566, 0.43782]]), atol=1e-5, rtol=0)
    torch.testing.assert_close(head.bias(factors), torch.tensor([[0.85349, 0.43782, -0.42674]]), atol=2e-5, rtol=0)


def test_c9_rnn_markov_head() -> None:
    head = example_head("rnn")
    with torch.no_grad():
        head.joint_proj.weight.copy_(
            torch.tensor(
                [
                    [0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
                    [0.6, 0.5, 0.4, 0.3, 0.2, 0.1],
                    [0.2, -0.1, 0.3, -0.2, 0.1, 0],
                    [0, 0.1, -0.2, 0.3, -0.1, 0.2],
                    [0.3, 0.3, 0.3, 0.3, 0.3, 0.3],
                    [-0.3, 0.2, -0.1, 0.1, 0.2, -0.2],
                ]
            )
        )
        head.joint_proj.bias.zero_()
    hidden = torch.tensor([0.5, -1.0])
    first, state = head.step(torch.tensor(1), hidden, head.initial_state(torch.tensor(1)))
    torch.testing.assert_close(state, torch.tensor([-0.0726, 0.0213]), atol=5e-5, rtol=0)
    torch.testing.assert_close(head.bias(first), torch.tensor([-0.0822, 0.3799, 0.0411]), atol=1e-4, rtol=0)
    second, state = head.step(torch.tensor(2), hidden, state)
    torch.testing.assert_close(state, torch.tensor([0.0124, -0.0357]), atol=5e-5, rtol=0)
    torch.testing.assert_close(head.bias(second), torch.tensor([0.5034, 0.3149, -0.2517]), atol=1e-4, rtol=0)
    forced = head.factors(torch.tensor([1, 2]), hidden.expand(2, 2))
    torch.testing.assert_close(forced, torch.stack([first, second]))


def test_c14_acceptance_length_of_conditional_acceptances() -> None:
    assert abs(expected_acceptance_length([0.905, 0.890, 0.888, 0.885, 0.887, 0.891, 0.882]) - 5.562) < 5e-4


def test_c17_depth_counts() -> None:
    counts = depth_counts(8192, 8, 0.8)
    assert counts == [8192, 6553, 5242, 4194, 3355, 2684, 2147, 1717]
    assert sum(counts) == 34_084
    assert abs(8192 * (1 - 0.8**8) / (1 - 0.8) - 34_088.05) < 0.01


def test_c17_partition_keeps_chains_whole() -> None:
    sampled = [list(range(16)), [1, 3, 4, 6, 7, 9, 10, 12, 14, 15], [2, 5, 7, 8, 11, 13, 15], [3, 6, 9, 12, 14]]
    first, second = partition_chains(sampled, 16, 2)
    assert (first[1], second[1]) == ([1, 3, 4, 6, 7], [9, 10, 12, 14, 15])
    assert (first[2], second[2]) == ([2, 5, 7, 8], [11, 13, 15])
    assert (first[3], second[3]) == ([3, 6, 9], [12, 14])
    carried = [8, 16]  # every segment carries the depth-0 positions below its end
    assert [carried[s] + sum(len(part[d]) for d in (1, 2, 3)) for s, part in enumerate((first, second))] == [20, 26]


def test_c18_chain_visibility() -> None:
    elements = [(0, 0), (1, 0), (2, 0), (3, 0), (1, 1), (2, 1), (3, 1), (2, 2), (3, 2)]
    position, depth = torch.tensor(elements).T
    visible = chain_visibility(position - depth, depth)
    rows = ["".join(str(int(v)) for v in line) for line in visible]
    assert rows == [
        "100000000", "110000000", "111000000", "111100000", "100010000", "110001000", "111000100", "100010010", "110001001",
    ]  # fmt: skip
