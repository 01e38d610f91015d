"""K/V injection: fused verifier features become keys and values of every drafter layer, and the input gets no longer.

For features h of a committed token at position t, and every layer l of the drafter (DFlash, arXiv 2602.06036, section 4.1):

    key[l]   = rope_t(rms_norm(W_k[l] h) * g[l])      each head normalised by itself, then rotated
    value[l] = W_v[l] h

All layers' W_k and W_v lie under one another in one matrix, so one product serves them all and reads h once. What follows,
norm, rotation and the write to the cache, is one launch.
"""

# Triton's kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from speculators.kernels.launch import dependent_launch
from speculators.kernels.skinny_linear import skinny_linear

try:
    import triton
    import triton.language as tl

    from speculators.kernels.launch import let_next_start, wait_for_inputs
except ImportError:  # no build for this platform: the reference serves it
    triton = None

__all__ = ["InjectionWeights", "kv_injection"]


@dataclass(frozen=True)
class InjectionWeights:
    """Weights of the L layers of a drafter, laid out for one product.

    Attributes:
        projection: [L * 2 * Hk * D, H]: for each layer the rows of its keys, then those of its values.
        bias: [L * 2 * Hk * D] or None.
        key_norm: [L, D], weights of the norm of key heads.
        epsilon: of that norm.
        cosine, sine: [positions, D / 2] float32, the rotation of each position (half-split convention).
    """

    projection: Tensor
    bias: Tensor | None
    key_norm: Tensor
    epsilon: float
    cosine: Tensor
    sine: Tensor

    @classmethod
    def stack(
        cls,
        key_projections: Sequence[Tensor],
        value_projections: Sequence[Tensor],
        key_norms: Sequence[Tensor],
        epsilon: float,
        cosine: Tensor,
        sine: Tensor,
        biases: Sequence[Tensor] | None = None,
    ) -> "InjectionWeights":
        """From each layer's own tensors.

        Args:
            key_projections, value_projections: [Hk * D, H] a layer.
            key_norms: [D] a layer.
            epsilon: of the key norms.
            cosine, sine: [positions, D / 2] float32.
            biases: [Hk * D] tensors, keys' and values' of the first layer, then of the next; None for projections without.
        """
        pairs = zip(key_projections, value_projections, strict=True)
        projection = torch.cat([part for pair in pairs for part in pair])
        bias = None if biases is None else torch.cat(list(biases))
        return cls(projection, bias, torch.stack(list(key_norms)), epsilon, cosine.contiguous(), sine.contiguous())


def _project(features: Tensor, weights: InjectionWeights, memory: Tensor) -> Tensor:
    """[R, W, H] -> [R, W, L, 2, Hk, D]: the one product."""
    layers, _, _, _, heads, head_dim = memory.shape
    states: Tensor = skinny_linear(features, weights.projection, weights.bias).unflatten(-1, (layers, 2, heads, head_dim))
    return states


# -- the definition ----------------------------------------------------------------------------------------------


def _reference(states: Tensor, weights: InjectionWeights, start: Tensor, counts: Tensor, memory: Tensor) -> None:
    """Plain PyTorch on any device, without host synchronisation."""
    rows, width, slots = states.shape[0], states.shape[1], memory.shape[3]
    column = torch.arange(width, device=start.device)
    # Columns that do not count write back what is there. Taken modulo, no two columns of a row share a slot.
    slot = (start[:, None] + column) % slots
    row = torch.arange(rows, device=start.device)[:, None]
    states = states.to(torch.promote_types(states.dtype, torch.float32))
    normed = F.rms_norm(states[..., 0, :, :], states.shape[-1:], None, weights.epsilon) * weights.key_norm[:, None, :]
    normed = normed.to(memory.dtype).to(states.dtype)
    first, second = normed.chunk(2, dim=-1)
    cosine, sine = (table[slot][:, :, None, None, :] for table in (weights.cosine, weights.sine))
    key = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    new = torch.stack([key, states[..., 1, :, :]], dim=3).to(memory.dtype).permute(2, 3, 0, 1, 4, 5)
    counted = (column < counts[:, None])[:, :, None, None]
    memory[:, :, row, slot] = torch.where(counted, new, memory[:, :, row, slot])


# -- the kernel --------------------------------------------------------------------------------------------------

if triton is not None:

    @triton.jit
    def _kv_injection_kernel(
        states,  # [R * W, L, 2, Hk, D]
        key_norm,  # [L, D]
        cosine,  # [positions, D / 2]
        sine,
        start,  # [R]
        counts,  # [R]
        memory,  # [L, 2, R, slots, Hk, D]
        rows,
        width,
        slots,
        epsilon,
        HEADS: tl.constexpr,
        HALF: tl.constexpr,
        HEADS_BLOCK: tl.constexpr,
        HALF_BLOCK: tl.constexpr,
        PDL: tl.constexpr,
    ):
        """One program a token and layer: all its heads, in two halves."""
        wait_for_inputs(PDL)
        token = tl.program_id(0).to(tl.int64)
        layer = tl.program_id(1).to(tl.int64)
        layers = tl.num_programs(1)
        row = token // width
        column = token % width
        if column >= tl.load(counts + row):
            return
        position = tl.load(start + row) + column
        head = tl.arange(0, HEADS_BLOCK)[:, None]
        half = tl.arange(0, HALF_BLOCK)[None, :]
        inside = (head < HEADS) & (half < HALF)
        place = head * (2 * HALF) + half
        source = states + (token * layers + layer) * (4 * HEADS * HALF) + place
        target = memory + ((layer * 2 * rows + row) * slots + position) * (2 * HEADS * HALF) + place
        value_source = source + 2 * HEADS * HALF
        value_target = target + rows * slots * (2 * HEADS * HALF)

        first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
        square = tl.sum(first * first + second * second, 1)[:, None]
        scale = 1.0 / tl.sqrt(square / (2 * HALF) + epsilon)
        norm = key_norm + layer * (2 * HALF) + half
        first = first * scale * tl.load(norm, mask=half < HALF, other=0.0).to(tl.float32)
        second = second * scale * tl.load(norm + HALF, mask=half < HALF, other=0.0).to(tl.float32)
        # The norm's output has the dtype of the cache, as it has in a layer.
        first = first.to(memory.dtype.element_ty).to(tl.float32)
        second = second.to(memory.dtype.element_ty).to(tl.float32)
        cos = tl.load(cosine + position * HALF + half, mask=half < HALF, other=0.0)
        sin = tl.load(sine + position * HALF + half, mask=half < HALF, other=0.0)
        let_next_start(PDL)
        tl.store(target, (first * cos - second * sin).to(memory.dtype.element_ty), mask=inside)
        tl.store(target + HALF, (second * cos + first * sin).to(memory.dtype.element_ty), mask=inside)
        tl.store(value_target, tl.load(value_source, mask=inside).to(memory.dtype.element_ty), mask=inside)
        tl.store(value_target + HALF, tl.load(value_source + HALF, mask=inside).to(memory.dtype.element_ty), mask=inside)


def _kernel(states: Tensor, weights: InjectionWeights, start: Tensor, counts: Tensor, memory: Tensor) -> None:
    rows, width, layers, _, heads, head_dim = states.shape
    with torch.cuda.device_of(states):
        _kv_injection_kernel[(rows * width, layers)](
            states,
            weights.key_norm,
            weights.cosine,
            weights.sine,
            start,
            counts,
            memory,
            rows,
            width,
            memory.shape[3],
            weights.epsilon,
            HEADS=heads,
            HALF=head_dim // 2,
            HEADS_BLOCK=triton.next_power_of_2(heads),
            HALF_BLOCK=triton.next_power_of_2(head_dim // 2),
            num_warps=4,
            **dependent_launch(states),
        )


# -- the public function -----------------------------------------------------------------------------------------


@torch.no_grad()
def kv_injection(
    features: Tensor,
    weights: InjectionWeights,
    start: Tensor,
    counts: Tensor,
    memory: Tensor,
    *,
    implementation: Literal["auto", "reference", "triton"] = "auto",
) -> None:
    """Write the keys and values of new context tokens into the caches of all layers, in place. See the module's text.

    No host synchronisation, and no shape that depends on data.

    Args:
        features: [R, W, H], fused features of the new tokens of every row, in the weights' dtype.
        weights: of all layers.
        start: [R] int64, position of column 0; column i goes to slot start + i, below `slots` where it counts.
        counts: [R] int64, leading columns of each row that count; the others are not written.
        memory: [L, 2, R, slots, Hk, D] contiguous, keys then values of every layer, slot = position.
        implementation: "auto" takes the kernel on CUDA below float64.

    Raises:
        ValueError: a row has more columns than the cache has slots, or more slots than there are rotations.
    """
    width, slots, rotations = features.shape[1], memory.shape[3], weights.cosine.shape[0]
    if width > slots or slots > rotations:
        raise ValueError(f"kv_injection: {width} columns must fit in the {slots} slots of a row, and these in {rotations} rotations")
    states = _project(features, weights, memory)
    use_kernel = implementation == "triton" or (
        implementation == "auto" and states.is_cuda and states.dtype != torch.float64 and triton is not None
    )
    (_kernel if use_kernel else _reference)(states, weights, start, counts, memory)
