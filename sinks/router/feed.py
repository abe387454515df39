"""The feed for routers: one fold of events into changes visible to them, its numbers, and its pace.

`RouterFeed` is a sink. It folds each batch (`events.feed.fold`), holds changes back for a moment so that a router gets
few messages instead of one per engine step, numbers the batches, and gives them to its transport. Changes keep their
order and are never netted: a router sees each state the cache went through, some of them at a time. A batch is cut by
bounds from above (`change_bytes`): encoding to find out its size would cost more than all else.

Whenever routers' copies may differ from the fold, "cleared" and the fold's whole state go out next: at the start, and
after anything failed on the way out. Batches missed by the fold itself (`resync_after_seq`) only the manager can
replace, by publishing `StateExported`.

`write` only folds; everything goes out in `tick`. So a failing transport is never taken for a failing fold.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol

import msgspec

from events.feed.cache_fold import StreamFold
from events.feed.changes import AnyChange, Cleared, EncodedEvent, Removed, Stored
from events.feed.fold import Feed
from events.packed import NAME_BYTES, TOKEN_BYTES
from events.subscribe.workers import WorkerFeed
from events.types import EventBatch, Gap, GroupCreated, Namespace, WorkerSeen
from sinks.base import Overflow, Sink
from sinks.router.numbers import FeedNumbers

BATCH_BYTES = 64
CHANGE_BYTES = 512
"""Bound of the parts around the columns of a batch and of a change: field names, headers, a salt's digest."""
BLOCK_BYTES = 16
"""Bound of a name and a block's other fields, without its LoRA adapter."""
NUMBER_BYTES = 24
EXTRA_BYTES = 80
"""Bound of an item in a block: its digest in hex, and its offset."""
WIRE_TOKEN_BYTES = 5
_PLAIN = Namespace()


def change_bytes(change: AnyChange) -> int:
    """Return a bound for the size of the encoded change."""
    if isinstance(change, Stored):
        # Without calls: this runs for every block that decoding fills.
        blocks = len(change.names) // NAME_BYTES
        size = CHANGE_BYTES + blocks * BLOCK_BYTES + len(change.tokens) // TOKEN_BYTES * WIRE_TOKEN_BYTES
        if change.extras:
            size += sum(map(len, change.extras)) * EXTRA_BYTES
        return size if change.namespace == _PLAIN else size + (blocks + 1) * _lora_bytes(change)
    if isinstance(change, Removed):
        return CHANGE_BYTES + len(change.names) // NAME_BYTES * BLOCK_BYTES
    return len(change.encoded) if isinstance(change, EncodedEvent) else CHANGE_BYTES


def in_batches(changes: Iterable[AnyChange], max_bytes: int) -> Iterator[list[AnyChange]]:
    """Yield the changes, in order, in lists that encode to at most `max_bytes` if single blocks do."""
    batch: list[AnyChange] = []
    total = BATCH_BYTES
    for change in changes:
        size = change_bytes(change)
        fits = size <= max_bytes - BATCH_BYTES
        for piece in (change,) if fits else _cut(change, max_bytes - BATCH_BYTES):
            if not fits:
                size = change_bytes(piece)
            if batch and total + size > max_bytes:
                yield batch
                batch, total = [], BATCH_BYTES
            batch.append(piece)
            total += size
    if batch:
        yield batch


def _cut(change: AnyChange, max_bytes: int) -> Iterator[AnyChange]:
    if isinstance(change, Stored):
        lora = _lora_bytes(change)
        items = max(map(len, change.extras), default=0)
        block = BLOCK_BYTES + lora + change.tokens_per_block * WIRE_TOKEN_BYTES + items * EXTRA_BYTES
        yield from _cut_stored(change, max(1, (max_bytes - CHANGE_BYTES - lora) // block))
    elif isinstance(change, Removed):
        step = max(1, (max_bytes - CHANGE_BYTES) // BLOCK_BYTES) * NAME_BYTES
        for at in range(0, len(change.names), step):
            yield Removed(change.group, change.level, change.names[at : at + step])
    else:
        yield change


def _cut_stored(change: Stored, blocks: int) -> Iterator[Stored]:
    step = blocks * NAME_BYTES
    tokens_step = blocks * change.tokens_per_block * TOKEN_BYTES
    parent = change.parent
    for index, at in enumerate(range(0, len(change.names), step)):
        names = change.names[at : at + step]
        tokens = slice(index * tokens_step, (index + 1) * tokens_step)
        yield msgspec.structs.replace(
            change,
            names=names,
            parent=parent,
            tokens=change.tokens[tokens],
            extras=change.extras[index * blocks : (index + 1) * blocks],
            padded=change.padded[tokens],
        )
        parent = names[-NAME_BYTES:]


def _lora_bytes(change: Stored) -> int:
    # A character is up to 4 bytes in UTF-8. An adapter without a name is published by its number.
    name = change.namespace.lora_name
    return 4 * len(name) if name is not None else NUMBER_BYTES * (change.namespace.lora_id is not None)


SERVE_SECONDS = 0.01
"""Interval at which the transport serves its readers."""
POLL_SECONDS = 0.01


class FeedBatch(msgspec.Struct, frozen=True):
    """The changes sent under one number. Without changes it is a heartbeat."""

    seq: int
    ts: float
    """Wall clock in seconds at which it was sent."""
    changes: Sequence[AnyChange]
    groups: tuple[GroupCreated, ...]


class FeedSnapshot(msgspec.Struct, frozen=True):
    """Everything visible to routers after the batch `seq` (-1: before the first)."""

    seq: int
    ts: float
    """Wall clock in seconds at which that batch was sent."""
    changes: Iterable[AnyChange]
    """"Cleared", stores, parents first, and at the end removals of blocks in flight; to be iterated once, at any
    time."""
    groups: tuple[GroupCreated, ...]


class FeedTransport(Protocol):
    """Takes a feed's batches somewhere. All methods are called on one thread."""

    @property
    def subscribers(self) -> int:
        """Readers known at the last `tick`; 0 if that cannot be known."""

    def open(self, next_seq: int, worker: WorkerSeen | None) -> None:
        """Acquire what is needed. Raises SinkError.

        - `next_seq`: the number of the first batch.
        - `worker`: the engine of a log of `kvcache tap`, from which the feed takes the topic and the rank unless they
          are set.
        """

    def send(self, batch: FeedBatch) -> None:
        """Send one batch, without waiting for any reader."""

    def tick(self, take_state: Callable[[], FeedSnapshot]) -> None:
        """Serve readers. `take_state` returns the state as of the last batch, after sending held changes."""

    def close(self) -> None:
        """Release everything, after a bounded wait for messages in flight."""


class RouterFeed(Sink):
    """Folds the events, and feeds its transport with the changes visible to routers.

    - `coalesce_seconds`: at most one batch in this time, unless more than `max_batch_bytes` is waiting. 0: one
      batch for each `EventBatch` that changes something for routers.
    - `max_batch_bytes`: bound of an encoded batch (a single block that is larger still goes out).
    - `feed`: the fold; by default the blocks of a cache visible to routers.
    - `heartbeat_seconds`: silence after which an empty batch with a number of its own goes out, so that a router can
      distinguish "nothing new" from "missed something". 0: never.
    """

    overflow: Overflow = "drop_newest"
    """Setting of the runner: lost batches are contiguous, and after them the fold waits for the whole state."""
    folds = True
    """True: `write` may be called before the sink is open."""
    needs_tokens = True
    """Routers find blocks by their tokens."""
    feeds_routers = True
    """True if `kvcache run` may wait for readers."""

    def __init__(
        self,
        transport: FeedTransport,
        numbers: FeedNumbers,
        *,
        coalesce_seconds: float = 0.05,
        max_batch_bytes: int = 1 << 20,
        heartbeat_seconds: float = 1.0,
        feed: StreamFold[AnyChange] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.transport = transport
        self._numbers = numbers
        self._coalesce = coalesce_seconds
        self._max_bytes = max_batch_bytes
        self._heartbeat = heartbeat_seconds
        self._monotonic, self._wall = monotonic, wall
        self._feed: StreamFold[AnyChange] = Feed() if feed is None else feed
        self._pending: list[AnyChange] = []
        self._pending_bytes = 0
        self._resync_due = True
        """True if routers' copies may be wrong: the whole state goes out next, which makes `_pending` superfluous."""
        self._sent_at = self._served_at = float("-inf")
        self._last_ts = 0.0
        self.resync_after_seq: int | None = None
        """The last batch missing, if any: nothing goes out until the state comes in a batch after it. One published
        since is on its way through the queue, and need not be published again. For any thread to read."""
        self.subscribers = 0
        """Readers of the feed. For any thread to read."""

    @property
    def last_seq(self) -> int:
        """The number of the last batch that was sent. For any thread."""
        return self._numbers.next - 1

    @property
    def is_settled(self) -> bool:
        """True if all written batches have been sent. For any thread."""
        return not self._pending and not self._resync_due

    @property
    def refused_peers(self) -> int:
        """Connections that failed because of keys, since it was opened. For any thread."""
        refused: int = getattr(self.transport, "refused", 0)
        return refused

    def wait_subscribers(self, count: int, timeout: float, stop: Callable[[], bool] = lambda: False) -> bool:
        """Wait until there are `count` readers, for `timeout` seconds or until `stop()`. For any thread."""
        deadline = time.monotonic() + timeout
        while self.subscribers < count:
            left = deadline - time.monotonic()
            if left <= 0 or stop():
                return False
            time.sleep(min(left, POLL_SECONDS))
        return True

    # --- the sink ---------------------------------------------------------------------------------------

    @property
    def waits_for(self) -> str | None:
        """Return the reason why it cannot be opened yet: the worker of this feed is unknown. None: it can."""
        return self._feed.missing if isinstance(self._feed, WorkerFeed) else None

    def open(self) -> None:
        """Reserve numbers and open the transport."""
        worker = self._feed.worker if isinstance(self._feed, WorkerFeed) else None
        self._numbers.open()
        try:
            self.transport.open(self._numbers.next, None if worker is None else worker.seen)
        except BaseException:
            self._numbers.close()
            raise
        # If it was open before, it is unknown what has arrived.
        self._resync_due, self._sent_at = True, float("-inf")

    def write(self, batch: EventBatch) -> None:
        """Fold a batch. Its changes go out with one of the next ticks."""
        changes = self._feed.fold(batch)
        if not self._feed.lost:
            self.resync_after_seq = None
        elif self.resync_after_seq is None or any(isinstance(event, Gap) for event in batch.events):
            self.resync_after_seq = batch.seq
        if changes and not self._resync_due:
            self._pending += changes
            self._pending_bytes += sum(map(change_bytes, changes))

    def tick(self) -> None:
        """Send due changes and let the transport serve its readers. After each batch, and every 10 ms."""
        now = self._monotonic()
        if self._is_due(now):
            self._flush()
        elif self._heartbeat and now - self._sent_at >= self._heartbeat:
            self._send([self._heartbeat_changes()])
        if now - self._served_at >= SERVE_SECONDS:
            self._served_at = now
            self.transport.tick(self._take_state)
            self.subscribers = self.transport.subscribers

    def close(self) -> None:
        """Send held changes, close the transport, return unused numbers."""
        with contextlib.ExitStack() as last:
            last.callback(self._numbers.close)
            last.callback(self.transport.close)
            self._flush()

    def resync(self) -> None:
        """Send the whole state next: readers' copies may be wrong. Only "cleared" while batches are missing.

        To be called on the thread that calls `write`.
        """
        self._resync_due = True
        self._pending, self._pending_bytes = [], 0

    # --- on the way out ---------------------------------------------------------------------------------

    def _is_due(self, now: float) -> bool:
        if not self._pending and not self._resync_due:
            return False
        return now - self._sent_at >= self._coalesce or self._pending_bytes >= self._max_bytes

    def _flush(self) -> None:
        """Send everything that was held back."""
        changes, size = self._pending, self._pending_bytes + BATCH_BYTES
        if self._resync_due:
            changes, size = [*self._whole()], self._max_bytes + 1
        if changes:
            self.resync()  # until it is out
            self._send([changes] if size <= self._max_bytes else in_batches(changes, self._max_bytes))

    def _send(self, batches: Iterable[Sequence[AnyChange]]) -> None:
        # Until all of it is sent, readers' copies are not to be trusted.
        self._resync_due = True
        for changes in batches:
            self._last_ts = self._wall()
            self.transport.send(FeedBatch(self._numbers.take(), self._last_ts, changes, self._feed.groups))
        self._resync_due = False
        self._sent_at = self._monotonic()

    def _whole(self) -> Iterable[AnyChange]:
        """Return the fold's whole state; only "cleared" while batches are missing, since any of it may be gone."""
        return chain([Cleared()], () if self._feed.lost else self._feed.snapshot())

    def _heartbeat_changes(self) -> Sequence[AnyChange]:
        return ()

    def _take_state(self) -> FeedSnapshot:
        self._flush()
        return FeedSnapshot(self._numbers.next - 1, self._last_ts, self._whole(), self._feed.groups)
