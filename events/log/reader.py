"""Reading a log back, batch by batch, with bounded memory.

A log is read up to its end or up to the first thing wrong with it. At the end of the last segment,
writing may have been interrupted: then the tail is *torn*, which is no error, and everything before it is
shown. Anything else that is wrong is damage, and raises. Which of the two it is: a broken frame with an
intact one behind it was whole once, and so was a broken frame in a segment that is not the last. (Damage
to the very last frame cannot be told from an interrupted write of it.)

Where the segments wanted are not there any more, because only so much of the log is kept, reading goes on with the
snapshot before the oldest that is there. Missing segments between others are damage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from events.codec import decode_batch
from events.errors import EventDecodeError, LogDamaged, LogOfOtherKind, LogTooNew, NotALog
from events.log.frames import CLOSED, SEGMENT_HEADER_BYTES, Chain
from events.log.leases import Lease
from events.log.segments import (
    SHORT_HEADER,
    Broken,
    Frame,
    Segment,
    first_seq,
    is_log,
    segment_name,
    segment_paths,
)
from events.log.snapshots import Snapshot, readable, snapshots
from events.packed import NAME_BYTES, are_keys, broken_column
from events.types import FORMAT_VERSION, CacheCreated, EventBatch, FeedStarted

_POLL_SECONDS = 0.05
Kind = Literal["cache", "feed"]
"""What a log is of: a cache, by its own manager; or what engines tell, by `kvcache tap`."""


@dataclass(frozen=True)
class LogEnd:
    """How a log ends.

    `kind` is "clean" after an orderly close, "open" where a writer is at work or stopped between frames, and
    "torn" where it stopped inside one. `path` and `offset` say where the readable part ends.
    """

    kind: Literal["clean", "open", "torn"]
    last_seq: int | None
    """Of the last batch that was read; None if there is none."""
    path: Path
    offset: int
    next_seq: int
    """Greater than last_seq + 1 if the writer lost its last batches and closed without recording a Gap."""
    begins: int | None = None
    """The batch with whose snapshot reading began; None: it began with the log."""


class LogReader:
    """Iterates over the batches of a log directory, from the first one; a writer may be at work in it.

    Iterating raises NotALog, LogDamaged, LogTooNew, LogOutdated, ZstdMissing or LogOfOtherKind; batches before the bad
    place have been yielded by then. With `follow` it waits for more at the end, until `stop()` returns True, which is
    asked every `poll_seconds`. `start` is the number of the first batch wanted: segments before it are not read and may
    be missing; where its own is missing, too, the first batch that is there comes first. Every iteration begins anew.
    `kind` is that of logs which the caller understands (None: any); the beginning of an epoch of another one raises
    LogOfOtherKind.

    A log whose beginning was removed begins with the oldest snapshot: a batch with the whole state, as that with which
    an epoch begins. So does what follows a removed part that should have been read (from `start`, or because the reader
    was too slow): there a `Gap` in that batch says what is missing. With `state_at` reading begins with the newest
    snapshot of that batch or an earlier one, if there is one. `before`: segments from this batch on are not read.
    While it follows, it has a lease (`events.log.leases`) on what comes.
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
    ) -> None:
        self.directory = Path(directory)
        self._follow = follow
        self._stop = stop
        self._start = start
        self._poll_seconds = poll_seconds
        self._kind = kind
        self._state_at = state_at
        self._before = before
        self.snapshot: Snapshot | None = None
        """That with which reading began, if it did not begin with the log."""
        self.chain = Chain()
        """Behind what was read, once an iteration has come to its end."""
        self.closed = False
        """Whether what was read last is the mark of an orderly end: nothing comes but a new epoch."""
        self.bytes_read = 0
        """So far, headers of segments and frames included; without what is before `start`."""
        self._lease: Lease | None = None
        self._place: Segment | None = None
        """Where reading is, or has ended."""
        self._epoch = -1
        """The one that reading begins with. A later one may begin below `start`, if a crash took batches back."""
        self._end: LogEnd | None = None
        self._last_seq: int | None = None
        self._key_bytes = NAME_BYTES
        """Of the cache created last; before any, the least that keys with names have."""

    @property
    def end(self) -> LogEnd:
        """How the log ends. Known after an iteration that ran to its end; RuntimeError before."""
        if self._end is None:
            raise RuntimeError("the log has not been read to its end")
        return self._end if self.snapshot is None else replace(self._end, begins=self.snapshot.seq)

    @property
    def first_ts(self) -> int | None:
        """When the log's first batch was made, if reading began with a snapshot; None: the first one read is that."""
        return None if self.snapshot is None else self.snapshot.about.first_ts

    def bytes_left(self) -> int:
        """Bytes of the files behind what was read so far. For any thread; raises OSError."""
        place, left = self._place, 0
        for path in segment_paths(self.directory):
            ahead = -1 if place is None else first_seq(path) - first_seq(place.path)
            if place is None or ahead >= 0:
                with suppress(FileNotFoundError):
                    left += path.stat().st_size - (place.offset if place and not ahead else 0)
        return max(left, 0)

    def __iter__(self) -> Iterator[EventBatch]:
        return self._leasing() if self._follow else self._batches()

    def _leasing(self) -> Iterator[EventBatch]:
        """All batches; meanwhile nobody is to remove what comes."""
        self._lease = Lease(self.directory)
        try:
            yield from self._batches()
        finally:
            self._lease.end()

    def _batches(self) -> Iterator[EventBatch]:
        if not is_log(self.directory):
            raise NotALog(self.directory)
        self._end = self._last_seq = self.snapshot = None
        self._key_bytes = NAME_BYTES
        self.closed, self.bytes_read = False, 0
        end = LogEnd("open", None, self.directory, 0, 0)
        self._hold(0)
        chain, previous, state = self._beginning()
        while True:
            if state is not None:
                chain, previous = self._go_on_behind(state[0])
                end = self._end_behind(state[0])
                yield self._checked(state[0].path, 0, state[1])
                state = None
            if (path := self._next(previous)) is None:
                break
            ahead = replace(chain)
            try:
                segment = Segment(path)
            except FileNotFoundError:
                continue  # Recovery has put it aside: it held no whole frame. Or it is not kept any longer.
            with segment:
                self._hold(first_seq(path))
                state = self._instead_of_missing(segment, chain)
                header = segment.header()
                misfits = header is not None and chain.refuses_segment(header) is not None
                # What was removed meanwhile may have been listed: what stands there now counts.
                if state is not None or (misfits and self._behind(previous) != path):
                    continue
                end, step = yield from self._segment(segment, ahead)
            if step != "again":
                chain, previous = ahead, path
            if step == "stop":
                break
        self._end, self.chain = end, chain

    def _hold(self, first: int) -> None:
        if self._lease is not None:
            self._lease.hold(first)

    def _beginning(self) -> tuple[Chain, Path | None, tuple[Snapshot, EventBatch] | None]:
        """What the first segment wanted must continue, the one before it, and the snapshot to begin with."""
        if self._state_at is not None:
            newest = snapshots(self.directory, at_most=self._state_at, newest_first=True)
            state = next(readable(newest), None)
            if state is not None:
                self.snapshot = state[0]
                return Chain(), None, state
        paths = segment_paths(self.directory) if self._start is not None else []
        first = max(sum(first_seq(path) <= (self._start or 0) for path in paths) - 1, 0)
        for at in range(first, -1, -1) if paths else ():
            with suppress(FileNotFoundError), Segment(paths[at]) as segment:
                header = segment.header()
                # Cut short, it is being put aside by recovery: what is wanted has not been written yet.
                if header is not None:
                    self._epoch = header.epoch
                    chain = header.chain()
                    if not at and header.base_seq > (self._start or 0):
                        wanted = Chain(seq=self._start or 0)
                        return chain, None, self._instead_of_missing(segment, wanted)
                    return chain, paths[at - 1] if at else None, None
        gone = paths[:1] != segment_paths(self.directory)[:1] if paths else False
        return self._beginning() if gone else (Chain(), None, None)

    def _instead_of_missing(self, segment: Segment, chain: Chain) -> tuple[Snapshot, EventBatch] | None:
        """What stands for the segments before this one that are not kept any longer; None: none are missing."""
        header = segment.header()
        if header is None or header.number <= chain.number:
            return None
        paths = segment_paths(self.directory)
        if paths and first_seq(paths[0]) < first_seq(segment.path):
            return None  # Whoever removes the oldest ones leaves no hole.
        for snapshot, batch in readable(snapshots(self.directory)):
            if snapshot.header.number > chain.number:
                if self._start is None and self._last_seq is None:
                    self.snapshot = snapshot
                    return snapshot, batch
                return snapshot, snapshot.behind_gap(min(chain.seq, snapshot.seq), batch)
        return None

    def _end_behind(self, snapshot: Snapshot) -> LogEnd:
        """How the log ends if nothing follows the snapshot."""
        about, path, size = snapshot.about, self.directory, 0
        for path in segment_paths(self.directory)[-1:]:
            with suppress(FileNotFoundError):
                size = path.stat().st_size
        return LogEnd("clean" if about.closed else "open", snapshot.seq, path, size, about.next_seq)

    def _go_on_behind(self, snapshot: Snapshot) -> tuple[Chain, Path]:
        """What the segment behind it continues, and what comes before that one by name."""
        self._epoch, self.closed = snapshot.header.epoch, snapshot.about.closed
        self.bytes_read += snapshot.size
        return snapshot.chain(), self.directory / segment_name(snapshot.seq)

    def _next(self, previous: Path | None) -> Path | None:
        """The segment after this one (None: the first); following, this waits for it."""
        while (path := self._behind(previous)) is None and self._wait():
            pass
        ends = path is not None and self._before is not None and first_seq(path) >= self._before
        return None if ends else path

    def _behind(self, previous: Path | None) -> Path | None:
        read = -1 if previous is None else first_seq(previous)
        later = [path for path in segment_paths(self.directory) if first_seq(path) > read]
        return later[0] if later else None

    def _wait(self) -> bool:
        """Wait a little for the writer; False if nobody wants to wait on."""
        if not self._follow or self._stop():
            return False
        time.sleep(self._poll_seconds)
        return True

    def _segment(
        self, segment: Segment, chain: Chain
    ) -> Generator[EventBatch, None, tuple[LogEnd, Literal["stop", "next", "again"]]]:
        """Yield the batches of one segment, then say where it ends and what to do next."""
        if not self._enter(segment, chain):
            return LogEnd("torn", self._last_seq, segment.path, 0, chain.seq), "stop"
        self._place, self.bytes_read = segment, self.bytes_read + segment.offset
        looked_again, wanted = False, self._start or 0
        while True:
            found = segment.read(chain)
            if isinstance(found, Frame):
                looked_again = False
                self.closed = chain.closed
                if found.header.seq >= wanted or chain.epoch != self._epoch:
                    # Of a compressed frame, with the last one in it.
                    self.bytes_read += segment.offset - found.offset
                    if not found.header.flags & CLOSED:
                        yield self._batch(segment, found)
                continue
            if segment.renewed():
                continue
            has_successor = self._behind(segment.path) is not None
            is_damaged = found is not None and segment.is_damaged(found, chain, is_last=not has_successor)
            if has_successor or is_damaged:
                # A live writer may have gone on between our two looks, so the first one proves nothing yet.
                if not looked_again:
                    looked_again = True
                elif found is None:
                    return self._end_at(segment, found, chain), "next"
                else:
                    raise LogDamaged(segment.path, found.offset, chain.seq, found.reason)
            elif not self._wait():
                return self._end_at(segment, found, chain), "stop"
            elif segment.offset == SEGMENT_HEADER_BYTES and segment.replaced():
                return self._end_at(segment, found, chain), "again"

    def _enter(self, segment: Segment, chain: Chain) -> bool:
        """Read the header. False if writing it was interrupted."""
        header = segment.header()
        if header is None:
            if self._behind(segment.path) is not None:
                raise LogDamaged(segment.path, 0, chain.seq, SHORT_HEADER)
            return False
        refusal = chain.refuses_segment(header)
        if refusal is not None:
            raise LogDamaged(segment.path, 0, chain.seq, refusal)
        chain.enter(header)
        return True

    def _end_at(self, segment: Segment, found: Broken | None, chain: Chain) -> LogEnd:
        kind: Literal["clean", "open", "torn"] = "clean" if chain.closed else "open"
        how = kind if found is None else "torn"
        return LogEnd(how, self._last_seq, segment.path, segment.offset, chain.seq)

    def _batch(self, segment: Segment, frame: Frame) -> EventBatch:
        header = frame.header
        try:
            batch = decode_batch(frame.payload)
        except EventDecodeError as error:
            raise LogDamaged(segment.path, frame.offset, header.seq, error.reason) from None
        if batch.seq != header.seq or len(batch.events) != header.events:
            raise LogDamaged(segment.path, frame.offset, header.seq, "header and payload disagree")
        return self._checked(segment.path, frame.offset, batch)

    def _checked(self, path: Path, offset: int, batch: EventBatch) -> EventBatch:
        reason = self._what_is_broken(path, batch)
        if reason is not None:
            raise LogDamaged(path, offset, batch.seq, reason)
        self._last_seq = batch.seq
        return batch

    def _what_is_broken(self, path: Path, batch: EventBatch) -> str | None:
        """What no reader of the events could make sense of; None if there is nothing."""
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
