"""A router attached to a run's own feed: what it holds at the end must be what the cache holds."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from kvcache.fold.state import resident_names
from kvcache.manager import KVCacheManager

URL = "zmq+pub://127.0.0.1:0?replay=0&heartbeat=200ms"
"""Any free ports; nobody else is expected."""
_POLL_MS = 50
_PATIENCE_SECONDS = 10.0
Resident = list[set[int]]


@dataclass(frozen=True, slots=True)
class FeedCheck:
    """What the router held when the run was over."""

    batches: int
    blocks: tuple[int, int]
    """In primary and in secondary."""
    agrees: bool
    """Whether these are the cache's."""
    faults: int
    """Stores without a known parent, repeated stores, removals of unknown blocks, and batches that were lost."""


class OwnFeed:
    """Listens on a thread of its own, as a router in another process would."""

    def __init__(self, manager: KVCacheManager) -> None:
        # Not at the top: no other command needs ZeroMQ, and loading it takes a while.
        from events.subscribe.index import Index
        from events.subscribe.subscriber import Subscriber
        from sinks.router.transport import ZMQTransport

        # The last one: sinks that the user asked for come first.
        transport = manager.feeds[-1].transport
        assert isinstance(transport, ZMQTransport)
        self._manager = manager
        self._index = Index()
        self._expected: Resident | None = None
        self._over = threading.Event()
        self._end = threading.Event()
        self._subscriber = Subscriber(transport.endpoint, replay=transport.replay_endpoint, start=0)
        self._thread = threading.Thread(target=self._listen, name="kvcache-own-feed", daemon=True)
        self._thread.start()

    def finish(self) -> FeedCheck:
        """Wait until the router has heard everything, and compare."""
        state = self._manager.state
        self._places = [(group, level) for group in range(len(state.groups)) for level in (0, 1)]
        self._expected = [resident_names(state, level, group) for group, level in self._places]
        agrees = self._over.wait(_PATIENCE_SECONDS)
        self._end.set()
        self._thread.join()
        index = self._index
        faults = index.orphans + index.unknown_removals + index.repeated_stores + index.missed_batches
        return FeedCheck(index.batches, (index.count(0), index.count(1)), agrees, faults)

    def _listen(self) -> None:
        with self._subscriber as subscriber:
            while not self._end.is_set():
                for report in subscriber.poll(_POLL_MS):
                    self._index.fold(report)
                expected = self._expected
                if expected is not None and expected == [self._index.resident(*at) for at in self._places]:
                    self._over.set()
