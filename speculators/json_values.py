"""Reading values of JSON files strictly: what does not fit is refused where it stands, not bent until it fits."""

from __future__ import annotations

import json


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
