"""Servers of others that tests start: where they are, and what is done where they are not."""

from __future__ import annotations

import os
import shutil

import pytest

REQUIRED = "TEST_SERVERS"
"""Set to ``required``, tests fail where they would be skipped for want of a server."""


def program(name: str) -> str:
    """The path of a server's program; skips the test where there is none, or fails where it is required."""
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    if path is None and os.environ.get(REQUIRED) == "required":
        pytest.fail(f"there is no {name}, and {REQUIRED} says that there must be")
    if path is None:
        pytest.skip(f"there is no {name} on the PATH")
    return path
