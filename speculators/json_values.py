"""Reading values of JSON files strictly: what does not fit is refused where it stands, not bent until it fits."""

from __future__ import annotations

import json
from typing import Any, get_args

from pydantic import BaseModel, ValidationInfo, field_validator


class NoTruthValues(BaseModel):
    """A model whose numbers cannot be given as true or false, also inside of lists and mappings: pydantic would take them for 1 and 0."""

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_values(cls, value: Any, info: ValidationInfo) -> Any:
        kinds = set(_leaves(cls.model_fields[str(info.field_name)].annotation))
        if kinds & {int, float} and bool not in kinds and _holds_truth_value(value):
            raise ValueError("true and false are no numbers")
        return value


def _leaves(annotation: Any) -> list[Any]:
    """The types that a type is put together from: float and None of `dict[str, float] | None`, and str."""
    parts = get_args(annotation)
    return [leaf for part in parts for leaf in _leaves(part)] if parts else [annotation]


def _holds_truth_value(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, bool) or (isinstance(value, list | tuple) and any(map(_holds_truth_value, value)))


def whole_number(value: object, name: str, least: int = 0) -> int:
    """A count, as `value` is one. `int()` would cut 2.5 to 2, and take true for 1 and "3" for 3.

    Args:
        value: as parsed.
        name: of its key, for the message.
        least: smallest number allowed.

    Raises:
        ValueError: it is no whole number of at least `least`.
    """
    if type(value) is not int or value < least:
        raise ValueError(f"{name} = {json.dumps(value, default=str)} must be a whole number of at least {least}")
    return value
