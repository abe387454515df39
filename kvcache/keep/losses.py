"""Going on behind lost batches: with one that holds the whole state, which a `Gap` in it says."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from events.log.frames import AFTER_LOSS, CLOSED, FrameHeader
from events.log.snapshots import Snapshot
from events.types import EpochStarted, EventBatch, FeedStarted, Gap, StateExported

REASON = "lost to damage of the log's files"


def begins_epoch(batch: EventBatch) -> bool:
    """Whether a fold can begin with this batch, whatever was before it."""
    return bool(batch.events) and type(batch.events[0]) is EpochStarted


def behind_loss(batch: EventBatch, first: int, last: int) -> EventBatch | None:
    """The batch, saying that those from `first` to `last` are missing before its state; None: it holds no state."""
    events = batch.events
    for at, event in enumerate(events):
        if isinstance(event, Gap):
            wider = replace(event, first_seq=min(first, event.first_seq))
            return replace(batch, events=(*events[:at], wider, *events[at + 1 :]))
    gap = Gap(first_seq=first, last_seq=last, reason=REASON)
    if begins_epoch(batch):
        return replace(batch, events=(events[0], gap, *events[1:]))
    for at, event in enumerate(events):
        if isinstance(event, StateExported | FeedStarted):
            return replace(batch, events=(*events[:at], gap, *events[at:]))
    return None


@dataclass
class Loss:
    """Batches that are missing."""

    first: int
    last: int | None = None
    """None: nothing behind them can be gone on with, so nobody knows how many there were."""
    left_out: list[int] = field(default_factory=list)
    """Those of them that are whole, but of no use without the others."""


class Continuity:
    """Takes what is whole, and leaves out what does not continue it."""

    def __init__(self) -> None:
        self.seq = 0
        """Of the next batch."""
        self._crc = 0
        self._epoch = -1
        """That whose beginning was taken."""
        self.losses: list[Loss] = []

    @property
    def _is_whole(self) -> bool:
        return not self.losses or self.losses[-1].last is not None

    def lose(self) -> None:
        """What comes next is not there; `take` may find that nothing is missing all the same."""
        if self._is_whole:
            self.losses.append(Loss(self.seq))

    def begin(self, snapshot: Snapshot) -> None:
        """Go on with a snapshot, before which nothing that should be there is missing."""
        header = snapshot.header
        self.seq, self._crc, self._epoch = snapshot.about.next_seq, header.previous_crc, header.epoch

    def take(self, frame: FrameHeader, batch: EventBatch | None, epoch: int) -> EventBatch | None:
        """The batch as it goes on here, with a `Gap` where some are missing; None: it does not, or is a mark."""
        if self.continued_by(frame):
            if not self._is_whole:
                self.losses.pop()
        elif batch is None or frame.seq < self.seq:
            return None
        elif frame.seq == self.seq and begins_epoch(batch):
            if not self._is_whole:
                self.losses.pop()  # Only the mark of an end was lost.
        else:
            self.lose()
            batch = self._behind_loss(batch, epoch)
            if batch is None:
                self.losses[-1].left_out.append(frame.seq)
                return None
            self.losses[-1].last = frame.seq - 1
        self.seq, self._crc = frame.seq + (not frame.flags & CLOSED), frame.payload_crc
        self._epoch = epoch
        return batch

    def restore(self, snapshot: Snapshot, state: EventBatch, *, more: bool) -> EventBatch | None:
        """Go on with a snapshot where batches are missing before it; None: it does not tell of later ones.

        `more`: what was behind it is lost, too.
        """
        if self._is_whole or snapshot.seq < self.seq:
            return None
        batch = behind_loss(state, self.seq, snapshot.seq)
        loss = self.losses[-1]
        later = [seq for seq in loss.left_out if seq > snapshot.seq]
        loss.last, loss.left_out = snapshot.seq, [seq for seq in loss.left_out if seq <= snapshot.seq]
        self.begin(snapshot)
        if more:
            self.losses.append(Loss(self.seq, left_out=later))
        return batch

    def continued_by(self, frame: FrameHeader) -> bool:
        """Whether this is the next frame."""
        follows = frame.seq == self.seq or (frame.flags & AFTER_LOSS and frame.seq > self.seq)
        return frame.previous_crc == self._crc and bool(follows)

    def _behind_loss(self, batch: EventBatch, epoch: int) -> EventBatch | None:
        # What the cache is like is told only where an epoch begins.
        known = begins_epoch(batch) or epoch == self._epoch
        return behind_loss(batch, self.seq, batch.seq - 1) if known and batch.seq > self.seq else None
