"""Sequence partitioning of P-EAGLE's chains, ragged chains and activation checkpointing: the same loss, the same gradients."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from tiny_drafters import drafter, packed_batch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from speculators.algorithms import peagle as module
from speculators.algorithms.anchors import Anchors
from speculators.algorithms.partitioning import sum_of_parts
from speculators.algorithms.peagle import ChainLayout, PEagle, depth_counts
from speculators.speculator import Speculator
from speculators.training.batch import TrainingBatch


def gradients(speculator: Speculator, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*speculator.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True), strict=True))


def with_options(speculator: Any, **fields: Any) -> Any:
    """The same weights under other training options."""
    speculator.config = speculator.config.model_copy(
        update={"training_options": speculator.config.training_options.model_copy(update=fields)}
    )
    return speculator


def two_documents(dtype: torch.dtype = torch.float64) -> tuple[PEagle, TrainingBatch, Anchors]:
    """A drafter of four depths, a row of two documents, and eleven anchors of random rank."""
    speculator = drafter("peagle", dtype, training={"keep_rate": 0.7, "num_depths": 4}, num_draft_tokens=4, sliding_window=9)
    batch = packed_batch([17, 14], dtype=dtype)
    index = torch.tensor([[2, 4, 5, 7, 9, 12, 13, 20, 22, 25, 28]])
    rank = torch.randperm(11, generator=torch.Generator().manual_seed(4))[None]
    assert isinstance(speculator, PEagle)
    return speculator, batch, Anchors.at(batch, index, rank=rank)


@pytest.mark.parametrize("weights", ["uniform", "decay", "dpace"])
@pytest.mark.parametrize("segments", [2, 3, 4])
def test_c17_segments_have_the_loss_metrics_and_gradients_of_the_whole(segments: int, weights: str) -> None:
    speculator, batch, anchors = two_documents()
    whole = with_options(speculator, segments=1, position_weights=weights).loss_at(batch, anchors)
    expected = gradients(speculator, whole.loss)
    assert all(gradient.ne(0).any() for gradient in expected.values())
    output = with_options(speculator, segments=segments).loss_at(batch, anchors)
    tolerance = 1e-6 if weights == "decay" else 1e-12  # weights are float32, and so is the sum that the loss is divided by
    torch.testing.assert_close(output.loss, whole.loss, rtol=tolerance, atol=1e-12)
    found = gradients(speculator, 3.0 * output.loss)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], 3.0 * gradient, rtol=100 * tolerance, atol=tolerance)
    assert output.metrics.keys() == whole.metrics.keys()
    for name, (numerator, denominator) in whole.metrics.items():
        torch.testing.assert_close(output.metrics[name][0].double(), numerator.double(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(output.metrics[name][1], denominator)


def test_detaching_the_context_keeps_the_segments_loss_and_breaks_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    speculator, batch, anchors = two_documents()
    right = with_options(speculator, segments=3).loss_at(batch, anchors)
    expected = gradients(speculator, right.loss)

    def detached(parts: Any, shared: list[Tensor], parameters: Any) -> Tensor:
        hidden, mask_hidden, mask_embedding, *context = shared
        return sum_of_parts(parts, [hidden, mask_hidden, mask_embedding, *(x.detach() for x in context)], parameters)

    monkeypatch.setattr(module, "sum_of_parts", detached)
    wrong = speculator.loss_at(batch, anchors)
    torch.testing.assert_close(wrong.loss, right.loss, rtol=1e-12, atol=1e-12)
    found = gradients(speculator, wrong.loss)
    for name in ("layers.0.self_attn.k_proj.weight", "layers.1.self_attn.v_proj.weight"):
        assert float((found[name] - expected[name]).norm() / expected[name].norm()) > 0.1, name


def test_depth_zero_runs_backward_once_however_many_segments() -> None:
    speculator, batch, anchors = two_documents()
    calls = []
    speculator.fc.weight.register_hook(lambda _: calls.append("backward"))  # type: ignore[no-untyped-call]
    real = speculator.depth_zero
    speculator.depth_zero = lambda batch: calls.append("forward") or real(batch)  # type: ignore[method-assign, func-returns-value]
    with_options(speculator, segments=4).loss_at(batch, anchors).loss.backward()
    assert calls == ["forward", "backward"]


def test_without_autograd_segments_only_run() -> None:
    speculator, batch, anchors = two_documents()
    with torch.no_grad():
        whole = with_options(speculator, segments=1).loss_at(batch, anchors).loss
        parts = with_options(speculator, segments=3).loss_at(batch, anchors).loss
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)
    assert not parts.requires_grad


class Allocations(TorchDispatchMode):
    """Bytes that tensors made inside hold at once, at most. Storages count once."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, Any] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.held[storage.data_ptr()] = (torch.multiprocessing.reductions.StorageWeakRef(storage), storage.nbytes())
        self.held = {key: (ref, size) for key, (ref, size) in self.held.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self.held.values()))
        return result


@pytest.mark.parametrize("saving", [{"segments": 5}, {"activation_checkpointing": "layers"}])
def test_segments_and_checkpointing_need_less_memory(saving: dict[str, Any]) -> None:
    speculator = drafter("peagle", training={"keep_rate": 1.0, "num_depths": 6}, num_draft_tokens=6, num_layers=4)
    batch = packed_batch([60])
    anchors = Anchors.at(batch, torch.arange(4, 54)[None])

    def peak(**fields: Any) -> int:
        with_options(speculator, **{"segments": 1, "activation_checkpointing": "none", **fields})
        with Allocations() as recorder:
            speculator.loss_at(batch, anchors).loss.backward()  # type: ignore[operator]
        speculator.zero_grad()
        return recorder.peak

    assert peak(**saving) < 0.6 * peak()


@pytest.mark.parametrize("method", ["peagle", "eagle3", "dflash", "dspark"])
def test_activation_checkpointing_changes_no_gradient(method: str) -> None:
    speculator = drafter(method, torch.float64, sliding_window=9)
    batch = packed_batch([17, 14], dtype=torch.float64)
    anchors = Anchors.at(batch, torch.tensor([[3, 8, 12, 21]]))

    def run(checkpointing: str) -> tuple[Tensor, dict[str, Tensor], int]:
        kept: dict[int, int] = {}

        def note(x: Tensor) -> Tensor:
            if x.data_ptr() not in weights:
                kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
                held.append(x)  # so that no other tensor takes its place
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            loss = with_options(speculator, activation_checkpointing=checkpointing).loss_at(batch, anchors).loss
        return loss, gradients(speculator, loss), sum(kept.values())

    weights, held = {parameter.data_ptr() for parameter in speculator.parameters()}, list[Tensor]()
    loss, expected, kept = run("none")
    gate_and_up = 2 * 48 * 8  # bytes a slot and layer
    for checkpointing, saved in (("feed_forward", 2 * 20 * gate_and_up), ("layers", 0.3 * kept)):
        found_loss, found, kept_less = run(checkpointing)
        assert torch.equal(loss, found_loss)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12)
        assert kept - kept_less >= saved


# -- CUDA --------------------------------------------------------------------------------------------------------


def moved(batch: TrainingBatch, device: str, dtype: torch.dtype) -> TrainingBatch:
    """The same rows elsewhere, their hidden states in `dtype`."""
    tensors = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return TrainingBatch(**{name: x.to(device, dtype if x.is_floating_point() else x.dtype) for name, x in tensors.items()})


def training_loss_on(device: str, dtype: torch.dtype, method: str, options: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the same weights and rows on a device, in `dtype` or under autocast to bfloat16."""
    weights = torch.float32 if dtype == torch.bfloat16 else dtype
    speculator = with_options(drafter(method, torch.float64), **options).to(device, weights)
    verifier = speculator.verifier
    frozen = {"embedding": verifier.embedding.to(device, dtype), "head": verifier.head.to(device, dtype)}
    speculator.attach(replace(verifier, final_norm=verifier.final_norm.to(device, dtype), **frozen))
    batch = moved(packed_batch([30, 25], dtype=torch.float64), device, dtype)
    anchors = Anchors.at(batch, torch.tensor([[3, 6, 8, 12, 17, 21, 33, 38, 41, 46]], device=device))
    with torch.autocast(device, torch.bfloat16, cache_enabled=False) if dtype == torch.bfloat16 else nullcontext():
        output = speculator.loss_at(batch, anchors)
    return output.loss, gradients(speculator, output.loss)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels of a training step run on CUDA")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 6e-2)], ids=["float32", "autocast"])
@pytest.mark.parametrize(
    ("method", "options"), [("peagle", {}), ("peagle", {"segments": 3}), ("eagle3", {}), ("dflash", {}), ("dspark", {})], ids=str
)
def test_a_gpu_gives_the_loss_and_gradients_of_float64(method: str, options: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    right, exact = training_loss_on("cpu", torch.float64, method, options)
    loss, found = training_loss_on("cuda", dtype, method, options)
    assert loss.item() == pytest.approx(right.item(), rel=tolerance)
    difference = torch.cat([(found[name].double().cpu() - gradient).flatten() for name, gradient in exact.items()])
    assert float(difference.norm()) <= tolerance * float(torch.cat([x.flatten() for x in exact.values()]).norm())


# -- the layout of chains ----------------------------------------------------------------------------------------


def test_cod_keeps_the_published_number_of_elements() -> None:
    counts = depth_counts(8192, 8, 0.8)
    assert counts == [8192, 6553, 5242, 4194, 3355, 2684, 2147, 1717] and sum(counts) == 34084
    batch = packed_batch([40])
    layout = ChainLayout.of(Anchors.at(batch, torch.arange(3, 13)[None]), depth_counts(10, 4, 0.8))
    assert layout.elements.shape == (1, 10 + 8 + 6 + 5)
    assert layout.mask[0].sum(dim=0).tolist() == [10, 8, 6, 5]
    assert (layout.mask.long().diff(dim=2) <= 0).all()  # a chain that reaches a depth has reached every depth before it


def test_a_layout_and_its_dense_form_agree() -> None:
    _, batch, _ = two_documents()
    generator = torch.Generator().manual_seed(0)
    index = torch.tensor([[2, 4, 5, 7, 9, 12]])
    layout = ChainLayout.of(Anchors.at(batch, index, rank=torch.randperm(6, generator=generator)[None]), [6, 4, 3, 1])
    n, d = (layout.mask[0].nonzero()[:, i] for i in (0, 1))
    assert torch.equal(layout.elements[0], n * 4 + d)
    deeper = (layout.chain * 10 + layout.depth)[..., None].double()
    zero = (torch.arange(6) * 10)[None, :, None].double()
    assert torch.equal(layout.interleave(zero, deeper)[0, :, 0].long(), n * 10 + d)
    dense = layout.dense(layout.interleave(zero, deeper) + 1)[0, :, :, 0]
    assert torch.equal(dense != 0, layout.mask[0])


@pytest.mark.parametrize("parts", [2, 3])
def test_parts_of_anchors_hold_each_chain_once_and_keep_its_depth(parts: int) -> None:
    _, _, anchors = two_documents()
    counts = depth_counts(11, 4, 0.7)
    whole = ChainLayout.of(anchors, counts)
    depth_of = dict(zip(anchors.index[0].tolist(), whole.deepest[0].tolist(), strict=True))
    seen: dict[int, int] = {}
    for number in range(parts):
        part = anchors.part(number, parts)
        layout = ChainLayout.of(part, [len(range(number, count, parts)) for count in counts])
        assert part.index[0].tolist() == sorted(part.index[0].tolist())
        seen |= dict(zip(part.index[0].tolist(), layout.deepest[0].tolist(), strict=True))
    assert seen == depth_of


def test_sampled_anchors_ascend_and_their_rank_is_a_random_order_with_valid_ones_first() -> None:
    batch = packed_batch([12, 8], prompt=4)
    torch.manual_seed(3)
    few = Anchors.sample(batch, 4)
    assert few.valid.all() and (few.index[0].diff() > 0).all()
    assert sorted(few.rank[0].tolist()) == [0, 1, 2, 3]
    orders = {tuple(Anchors.sample(batch, 4).rank[0].tolist()) for _ in range(40)}
    assert len(orders) > 10  # of 24
    many = Anchors.sample(batch, 20)
    count = int(many.valid.sum())
    assert count == 10 and many.valid[0, :count].all() and not many.index[0, count:].any()
    assert sorted(many.rank[0, :count].tolist()) == list(range(count))
