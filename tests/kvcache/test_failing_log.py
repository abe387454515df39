"""A disk that refuses the log is no trouble of the cache: sinks get everything, and the log goes on when it can."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from events.errors import LogWriteFailed
from events.log import LogReader, LogWriter, output
from events.log import segments as segment_files
from events.log import writer as recorder
from events.types import EventBatch, Gap
from kvcache.fold.fingerprint import fingerprint
from kvcache.manager import KVCacheManager
from kvcache.replay import fold, replay
from sinks import Sink
from tests.support.engines.traffic import Traffic, config
from tests.support.logs.full_disk import FullDisk, full_disk
from tests.support.seeds import seeds

__all__ = ["full_disk"]


class Collector(Sink):
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.batches: list[EventBatch] = []

    def open(self) -> None:
        """Nothing to open."""

    def write(self, batch: EventBatch) -> None:
        """Keep it."""
        self.batches.append(batch)

    def close(self) -> None:
        """Nothing to close."""


def step(traffic: Traffic, count: int = 1) -> None:
    """Do something, so much that the next batch is not empty."""
    for _ in range(count):
        traffic.step()
    while not traffic.manager.bus.pending:
        traffic.step()


def flushed(manager: KVCacheManager) -> bool:
    """End a step; whether the log had no trouble."""
    try:
        manager.flush()
    except LogWriteFailed:
        return False
    return True


def settled(log: LogWriter) -> None:
    """Wait until the disk was tried."""
    with suppress(LogWriteFailed):
        log.flush(60)


@pytest.mark.parametrize("overflow", ["block", "drop"])
@pytest.mark.parametrize("queue", [4, 4096])
def test_trouble_passes(tmp_path: Path, full_disk: FullDisk, overflow: Any, queue: int) -> None:
    """During it flush says so or not, as asked; afterwards the log holds all, or a gap and the whole state."""
    log = LogWriter(tmp_path / "log", overflow=overflow, max_queued_batches=queue)
    sink = Collector()
    manager = KVCacheManager(config(), log=log, sinks=[sink])
    traffic = Traffic(manager, 3)
    for _ in range(10):
        step(traffic)
        assert flushed(manager)
        settled(log)
    with full_disk():
        for _ in range(4):  # until it is noticed
            step(traffic, 3)
            flushed(manager)
            settled(log)
        for _ in range(12):
            step(traffic)
            assert flushed(manager) is (overflow == "drop")
            settled(log)
            manager.check()
    settled(log)
    for _ in range(10):
        step(traffic)
        assert flushed(manager)
        settled(log)
    manager.close()
    batches = list(LogReader(tmp_path / "log"))
    gaps = [event for batch in batches for event in batch.events if isinstance(event, Gap)]
    assert log.dropped_batches == sum(gap.last_seq - gap.first_seq + 1 for gap in gaps)
    assert len(gaps) == (queue == 4)
    replayed = replay(tmp_path / "log", verify=True)
    assert replayed.fingerprint == fingerprint(manager.state)
    assert replayed.checkpoints_verified
    assert not replayed.checkpoints_failed
    assert [batch.seq for batch in sink.batches] == list(range(replayed.last_seq + 1))
    assert [batch for batch in sink.batches if batch.seq in {each.seq for each in batches}] == batches
    assert fold(sink.batches).fingerprint == replayed.fingerprint


@pytest.mark.parametrize("overflow", ["block", "drop"])
def test_close_during_trouble(tmp_path: Path, full_disk: FullDisk, overflow: Any) -> None:
    """Closing says that the log is incomplete; sinks have all, and the log is readable as far as it goes."""
    log, sink = LogWriter(tmp_path / "log", overflow=overflow), Collector()
    manager = KVCacheManager(config(), log=log, sinks=[sink])
    traffic = Traffic(manager, 4)
    step(traffic, 10)
    manager.flush()
    settled(log)
    with full_disk():
        for _ in range(6):
            step(traffic, 3)
            flushed(manager)
            settled(log)
        with pytest.raises(LogWriteFailed):
            manager.close()
    manager.close()
    batches = list(LogReader(tmp_path / "log"))
    assert batches == sink.batches[: len(batches)]
    assert 2 <= len(batches) < len(sink.batches)
    assert log.dropped_batches == len(sink.batches) - len(batches)
    assert fold(sink.batches).fingerprint == fingerprint(manager.state)
    with KVCacheManager(config(), log=LogWriter(tmp_path / "log", resume=True)) as manager:
        step(Traffic(manager, 5), 10)
    assert replay(tmp_path / "log", verify=True).state.epoch == 1


def test_loss_is_reported_when_the_disk_heals_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing gives the log a moment to make room, so that even then it ends with a gap and the whole state."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log = LogWriter(tmp_path / "log", overflow="drop", max_queued_batches=2)
    manager = KVCacheManager(config(), log=log)
    traffic = Traffic(manager, 6)
    with monkeypatch.context() as patch:
        patch.setattr("os.writev", refuse)
        for _ in range(6):
            step(traffic, 2)
            manager.flush()
            settled(log)
        assert log.has_lost
    manager.close()
    replayed = replay(tmp_path / "log", verify=True)
    assert len(replayed.gaps) == 1
    assert replayed.fingerprint == fingerprint(manager.state)
    assert replayed.end is not None
    assert replayed.end.kind == "clean"


def test_log_that_was_closed_is_reported_at_each_flush(tmp_path: Path) -> None:
    """Who closes the writer under a manager hears of it, and the cache goes on."""
    log = LogWriter(tmp_path / "log", overflow="drop")
    manager = KVCacheManager(config(), log=log)
    log.close()
    for number in range(3):
        manager.add_sequence(number, [1, 2, 3])
        with pytest.raises(LogWriteFailed, match="the log is closed"):
            manager.flush()
    assert manager.num_sequences == 3
    manager.check()
    manager.close()


def test_refused_after_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system takes all that is to be written and then refuses, there is nothing to try again."""
    log = LogWriter(tmp_path / "log")
    manager = KVCacheManager(config(), log=log)
    traffic = Traffic(manager, 3)
    step(traffic)
    assert flushed(manager)
    settled(log)
    writev = os.writev

    def refuse(descriptor: int, parts: Any) -> int:
        writev(descriptor, parts)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr("os.writev", refuse)
        for _ in range(20):
            step(traffic)
            assert flushed(manager)
            assert log.flush(10)
    step(traffic)
    assert flushed(manager)
    manager.close()
    assert log.dropped_batches == 0
    assert replay(tmp_path / "log", verify=True).fingerprint == fingerprint(manager.state)


class Flaky:
    """A disk that refuses each of the log's calls with a probability, before or after it has done what was asked."""

    def __init__(self, chance: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
        self._chance = chance
        self.probability = 0.0
        places = [(os, "writev"), (os, "ftruncate"), (Path, "rename"), (Path, "unlink")]
        places += [(output, "sync_file"), (segment_files, "sync_file"), (segment_files, "sync_directory")]
        for owner, name in places:
            monkeypatch.setattr(owner, name, self._refusing(getattr(owner, name)))

    def _refusing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(probability: float) -> None:
            if threading.current_thread().name == "kvcache-log" and self._chance.random() < probability:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        def flaky(*arguments: Any, **named: Any) -> Any:
            refuse(self.probability)
            result = call(*arguments, **named)
            refuse(self.probability / 2)
            return result

        return flaky


@pytest.mark.parametrize("seed", seeds(range(12), quick=3))
def test_flaky_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Whatever is refused whenever, the log is readable, each missing batch is in a gap, and its fold is the state."""
    chance = random.Random(seed)
    disk = Flaky(chance, monkeypatch)
    monkeypatch.setattr(recorder, "_FIRST_PAUSE_SECONDS", 0.0005)
    monkeypatch.setattr(recorder, "_LONGEST_PAUSE_SECONDS", 0.002)
    monkeypatch.setattr(recorder, "_GATHER_SECONDS", 0.0005)
    log = LogWriter(
        tmp_path / "log",
        overflow=chance.choice(["block", "drop"]),
        max_queued_batches=chance.choice([2, 4, 16, 4096]),
        segment_bytes=chance.choice([500, 3000, 1 << 20]),
    )
    manager = KVCacheManager(config(), log=log)
    traffic = Traffic(manager, seed)
    for _ in range(120):
        if chance.random() < 0.1:
            disk.probability = chance.choice([0.0, 0.1, 0.5, 1.0])
        step(traffic)
        flushed(manager)
    disk.probability = 0.0
    settled(log)
    while log.stats().state == "suspended":  # the try that was under way had yet to fail
        settled(log)
    manager.close()
    batches = list(LogReader(tmp_path / "log"))
    gaps = [event for batch in batches for event in batch.events if isinstance(event, Gap)]
    reported = {seq for gap in gaps for seq in range(gap.first_seq, gap.last_seq + 1)}
    assert reported == set(range(batches[-1].seq + 1)) - {batch.seq for batch in batches}
    assert len(reported) == log.dropped_batches
    replayed = replay(tmp_path / "log", verify=True)
    assert replayed.fingerprint == fingerprint(manager.state)
    assert not replayed.checkpoints_failed
    assert replayed.end is not None
    assert replayed.end.kind == "clean"
