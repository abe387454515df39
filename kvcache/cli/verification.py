"""Verification of a run: its replayed log gives the cache's state, and a router on its feed holds the same blocks."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from events.log import LogReader, LogWriter
from events.types import EventBatch
from kvcache.cli.output import Output
from kvcache.cli.process import StopSignals
from kvcache.fold.state import resident_names
from kvcache.manager import KVCacheManager
from kvcache.replay import Replayed, fold
from sinks.render import StreamNames

LAST_BATCHES = 64
FEED_URL = "zmq+pub://127.0.0.1:0?replay=0&heartbeat=200ms"
"""Feed on any free ports; no other subscriber is expected."""
_POLL_MS = 50
SILENCE_SECONDS = 10.0
"""Time without a message after which a router that still differs from the cache is taken to be wrong."""
Resident = list[set[int]]


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of replaying a run's log."""

    replayed: Replayed | None = None
    """The replay; None if it was interrupted, or if the log ends before the run did, so that it cannot agree."""
    fingerprint: bytes | None = None
    differences: tuple[str, ...] = ()
    """Differences in words; empty if there are none."""
    seconds: float = 0.0
    last_batches: tuple[EventBatch, ...] = ()
    """Last batches of the log, for printing."""
    known: StreamNames = field(default_factory=StreamNames)
    """Facts known from earlier batches."""

    @property
    def disagrees(self) -> bool:
        """True if something is wrong."""
        return bool(self.differences)


def verify_own_log(writer: LogWriter, live: bytes, stop: StopSignals, out: Output) -> Verification:
    """Replay the log and compare it with the cache's state; a further signal interrupts."""
    started = time.perf_counter()
    last: deque[EventBatch] = deque(maxlen=LAST_BATCHES)
    known = StreamNames()
    reader = LogReader(writer.directory)
    total = writer.next_seq + writer.batches_written
    # The signal that ended the run must not end this as well: the log of an interrupted run is verified.
    stop.is_set()  # counted, so that a further one counts as a second signal only if the event is not checked
    before = stop.received
    with out.progress("replaying the log", total) as update:

        def watched() -> Iterator[EventBatch]:
            for batch in reader:
                if stop.received > before:
                    return
                if len(last) == LAST_BATCHES:
                    for event in last[0].events:
                        known.see(event)
                last.append(batch)
                update(batch.seq + 1)
                yield batch

        replayed = fold(watched(), verify=True)
    if stop.received > before:
        return Verification(seconds=time.perf_counter() - started, last_batches=tuple(last), known=known)
    replayed.end = reader.end
    found, seconds = replayed.fingerprint, time.perf_counter() - started
    differences = tuple(_differences(replayed, live, found))
    return Verification(replayed, found, differences, seconds, tuple(last), known)


def _differences(replayed: Replayed, live: bytes, found: bytes) -> Iterator[str]:
    if found != live:
        yield f"the fingerprint is {found.hex()[:16]} after replay, but {live.hex()[:16]} in the cache"
    if failed := replayed.checkpoints_failed:
        yield f"{len(failed)} checkpoints disagree (batches {', '.join(map(str, failed[:5]))})"
    if replayed.end is None or replayed.end.kind != "clean":
        yield "it was not closed cleanly"


@dataclass(frozen=True, slots=True)
class FeedCheck:
    """Blocks that the router held at the end of the run."""

    batches: int
    blocks: tuple[int, int]
    """Blocks in primary and in secondary."""
    agrees: bool
    """True if these are the cache's."""
    faults: int
    """Stores without a known parent, repeated stores, removals of unknown blocks, and lost batches."""


class OwnFeed:
    """Subscriber on a thread of its own, like a router in another process."""

    def __init__(self, manager: KVCacheManager) -> None:
        # Not at the top: no other command needs ZeroMQ, and loading it takes a while.
        from events.subscribe.index import Index
        from events.subscribe.subscriber import Subscriber
        from sinks.router.zmq import ZMQTransport

        # The last one: sinks given by the user come first.
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
        """Wait until the router has received everything, and compare."""
        state = self._manager.state
        self._places = [(group, level) for group in range(len(state.groups)) for level in (0, 1)]
        self._expected = [resident_names(state, level, group) for group, level in self._places]
        seen = self._index.events
        while not (agrees := self._over.wait(SILENCE_SECONDS)) and seen != self._index.events:
            seen = self._index.events  # on a busy machine it may be far behind
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
