"""A state and the record of how it came about: emit = apply and publish, flush = one batch to the log and the sinks."""

from __future__ import annotations

import msgspec

from events.bus import EventBus
from events.ids import epoch_of, first_number
from events.tokens.names import ALGORITHMS, DEFAULT_ALGORITHM
from events.types import (
    FIRST_FORMAT,
    FORMAT_VERSION,
    CacheCreated,
    Event,
    EventBatch,
    PoolShared,
    StateExported,
)
from kvcache.config import KVCacheConfig
from kvcache.errors import Unsupported
from kvcache.fold.state import CacheState
from kvcache.layout import Layout
from kvcache.record.counting import StatsCounter
from kvcache.record.latest_events import LatestEvents
from kvcache.record.outputs import Outputs


def cache_created(config: KVCacheConfig, layout: Layout, *, heard: bool) -> CacheCreated:
    """What a cache begins with. `heard`: whether a log or a sink will see its events."""
    algorithm: str = config.block_hash
    if algorithm == "auto":
        # Names are for others: where nobody listens, computing them would be most of the work.
        named = heard or config.eviction_policy == "levels"
        algorithm = DEFAULT_ALGORITHM if named else "none"
    odd = config.tokens_per_block & (config.tokens_per_block - 1)
    return CacheCreated(
        format_version=FORMAT_VERSION if odd else FIRST_FORMAT,
        config=config.model_dump_json(),
        tokens_per_block=config.tokens_per_block,
        groups=tuple(group.group_created() for group in layout.groups),
        hash_algorithm=algorithm,
        key_bytes=ALGORITHMS[algorithm].key_bytes,
        content_id=layout.content_id,
        attention_dp_rank=config.attention_dp_rank,
    )


def _numbered(first: StateExported, epoch: int) -> StateExported:
    """The state with numbers of its epoch to go on with. What has a number of an earlier one keeps it."""
    number = first_number(epoch)
    return msgspec.structs.replace(
        first, next_handle=max(first.next_handle, number), next_transfer=max(first.next_transfer, number)
    )


class Journal:
    """Starts an epoch; from then on nothing changes the state but `emit`."""

    def __init__(
        self,
        created: CacheCreated,
        outputs: Outputs,
        event_buffer_max_size: int = 0,
        first: StateExported | None = None,
        shared: PoolShared | None = None,
    ) -> None:
        if not outputs.records_tokens and not created.key_bytes:
            raise Unsupported(
                "a log without tokens and without names, by which blocks could be told apart",
                "give a block_hash other than none, or record tokens",
            )
        self.state = CacheState()
        self.bus = EventBus()
        self._pending, self._subscribers = self.bus.pending, self.bus.subscribers
        self.counter = StatsCounter(self.bus)
        self.latest = LatestEvents(event_buffer_max_size) if event_buffer_max_size else None
        self.outputs = outputs
        self._state_due = False
        self._next_seq = outputs.next_seq
        self._exported_seq = -1
        """The last batch that holds the whole state."""
        self._start(created, first)
        if shared is not None:
            self.emit(shared)

    def _start(self, created: CacheCreated, first: StateExported | None) -> None:
        """The first events of an epoch: what began, and the state that a fold can begin with (`first`, or empty)."""
        used = 0 if first is None else epoch_of(max(first.next_handle, first.next_transfer))
        epoch = self.outputs.begin_epoch(used)
        if epoch is not None:
            self.bus.publish(epoch)  # it describes the log; the live state always knows its tokens
        self.emit(created)
        if epoch is not None:
            self.emit(_numbered(first or self.state.export(), epoch.epoch))
        elif first is not None:
            self.emit(first)

    def emit(self, event: Event) -> None:
        """The only way in which anything changes."""
        self.state.apply(event)
        # What `bus.publish` does, without the call: this runs several times per engine step.
        self._pending.append(event)
        for subscriber in self._subscribers[type(event)]:
            subscriber(event)

    def make_good(self) -> None:
        """Tell what was lost, and the whole state with the next flush; before each, where `outputs.may_lose`."""
        gap = self.outputs.take_gap()
        if gap is not None:
            self.bus.publish(gap)
        lost = self.outputs.lost_seq
        # The batch with the state may itself be the last that was lost.
        if gap is not None or (lost >= 0 and lost >= self._exported_seq):
            self._state_due = True

    @property
    def next_seq(self) -> int:
        """Number of the next batch; for any thread."""
        return self._next_seq

    @property
    def due(self) -> bool:
        """Whether there is something to flush."""
        return self._state_due or bool(self.bus.pending)

    def flush(self, now: int) -> EventBatch | None:
        """Hand over what happened as one batch, stamped `now`; an empty one is not made."""
        if self._state_due:
            self._state_due = False
            for event in (self.state.export(), *self.state.export_shared()):
                self.bus.publish(event)  # says what is, so there is nothing to apply
            self._exported_seq = self._next_seq
        if not self.bus.pending:
            return None
        events = self.bus.take_events()
        batch = EventBatch(self._next_seq, now, events)
        self._next_seq += 1
        self.counter.publish(self.state, len(events))
        self.outputs.publish(batch)
        if self.latest is not None:
            self.latest.publish(batch)
        return batch
