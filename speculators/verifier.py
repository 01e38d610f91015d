"""Verifier: a transformers causal language model with hidden-state taps and a cache that rolls back by length."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from speculators.attention import GROUPED_ATTENTION, AttentionMasks
from speculators.decoding.cache import KeyValueCache, cache_argument
from speculators.errors import CheckpointError, ConfigError, DataError
from speculators.fused_layers import fuse_final_norm, fuse_layers
from speculators.kernels.packed_linear import PackedLinear, announce
from speculators.loading import fast_dtype, load_model, refuse_unsupported, stop_token_ids
from speculators.positions import context_length, ends_hard, facts, keep_positions
from speculators.special_tokens import unused_special_tokens
from speculators.speculator import VerifierWeights

__all__ = ["Verifier", "VerifierOutput", "fast_dtype"]


@dataclass(frozen=True)
class VerifierOutput:
    """What one forward of the verifier hands on, in the model's dtype.

    Attributes:
        hidden_states: [rows, width, taps * hidden], the tapped residual streams in the order of the taps asked for;
            the last dimension is 0 without taps.
        last_hidden_state: [rows, width, hidden], the residual stream before the final norm; `Verifier.logits` takes it.
    """

    hidden_states: Tensor
    last_hidden_state: Tensor


class Verifier:
    """The target model of speculative decoding: frozen, in evaluation mode.

    Layer ids count layers already applied: id i is the residual stream after i decoder layers, 0 the embeddings, and
    n = `num_layers` the stream before the final norm.

    Attributes:
        model: the transformers model.
        tokenizer: its tokenizer, or None.
        weights: what speculators borrow from it (embedding, head, final norm, facts of its config).
        fused_layers: how many of its layers run decoding steps on our kernels; see `fused_layers`.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, name_or_path: str | None = None) -> None:
        """Wrap a loaded model. It is frozen, and its attention is switched to `grouped_attention` where that is exact.

        Args:
            model: a decoder-only causal language model.
            tokenizer: needed by `encode_chat` only.
            name_or_path: as the user names it; the config's own name by default.

        Raises:
            CheckpointError: the model's state cannot be rolled back, or its layers, final norm or head cannot be read.
        """
        name = name_or_path or model.config._name_or_path or type(model).__name__
        config: Any = model.config.get_text_config()
        refuse_unsupported(model.config, type(model), name)
        self.model: Any = cast(Any, model)  # transformers types its own classes only in part
        self.model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self._decoder: nn.Module = self.model.get_decoder()
        if self._decoder is model:  # transformers did not find it (Llama-4)
            self._decoder = _child(model, ("model", "transformer"), name)
        self._layers = _child(self._decoder, ("layers", "h"), name)
        self._cache_argument = cache_argument(self._decoder)
        self._final_norm = _child(self._decoder, ("norm", "final_layer_norm", "final_layernorm", "ln_f"), name)
        # SDPA has neither soft-capped scores nor attention sinks; the model's own eager attention has.
        exact = bool(model._supports_sdpa) and not getattr(config, "attn_logit_softcapping", None)
        self.model.set_attn_implementation(GROUPED_ATTENTION if exact else "eager")
        # Read back, since old architectures keep the attention they were built with.
        self._masks = AttentionMasks.from_config(config, additive=config._attn_implementation == "eager", dtype=model.dtype)
        self._head: nn.Module = self.model.get_output_embeddings()
        self._logit_scale = _factor(config, "logit_scale")  # Cohere multiplies, Granite divides
        self._logit_divisor = _factor(config, "logits_scaling")
        self._logit_softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.weights = self._read_weights(name)
        keep_positions(self._decoder)
        # Drafts that no budget has room for may lie past the end.
        self._last_position = self.context_length - 1 if self.context_length and ends_hard(self.weights.config) else None
        self.prepared_batches: OrderedDict[Hashable, Any] = OrderedDict()  # of the engine; see `decoding.graph.reusable`
        # On a CPU a launch costs nothing.
        self.fused_layers = fuse_layers(self._decoder, self.layers, self._masks.kinds) if self.device.type == "cuda" else 0
        if self.fused_layers:
            fuse_final_norm(self._final_norm)
        # What a round multiplies on a CPU; see `packed_linear`.
        kinds = (nn.Linear, PackedLinear) if self.device.type == "cpu" else ()
        self._linears = [module for module in self.model.modules() if type(module) in kinds]
        for linear in self._linears:
            linear.__class__ = PackedLinear
        self._check_against_model()

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        device: torch.device | str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> Self:
        """Load a verifier from a folder or from the Hugging Face Hub.

        Args:
            name_or_path: a folder, a Hub name, or "smollm2-135m-instruct", the embedded default.
            dtype: of the weights; "auto" is `fast_dtype(device)`.
            device: CUDA where there is one by default, else the CPU.
            revision: commit, branch or tag on the Hub.
            trust_remote_code: run the model code that a repository brings along.

        Raises:
            CheckpointError: nothing usable lies there, or the model cannot serve as a verifier.
        """
        model, tokenizer = load_model(str(name_or_path), dtype=dtype, device=device, revision=revision, trust_remote_code=trust_remote_code)
        return cls(model, tokenizer, str(name_or_path))

    # -- facts -----------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the embedding lies."""
        return self.weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights, the hidden states and the logits."""
        return self.weights.embedding.dtype

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, first to last."""
        return cast(nn.ModuleList, self._layers)

    @property
    def num_layers(self) -> int:
        """Decoder layers n."""
        return self.weights.num_layers

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.weights.hidden_size

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self.weights.vocab_size

    @property
    def context_length(self) -> int | None:
        """Most tokens of a row, prompt and reply together; None where the model has no limit."""
        return context_length(self.weights.config)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a reply."""
        return self.weights.stop_token_ids

    # -- computation -----------------------------------------------------------------------------------------

    def new_cache(self, rows: int, max_length: int) -> KeyValueCache:
        """An empty cache for `rows` sequences of at most `max_length` positions each, uncommitted drafts included."""
        announce(linear.weight for linear in self._linears)
        return KeyValueCache(self.num_layers, rows, max_length, self.device)

    @torch.inference_mode()
    def forward(
        self, input_ids: Tensor, cache: KeyValueCache, taps: Sequence[int] = (), *, static_length: int | None = None
    ) -> VerifierOutput:
        """Run new tokens of every row over its cached ones. Writes keys and values, does not advance `cache.lengths`.

        Token i of row b sits at position `cache.lengths[b] + i` and sees the row's positions up to its own. Padding
        columns to the right are harmless: no valid token sees them, and later tokens overwrite them.

        Args:
            input_ids: [rows, width] int64.
            cache: from `new_cache`, of the same number of rows.
            taps: layer ids, each 0 to n.
            static_length: cached positions that attention reads, for CUDA graphs; see `KeyValueCache.begin`.

        Raises:
            ConfigError: a tap lies beyond the verifier's depth, or the cache is too short or of other rows.
        """
        if input_ids.shape[0] != cache.rows:
            raise ConfigError(f"the key/value cache has {cache.rows} rows, the input {input_ids.shape[0]}; make a cache for this batch")
        positions = cache.begin(input_ids.shape[1], static_length)
        masks = self._masks.cached(positions, cache.read_length)
        if self._last_position is not None:
            positions = positions.clamp(max=self._last_position)
        return self._run(input_ids, positions, masks, taps, cache)

    @torch.no_grad()
    def encode(self, input_ids: Tensor, position_ids: Tensor, document_ids: Tensor, taps: Sequence[int]) -> VerifierOutput:
        """Hidden states of packed rows without a cache. Documents never see one another.

        Args:
            input_ids: [rows, width] int64.
            position_ids: [rows, width] int64, restarting at 0 with every document.
            document_ids: [rows, width] int64, -1 on padding, whose states are finite and meaningless.
            taps: layer ids, each 0 to n.

        Raises:
            ConfigError: a tap lies beyond the verifier's depth.
        """
        return self._run(input_ids, position_ids, self._masks.packed(position_ids, document_ids), taps, None)

    def logits(self, last_hidden_state: Tensor) -> Tensor:
        """The model's logits: final norm, head, scale, soft cap. [..., hidden] -> [..., vocabulary], the model's dtype."""
        logits: Tensor = self._head(self._final_norm(last_hidden_state))
        if self._logit_scale != 1.0:
            logits = logits * self._logit_scale
        if self._logit_divisor != 1.0:
            logits = logits / self._logit_divisor
        if self._logit_softcap is not None:
            logits = torch.tanh(logits / self._logit_softcap) * self._logit_softcap
        return logits

    def encode_chat(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation under the model's chat template.

        Args:
            messages: [{"role": ..., "content": ...}, ...].
            add_generation_prompt: end with the tokens that open the assistant's turn.

        Raises:
            DataError: the verifier has no chat template, or its template rejects the conversation.
        """
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise DataError(f"{self.weights.name_or_path!r} has no chat template: choose an instruction-tuned verifier or pass token ids")
        try:
            encoded = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=True
            )
        except Exception as error:  # a template is code from elsewhere and may raise whatever it likes
            said = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f"the chat template of {self.weights.name_or_path!r} rejects the conversation: {said}") from error
        assert isinstance(encoded, Mapping)
        return [int(token) for token in encoded["input_ids"]]

    # -- inside ----------------------------------------------------------------------------------------------

    def _run(
        self, input_ids: Tensor, positions: Tensor, masks: Tensor | dict[str, Tensor], taps: Sequence[int], cache: KeyValueCache | None
    ) -> VerifierOutput:
        for tap in taps:
            if not 0 <= tap <= self.num_layers:
                raise ConfigError(
                    f"layer id {tap} is not in 0 to {self.num_layers}: {self.weights.name_or_path!r} has {self.num_layers} layers,"
                    f" and id {self.num_layers} is the residual stream before the final norm"
                )
        rows, width = input_ids.shape
        tapped = torch.empty((rows, width, len(taps) * self.hidden_size), dtype=self.dtype, device=self.device)
        with self._residual_streams(tapped, taps) as last:
            cached: dict[str, Any] = {self._cache_argument: cache, "use_cache": cache is not None}
            self._decoder(input_ids=input_ids, attention_mask=masks, position_ids=positions, **cached)
        return VerifierOutput(hidden_states=tapped, last_hidden_state=last[-1].to(self.device))

    @contextmanager
    def _residual_streams(self, tapped: Tensor, taps: Sequence[int]) -> Iterator[list[Tensor]]:
        """While open, a decoder forward writes its taps into `tapped` and leaves the stream before the final norm last in the list."""
        last: list[Tensor] = []
        size = self.hidden_size

        def copy_to(column: int) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                stream: Tensor = args[0] if args else kwargs["hidden_states"]
                if stream.ndim != tapped.ndim:
                    raise CheckpointError(
                        f"{self.weights.name_or_path!r} ({type(self.model).__name__}) has several residual streams in parallel, and a"
                        " tap is one; choose another verifier"
                    )
                tapped[..., column * size : (column + 1) * size].copy_(stream)

            return hook

        def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
            last.append(args[0])

        handles = [self._final_norm.register_forward_pre_hook(keep)]
        for column, tap in enumerate(taps):
            module = self._final_norm if tap == self.num_layers else self._layers[tap]
            handles.append(module.register_forward_pre_hook(copy_to(column), with_kwargs=True))
        try:
            yield last
        finally:
            for handle in handles:
                handle.remove()

    def _read_weights(self, name: str) -> VerifierWeights:
        config: Any = self.model.config.get_text_config()
        embedding: Any = self.model.get_input_embeddings()
        head: Tensor | None = getattr(self._head, "weight", None)
        if head is None or not head.is_floating_point() or embedding.weight.shape != head.shape:
            raise CheckpointError(
                f"{name!r} has an embedding of {_describe(embedding.weight)} and a head of {_describe(head)};"
                " a verifier needs both in one shape and floating point: choose a release whose head is not quantised"
            )
        if embedding.weight.shape[1] != config.hidden_size:
            raise CheckpointError(
                f"{name!r} has an embedding {embedding.weight.shape[1]} wide and layers {config.hidden_size} wide; a drafter reads both as"
                " one residual stream: choose another verifier"
            )
        scale = getattr(embedding, "embed_scale", None)
        if isinstance(scale, Tensor):
            scale = float(scale.to(embedding.weight.dtype))  # rounded as Gemma rounds it
        stops = stop_token_ids(self.model.generation_config, self.model.config, self.tokenizer)
        return VerifierWeights(
            embedding=embedding.weight,
            embedding_scale=_factor(config, "embedding_multiplier") if scale is None else float(scale),
            head=head,
            head_bias=getattr(self._head, "bias", None),
            final_norm=self._final_norm,
            logit_scale=self._logit_scale / self._logit_divisor,
            logit_softcap=self._logit_softcap,
            num_layers=len(self._layers),
            stop_token_ids=stops,
            name_or_path=name,
            architectures=tuple(self.model.config.architectures or (type(self.model).__name__,)),
            config=facts(config),
            unused_token_ids=unused_special_tokens(self.tokenizer, stops, len(embedding.weight)),
        )

    @torch.inference_mode()
    def _check_against_model(self) -> None:
        """Run six tokens through the model itself and through our head, cache and masks; refuse a model where they disagree."""
        if self.device.type == "meta":
            return
        name, input_ids = self.weights.name_or_path, torch.arange(6, device=self.device)[None]
        with self._residual_streams(torch.empty(0), ()) as last:
            expected = self.model(input_ids=input_ids, use_cache=False).logits.float()
        if not expected.isfinite().all():  # such as float16, too narrow for Gemma's residual stream
            raise CheckpointError(
                f"{name!r} computes logits that are not finite in {self.dtype}; load it in another dtype, such as bfloat16 or float32"
            )
        if not _relative_error(self.logits(last[-1]), expected) <= 1e-2:
            raise CheckpointError(f"{name!r} has logits that are not those of its head after its final norm; choose another verifier")
        cache = self.new_cache(1, 10)
        try:
            begin = self.forward(input_ids[:, :4], cache, taps=(0, self.num_layers // 2))  # the fourth token is then rolled back
            cache.lengths.fill_(3)
            states = torch.cat([begin.last_hidden_state[:, :3], self.forward(input_ids[:, 3:], cache).last_hidden_state], dim=1)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{name!r} ({type(self.model).__name__}) does not run with a cache of this library ({error}); choose another verifier"
            ) from error
        # Rounding in 16 bits moves logits by a few percent, a wrong mask or position by as much as they are.
        if not _relative_error(self.logits(states), expected) <= (1e-3 if self.dtype == torch.float32 else 0.25):
            raise CheckpointError(
                f"{name!r} ({type(self.model).__name__}) computes other logits with a cache of this library than alone;"
                " choose another verifier"
            )


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    """NaN where either is not finite. In float64, since some models mask logits with the lowest float32 there is."""
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-20))


def _factor(config: Any, key: str) -> float:
    value = getattr(config, key, None)
    return 1.0 if value is None else float(value)


def _describe(tensor: Tensor | None) -> str:
    return "packed weights" if tensor is None else f"shape {tuple(tensor.shape)}, {tensor.dtype}"


def _child(decoder: nn.Module, names: Sequence[str], verifier: str) -> Any:
    """The first of the named children; families call the same part differently."""
    for name in names:
        if isinstance(child := getattr(decoder, name, None), nn.Module):
            return child
    raise CheckpointError(
        f"{verifier!r}: {type(decoder).__name__} has no {' or '.join(names)}, so its residual stream cannot be tapped;"
        " choose another verifier"
    )
