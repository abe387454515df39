"""The counters of a sink, as its runner gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["running", "failing", "quarantined", "closed"]


@dataclass(frozen=True)
class SinkStats:
    """One moment of a runner. `put` calls so far = `batches` + `dropped_batches` + `lag_batches`."""

    name: str
    batches: int
    """Delivered: the sink's `write` returned. Gaps are not counted."""
    events: int
    dropped_batches: int
    """Not delivered: the queue was full, `write` raised, or the runner was closed or quarantined at the time."""
    dropped_events: int
    errors: int
    """Times that the sink raised."""
    lag_batches: int
    """Waiting in the queue or being written."""
    state: State
    """`failing`: its last call has failed, and it is tried again with the next batch."""
    last_error: str | None
    refused_peers: int = 0
    """Connections to a feed that came to nothing because of keys."""
