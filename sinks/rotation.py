"""A file that becomes the first of the older ones, and a new one in its place."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def older_file(path: Path, number: int) -> Path:
    """The path of an older file; 1 is the newest."""
    return path.with_name(f"{path.name}.{number}")


def rotate(path: Path, keep: int, mode: int) -> int:
    """Make `path` the newest of `keep` older files, and return the descriptor of a new file there, for appending.

    Raises OSError. What is likely to fail, making a file, comes first, and has changed nothing where it fails.
    """
    unfinished = path.with_name(f"{path.name}.new")
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(unfinished, flags, mode)
    try:
        for number in range(keep - 1, 0, -1):
            _move(older_file(path, number), older_file(path, number + 1))
        if keep:
            _move(path, older_file(path, 1))
        unfinished.replace(path)
    except BaseException:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    return descriptor


def _move(source: Path, target: Path) -> None:
    # Somebody may have removed it, which was his right.
    with contextlib.suppress(FileNotFoundError):
        source.replace(target)
