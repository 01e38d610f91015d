"""The optimizer of a drafter: AdamW, or Muon for its matrices. Its state is float32 and it never needs the host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from speculators.errors import CheckpointError, ConfigError
from speculators.kernels.adamw import adamw_step
from speculators.speculator import Speculator
from speculators.training.config import TrainingConfig
from speculators.training.muon import MatrixGroup, Muon
from speculators.training.sharding import Sharding, is_spread, local_part
from speculators.training.world import World

_ADAMW_STATE = ("step", "exp_avg", "exp_avg_sq")  # torch's names


@dataclass
class ParameterGroup:
    """Parameters that are updated alike.

    Attributes:
        kind: "adamw" or "muon".
        learning_rate_scale: factor on the learning rate.
        weight_decay: decoupled.
        parameters: by name.
    """

    kind: str
    learning_rate_scale: float
    weight_decay: float
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)


def parameter_groups(speculator: Speculator, config: TrainingConfig) -> list[ParameterGroup]:
    """Group the trainable parameters.

    Muon takes matrices with both sides above 1, except tables with a row a token (embeddings, heads, Markov tables),
    whose rows are no linear map of anything. AdamW takes the rest. Vectors and one-row tensors are never decayed.

    Raises:
        ConfigError: nothing is trainable, or a key of `learning_rate_scale` is in no parameter's name.
    """
    vocabularies = {speculator.config.vocab_size, speculator.config.draft_vocab_size}
    tables = {id(module.weight) for module in speculator.modules() if isinstance(module, nn.Embedding)}
    trainable = {name: parameter for name, parameter in speculator.named_parameters() if parameter.requires_grad}
    if not trainable:
        raise ConfigError(f"this {speculator.method} speculator has no trainable parameter")
    for key in config.learning_rate_scale:
        if not any(key in name for name in trainable):
            raise ConfigError(f"learning_rate_scale: {key!r} is in the name of no trainable parameter; names are {', '.join(trainable)}")
    groups: dict[tuple[str, float, float], ParameterGroup] = {}
    for name, parameter in trainable.items():
        matrix = parameter.ndim == 2 and min(parameter.shape) > 1
        table = id(parameter) in tables or parameter.shape[:1].numel() in vocabularies
        kind = "muon" if config.optimizer == "muon" and matrix and not table else "adamw"
        decay = config.weight_decay if matrix else 0.0
        matching = [key for key in config.learning_rate_scale if key in name]
        scale = config.learning_rate_scale[max(matching, key=len)] if matching else 1.0
        groups.setdefault((kind, scale, decay), ParameterGroup(kind, scale, decay)).parameters[name] = parameter
    return list(groups.values())


class DrafterOptimizer:
    """Updates the parameters of `parameter_groups`; capturable in a CUDA graph.

    Args:
        speculator: what is trained.
        config: the run's configuration.
        sharding: how the speculator's parameters are spread over processes; each process updates its own rows.
        world: the processes, which share Muon's work.

    Attributes:
        learning_rate: scalar float32 on the device; fill it before an update.
        sources: the trainable parameters as the speculator has them.
        parameters: this process's rows of each, sharing their memory; the parameters themselves where they are not spread.
            They are updated from their `.grad`.
        names: of each.
    """

    def __init__(
        self, speculator: Speculator, config: TrainingConfig, sharding: Sharding | None = None, world: World | None = None
    ) -> None:
        self._sharding = sharding or Sharding()
        groups = parameter_groups(speculator, config)
        first = next(iter(groups[0].parameters.values()))
        for group in groups:
            for name, parameter in group.parameters.items():
                if parameter.dtype != torch.float32:
                    raise ConfigError(f"{name} is {parameter.dtype}: training needs float32 weights, small updates are lost in others")
        self.learning_rate = torch.zeros((), device=first.device)
        self.names = [name for group in groups for name in group.parameters]
        self.sources = [parameter for group in groups for parameter in group.parameters.values()]
        self._full_shapes = {name: parameter.shape for group in groups for name, parameter in group.parameters.items()}
        for group in groups:
            group.parameters = {name: _own_rows(parameter) for name, parameter in group.parameters.items()}
        self.parameters = [parameter for group in groups for parameter in group.parameters.values()]
        matrices = [part for group in groups if group.kind == "muon" for part in _by_shape(group, self._full_shapes)]
        self._muon = Muon(matrices, config.muon_momentum, self._sharding, world)
        self._betas = config.betas
        self._adamw_groups = [group for group in groups if group.kind == "adamw"]
        self._adamw_state = {
            name: {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }
            for group in self._adamw_groups
            for name, parameter in group.parameters.items()
        }

    @torch.no_grad()
    def step(self, skip: Tensor, scale: Tensor | None = None) -> None:
        """Update every parameter from its gradient, which all of them must have and which is not used afterwards.

        Args:
            skip: scalar float32 on the device; 1.0 leaves parameters and state as they are.
            scale: scalar float32 on the device, a factor on the gradient; None for 1.
        """
        scale = torch.ones_like(skip) if scale is None else scale
        self._muon.step(self.learning_rate, skip, scale)
        for group in self._adamw_groups:
            states = [self._adamw_state[name] for name in group.parameters]
            adamw_step(
                list(group.parameters.values()),
                [parameter.grad for parameter in group.parameters.values() if parameter.grad is not None],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [state["step"] for state in states],
                learning_rate=self.learning_rate * group.learning_rate_scale,
                weight_decay=group.weight_decay,
                betas=self._betas,
                scale=scale,
                skip=skip,
            )

    def state(self) -> dict[str, Tensor]:
        """This process's state by name: `adamw.<parameter>.<part>` and `muon.<parameter>`, float32, not copied."""
        tensors = {}
        for matrices in self._muon.groups:
            tensors.update({f"muon.{name}": matrices.momentum[i] for i, name in enumerate(matrices.names)})
        for name, state in self._adamw_state.items():
            tensors.update({f"adamw.{name}.{part}": state[part] for part in _ADAMW_STATE})
        return tensors

    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        """The state of all processes, one tensor after the other, in every process."""
        for name, tensor in self.state().items():
            yield name, self._sharding.gather(tensor, self._rows(name))

    def _rows(self, name: str) -> int:
        """Rows of the full parameter that a tensor of the state belongs to."""
        kind, _, rest = name.partition(".")
        parameter = rest if kind == "muon" else rest.rpartition(".")[0]
        return self._full_shapes[parameter][:1].numel()

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy a full state into this optimizer, of which each process takes its rows.

        Raises:
            CheckpointError: a tensor is missing or has another shape.
        """
        for name, own in self.state().items():
            stored = tensors.get(name)
            if stored is not None:
                stored = self._sharding.take(stored)
            if stored is None or stored.shape != own.shape:
                found = "is missing" if stored is None else f"has shape {tuple(stored.shape)}"
                raise CheckpointError(f"{name} {found}, shape {tuple(own.shape)} is expected")
            own.copy_(stored)


def _own_rows(parameter: nn.Parameter) -> nn.Parameter:
    """This process's rows as a parameter that shares their memory."""
    return nn.Parameter(local_part(parameter)) if is_spread(parameter) else parameter


def _by_shape(group: ParameterGroup, full_shapes: Mapping[str, torch.Size]) -> list[MatrixGroup]:
    shapes: dict[torch.Size, dict[str, nn.Parameter]] = defaultdict(dict)
    for name, parameter in group.parameters.items():
        shapes[full_shapes[name]][name] = parameter
    return [
        MatrixGroup(
            names=list(members),
            parameters=list(members.values()),
            rows=shape[0],
            learning_rate_scale=group.learning_rate_scale,
            weight_decay=group.weight_decay,
            momentum=torch.zeros((len(members), *next(iter(members.values())).shape), device=next(iter(members.values())).device),
        )
        for shape, members in shapes.items()
    ]
