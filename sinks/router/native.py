"""``format=native``: all events of the cache, each batch as it was flushed, in a message of its own.

A new reader needs the whole state, and the manager would have to stop the engine to publish it. So the sink folds the
batches itself, on its own thread, by the code that replays logs (`SinkContext.fold`), and sends its state: when it is
opened, after a failure, to each new subscriber, and repeatedly in a broker's stream. Only batches missed by the sink
itself must come from the manager, as for any feed (`resync_after_seq`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import dropwhile

import msgspec

from events.codec import batch_without_tokens
from events.feed.cache_fold import StreamFold
from events.feed.changes import AnyChange, Batched
from events.formats.native import has_unhealed_gap, origin_of_state
from events.types import AnyEvent, CacheCreated, EpochStarted, EventBatch, Gap, StateExported
from sinks.base import SinkContext, SinkError, StateFold
from sinks.router.feed import FeedSnapshot, FeedTransport, RouterFeed
from sinks.router.numbers import FeedNumbers

_LOG_ID_BYTES = 16
_MISSED = "missed by the sink: the whole state follows"


class NativeFold(StreamFold[Batched]):
    """Passes batches on, and keeps the state after them. The first of an epoch begins with `EpochStarted`.

    - `state`: the fold; None: the state is not available.
    - `tokens`: True to pass token ids on.
    """

    def __init__(self, state: StateFold | None, *, tokens: bool) -> None:
        super().__init__()
        self._state, self._tokens = state, tokens
        self._log_id = os.urandom(_LOG_ID_BYTES)
        """Id for the log of a cache that has none."""
        self._beginning_events: tuple[AnyEvent, ...] = ()
        """First events of the epoch, before the state; empty: none has begun yet."""
        self._last_ts = 0

    def fold(self, batch: EventBatch) -> list[Batched]:
        """Return the batches to send for one: itself, or the state that replaces missed ones; before that none."""
        batch = self._begun(batch if self._tokens else batch_without_tokens(batch))
        whole, last = origin_of_state(batch) is not None, -1 if self.last_seq is None else self.last_seq
        missed = self.lost or (self.last_seq is not None and batch.seq != last + 1)
        has_state = self._beginning_events and any(isinstance(event, StateExported) for event in batch.events)
        was_lost = self.lost
        self.lost = not whole and ((missed and not has_state) or has_unhealed_gap(batch, last))
        self.last_seq, self._last_ts = batch.seq, batch.ts
        if self.lost:
            return [] if was_lost else [self._gap(min(last + 1, batch.seq))]
        if missed and not whole:
            batch = self._recovered(batch)
        if self._state is not None:
            self._state.fold(batch)
        return [Batched(batch)]

    def snapshot(self) -> Iterator[Batched]:
        """Yield a batch to begin with; if nothing is known, one that states this."""
        if self.last_seq is None or self._state is None or not self._beginning_events:
            yield self.heartbeat()
        elif self.lost:
            yield self._gap(self.last_seq)
        else:
            events = (self._beginning_events[0], *self._state.snapshot_events())
            yield Batched(EventBatch(self.last_seq, self._last_ts, events))

    def heartbeat(self) -> Batched:
        """Return a batch without events, with the number of the last one; -1: there was none."""
        return Batched(EventBatch(-1 if self.last_seq is None else self.last_seq, self._last_ts, ()))

    def _begun(self, batch: EventBatch) -> EventBatch:
        """Return a batch with the first events of an epoch, if one begins, as valid for readers of this stream."""
        first = batch.events[0] if batch.events else None
        if isinstance(first, EpochStarted):
            events = (msgspec.structs.replace(first, tokens_recorded=self._tokens), *batch.events[1:])
        elif isinstance(first, CacheCreated):
            events = self._with_state(batch, first)
        else:
            return batch
        created = next((event for event in events if isinstance(event, CacheCreated)), None)
        self._beginning_events = () if created is None else (events[0], created)
        return EventBatch(batch.seq, batch.ts, events)

    def _with_state(self, batch: EventBatch, created: CacheCreated) -> tuple[AnyEvent, ...]:
        """Return the events of a cache without a log, after those that begin a log."""
        started = EpochStarted(
            epoch=0,
            log_id=self._log_id,
            previous_epoch=None,
            previous_last_seq=None,
            clean=True,
            tokens_recorded=self._tokens,
            software="",
        )
        if self._state is None or any(isinstance(event, StateExported) for event in batch.events):
            return (started, *batch.events)
        self._state.fold(EventBatch(batch.seq, batch.ts, (started, created)))
        return (started, *self._state.snapshot_events(), *batch.events[1:])

    def _recovered(self, batch: EventBatch) -> EventBatch:
        """Return the usable part of a batch with the state, as a batch to begin with."""
        from_state = dropwhile(lambda event: not isinstance(event, StateExported), batch.events)
        return EventBatch(batch.seq, batch.ts, (*self._beginning_events, *from_state))

    def _gap(self, first: int) -> Batched:
        assert self.last_seq is not None
        gap = Gap(first_seq=first, last_seq=self.last_seq, reason=_MISSED)
        return Batched(EventBatch(self.last_seq, self._last_ts, (gap,)))


class NativeFeed(RouterFeed):
    """A sink that feeds readers with the cache's batches.

    `tokens`: True if it receives token ids, and passes them on.
    """

    needs_cache = True

    def __init__(
        self,
        transport: FeedTransport,
        numbers: FeedNumbers,
        context: SinkContext,
        *,
        tokens: bool,
        heartbeat_seconds: float,
    ) -> None:
        self._native = NativeFold(None if context.fold is None else context.fold(), tokens=tokens)
        super().__init__(
            transport,
            numbers,
            coalesce_seconds=0,
            max_batch_bytes=0,  # so that each batch goes out alone
            heartbeat_seconds=heartbeat_seconds,
            feed=self._native,
        )
        self.needs_tokens = tokens
        self._context = context

    def open(self) -> None:
        """Open like any feed. Raises SinkError if the state cannot be folded."""
        if self._context.fold is None:
            raise SinkError(
                "format=native publishes a cache: give the URL to KVCacheManager or `kvcache publish`"
            )
        if not (self.needs_tokens or self._context.key_bytes):
            raise SinkError(
                "format=native without tokens requires block names: set block_hash, or add tokens=1"
            )
        super().open()

    def _whole(self) -> Iterable[AnyChange]:
        # An empty batch would only show that numbers were jumped over.
        return () if self._native.last_seq is None else self._native.snapshot()

    def _take_state(self) -> FeedSnapshot:
        return msgspec.structs.replace(super()._take_state(), changes=self._native.snapshot())

    def _heartbeat_changes(self) -> Sequence[AnyChange]:
        return (self._native.heartbeat(),)
