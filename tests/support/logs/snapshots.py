"""The bytes of a log's directory."""

from __future__ import annotations

from pathlib import Path


def snapshot(directory: Path) -> dict[str, bytes]:
    """All bytes in a log directory except the lock's."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name != "LOCK"
    }
