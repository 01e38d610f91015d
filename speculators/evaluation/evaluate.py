"""`evaluate`: decode prompt sets with every drafter and without one, in one engine, and say how they differ."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from speculators.decoding.engine import AUTO, generate
from speculators.decoding.length_schedules import ConfidenceThreshold
from speculators.decoding.prompt_lookup import PromptLookup
from speculators.decoding.proposal import Drafter
from speculators.decoding.sampling import SamplingParams
from speculators.decoding.statistics import Round
from speculators.errors import ConfigError, DataError
from speculators.evaluation.metrics import NEAR_TIE_GAP, first_divergence, is_degenerate
from speculators.evaluation.rows import Row, rows_of
from speculators.evaluation.runs import DIGITS, Run

if TYPE_CHECKING:
    from speculators.data.prompts import Prompt
    from speculators.verifier import Verifier

PLAIN = "plain"
PROMPT_LOOKUP = "prompt_lookup"


@dataclass(frozen=True)
class PromptSet:
    """Prompts as the verifier reads them.

    Attributes:
        name: as the tables name it.
        ids: one name a prompt.
        token_ids: each prompt rendered through the chat template, generation prompt included.
    """

    name: str
    ids: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]

    @classmethod
    def from_prompts(cls, verifier: Verifier, name: str, prompts: Sequence[Prompt]) -> PromptSet:
        """Render the first turn of every prompt through the verifier's default chat template.

        Raises:
            DataError: there are no prompts, or the verifier has no chat template.
        """
        if not prompts:
            raise DataError(f"prompt set {name!r} is empty: it needs at least one prompt")
        rendered = tuple(tuple(verifier.encode_chat(prompt.messages)) for prompt in prompts)
        return cls(name, tuple(prompt.identifier for prompt in prompts), rendered)


@dataclass(frozen=True)
class EvaluationSettings:
    """How every method decodes.

    Attributes:
        max_new_tokens: token budget a prompt.
        temperature: 0 is greedy; only then is identity to plain decoding checked.
        num_draft_tokens: K; None takes each drafter's own default, and the largest of those for prompt lookup.
        batch_size: prompts decoded together.
        confidence_threshold: cut a block before its first slot below it; not used for prompt lookup, which
            has no confidence.
        seed: of sampling.
        auto_length: every round's length is chosen, up to K = each drafter's default; see `engine.generate`.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    num_draft_tokens: int | None = None
    batch_size: int = 1
    confidence_threshold: float = 0.0
    seed: int = 0
    auto_length: bool = False

    def __post_init__(self) -> None:
        if self.auto_length and (self.num_draft_tokens is not None or self.confidence_threshold > 0):
            raise ConfigError(
                "k auto chooses the lengths of blocks: give neither a number of draft tokens nor a confidence threshold with it"
            )
        if self.max_new_tokens < 2:
            raise ConfigError(
                f"max_new_tokens {self.max_new_tokens} leaves nothing to draft: the first token comes from the prompt, use 2 or more"
            )
        if self.batch_size < 1:
            raise ConfigError(f"batch_size {self.batch_size} must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature {self.temperature} must be 0 (greedy) or positive")
        ConfidenceThreshold(self.confidence_threshold)  # checks the value, before anything is decoded
        if self.num_draft_tokens is not None and not 1 <= self.num_draft_tokens < len(DIGITS):
            raise ConfigError(f"k {self.num_draft_tokens} must be between 1 and {len(DIGITS) - 1} draft tokens")


@dataclass(frozen=True)
class Decoded:
    """Outputs of one method on one prompt set: `token_ids` and `rounds` a row, wall seconds a batch."""

    token_ids: list[list[int]]
    rounds: list[list[Round]]
    batch_seconds: list[float]


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` returns: the table's rows, and the runs they were computed from (plain decoding included)."""

    rows: list[Row]
    runs: list[Run]


def evaluate(
    verifier: Verifier,
    drafters: Mapping[str, Drafter | None],
    prompts: Sequence[PromptSet] | PromptSet,
    settings: EvaluationSettings = EvaluationSettings(),
    *,
    checkpoints: Mapping[str, str | Path] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Evaluation:
    """Decode every prompt set with every drafter, with prompt lookup and plainly, on one contract.

    Greedy outputs are compared token by token with plain decoding in the same engine. A divergence counts as
    identical only as a near tie: where plain decoding's two largest logits, on the prefix both outputs share, lie
    less than 2e-4 apart.

    Args:
        verifier: decodes and checks.
        drafters: name -> drafter attached to `verifier`; None decodes plainly. `prompt_lookup` is added.
        prompts: one prompt set or several.
        settings: the contract all of them share.
        checkpoints: name -> folder or Hub name, shown in the rows.
        on_progress: called with a short text before each decode.

    Raises:
        ConfigError: K is larger than what a drafter can propose. Nothing has been decoded then.
        DataError: there is no prompt.
    """
    sets = [prompts] if isinstance(prompts, PromptSet) else list(prompts)
    if not sets or not all(prompt_set.token_ids for prompt_set in sets):
        raise DataError("there is nothing to evaluate on: every prompt set needs at least one prompt")
    chosen = with_prompt_lookup(drafters)
    lengths = draft_lengths(chosen, settings)
    say = on_progress or (lambda text: None)
    greedy = EvaluationSettings(settings.max_new_tokens, batch_size=settings.batch_size)
    runs: list[Run] = []
    for prompt_set in sets:
        say(f"plain decoding on {prompt_set.name}")
        reference = decode(verifier, None, prompt_set, greedy, 0)
        degenerate = tuple(is_degenerate(token_ids) for token_ids in reference.token_ids)
        baseline = reference if settings.temperature == 0 else decode(verifier, None, prompt_set, settings, 0)
        outputs = {PLAIN: baseline}
        for name, drafter in chosen.items():
            if drafter is not None:
                say(f"{name} on {prompt_set.name}")
                outputs[name] = decode(verifier, drafter, prompt_set, settings_for(name, settings), lengths[name])
        for name, decoded in outputs.items():
            same = compare(verifier, prompt_set, decoded.token_ids, reference.token_ids) if settings.temperature == 0 else None
            runs.append(
                Run(
                    verifier=verifier.weights.name_or_path,
                    method=method_of(name, chosen.get(name)),
                    checkpoint=str(checkpoints[name]) if checkpoints and name in checkpoints else None,
                    parameters=parameter_count(chosen.get(name)),
                    prompts=prompt_set.name,
                    prompt_ids=prompt_set.ids,
                    k=lengths.get(name, 0),
                    temperature=settings.temperature,
                    confidence_threshold=0.0 if name == PLAIN else settings_for(name, settings).confidence_threshold,
                    seed=settings.seed,
                    max_new_tokens=settings.max_new_tokens,
                    batch_size=settings.batch_size,
                    dtype=str(verifier.dtype).removeprefix("torch."),
                    device=device_name(verifier.device),
                    rounds=tuple(tuple(row) for row in decoded.rounds),
                    degenerate=degenerate,
                    identical=None if same is None else tuple(equal for equal, _ in same),
                    near_tie=None if same is None else tuple(tie for _, tie in same),
                    batch_seconds=tuple(decoded.batch_seconds),
                )
            )
    wanted = runs if None in drafters.values() else [run for run in runs if run.method != PLAIN]
    return Evaluation(rows=rows_of(wanted, baselines=runs), runs=runs)


def decode(verifier: Verifier, drafter: Drafter | None, prompts: PromptSet, settings: EvaluationSettings, num_draft_tokens: int) -> Decoded:
    """Decode one prompt set in batches of consecutive prompts. `num_draft_tokens` is ignored without a drafter."""
    decoded = Decoded([], [], [])
    for start in range(0, len(prompts.token_ids), settings.batch_size):
        # The engine draws by (seed, row of the batch): the batch's first row in the seed keeps every prompt's draws its own.
        sampling = SamplingParams(temperature=settings.temperature, seed=settings.seed + start, max_new_tokens=settings.max_new_tokens)
        generation = generate(
            verifier,
            drafter,
            prompts.token_ids[start : start + settings.batch_size],
            sampling,
            num_draft_tokens=None if drafter is None else AUTO if settings.auto_length else num_draft_tokens,
            confidence_threshold=settings.confidence_threshold if drafter is not None else 0.0,
        )
        decoded.token_ids.extend(generation.token_ids)
        decoded.rounds.extend(generation.rounds)
        decoded.batch_seconds.append(generation.seconds)
    return decoded


def compare(
    verifier: Verifier, prompts: PromptSet, outputs: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]
) -> list[tuple[bool, bool]]:
    """Per row (identical, near tie): equal tokens, or a first divergence where plain decoding's top two logits tie."""
    results = []
    for prompt, output, plain in zip(prompts.token_ids, outputs, reference, strict=True):
        index = first_divergence(output, plain)
        differs = index is not None
        # A sequence that merely ends early has no other token at that index: that is never a tie.
        tie = index is not None and index < min(len(output), len(plain)) and top_two_gap(verifier, [*prompt, *plain[:index]]) < NEAR_TIE_GAP
        results.append((not differs or tie, tie))
    return results


def top_two_gap(verifier: Verifier, prefix: Sequence[int]) -> float:
    """Difference of the two largest logits after `prefix`, by one plain forward pass of the verifier."""
    cache = verifier.new_cache(1, len(prefix))
    output = verifier.forward(torch.tensor([list(prefix)], device=verifier.device), cache)
    first, second = verifier.logits(output.last_hidden_state[:, -1]).float().topk(2).values[0].tolist()
    return float(first - second)


def with_prompt_lookup(drafters: Mapping[str, Drafter | None]) -> dict[str, Drafter | None]:
    """The drafters, and prompt lookup where it is not among them: every table shows what an untrained drafter reaches."""
    return {**drafters} if PROMPT_LOOKUP in drafters else {**drafters, PROMPT_LOOKUP: PromptLookup()}


def settings_for(name: str, settings: EvaluationSettings) -> EvaluationSettings:
    """A drafter's settings: prompt lookup has no confidence that a threshold could cut."""
    return replace(settings, confidence_threshold=0.0) if name == PROMPT_LOOKUP else settings


def draft_lengths(drafters: Mapping[str, Drafter | None], settings: EvaluationSettings) -> dict[str, int]:
    """K of every drafter, checked against what it can propose.

    Raises:
        ConfigError: K exceeds a drafter's block.
    """
    trained = [drafter.default_draft_tokens for name, drafter in drafters.items() if drafter is not None and name != PROMPT_LOOKUP]
    lengths = {}
    for name, drafter in drafters.items():
        if drafter is None:
            continue
        own_default = max(trained, default=drafter.default_draft_tokens) if name == PROMPT_LOOKUP else drafter.default_draft_tokens
        k = settings.num_draft_tokens or own_default
        if k > drafter.max_draft_tokens:
            raise ConfigError(
                f"k {k} exceeds the {drafter.max_draft_tokens} tokens {name} proposes in one block; use k <= {drafter.max_draft_tokens}"
            )
        lengths[name] = k
    return lengths


def method_of(name: str, drafter: Drafter | None) -> str:
    """The registered method of a drafter; a drafter outside the registry goes by its name."""
    return str(getattr(drafter, "method", name))


def parameter_count(drafter: Drafter | None) -> int:
    """Weights a drafter owns; what it borrows from the verifier is not counted."""
    return sum(parameter.numel() for parameter in drafter.parameters()) if isinstance(drafter, nn.Module) else 0


def device_name(device: torch.device) -> str:
    """The accelerator's name; the architecture and the thread count on a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
