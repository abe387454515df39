"""What is known of each worker while it is listened to: its blocks, how it keeps up, and what was missed."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable

from events.formats.vllm import AllBlocksCleared
from events.subscribe.continuity import Missed, Received, Report, Restarted
from events.subscribe.index import Index
from kvcache.cli.holders import NOTHING, Held, Holders, Prompt
from kvcache.cli.listening import Speaker
from kvcache.prefixes.publisher import RANKS_MAX

RATE_SECONDS = 5.0
"""Events per second are those of so long."""
SILENT_SECONDS = 5.0
_PAUSES = 3
"""Who sends heartbeats is called silent after three times its longest pause, and no earlier than after so long."""
_LAST_SECOND = 1e11


class Rate:
    """Events per second over the last seconds."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._counts: deque[tuple[float, int]] = deque()

    def add(self, now: float, count: int) -> None:
        """Count something; times (seconds) never go back."""
        if count:
            self._counts.append((now, count))
            self._forget(now)

    def per_second(self, now: float) -> float:
        """On average over the last seconds, or since the start where that is later."""
        self._forget(now)
        span = min(RATE_SECONDS, max(now - self._started, 1.0))
        return sum(count for _, count in self._counts) / span

    def _forget(self, now: float) -> None:
        while self._counts and self._counts[0][0] <= now - RATE_SECONDS:
            self._counts.popleft()


class Row:
    """One worker: a publisher's batches of one rank."""

    def __init__(self, speaker: Speaker, rank: int | None, started: float) -> None:
        self.speaker = speaker
        self.rank = rank
        self.topic = "" if speaker.worker is None else speaker.worker.topic
        self.index = Index()
        self.rate = Rate(started)
        self.seq: int | None = None
        """The last batch."""
        self.partial = False
        """Whether only a part of its blocks is known: it was first heard in the middle, or batches are lost, and it has
        not told its whole state since."""
        self.lag: float | None = None
        """How much later than its time the last live batch came, in seconds; below 0 where clocks differ."""
        self.heard_at: float | None = None
        """When any live batch came last, of `time.monotonic`."""
        self.heartbeat_at: float | None = None
        """Likewise one without events; None: it has sent none."""
        self._longest_pause = 0.0

    def take(self, report: Received, now: float, wall: float) -> None:
        """Take in a batch."""
        self.index.fold(report)
        self.seq, self.topic = report.seq, report.topic or self.topic
        if any(isinstance(event, AllBlocksCleared) for event in report.batch.events):
            self.partial = False
        self.rate.add(now, len(report.batch.events))
        if report.replayed:
            return
        ts = report.batch.ts
        self.lag = wall - ts if math.isfinite(ts) and abs(ts) < _LAST_SECOND else None
        if self.heard_at is not None:
            self._longest_pause = max(self._longest_pause, now - self.heard_at)
        self.heard_at = now
        if not report.batch.events:
            self.heartbeat_at = now

    def interrupt(self, report: Report) -> None:
        """Take in that batches were missed, a state is told anew, or the publisher has restarted."""
        self.index.fold(report)
        if isinstance(report, Restarted):
            self._longest_pause = 0.0  # until it was there again
        elif isinstance(report, Missed) and not report.recovered:
            self.partial = True

    def silent(self, now: float) -> bool:
        """Whether heartbeats have ceased. Of who sends none nobody knows."""
        if self.heartbeat_at is None or self.heard_at is None:
            return False
        return now - self.heard_at > max(SILENT_SECONDS, _PAUSES * self._longest_pause)


class Workers:
    """All of them, in the order in which they were named or heard."""

    def __init__(
        self,
        prompt: Prompt | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.prompt = prompt
        self._holders = None if prompt is None else Holders(prompt)
        self._held: dict[tuple[Hashable, int], Held] = {}
        self._clock, self._wall = clock, wall
        self._rows: dict[Speaker, dict[int | None, Row]] = {}
        self._begun: set[Speaker] = set()
        """Who was heard since its numbers began."""
        self.ignored_batches = 0
        """Of ranks that nobody has (`RANKS_MAX`)."""

    def expect(self, speakers: Iterable[Speaker]) -> None:
        """Show also those that were not heard yet."""
        for speaker in speakers:
            self._of(speaker)

    def fold(self, speaker: Speaker, report: Report) -> None:
        """Take in what one of them says, or has failed to."""
        if self._holders is not None:
            self._holders.fold(speaker, report)
        rows = self._of(speaker)
        if not isinstance(report, Received):
            for row in rows.values():
                row.interrupt(report)
            if isinstance(report, Restarted):
                self._begun.discard(speaker)
            return
        rank = report.batch.rank
        if rank is not None and not 0 <= rank < RANKS_MAX:
            self.ignored_batches += 1
            return
        if rank not in rows and None in rows and rows[None].seq is None:
            # Until now it was not known which rank speaks there.
            rows[rank] = rows.pop(None)
            rows[rank].rank = rank
        if rank not in rows:
            rows[rank] = Row(speaker, rank, self._clock())
            rows[rank].partial = any(row.partial for row in rows.values())
        if speaker not in self._begun:
            self._begun.add(speaker)
            for row in rows.values():
                row.partial = report.seq > 0
        rows[rank].take(report, self._clock(), self._wall())

    def rows(self) -> list[Row]:
        """One for each rank that each of them speaks for."""
        return [row for rows in self._rows.values() for row in rows.values()]

    def now(self) -> float:
        """The time by which rows are to be asked."""
        return self._clock()

    def look(self) -> None:
        """Find out who holds how much of the prompt now."""
        if self._holders is not None:
            self._held = self._holders.match()

    def held(self, row: Row) -> Held:
        """How much of the prompt a worker held at the last `look`."""
        return self._held.get((row.speaker, row.rank or 0), NOTHING)

    def longest(self) -> list[Row]:
        """Who holds most of the prompt, and of that most where it is fastest; empty: nobody holds anything."""
        amounts = [(sum(held), held, row) for row in self.rows() if any(held := self.held(row))]
        best = max((amount[:2] for amount in amounts), default=None)
        return [row for *amount, row in amounts if tuple(amount) == best]

    def _of(self, speaker: Speaker) -> dict[int | None, Row]:
        if speaker not in self._rows:
            self._rows[speaker] = {None: Row(speaker, None, self._clock())}
        return self._rows[speaker]
