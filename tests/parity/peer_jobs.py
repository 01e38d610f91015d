"""What both libraries are given in the parity tests: one verifier on disk, drafters of every kind, rows, pinned draws."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_drafters import HIDDEN, TAPS, VOCABULARY, packed_batch, verifier_weights
from torch import Tensor

from speculators.algorithms.anchors import Anchors
from speculators.algorithms.peagle import depth_counts
from speculators.registry import get_algorithm
from speculators.speculator import Speculator, VerifierWeights
from speculators.training.batch import TrainingBatch

PEER_PYTHON = os.environ.get("PEER_PYTHON")
EPSILON, WINDOW = 1e-6, 64  # a window that no row reaches: what differs in windows is a test of its own
KEPT = torch.arange(1, 60, 3)  # the reduced draft vocabulary: 20 of 61 tokens
K, KEEP_RATE, DOCUMENTS = 5, 0.8, [20, 14]
ANCHORS = [4, 7, 11, 13, 24, 26]  # rows' indices; every block ends inside its document
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


@dataclass(frozen=True)
class Case:
    """A kind of drafter.

    Attributes:
        method: of both libraries.
        keys: of config.json, beyond those every drafter of the method has.
        layers: of transformer_layer_config, the same.
        reduced: whether it proposes 20 of the 61 tokens.
    """

    method: str
    keys: dict[str, Any] = field(default_factory=dict)
    layers: dict[str, Any] = field(default_factory=dict)
    reduced: bool = False

    @property
    def is_block(self) -> bool:
        return self.method in ("dflash", "dspark")


QWEN3: dict[str, Any] = {"model_type": "qwen3"}
SLIDING: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
    "use_sliding_window": True,
    "max_window_layers": 0,
}
CASES = {
    "peagle": Case("peagle", {"norm_before_fc": True}),
    "peagle-qwen3-reduced": Case("peagle", {"fc_norm": True, "norm_before_residual": True}, QWEN3 | SLIDING, reduced=True),
    "dflash": Case("dflash"),
    "dflash-sliding-reduced": Case("dflash", {}, SLIDING, reduced=True),
    "dflash-sliding-bidirectional": Case("dflash", {"sliding_window_non_causal": True}, SLIDING),
    "dspark-vanilla": Case("dspark", {"markov_head_type": "vanilla"}),
    "dspark-gated-reduced": Case("dspark", {"markov_head_type": "gated"}, reduced=True),
    "dspark-rnn": Case("dspark", {"markov_head_type": "rnn"}),
    "dspark-rnn-conditioning-anchor": Case("dspark", {"markov_head_type": "rnn", "sample_from_anchor": False, "block_size": K + 1}),
    "eagle3": Case("eagle3", {"norm_before_fc": True}),
    "eagle3-normed-output-reduced": Case(
        "eagle3", {"fc_norm": True, "norm_output": True, "norm_before_residual": True}, QWEN3, reduced=True
    ),
}


def config_json(case: Case, verifier: str) -> dict[str, Any]:
    """The smallest config.json of the case that the format allows."""
    keys: dict[str, Any] = {"mask_token_id": 3} if case.method != "eagle3" else {}
    if case.is_block:
        keys |= {"aux_hidden_state_layer_ids": TAPS, "block_size": K + (case.method == "dflash")}
    else:
        keys |= {"eagle_aux_hidden_state_layer_ids": TAPS}
    if case.method == "dspark":
        keys["markov_rank"] = 4
    layers: dict[str, Any] = {
        "model_type": "qwen3" if case.is_block else "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": EPSILON,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return {
        "speculators_model_type": case.method,
        "speculators_version": "0.9.0",
        "draft_vocab_size": len(KEPT) if case.reduced else VOCABULARY,
        "transformer_layer_config": layers | case.layers,
        "speculators_config": {
            "algorithm": case.method,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": K}],
            "verifier": {"name_or_path": verifier, "architectures": ["LlamaForCausalLM"]},
        },
        **keys,
        **case.keys,
    }


def save_verifier(folder: Path) -> VerifierWeights:
    """A verifier of which only embedding, head and final norm are on disk: all that either library reads."""
    folder.mkdir()
    norm = torch.nn.RMSNorm(HIDDEN, eps=EPSILON)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5, generator=torch.Generator().manual_seed(3))
    weights = replace(verifier_weights(), name_or_path=str(folder), final_norm=norm)
    tensors = {"model.embed_tokens.weight": weights.embedding, "lm_head.weight": weights.head, "model.norm.weight": norm.weight.detach()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        **config_json(CASES["eagle3"], "")["transformer_layer_config"],
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": weights.num_layers,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return weights


def our_drafter(case: Case, verifier: VerifierWeights) -> Speculator:
    """A drafter of ours with random weights, large enough to see, attached to the verifier."""
    speculator_class = get_algorithm(case.method).speculator_class
    torch.manual_seed(17)
    speculator = speculator_class(speculator_class.config_class.parse(config_json(case, verifier.name_or_path)))
    with torch.no_grad():
        for parameter in speculator.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
            parameter.copy_(scale * torch.randn_like(parameter) + (parameter.dim() == 1))
    if case.reduced:
        speculator.set_draft_vocabulary(KEPT)
    speculator.attach(verifier)
    return speculator.eval()


# -- rows and draws --------------------------------------------------------------------------------------------


def peer_batch(case: Case, batch: TrainingBatch) -> dict[str, Tensor]:
    """A packed row as the peer's models take it: for input fusion every document is shifted against its features."""
    tensors = {
        "input_ids": batch.input_ids,
        "hidden_states": batch.hidden_states,
        "verifier_last_hidden_states": batch.last_hidden_state,
        "loss_mask": batch.loss_mask,
        "position_ids": batch.position_ids,
        "document_ids": batch.document_ids,
    }
    if not case.is_block:
        first = batch.position_ids[0] == 0
        last = torch.cat([first[1:], torch.tensor([True])])
        tensors = {name: values[:, ~last if name == "hidden_states" else ~first] for name, values in tensors.items()}
    return {name: values.contiguous() for name, values in tensors.items()}


def peer_slots(batch: TrainingBatch, anchors: list[int]) -> list[int]:
    """The peer's shifted slot that predicts the first token after each anchor: earlier documents lost a slot each."""
    return [anchor - 1 - int(batch.document_ids[0, anchor]) for anchor in anchors]


def kept_chains(anchors: list[int]) -> list[int]:
    """How many of the anchors' chains reach each depth."""
    return depth_counts(len(anchors), K, KEEP_RATE)


def pinned_draws(case: Case, batch: TrainingBatch, anchors: list[int]) -> dict[str, list[int]]:
    """What the peer would draw at random."""
    if case.is_block:
        return {"anchors": anchors}
    if case.method == "eagle3":
        return {}
    slots, total = peer_slots(batch, anchors), peer_batch(case, batch)["input_ids"].shape[1]
    elements = [(slot, 0) for slot in range(total)]
    elements += [(slot, depth) for depth, count in enumerate(kept_chains(anchors)) if depth for slot in slots[:count]]
    return {"anchor": [anchor for anchor, _ in elements], "depth": [depth for _, depth in elements]}


def trainer_arguments(anchors: list[int]) -> dict[str, Any]:
    counts = {"max_anchors": len(anchors), "num_depths": K, "ttt_steps": K}
    return {"loss_fn": "kl_div", "down_sample_ratio": 1.0, "ttt_step_loss_decay": 1.0, **counts}


def row() -> TrainingBatch:
    return packed_batch(DOCUMENTS)


def anchors_of(batch: TrainingBatch, anchors: list[int]) -> Anchors:
    return Anchors.at(batch, torch.tensor([anchors]))


# -- the peer's process ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What the peer said to one job; see peer.py."""

    error: str | None
    loss: float | None
    gradients: dict[str, float | None]
    tensors: dict[str, Tensor]


class Peer:
    """Collects jobs, runs them in one process of the peer, and hands out its answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs: list[dict[str, Any]] = []

    def ask(
        self,
        name: str,
        case: Case,
        checkpoint: Path,
        *,
        create: dict[str, Any] | None = None,
        resave: Path | None = None,
        batch: TrainingBatch | None = None,
        anchors: list[int] | None = None,
        random: bool = False,
        padding: int = 0,
        attention: str = "sdpa",
        backward: bool = False,
    ) -> None:
        """Add a job. `random` leaves the draws to the peer; `padding` adds that many padding slots to the row."""
        anchors = ANCHORS if anchors is None else anchors
        job = {
            "name": name,
            "checkpoint": str(checkpoint),
            "create": create,
            "mapping": self._file(f"{name}-mapping", mapping()) if create and case.reduced else None,
            "resave": None if resave is None else str(resave),
            "batch": None,
            "draws": {},
            "arguments": trainer_arguments(anchors),
            "attention": attention,
            "backward": backward,
        }
        if batch is not None:
            tensors = peer_batch(case, batch)
            job["batch"] = self._file(f"{name}-batch", {key: _padded(key, values, padding) for key, values in tensors.items()})
            job["draws"] = {} if random else pinned_draws(case, batch, anchors)
            if padding and "anchor" in job["draws"]:  # depth 0 covers the padding as well
                total = tensors["input_ids"].shape[1]
                job["draws"]["anchor"] += range(total, total + padding)
                job["draws"]["depth"] += [0] * padding
        self.jobs.append(job)

    def _file(self, name: str, tensors: dict[str, Tensor]) -> str:
        file = self.folder / f"{name}.safetensors"
        save_file(tensors, file)
        return str(file)

    def run(self) -> dict[str, Answer]:
        """Every answer by job name."""
        request = self.folder / "jobs.json"
        request.write_text(json.dumps(self.jobs))
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        command = [str(PEER_PYTHON), "-I", str(Path(__file__).with_name("peer.py")), str(request)]
        run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert run.returncode == 0, run.stdout[-4000:]
        return {job["name"]: self._answer(job["name"]) for job in self.jobs}

    def _answer(self, name: str) -> Answer:
        said = json.loads((self.folder / f"{name}.json").read_text())
        file = self.folder / f"{name}.safetensors"
        return Answer(said["error"], said.get("loss"), said.get("gradients", {}), load_file(file) if file.exists() else {})


def _padded(name: str, values: Tensor, count: int) -> Tensor:
    shape = (values.shape[0], count, *values.shape[2:])
    return torch.cat([values, values.new_full(shape, -1 if name == "document_ids" else 0)], dim=1) if count else values


def mapping() -> dict[str, Tensor]:
    """t2d and d2t of the reduced vocabulary."""
    t2d = torch.zeros(VOCABULARY, dtype=torch.bool)
    t2d[KEPT] = True
    return {"t2d": t2d, "d2t": KEPT - torch.arange(len(KEPT))}
