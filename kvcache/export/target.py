"""Where an export goes: it is there when it is complete, and what was there before is kept until then."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvcache.errors import UsageError
from kvcache.export.schema import COLUMNS


@dataclass(eq=False, repr=False)
class TargetExists(UsageError):
    """The path is taken. `replaceable`: by an earlier export, as far as its names tell."""

    path: Path
    replaceable: bool

    def __str__(self) -> str:
        if self.replaceable:
            return f"{self.path} exists already: choose another path, or replace it with --force"
        return f"{self.path} exists already, and is nothing of that form that could be replaced: choose another path"


_OF_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Errors that only writing has."""


@contextmanager
def replacing(path: Path, *, force: bool, header: bytes | None) -> Iterator[Path]:
    """Give a path to write to, beside the one that is meant; takes its place when the block ends without an error.

    A file is written that begins with `header`, or a directory of tables (None). Raises `TargetExists`, also with
    `force` for what is no such thing, and FileNotFoundError where the path's own directory is missing. Until the end,
    what is at `path` stays. A disk that takes no more is an OSError that names `path`. As the log, it is for its owner
    alone: it names requests.
    """
    _refuse(path, header, force)
    parent = path.absolute().parent
    if not parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(parent))
    work = Path(tempfile.mkdtemp(dir=parent, prefix=f".{path.name}.", suffix=".partial"))
    try:
        with _naming(path, work):
            yield work / "new"
            _make_private(work / "new")
        # Somebody may have been faster.
        _refuse(path, header, force)
        if header is None and os.path.lexists(path):
            path.rename(work / "old")
        (work / "new").replace(path)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _make_private(new: Path) -> None:
    if new.is_dir():
        new.chmod(0o700)
    for file in new.iterdir() if new.is_dir() else [new]:
        file.chmod(0o600)


@contextmanager
def _naming(path: Path, work: Path) -> Iterator[None]:
    """Where a write fails, say what was to be written. What fails while reading is left as it is."""
    try:
        yield
    except OSError as error:
        if error.errno in _OF_WRITING or str(error.filename).startswith(str(work)):
            number = error.errno or errno.EIO
            raise OSError(number, os.strerror(number), str(path)) from error
        raise


def _refuse(path: Path, header: bytes | None, force: bool) -> None:
    if os.path.lexists(path):
        replaceable = _is_export(path) if header is None else _begins(path, header)
        if not (force and replaceable):
            raise TargetExists(path, replaceable)


def _begins(path: Path, header: bytes) -> bool:
    """Whether it is a file that begins so, or an empty one."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(header)) in (header, b"")


def _is_export(path: Path) -> bool:
    """Whether nothing would be lost but tables."""
    if not path.is_dir():
        return False
    return all(
        each.stem in COLUMNS and each.suffix in (".csv", ".jsonl", ".parquet") for each in path.iterdir()
    )
