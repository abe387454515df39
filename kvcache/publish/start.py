"""Epoch of a batch, with what its sinks must know of the cache, and the start of reading."""

from __future__ import annotations

import zlib
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec

from events.log.reader import Beginning, LogHead, beginnings, first_batch, has_segments
from events.types import CacheCreated, EpochStarted, EventBatch, FeedStarted
from kvcache.publish.errors import BeginningRemoved
from kvcache.replay import Replayed, Unreplayable
from sinks import SinkContext
from sinks.state_file import StateFile


class _Model(msgspec.Struct, frozen=True):
    """Settings that are read."""

    model: str = ""


@dataclass(frozen=True)
class Epoch:
    """Description of an epoch by its first batch."""

    log_id: bytes
    number: int
    has_tokens: bool
    context: SinkContext
    """Context of the sinks that get its batches: sinks made for an equal one understand them."""

    @classmethod
    def of(cls, batch: EventBatch) -> Epoch | None:
        """Return the epoch that begins with this batch, or None. Raises `Unreplayable` if it begins without a cache."""
        started = batch.events[0] if batch.events else None
        if not isinstance(started, EpochStarted):
            return None
        if any(isinstance(event, FeedStarted) for event in batch.events):
            context = SinkContext(0, 1, kind="feed", fold=Replayed)
            return cls(started.log_id, started.epoch, started.tokens_recorded, context)
        created = next((event for event in batch.events if isinstance(event, CacheCreated)), None)
        if created is None:
            raise Unreplayable(batch.seq, "an epoch begins without a cache")
        settings = _Model()
        with suppress(msgspec.DecodeError):
            settings = msgspec.json.decode(created.config, type=_Model)
        size, model = created.tokens_per_block, settings.model
        context = SinkContext(created.key_bytes, size, model, fold=Replayed)
        return cls(started.log_id, started.epoch, started.tokens_recorded, context)


@dataclass(frozen=True)
class Start:
    """Start of reading."""

    epoch: Epoch
    seq: int
    """First batch to be read."""
    removed: int
    """Number of batches before it that were removed."""
    is_snapshot: bool = False
    """True if reading begins with the snapshot of this batch."""


def last_epoch(log: Path, *, counts: bool) -> Start | None:
    """Return the start for a fold, the last epoch; None if its first batch is not written yet.

    A fold that `counts` begins as far back in the epoch as the log goes; others begin with its newest snapshot.
    Raises BeginningRemoved, and `Unreplayable` for a log in which an epoch does not begin as one.
    """
    found = _beginnings(log)
    last = [each for each in found if each.epoch == found[-1].epoch]
    for beginning in last if counts else reversed(last):
        start = _start(log, beginning, beginning.seq)
        if start is not None:
            return replace(start, is_snapshot=beginning.is_snapshot)
        if not beginning.is_snapshot:
            break  # A damaged snapshot is skipped; this segment will be written soon.
    return None


def start_after(log: Path, position: Position | None) -> Start | None:
    """Return the start for a sink that has taken all up to `position`. None and errors are as in `last_epoch`."""
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
    """Return True if a sink has taken batches that the log lacks, after a power cut or because the log is an old copy.

    The writer's next epoch begins where the log ends, and the sink continues with that.
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
        raise Unreplayable(batch.seq, "its first epoch is not the one that it should begin with")
    if beginning.is_snapshot:
        # Removals before the oldest snapshot are reported by the reader itself, with the state.
        return Start(epoch, wanted, 0)
    return Start(epoch, max(wanted, beginning.seq), max(0, beginning.seq - wanted))


def _beginnings(log: Path) -> list[Beginning]:
    found = beginnings(log)
    if not found and has_segments(log):
        raise BeginningRemoved(log)
    return found


_NAME_CHARACTERS = 60
_FORM = 1


class Position(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Place in a log: everything up to batch `seq` was taken."""

    log_id: str
    """Log id in hex: batch numbers mean nothing in another log."""
    epoch: Annotated[int, msgspec.Meta(ge=0)]
    """Epoch of the batch: after a crash that lost batches, the next epoch reuses their numbers."""
    seq: Annotated[int, msgspec.Meta(ge=-1)]
    """Batch number; -1: none."""


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of the position file."""

    publish: int
    sink: str
    position: Position


def position_file(directory: Path, sink: str) -> StateFile[Position]:
    """Return the position file of one sink, given its URL without options and login."""
    plain = "".join(char if char.isalnum() or char in ".-" else "_" for char in sink)
    # Two paths may have the same spelling here, or the same truncation.
    name = f"publish-{plain[:_NAME_CHARACTERS]}-{zlib.crc32(sink.encode()):08x}.json"
    return StateFile(
        directory / name,
        lambda position: msgspec.json.encode(_Content(_FORM, sink, position)) + b"\n",
        _decode,
        if_damaged="so the position of the sink is unknown: restore it, or remove it to resend the whole log",
        elsewhere="choose another --state",
    )


def _decode(content: bytes) -> Position | None:
    try:
        return msgspec.json.decode(content, type=_Content).position
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
