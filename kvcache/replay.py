"""Folding a log back into the state that it records.

The fold uses the code that made the live state (`CacheState.apply`), so equality alone would prove little; the log
therefore carries `Checkpoint` events with the fingerprint of the live state, which are compared on the way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from events.log import LogEnd, LogReader
from events.packed import COUNT_BYTES, HANDLE_BYTES
from events.subscribe.workers import FeedState
from events.types import (
    PRIMARY,
    SECONDARY,
    AnyEvent,
    BlocksAllocated,
    BlocksCopied,
    BlocksDetached,
    BlocksFilled,
    BlocksMoved,
    BlocksRemoved,
    BlocksReturned,
    BlocksReused,
    BlocksStored,
    BlocksUpdated,
    CacheCreated,
    Checkpoint,
    EpochStarted,
    EventBatch,
    Gap,
    MoveReason,
    PoolShared,
    SequenceAdded,
    StateExported,
    TokensAppended,
)
from kvcache.device.memory import bookkeeping_bytes, free_bytes
from kvcache.errors import CapacityError, InternalError, InvariantViolated, invariant
from kvcache.fold.fingerprint import fingerprint
from kvcache.fold.sequence import PRIORITY_MAX
from kvcache.fold.state import CacheState

Progress = Callable[[int], None]


@dataclass(eq=False, repr=False)
class BeyondEnd(CapacityError):
    """A state was requested after the end of the log."""

    seq: int
    last_seq: int
    text = "batch {seq} is after the end of the log, whose last batch is {last_seq}"


@dataclass(eq=False, repr=False)
class BeforeLogStart(CapacityError):
    """A state was requested before the beginning of the log, of which only the end is kept."""

    seq: int
    first_seq: int
    text = "batch {seq} is no longer kept: the log begins with the state after batch {first_seq}"


@dataclass(eq=False, repr=False)
class InLogGap(CapacityError):
    """A state was requested in a gap of the log: its batch was lost, or has just been removed."""

    seq: int
    last_seq: int
    text = (
        "batch {seq} lies in a gap of the log after batch {last_seq}: choose that one, or one after the gap"
    )


@dataclass(eq=False, repr=False)
class TooLarge(CapacityError):
    """The cache of a log has more blocks than the bookkeeping on this machine can hold; both in bytes."""

    needed: int
    free: int
    text = "replaying this log needs {needed:,} bytes of memory, but only {free:,} are free"


@dataclass(eq=False, repr=False)
class Unreplayable(InternalError):
    """A batch does not fit the state before it: the log does not record one cache."""

    seq: int
    reason: str
    log: str = ""
    """Directory of the log, where several are read."""

    def __str__(self) -> str:
        where = f"{self.log}: " if self.log else ""
        return f"{where}batch {self.seq} does not fit the batches before it: {self.reason}"


_FINGERPRINT_BYTES = 128
"""Memory for a fingerprint per slot of a level, while it is computed."""
_ALWAYS_BYTES = 1 << 26
"""Memory that is assumed to be free, because querying the system takes longer than replaying a short log."""
_MOST_NS = 1 << 63
"""Bound of wall-clock ns in a column."""
_OF_UNFITTING = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    TypeError,
    ValueError,
)
"""Exceptions of the state when an event is applied that was never decided for it."""


_LEVELS: dict[type, tuple[str, ...]] = {
    BlocksCopied: ("source_level",),
    BlocksMoved: ("from_level", "to_level"),
    BlocksRemoved: ("level",),
    BlocksReused: ("level",),
    BlocksStored: ("level",),
    BlocksUpdated: ("level",),
}
"""Fields of events that name a level."""


_WITH_PRIORITY = (BlocksCopied, BlocksFilled, BlocksStored, BlocksUpdated)
"""Events that set the priority of blocks."""


_COUNTED = (BlocksAllocated, BlocksDetached, BlocksReturned, TokensAppended)
"""Events with a count for each of their sequences."""


@contextmanager
def fitting(seq: int) -> Iterator[None]:
    """Blame every failure inside on the batches up to this one."""
    try:
        yield
    except InvariantViolated as error:
        # Its own text requests a bug report, but here the log may be forged.
        raise Unreplayable(seq, error.law) from error
    except InternalError as error:
        raise Unreplayable(seq, str(error)) from error
    except _OF_UNFITTING as error:
        raise Unreplayable(seq, f"{type(error).__name__} while applying it") from error


def fold_feed_batch(state: FeedState, batch: EventBatch) -> None:
    """Apply a batch of a log of kind `feed`. Raises `Unreplayable`."""
    with fitting(batch.seq):
        for event in known_events(batch):
            state.apply(event)


def known_events(batch: EventBatch) -> Sequence[AnyEvent]:
    """Return the events of a batch that can be applied: from its last `Gap` on, which the whole state follows.

    The events before continue what is missing, except the epoch that a snapshot begins with.
    """
    gaps = [index for index, event in enumerate(batch.events) if type(event) is Gap]
    if not gaps:
        return batch.events
    begins = type(batch.events[0]) is EpochStarted
    return (*batch.events[:begins], *batch.events[gaps[-1] :])


@dataclass
class Replayed:
    """State folded from a log, as sinks also fold it (`sinks.base.StateFold`)."""

    state: CacheState = field(default_factory=CacheState)
    last_seq: int = -1
    """Number of the last batch folded; -1 before the first."""
    last_ts: int | None = None
    """Time of that batch, in nanoseconds since 1970; None before the first."""
    batches: int = 0
    events: int = 0
    checkpoints_verified: int = 0
    checkpoints_failed: list[int] = field(default_factory=list)
    """Batches with a checkpoint that disagrees."""
    gaps: list[Gap] = field(default_factory=list)
    end: LogEnd | None = None
    """End of the log; None if folding stopped before it."""
    snapshot_seq: int | None = None
    """Batch of the snapshot that folding began with; None: it began with the log."""

    @property
    def fingerprint(self) -> bytes:
        """Fingerprint of the state. Raises `Unreplayable` if it has none, since its log does not record a cache."""
        with fitting(self.last_seq):
            return fingerprint(self.state)

    def check(self) -> None:
        """Verify the invariants of the state; raises `Unreplayable`."""
        with fitting(self.last_seq):
            self.state.check()

    def fold(
        self,
        batch: EventBatch,
        *,
        verify: bool = False,
        before: Callable[[AnyEvent], object] | None = None,
        after: Callable[[AnyEvent], object] | None = None,
    ) -> None:
        """Apply one batch; `before` and `after` are called with each event, before and after it is applied.

        Raises `Unreplayable`, and `TooLarge` for a cache too large for this machine.
        """
        with fitting(batch.seq):
            invariant(-_MOST_NS <= batch.ts < _MOST_NS, "its time exceeds 64 bits")
            for event in known_events(batch):
                refuse_impossible(event)
                if type(event) is CacheCreated:
                    _refuse_too_large(event)
                if before is not None:
                    before(event)
                self._apply(batch.seq, event, verify)
                if after is not None:
                    after(event)
        self.last_seq, self.last_ts = batch.seq, batch.ts
        self.batches += 1
        self.events += len(batch.events)

    def snapshot_events(self) -> tuple[CacheCreated | StateExported | PoolShared, ...]:
        """Return the first events of an epoch that continues from here."""
        created = self.state.created
        if created is None:
            raise InvariantViolated("no cache was created before it")
        return created, self.state.export(), *self.state.export_shared()

    def _apply(self, seq: int, event: AnyEvent, verify: bool) -> None:
        kind = type(event)
        if kind is Checkpoint and verify:
            self._compare(seq, event)  # type: ignore[arg-type]
        elif kind is Gap:
            self.gaps.append(event)  # type: ignore[arg-type]
        self.state.apply(event)

    def _compare(self, seq: int, checkpoint: Checkpoint) -> None:
        if fingerprint(self.state) == checkpoint.fingerprint:
            self.checkpoints_verified += 1
        else:
            self.checkpoints_failed.append(seq)


def refuse_impossible(event: AnyEvent) -> None:
    """Raise for an event that no cache makes, in any state.

    Live events are right by construction; one that was read may have negative groups and levels, which Python would
    count from the end.
    """
    kind = type(event)
    invariant(getattr(event, "group", 0) >= 0, "unknown group")
    for name in _LEVELS.get(kind, ()):
        invariant(getattr(event, name) in (PRIMARY, SECONDARY), "unknown level")
    if kind in _WITH_PRIORITY:
        invariant(0 <= event.priority <= PRIORITY_MAX, "priority out of range")  # type: ignore[union-attr]
    if kind is SequenceAdded:
        _refuse_reuse(event)  # type: ignore[arg-type]
    elif kind is BlocksMoved:
        _refuse_move(event)  # type: ignore[arg-type]
    elif kind in _COUNTED and event.counts:  # type: ignore[union-attr]
        counts, handles = len(event.counts) // COUNT_BYTES, len(event.handles) // HANDLE_BYTES  # type: ignore[union-attr]
        invariant(counts == handles, "the number of counts differs from the number of sequences")


def _refuse_move(event: BlocksMoved) -> None:
    down = event.why == MoveReason.OFFLOAD
    levels = (PRIMARY, SECONDARY) if down else (SECONDARY, PRIMARY)
    invariant((event.from_level, event.to_level) == levels, "the levels of a move do not match its reason")
    invariant(len(event.from_slots) == len(event.to_slots), "the numbers of source and target blocks differ")


def _refuse_reuse(event: SequenceAdded) -> None:
    """Check the reuse of an event: the state has its own count, but others rely on the event's."""
    primary, secondary = event.reused_primary, event.reused_secondary
    fits = 0 <= event.reused_partial <= event.reused and len(primary) == len(secondary) > 0
    fits = fits and all(0 <= each < event.num_tokens for each in (*primary, *secondary))
    invariant(fits, "an impossible number of reused tokens")


def _refuse_too_large(created: CacheCreated) -> None:
    """Check the size of a cache, since a few bytes of a log can claim any number of blocks."""
    blocks = [count for group in created.groups for count in group.num_blocks]
    needed = sum(bookkeeping_bytes(sum(group.num_blocks), group.kind) for group in created.groups)
    needed += _FINGERPRINT_BYTES * max(blocks, default=0)
    if needed > _ALWAYS_BYTES and needed > (free := free_bytes()):
        raise TooLarge(needed, free)


def replay(
    log: str | PathLike[str], at: int | None = None, *, verify: bool = False, progress: Progress | None = None
) -> Replayed:
    """Fold a log up to and including batch `at` (default: all of it), from the newest snapshot before on.

    `verify` starts at the beginning of the log, and compares every checkpoint on the way. Raises `BeyondEnd`,
    `BeforeLogStart`, `InLogGap`, `Unreplayable`, and the errors of `LogReader` for a damaged, newer or missing log.
    """
    reader = LogReader(Path(log), state_at=None if verify else sys.maxsize if at is None else at)
    replayed = fold(reader, at, verify=verify, progress=progress)
    begins = replayed.snapshot_seq = None if reader.snapshot is None else reader.snapshot.seq
    if at is not None and begins is not None and at < begins:
        raise BeforeLogStart(at, begins)
    if at is None or replayed.last_seq < at:
        try:
            replayed.end = reader.end
        except RuntimeError:  # Reading has stopped at a later batch.
            raise InLogGap(at or 0, replayed.last_seq) from None
    if at is not None and replayed.last_seq < at:
        raise BeyondEnd(at, replayed.last_seq)
    return replayed


def fold(
    batches: Iterable[EventBatch],
    at: int | None = None,
    *,
    verify: bool = False,
    progress: Progress | None = None,
) -> Replayed:
    """Fold batches from any source."""
    replayed = Replayed()
    if at is not None and at < 0:
        return replayed
    for batch in batches:
        if at is not None and batch.seq > at:
            break
        replayed.fold(batch, verify=verify)
        if progress is not None:
            progress(batch.seq)
        if batch.seq == at:
            break
    return replayed
