"""The whole state of a feed, encoded once for all who come late, and the batches that were sent since.

Encoding a million blocks takes about a second, so it is done a moment at a time, between live batches, and what it gave
is kept: together with the batches sent since, it tells the state as of now. Only when those have become more than the
state itself is it worth encoding it anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from events.feed.changes import AnyChange
from events.types import GroupCreated
from sinks.router.batches import in_batches
from sinks.router.feed import FeedState

MIN_TAIL_BYTES = 1 << 20
"""However small the state is, so much may be sent before it is encoded anew."""

Encode = Callable[[Sequence[AnyChange], float, Sequence[GroupCreated]], bytes]
"""Changes, a time and the groups to a payload."""
Join = Callable[[Sequence[bytes]], bytes]
"""Payloads to one with all their events, and the time of the last one."""


class Snapshot:
    """Written by the feed's thread, which only ever adds to it: any thread may read it once it is `ready`."""

    def __init__(self, state: FeedState, encode: Encode, piece_bytes: int) -> None:
        self.seq = state.seq
        """The number of the last batch that the state includes."""
        self.ts = state.ts
        """When that batch went out."""
        self.ready = False
        self.pieces: list[bytes] = []
        """Payloads that tell the state together: the first one clears, parents come first."""
        self.tail: list[bytes] = []
        """The payloads of the batches after `seq`."""
        self._groups, self._encode = state.groups, encode
        self._changes = in_batches(state.changes, piece_bytes)
        self._state_bytes = self._tail_bytes = 0

    @property
    def last_seq(self) -> int:
        """The number of the last batch in the tail; `seq` if there is none."""
        return self.seq + len(self.tail)

    @property
    def worn(self) -> bool:
        """Whether more was sent since than the state takes."""
        return self.ready and self._tail_bytes > max(self._state_bytes, MIN_TAIL_BYTES)

    def advance(self, seconds: float) -> bool:
        """Encode for about so long, and at least a piece, so that it comes to an end; returns `ready`."""
        deadline = time.perf_counter() + seconds
        for changes in self._changes:
            self.pieces.append(self._encode(changes, self.ts, self._groups))
            self._state_bytes += len(self.pieces[-1])
            if time.perf_counter() >= deadline:
                return False
        self.ready = True
        return True

    def append(self, payload: bytes) -> None:
        """The batch after `last_seq` was sent."""
        self.tail.append(payload)
        self._tail_bytes += len(payload)

    def in_payloads(self, count: int, join: Join) -> Iterator[bytes]:
        """The state in at most `count` payloads."""
        each = -(-len(self.pieces) // count)
        for at in range(0, len(self.pieces), each):
            yield join(self.pieces[at : at + each])
