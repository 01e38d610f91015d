"""The folder of a run: whole checkpoints, links to the latest and the best, and nothing of the user's ever touched.

    output/
      training.yaml          the settings
      log.jsonl              one record a line
      checkpoints/step-00000200/   a drafter that loads, and training_state.safetensors to resume from
      latest -> checkpoints/step-00000200
      best -> checkpoints/step-00000150
      config.json, model.safetensors, README.md   the drafter, once training has ended

A checkpoint is written beside its place and renamed into it, so it exists whole or not at all, whenever the process dies.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from speculators.checkpoint.storage import CARD_FILE, CONFIG_FILE, INDEX_FILE, model_files
from speculators.errors import ConfigError, DataError
from speculators.files import check_output_folder, make_folder

STATE_FILE = "training_state.safetensors"
CHECKPOINTS = "checkpoints"
LATEST, BEST = "latest", "best"
_STEP_FOLDER = re.compile(r"step-(\d{8,})")
_WEIGHTS_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_LOCK_FILE = ".lock"


class RunFolder:
    """The files of one run. Only the process of rank 0 writes.

    Args:
        path: the output folder; made by `open`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    def check(self) -> None:
        """Refuse a folder that cannot be used, before anything is done for it.

        Raises:
            ConfigError: a file lies where the folder, or where one of the links, would, or another process is training in it.
            DataError: it cannot be written to.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"the output {self.path} is a file; name a folder")
        check_output_folder(self.path)
        for name in (LATEST, BEST):
            link = self.path / name
            if link.exists() and not link.is_symlink():
                raise ConfigError(f"{link} is not a link that training made; move it away or name another output folder")
        if (self.path / _LOCK_FILE).is_file():
            with (self.path / _LOCK_FILE).open() as lock:
                self._take(lock, fcntl.LOCK_SH)  # shared: the other processes of this run look at the same time

    def check_new(self) -> None:
        """Refuse to begin a run where a model lies, a verifier perhaps: the trained drafter would replace it.

        Raises:
            ConfigError: the folder holds one.
        """
        if found := model_files(self.path):
            raise ConfigError(
                f"{self.path} holds a model ({found[0].name}), which the trained drafter would replace; name another output folder"
            )

    def check_space(self, needed: int) -> None:
        """Refuse a disk that is too small, before any work is done for it. What a resumed run has written already counts as free.

        Raises:
            DataError: less than `needed` bytes are free.
        """
        nearest = next(part for part in (self.path.absolute(), *self.path.absolute().parents) if part.exists())
        free = shutil.disk_usage(nearest).free + sum(file.stat().st_size for file in (self.path / CHECKPOINTS).glob("step-*/*"))
        if free < needed:
            raise DataError(
                f"the checkpoints of this run need {needed / 1e9:.1f} GB, and {self.path} has {free / 1e9:.1f} GB free;"
                " make room, name another folder, or lower keep_checkpoints"
            )

    def open(self) -> None:
        """Make the folder, keep other processes from training in it, and clear what a killed process left half-written.

        Raises:
            ConfigError: another process is training in it.
        """
        make_folder(self.path / CHECKPOINTS)
        self._lock = (self.path / _LOCK_FILE).open("w")
        self._take(self._lock, fcntl.LOCK_EX)
        place = self.path.absolute()
        of_the_drafter = re.compile(rf"\.{re.escape(place.name)}\.[0-9a-f]{{12}}\.partial")  # as saving a drafter names it
        half_written = [*(self.path / CHECKPOINTS).glob(".*step-*.partial")]
        half_written += [folder for folder in place.parent.glob(".*.partial") if of_the_drafter.fullmatch(folder.name)]
        for folder in half_written:
            shutil.rmtree(folder, ignore_errors=True)

    def _take(self, lock: IO[str], kind: int) -> None:
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process is training in {self.path}; wait for it or name another output folder") from None
        except OSError:
            pass  # a file system without locks

    def close(self) -> None:
        """Let other processes in."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # -- checkpoints -----------------------------------------------------------------------------------------

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint of a step lies or would lie."""
        return self.path / CHECKPOINTS / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending."""
        matches = (_STEP_FOLDER.fullmatch(folder.parent.name) for folder in (self.path / CHECKPOINTS).glob(f"step-*/{STATE_FILE}"))
        return sorted(int(match[1]) for match in matches if match)

    def newest_step(self) -> int:
        """Step of the last checkpoint, -1 where there is none. Not what `latest` says: a process may die before it moves the link."""
        return max(self.steps(), default=-1)

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """Yield an empty folder; when the block ends well, it is durable and is the checkpoint of the step, and the latest.

        When the block raises, nothing has changed.
        """
        place = self.checkpoint(step)
        staged = place.with_name(f".{place.name}.partial")
        staged.mkdir()
        try:
            yield staged
            for file in (*staged.iterdir(), staged):
                _flush(file)
            staged.rename(place)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        _flush(place.parent)
        self.link(LATEST, step)

    def link(self, name: str, step: int) -> None:
        """Point `latest` or `best` at the checkpoint of a step; a reader finds the old one or the new one."""
        fresh = self.path / f".{name}.link"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(self.checkpoint(step).relative_to(self.path))
        fresh.replace(self.path / name)

    def prune(self, keep: int, best: int | None) -> None:
        """Remove all checkpoints but the last `keep` and the best: only files that a checkpoint is made of, and emptied folders."""
        kept = {*self.steps()[-keep:], best}
        for folder in (self.path / CHECKPOINTS).iterdir():
            match = _STEP_FOLDER.fullmatch(folder.name)
            # One without a state was being removed when the process died.
            if match and (int(match[1]) not in kept or not (folder / STATE_FILE).exists()):
                _remove_checkpoint(folder)


def _remove_checkpoint(folder: Path) -> None:
    (folder / STATE_FILE).unlink(missing_ok=True)  # first: without it the folder is no checkpoint any more
    for file in list(folder.iterdir()):
        if file.name in (CONFIG_FILE, CARD_FILE, INDEX_FILE) or _WEIGHTS_FILE.fullmatch(file.name):
            file.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def _flush(path: Path) -> None:
    """Make a file, or the entries of a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
