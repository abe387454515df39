"""Saying that a file of a log is a symbolic link: the system's own words for that tell nobody what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def telling_links(path: Path) -> Iterator[None]:
    """Say what to do where a file of a log is a symbolic link, which opening it refuses to follow."""
    try:
        yield
    except OSError as error:
        if not path.is_symlink():
            raise
        advice = f"{path.name} is a symbolic link, which is not followed: put the file itself in its place"
        raise OSError(error.errno, advice, str(path)) from None
