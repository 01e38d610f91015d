"""What calibration is fitted to: every round's confidences, and how many of its drafts were accepted.

Rounds are collected with full blocks: nothing is cut, so that deep positions are seen after a bad start too. Positions behind a
drafted stop token do not count, whether it was accepted or not, nor do those beyond the token budget.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor

from speculators.data.prompts import Prompt
from speculators.data.rows import Conversation
from speculators.decoding.engine import generate
from speculators.decoding.length_schedules import FixedLength
from speculators.decoding.proposal import ConfidenceSource, Drafter, DraftSampler, Observation, Proposal
from speculators.decoding.sampling import SamplingParams
from speculators.errors import DataError
from speculators.files import make_folder
from speculators.verifier import Verifier

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

_REPLY_SEEDS = 1_000_003  # between the seeds of a prompt's replies: more than there are prompts


@dataclass(frozen=True)
class CalibrationPrompt:
    """A prompt as the verifier reads it, and the kind of prompt it is."""

    token_ids: tuple[int, ...]
    domain: str

    @property
    def for_validation(self) -> bool:
        """Which half it belongs to: decided by its tokens alone, so equal prompts never stand on both sides."""
        digest = hashlib.blake2b(np.asarray(self.token_ids, dtype=np.uint32).tobytes(), digest_size=8, person=b"calibrate").digest()
        return bool(digest[0] & 1)


@dataclass(frozen=True)
class Records:
    """n rounds of one drafter at one temperature.

    Attributes:
        confidence: [n, K] float32, uncalibrated; all NaN for a drafter without confidence.
        accepted: [n], leading drafts accepted.
        observed: [n], leading positions that count, at least 1.
        prompt: [n], index of the round's prompt.
    """

    confidence: Floats
    accepted: Ints
    observed: Ints
    prompt: Ints

    def __len__(self) -> int:
        return len(self.accepted)

    def select(self, rounds: npt.NDArray[np.bool_]) -> Records:
        """Some of the rounds."""
        return Records(self.confidence[rounds], self.accepted[rounds], self.observed[rounds], self.prompt[rounds])

    @classmethod
    def join(cls, parts: Sequence[Records]) -> Records:
        """All rounds of several."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("confidence", "accepted", "observed", "prompt")))

    def conditional_acceptance(self) -> list[float]:
        """[K] share of the rounds that reached draft k, all before it accepted, in which it was accepted; 0 where none did."""
        values = []
        for k in range(self.confidence.shape[1]):
            reached = (self.observed > k) & (self.accepted >= k)
            values.append(float((self.accepted[reached] > k).mean()) if reached.any() else 0.0)
        return values


def prompts_of_conversations(conversations: Sequence[Conversation]) -> list[CalibrationPrompt]:
    """What precedes each conversation's first reply; its topic is the domain. Conversations without a reply are left out."""
    return [CalibrationPrompt(tuple(c.input_ids[: c.loss_mask.index(True)]), c.topic or "all") for c in conversations if any(c.loss_mask)]


def prompts_of_file(verifier: Verifier, prompts: Sequence[Prompt], domain: str) -> list[CalibrationPrompt]:
    """The first turn of each prompt, through the verifier's chat template."""
    return [CalibrationPrompt(tuple(verifier.encode_chat(prompt.messages)), domain) for prompt in prompts]


class _FullBlocks(FixedLength):
    """Every draft is verified, and every drafter asked for its confidence."""

    def __init__(self, source: ConfidenceSource) -> None:
        self.needs_confidence = source != "none"


class _Recorder:
    """A drafter that keeps what it proposes."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.proposals: list[tuple[Tensor, Tensor, Tensor | None]] = []  # token_ids, lengths, confidence of every round
        self.aux_hidden_state_layer_ids = drafter.aux_hidden_state_layer_ids
        self.max_draft_tokens = drafter.max_draft_tokens
        self.default_draft_tokens = drafter.default_draft_tokens
        self.confidence_source = drafter.confidence_source

    def new_state(self, rows: int, max_length: int, device: torch.device, dtype: torch.dtype) -> Any:
        return self._drafter.new_state(rows, max_length, device, dtype)

    def observe(self, state: Any, observation: Observation) -> None:
        self._drafter.observe(state, observation)

    def propose(self, state: Any, anchor: Tensor, sampler: DraftSampler, num_draft_tokens: int) -> Proposal:
        proposal = self._drafter.propose(state, anchor, sampler, num_draft_tokens)
        # Probabilities are a vocabulary wide and not kept.
        confidence = None if proposal.confidence is None else proposal.confidence.float().cpu()
        self.proposals.append((proposal.token_ids.cpu(), proposal.lengths.cpu(), confidence))
        return proposal


def collect_batch(
    verifier: Verifier, drafter: Drafter, prompts: Sequence[CalibrationPrompt], first: int, num_draft_tokens: int, sampling: SamplingParams
) -> Records:
    """Decode prompts together and keep their rounds. `first` is the index of the first prompt among all."""
    recorder = _Recorder(drafter)
    schedule = _FullBlocks(drafter.confidence_source)
    token_ids = [prompt.token_ids for prompt in prompts]
    generation = generate(verifier, recorder, token_ids, sampling, num_draft_tokens=num_draft_tokens, schedule=schedule)
    stops = verifier.stop_token_ids if sampling.stop_token_ids is None else sampling.stop_token_ids
    confidences, accepted, observed, owner = [], [], [], []
    for row, rounds in enumerate(generation.rounds):
        emitted = 1  # by the prefill
        for (drafts, lengths, confidence), a_round in zip(recorder.proposals, rounds, strict=False):
            until_stop = next((k + 1 for k, token in enumerate(drafts[row].tolist()) if token in stops), num_draft_tokens)
            count = min(int(lengths[row]), until_stop, sampling.max_new_tokens - emitted - 1)
            emitted += a_round.emitted
            if count < 1:
                continue
            line = np.full(num_draft_tokens, np.nan, dtype=np.float32)
            if confidence is not None:
                line[: confidence.shape[1]] = confidence[row].numpy()
            confidences.append(line)
            accepted.append(min(a_round.accepted, count))
            observed.append(count)
            owner.append(first + row)
    stacked = np.stack(confidences) if confidences else np.zeros((0, num_draft_tokens), dtype=np.float32)
    return Records(stacked, *(np.asarray(values, dtype=np.int64) for values in (accepted, observed, owner)))


def collect(
    verifier: Verifier,
    drafter: Drafter,
    prompts: Sequence[CalibrationPrompt],
    sampling: SamplingParams,
    *,
    num_draft_tokens: int,
    batch_size: int,
    folder: Path,
    fingerprint: str,
    replies: int = 1,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Records:
    """Collect the rounds of all prompts, a file a batch, and go on where an earlier call was interrupted.

    Args:
        verifier, drafter: of the rounds.
        prompts: decoded in their order.
        sampling: temperature, budget and seed.
        num_draft_tokens: K.
        batch_size: prompts decoded together.
        folder: of the files; made if needed.
        fingerprint: of everything else that the rounds depend on. Files of another one are left alone and not read.
        replies: replies a prompt where sampled; greedy decoding has one.
        on_progress: called after every batch.

    Raises:
        DataError: there are no prompts, a file is damaged, or no round was seen.
    """
    if not prompts:
        raise DataError("there are no prompts to calibrate on; pass --data or --prompts with some")
    make_folder(folder)
    parts = []
    replies = 1 if sampling.greedy else replies
    for reply, first in itertools.product(range(replies), range(0, len(prompts), batch_size)):
        batch = prompts[first : first + batch_size]
        # The engine draws by (seed, row): the first prompt in the seed keeps every prompt's draws its own, and other replies lie beyond.
        params = replace(sampling, seed=sampling.seed + _REPLY_SEEDS * reply + first)
        # Named one by one: an option that is new in a later version does not throw these rounds away.
        drawn = [params.temperature, params.top_k, params.top_p, params.min_p, params.repetition_penalty, params.seed]
        ended = [params.max_new_tokens, params.stop_token_ids, params.ignore_eos]
        digest = _digest(fingerprint, *drawn, *ended, num_draft_tokens, *(prompt.token_ids for prompt in batch))
        file = folder / f"rounds-{digest}.safetensors"
        if not file.is_file():
            records = collect_batch(verifier, drafter, batch, first, num_draft_tokens, params)
            scratch = file.with_suffix(".part")
            save_file({name: getattr(records, name) for name in ("confidence", "accepted", "observed", "prompt")}, scratch)
            scratch.replace(file)
        try:
            parts.append(Records(**load_file(file)))
        except (SafetensorError, TypeError) as error:
            raise DataError(f"{file} is damaged ({error}); remove it, and its rounds are collected again") from None
        done = reply * len(prompts) + min(first + batch_size, len(prompts))
        on_progress(f"{done} of {replies * len(prompts)} replies, {sum(map(len, parts)):,} rounds")
    records = Records.join(parts)
    if not len(records):
        raise DataError(f"{len(prompts)} prompts gave no round with a draft; raise --max-new-tokens or use more prompts")
    return records


def fingerprint(verifier: Verifier, weights_sha256: Mapping[str, str]) -> str:
    """What rounds depend on beside prompts and sampling: the weights of both models, and the dtype they run in."""
    return json.dumps([verifier.weights.name_or_path, str(verifier.dtype), sorted(weights_sha256.values())])


def _digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=10).hexdigest()
