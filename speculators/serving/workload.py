"""Who asks a simulated cluster for what, and when."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from speculators.errors import ConfigError, DataError
from speculators.json_values import whole_number

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival.

    Attributes:
        arrival: [n] seconds, ascending.
        output_tokens: [n] tokens of each reply, at least 1.
        users: in a closed loop, how many users there are: each sends its next request when its reply is complete, and arrivals
            are all 0. None: arrivals are as given.
    """

    arrival: Floats
    output_tokens: Ints
    users: int | None = None

    def __post_init__(self) -> None:
        if not len(self.arrival) or len(self.arrival) != len(self.output_tokens):
            raise ConfigError(
                f"a workload needs as many arrivals ({len(self.arrival)}) as replies ({len(self.output_tokens)}), at least one"
            )
        ascending = np.isfinite(self.arrival).all() and self.arrival[0] >= 0 and (np.diff(self.arrival) >= 0).all()
        if not ascending or self.output_tokens.min() < 1:
            raise ConfigError("a workload needs finite arrivals in ascending order from 0 on, and replies of at least 1 token")
        if not np.issubdtype(self.output_tokens.dtype, np.integer):
            raise ConfigError(f"a workload's output_tokens are whole numbers, not {self.output_tokens.dtype}")
        if self.users is not None and self.users < 1:
            raise ConfigError(f"{self.users} users: a closed loop needs at least 1")

    def __len__(self) -> int:
        return len(self.arrival)

    @classmethod
    def closed_loop(cls, users: int, output_tokens: int, requests_a_user: int) -> Workload:
        """A fixed number of users who are never idle."""
        count = max(1, users) * requests_a_user
        return cls(np.zeros(count), np.full(count, output_tokens), users)

    @classmethod
    def poisson(cls, rate: float, requests: int, output_tokens: int, seed: int, burst: int = 1) -> Workload:
        """Arrivals at random: `rate` requests a second on average, in bursts of `burst` that come together.

        Raises:
            ConfigError: the rate or the burst is not positive.
        """
        if not 0 < rate < float("inf") or burst < 1 or requests < 1:
            raise ConfigError(f"arrivals of rate {rate}, burst {burst}, {requests} requests: all must be positive and finite")
        gaps = np.random.default_rng(seed).exponential(burst / rate, -(-requests // burst))
        return cls(np.repeat(np.cumsum(gaps), burst)[:requests], np.full(requests, output_tokens))

    @classmethod
    def read(cls, path: Path) -> Workload:
        """Read a trace: JSON lines with "arrival" (seconds) and "output_tokens", in any order.

        Raises:
            DataError: the file is missing, or a line holds something else: arrivals are numbers from 0 on, tokens whole ones from 1 on.
        """
        rows: list[tuple[float, int]] = []
        number = 0
        try:
            with path.open(encoding="utf-8") as lines:
                for line in lines:
                    number += 1
                    if line.strip():
                        record = json.loads(line)
                        rows.append((float(record["arrival"]), whole_number(record["output_tokens"], "output_tokens", least=1)))
        except OSError as error:
            raise DataError(f"the trace {path} cannot be read ({error.strerror}); name a JSON lines file") from None
        except (ValueError, OverflowError, KeyError, TypeError) as error:
            raise DataError(f'{path}, line {number}: a trace has "arrival" and "output_tokens" in every line ({error})') from None
        if not rows:
            raise DataError(f"the trace {path} is empty; it needs one request a line")
        rows.sort()
        try:
            return cls(np.array([row[0] for row in rows]), np.array([row[1] for row in rows], dtype=np.int64))
        except ConfigError as error:
            raise DataError(f"{path}: {error}") from None
