"""The epoch that a batch belongs to: what its sinks must know of the cache, and where reading begins."""

from __future__ import annotations

import os
import zlib
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec

from events.errors import NoRegularFile
from events.files.safe import check_directory, make_private, open_own
from events.log.durable import Lock, LockHeld, replace_file, take_lock
from events.log.reader import Beginning, Kind, LogHead, beginnings, first_batch, has_segments
from events.types import CacheCreated, EpochStarted, EventBatch, FeedStarted
from kvcache.publish.errors import BeginningRemoved
from kvcache.record.outputs import ReplayedState
from kvcache.replay import Unreplayable
from sinks import SinkContext, SinkError


class _Model(msgspec.Struct, frozen=True):
    """What is looked at of the settings."""

    model: str = ""


@dataclass(frozen=True)
class Epoch:
    """What the first batch of an epoch says."""

    log_id: bytes
    number: int
    has_tokens: bool
    key_bytes: int
    tokens_per_block: int
    model: str
    kind: Kind = "cache"

    @classmethod
    def of(cls, batch: EventBatch) -> Epoch | None:
        """The epoch that begins with this batch; None: it begins none. Raises `Unreplayable` if no cache does."""
        started = batch.events[0] if batch.events else None
        if not isinstance(started, EpochStarted):
            return None
        if any(isinstance(event, FeedStarted) for event in batch.events):
            return cls(started.log_id, started.epoch, started.tokens_recorded, 0, 1, "", "feed")
        created = next((event for event in batch.events if isinstance(event, CacheCreated)), None)
        if created is None:
            raise Unreplayable(batch.seq, "an epoch begins without a cache")
        settings = _Model()
        with suppress(msgspec.DecodeError):
            settings = msgspec.json.decode(created.config, type=_Model)
        return cls(
            started.log_id,
            started.epoch,
            started.tokens_recorded,
            created.key_bytes,
            created.tokens_per_block,
            settings.model,
        )

    def context(self, state_dir: Path) -> SinkContext:
        """For the sinks that get this epoch's batches."""
        return SinkContext(
            self.key_bytes, self.tokens_per_block, self.model, state_dir, kind=self.kind, fold=ReplayedState
        )

    def suits(self, other: Epoch) -> bool:
        """Whether sinks that were made for the other epoch understand this one."""
        return (self.key_bytes, self.tokens_per_block, self.model, self.kind) == (
            other.key_bytes,
            other.tokens_per_block,
            other.model,
            other.kind,
        )


@dataclass(frozen=True)
class Start:
    """Where reading begins."""

    epoch: Epoch
    seq: int
    """The first batch to be read."""
    removed: int
    """So many batches before it are not there any more."""
    is_snapshot: bool = False
    """Whether reading begins with the snapshot of this batch."""


def last_epoch(log: Path, *, counts: bool) -> Start | None:
    """Where a fold begins: with the last epoch; None: its first batch is not written yet.

    One that `counts` begins as far back in the epoch as the log goes; for others its newest snapshot will do.
    Raises BeginningRemoved, and `Unreplayable` for a log in which an epoch does not begin as one.
    """
    found = _beginnings(log)
    last = [each for each in found if each.epoch == found[-1].epoch]
    for beginning in last if counts else reversed(last):
        start = _start(log, beginning, beginning.seq)
        if start is not None:
            return replace(start, is_snapshot=beginning.is_snapshot)
        if not beginning.is_snapshot:
            break  # A damaged snapshot is passed over; this will be written soon.
    return None


def behind(log: Path, position: Position | None) -> Start | None:
    """Where a sink goes on that has had all up to `position`; None, and raises, as above."""
    found = _beginnings(log)
    if not found:
        return None
    wanted = 0
    if position is not None and position.log_id == found[0].log_id.hex():
        later = [each.seq for each in found if each.epoch > position.epoch]
        wanted = min([position.seq + 1, *later])
    before = [each for each in found if each.seq <= wanted]
    for beginning in reversed(before or found[:1]):
        start = _start(log, beginning, wanted)
        if start is not None or not beginning.is_snapshot:
            return start
    return None


def is_ahead(log: Path, position: Position) -> bool:
    """Whether a sink has had what the log does not hold: a power cut took it back, or the log is an old copy.

    The writer's next epoch begins where the log ends, and then the sink goes on with that.
    """
    reader = LogHead(log)
    try:
        head = reader.look()
    finally:
        reader.close()
    if head is None or head.log_id.hex() != position.log_id:
        return False
    return position.epoch > head.epoch or (position.epoch == head.epoch and position.seq > head.seq)


def _start(log: Path, beginning: Beginning, wanted: int) -> Start | None:
    batch = first_batch(log, beginning)
    if batch is None:
        return None
    epoch = Epoch.of(batch)
    if epoch is None:
        raise Unreplayable(batch.seq, "it does not begin with the epoch that it begins")
    if beginning.is_snapshot:
        # What is gone before the oldest one the reader itself tells, with the state.
        return Start(epoch, wanted, 0)
    return Start(epoch, max(wanted, beginning.seq), max(0, beginning.seq - wanted))


def _beginnings(log: Path) -> list[Beginning]:
    found = beginnings(log)
    if not found and has_segments(log):
        raise BeginningRemoved(log)
    return found


_NAME_CHARACTERS = 60
_MOST_BYTES = 1 << 20
_FORM = 1


class Position(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A place in a log: everything up to batch `seq` was taken."""

    log_id: str
    """In hex: numbers mean nothing in another log."""
    epoch: Annotated[int, msgspec.Meta(ge=0)]
    """That of the batch: where a crash took batches back, the next epoch uses their numbers again."""
    seq: Annotated[int, msgspec.Meta(ge=-1)]
    """-1: none."""


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file holds."""

    publish: int
    sink: str
    position: Position


@dataclass
class PositionFile:
    """The file of one sink in `directory`; to be opened before anything else, by one process at a time."""

    directory: Path
    sink: str
    """The URL without options and login."""

    def __post_init__(self) -> None:
        plain = "".join(char if char.isalnum() or char in ".-" else "_" for char in self.sink)
        # Two paths may be spelled alike, or be cut to the same.
        name = f"publish-{plain[:_NAME_CHARACTERS]}-{zlib.crc32(self.sink.encode()):08x}.json"
        self.path = self.directory / name
        self._lock: Lock | None = None

    @property
    def is_open(self) -> bool:
        """Whether it is ours."""
        return self._lock is not None

    def open(self) -> Position | None:
        """What it says; None: nothing yet. Raises SinkError if it is damaged or in use, UnsafeFile, OSError."""
        make_private(self.directory)
        check_directory(self.directory)
        lock = self.path.with_name(self.path.name + ".lock")
        try:
            self._lock = take_lock(lock)
        except LockHeld as held:
            raise SinkError(
                f"{self.sink} is served by {held.holder} already: stop that one, or give another --state"
            ) from None
        except NoRegularFile:
            raise SinkError(f"{lock} is no regular file: remove it, or give another --state") from None
        try:
            return self._read()
        except BaseException:
            self.close()
            raise

    def save(self, position: Position) -> None:
        """Replace what it says, durably. Raises UnsafeFile, OSError."""
        replace_file(self.path, msgspec.json.encode(_Content(_FORM, self.sink, position)) + b"\n")

    def close(self) -> None:
        """Let others have it."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.give_back()

    def _read(self) -> Position | None:
        try:
            with os.fdopen(open_own(self.path, os.O_RDONLY), "rb") as file:
                content = msgspec.json.decode(file.read(_MOST_BYTES), type=_Content)
        except FileNotFoundError:
            return None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            reason = "restore it, or remove it: the sink gets the whole log again then"
            raise SinkError(
                f"{self.path} is damaged, so nobody knows what the sink has had: {reason}"
            ) from None
        return content.position
