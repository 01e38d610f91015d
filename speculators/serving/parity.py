"""The same prompts through our engine and through vLLM: do both draft the same tokens, and accept as many?

Good in training, accepts nothing when served, is the commonest complaint about drafters. Here every round of both engines
is compared; where they part, the first tensor that differs is named.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from speculators.decoding.engine import generate
from speculators.decoding.proposal import DraftSampler, Observation, Proposal
from speculators.decoding.sampling import SamplingParams
from speculators.decoding.statistics import Round, acceptance_length, accepted_by_position
from speculators.errors import ConfigError
from speculators.serving.plan import ServingPlan
from speculators.serving.rounds import ServedRound, recorded_rounds
from speculators.serving.tensors import first_difference, near_tie
from speculators.speculator import Speculator
from speculators.verifier import Verifier

_MOST_TIES = 8  # more of them are no coincidence


@dataclass(frozen=True)
class Difference:
    """The first round in which the engines drafted differently.

    Attributes:
        prompt: its index.
        length: tokens known before the round.
        ours, theirs: draft tokens.
        tensor: the first tensor that differs.
    """

    prompt: int
    length: int
    ours: tuple[int, ...]
    theirs: tuple[int, ...]
    tensor: str


@dataclass(frozen=True)
class Parity:
    """What was compared. Each prompt's last round is left out of the acceptance: the engines cut it differently.

    Attributes:
        prompts: number of prompts.
        identical_replies: prompts that both engines answered alike.
        rounds: vLLM's rounds that our engine drafted from as well.
        equal_rounds: those of them with equal drafts.
        near_ties: rounds that differ in a token that our drafter finds as likely, up to rounding; counted until the first
            difference of another kind.
        acceptance_length: ours and vLLM's, the bonus token included.
        accepted: share of rounds in which draft k was accepted, for k = 1 .. K, ours and vLLM's.
        difference: None where all rounds are equal, or differ by a near tie.
    """

    prompts: int
    identical_replies: int
    rounds: int
    equal_rounds: int
    near_ties: int
    acceptance_length: tuple[float, float]
    accepted: tuple[list[float], list[float]]
    difference: Difference | None


def compare(
    plan: ServingPlan,
    verifier: Verifier,
    speculator: Speculator,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 64,
    *,
    on_progress: Callable[[str], None] = lambda _: None,
    **engine: Any,
) -> Parity:
    """Run both engines greedily over the same prompts.

    Args:
        plan: how vLLM is to serve the pair.
        verifier, speculator: the pair, for our engine.
        prompts: token ids.
        max_new_tokens: budget of a reply.
        on_progress: told what is under way.
        engine: settings of `vllm.LLM` beyond those that parity needs.

    Raises:
        ConfigError: vLLM is not installed, or does not start with these settings; the message holds its own.
    """
    sampling = SamplingParams(max_new_tokens=max_new_tokens, stop_token_ids=verifier.stop_token_ids)
    on_progress(f"our engine: {len(prompts)} prompts")
    watched = WatchedDrafter(speculator, len(prompts))
    ours = generate(verifier, watched, prompts, sampling, num_draft_tokens=plan.num_draft_tokens)
    on_progress("vLLM: starting")
    llm = start_vllm(plan, verifier, max(map(len, prompts)) + max_new_tokens, **engine)
    on_progress(f"vLLM: {len(prompts)} prompts")
    replies, rounds = answer(llm, prompts, sampling)
    shared = [
        (index, one, watched.proposals[index][one.length])
        for index, of_prompt in enumerate(rounds)
        for one in of_prompt
        if one.length in watched.proposals[index] and _same_context(one, replies[index], ours.token_ids[index], len(prompts[index]))
    ]
    difference, ties = None, 0
    for index, one, drafts in shared:
        if drafts == one.drafts:
            continue
        on_progress("a round differs: looking for the reason")
        context = [*prompts[index], *replies[index]][: one.length - 1]
        if ties < _MOST_TIES and near_tie(verifier, speculator, context, drafts, one.drafts):
            ties += 1
            continue
        tensor = first_difference(verifier, speculator, llm, plan.checkpoint, context, plan.num_draft_tokens)
        difference = Difference(index, one.length, drafts, one.drafts, tensor)
        break
    our_rounds = [one for of_prompt in ours.rounds for one in of_prompt[:-1]]
    their_rounds = [Round(len(one.drafts), one.accepted, len(one.emitted)) for of_prompt in rounds for one in of_prompt[:-1]]
    return Parity(
        prompts=len(prompts),
        identical_replies=sum(a == b for a, b in zip(replies, ours.token_ids, strict=True)),
        rounds=len(shared),
        equal_rounds=sum(drafts == one.drafts for _, one, drafts in shared),
        near_ties=ties,
        acceptance_length=(acceptance_length(our_rounds), acceptance_length(their_rounds)),
        accepted=(_shares(our_rounds), _shares(their_rounds)),
        difference=difference,
    )


def _same_context(one: ServedRound, reply: Sequence[int], ours: Sequence[int], prompt: int) -> bool:
    """Whether both engines knew the same tokens before a round."""
    known = one.length - prompt
    return list(reply[:known]) == list(ours[:known])


def _shares(rounds: Sequence[Round]) -> list[float]:
    return [count / len(rounds) for count in accepted_by_position(rounds)]


def start_vllm(plan: ServingPlan, verifier: Verifier, max_model_len: int, **engine: Any) -> Any:
    """A `vllm.LLM` in this process, set up so that its rounds can be watched.

    Raises:
        ConfigError: vLLM is missing or refuses.
    """
    # One process; the plugin as in a server.
    for name, value in {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", **plan.environment}.items():
        os.environ.setdefault(name, value)
    try:
        from vllm import LLM
    except ImportError as error:
        raise ConfigError(f"vLLM is not installed here ({error}); parity needs it beside this library") from None
    settings: dict[str, Any] = {
        "dtype": str(verifier.dtype).removeprefix("torch."),
        "max_model_len": max_model_len + 2 * (plan.num_draft_tokens + 1),  # near its end the V1 runner drafts zeros
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        **engine,
    }
    try:
        return LLM(plan.verifier, speculative_config=plan.speculative_config, **settings)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"vLLM does not start with this pair: {reason[:600]}") from error


def answer(llm: Any, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> tuple[list[list[int]], list[list[ServedRound]]]:
    """vLLM's greedy replies, and the rounds of each prompt."""
    from vllm import SamplingParams as VllmSampling

    theirs = VllmSampling(
        temperature=0,
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=list(sampling.stop_token_ids or ()),
        ignore_eos=sampling.ignore_eos,
        detokenize=False,
    )
    with recorded_rounds(llm) as rounds:
        outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], theirs, use_tqdm=False)
    noted = {request.partition("-")[0]: of_request for request, of_request in rounds.items()}
    return [list(output.outputs[0].token_ids) for output in outputs], [noted.get(output.request_id, []) for output in outputs]


class WatchedDrafter:
    """A drafter whose every proposal is noted, all K tokens of it.

    Attributes:
        proposals: of each row, tokens known before a round -> draft tokens.
    """

    def __init__(self, inner: Speculator, rows: int) -> None:
        self.inner = inner
        self.aux_hidden_state_layer_ids = inner.aux_hidden_state_layer_ids
        self.max_draft_tokens, self.default_draft_tokens = inner.max_draft_tokens, inner.default_draft_tokens
        self.proposals: list[dict[int, tuple[int, ...]]] = [{} for _ in range(rows)]
        self._known: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def observe(self, state: Any, observation: Observation) -> None:
        """Note how many tokens each row has; the anchor is known too."""
        self._known = (observation.start + observation.counts + 1).tolist()
        self.inner.observe(state, observation)

    def propose(self, state: Any, anchor: Tensor, sampler: DraftSampler, num_draft_tokens: int) -> Proposal:
        """Note the drafts."""
        proposal = self.inner.propose(state, anchor, sampler, num_draft_tokens)
        for row, drafts in enumerate(proposal.token_ids.tolist()):
            self.proposals[row].setdefault(self._known[row], tuple(drafts))  # a finished row keeps proposing
        return proposal
