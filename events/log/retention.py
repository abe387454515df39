"""How much of a log is kept: which segments may go, and removing them.

A log is cut only where it has a snapshot: the oldest segment that is kept stands right behind one. Segments go oldest
first, each for good before the next, and snapshots that nothing stands behind any longer go last. So wherever that is
interrupted, what is left is a log: all of what was to be kept, and perhaps some more.

The newest segment with a batch in it is always kept: it tells a writer where the log goes on.

Limits are those of what is kept, the segment that is being written counted as large as the largest, and time by the
log's own clock: the age of a segment is how much later than its last batch the newest segment begins. That clock never
goes back: where the engine's was set back, it stands still up to the next segment. Leases (`events.log.leases`) keep
segments beyond the limits, until there is twice as much as these allow.
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
    """How much of a log is to be kept; None: no limit."""

    bytes: int | None = None
    """Of segments and snapshots."""
    seconds: float | None = None
    """Between a segment's last batch and the newest segment's first one."""
    segments: int | None = None

    def __bool__(self) -> bool:
        return any(each is not None for each in (self.bytes, self.seconds, self.segments))

    def doubled(self) -> Limits:
        """Twice as much."""
        size, seconds, segments = self.bytes, self.seconds, self.segments
        return Limits(size and 2 * size, seconds and 2 * seconds, segments and 2 * segments)


@dataclass(frozen=True)
class Part:
    """A segment, as retention sees it."""

    path: Path
    first: int
    """Its first batch."""
    bytes: int
    ts: int
    """When its first batch was made, nanoseconds since 1970."""
    is_compressed: bool


@dataclass(frozen=True)
class RemovedParts:
    """What has been removed."""

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
        """The first batch that is to be kept by these limits and all leases; 0: everything is."""
        if not self.parts:
            return 0
        floor = leased(self._directory)
        cut = self._cut(limits)
        if floor is not None:
            within = sum(part.first <= floor for part in self.parts) - 1
            cut = max(min(cut, within), self._cut(limits.doubled()))
        return self.parts[cut].first if cut > 0 else 0

    def has_snapshot_before(self, first: int) -> bool:
        """Whether one stands right before the segment that begins with this batch."""
        wanted = sum(part.first < first for part in self.parts)
        return any(self._before(each) == wanted for each in self.snapshots)

    def unmarked_bytes(self) -> int:
        """Bytes of complete segments behind the newest snapshot."""
        newest = self.snapshots[-1].seq if self.snapshots else -1
        return sum(part.bytes for part in self.parts[:-1] if part.first > newest)

    def remove(self, first: int) -> RemovedParts:
        """Remove what is before batch `first`, up to a snapshot. Raises OSError."""
        wanted = sum(part.first < first for part in self.parts)
        fitting = (
            each for each in self.snapshots if wanted and wanted <= self._before(each) < len(self.parts)
        )
        for snapshot, _ in readable(fitting):
            return self._remove(self.parts[: self._before(snapshot)])
        # What an interrupted removal has left.
        old = self.discard_old_snapshots(self.parts) if self.parts else []
        return RemovedParts(0, len(old), sum(old))

    def _before(self, snapshot: Snapshot) -> int:
        """How many segments stand before it."""
        return sum(part.first <= snapshot.seq for part in self.parts)

    def _remove(self, parts: Sequence[Part]) -> RemovedParts:
        size = 0
        for part in parts:
            remove_segment(part.path)
            # The next one only when this one is gone for good, or a crash could leave a hole.
            sync_directory(self._directory)
            size += part.bytes
        old = self.discard_old_snapshots(self.parts[len(parts) :])
        return RemovedParts(len(parts), len(old), size + sum(old))

    def discard_old_snapshots(self, parts: Sequence[Part]) -> list[int]:
        """Remove all but the last one of those before these segments; returns their sizes. Raises OSError."""
        before = [path for path in snapshot_paths(self._directory) if first_seq(path) < parts[0].first]
        sizes = []
        for path in before[:-1]:
            sizes.append(path.stat().st_size)
            path.unlink(missing_ok=True)
        if sizes:
            sync_directory(self._directory)
        return sizes

    def _cut(self, limits: Limits) -> int:
        """How many of the oldest segments are to go."""
        cut, most = 0, len(self.parts) - 1
        while cut < most and self._exceeds(cut, limits):
            cut += 1
        return cut

    def _exceeds(self, cut: int, limits: Limits) -> bool:
        """Whether the segments from this one on are more than allowed."""
        kept = self.parts[cut:]
        if limits.segments is not None and len(kept) > limits.segments:
            return True
        if limits.seconds is not None:
            # A clock that went back has not moved.
            elapsed = sum(max(behind.ts - part.ts, 0) for part, behind in pairwise(kept[1:]))
            if elapsed > limits.seconds * _NS:
                return True
        return limits.bytes is not None and self._bytes(kept) > limits.bytes

    def _bytes(self, kept: Sequence[Part]) -> int:
        largest = max(part.bytes for part in self.parts)
        sizes = [each.size for each in self.snapshots if each.seq >= kept[0].first]
        before = self.snapshots[-1].size if self.snapshots else 0  # that which stands before the first one
        return sum(part.bytes for part in kept[:-1]) + largest + sum(sizes) + before


def _parts(directory: Path) -> Iterator[Part]:
    """All segments that hold a batch. One that was just begun and lost its first one is no place to go on from."""
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
