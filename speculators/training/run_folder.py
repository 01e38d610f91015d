"""The folder of a run: whole checkpoints, links to the latest and the best, and nothing of the user's ever touched.

    output/
      training.yaml          the settings
      log.jsonl              one record a line
      checkpoints/step-00000200/   a drafter that loads, and training_state.safetensors to resume from
      latest -> checkpoints/step-00000200
      best -> checkpoints/step-00000150
      config.json, model.safetensors, README.md   the drafter, once training has ended

A checkpoint is written beside its place and renamed into it, and renamed away before it is removed, so it exists whole or not at
all, whenever the process dies. A new run begins only where nothing lies that it would replace; the text in its lock file then
tells a later process that the log and the settings beside it are a run's.
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

from speculators.checkpoint.native import may_write_card
from speculators.checkpoint.storage import CARD_FILE, CONFIG_FILE, INDEX_FILE, model_files
from speculators.errors import ConfigError, DataError
from speculators.files import check_output_folder, make_folder
from speculators.training.loggers import LOG_FILE
from speculators.training.settings import SETTINGS_FILE

STATE_FILE = "training_state.safetensors"
CHECKPOINTS = "checkpoints"
LATEST, BEST = "latest", "best"
_STEP_FOLDER = re.compile(r"step-(\d{8,})")
_WEIGHTS_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
# A checkpoint that is being written or removed, and the drafter of one as saving it names the folder beside it.
_PARTIAL_FOLDER = re.compile(r"\.step-\d{8,}\.partial|\.\.step-\d{8,}\.partial\.[0-9a-f]{12}\.partial")
_LOCK_FILE = ".lock"
_LOCK_TEXT = b"speculators train writes in this folder\n"


class RunFolder:
    """The files of one run. Only the process of rank 0 writes.

    Args:
        path: the output folder; made by `open`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[bytes] | None = None

    def check(self) -> None:
        """Refuse a folder that cannot be used, before anything is done for it.

        Raises:
            ConfigError: a file lies where a folder or one of the links would, or a folder where a file would, or another process
                is training in it.
            DataError: it cannot be written to.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"the output {self.path} is a file; name a folder")
        check_output_folder(self.path)
        checkpoints = self.path / CHECKPOINTS
        if os.path.lexists(checkpoints) and not checkpoints.is_dir():
            raise ConfigError(f"{checkpoints} is no folder; move it away or name another output folder")
        for name in (LOG_FILE, SETTINGS_FILE, CARD_FILE, CONFIG_FILE, _LOCK_FILE):
            if (self.path / name).is_dir():
                raise ConfigError(
                    f"{self.path / name} is a folder where training writes a file; move it away or name another output folder"
                )
        for name in (LATEST, BEST):
            link = self.path / name
            if os.path.lexists(link) and not self._is_link_of_a_run(link):
                raise ConfigError(f"{link} is not a link that training made; move it away or name another output folder")
        if (self.path / _LOCK_FILE).is_file():
            with (self.path / _LOCK_FILE).open("rb") as lock:
                self._take(lock, fcntl.LOCK_SH)  # shared: the other processes of this run look at the same time

    def _is_link_of_a_run(self, link: Path) -> bool:
        if not link.is_symlink():
            return False
        target = self.path / os.readlink(link)
        return target.parent.resolve() == (self.path / CHECKPOINTS).resolve() and _STEP_FOLDER.fullmatch(target.name) is not None

    def check_new(self) -> None:
        """Refuse to begin a run where something lies that it would replace, a verifier perhaps, or a file of settings.

        Log and settings of a run that died before its first checkpoint are replaced.

        Raises:
            ConfigError: the folder holds such a thing.
        """
        if found := model_files(self.path):
            raise ConfigError(
                f"{self.path} holds a model ({found[0].name}), which the trained drafter would replace; name another output folder"
            )
        lock = self.path / _LOCK_FILE
        if lock.is_file() and lock.read_bytes() == _LOCK_TEXT:
            return
        in_the_way = [self.path / name for name in (LOG_FILE, SETTINGS_FILE) if os.path.lexists(self.path / name)]
        in_the_way += [lock] if lock.is_file() and lock.stat().st_size else []
        in_the_way += [entry for entry in self._entries() if _PARTIAL_FOLDER.fullmatch(entry.name)]
        if in_the_way:
            raise ConfigError(f"a new run would replace {in_the_way[0]}, which is of no run; move it away or name another output folder")

    def check_free(self, newest: int) -> None:
        """Refuse what lies where a checkpoint after step `newest` would be written.

        Raises:
            ConfigError: naming it.
        """
        for entry in self._entries():
            match = _STEP_FOLDER.fullmatch(entry.name)
            if match and int(match[1]) > newest:
                raise ConfigError(
                    f"{entry} lies where a checkpoint would be written and holds no {STATE_FILE} to resume from;"
                    " move it away or name another output folder"
                )
            if _PARTIAL_FOLDER.fullmatch(entry.name) and (entry.is_symlink() or not entry.is_dir()):
                raise ConfigError(f"{entry} lies where a checkpoint would be written; move it away or name another output folder")

    def _entries(self) -> list[Path]:
        """What lies among the checkpoints, by name."""
        checkpoints = self.path / CHECKPOINTS
        return sorted(checkpoints.iterdir()) if checkpoints.is_dir() else []

    def check_space(self, needed: int) -> None:
        """Refuse a disk that is too small, before any work is done for it. What a resumed run has written already counts as free.

        Raises:
            DataError: less than `needed` bytes are free.
        """
        nearest = next(part for part in (self.path.absolute(), *self.path.absolute().parents) if part.exists())
        written = (file for file in (self.path / CHECKPOINTS).glob("step-*/*") if file.is_file())
        free = shutil.disk_usage(nearest).free + sum(file.stat().st_size for file in written)
        if free < needed:
            raise DataError(
                f"the checkpoints of this run need {needed / 1e9:.1f} GB, and {self.path} has {free / 1e9:.1f} GB free;"
                " make room, name another folder, or lower keep_checkpoints"
            )

    def open(self) -> None:
        """Make the folder, keep other processes from training in it, and clear what a killed process left half-written.

        Raises:
            ConfigError: another process is training in it.
            DataError: the file system refuses.
        """
        make_folder(self.path / CHECKPOINTS)
        try:
            self._lock = (self.path / _LOCK_FILE).open("ab", buffering=0)
            self._take(self._lock, fcntl.LOCK_EX)
            if not os.fstat(self._lock.fileno()).st_size:
                self._lock.write(_LOCK_TEXT)
        except OSError as error:
            raise DataError(f"cannot write {self.path / _LOCK_FILE} ({error.strerror}); make room or name another output folder") from None
        place = self.path.absolute()
        of_the_drafter = re.compile(rf"\.{re.escape(place.name)}\.[0-9a-f]{{12}}\.partial")  # as saving a drafter names it
        half_written = [folder for folder in self._entries() if _PARTIAL_FOLDER.fullmatch(folder.name)]
        half_written += [folder for folder in place.parent.glob(".*.partial") if of_the_drafter.fullmatch(folder.name)]
        for folder in half_written:
            shutil.rmtree(folder, ignore_errors=True)

    def _take(self, lock: IO[bytes], kind: int) -> None:
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
        matches = (_STEP_FOLDER.fullmatch(entry.name) for entry in self._entries() if (entry / STATE_FILE).exists())
        return sorted(int(match[1]) for match in matches if match)

    def newest_step(self) -> int:
        """Step of the last checkpoint, -1 where there is none. Not what `latest` says: a process may die before it moves the link."""
        return max(self.steps(), default=-1)

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """Yield an empty folder; when the block ends well, it is durable and is the checkpoint of the step, and the latest.

        When the block raises, nothing has changed.

        Raises:
            DataError: something that came after `check_free` lies in the checkpoint's place.
        """
        place = self.checkpoint(step)
        if os.path.lexists(place):
            raise DataError(f"cannot write the checkpoint of step {step}: something else lies at {place}; move it away and resume")
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
        steps = self.steps()
        for step in steps:
            if step not in {*steps[-keep:], best} and not self.checkpoint(step).is_symlink():
                _remove_checkpoint(self.checkpoint(step))


def _remove_checkpoint(folder: Path) -> None:
    emptied = all(_is_of_a_checkpoint(file) for file in folder.iterdir())
    if emptied:
        folder = folder.rename(folder.with_name(f".{folder.name}.partial"))  # cleared by the next process, should this one die
    (folder / STATE_FILE).unlink()  # first: without it the folder is no checkpoint any more
    for file in list(folder.iterdir()):
        if _is_of_a_checkpoint(file):
            file.unlink()
    if emptied:
        folder.rmdir()


def _is_of_a_checkpoint(file: Path) -> bool:
    if file.is_dir():
        return False
    if file.name == CARD_FILE:
        return may_write_card(file)  # a README of the user's stays
    return file.name in (STATE_FILE, CONFIG_FILE, INDEX_FILE) or _WEIGHTS_FILE.fullmatch(file.name) is not None


def _flush(path: Path) -> None:
    """Make a file, or the entries of a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
