"""How far a sink is in the log that it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["waiting", "catching up", "running", "failing", "ended"]
Until = Literal["stopped", "end", "closed"]
"""When the work is done: never, at the log's end as it is, or when the log's writer has closed it."""


@dataclass(frozen=True)
class CatchUp:
    """How a sink comes to the end of the log that is there."""

    bytes_left: int
    """To be read; of files that are removed meanwhile, nothing."""
    bytes_per_second: float
    batches_per_second: float

    @property
    def seconds_left(self) -> float | None:
        """At this pace; None: nothing was read yet."""
        return self.bytes_left / self.bytes_per_second if self.bytes_per_second else None


@dataclass(frozen=True)
class FollowerStats:
    """One moment of a sink."""

    sink: str
    state: State
    waits_for: str | None
    """Why it cannot begin, in words; None: it has begun, or nothing is known yet."""
    seq: int | None
    """The last batch that it has had, of a feed the last one that went out; -1: none; None: not known yet."""
    ts: int | None
    """When that batch was made, nanoseconds since 1970; None: before this process began."""
    batches: int
    """Taken since this process began."""
    events: int
    errors: int
    """Times that it raised."""
    last_error: str | None
    is_open: bool = False
    """Whether it is at work for others; one that folds is opened when it has caught up."""
    lost_batches: int = 0
    """Not there any more when they were to be read, or without the tokens that the sink needs."""
    refused_peers: int = 0
    """Connections to a feed that came to nothing because of keys."""
