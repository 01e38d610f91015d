"""Speculator: the base class every algorithm implements. Its four duties are all that the library knows of it.

1. features: which verifier layers it taps (`aux_hidden_state_layer_ids`).
2. loss: `training_loss(batch)`.
3. observe: take newly committed tokens and their hidden states into its draft state.
4. propose: K draft tokens after the anchor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from speculators.config import SpeculatorConfig
from speculators.decoding.calibration import Calibration, stored_calibrations
from speculators.decoding.proposal import ConfidenceSource, DraftSampler, DraftVocabulary, Observation, Proposal
from speculators.errors import ConfigError, PairingError
from speculators.kernels.skinny_linear import skinny_linear
from speculators.registry import VllmServing
from speculators.training.batch import LossOutput, TrainingBatch


@dataclass(frozen=True)
class VerifierWeights:
    """What a speculator borrows from its verifier: frozen, shared, never copied.

    Attributes:
        embedding: [vocabulary, hidden] input embedding table.
        embedding_scale: factor the model applies after the lookup (Gemma: sqrt(hidden)); 1.0 elsewhere.
        head: [vocabulary, hidden] output head; the same tensor as `embedding` where the model ties them.
        head_bias: [vocabulary] or None.
        logit_scale: factor on the logits (Cohere, Granite); 1.0 elsewhere.
        logit_softcap: cap c of c * tanh(logits / c) (Gemma-2), or None.
        final_norm: the model's own final norm module, applied to the residual stream.
        num_layers: decoder layers of the verifier.
        stop_token_ids: ids that end a reply.
        name_or_path: as the user named the verifier.
        architectures: as in the verifier's config.json.
        config: the verifier's text config as a dict.
        unused_token_ids: special tokens that no conversation holds, the best for a MASK slot first; empty without a tokenizer.
    """

    embedding: Tensor
    head: Tensor
    final_norm: Callable[[Tensor], Tensor]
    num_layers: int
    stop_token_ids: tuple[int, ...]
    name_or_path: str
    architectures: tuple[str, ...]
    config: dict[str, Any]
    embedding_scale: float = 1.0
    head_bias: Tensor | None = None
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    unused_token_ids: tuple[int, ...] = ()

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table."""
        return self.embedding.shape[0]

    @property
    def hidden_size(self) -> int:
        """Columns of the embedding table."""
        return self.embedding.shape[1]

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embed tokens as the verifier does. [...] int64 -> [..., hidden]."""
        # On CUDA `embedding` reads the rows of a few tokens one after the other, and an index all at once.
        few = token_ids.is_cuda and not torch.is_grad_enabled()
        embedded = self.embedding[token_ids] if few else nn.functional.embedding(token_ids, self.embedding)
        return embedded if self.embedding_scale == 1.0 else embedded * self.embedding_scale


class Speculator(nn.Module, ABC):
    """A trained drafter. Subclasses are registered with `register_algorithm` and live one a file.

    Class attributes:
        config_class: the pydantic config of the algorithm.
        method: the method string, and
        serving: what vLLM needs to know; both set by `register_algorithm`.
        stored_verifier_tensors: verifier tensors that the full on-disk form repeats for engines that want
            them in the file: a subset of {"embed_tokens.weight", "lm_head.weight"}. The compact form leaves
            them out.
        warm_start_from: methods, beside its own, whose drafters it can start its training from.
    """

    config_class: ClassVar[type[SpeculatorConfig]]
    method: ClassVar[str]
    serving: ClassVar[VllmServing]
    stored_verifier_tensors: ClassVar[tuple[str, ...]] = ()
    warm_start_from: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: SpeculatorConfig) -> None:
        super().__init__()
        self.config = config
        self._verifier: list[VerifierWeights] = []  # in a list, so that nn.Module registers nothing of it
        # Copies of the verifier's embedding and head that a checkpoint brought along; `attach` compares and drops them.
        self.unchecked_shared_tensors: dict[str, Tensor] = {}
        # The head's kept rows, with the head and the mapping they are of; drafting reads them every round.
        self._kept_head: tuple[Tensor, Tensor, Tensor] | None = None
        # The draft vocabulary, with the mapping it is of; read every round too.
        self._draft_vocabulary: tuple[Tensor, DraftVocabulary] | None = None
        if config.draft_vocab_size != config.vocab_size:
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    # -- construction and files ------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def default_config(cls, verifier: VerifierWeights, **options: Any) -> SpeculatorConfig:
        """The algorithm's configuration for a verifier; `options` are the algorithm's own named settings.

        Raises:
            ConfigError: an option is unknown, out of range, or does not fit the verifier.
        """

    @classmethod
    def from_verifier(cls, verifier: VerifierWeights, **options: Any) -> Self:
        """A freshly initialised drafter for a verifier, attached to it."""
        speculator = cls(cls.default_config(verifier, **options))
        speculator.attach(verifier)
        return speculator

    @classmethod
    def continued_config(cls, source: SpeculatorConfig, verifier: VerifierWeights, **options: Any) -> SpeculatorConfig:
        """The configuration of a drafter that starts from the weights of another one.

        Args:
            source: that of the other drafter, of this method or one of `warm_start_from`. What its weights depend on
                (taps, draft vocabulary, anchor rule, shape) stays.
            verifier: the verifier of both.
            options: as for `default_config`; here, unless a subclass says otherwise, none.

        Raises:
            ConfigError: an option is unknown, out of range, or contradicts the other drafter; the message names both values.
        """
        if options:
            raise ConfigError(f"options {sorted(options)} cannot change a drafter that training starts from; leave them out")
        return source

    @staticmethod
    def from_pretrained(path_or_repo: str | Path, verifier: VerifierWeights | None = None, **options: Any) -> Speculator:
        """Load a checkpoint of any registered algorithm; see `speculators.checkpoint.load`."""
        from speculators.checkpoint import load

        return load(path_or_repo, verifier, **options)

    def save_pretrained(self, path: str | Path, *, form: str = "full", **options: Any) -> None:
        """Write a checkpoint folder; see `speculators.checkpoint.save`."""
        from speculators.checkpoint import save

        save(self, path, form=form, **options)

    def push_to_hub(self, repo_id: str, *, private: bool = False, revision: str | None = None, **options: Any) -> str:
        """Upload a checkpoint to the Hub and return its address; see `speculators.checkpoint.push_to_hub`."""
        from speculators.checkpoint import push_to_hub

        return push_to_hub(self, repo_id, private=private, revision=revision, **options)

    def attach(self, verifier: VerifierWeights) -> None:
        """Borrow the verifier's embedding, head and final norm.

        Raises:
            PairingError: hidden size, vocabulary or depth do not fit this speculator, or its checkpoint brought along
                an embedding or head that is not this verifier's.
        """
        config = self.config
        checks = (
            ("vocabulary", config.vocab_size, verifier.vocab_size, config.vocab_size == verifier.vocab_size),
            ("hidden size", self.target_hidden_size, verifier.hidden_size, self.target_hidden_size == verifier.hidden_size),
        )
        for what, ours, theirs, equal in checks:
            if not equal:
                raise PairingError(
                    f"this {self.method} speculator was made for a verifier with {what} {ours}, but {verifier.name_or_path!r} has {theirs};"
                    f" pair it with {config.speculators_config.verifier.name_or_path!r} or train one for this verifier"
                )
        deepest = max(config.tapped_layers, default=0)
        if deepest > verifier.num_layers:
            raise PairingError(
                f"{config.aux_layer_key} {config.tapped_layers} reads layer {deepest}, but {verifier.name_or_path!r} has"
                f" {verifier.num_layers} layers (ids 0 to {verifier.num_layers}); choose taps within its depth"
            )
        if self.unchecked_shared_tensors:
            from speculators.checkpoint.shared import check_shared_tensors

            made_for = config.speculators_config.verifier.name_or_path
            check_shared_tensors(self.unchecked_shared_tensors, made_for, verifier, self.state_dict().get("t2d"))
            self.unchecked_shared_tensors = {}
        self._verifier = [verifier]

    @property
    def is_attached(self) -> bool:
        """Whether a verifier is attached."""
        return bool(self._verifier)

    @property
    def verifier(self) -> VerifierWeights:
        """The attached verifier's weights.

        Raises:
            PairingError: none is attached.
        """
        if not self._verifier:
            raise PairingError(f"this {self.method} speculator has no verifier: call attach(verifier.weights) or load it with verifier=...")
        return self._verifier[0]

    @property
    def target_hidden_size(self) -> int:
        """Hidden size of the verifier this drafter was made for."""
        return self.config.target_hidden_size or self.config.layers.hidden_size

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """See `torch.nn.Module.load_state_dict`; the draft vocabulary may be another one afterwards."""
        self._kept_head = self._draft_vocabulary = None
        return super().load_state_dict(*args, **kwargs)

    # -- output head -----------------------------------------------------------------------------------------

    def head_weight(self) -> Tensor:
        """[draft vocabulary, hidden]: the verifier's head, its kept rows where the draft vocabulary is reduced."""
        head = self.verifier.head
        if not self.has_reduced_vocabulary:
            return head
        d2t = self.get_buffer("d2t")
        if self._kept_head is None or self._kept_head[0] is not head or self._kept_head[1] is not d2t:
            with torch.inference_mode(False), torch.no_grad():  # it may serve training after it served decoding
                self._kept_head = (head, d2t, head[self.draft_token_ids()])
        return self._kept_head[2]

    @property
    def has_reduced_vocabulary(self) -> bool:
        """Whether the drafter proposes only a subset of the verifier's tokens."""
        return self.config.draft_vocab_size != self.config.vocab_size

    def draft_token_ids(self) -> Tensor:
        """[draft vocabulary] int64: the verifier id of every draft id (`d2t` holds offsets)."""
        d2t = self.get_buffer("d2t")
        return torch.arange(len(d2t), device=d2t.device) + d2t

    def set_draft_vocabulary(self, verifier_ids: Tensor) -> None:
        """Choose the tokens of a reduced draft vocabulary: [draft vocabulary] unique verifier ids."""
        ids = torch.sort(verifier_ids.to(torch.int64)).values
        if ids.numel() != self.config.draft_vocab_size or ids.unique().numel() != ids.numel():
            raise PairingError(f"the draft vocabulary needs {self.config.draft_vocab_size} different ids, got {verifier_ids.numel()}")
        self.get_buffer("t2d").zero_()[ids] = True
        self.get_buffer("d2t").copy_(ids - torch.arange(ids.numel(), device=ids.device))
        self._kept_head = self._draft_vocabulary = None

    @property
    def draft_vocabulary(self) -> DraftVocabulary | None:
        """The tokens that it can propose; None for all of the verifier's."""
        if not self.has_reduced_vocabulary:
            return None
        d2t = self.get_buffer("d2t")
        if self._draft_vocabulary is None or self._draft_vocabulary[0] is not d2t:
            with torch.inference_mode(False), torch.no_grad():
                self._draft_vocabulary = (d2t, DraftVocabulary(self.draft_token_ids(), self.config.vocab_size))
        return self._draft_vocabulary[1]

    def to_verifier_vocabulary(self, logits: Tensor) -> Tensor:
        """[..., draft vocabulary] -> [..., vocabulary], -inf where the drafter cannot propose a token."""
        vocabulary = self.draft_vocabulary
        return logits if vocabulary is None else vocabulary.widen(logits)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """Logits of [..., hidden] states after the drafter's final norm: [..., draft vocabulary]."""
        verifier = self.verifier
        bias = verifier.head_bias
        if bias is not None and self.has_reduced_vocabulary:
            bias = bias[self.draft_token_ids()]
        # Two dimensions: of a view that skips slots, torch would make a batched product, for which it copies the whole head.
        rows = hidden.to(verifier.head.dtype).reshape(-1, hidden.shape[-1])
        logits = skinny_linear(rows, self.head_weight(), bias).unflatten(0, hidden.shape[:-1])
        logits = logits if verifier.logit_scale == 1.0 else logits * verifier.logit_scale
        cap = verifier.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def compute_dtype(self) -> torch.dtype:
        """The dtype activations run in: autocast's inside autocast, else that of the parameters."""
        parameter = next(self.parameters())
        if torch.is_autocast_enabled(parameter.device.type):
            return torch.get_autocast_dtype(parameter.device.type)
        return parameter.dtype

    # -- the four duties -------------------------------------------------------------------------------------

    @property
    def aux_hidden_state_layer_ids(self) -> tuple[int, ...]:
        """Tapped verifier layers, ascending: id i = residual stream after i layers, n = before the final norm."""
        return tuple(self.config.tapped_layers)

    @property
    def max_draft_tokens(self) -> int:
        """The largest K `propose` accepts."""
        return self.config.max_draft_tokens

    @property
    def default_draft_tokens(self) -> int:
        """K when the caller names none: `speculative_tokens` of the checkpoint."""
        return self.config.num_draft_tokens

    @property
    def confidence_source(self) -> ConfidenceSource:
        """Its own draft probabilities; an algorithm with a confidence head says "head"."""
        return "probability"

    @property
    def calibrations(self) -> list[Calibration]:
        """What `speculators calibrate` stored with the checkpoint.

        Raises:
            CheckpointError: an entry cannot be read.
        """
        from speculators.checkpoint.native import EXTRA_KEY

        return stored_calibrations(getattr(self.config, EXTRA_KEY, None))

    @abstractmethod
    def training_loss(self, batch: TrainingBatch) -> LossOutput:
        """Loss of one packed batch. Draws anchors (or chains) from torch's default generator of the device."""

    @abstractmethod
    def new_state(self, rows: int, max_length: int, device: torch.device, dtype: torch.dtype) -> Any:
        """Preallocate draft state; see `Drafter.new_state`."""

    @abstractmethod
    def observe(self, state: Any, observation: Observation) -> None:
        """Take newly committed tokens into the draft state; see `Drafter.observe`."""

    @abstractmethod
    def propose(self, state: Any, anchor: Tensor, sampler: DraftSampler, num_draft_tokens: int) -> Proposal:
        """Draft tokens after the anchor; see `Drafter.propose`."""
