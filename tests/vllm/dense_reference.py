"""The four drafters from their formulas, densely: every sequence is one matrix, nothing is cached, padded or paged.

Imports nothing of the library. Weights come from the checkpoint's files, hidden states from transformers' own forward.
Names: t_0 .. t_{n-1} are the known tokens, the last one is the anchor; c = n - 1 tokens have hidden states.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM


class DenseReference:
    """Draft logits of one checkpoint.

    Args:
        checkpoint: folder in the speculators format.
        verifier: transformers folder.
    """

    def __init__(self, checkpoint: str, verifier: str) -> None:
        self.config: dict[str, Any] = json.loads((Path(checkpoint) / "config.json").read_text())
        self.layers: dict[str, Any] = self.config["transformer_layer_config"]
        self.weights = load_file(Path(checkpoint) / "model.safetensors")
        self.model = AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.float32).eval()
        self.embedding = self.weights.get("embed_tokens.weight", self.model.get_input_embeddings().weight.detach())
        self.head = self.weights.get("lm_head.weight", self.model.get_output_embeddings().weight.detach())
        fusion = self.config["speculators_model_type"] in ("eagle3", "peagle")
        self.taps: list[int] = self.config["eagle_aux_hidden_state_layer_ids" if fusion else "aux_hidden_state_layer_ids"]

    @torch.no_grad()
    def features(self, tokens: list[int]) -> Tensor:
        """[tokens, taps * hidden]: the residual stream after each tapped number of layers; the last one before the final norm."""
        before_norm: list[Tensor] = []
        handle = self.model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
        states = self.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        handle.remove()
        depth = self.model.config.num_hidden_layers
        return torch.cat([(before_norm[0] if tap == depth else states[tap])[0] for tap in self.taps], dim=-1)

    @torch.no_grad()
    def draft_logits(self, tokens: list[int], drafts: list[int]) -> Tensor:
        """[K, vocabulary] after `tokens`; where a slot reads the drafts before it, those are `drafts`."""
        method = {"eagle3": self._eagle3, "peagle": self._peagle, "dflash": self._block, "dspark": self._block}
        logits = method[self.config["speculators_model_type"]](tokens, drafts)
        if "d2t" not in self.weights:
            return logits
        # A reduced draft vocabulary: d2t holds the distance from a draft id to its id in the verifier's vocabulary.
        whole = logits.new_full((len(drafts), self.layers["vocab_size"]), -math.inf)
        whole[:, torch.arange(logits.shape[1]) + self.weights["d2t"]] = logits
        return whole

    # -- parts ---------------------------------------------------------------------------------------------------

    def norm(self, name: str, x: Tensor) -> Tensor:
        """RMS norm."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.layers["rms_norm_eps"]) * self.weights[f"{name}.weight"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        """x W^T."""
        return x @ self.weights[f"{name}.weight"].T

    def rotate(self, x: Tensor, position: Tensor) -> Tensor:
        """Rotary embedding of [tokens, heads, channels], halves rotated against each other."""
        half = x.shape[-1] // 2
        angle = position[:, None, None] * self.layers["rope_parameters"]["rope_theta"] ** (-torch.arange(half) / half)
        first, second = x.split(half, dim=-1)
        return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=-1)

    def heads(self, name: str, norm: str, x: Tensor, position: Tensor | None) -> Tensor:
        """Project to heads, with the head norm where there is one, rotated where there are positions."""
        y = self.linear(name, x).unflatten(-1, (-1, self.layers["head_dim"]))
        if f"{norm}.weight" in self.weights:
            y = self.norm(norm, y)
        return y if position is None else self.rotate(y, position)

    def keys(self, layer: str, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens."""
        attention = f"{layer}.self_attn"
        return (
            self.heads(f"{attention}.k_proj", f"{attention}.k_norm", x, position),
            self.heads(f"{attention}.v_proj", "", x, None),
        )

    def attend(self, layer: str, x: Tensor, position: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
        """Softmax attention of x over key/value [keys, heads, channels]; visible: [queries, keys] bool."""
        attention = f"{layer}.self_attn"
        query = self.heads(f"{attention}.q_proj", f"{attention}.q_norm", x, position)
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(query.shape[-1])
        weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
        return self.linear(f"{attention}.o_proj", torch.einsum("hqk,khd->qhd", weights, value).flatten(1))

    def mlp(self, layer: str, x: Tensor) -> Tensor:
        """SwiGLU."""
        gate = torch.nn.functional.silu(self.linear(f"{layer}.mlp.gate_proj", x))
        return self.linear(f"{layer}.mlp.down_proj", gate * self.linear(f"{layer}.mlp.up_proj", x))

    # -- EAGLE-3 and P-EAGLE: features enter with the next token's embedding ---------------------------------------

    def _fused(self, features: Tensor) -> Tensor:
        return self.linear("fc", self.norm("input_norm", features) if self.config["norm_before_fc"] else features)

    def _stack(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """All layers over one causal sequence of (feature, next token) pairs, before the final norm."""
        position, count = torch.arange(len(hidden)), self.layers["num_hidden_layers"]
        causal = position[:, None] >= position
        x = hidden
        for index in range(count):
            layer = f"layers.{index}"
            if index == 0:
                normed = self.norm(f"{layer}.hidden_norm", x)
                residual = normed if self.config["norm_before_residual"] else x
                y = torch.cat([self.norm(f"{layer}.input_layernorm", embedded), normed], dim=-1)
            else:
                residual, y = x, self.norm(f"{layer}.input_layernorm", x)
            x = residual + self.attend(layer, y, position, *self.keys(layer, y, position), causal)
            x = x + self.mlp(layer, self.norm(f"{layer}.post_attention_layernorm", x))
        return x

    def _eagle3(self, tokens: list[int], drafts: list[int]) -> Tensor:
        hidden, following, logits = self._fused(self.features(tokens[:-1])), tokens[1:], []
        for draft in drafts:  # each pass feeds the draft before it and the pass's own output
            last = self._stack(hidden, self.embedding[following])[-1]
            logits.append(self.head @ self.norm("norm", last))
            fed = self.norm("norm", last) if self.config["norm_output"] else last
            hidden, following = torch.cat([hidden, fed[None]]), [*following, draft]
        return torch.stack(logits)

    def _peagle(self, tokens: list[int], drafts: list[int]) -> Tensor:
        masks = len(drafts) - 1
        placeholder = self._fused(self.weights["mask_hidden"].view(1, -1)).expand(masks, -1)
        hidden = torch.cat([self._fused(self.features(tokens[:-1])), placeholder])
        embedded = self.embedding[tokens[1:] + [self.config["mask_token_id"]] * masks]
        return self.norm("norm", self._stack(hidden, embedded)[-1 - masks :]) @ self.head.T

    # -- DFlash and DSpark: features enter as keys and values ------------------------------------------------------

    def _block(self, tokens: list[int], drafts: list[int]) -> Tensor:
        anchored = self.config.get("sample_from_anchor", False)
        slots, context = len(drafts) + (not anchored), len(tokens) - 1
        features = self.norm("hidden_norm", self.linear("fc", self.features(tokens[:-1])))
        before, position = torch.arange(context), context + torch.arange(slots)
        x = self.embedding[[tokens[-1]] + [self.config["mask_token_id"]] * (slots - 1)]
        everything = torch.ones(slots, context + slots, dtype=torch.bool)
        for index in range(self.layers["num_hidden_layers"]):
            layer = f"layers.{index}"
            y = self.norm(f"{layer}.input_layernorm", x)
            injected, own = self.keys(layer, features, before), self.keys(layer, y, position)
            key, value = (torch.cat(pair) for pair in zip(injected, own, strict=True))
            x = x + self.attend(layer, y, position, key, value, everything)
            x = x + self.mlp(layer, self.norm(f"{layer}.post_attention_layernorm", x))
        hidden = self.norm("norm", x)
        logits = hidden[-len(drafts) :] @ self.head.T
        if self.config.get("markov_rank"):
            # The token before each slot; an anchor's slot that only conditions is fed the anchor as well.
            previous = [tokens[-1]] * (not anchored) + [tokens[-1], *drafts[:-1]]
            logits = logits + self._markov(hidden, previous)[-len(drafts) :] @ self.weights["markov_head.markov_w2.weight"].T
        return logits

    def _markov(self, hidden: Tensor, previous: list[int]) -> Tensor:
        """[slots, rank]: what the sequential head makes of the token before each slot."""
        embedded = self.weights["markov_head.markov_w1.weight"][previous]
        kinds: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            "vanilla": lambda _, e: e,
            "gated": lambda h, e: torch.sigmoid(self._affine("gate_proj", torch.cat([h, e], -1))) * e,
            "rnn": self._recurrent,
        }
        return kinds[self.config["markov_head_type"]](hidden, embedded)

    def _affine(self, name: str, x: Tensor) -> Tensor:
        return self.linear(f"markov_head.{name}", x) + self.weights[f"markov_head.{name}.bias"]

    def _recurrent(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        state, out = torch.zeros_like(embedded[0]), []
        for h, e in zip(hidden, embedded, strict=True):
            gate, candidate, output = self._affine("joint_proj", torch.cat([state, e, h])).chunk(3)
            state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
            out.append(torch.tanh(output))
        return torch.stack(out)
