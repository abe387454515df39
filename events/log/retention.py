"""Retention of a log: selection and removal of old segments.

A log is cut only at a snapshot: the oldest segment kept comes right after one. Segments are removed oldest first, each
durably before the next, and snapshots without a segment after them last. So wherever that is interrupted, the rest is a
log: all that was to be kept, and perhaps some more.

The newest segment with a batch in it is always kept: it is where a writer continues the log.

Limits are of the part kept, with the segment being written counted as large as the largest, and time by the log's own
clock: the age of a segment is the time from its last batch to the newest segment's beginning. That clock never goes
back: if the engine's was set back, it stands still up to the next segment. Leases (`events.log.leases`) keep segments
beyond the limits, until there is twice as much as these allow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from events.log.durable import sync_directory
from events.log.leases import leased
from events.log.reader import stamp_of
from events.log.segments import Frame, Segment, first_seq, remove_segment, segment_paths
from events.log.snapshots import Snapshot, readable, snapshot_paths, snapshots

_NS = 10**9


@dataclass(frozen=True)
class Limits:
    """Limits of the part of a log that is kept; None: no limit."""

    bytes: int | None = None
    """Bytes of segments and snapshots."""
    seconds: float | None = None
    """Time between a segment's last batch and the newest segment's first one."""
    segments: int | None = None

    def __bool__(self) -> bool:
        return any(each is not None for each in (self.bytes, self.seconds, self.segments))

    def doubled(self) -> Limits:
        """Return twice these limits."""
        size, seconds, segments = self.bytes, self.seconds, self.segments
        return Limits(size and 2 * size, seconds and 2 * seconds, segments and 2 * segments)


@dataclass(frozen=True)
class Part:
    """A segment, as retention sees it."""

    path: Path
    first: int
    """The number of its first batch."""
    bytes: int
    ts: int
    """Time of its first batch, nanoseconds since 1970."""
    is_compressed: bool


@dataclass(frozen=True)
class RemovedParts:
    """The removed part of a log."""

    segments: int
    snapshots: int
    bytes: int


class LogParts:
    """A log directory's segments and snapshots. Reading them raises LogDamaged, LogTooNew, OSError."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.parts = list(_parts(directory))
        self.snapshots = list(snapshots(directory))

    def wanted(self, limits: Limits) -> int:
        """Return the first batch to be kept by these limits and all leases; 0: keep everything."""
        if not self.parts:
            return 0
        floor = leased(self._directory)
        cut = self._cut(limits)
        if floor is not None:
            within = sum(part.first <= floor for part in self.parts) - 1
            cut = max(min(cut, within), self._cut(limits.doubled()))
        return self.parts[cut].first if cut > 0 else 0

    def has_snapshot_before(self, first: int) -> bool:
        """Return True if a snapshot is right before the segment that begins with this batch."""
        wanted = sum(part.first < first for part in self.parts)
        return any(self._before(each) == wanted for each in self.snapshots)

    def unmarked_bytes(self) -> int:
        """Return the bytes of complete segments after the newest snapshot."""
        newest = self.snapshots[-1].seq if self.snapshots else -1
        return sum(part.bytes for part in self.parts[:-1] if part.first > newest)

    def remove(self, first: int) -> RemovedParts:
        """Remove everything before batch `first`, up to a snapshot. Raises OSError."""
        wanted = sum(part.first < first for part in self.parts)
        fitting = (
            each for each in self.snapshots if wanted and wanted <= self._before(each) < len(self.parts)
        )
        for snapshot, _ in readable(fitting):
            return self._remove(self.parts[: self._before(snapshot)])
        # Remains of an interrupted removal.
        old = self.discard_old_snapshots(self.parts) if self.parts else []
        return RemovedParts(0, len(old), sum(old))

    def _before(self, snapshot: Snapshot) -> int:
        """Return the number of segments before it."""
        return sum(part.first <= snapshot.seq for part in self.parts)

    def _remove(self, parts: Sequence[Part]) -> RemovedParts:
        size = 0
        for part in parts:
            remove_segment(part.path)
            # The next one only once this one is durably removed, or a crash could leave a hole.
            sync_directory(self._directory)
            size += part.bytes
        old = self.discard_old_snapshots(self.parts[len(parts) :])
        return RemovedParts(len(parts), len(old), size + sum(old))

    def discard_old_snapshots(self, parts: Sequence[Part]) -> list[int]:
        """Remove all but the last of the snapshots before these segments; return their sizes. Raises OSError."""
        before = [path for path in snapshot_paths(self._directory) if first_seq(path) < parts[0].first]
        sizes = []
        for path in before[:-1]:
            sizes.append(path.stat().st_size)
            path.unlink(missing_ok=True)
        if sizes:
            sync_directory(self._directory)
        return sizes

    def _cut(self, limits: Limits) -> int:
        """Return the number of oldest segments to remove."""
        cut, most = 0, len(self.parts) - 1
        while cut < most and self._exceeds(cut, limits):
            cut += 1
        return cut

    def _exceeds(self, cut: int, limits: Limits) -> bool:
        """Return True if the segments from this one on exceed the limits."""
        kept = self.parts[cut:]
        if limits.segments is not None and len(kept) > limits.segments:
            return True
        if limits.seconds is not None:
            # A clock that went back is taken as standing still.
            elapsed = sum(max(following.ts - part.ts, 0) for part, following in pairwise(kept[1:]))
            if elapsed > limits.seconds * _NS:
                return True
        return limits.bytes is not None and self._bytes(kept) > limits.bytes

    def _bytes(self, kept: Sequence[Part]) -> int:
        largest = max(part.bytes for part in self.parts)
        sizes = [each.size for each in self.snapshots if each.seq >= kept[0].first]
        before = self.snapshots[-1].size if self.snapshots else 0  # the one before the first one
        return sum(part.bytes for part in kept[:-1]) + largest + sum(sizes) + before


def _parts(directory: Path) -> Iterator[Part]:
    """Yield all segments that hold a batch. A new one that lost its first one is no place to continue from."""
    for path in segment_paths(directory):
        with suppress(FileNotFoundError), Segment(path) as segment:
            header = segment.header()
            if header is None:
                continue
            chain = header.chain()
            chain.enter(header)
            found = segment.read(chain)
            if isinstance(found, Frame) and found.header.events:
                ts, is_compressed = stamp_of(found.payload).ts, header.window_log > 0
                yield Part(path, header.base_seq, segment.size(), ts, is_compressed)
