"""The copies of a run: their bytes are those of the events, and their time is not the manager's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cuda_ops.copier import Copier, Copy, FinishedTicket, Ticket
from events.log import LogReader
from events.types import PRIMARY, SECONDARY, BlocksCopied, BlocksMoved
from kvcache.config import KVCacheConfig
from kvcache.layout import Layout
from kvcache.manager import KVCacheManager
from kvcache.pools import Pools
from kvcache.workload.copies import TimedCopier
from kvcache.workload.driver import DriveOptions, Engine
from kvcache.workload.summary import RunResult
from tests.support.workloads import CHATS, TIERED, WINDOWS

CONFIG = KVCacheConfig(**TIERED)
MS = 1_000_000


def played(
    log: Path, wrapped: Any = lambda copier: copier, *, timed: bool = True, config: KVCacheConfig = CONFIG
) -> tuple[RunResult, TimedCopier]:
    """A run over a copier that is watched."""
    pools = Pools(Layout.of(config), "cpu")
    copier = TimedCopier(wrapped(pools.copier()), pools.layout)
    with KVCacheManager(config, pools=pools, copier=copier, log=log) as manager:
        options = DriveOptions(concurrency=2)
        engine = Engine(manager, CHATS, options, pools=pools, copies=copier if timed else None)
        return engine.run(), copier


def recorded(log: Path, config: KVCacheConfig) -> dict[tuple[int, int], int]:
    """Bytes that the events of a log say were copied, by source and target level."""
    sizes = [group.bytes_per_block for group in Layout.of(config).groups]
    found: dict[tuple[int, int], int] = dict.fromkeys(
        [(PRIMARY, SECONDARY), (SECONDARY, PRIMARY), (PRIMARY, PRIMARY)], 0
    )
    for batch in LogReader(log):
        for event in batch.events:
            if isinstance(event, BlocksMoved) and event.transfer:
                found[event.from_level, event.to_level] += len(event.from_slots) // 4 * sizes[event.group]
            elif isinstance(event, BlocksCopied) and not moves_nothing(event):
                part = event.num_tokens * sizes[event.group] // config.tokens_per_block
                found[event.source_level, PRIMARY] += part
    return found


def moves_nothing(event: BlocksCopied) -> bool:
    return (event.source_level, event.source) == (PRIMARY, event.target)


@pytest.mark.parametrize("config", [CONFIG, KVCacheConfig(**WINDOWS)], ids=["one window", "two windows"])
def test_bytes_are_those_of_the_events(tmp_path: Path, config: KVCacheConfig) -> None:
    """Each direction has moved what the events say, parts of blocks included, whichever the window."""
    result, totals = played(tmp_path / "log", config=config)
    ways = (totals.bytes_offloaded, totals.bytes_onboarded, totals.bytes_within_primary)
    assert ways == tuple(recorded(tmp_path / "log", config).values())
    assert min(ways) > 0
    assert totals.bytes == sum(ways)
    assert totals.bytes_per_second == totals.bytes / totals.seconds
    assert result.times.seconds() > 0


class Time:
    """A clock that only copies move."""

    def __init__(self) -> None:
        self.ns = 0

    def perf_counter_ns(self) -> int:
        return self.ns


@dataclass
class Slow:
    """A copier that takes its time when it is called, and again when it is waited for."""

    inner: Copier
    time: Time

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        self.time.ns += 7 * MS
        self.inner.submit(copies)
        return SlowTicket(self.time)


class SlowTicket(FinishedTicket):
    """Arrives when it is waited for."""

    def __init__(self, time: Time) -> None:
        super().__init__()
        self._time = time

    def wait(self) -> None:
        self._time.ns += 3 * MS


@pytest.mark.parametrize("timed", [True, False])
def test_time_is_the_copies_or_the_managers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timed: bool
) -> None:
    """What a copier takes inside the manager's calls counts once: as the copies', where they are measured."""
    time = Time()
    for module in ("copies", "summary"):
        monkeypatch.setattr(f"kvcache.workload.{module}.time", time)
    result, totals = played(tmp_path / "log", lambda copier: Slow(copier, time), timed=timed)
    submitted = time.ns // (10 * MS)
    assert submitted > 10
    assert totals.seconds == time.ns / 1e9 == submitted / 100
    assert result.times.seconds() == (0 if timed else submitted * 7 / 1000)
    assert result.times.percentile_us(99) == 0 or not timed


def test_failed_waits_are_counted() -> None:
    """A wait that ends in a failure took its time as well."""
    time = Time()

    class Failing(SlowTicket):
        def wait(self) -> None:
            super().wait()
            raise OSError("lost")

    class Copying:
        def submit(self, copies: Sequence[Copy]) -> Ticket:
            return Failing(time)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvcache.workload.copies.time", time)
        copier = TimedCopier(Copying(), Layout.of(CONFIG))
        with pytest.raises(OSError, match="lost"):
            copier.submit([]).wait()
    assert (copier.seconds, copier.bytes, copier.bytes_per_second) == (0.003, 0, 0)
