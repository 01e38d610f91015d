"""The interface of a foreign checkpoint format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from torch import Tensor

from speculators.config import SpeculatorConfig
from speculators.errors import CheckpointError
from speculators.speculator import VerifierWeights

Tensors = dict[str, Tensor]


class FormatAdapter(ABC):
    """One foreign format. Tensors keep their dtype and, unless a format says otherwise, their bytes.

    Class attributes:
        name: what users call the format, e.g. on the command line.
        title: how messages call it.
    """

    name: ClassVar[str]
    title: ClassVar[str]

    @abstractmethod
    def detect(self, config: Mapping[str, Any], tensor_names: Collection[str]) -> bool:
        """Whether `config.json` and the names of the stored tensors are of this format."""

    @abstractmethod
    def to_native(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], verifier: VerifierWeights | None
    ) -> tuple[SpeculatorConfig, Tensors]:
        """Configuration and tensors in the speculators format; copies of the verifier's embedding and head stay among them.

        Args:
            config: content of the foreign `config.json`.
            tensors: as stored, by foreign name.
            verifier: what the drafter belongs to, None when it is not at hand.

        Raises:
            CheckpointError: a key is missing, contradicts another or has no counterpart.
        """

    @abstractmethod
    def from_native(
        self, config: SpeculatorConfig, tensors: Mapping[str, Tensor], verifier: VerifierWeights | None
    ) -> tuple[dict[str, Any], Tensors]:
        """Content of the foreign `config.json`, and the tensors by foreign name.

        Args:
            config: of a valid checkpoint in the speculators format.
            tensors: its tensors, with or without copies of the verifier's embedding and head.
            verifier: what the drafter belongs to, None when it is not at hand.

        Raises:
            CheckpointError: the format cannot hold what the drafter has, or the verifier is needed.
        """

    def refuse(self, what: str, why: str, remedy: str = "keep it in the speculators format") -> CheckpointError:
        """The error for what this format cannot hold."""
        return CheckpointError(f"cannot convert to the {self.title} format: {what}, but {why}; {remedy}")
