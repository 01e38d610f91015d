"""The fused losses of speculators 0.9.0 on the rows of `training.py loss`, for its table.

It runs where that library is installed:

    python benchmarks/peer_losses.py > build/peer_losses.jsonl
    python benchmarks/training.py loss --peer-losses build/peer_losses.jsonl --output build/training_loss

One JSON line a combination: what `harness.Timing` holds, and the loss. Its losses take logits, so the products with the head are
made around them, the verifier's too: its cross-entropy is against the verifier's most likely token.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from harness import measure
from torch import Tensor
from torch.nn import functional as F

REPETITIONS = 30


def main() -> None:
    """Measure every combination that `training.py loss` has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="shapes for a dry run")
    tiny = parser.parse_args().tiny
    from speculators.losses.fused import fused_ce_loss, fused_kl_div_loss, fused_tv_loss

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows, hidden_size, vocabulary = (60, 64, 512) if tiny else (7680, 4096, 151_936)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device).to(dtype)

    hidden, teacher = normal(rows, hidden_size).requires_grad_(), normal(rows, hidden_size)
    head = normal(vocabulary, hidden_size) * hidden_size**-0.5
    cases: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "CE": fused_ce_loss,
        "KL": fused_kl_div_loss,
        # Half of the L1 distance is the total variation distance.
        "0.1 CE + 0.9 L1": lambda draft, target: 0.1 * fused_ce_loss(draft, target) + 1.8 * fused_tv_loss(draft, target),
    }
    for name, loss in cases.items():

        def forward(loss: Callable[[Tensor, Tensor], Tensor] = loss) -> Tensor:
            return loss(F.linear(hidden, head)[None], F.linear(teacher, head)[None]).sum()

        def both(forward: Callable[[], Tensor] = forward) -> Any:
            return torch.autograd.grad(forward(), hidden)

        value = float(forward().detach())
        timing = measure(both, device=device, repetitions=REPETITIONS)
        if device.type == "cuda":
            timing = replace(measure(both, device=device, repetitions=REPETITIONS, graph=True), peak_bytes=timing.peak_bytes)
        print(json.dumps({"case": name, "loss": value, **asdict(timing)}), flush=True)


if __name__ == "__main__":
    main()
