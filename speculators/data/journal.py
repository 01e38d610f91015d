"""A journal of numbered results, one line each as they come: what was done before a kill is not done again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from speculators.data.partial import PartialFolder
from speculators.errors import DataError, SpeculatorsError
from speculators.files import check_output_folder, write_text_atomically

_JOURNAL_FILE = "journal.jsonl"


class Journal:
    """Results by number, in the unfinished folder of an output.

    A line that a kill cut in half is forgotten, and its result computed again.

    Attributes:
        complete: the output is there already, made with the same settings.

    Args:
        partial: where the journal lies.
    """

    def __init__(self, partial: PartialFolder) -> None:
        self.partial = partial
        self.complete = partial.complete
        self._places: dict[int, tuple[int, int]] = {}
        if self.complete:
            return
        path = partial.folder / _JOURNAL_FILE
        self._stream = path.open("a+b")
        self._read()

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def __len__(self) -> int:
        return len(self._places)

    def add(self, number: int, result: Mapping[str, Any]) -> None:
        """Note a result; it survives a kill from now on."""
        line = json.dumps([number, result], ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
        start = self._stream.seek(0, os.SEEK_END)
        self._stream.write(line)
        self._stream.flush()
        self._places[number] = (start, len(line))

    def get(self, number: int) -> dict[str, Any]:
        """The result of a number that is in the journal."""
        start, length = self._places[number]
        self._stream.seek(start)
        result: dict[str, Any] = json.loads(self._stream.read(length))[1]
        return result

    def in_order(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """All results by ascending number."""
        for number in sorted(self._places):
            yield number, self.get(number)

    def close(self) -> None:
        """Close the file; the journal stays."""
        self._stream.close()

    @contextmanager
    def discarded_if_empty(self) -> Iterator[None]:
        """While open, an error of this library's removes the journal and its folder, unless a result is in it.

        Nothing is lost, and the corrected command, which is another run, is not told of an unfinished one.
        """
        try:
            yield
        except SpeculatorsError:
            if not len(self):
                self.close()
                self.partial.discard()
            raise

    def remove(self) -> None:
        """Remove the journal, before its folder takes the output's name."""
        self.close()
        (self.partial.folder / _JOURNAL_FILE).unlink()

    def _read(self) -> None:
        start = 0
        self._stream.seek(0)
        for line in self._stream:
            if not line.endswith(b"\n"):
                break
            self._places[json.loads(line)[0]] = (start, len(line))
            start += len(line)
        self._stream.truncate(start)


class JournalledFile:
    """A file of JSON lines that appears whole, with a card beside it that says how it was made.

    Attributes:
        journal: results so far.
        complete: file and card are there already, made with the same settings.

    Args:
        output: a `.jsonl` file; must not exist, unless it is complete.
        settings: everything the content depends on, as JSON values.

    Raises:
        DataError: the file holds something else, or an unfinished run with other settings.
    """

    def __init__(self, output: Path, settings: Mapping[str, Any]) -> None:
        self.output, self.card = output, _card_of(output)
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))
        self.complete = output.exists() and self.read_card().get("run") == self._settings
        if self.complete:
            shutil.rmtree(PartialFolder.place(output), ignore_errors=True)  # a run that was killed at its very end
            return
        _check_free(output)
        self.journal = Journal(PartialFolder(output, settings))

    @staticmethod
    def check(output: Path, command: str) -> None:
        """Refuse an output that no run of a command can have, before the verifier is loaded; see `PartialFolder.check`."""
        run = _read_card(_card_of(output)).get("run")
        if not output.exists() or not isinstance(run, dict) or run.get("command") != command:
            _check_free(output)

    def read_card(self) -> dict[str, Any]:
        """The card, empty where there is none."""
        return _read_card(self.card)

    def finish(self, rows: Iterable[Mapping[str, Any]], card: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Write the file and its card.

        Args:
            rows: its lines.
            card: facts for the card, asked for when all rows are written.
        """
        scratch = self.journal.partial.folder / "rows.jsonl"
        with scratch.open("w", encoding="utf-8", errors="backslashreplace") as stream:
            for row in rows:
                stream.write(json.dumps(row, ensure_ascii=False) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        facts = {**card(), "run": self._settings}
        write_text_atomically(self.card, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
        os.replace(scratch, self.output)
        self.journal.close()
        self.journal.partial.discard()
        return facts


def _card_of(output: Path) -> Path:
    if output.suffix != ".jsonl":
        raise DataError(f"{output} must end in .jsonl")
    return output.with_suffix(".card.json")


def _read_card(path: Path) -> dict[str, Any]:
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return card if isinstance(card, dict) else {}


def _check_free(output: Path) -> None:
    if output.exists():
        raise DataError(f"{output} exists already; name a new file, or remove that one first")
    check_output_folder(output.parent)
