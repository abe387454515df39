"""Watching syncs, in whichever way the system has them."""

from __future__ import annotations

import fcntl
import os
from typing import Any

import pytest

SYNCS = [(os, "fsync"), (os, "fdatasync"), (fcntl, "fcntl")]
"""What makes files durable: the last with F_FULLFSYNC, on macOS, where the second is missing."""


def record_syncs(monkeypatch: pytest.MonkeyPatch) -> list[os.stat_result]:
    """What is synced from now on: each file or directory as it is then."""
    synced: list[os.stat_result] = []
    for owner, name in SYNCS:
        call = getattr(owner, name, None)
        if call is not None:
            monkeypatch.setattr(owner, name, _noting(call, synced))
    return synced


def _noting(call: Any, synced: list[os.stat_result]) -> Any:
    def sync(descriptor: int, *command: int) -> Any:
        synced.append(os.fstat(descriptor))
        return call(descriptor, *command)

    return sync
