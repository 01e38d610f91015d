"""Trains a drafter with the public speculators library and keeps, for every step, its weights before the step and its loss.

    python -I peer_training.py JOB.json

A job holds the keys `checkpoint`, `arguments` and `attention` of peer.py, and

    batches   safetensors file: "STEP.NAME" is an argument of the model's forward.
    draws     for every step what would be drawn at random; see peer.py.
    output    safetensors file to write: "STEP.NAME" is a parameter before the step, "losses" [steps] the losses.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))  # -I leaves it out
from peer import load, pin


def main(job: dict[str, object]) -> None:
    """Run the steps."""
    model = load(str(job["checkpoint"]), str(job["attention"])).train()
    arguments = dict(job["arguments"])  # type: ignore[call-overload]
    options, _ = type(model).get_trainer_kwargs(**{"loss_implementation": "eager", **arguments})
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(trainable.values(), lr=3e-3)
    batches, kept, losses = load_file(str(job["batches"])), {}, []
    for step, draws in enumerate(job["draws"]):  # type: ignore[arg-type, var-annotated]
        kept.update({f"{step}.{name}": parameter.detach().clone() for name, parameter in trainable.items()})
        pin(draws)
        batch = {name.partition(".")[2]: values for name, values in batches.items() if name.startswith(f"{step}.")}
        _, loss, _ = model(**batch, **options)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    save_file({**kept, "losses": torch.stack(losses)}, str(job["output"]))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(json.loads(Path(sys.argv[1]).read_text()))
