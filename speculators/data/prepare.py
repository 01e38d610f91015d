"""From conversations in files to token ids with loss masks, streaming: rows in, shards out, memory of one shard."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from speculators.data.chat import ChatEncoder
from speculators.data.forms import Chat, RowError, Tokens, main_reasons, read_line, read_record
from speculators.data.rows import Conversation
from speculators.data.sources import RawRow, Source, mix
from speculators.data.storage import REJECTED_FILE, ConversationBlock, ConversationWriter, read_header
from speculators.data.workers import available_cores, map_in_order
from speculators.errors import DataError
from speculators.loading import ChatFacts

CHUNK_ROWS = 128
# Fewer chunks are done before worker processes would have started.
_CHUNKS_WORTH_WORKERS = 12
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Preparation:
    """What preparing made.

    Attributes:
        header: of the folder.
        warnings: sentences for the user: replies of another model, another thinking mode.
    """

    header: Mapping[str, Any]
    warnings: list[str]

    @property
    def rejected(self) -> dict[str, int]:
        """Rejected rows by reason."""
        return dict(self.header["rejected"])


class RowPreparer:
    """Rows to documents; picklable, for worker processes.

    Args:
        encoder: of the verifier; None takes rows of tokens only.
        vocab_size: of the verifier.
        max_tokens: documents are cut here; None keeps them whole.
        missing: why there is no encoder.
    """

    def __init__(self, encoder: ChatEncoder | None, vocab_size: int, max_tokens: int | None = None, missing: str = "") -> None:
        self._encoder, self._vocab_size, self._max_tokens, self._missing = encoder, vocab_size, max_tokens, missing

    def documents(self, row: RawRow) -> tuple[list[Conversation], Mapping[str, Any]]:
        """The documents of a row, and its facts.

        Raises:
            RowError: there are none.
        """
        parsed = parse_row(row)
        if isinstance(parsed, Tokens):
            conversation = parsed.conversation
            if conversation.input_ids and max(conversation.input_ids) >= self._vocab_size:
                raise RowError("token ids beyond the vocabulary", f"token id {max(conversation.input_ids)} of {self._vocab_size} tokens")
            documents = [conversation]
        elif self._encoder is None:
            raise RowError("no chat template", self._missing)
        else:
            documents = self._encoder.documents(parsed)
        kept = [cut for document in documents if any((cut := _cut(document, self._max_tokens)).loss_mask)]
        if not kept:
            raise RowError("no reply within max_tokens" if any(documents[0].loss_mask) else "no labels", "nothing is supervised in it")
        return kept, parsed.facts

    def __call__(self, rows: Sequence[RawRow]) -> _Prepared:
        """Prepare a chunk of rows; one that cannot be used is noted and ends nothing."""
        documents: list[Conversation] = []
        rejected: list[str] = []
        reasons: Counter[str] = Counter()
        writers: Counter[str] = Counter()
        for row in rows:
            try:
                found, facts = self.documents(row)
            except RowError as error:
                reasons[error.reason] += 1
                rejected.append(_rejection(row, error))
            else:
                documents += found
                thinking = facts.get("thinking")
                mode = thinking if isinstance(thinking, bool) else None
                writers[json.dumps([str(facts.get("model", UNKNOWN)), mode])] += 1
        block = ConversationBlock.of(documents)
        narrow = ConversationBlock(block.tokens.astype(np.uint32), block.mask, block.lengths, block.topics, block.truncated)
        return _Prepared(narrow, rejected, dict(reasons), dict(writers), len(rows), sum(row.size for row in rows))


@dataclass(frozen=True)
class _Prepared:
    """What became of a chunk."""

    block: ConversationBlock
    rejected: list[str]
    reasons: dict[str, int]
    writers: dict[str, int]
    rows: int
    size: int


def prepare(
    facts: ChatFacts,
    sources: Sequence[Source],
    output: str | Path,
    *,
    limit: int | None = None,
    max_tokens: int | None = None,
    thinking: bool | None = None,
    supervise_reasoning: bool = True,
    workers: int | None = None,
    progress: bool = True,
) -> Preparation:
    """Write a folder of conversations that `train` reads, and the rows that could not be used to `rejected.jsonl` in it.

    The output does not depend on the number of workers. A killed run goes on where its last shard ended.

    Args:
        facts: of the verifier whose template and tokenizer are used.
        sources: what to read, with weights.
        output: must not exist, be empty, or hold this very run, finished or not.
        limit: read at most this many rows, of all sources in their shares.
        max_tokens: documents are cut here.
        thinking, supervise_reasoning: see `ChatEncoder`.
        workers: processes; by default one a core, none for small inputs.
        progress: show a progress bar.

    Raises:
        DataError: the output holds something else, a source cannot be read, or no row could be used.
    """
    settings = {
        "command": "data prepare",
        "verifier": facts.name,
        "vocab_size": facts.vocab_size,
        "stop_token_ids": list(facts.stop_token_ids),
        "sources": [source.identity() for source in sources],
        "limit": limit,
        "max_tokens": max_tokens,
        "thinking": thinking,
        "supervise_reasoning": supervise_reasoning,
    }
    writer = ConversationWriter(output, settings, vocab_size=facts.vocab_size)
    if writer.complete:
        header = read_header(output)
        return Preparation(header, _warnings(header, facts.name, thinking))
    preparer = row_preparer(facts, max_tokens, thinking=thinking, supervise_reasoning=supervise_reasoning)
    state = writer.state or {"rows": 0, "size": 0, "kept": 0, "rejected": {}, "writers": {}}
    reasons, writers = Counter(state["rejected"]), Counter(state["writers"])
    rows, size, kept = state["rows"], state["size"], state["kept"]
    chunks = _chunks(islice(mix(sources, limit), rows, None))
    total = _total(sources) if limit is None else limit
    unit, scale = ("B", True) if limit is None and total else (" rows", False)
    try:
        with tqdm(total=total, initial=size if scale else rows, unit=unit, unit_scale=scale, disable=not progress, desc="preparing") as bar:
            for done in _mapped(preparer, chunks, workers):
                rows, size, kept = rows + done.rows, size + done.size, kept + done.rows - len(done.rejected)
                reasons.update(done.reasons)
                writers.update(done.writers)
                state = {"rows": rows, "size": size, "kept": kept, "rejected": dict(reasons), "writers": dict(writers)}
                writer.add(done.block, state, done.rejected)
                bar.update(done.size if scale else done.rows)
                bar.set_postfix(kept=kept, rejected=rows - kept, refresh=False)
    except DataError:
        if not writer.state:  # no shard is done: nothing is lost, and a repaired source would be another run
            writer.discard()
        raise
    header = {
        "verifier": _replies_by(writers),
        "tokenizer": facts.name,
        "thinking": thinking,
        "rows": rows,
        "kept": kept,
        "rejected": dict(reasons.most_common()),
        "written_by": [{"model": model, "thinking": mode, "rows": count} for model, mode, count in _writers(writers)],
    }
    if not kept:
        writer.discard()
        raise DataError(
            f"none of {rows} rows can be used: {main_reasons(reasons) or 'there are none'}; `speculators data preview` shows one"
        )
    writer.finish(header)
    written = read_header(output)
    return Preparation(written, _warnings(written, facts.name, thinking))


def row_preparer(facts: ChatFacts, max_tokens: int | None = None, **options: Any) -> RowPreparer:
    """The preparer for a verifier; one without chat template takes rows of tokens only."""
    try:
        encoder: ChatEncoder | None = ChatEncoder(facts.tokenizer, facts.stop_token_ids, facts.name, **options)
        missing = ""
    except DataError as error:
        encoder, missing = None, str(error)
    return RowPreparer(encoder, facts.vocab_size, max_tokens, missing)


def parse_row(row: RawRow) -> Chat | Tokens:
    """Read a row in whatever form it has.

    Raises:
        RowError: it has none.
    """
    if not isinstance(row.content, bytes):
        return read_record(row.content)
    try:
        line = row.content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError("not UTF-8 text", f"byte {error.start} of the line is not UTF-8 text") from None
    return read_line(line)


def _cut(document: Conversation, max_tokens: int | None) -> Conversation:
    if max_tokens is None or len(document.input_ids) <= max_tokens:
        return document
    return Conversation(document.input_ids[:max_tokens], document.loss_mask[:max_tokens], document.topic, truncated=True)


def _rejection(row: RawRow, error: RowError) -> str:
    content = row.content.decode("utf-8", errors="replace").rstrip("\n") if isinstance(row.content, bytes) else row.content
    record = {"source": row.source, "row": row.number, "reason": error.reason, "detail": str(error), "record": content}
    return json.dumps(record, ensure_ascii=False, default=str)


def _chunks(rows: Iterable[RawRow]) -> Iterator[list[RawRow]]:
    stream = iter(rows)
    while chunk := list(islice(stream, CHUNK_ROWS)):
        yield chunk


def _mapped(preparer: RowPreparer, chunks: Iterator[list[RawRow]], workers: int | None) -> Iterator[_Prepared]:
    if workers is None:
        first = list(islice(chunks, _CHUNKS_WORTH_WORKERS))
        chunks = chain(first, chunks)
        workers = available_cores() if len(first) == _CHUNKS_WORTH_WORKERS else 0
    return map_in_order(preparer, chunks, workers)


def _total(sources: Sequence[Source]) -> int | None:
    sizes = [source.size for source in sources]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _writers(counts: Mapping[str, int]) -> list[tuple[str, bool | None, int]]:
    return [(*json.loads(key), count) for key, count in sorted(counts.items(), key=lambda item: -item[1])]


def _replies_by(counts: Mapping[str, int]) -> str:
    models = {model for model, _, _ in _writers(counts)}
    return models.pop() if len(models) == 1 else "several models"


def _warnings(header: Mapping[str, Any], name: str, thinking: bool | None) -> list[str]:
    others = [entry for entry in header["written_by"] if entry["model"] != name]
    found = []
    if others:
        rows, model = sum(entry["rows"] for entry in others), others[0]["model"]
        by = "an unknown writer" if model == UNKNOWN else repr(model)
        found.append(
            f"{rows} of {header['kept']} rows hold replies by {by}, not by {name!r}: acceptance will suffer;"
            " `speculators data generate` lets the verifier write them anew"
        )
    modes = {entry["thinking"] for entry in header["written_by"]} - {None}
    if thinking is not None and modes - {thinking}:
        found.append(
            f"replies were written with thinking {'off' if thinking else 'on'}, but are prepared with it {'on' if thinking else 'off'}"
        )
    if header["rejected"]:
        found.append(f"{sum(header['rejected'].values())} rows were rejected, see {REJECTED_FILE}")
    return found
