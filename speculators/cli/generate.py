"""`speculators generate`: answer one prompt, streaming, with or without a drafter."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speculators.cli.common import (
    DEFAULT_VERIFIER,
    DeviceOption,
    DraftTokensOption,
    DtypeOption,
    JsonOption,
    SeedOption,
    VerifierOption,
    check_json_path,
    load_drafter,
    load_verifier,
    parse_draft_tokens,
    write_json,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextStream:
    """Prints the reply as it grows. Token ids are decoded together: a character can span several of them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._printed = 0

    def add(self, row: int, token_ids: list[int]) -> None:
        """Take new tokens of the only row."""
        self._token_ids += token_ids
        text = self.text()
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self._print(text)

    def finish(self) -> None:
        """Print what is left, and end the line."""
        self._print(self.text())
        typer.echo()

    def text(self) -> str:
        """The whole reply so far."""
        return str(self._tokenizer.decode(self._token_ids, skip_special_tokens=True))

    def _print(self, text: str) -> None:
        typer.echo(text[self._printed :], nl=False)
        sys.stdout.flush()
        self._printed = len(text)


def generate(
    prompt: Annotated[str, typer.Argument(help="The user's message; - reads it from standard input.")],
    verifier: VerifierOption = DEFAULT_VERIFIER,
    speculator: Annotated[str | None, typer.Option(help="Drafter checkpoint, or prompt_lookup. Default: plain decoding.")] = None,
    k: DraftTokensOption = None,
    max_new_tokens: Annotated[int, typer.Option(help="Token budget of the reply.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the most likely tokens up to this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens less likely than this times the most likely.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    confidence_threshold: Annotated[float, typer.Option(help="Drop drafts from the first whose confidence is below it.")] = 0.0,
    seed: SeedOption = 0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    json: JsonOption = None,
) -> None:
    """Answer one prompt and print how many drafts were accepted."""
    check_json_path(json)
    from speculators.decoding.engine import generate as decode
    from speculators.decoding.sampling import SamplingParams
    from speculators.errors import ConfigError, DataError
    from speculators.evaluation import metrics
    from speculators.evaluation.report import number

    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise DataError("the prompt is empty: give a message")
    draft_tokens = parse_draft_tokens(k)
    if speculator is None and (k is not None or confidence_threshold > 0):
        option = "--k" if k is not None else "--confidence-threshold"
        raise ConfigError(f"{option} needs --speculator: without one, decoding is plain and drafts nothing")
    sampling = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        max_new_tokens=max_new_tokens,
    )
    target = load_verifier(verifier, dtype, device)
    drafter = None if speculator is None else load_drafter(speculator, target)
    token_ids = target.encode_chat([{"role": "user", "content": text}])
    assert target.tokenizer is not None  # encode_chat needed it
    stream = TextStream(target.tokenizer)
    try:
        generation = decode(
            target,
            drafter,
            [token_ids],
            sampling,
            num_draft_tokens=draft_tokens,
            confidence_threshold=confidence_threshold,
            on_tokens=stream.add,
        )
    except BaseException:
        if stream.text():
            stream.finish()  # an error message begins a line of its own
        raise
    stream.finish()
    rounds = generation.rounds
    positions = max((a_round.proposed for a_round in rounds[0]), default=0)
    emitted = sum(a_round.emitted for a_round in rounds[0])
    speed = emitted / generation.seconds if generation.seconds > 0 and emitted else None
    length = metrics.acceptance_length(rounds)
    by_position = metrics.acceptance_by_position(rounds, positions)
    report: dict[str, Any] = {
        "command": "generate",
        "verifier": verifier,
        "speculator": speculator,
        "text": stream.text(),
        "token_ids": generation.token_ids[0],
        "finish_reason": generation.finish_reasons[0],
        "rounds": len(rounds[0]),
        "acceptance_length": length,
        "acceptance_by_position": by_position,
        "tokens_per_second": speed,
        "kind": "decode",
    }
    typer.echo(
        f"\n{len(generation.token_ids[0])} tokens ({generation.finish_reasons[0]}), {len(rounds[0])} rounds,"
        f" acceptance length {number(length)} (decode), {number(speed, 1)} tokens/s after the first",
        err=True,
    )
    if by_position:
        typer.echo("acceptance by position: " + " ".join(number(value) for value in by_position), err=True)
    write_json(json, report)
