"""The bounded queue between the engine's thread and a sink's thread.

`put` is the engine's side and must cost next to nothing: it counts, and appends to a deque. There is no
`Queue.put`, no condition and no wake-up per batch: the other side looks every few milliseconds by itself, and is
woken early only when the queue is half full. The lock is taken by `put` only where the queue overflows, and held by
either side for single steps only.

A row of lost batches is one `Loss` item exactly where they were in the queue, so a reader of the queue meets
it in the right place by construction. Dropping the oldest keeps one at the head, dropping the newest puts one
at the tail and goes on behind it. Both stay bounded: between two losses there is always a batch.

Counters only grow, and each has one writer: `put_*` the engine's thread, all else whoever holds the lock. The
fill is the difference of two, so the fast path knows it without the lock.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Literal, get_args

from events.size import batch_bytes
from events.types import EventBatch, Gap

Overflow = Literal["drop_oldest", "drop_newest", "block"]


class Loss:
    """A row of batches that the sink will not get, with nothing delivered between them."""

    __slots__ = ("first_seq", "last_seq", "reason", "ts")

    def __init__(self, batch: EventBatch, reason: str) -> None:
        self.first_seq = self.last_seq = batch.seq
        self.ts = batch.ts
        self.reason = reason

    def as_batch(self) -> EventBatch:
        """What the sink gets instead. It has the seq of the last lost batch, so that seq keeps rising."""
        return EventBatch(
            self.last_seq,
            self.ts,
            (Gap(first_seq=self.first_seq, last_seq=self.last_seq, reason=self.reason),),
        )


_ROOM = 16
"""This part of a queue must be free before a `put` goes on that met a full one."""

Queued = tuple[EventBatch, int]
"""A batch and its size in bytes as counted. A plain tuple, because making a named one takes ten times as long."""

Item = Queued | Loss


def note_loss(items: list[Loss] | deque[Item], loss: Loss) -> None:
    """Put a loss at the end of `items`, or extend the one that is there by it."""
    last = items[-1] if items else None
    if isinstance(last, Loss) and last.reason == loss.reason:
        last.last_seq, last.ts = loss.last_seq, loss.ts
    else:
        items.append(loss)


class BatchQueue:
    """Batches on their way to one sink; `put` is for one thread, `take` for one other.

    `max_events` and `max_bytes` bound it; an empty queue takes one batch of any size, so that a state export
    larger than the bound is not lost for good. `overflow` says what gives way when it is full.
    """

    def __init__(self, max_events: int, max_bytes: int, overflow: Overflow) -> None:
        if max_events < 1 or max_bytes < 1:
            raise ValueError("max_events and max_bytes must be at least 1")
        if overflow not in get_args(Overflow):
            raise ValueError(f"overflow must be one of {', '.join(get_args(Overflow))}, not {overflow!r}")
        self._max_events, self._max_bytes = max_events, max_bytes
        self._overflow = overflow
        self._items: deque[Item] = deque()
        self._refusal: str | None = None
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._waiting: Queued | None = None
        """What a `put` waits with."""
        self._wake = threading.Event()
        self.put_batches = self._put_events = self._put_bytes = 0
        self._left_events = self._left_bytes = 0
        self.dropped_batches = self.dropped_events = 0

    def __len__(self) -> int:
        """The batches that wait, and the losses between them."""
        return len(self._items)

    @property
    def waiting_events(self) -> int:
        """Events of the batches that wait."""
        return self._put_events - self._left_events

    @property
    def waiting_bytes(self) -> int:
        """Their bytes, as counted."""
        return self._put_bytes - self._left_bytes

    def put(self, batch: EventBatch, size: int | None = None) -> None:
        """Append a batch. Never raises; waits only if `overflow` is "block".

        `size` is that of `events.size.batch_bytes`, for who knows it already.
        """
        if size is None:
            size = batch_bytes(batch)
        self.put_batches += 1
        events = self._put_events = self._put_events + len(batch.events)
        total = self._put_bytes = self._put_bytes + size
        events -= self._left_events
        total -= self._left_bytes
        if events > self._max_events or total > self._max_bytes or self._refusal:
            self._put_slowly((batch, size))
            return
        self._items.append((batch, size))
        if (events * 2 > self._max_events or total * 2 > self._max_bytes) and not self._wake.is_set():
            self._wake.set()

    def take(self) -> Item | None:
        """Remove the head; None if there is nothing."""
        with self._lock:
            if not self._items:
                return None
            item = self._items.popleft()
            if not isinstance(item, Loss):
                self._count_left(item)
            if self._waiting is not None and self._has_room(self._waiting):
                self._room.notify()
            return item

    def wait(self, seconds: float) -> bool:
        """Wait until the queue is half full, `wake` is called, or the time is up, which it says by False."""
        woken = self._wake.wait(seconds)
        self._wake.clear()
        return woken

    def wake(self) -> None:
        """End the other thread's `wait`."""
        self._wake.set()

    def refuse(self, reason: str) -> None:
        """From now on whatever is put is lost for `reason`. What is in the queue stays."""
        with self._lock:
            self._refusal = reason
            self._room.notify_all()

    def accept(self, reason: str) -> None:
        """Take batches again, unless they are refused for another reason than this one."""
        with self._lock:
            if self._refusal == reason:
                self._refusal = None

    def take_losses(self) -> list[Loss]:
        """Remove the losses before the first batch."""
        losses: list[Loss] = []
        with self._lock:
            while self._items and isinstance(head := self._items[0], Loss):
                losses.append(head)
                self._items.popleft()
        return losses

    def drop_all(self, reason: str) -> None:
        """Turn what is in the queue into losses, where it is. For after `refuse`."""
        with self._lock:
            losses: deque[Item] = deque()
            while self._items:
                note_loss(losses, self._lose(self._items.popleft(), reason))
            self._items.extend(losses)

    def become_child(self) -> None:
        """Start anew in a forked process, empty and refusing: the content is the parent's to deliver."""
        # Whoever held the lock at the fork does not exist in this process.
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._items.clear()
        self._refusal = "forked"

    def _put_slowly(self, item: Queued) -> None:
        with self._lock:
            if self._overflow == "block" and not self._fits(item):
                self._wait_for_room(item)
            if self._refusal:
                note_loss(self._items, self._lose(item, self._refusal))
            elif self._overflow == "drop_newest" and not self._fits(item):
                note_loss(self._items, self._lose(item, "overflow"))
            else:
                self._drop_oldest_until_fits(item)
                self._items.append(item)

    def _wait_for_room(self, item: Queued) -> None:
        self._waiting = item
        while not self._refusal and not self._has_room(item):
            self._wake.set()
            self._room.wait()
        self._waiting = None

    def _has_room(self, item: Queued) -> bool:
        """Whether many more would fit: who went on at once would wait again, at two switches of threads per batch."""
        return self._fits(item, self._max_events // _ROOM, self._max_bytes // _ROOM)

    def _fits(self, item: Queued, free_events: int = 0, free_bytes: int = 0) -> bool:
        """Whether `item`, which is counted already, is alone or leaves so much free."""
        total, events = self.waiting_bytes, self.waiting_events
        return total == item[1] or (
            total <= self._max_bytes - free_bytes and events <= self._max_events - free_events
        )

    def _drop_oldest_until_fits(self, item: Queued) -> None:
        losses: list[Loss] = []
        while not self._fits(item):
            note_loss(losses, self._lose(self._items.popleft(), "overflow"))
        self._items.extendleft(reversed(losses))

    def _lose(self, item: Item, reason: str) -> Loss:
        """What stands for an item that the sink will not get; a loss stays what it is."""
        if isinstance(item, Loss):
            return item
        self._count_left(item)
        self.dropped_batches += 1
        self.dropped_events += len(item[0].events)
        return Loss(item[0], reason)

    def _count_left(self, item: Queued) -> None:
        self._left_events += len(item[0].events)
        self._left_bytes += item[1]
