"""Time and bytes of a run's copies, measured around its copier.

A copier on the host copies inside `submit`, that is, inside a call of the manager, and one on a GPU during a wait for
its ticket. Measured here, both are comparable, and the manager's own time can be separated (`StepTimes`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from events.types import SECONDARY
from kvcache.layout import Layout

if TYPE_CHECKING:
    from cuda_ops.copier import Copier, Copy, Ticket


class TimedCopier:
    """Copier with measurements, for one thread, which submits and waits.

    Requested bytes are counted, even if they did not arrive.
    """

    def __init__(self, inner: Copier, layout: Layout) -> None:
        self._inner = inner
        self._bytes_per_token = [group.bytes_per_block // layout.tokens_per_block for group in layout.groups]
        self._tokens_per_block = layout.tokens_per_block
        self.nanoseconds = 0
        """Time spent so far on starting copies and waiting for them."""
        self.bytes_offloaded = 0
        self.bytes_onboarded = 0
        """Bytes from secondary, including partly matching blocks."""
        self.bytes_within_primary = 0

    @property
    def seconds(self) -> float:
        """`nanoseconds` in seconds."""
        return self.nanoseconds / 1e9

    @property
    def bytes(self) -> int:
        """Bytes copied in all directions."""
        return self.bytes_offloaded + self.bytes_onboarded + self.bytes_within_primary

    @property
    def bytes_per_second(self) -> float:
        """Mean rate; 0 if nothing was copied."""
        return self.bytes / self.seconds if self.seconds else 0.0

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        """Start a batch; see `cuda_ops.copier.Copier`."""
        with self.timed():
            ticket = self._inner.submit(copies)
        for copy in copies:
            tokens = len(copy.source) * (copy.num_tokens or self._tokens_per_block)
            num_bytes = tokens * self._bytes_per_token[copy.group]
            if copy.target_level == SECONDARY:
                self.bytes_offloaded += num_bytes
            elif copy.source_level == SECONDARY:
                self.bytes_onboarded += num_bytes
            else:
                self.bytes_within_primary += num_bytes
        return _TimedTicket(ticket, self)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time of the body."""
        started = time.perf_counter_ns()
        try:
            yield
        finally:
            self.nanoseconds += time.perf_counter_ns() - started


class _TimedTicket:
    """Ticket that measures its waits."""

    def __init__(self, inner: Ticket, copier: TimedCopier) -> None:
        self._inner = inner
        self._copier = copier

    def done(self) -> bool:
        return self._inner.done()

    def wait(self) -> None:
        with self._copier.timed():
            self._inner.wait()

    def wait_on(self, stream: Any = None) -> None:
        self._inner.wait_on(stream)
