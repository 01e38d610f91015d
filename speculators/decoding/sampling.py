"""From logits to tokens: one probability pipeline for drafts and verification, and the sampler that drafters use."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

import torch
from torch import Tensor

from speculators.decoding.proposal import SAMPLER_KEY, DraftVocabulary, Proposal
from speculators.decoding.randomness import Purpose, uniform
from speculators.errors import ConfigError
from speculators.kernels.likeliest_tokens import likeliest_tokens
from speculators.kernels.markov_sampling import MarkovChain, markov_sampling

# Elements of one temporary [rows, vocabulary] tensor: 2^26 float64 are half a GiB.
MAX_ELEMENTS = 1 << 26

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
_WHOLE_NUMBERS = ("top_k", "seed", "max_new_tokens")


@dataclass(frozen=True)
class SamplingParams:
    """How a request is sampled and when it ends. Field meanings and order of application are those of transformers.

    Attributes:
        temperature: divides the logits, at least 1e-30; 0 is greedy decoding, where only `repetition_penalty` still applies.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches top_p; 1 keeps all.
        min_p: drop tokens less likely than min_p times the most likely one; 0 keeps all.
        repetition_penalty: tokens of the prompt and of the reply so far have positive logits divided and negative ones
            multiplied by it; 1 is off.
        seed: equal seeds give equal replies.
        max_new_tokens: budget of a reply, stop token included.
        stop_token_ids: tokens that end a reply (kept as its last token); None: those of the verifier.
        ignore_eos: no token ends a reply, whatever `stop_token_ids` says.
        verification: how sampled drafts are accepted: "standard" token by token, "block" as a whole, which keeps the same
            distribution and accepts at least as many (see `rejection`).

    Raises:
        ConfigError: a value is outside its range, or no number.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool = False
    verification: Literal["standard", "block"] = "standard"

    def __post_init__(self) -> None:
        self._check_types()
        rules = (
            ("temperature", self.temperature >= 0, "at least 0 (0 is greedy)"),
            # Outside, float32 logits divided by it are infinite or undefined.
            ("temperature", self.greedy or 1e-30 <= self.temperature < math.inf, "0 (greedy), or at least 1e-30 and finite"),
            ("top_k", self.top_k >= 0, "at least 0 (0 keeps every token)"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (1 keeps every token)"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1 (0 keeps every token)"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0 and finite (1 is off)"),
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("verification", self.verification in ("standard", "block"), "'standard' or 'block'"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise ConfigError(f"sampling: {name} = {getattr(self, name)} must be {rule}")

    def _check_types(self) -> None:
        for names, kind, rule in ((_NUMBERS, Real, "a number"), (_WHOLE_NUMBERS, Integral, "a whole number")):
            for name in names:
                if not _is_number(getattr(self, name), kind):
                    raise ConfigError(f"sampling: {name} = {getattr(self, name)!r} must be {rule}")
        if self.stop_token_ids is None:
            return
        ids: Any = self.stop_token_ids  # any sequence, kept so that the request can be a key
        if not isinstance(ids, Collection) or not all(_is_number(token, Integral) and 0 <= token < 1 << 63 for token in ids):
            raise ConfigError(f"sampling: stop_token_ids = {ids!r} must be a list of token ids of at least 0, or None for the verifier's")
        object.__setattr__(self, "stop_token_ids", tuple(ids))

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    @property
    def only_temperature(self) -> bool:
        """Whether nothing but the temperature shapes the distributions."""
        return not self.top_k and self.top_p == 1 and not self.min_p and self.repetition_penalty == 1


def _is_number(value: Any, kind: type) -> bool:
    """Whether a value is a number of a kind; truth values are whole numbers to Python, and here none."""
    return not isinstance(value, bool) and isinstance(value, kind)


def penalised(logits: Tensor, params: SamplingParams, seen: Tensor | None) -> Tensor:
    """float32 logits after the repetition penalty.

    Args:
        logits: [..., vocabulary], any float dtype.
        params: the request.
        seen: [..., vocabulary] bool, tokens of the context of each distribution; None when no penalty applies.
    """
    logits = logits.float()
    if seen is None or params.repetition_penalty == 1.0:
        return logits
    penalty = params.repetition_penalty
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """Logits whose softmax is that of `logits / temperature`: distances to the largest, divided.

    At a low temperature a logit's own quotient is too coarse: at 1e6 float32 numbers lie 0.06 apart, which is 6 % of a probability.
    Differences of logits that are likely are exact, and their quotients small.

    Args:
        logits: [..., vocabulary] float32.
        temperature: above 0.
    """
    return (logits - logits.amax(-1, keepdim=True)) / temperature


def probabilities(logits: Tensor, params: SamplingParams, seen: Tensor | None = None) -> Tensor:
    """The distribution a token is drawn from.

    Drafts and verifier use this one function: that is what makes the request's parameters mean the same on both sides.
    Order: repetition penalty, temperature, top-k, top-p, min-p.

    Args:
        logits: [..., vocabulary], any float dtype; -inf for tokens that cannot occur.
        params: the request, with a temperature above 0.
        seen: see `penalised`.

    Returns:
        [..., vocabulary] float32, summing to 1.
    """
    logits = penalised(logits, params, seen)
    if 0 < params.top_k < logits.shape[-1]:  # of the logits themselves: distances to the largest may round to the same
        kth = logits.topk(params.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    logits = tempered(logits, params.temperature)
    if params.top_p < 1:
        logits = logits.masked_fill(~_nucleus(logits.softmax(-1), params.top_p), float("-inf"))
    result = logits.softmax(-1)
    if params.min_p > 0:
        unlikely = result < params.min_p * result.amax(-1, keepdim=True)
        result = logits.masked_fill(unlikely, float("-inf")).softmax(-1)
    return result


def _nucleus(distribution: Tensor, top_p: float) -> Tensor:
    """[..., vocabulary] bool: a token stays if all more likely ones together hold less than `top_p`."""
    ranked, order = distribution.sort(dim=-1, descending=True, stable=True)
    mass_before = ranked.double().cumsum(-1) - ranked
    keep = mass_before < top_p
    keep[..., 0] = True
    return torch.empty_like(keep).scatter_(-1, order, keep)


def draw(distribution: Tensor, uniforms: Tensor) -> Tensor:
    """Draw by inverting the cumulative distribution, summed in float64.

    Args:
        distribution: [..., vocabulary] float32 or float64, not negative; need not sum to exactly 1.
        uniforms: [...] float64 in [0, 1).

    Returns:
        [...] int64: the first token whose cumulative probability exceeds the uniform's share of the total, hence never
        one of probability 0. Of a distribution that is NaN the last token: some id, and no index behind the end.
    """
    flat = distribution.flatten(0, -2)
    rows_at_once = max(1, MAX_ELEMENTS // flat.shape[-1])
    drawn = []
    for part, part_uniforms in zip(flat.split(rows_at_once), uniforms.flatten().split(rows_at_once), strict=True):
        cumulative = part.double().cumsum(-1)
        target = part_uniforms[:, None] * cumulative[:, -1:]
        drawn.append(torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=flat.shape[-1] - 1))
    return torch.cat(drawn).view(uniforms.shape)


class RoundSampler:
    """The `DraftSampler` of one round.

    Under sampling each draft's float32 probability tensor is made once, drawn from, and kept for verification.
    Greedy drafts are argmaxes, and no probabilities are made.

    Args:
        params: the request.
        rows: [rows] int64, row of the request, for the random numbers.
        round_index: scalar int64 tensor, for the random numbers.
        seen: [rows, vocabulary] bool, tokens of each row's prompt and reply so far, the anchor included; None when no
            repetition penalty applies. Drafts are added as they are drawn, to a copy.
        estimate_confidence: keep the probability of the most likely token of every distribution drawn from (greedy: at
            temperature 1), the confidence of drafters that estimate none themselves.
        keep: from the confidence so far, [rows, k], how many leading drafts of each row will be verified, [rows]; None
            where that is not known while drafting.
    """

    def __init__(
        self,
        params: SamplingParams,
        rows: Tensor,
        round_index: Tensor,
        seen: Tensor | None = None,
        *,
        estimate_confidence: bool = False,
        keep: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._params = params
        self._estimate_confidence = estimate_confidence
        self._keep = keep
        self._confidence: list[Tensor] = []  # each [rows, n]
        self._rows = rows
        self._round = round_index
        self._seen = None if seen is None else seen.clone()
        self._token_ids: list[Tensor] = []  # each [rows, n]
        self._probabilities: list[Tensor] = []  # each [rows, n, vocabulary]

    @property
    def enough(self) -> bool:
        """Whether every row's block will be cut before the next draft; False where that is not known."""
        if self._keep is None or not self._confidence:
            return False
        confidence = torch.cat(self._confidence, dim=1)
        return not bool((self._keep(confidence) == confidence.shape[1]).any())

    @property
    def wants_confidence(self) -> bool:
        """See `DraftSampler.wants_confidence`."""
        return self._estimate_confidence

    def draw(self, logits: Tensor, vocabulary: DraftVocabulary | None = None) -> Tensor:
        """Draw the next draft token of every row: [rows, vocabulary] -> [rows] int64."""
        return self._draw(logits[:, None], vocabulary)[:, 0]

    def draw_block(self, logits: Tensor, vocabulary: DraftVocabulary | None = None) -> Tensor:
        """Draw all K draft tokens at once: [rows, K, vocabulary] -> [rows, K] int64.

        With a repetition penalty the slots are drawn one after the other, since a draft penalises those after it.
        """
        if self._seen is None:
            return self._draw(logits, vocabulary)
        return torch.cat([self._draw(slot, vocabulary) for slot in logits.split(1, dim=1)], dim=1)

    def draw_chain(self, chain: MarkovChain, widen: Callable[[Tensor], Tensor]) -> Tensor:
        """Draw all K draft tokens through a sequential head; see `DraftSampler.draw_chain`."""
        if not self._params.greedy or self._seen is not None:
            return chain.slot_by_slot(lambda logits: self.draw(widen(logits)))
        drafts = markov_sampling(chain)
        token_ids = drafts.token_ids if chain.ids is None else chain.ids[drafts.token_ids]
        if self._estimate_confidence:
            self._confidence.append(drafts.log_probability.exp())
        self._token_ids.append(token_ids)
        return token_ids

    def point_mass(self, token_ids: Tensor, lengths: Tensor | None = None) -> Proposal:
        """A proposal of deterministic tokens [rows, K]; see `DraftSampler.point_mass`."""
        lengths = token_ids.new_full((token_ids.shape[0],), token_ids.shape[1]) if lengths is None else lengths
        return Proposal(token_ids, lengths, None, None, SAMPLER_KEY)

    def proposal(self, confidence: Tensor | None = None) -> Proposal:
        """Everything drawn so far; see `DraftSampler.proposal`.

        Raises:
            ConfigError: nothing was drawn.
        """
        if not self._token_ids:
            raise ConfigError("sampler.proposal() has nothing to propose: call draw() or draw_block() first, or use point_mass()")
        token_ids = self._token_ids[0] if len(self._token_ids) == 1 else torch.cat(self._token_ids, dim=1)
        lengths = token_ids.new_full((token_ids.shape[0],), token_ids.shape[1])
        kept = self._probabilities
        stacked = None if not kept else kept[0] if len(kept) == 1 else torch.cat(kept, dim=1)
        if confidence is None and self._confidence:
            confidence = torch.cat(self._confidence, dim=1)
        return Proposal(token_ids, lengths, stacked, None if confidence is None else confidence.float(), SAMPLER_KEY)

    def _draw(self, logits: Tensor, vocabulary: DraftVocabulary | None) -> Tensor:
        seen = None if self._seen is None else self._seen[:, None]
        if vocabulary is not None and (seen is not None or not self._params.greedy):
            logits, vocabulary = vocabulary.widen(logits), None
        if self._params.greedy:
            logits = logits if seen is None else penalised(logits, self._params, seen)
            token_ids = likeliest_tokens(logits, None if vocabulary is None else vocabulary.ids)
            if self._estimate_confidence:
                logits = logits.float()
                self._confidence.append((logits.amax(-1) - logits.logsumexp(-1)).exp())
        else:
            first = sum(block.shape[1] for block in self._token_ids)
            slots = torch.arange(first, first + logits.shape[1], device=logits.device)
            # Where a drafter's arithmetic overflowed, as it may in float16, anything is drawn, and verified as such.
            distribution = probabilities(logits, self._params, seen).nan_to_num_(nan=1 / logits.shape[-1])
            token_ids = draw(distribution, uniform(self._params.seed, Purpose.DRAFT, self._rows[:, None], self._round, slots))
            self._probabilities.append(distribution)
            if self._estimate_confidence:
                self._confidence.append(distribution.amax(-1))
        if self._seen is not None:
            self._seen.scatter_(1, token_ids, True)
        self._token_ids.append(token_ids)
        return token_ids
