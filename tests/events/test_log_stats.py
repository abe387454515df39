"""What a log says of itself while it is written."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from kvcache.manager import KVCacheManager
from tests.support.engines import strategies
from tests.support.waiting import wait_until


def request(manager: KVCacheManager, number: int) -> None:
    manager.add_sequence(number, [number] * 5)
    manager.store_context_blocks(number, 5)
    manager.remove_sequence(number)
    manager.flush()


def test_figures_of_a_log(tmp_path: Path) -> None:
    """Batches and bytes that are written; none without a log; closed at the end."""
    assert KVCacheManager(strategies.config()).log_stats() is None
    with KVCacheManager(strategies.config(), log=tmp_path / "log") as manager:
        for number in range(1, 6):
            request(manager, number)
        wait_until(lambda: (stats := manager.log_stats()) is not None and not stats.lag_batches)
        stats = manager.log_stats()
        assert stats is not None
        assert (stats.batches, stats.dropped_batches, stats.state, stats.last_error) == (
            6,
            0,
            "running",
            None,
        )
        files = sum(path.stat().st_size for path in (tmp_path / "log").glob("*.kvlog"))
        assert stats.bytes == files or not files
    stats = manager.log_stats()
    assert stats is not None
    assert stats.state == "closed"


def test_a_suspended_log_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the disk refuses, the state and the reason say so, and batches lag; afterwards nothing of it is left."""
    config = strategies.config(log={"overflow": "drop"})
    with KVCacheManager(config, log=tmp_path / "log") as manager:

        def refuse(*_: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", refuse)
            request(manager, 1)
            wait_until(lambda: (stats := manager.log_stats()) is not None and stats.state == "suspended")
            stats = manager.log_stats()
            assert stats is not None
            assert stats.last_error == os.strerror(errno.ENOSPC)
            assert stats.lag_batches >= 1
        wait_until(lambda: (stats := manager.log_stats()) is not None and stats.state == "running")
        wait_until(lambda: (stats := manager.log_stats()) is not None and not stats.lag_batches)
        stats = manager.log_stats()
        assert stats is not None
        assert (stats.dropped_batches, stats.last_error) == (0, None)
