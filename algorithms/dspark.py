"""DSpark: DFlash whose anchor slot predicts, plus a sequential head and a confidence head (arXiv 2607.05147)."""

from __future__ import annotations

from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from speculators.algorithms.anchors import Anchors, Supervision
from speculators.algorithms.dflash import DFlash, DFlashConfig, DFlashOptions, DFlashTraining, InjectionState
from speculators.algorithms.heads import ConfidenceHead, MarkovHead, MarkovKind
from speculators.algorithms.layers import initialise
from speculators.algorithms.objective import block_loss
from speculators.decoding.proposal import ConfidenceSource, DraftSampler, Proposal
from speculators.kernels.markov_sampling import MarkovChain
from speculators.registry import Need, PluginParts, VllmServing, register_algorithm
from speculators.speculator import VerifierWeights
from speculators.training.batch import LossOutput, TrainingBatch


class DSparkTraining(DFlashTraining):
    """0.1 CE + 0.9 L1 + 1.0 confidence BCE (arXiv 2607.05147, section 3.3).

    Attributes:
        confidence: weight of the confidence head's binary cross entropy.
    """

    cross_entropy: float = Field(0.1, ge=0)
    l1: float = Field(0.9, ge=0)
    confidence: float = Field(1.0, ge=0)


class DSparkConfig(DFlashConfig):
    """config.json of a DSpark drafter.

    Attributes:
        markov_rank: rank of the sequential head; 0 for none.
        markov_head_type: vanilla, gated or rnn.
        enable_confidence_head: whether the drafter estimates its own acceptance.
        confidence_head_with_markov: whether that estimate reads the previous token.
    """

    block_size: int = Field(7, ge=1)
    sample_from_anchor: bool = True
    markov_rank: int = Field(256, ge=0)
    markov_head_type: MarkovKind = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    training_options: DSparkTraining = Field(default_factory=DSparkTraining)

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.enable_confidence_head and self.confidence_head_with_markov and self.markov_rank == 0:
            raise ValueError("confidence_head_with_markov needs markov_rank of at least 1; set it to false or give the head a rank")
        return self


class DSparkOptions(DFlashOptions):
    """Options of DSpark."""

    sample_from_anchor: bool = True
    markov_rank: int = Field(256, ge=0)
    markov_head_type: MarkovKind = "vanilla"
    enable_confidence_head: bool = True
    training: DSparkTraining = Field(default_factory=DSparkTraining)


def serving_needs(config: DSparkConfig) -> list[Need]:
    """What vLLM reads differently in a DSpark configuration."""
    needs = []
    if config.sample_from_anchor:
        what = "sample_from_anchor = true: vLLM before 0.32 does not read it and drafts from wrong slots"
        needs.append(Need(what, since="0.32.0", plugin=True, remedy="write the format it reads with `speculators convert --to deepspec`"))
    if config.markov_rank and config.markov_head_type != "vanilla":
        what = f"markov_head_type = {config.markov_head_type!r}: it is read as 'vanilla', so later draft tokens are rejected"
        needs.append(Need(what, plugin=True))
    if not config.markov_rank:
        needs.append(Need("markov_rank = 0: vLLM builds a sequential head of no columns, which ends its process", plugin=True))
    if len(config.tapped_layers) != config.layers.num_hidden_layers:
        what = (
            f"{len(config.tapped_layers)} tapped layers for {config.layers.num_hidden_layers} drafter layers: vLLM before 0.32 expects as"
            " many of one as of the other"
        )
        needs.append(Need(what, since="0.32.0", plugin=True))
    return needs


def complete_vllm_config(config: dict[str, Any], transformers_config: dict[str, Any]) -> None:
    """Name the layout under both keys that vLLM releases decide it by, and the taps where 0.26 counts them."""
    parsed = DSparkConfig.parse(config)
    anchor = parsed.sample_from_anchor
    transformers_config |= {"sample_from_anchor": anchor, "dspark_bonus_anchor": not anchor}
    transformers_config["eagle_config"] = {"layer_ids": parsed.tapped_layers}


@register_algorithm(
    "dspark",
    serving=VllmServing(
        method="dspark",
        architecture="DSparkDraftModel",
        runners=("V2",),
        parallel=True,
        minimum_version="0.26.0",
        needs=serving_needs,
        plugin=PluginParts(
            models={"Qwen3DSparkModel": "speculators.serving.markov_model:MarkovDraftModel"},
            speculator="speculators.serving.markov_speculator:MarkovSpeculator",
            complete=complete_vllm_config,
        ),
        sglang=("--speculative-algorithm", "DSPARK"),
    ),
)
class DSpark(DFlash):
    """DFlash plus a sequential correction head and a confidence head."""

    config_class = DSparkConfig
    options_class = DSparkOptions
    warm_start_from = ("dflash",)
    config: DSparkConfig

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        hidden = config.layers.hidden_size
        self.markov_head: MarkovHead | None = None
        self.confidence_head: ConfidenceHead | None = None
        if config.markov_rank:
            self.markov_head = MarkovHead(config.markov_head_type, config.vocab_size, config.draft_vocab_size, hidden, config.markov_rank)
            initialise(self.markov_head, config.layers.initializer_range)
            # Both tables near zero would starve each other's gradient; one of them small starts the bias near zero.
            torch.nn.init.normal_(self.markov_head.markov_w1.weight, std=1.0)
        if config.enable_confidence_head:
            extra = config.markov_rank if config.confidence_head_with_markov else 0
            self.confidence_head = ConfidenceHead(hidden + extra)
            initialise(self.confidence_head, config.layers.initializer_range)

    @classmethod
    def _config_fields(cls, verifier: VerifierWeights, options: Any) -> dict[str, Any]:
        return {
            **super()._config_fields(verifier, options),
            "markov_rank": options.markov_rank,
            "markov_head_type": options.markov_head_type,
            "enable_confidence_head": options.enable_confidence_head,
            "confidence_head_with_markov": options.enable_confidence_head and options.markov_rank > 0,
        }

    @property
    def confidence_source(self) -> ConfidenceSource:
        """The confidence head, unless it was left out."""
        return "probability" if self.confidence_head is None else "head"

    def confidence_logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Confidence logits [...] of slots [..., hidden] after tokens `previous` [...]."""
        assert self.confidence_head is not None
        embedded = None
        if self.config.confidence_head_with_markov and self.markov_head is not None:
            embedded = self.markov_head.markov_w1(previous)
        logits: Tensor = self.confidence_head(hidden, embedded)
        return logits

    def first_state(self, head: MarkovHead, anchor: Tensor, hidden: Tensor) -> Tensor:
        """State of the sequential head before the first draft slot, [..., rank].

        The recurrence starts at the block's first slot. Where that is the anchor's and only conditions, it has taken a step.

        Args:
            head: the sequential head.
            anchor: [...] int64, the anchor tokens.
            hidden: [..., hidden] of the block's first slot.
        """
        state = head.initial_state(anchor)
        return state if self.config.sample_from_anchor else head.step(anchor, hidden, state)[1]

    def loss_at(self, batch: TrainingBatch, anchors: Anchors) -> LossOutput:
        """DFlash's objective with teacher-forced Markov bias, plus the confidence head's binary cross entropy.

        The confidence target is 1 - TV of the slot's own distributions; neither it nor the head's inputs carry
        gradient, so confidence never trades acceptance for being easy to predict.
        """
        options = self.config.training_options
        block = self.training_hidden(batch, anchors)
        hidden = self.draft_slots(block)
        supervision = Supervision.of(batch, anchors, hidden.shape[2])
        factors = bias_head = None
        if self.markov_head is not None:
            state = self.first_state(self.markov_head, anchors.input_ids(batch), block[..., 0, :])
            factors = self.markov_head.factors(supervision.previous, hidden, state)
            bias_head = self.markov_head.markov_w2.weight
        logits = None
        if self.confidence_head is not None:
            embedded = None
            if self.config.confidence_head_with_markov and self.markov_head is not None:
                embedded = self.markov_head.markov_w1(supervision.previous).detach()
            logits = self.confidence_head(hidden.detach(), embedded).float()
        output, terms, weights = block_loss(
            self,
            options,
            batch,
            supervision,
            hidden,
            bias_factors=factors,
            bias_head=bias_head,
            confidence_logits=logits,
            confidence=options.confidence,
        )
        if logits is None or terms.confidence_cross_entropy is None or terms.acceptance is None:
            return output
        entropy, target, kept = terms.confidence_cross_entropy.view_as(logits), terms.acceptance.view_as(logits), supervision.mask.float()
        error = ((logits.detach().sigmoid() - target.float()).abs() * kept).sum((0, 1))
        metrics = {
            **output.metrics,
            "confidence_cross_entropy": ((entropy * weights).sum(), weights.sum()),
            "confidence_error": (error, kept.sum((0, 1))),
        }
        return LossOutput(output.loss, metrics)

    def propose(self, state: InjectionState, anchor: Tensor, sampler: DraftSampler, num_draft_tokens: int) -> Proposal:
        """One parallel pass, then the sequential head: K cheap steps, each fed the token drawn before it."""
        block = self.decode_hidden(state, anchor, num_draft_tokens)
        hidden = self.draft_slots(block)
        logits, head = self.draft_logits(hidden), self.markov_head
        if head is None:
            token_ids = sampler.draw_block(logits, self.draft_vocabulary)
        else:
            ids = None if self.draft_vocabulary is None else self.draft_vocabulary.ids
            chain = MarkovChain(logits, head.markov_w2.weight, anchor, head.chain(hidden, self.first_state(head, anchor, block[:, 0])), ids)
            token_ids = sampler.draw_chain(chain, self.to_verifier_vocabulary)
        if self.confidence_head is None or not sampler.wants_confidence:
            return sampler.proposal()
        previous = torch.cat([anchor[:, None], token_ids[:, :-1]], dim=1)
        return sampler.proposal(self.confidence_logits(hidden, previous).float().sigmoid())
