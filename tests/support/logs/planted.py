"""Files that another user has planted, for tests that run as root, who alone can make them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

OTHER = 65534
"""Another user."""
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


def plant(path: Path, content: bytes | Path | None = b"", mode: int = 0o666) -> Path:
    """A file, a link to what a path names, or a directory (None), of another user."""
    if isinstance(content, Path):
        path.symlink_to(content)
    elif content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    if not isinstance(content, Path):
        path.chmod(mode)
    os.chown(path, OTHER, OTHER, follow_symlinks=False)
    return path
