"""vLLM in a process of its own, so that a benchmark can ask it and keep its own process as it was.

    engine = VllmProcess(folder, offline_settings(dtype="bfloat16", max_model_len=1024, sequences=64), log=Path("plain.log"))
    engine.wait(300)
    answered = engine.answer(prompts, max_new_tokens=256)
    engine.end()

The engine times itself: sending prompts and replies between the processes is not in the time. What vLLM prints goes to the log.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import re
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

_MEMORY = 6 << 30  # bytes of key/value cache: small, so that several engines share a GPU
_COUNTERS = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
_REASON = re.compile(r"\b\w*(?:Error|Exception): (?:\d+ validation error.*\n.*)?.+")  # pydantic's reason stands in the next line
_SEE_ABOVE = "Engine core initialization failed"  # vLLM's last word, which is not the reason


class VllmError(RuntimeError):
    """vLLM did not start, or ended; the message is its own, as far as its log tells."""


@dataclass(frozen=True)
class Started:
    """An engine that is ready.

    Attributes:
        version: of vLLM.
        runner: its model runner, V1 or V2.
        asynchronous: whether it schedules the next step before the last one's tokens are known.
        seconds: that starting took, imports included.
    """

    version: str
    runner: str
    asynchronous: bool
    seconds: float


@dataclass(frozen=True)
class Answered:
    """One call of the engine.

    Attributes:
        seconds: from the prompts to the last token, prefill included.
        decode_seconds: from the first token of any reply to the last one of any, by the engine's own clock.
        token_ids: the replies.
        verifications: of drafts, summed over requests.
        accepted: draft tokens accepted in them.
    """

    seconds: float
    decode_seconds: float
    token_ids: list[list[int]]
    verifications: int
    accepted: int


def offline_settings(*, dtype: str, max_model_len: int, sequences: int) -> dict[str, Any]:
    """Settings of `vllm.LLM` that every measurement here shares: CUDA graphs, no prefix cache, a fixed amount of memory."""
    settings: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": sequences,
        "enable_prefix_caching": False,
        "disable_log_stats": False,  # they hold the counts of accepted drafts
    }
    if torch.cuda.is_available():
        # Engines that start beside one another would count each other's memory if vLLM measured what is free.
        settings |= {"kv_cache_memory_bytes": _MEMORY, "gpu_memory_utilization": 0.05}
    return settings


class VllmProcess:
    """One offline engine. It begins to start at once; several may start beside one another."""

    def __init__(self, model: str | Path, settings: Mapping[str, Any], environment: Mapping[str, str] | None = None, *, log: Path) -> None:
        """See the arguments of `vllm.LLM`.

        Args:
            model: folder or Hub name.
            settings: the rest of `vllm.LLM`'s arguments.
            environment: variables of the engine's process beyond this one's.
            log: takes what vLLM prints.
        """
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")
        context = multiprocessing.get_context("spawn")  # nothing of this process reaches the other: no CUDA context, no threads
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, str(model), dict(settings), dict(environment or {}), str(log)))
        self._process.start()
        theirs.close()
        atexit.register(self.end)  # Python would wait for it, and it for a prompt

    def wait(self, seconds: float) -> Started:
        """Wait until the engine is ready.

        Raises:
            VllmError: it is not, after so many seconds or because it failed.
        """
        started = self._receive(seconds)
        assert isinstance(started, Started)
        return started

    def answer(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, stop_token_ids: Sequence[int] | None = None, limit: float = 600.0
    ) -> Answered:
        """Answer token ids greedily.

        Args:
            prompts: all of them at once.
            max_new_tokens: of each reply.
            stop_token_ids: end a reply; None lets every reply have its full length.
            limit: seconds until the engine is taken for dead.

        Raises:
            VllmError: the engine failed.
        """
        self._connection.send(([list(ids) for ids in prompts], max_new_tokens, None if stop_token_ids is None else list(stop_token_ids)))
        answered = self._receive(limit)
        assert isinstance(answered, Answered)
        return answered

    def hang_up(self) -> None:
        """Let the engine end, without waiting for it."""
        self._connection.close()

    def end(self, seconds: float = 10.0) -> None:
        """End the engine with all its processes; those that take longer than so many seconds are killed."""
        self.hang_up()
        self._process.join(seconds)
        assert self._process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()  # in case it had no group of its own yet
        self._process.join()

    def _receive(self, seconds: float) -> Started | Answered:
        if not self._connection.poll(max(0.0, seconds)):
            raise VllmError(f"no answer within {seconds:.0f} s")
        try:
            received: Started | Answered | str = self._connection.recv()
        except (EOFError, OSError):
            received = "its process ended without a word"
        if isinstance(received, str):
            raise VllmError(_reason(self.log) or received)
        return received


def _reason(log: Path) -> str | None:
    """The last error in a log that says something."""
    found = [match[0] for match in _REASON.finditer(log.read_text(errors="replace")) if _SEE_ABOVE not in match[0]]
    return " ".join(found[-1].split()) if found else None


def _serve(connection: Connection, model: str, settings: dict[str, Any], environment: dict[str, str], log: str) -> None:
    """What the process runs: start, then answer until the other side is gone."""
    os.setsid()  # a group that ends with all that vLLM starts
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    try:
        begin = time.perf_counter()
        import vllm

        engine = vllm.LLM(model, **settings)
        config = engine.llm_engine.vllm_config
        runner = "V2" if config.use_v2_model_runner else "V1"
        asynchronous = bool(config.scheduler_config.async_scheduling)
        connection.send(Started(vllm.__version__, runner, asynchronous, time.perf_counter() - begin))
        while True:
            connection.send(_answer(engine, *connection.recv()))
    except EOFError:
        engine.llm_engine.engine_core.shutdown()
    except BaseException as error:  # whatever it is, the other side is told
        traceback.print_exc()
        connection.send(f"{type(error).__name__}: {' '.join(str(error).split())}")


def _answer(engine: Any, prompts: list[list[int]], max_new_tokens: int, stop_token_ids: list[int] | None) -> Answered:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=max_new_tokens, ignore_eos=stop_token_ids is None, stop_token_ids=stop_token_ids or []
    )
    requests = [{"prompt_token_ids": ids} for ids in prompts]
    before = _counters(engine)
    begin = time.perf_counter()
    outputs = engine.generate(requests, sampling, use_tqdm=False)
    seconds = time.perf_counter() - begin
    verifications, accepted = (after - earlier for after, earlier in zip(_counters(engine), before, strict=True))
    decode_seconds = max(output.metrics.last_token_ts for output in outputs) - min(output.metrics.first_token_ts for output in outputs)
    return Answered(seconds, decode_seconds, [list(output.outputs[0].token_ids) for output in outputs], verifications, accepted)


def _counters(engine: Any) -> list[int]:
    """Verifications and accepted drafts since the engine started; none without a drafter."""
    values = {metric.name: metric.value for metric in engine.get_metrics() if metric.name in _COUNTERS}
    return [int(values.get(name, 0)) for name in _COUNTERS]
