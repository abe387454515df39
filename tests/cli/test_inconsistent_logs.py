"""Logs whose checksums are right and whose events are not: commands are right about them, or refuse them."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from events.log import LogReader
from events.types import (
    BlocksMoved,
    BlocksStored,
    CacheCreated,
    EpochStarted,
    EventBatch,
    FeedRemoved,
    FeedStarted,
    FeedStored,
    SequenceAdded,
    TokensAppended,
    WorkerSeen,
)
from kvcache.tap.tap import Endpoint, Tap
from tests.support.commands import Kvcache
from tests.support.feeds.publisher import Publisher, stored
from tests.support.feeds.publisher import batch as reported
from tests.support.feeds.tapped import work_until
from tests.support.logs import inconsistent
from tests.support.logs.logs import LOG_ID
from tests.support.logs.random_logs import random_log
from tests.support.seeds import seeds

REFUSALS = (
    "does not fit the batches before it",
    "is damaged at",
    "bytes of memory",
    "disagree",
    "does not hold whole entries",
)
"""What is said where the log is wrong: exit code 1, and of a cache too large for the machine 2."""


@dataclass
class Log:
    """A log of a random program, in order."""

    batches: list[EventBatch]
    epochs: list[int]
    request: str
    """One of its requests."""

    @classmethod
    def of(cls, seed: int, directory: Path) -> Log:
        """That of the program with this seed, written into a new directory and read again."""
        batches = list(LogReader(random_log(seed, directory, branches=bool(seed % 2))))
        ids = [event.request_id for _, event in _events(batches) if isinstance(event, SequenceAdded)]
        return cls(batches, inconsistent.beginnings(batches), str(ids[len(ids) // 2]))

    def write(self, directory: Path, batches: Sequence[EventBatch]) -> Path:
        """Write other batches in its place."""
        shutil.rmtree(directory, ignore_errors=True)
        return inconsistent.write_frames(directory, batches, self.epochs)

    def with_event(self, kind: type, **changes: Any) -> list[EventBatch]:
        """Its batches with the last event of a kind changed."""
        batch, event = [(batch, event) for batch, event in _events(self.batches) if isinstance(event, kind)][
            -1
        ]
        changed = tuple(replace(each, **changes) if each is event else each for each in batch.events)
        return [EventBatch(each.seq, each.ts, changed) if each is batch else each for each in self.batches]


def _events(batches: Sequence[EventBatch]) -> Iterator[tuple[EventBatch, Any]]:
    return ((batch, event) for batch in batches for event in batch.events)


def readers(log: Path, request: str, out: Path) -> dict[str, tuple[Any, ...]]:
    """The commands that fold a whole log, or what of it routers and dashboards see."""
    return {
        "audit": ("audit", log),
        "explain": ("explain", log, "--request", request),
        "export": ("export", log, "--to", "jsonl", "-o", out / "tables"),
        "report": ("report", log, "-o", out / "report.html"),
        "curve": ("curve", log),
        "match": ("match", log, "--request", request),
        "whatif": ("whatif", log, "--policy", "lru", "--no-bound", "--jobs", "1"),
        "verify": ("log", "verify", log),
        "events": ("events", log, "--json"),
        "publish": publishing(log, out, "lines.jsonl?tokens=1", "dicts.jsonl?format=trtllm"),
    }


def publishing(log: Path, out: Path, *files: str) -> tuple[Any, ...]:
    """What publishes a log, as far as it goes, to files."""
    sinks = [word for file in files for word in ("--sink", f"file:{out}/{file}")]
    return ("publish", log, "--once", "--state", out, *sinks)


FOLDS = ("audit", "explain", "export", "report", "curve", "whatif")
"""They read all of a log, and so must refuse what `kvcache replay` refuses. What was asked for may not be in it."""


def check(kvcache: Kvcache, log: Path, request: str, out: Path, names: Sequence[str] | None = None) -> None:
    """Have the log read by commands: none raises, and none accepts what `kvcache replay` refuses."""
    refused = kvcache("-q", "replay", log).code != 0
    for name, command in readers(log, request, out).items():
        if names is not None and name not in names:
            continue
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        done = kvcache("-q", *command)
        assert done.code in (0, 1, 2), (name, done)
        assert done.code != 1 or any(words in done.err for words in REFUSALS), (name, done)
        assert not (refused and name in FOLDS and done.code == 0), (name, done)


@pytest.mark.parametrize("seed", seeds(range(30), quick=1))
def test_changed_events_are_refused_or_understood(kvcache: Kvcache, tmp_path: Path, seed: int) -> None:
    """Whatever an event says, no command fails but in words, and none accepts what replay refuses."""
    log, rng = Log.of(seed, tmp_path / "whole"), random.Random(seed)
    for _ in range(3):
        written = log.write(tmp_path / "log", inconsistent.mutated(rng, log.batches))
        check(
            kvcache, written, log.request, tmp_path / "out", rng.sample([*readers(written, "", tmp_path)], 3)
        )


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 112))
def test_many_changed_events_are_refused_or_understood(kvcache: Kvcache, tmp_path: Path, seed: int) -> None:
    """The same of more logs, each changed in more ways, and by all commands."""
    log, rng = Log.of(seed, tmp_path / "whole"), random.Random(seed)
    for _ in range(25):
        written = log.write(tmp_path / "log", inconsistent.mutated(rng, log.batches))
        check(kvcache, written, log.request, tmp_path / "out")


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log.of(1, tmp_path / "whole")


@pytest.mark.parametrize("command", ["audit", "explain", "export", "report", "curve", "publish"])
def test_an_unknown_sequence_is_refused(kvcache: Kvcache, tmp_path: Path, log: Log, command: str) -> None:
    """Tokens of a sequence that does not run are refused in the words of replay, which name the batch."""
    handles = (2**40).to_bytes(8, "little")
    written = log.write(
        tmp_path / "log", log.with_event(TokensAppended, handles=handles, counts=b"", tokens=bytes(4))
    )
    out = tmp_path / "out"
    out.mkdir()
    replayed = kvcache("-q", "replay", written)
    done = kvcache("-q", *readers(written, log.request, out)[command])
    assert (replayed.code, done.code, done.err) == (1, 1, replayed.err)
    assert "does not fit the batches before it" in done.err


@pytest.mark.parametrize("command", ["audit", "explain", "export", "curve", "publish"])
@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        (BlocksMoved, {"to_slots": b""}, "the numbers of source and target blocks differ"),
        (BlocksStored, {"priority": 1 << 32}, "priority out of range"),
    ],
)
def test_blocks_that_cannot_be_are_refused_by_all(
    kvcache: Kvcache, tmp_path: Path, kind: type, changes: dict[str, Any], words: str, command: str
) -> None:
    """What only a fingerprint, or only a column of numbers, could not take is refused where it is said."""
    log, out = Log.of(0, tmp_path / "whole"), tmp_path / "out"
    written = log.write(tmp_path / "log", log.with_event(kind, **changes))
    out.mkdir()
    replayed = kvcache("-q", "replay", written)
    done = kvcache("-q", *readers(written, log.request, out)[command])
    assert (replayed.code, done.code, done.err) == (1, 1, replayed.err)
    assert words in done.err


@pytest.mark.parametrize("command", ["audit", "export", "whatif", "curve", "report", "publish"])
def test_declared_sizes_are_bounded(
    kvcache: Kvcache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """A cache whose blocks no machine can keep book of is refused before anything of its size is made."""
    monkeypatch.setattr("kvcache.replay.free_bytes", lambda: 1 << 27)
    monkeypatch.setattr("kvcache.audit.history.Window", _never)
    log = Log.of(0, tmp_path / "whole")
    log.batches = log.batches[:1]
    groups = next(event for _, event in _events(log.batches) if isinstance(event, CacheCreated)).groups
    large = tuple(replace(group, num_blocks=(2**30, 2**30)) for group in groups)
    written = log.write(tmp_path / "log", log.with_event(CacheCreated, groups=large))
    out = tmp_path / "out"
    out.mkdir()
    done = kvcache("-q", *readers(written, log.request, out)[command])
    assert (done.code, "bytes of memory" in done.err) == (2, True), done


def _never(*_: object) -> None:
    raise AssertionError("columns are made of it")


@pytest.mark.parametrize("file", ["lines.jsonl", "dicts.jsonl?format=trtllm"])
@pytest.mark.parametrize("lack", ["epoch", "cache", "events"])
def test_publish_ends_where_no_epoch_begins(
    kvcache: Kvcache, tmp_path: Path, log: Log, lack: str, file: str
) -> None:
    """A log whose first batch is no beginning is refused; it is not waited for."""
    first = log.batches[0]
    kind = {"epoch": EpochStarted, "cache": CacheCreated, "events": object}[lack]
    kept = tuple(event for event in first.events if not isinstance(event, kind))
    written = log.write(tmp_path / "log", [EventBatch(first.seq, first.ts, kept)])
    (tmp_path / "out").mkdir()
    done = kvcache("-q", *publishing(written, tmp_path / "out", file))
    assert (done.code, "batch 0 does not fit" in done.err) == (1, True), done


def test_publish_once_ends_with_an_empty_log(kvcache: Kvcache, tmp_path: Path, log: Log) -> None:
    """There is nothing to publish of a log whose first batch is not written yet."""
    written = log.write(tmp_path / "log", log.batches[:1])
    [segment] = written.iterdir()
    segment.write_bytes(segment.read_bytes()[:64])
    (tmp_path / "out").mkdir()
    assert kvcache("-q", *publishing(written, tmp_path / "out", "lines.jsonl")).code == 0


def test_a_fleet_names_the_log_that_is_wrong(kvcache: Kvcache, tmp_path: Path, log: Log) -> None:
    """Of several workers' logs the error says which one does not fit."""
    fleet = tmp_path / "fleet"
    fleet.mkdir()
    log.write(fleet / "good", log.batches)
    log.write(fleet / "wrong", log.with_event(TokensAppended, handles=bytes(8), counts=b"", tokens=bytes(4)))
    done = kvcache("-q", "audit", fleet, "--jobs", "1")
    assert (done.code, f"{fleet / 'wrong'}: batch " in done.err) == (1, True), done


def test_sinks_that_do_not_fold_are_kept_from_impossible_events(
    kvcache: Kvcache, tmp_path: Path, log: Log
) -> None:
    """An event that no state allows ends the command: a sink that fails with it would be offered it for ever."""
    written = log.write(
        tmp_path / "log", log.with_event(SequenceAdded, reused_primary=(), reused_secondary=())
    )
    (tmp_path / "out").mkdir()
    done = kvcache("-q", *publishing(written, tmp_path / "out", "lines.jsonl"))
    assert (done.code, "impossible number of reused tokens" in done.err) == (1, True), done


def test_an_epoch_that_no_segment_begins_is_refused(kvcache: Kvcache, tmp_path: Path, log: Log) -> None:
    """Where another cache begins in the middle of a segment, a sink would be made anew for ever."""
    log.epochs = log.epochs[:1]
    first, last = log.batches[0], log.batches[-1]
    events = tuple(
        replace(event, tokens_per_block=1 << 20) if isinstance(event, CacheCreated) else event
        for event in first.events
    )
    written = log.write(tmp_path / "log", [*log.batches[:-1], EventBatch(last.seq, last.ts, events)])
    (tmp_path / "out").mkdir()
    done = kvcache("-q", *publishing(written, tmp_path / "out", "lines.jsonl"))
    assert (done.code, f"batch {last.seq} does not fit" in done.err) == (1, True), done


@pytest.mark.parametrize("command", ["replay", "audit", "verify"])
def test_an_unknown_worker_is_refused(kvcache: Kvcache, tmp_path: Path, command: str) -> None:
    """In a log of published events, blocks of a worker that was never seen are the log's fault."""
    started = EpochStarted(
        epoch=0,
        log_id=LOG_ID,
        previous_epoch=None,
        previous_last_seq=None,
        clean=True,
        tokens_recorded=True,
        software="",
    )
    begun, seen = FeedStarted(endpoints=("a",)), WorkerSeen(worker=0, source="a", topic="", rank=0)
    unknown = EventBatch(1, 1, (FeedRemoved(worker=7, block_hashes=(1,), medium=None),))
    batches = [EventBatch(0, 0, (started, begun, seen)), unknown]
    log = inconsistent.write_frames(tmp_path / "log", batches, [0])
    commands = {"replay": ("replay", log), "audit": ("audit", log), "verify": ("log", "verify", log)}
    done = kvcache("-q", *commands[command])
    assert (done.code, "batch 1 does not fit" in done.err) == (1, True), done


@pytest.mark.parametrize("more", [b"\x00\x00", b"\x05"])
def test_further_fields_of_an_engine_that_are_none_are_refused(
    kvcache: Kvcache, tmp_path: Path, more: bytes
) -> None:
    """What engines told is published without tokens in its further fields, which must be fields for that."""
    with Publisher() as publisher, Tap([Endpoint(publisher.endpoint)], tmp_path / "taps") as tap:
        publisher.wait_subscribed()
        publisher.send(0, reported(stored(1)), b"kv@a@m")
        work_until(tap, lambda: tap.recorder.batches == 1)
    batches = list(LogReader(tmp_path / "taps", kind=None))
    log, out = Log(batches, inconsistent.beginnings(batches), ""), tmp_path / "out"
    written = log.write(tmp_path / "log", log.with_event(FeedStored, more=more))
    out.mkdir()
    done = kvcache("-q", *publishing(written, out, "lines.jsonl"))
    assert (done.code, "does not fit the batches before it" in done.err) == (1, True), done
