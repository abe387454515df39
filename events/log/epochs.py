"""Where in a log a fold can begin: the first batch of an epoch creates the cache and holds its whole state.

So does a snapshot, which has the number of the last batch before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from events.errors import LogDamaged, LogOfOtherKind, LogTooNew
from events.log.frames import Chain, SegmentHeader
from events.log.reader import Kind, LogReader
from events.log.segments import Segment, first_seq, segment_paths
from events.log.snapshots import readable, snapshots
from events.types import FEED_EVENTS, EpochStarted, EventBatch


@dataclass(frozen=True)
class Beginning:
    """The beginning of an epoch."""

    log_id: bytes
    epoch: int
    seq: int
    """Of its first batch, which may not be written yet."""
    is_snapshot: bool = False


def beginnings(directory: Path) -> list[Beginning]:
    """Of all epochs whose first segment is there, and all snapshots, oldest first. Raises LogDamaged, LogTooNew."""
    oldest = segment_paths(directory)[:1]
    found = [
        Beginning(each.header.log_id, each.header.epoch, each.seq, True) for each in snapshots(directory)
    ]
    previous: SegmentHeader | None = None
    for header in _headers(directory):
        begins = header.number == 0 if previous is None else header.epoch > previous.epoch
        # Where segments were removed, only its first batch tells what a segment begins with.
        if begins or (previous is None and _begins_epoch(directory, header.base_seq)):
            found.append(Beginning(header.log_id, header.epoch, header.base_seq))
        previous = header
    if segment_paths(directory)[:1] != oldest:
        return beginnings(directory)  # What the log begins with was removed meanwhile.
    # Of an epoch whose first batches were taken back by a crash, the numbers are used again by the next one.
    return sorted(found, key=lambda each: (each.epoch, each.seq))


def has_segments(directory: Path) -> bool:
    """Whether anything is written that can be read."""
    return next(_headers(directory), None) is not None


def first_batch(directory: Path, beginning: Beginning) -> EventBatch | None:
    """What is there of it, whatever that says; None: it is not written yet, or not readable."""
    if not beginning.is_snapshot:
        return _batch(directory, beginning.seq)
    found = (each for each in snapshots(directory, at_most=beginning.seq, newest_first=True))
    snapshot, batch = next(readable(found), (None, None))
    return batch if snapshot is not None and snapshot.seq == beginning.seq else None


def _batch(directory: Path, seq: int) -> EventBatch | None:
    batch = next(iter(LogReader(directory, start=seq, kind=None)), None)
    return batch if batch is not None and batch.seq == seq else None


def _begins_epoch(directory: Path, seq: int) -> bool:
    batch = _batch(directory, seq)
    return batch is not None and isinstance(next(iter(batch.events), None), EpochStarted)


def kind_of(directory: Path) -> Kind | None:
    """What a log is of, by one of its batches; None: there is none. Raises as `LogReader` does."""
    # The newest segment: there a batch with the whole state is the exception.
    for start in [*reversed([first_seq(path) for path in segment_paths(directory)])] or [0]:
        batch = next(iter(LogReader(directory, start=start, kind=None)), None)
        if batch is not None:
            return "feed" if any(isinstance(event, FEED_EVENTS) for event in batch.events) else "cache"
    return None


def refuse_other_kind(directory: Path, kind: Kind) -> None:
    """Raise LogOfOtherKind if there is a log of another kind; one whose beginning cannot be read is let pass."""
    with suppress(LogDamaged, LogTooNew):
        found = kind_of(directory)
        if found not in (None, kind):
            raise LogOfOtherKind(directory, found)


def _headers(directory: Path) -> Iterator[SegmentHeader]:
    for path in segment_paths(directory):
        # One that is gone, or cut short, is being put aside by recovery.
        with suppress(FileNotFoundError), Segment(path) as segment:
            header = segment.header()
            if header is not None:
                yield header


def next_epoch(
    chain: Chain, new_id: bytes, lost: bool, *, tokens_recorded: bool, software: str
) -> EpochStarted:
    """Let `chain`, where a log ends, be that with which its next epoch begins; returns what that begins with.

    A log without segments gets `new_id`. `lost`: whether something was cut off at its end.
    """
    previous = None
    if chain.log_id is None:
        chain.log_id = new_id
    else:
        previous = chain.epoch
        chain.epoch += 1
    return EpochStarted(
        epoch=chain.epoch,
        log_id=chain.log_id,
        previous_epoch=previous,
        previous_last_seq=None if previous is None else chain.seq - 1,
        clean=not lost and (previous is None or chain.closed),
        tokens_recorded=tokens_recorded,
        software=software,
    )
