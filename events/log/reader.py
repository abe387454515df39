"""Reading a log back, batch by batch, with bounded memory.

A log is read up to its end or up to the first thing wrong with it. At the end of the last segment, writing may have
been interrupted: then the tail is *torn*, which is no error, and everything before it is shown. Anything else that is
wrong is damage, and raises. Which of the two it is: a broken frame with an intact one after it was whole once, and so
was a broken frame in a segment that is not the last. (Damage to the very last frame cannot be distinguished from an
interrupted write of it.)

If the segments wanted have been removed by retention, reading continues with the snapshot before the oldest one left.
Missing segments between others are damage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from events.codec import decode_batch
from events.errors import EventDecodeError, LogDamaged, LogError, LogOfOtherKind, LogTooNew, NotALog
from events.log.frames import CLOSED, SEGMENT_HEADER_BYTES, Chain, SegmentHeader
from events.log.leases import Lease
from events.log.segments import (
    SHORT_HEADER,
    UNREADABLE,
    Broken,
    Frame,
    Segment,
    first_seq,
    is_log,
    segment_paths,
)
from events.log.snapshots import Snapshot, readable, snapshots
from events.packed import NAME_BYTES, are_keys, broken_column
from events.types import FEED_EVENTS, FORMAT_VERSION, CacheCreated, EpochStarted, EventBatch, FeedStarted

_POLL_SECONDS = 0.05
Kind = Literal["cache", "feed"]
"""Kind of a log: of a cache, by its own manager; or of engines' published events, by `kvcache tap`."""
Step = Literal["stop", "next", "again"]
Item = tuple[Frame | Snapshot, EventBatch | None]
"""A frame with its batch (None: the mark of an orderly end), or a snapshot that replaces segments."""


_BEFORE_ALL = (-1, "")


@dataclass(frozen=True)
class LogEnd:
    """The end of a log.

    `kind` is "clean" after an orderly close, "open" while a writer is at work or after it stopped between frames, and
    "torn" if it stopped inside one. `path` and `offset` are the end of the readable part.
    """

    kind: Literal["clean", "open", "torn"]
    last_seq: int | None
    """The last batch read; None if there is none."""
    path: Path
    offset: int
    next_seq: int
    """Greater than last_seq + 1 if the writer lost its last batches and closed without recording a Gap."""
    begins: int | None = None
    """The batch with the snapshot from which reading began; None: it began with the log."""


class LogReader:
    """Iterates over the batches of a log directory, from the first one; a writer may be at work in it.

    Iterating raises NotALog, LogDamaged, LogTooNew, LogOutdated, ZstdMissing or LogOfOtherKind; batches before the bad
    place have been yielded by then. With `follow` it waits for more at the end, until `stop()`, called every
    `poll_seconds`, returns True. `start` is the number of the first batch wanted: segments before it are not read and
    may be missing; if its own is missing, too, the first batch that is there comes first. Every iteration begins
    anew. `kind` is that of logs which the caller understands (None: any); the beginning of an epoch of another one
    raises LogOfOtherKind.

    A log whose beginning was removed begins with the oldest snapshot: a batch with the whole state, as that with which
    an epoch begins. The same holds after a removed part that should have been read (from `start`, or because the reader
    was too slow): there a `Gap` in that batch names the missing batches. With `state_at` reading begins with the newest
    snapshot of that batch or an earlier one, if there is one. `before`: segments from this batch on are not read. While
    it follows, it has a lease (`events.log.leases`) on batches to come.

    With `damaged`, which is called with each damaged place, nothing is raised for it: reading continues after it, with
    the next whole frame, whatever is missing before that. `places`: the segments to read, in the order of these numbers
    instead of those in their names.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        follow: bool = False,
        stop: Callable[[], bool] = lambda: False,
        start: int | None = None,
        poll_seconds: float = _POLL_SECONDS,
        kind: Kind | None = "cache",
        state_at: int | None = None,
        before: int | None = None,
        damaged: Callable[[LogDamaged], None] | None = None,
        places: Mapping[Path, int] | None = None,
    ) -> None:
        self.directory = Path(directory)
        self._follow = follow
        self._stop = stop
        self._start = start
        self._poll_seconds = poll_seconds
        self._kind = kind
        self._state_at = state_at
        self._before, self._damaged, self._places = before, damaged, places
        self.snapshot: Snapshot | None = None
        """The snapshot from which reading began; None: it began with the log."""
        self.chain = Chain()
        """The end of what was read, once an iteration is complete."""
        self.closed = False
        """True if the mark of an orderly end was read last: only a new epoch can follow."""
        self.bytes_read = 0
        """Bytes read so far, including headers of segments and frames, without those before `start`."""
        self._lease: Lease | None = None
        self._place: Segment | None = None
        """The segment being read, or read last."""
        self.header: SegmentHeader | None = None
        """Header of the segment being read."""
        self._epoch = -1
        """The epoch in which reading begins. A later one may begin below `start`, if a crash took batches back."""
        self._is_stopped = False
        """True if no further batches are waited for."""
        self._end: LogEnd | None = None
        self._reached: LogEnd
        """The end of the log if nothing follows."""
        self._last_seq: int | None = None
        self._key_bytes = NAME_BYTES
        """Key size of the cache created last; before any, the minimum for keys with names."""

    @property
    def end(self) -> LogEnd:
        """The end of the log. Known after a complete iteration; RuntimeError before."""
        if self._end is None:
            raise RuntimeError("the log has not been read to its end")
        return self._end if self.snapshot is None else replace(self._end, begins=self.snapshot.seq)

    @property
    def first_ts(self) -> int | None:
        """Time of the log's first batch, if reading began with a snapshot; None: the first one read is that."""
        return None if self.snapshot is None else self.snapshot.about.first_ts

    def bytes_left(self) -> int:
        """Return the bytes of the files after the part read so far. For any thread; raises OSError."""
        place, left = self._place, 0
        for path in segment_paths(self.directory):
            ahead = -1 if place is None else first_seq(path) - first_seq(place.path)
            if place is None or ahead >= 0:
                with suppress(FileNotFoundError):
                    left += path.stat().st_size - (place.offset if place and not ahead else 0)
        return max(left, 0)

    def __iter__(self) -> Iterator[EventBatch]:
        for _, batch in self.frames():
            if batch is not None:
                yield batch

    def frames(self) -> Iterator[Item]:
        """Iterate over all frames and snapshots."""
        for item in self._leased():
            if item is not None:
                yield item
            elif self._stop():
                self._is_stopped = True
            else:
                time.sleep(self._poll_seconds)

    def live(self) -> Iterator[EventBatch | None]:
        """Iterate over the batches, with None each time all existing ones were read; following, without end."""
        for item in self._leased():
            if item is None or item[1] is not None:
                yield item and item[1]

    def _leased(self) -> Iterator[Item | None]:
        """Yield everything; while following, under a lease, so that nothing to come is removed."""
        if not is_log(self.directory):
            raise NotALog(self.directory)
        self._lease = Lease(self.directory) if self._follow else None
        try:
            yield from self._frames()
        finally:
            if self._lease is not None:
                self._lease.end()

    def _frames(self) -> Iterator[Item | None]:
        self._end = self._last_seq = self.snapshot = None
        self._key_bytes = NAME_BYTES
        self.closed, self.bytes_read, self._is_stopped = False, 0, False
        self._reached = LogEnd("open", None, self.directory, 0, 0)
        self._hold(0)
        chain, previous, state = self._beginning()
        step: Step = "next"
        while step != "stop":
            if state is not None:
                snapshot, batch = state
                chain, previous = self._resume_after(snapshot)
                yield snapshot, self._checked(snapshot.path, 0, batch)
                state = None
            if (path := (yield from self._next(previous))) is None:
                break
            try:
                segment = Segment(path, is_named=self._places is None)
            except FileNotFoundError:
                continue  # Recovery has put it aside: it held no whole frame. Or retention has removed it.
            except (LogDamaged, OSError) as error:
                self._report(error, path, chain)
                previous = self._place_of(path)
                continue
            with segment:
                self._hold(first_seq(path))
                header = self._header_of(segment)
                state = self._instead_of_missing(path, header, chain)
                misfits = header is not None and chain.refuses_segment(header) is not None
                # Segments listed before may be removed by now: the current ones count.
                if state is not None or (misfits and self._segment_after(previous) != path):
                    continue
                ahead = replace(chain)
                step = yield from self._segment(segment, ahead)
            if step != "again":
                chain, previous = ahead, self._place_of(path)
        self._end, self.chain = self._reached, chain

    def _header_of(self, segment: Segment) -> SegmentHeader | None:
        """Return its header; None if it has no whole one and more can be read nevertheless."""
        try:
            return segment.header()
        except (LogDamaged, OSError):
            if self._damaged is None:
                raise
            return None

    def _report(self, error: LogDamaged | OSError, path: Path, chain: Chain, offset: int = 0) -> None:
        """Report damage; raise the error if there is no `damaged`."""
        try:
            if self._damaged is None or (isinstance(error, OSError) and error.errno not in UNREADABLE):
                raise error
            if isinstance(error, OSError):
                error = LogDamaged(path, offset, None, f"it cannot be read: {error.strerror}")
            self._damaged(replace(error, seq=chain.seq if error.seq is None else error.seq))
        finally:
            del error  # With its traceback it would keep itself, and the segment's memory with it.

    def _hold(self, first: int) -> None:
        if self._lease is not None:
            self._lease.hold(first)

    def _beginning(self) -> tuple[Chain, tuple[int, str], tuple[Snapshot, EventBatch] | None]:
        """Return what the first segment wanted must continue, the one before it, and the snapshot to begin with."""
        if self._state_at is not None:
            newest = snapshots(self.directory, at_most=self._state_at, newest_first=True)
            state = next(readable(newest), None)
            if state is not None:
                self.snapshot = state[0]
                return Chain(), _BEFORE_ALL, state
        paths = segment_paths(self.directory) if self._start is not None else []
        first = max(sum(first_seq(path) <= (self._start or 0) for path in paths) - 1, 0)
        for at in range(first, -1, -1) if paths else ():
            with suppress(FileNotFoundError), Segment(paths[at]) as segment:
                header = segment.header()
                # Cut short, it is being put aside by recovery: the batch wanted has not been written yet.
                if header is not None:
                    self._epoch = header.epoch
                    chain = header.chain()
                    if not at and header.base_seq > (self._start or 0):
                        wanted = Chain(seq=self._start or 0)
                        return chain, _BEFORE_ALL, self._instead_of_missing(paths[at], header, wanted)
                    return chain, self._place_of(paths[at - 1]) if at else _BEFORE_ALL, None
        gone = paths[:1] != segment_paths(self.directory)[:1] if paths else False
        return self._beginning() if gone else (Chain(), _BEFORE_ALL, None)

    def _instead_of_missing(
        self, path: Path, header: SegmentHeader | None, chain: Chain
    ) -> tuple[Snapshot, EventBatch] | None:
        """Return the snapshot that replaces the removed segments before this one; None: none are missing."""
        if header is None or header.number <= chain.number:
            return None
        if self._segment_after(_BEFORE_ALL, before=path) is not None:
            return None  # Retention removes the oldest ones and leaves no hole.
        for snapshot, batch in readable(snapshots(self.directory)):
            if snapshot.header.number > chain.number:
                if self._start is None and self._last_seq is None:
                    self.snapshot = snapshot
                    return snapshot, batch
                return snapshot, snapshot.after_gap(min(chain.seq, snapshot.seq), batch)
        return None

    def _resume_after(self, snapshot: Snapshot) -> tuple[Chain, tuple[int, str]]:
        """Return what the segment after it continues, and the place before that one; the log may end there."""
        about, path, size = snapshot.about, self.directory, 0
        for path in segment_paths(self.directory)[-1:]:
            with suppress(FileNotFoundError):
                size = path.stat().st_size
        kind: Literal["clean", "open"] = "clean" if about.closed else "open"
        self._reached = LogEnd(kind, snapshot.seq, path, size, about.next_seq)
        self._epoch, self.closed = snapshot.header.epoch, about.closed
        self.bytes_read += snapshot.size
        return snapshot.chain(), (snapshot.seq + 1, "")

    def _next(self, previous: tuple[int, str]) -> Generator[None, None, Path | None]:
        """Return the segment after this place; following, wait for it."""
        while (path := self._segment_after(previous)) is None and (yield from self._pause()):
            pass
        ends = path is not None and self._before is not None and first_seq(path) >= self._before
        return None if ends else path

    def _place_of(self, path: Path) -> tuple[int, str]:
        """Return a segment's place in the order of the others."""
        return (first_seq(path) if self._places is None else self._places[path]), path.name

    def _segment_after(self, place: tuple[int, str], before: Path | None = None) -> Path | None:
        """Return the first segment after this place, and before that one."""
        paths = segment_paths(self.directory)
        if self._places is not None:
            paths = sorted((path for path in paths if path in self._places), key=self._place_of)
        most = None if before is None else self._place_of(before)
        for path in paths:
            if self._place_of(path) > place:
                return path if most is None or self._place_of(path) < most else None
        return None

    def _pause(self) -> Generator[None, None, bool]:
        """Yield that nothing more is there; return False if the writer is not to be waited for."""
        if self._follow:
            yield
        return self._follow and not self._is_stopped

    def _segment(self, segment: Segment, chain: Chain) -> Generator[Item | None, None, Step]:
        """Yield the items of one segment, then return the next step."""
        entered = False
        try:
            step = self._enter(segment, chain)
            entered = step is None
            return step or (yield from self._in_segment(segment, chain))
        except OSError as error:
            self._report(error, segment.path, chain, segment.offset if entered else 0)
            # Reading continues with the segment after it.
            chain.number += not entered
            chain.after_damage, chain.closed = True, False
            return "next"

    def _in_segment(self, segment: Segment, chain: Chain) -> Generator[Item | None, None, Step]:
        self._place, self.bytes_read = segment, self.bytes_read + segment.offset
        looked_again, wanted = False, self._start or 0
        while True:
            found = segment.read(chain)
            if isinstance(found, Frame):
                looked_again = False
                self.closed = chain.closed
                if found.header.seq >= wanted or chain.epoch != self._epoch:
                    # The end of a compressed frame, with the last one in it.
                    self.bytes_read += segment.offset - found.offset
                    batch = self._batch(segment, found, chain)
                    if batch is not None or found.header.flags & CLOSED:
                        yield found, batch
                continue
            if segment.renewed():
                continue
            has_successor = self._segment_after(self._place_of(segment.path)) is not None
            is_damaged = found is not None and segment.is_damaged(found, chain, is_last=not has_successor)
            if has_successor or is_damaged:
                # A live writer may have gone on between our two looks, so the first one proves nothing yet.
                if not looked_again:
                    looked_again = True
                    continue
                if found is not None:
                    # Not a variable: if it is raised, its traceback would keep this frame, and the bytes read, alive.
                    self._report(
                        LogDamaged(segment.path, found.offset, chain.seq, found.reason), segment.path, chain
                    )
                    if segment.resume_after(found, chain):
                        continue
                return self._ends(segment, None, chain, "next" if has_successor else "stop")
            if not (yield from self._pause()):
                return self._ends(segment, found, chain, "stop")
            if segment.offset == SEGMENT_HEADER_BYTES and segment.replaced():
                return self._ends(segment, found, chain, "again")

    def _enter(self, segment: Segment, chain: Chain) -> Step | None:
        """Read the header; returns what to do instead of reading on."""
        header, after_damage = None, chain.after_damage
        try:
            header = segment.header()
            if header is None:
                if self._segment_after(self._place_of(segment.path)) is None:  # Writing it was interrupted.
                    self._reached = LogEnd("torn", self._last_seq, segment.path, 0, chain.seq)
                    return "stop"
                raise LogDamaged(segment.path, 0, chain.seq, SHORT_HEADER)
            refusal = chain.refuses_segment(header)
            if refusal is not None:
                raise LogDamaged(segment.path, 0, chain.seq, refusal)
        except LogDamaged as error:
            self._report(error, segment.path, chain)
            if header is None and segment.is_headed():
                return "next"  # Its content belongs to another place.
            chain.after_damage = True
            if header is None and (header := self._guessed(segment, chain)) is None:
                chain.number += 1
                return "next"
            is_foreign = chain.log_id not in (None, header.log_id)
            if is_foreign or header.number < chain.number or header.epoch < chain.epoch:
                chain.after_damage = after_damage
                return "next"  # It has been read, or is of another log.
        chain.enter(header)
        self.header = header
        return None

    def _guessed(self, segment: Segment, chain: Chain) -> SegmentHeader | None:
        """Return the most likely header of a segment with a damaged one."""
        log_id = chain.log_id
        for path in segment_paths(self.directory) if log_id is None else ():
            with suppress(LogError, OSError), Segment(path) as other:
                header = other.header()
                log_id = log_id or (header and header.log_id)
        return None if log_id is None else segment.guess(log_id, chain)

    def _ends(self, segment: Segment, found: Broken | None, chain: Chain, step: Step) -> Step:
        """Note where the log may end."""
        kind: Literal["clean", "open"] = "clean" if chain.closed else "open"
        how = kind if found is None else "torn"
        self._reached = LogEnd(how, self._last_seq, segment.path, segment.offset, chain.seq)
        return step

    def _batch(self, segment: Segment, frame: Frame, chain: Chain) -> EventBatch | None:
        """Return a frame's batch; None: it is the mark of an orderly end, or is unreadable, which was reported."""
        header, reason = frame.header, "header and payload disagree"
        if header.flags & CLOSED:
            return None
        try:
            batch = decode_batch(frame.payload)
            if batch.seq == header.seq and len(batch.events) == header.events:
                return self._checked(segment.path, frame.offset, batch)
        except EventDecodeError as error:
            reason = error.reason
        except LogDamaged as error:
            reason = error.reason
        self._report(LogDamaged(segment.path, frame.offset, header.seq, reason), segment.path, chain)
        return None

    def _checked(self, path: Path, offset: int, batch: EventBatch) -> EventBatch:
        reason = self._find_damage(path, batch)
        if reason is not None:
            raise LogDamaged(path, offset, batch.seq, reason)
        self._last_seq = batch.seq
        return batch

    def _find_damage(self, path: Path, batch: EventBatch) -> str | None:
        """Describe a part of the batch that no reader could interpret; None if there is none."""
        for event in batch.events:
            if type(event) is FeedStarted and self._kind == "cache":
                raise LogOfOtherKind(self.directory, "feed")
            if type(event) is CacheCreated:
                if self._kind == "feed":
                    raise LogOfOtherKind(self.directory, "cache")
                if event.format_version > FORMAT_VERSION:
                    raise LogTooNew(path, event.format_version)
                if not are_keys(event.key_bytes):
                    return f"keys cannot have {event.key_bytes} bytes"
                self._key_bytes = event.key_bytes
            elif (reason := broken_column(event, self._key_bytes)) is not None:
                return reason
        return None


class Stamp(msgspec.Struct, array_like=True, frozen=True):
    """The beginning of a batch."""

    seq: int
    ts: int


stamp_of = msgspec.msgpack.Decoder(Stamp).decode


@dataclass(frozen=True)
class Head:
    """The end of a log at one moment."""

    log_id: bytes
    epoch: int
    seq: int
    """The last batch; one less than the first one of a segment that is still empty."""
    ts: int | None
    """Time of that batch, nanoseconds since 1970; None: not read."""
    closed: bool
    """True if the writer closed the log."""


class LogHead:
    """The end of a log, looked up repeatedly; reads new frames only, at first the last segment."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._segment: Segment | None = None
        self._chain = Chain()
        self._seq = -1
        self._ts: int | None = None

    def look(self) -> Head | None:
        """Return the current end; None if there is no segment. A broken frame ends it.

        Raises LogDamaged, LogTooNew, OSError.
        """
        if not is_log(self._directory) or not (paths := segment_paths(self._directory)):
            return None
        segment = self._segment
        if segment is None or segment.path != paths[-1] or (not segment.renewed() and segment.replaced()):
            with suppress(FileNotFoundError):
                self._enter(paths[-1])
        if self._segment is None or self._chain.log_id is None:
            return None
        last = None
        while isinstance(found := self._segment.read(self._chain), Frame):
            last = last if found.header.flags & CLOSED else found
        if last is not None:
            stamp = stamp_of(last.payload)
            self._seq, self._ts = stamp.seq, stamp.ts
        chain = self._chain
        assert chain.log_id is not None
        return Head(chain.log_id, chain.epoch, self._seq, self._ts, chain.closed)

    def close(self) -> None:
        """Close the file."""
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.close()

    def _enter(self, path: Path) -> None:
        segment = Segment(path)
        header = segment.header()
        if header is None:
            segment.close()
            return
        self.close()
        if header.log_id != self._chain.log_id or self._seq != header.base_seq - 1:
            self._seq, self._ts = header.base_seq - 1, None
        self._segment = segment
        self._chain = header.chain()
        self._chain.enter(header)


@dataclass(frozen=True)
class Beginning:
    """The beginning of an epoch."""

    log_id: bytes
    epoch: int
    seq: int
    """Number of the epoch's first batch, which may not be written yet."""
    is_snapshot: bool = False


def beginnings(directory: Path) -> list[Beginning]:
    """Return the beginnings of all epochs with a first segment, and all snapshots, oldest first.

    Raises LogDamaged, LogTooNew.
    """
    oldest = segment_paths(directory)[:1]
    found = [
        Beginning(each.header.log_id, each.header.epoch, each.seq, True) for each in snapshots(directory)
    ]
    previous: SegmentHeader | None = None
    for header in _headers(directory):
        begins = header.number == 0 if previous is None else header.epoch > previous.epoch
        # After removed segments, only a segment's first batch shows how it begins.
        if begins or (previous is None and _begins_epoch(directory, header.base_seq)):
            found.append(Beginning(header.log_id, header.epoch, header.base_seq))
        previous = header
    if segment_paths(directory)[:1] != oldest:
        return beginnings(directory)  # The beginning of the log was removed meanwhile.
    # The batch numbers of an epoch taken back by a crash are used again by the next one.
    return sorted(found, key=lambda each: (each.epoch, each.seq))


def has_segments(directory: Path) -> bool:
    """Return True if anything readable is written."""
    return next(_headers(directory), None) is not None


def first_batch(directory: Path, beginning: Beginning) -> EventBatch | None:
    """Return its first batch, whatever its content; None: not written yet, or not readable."""
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
    """Return the kind of a log, by one of its batches; None: it has none. Raises as `LogReader` does."""
    # The newest segment: there a batch with the whole state is the exception.
    for start in [*reversed([first_seq(path) for path in segment_paths(directory)])] or [0]:
        batch = next(iter(LogReader(directory, start=start, kind=None)), None)
        if batch is not None:
            return "feed" if any(isinstance(event, FEED_EVENTS) for event in batch.events) else "cache"
    return None


def refuse_other_kind(directory: Path, kind: Kind) -> None:
    """Raise LogOfOtherKind if there is a log of another kind; one with an unreadable beginning passes."""
    with suppress(LogDamaged, LogTooNew):
        found = kind_of(directory)
        if found not in (None, kind):
            raise LogOfOtherKind(directory, found)


def _headers(directory: Path) -> Iterator[SegmentHeader]:
    for path in segment_paths(directory):
        # One that is missing, or cut short, is being put aside by recovery.
        with suppress(FileNotFoundError), Segment(path) as segment:
            header = segment.header()
            if header is not None:
                yield header
