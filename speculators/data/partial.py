"""Folders that appear whole, and whose unfinished work survives a kill.

Work goes into a hidden folder beside the output. What is finished in there is *sealed*: one small file, replaced
atomically, says how far the work has come. A killed run leaves that folder; the next run with the same settings goes on
from the last seal, and the folder takes the output's name when everything is done.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from speculators.errors import DataError
from speculators.files import check_output_folder, make_folder, write_text_atomically

HEADER_FILE = "header.json"
_PROGRESS_FILE = "progress.json"


class PartialFolder:
    """A folder in the making.

    Attributes:
        output: the name it will have.
        folder: where it is made.
        state: what the last seal said, empty for a new run.
        complete: the output is there already, made with the same settings; there is nothing to do.

    Args:
        output: must not exist, or be an empty folder, or be complete.
        settings: everything the content depends on, as JSON values.

    Raises:
        DataError: the output holds something else, or an unfinished run with other settings.
    """

    def __init__(self, output: Path, settings: Mapping[str, Any]) -> None:
        self.output = output
        self.folder = self.place(output)
        self.state: dict[str, Any] = {}
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))
        self.complete = self._finished_run(output) == self._settings
        if self.complete:
            return
        _check_free(output)
        if (self.folder / _PROGRESS_FILE).is_file():
            self.state = self._read_progress()
        else:
            make_folder(self.folder)
            self.seal({})

    @classmethod
    def check(cls, output: Path, command: str) -> None:
        """Refuse an output that no run of a command can have, before the verifier is loaded that its other settings name.

        Args:
            output: as for the constructor, which compares all settings.
            command: the setting of that name.

        Raises:
            DataError: the output holds something else than a finished run of this command, or cannot be written.
        """
        run = cls._finished_run(output)
        if not isinstance(run, dict) or run.get("command") != command:
            _check_free(output)

    @staticmethod
    def place(output: Path) -> Path:
        """Where the folder `output` is made."""
        return output.absolute().parent / f".{output.name}.partial"

    def seal(self, state: Mapping[str, Any]) -> None:
        """Everything written so far counts from now on; what is written after the last seal does not survive a kill."""
        write_text_atomically(self.folder / _PROGRESS_FILE, json.dumps({"settings": self._settings, "state": state}) + "\n")
        self.state = dict(state)

    def remove_unsealed(self, sealed: Collection[str]) -> None:
        """Remove what a killed run has left behind its last seal: every file that is not named."""
        for path in self.folder.iterdir():
            if path.name not in sealed and path.name != _PROGRESS_FILE:
                path.unlink()

    def finish(self, header: Mapping[str, Any]) -> None:
        """Write the header and give the folder its name."""
        write_text_atomically(self.folder / HEADER_FILE, json.dumps({**header, "run": self._settings}, indent=2) + "\n")
        (self.folder / _PROGRESS_FILE).unlink(missing_ok=True)
        if self.output.is_dir():
            self.output.rmdir()  # empty, as checked
        os.rename(self.folder, self.output)

    def discard(self) -> None:
        """Remove the unfinished folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @staticmethod
    def _finished_run(output: Path) -> Any:
        """Settings of the run that made the output; None where nothing of ours lies there."""
        try:
            header = json.loads((output / HEADER_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return header.get("run") if isinstance(header, dict) else None

    def _read_progress(self) -> dict[str, Any]:
        try:
            found = json.loads((self.folder / _PROGRESS_FILE).read_text(encoding="utf-8"))
            state: dict[str, Any] = dict(found["state"])
            dict(found["settings"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{self.folder / _PROGRESS_FILE} is damaged ({error}); remove that folder to begin anew") from None
        if found["settings"] != self._settings:
            differing = sorted(
                key for key in {*found["settings"], *self._settings} if found["settings"].get(key) != self._settings.get(key)
            )
            raise DataError(
                f"{self.folder} holds an unfinished run with other settings ({', '.join(differing)}); repeat its command to finish it,"
                " name another output, or remove that folder"
            )
        return state


def _check_free(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise DataError(f"{output} exists already; name a new folder, or remove that one first")
    check_output_folder(output)
