"""State of each worker during a subscription, as a table: its blocks, its lag, its losses."""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import product
from typing import Any, NamedTuple

from events.formats.vllm import AllBlocksCleared
from events.subscribe.continuity import Missed, Received, Report, Restarted
from events.subscribe.index import GPU, HOST, STORAGE, Index
from kvcache.cli.output import Output, pick
from kvcache.cli.subscribe.sources import Sender
from kvcache.phrases import count, iso, printable, span
from kvcache.prefixes.index import PrefixIndex
from kvcache.prefixes.publisher import RANKS_MAX

RATE_SECONDS = 5.0
"""Interval of the event rate, in seconds."""
SILENT_SECONDS = 5.0
_PAUSES = 3
"""Factor on its longest pause after which a worker with heartbeats counts as silent."""
_LAST_SECOND = 1e11
_NONE = "–"
_MANY = "?"
_ALWAYS = ("worker", "GPU", "host", "ev/s", "lag", "lost", "recovered", "restarts", "seen")
"""Columns that are shown even if they are empty."""
ROWS_MAX = 100
"""Maximum number of workers in the table; JSON has all of them."""

Held = tuple[int, int, int]
"""Tokens of the longest prefix on the GPU, and by how many host memory, and then storage, extend it."""
NOTHING: Held = (0, 0, 0)


class Prompt(NamedTuple):
    """Prompt to look up."""

    tokens: tuple[int, ...]
    adapter: str | int | None = None
    """LoRA adapter, by name or number."""
    salt: str | None = None

    def held_in(self, index: PrefixIndex) -> dict[tuple[Hashable, int], Held]:
        """Return, for each worker and rank, the longest prefix of which all blocks are there in all groups."""
        found = {(each.worker, each.rank): NOTHING for each in index.publishers}
        # Publishers may use a number as a name, and a salt by its digest.
        adapters = [self.adapter, *([str(self.adapter)] if isinstance(self.adapter, int) else [])]
        salts = [None] if self.salt is None else [self.salt, hashlib.sha256(self.salt.encode()).hexdigest()]
        for adapter, salt in product(adapters, salts):
            matched = index.match(self.tokens, lora=adapter, salt=salt)
            for publisher, (primary, secondary, storage) in matched.items():
                held = (primary, secondary - primary, storage - secondary)
                key = (publisher.worker, publisher.rank)
                found[key] = max(found.get(key, NOTHING), held, key=sum)
        return found


class EventRate:
    """Events per second over the last seconds."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._counts: deque[tuple[float, int]] = deque()

    def add(self, now: float, count: int) -> None:
        """Add `count` events; times (seconds) never go back."""
        while self._counts and self._counts[0][0] <= now - RATE_SECONDS:
            self._counts.popleft()
        if count:
            self._counts.append((now, count))

    def per_second(self, now: float) -> float:
        """Return the mean over the last seconds, or since the start if that is later."""
        self.add(now, 0)
        return sum(count for _, count in self._counts) / min(RATE_SECONDS, max(now - self._started, 1.0))


class WorkerRow:
    """One worker: a publisher's batches of one rank."""

    def __init__(self, sender: Sender, rank: int | None, started: float) -> None:
        self.sender = sender
        self.rank = rank
        self.topic = "" if sender.worker is None else sender.worker.topic
        self.index = Index()
        self.rate = EventRate(started)
        self.seq: int | None = None
        """Last batch."""
        self.partial = False
        """True if only a part of its blocks is known: the subscription began in the middle, or batches were lost, and
        its whole state was not sent since."""
        self.lag: float | None = None
        """Delay of the last live batch after its time, in seconds; negative if clocks differ."""
        self.last_received_at: float | None = None
        """Time of the last live batch, of `time.monotonic`."""
        self.last_heartbeat_at: float | None = None
        """Time of the last live batch without events; None if there was none."""
        self._longest_pause = 0.0

    def take(self, report: Received, now: float, wall: float) -> None:
        """Apply a batch."""
        self.index.fold(report)
        self.seq, self.topic = report.seq, report.topic or self.topic
        if any(isinstance(event, AllBlocksCleared) for event in report.batch.events):
            self.partial = False
        self.rate.add(now, len(report.batch.events))
        if report.replayed:
            return
        ts = report.batch.ts
        self.lag = wall - ts if math.isfinite(ts) and abs(ts) < _LAST_SECOND else None
        if self.last_received_at is not None:
            self._longest_pause = max(self._longest_pause, now - self.last_received_at)
        self.last_received_at = now
        if not report.batch.events:
            self.last_heartbeat_at = now

    def interrupt(self, report: Report) -> None:
        """Handle missed batches, a state sent anew, or a restart of the publisher."""
        self.index.fold(report)
        if isinstance(report, Restarted):
            self._longest_pause = 0.0  # downtime
        elif isinstance(report, Missed) and not report.recovered:
            self.partial = True

    @property
    def name(self) -> str:
        """Name: its endpoint, or its topic if many publishers connect."""
        worker = self.sender.worker
        if worker is None:
            return printable(self.sender.endpoint.removeprefix("tcp://"))
        return printable(worker.topic) + (f" {printable(worker.key[:6])}" if worker.key else "")

    @property
    def blocks(self) -> Held:
        """Number of its blocks, by level."""
        return self.index.count(GPU), self.index.count(HOST), self.index.count(STORAGE)

    def state(self, connected: bool | None, now: float) -> str:
        """Return ``waiting`` or ``connected`` (nothing received yet), ``live``, ``silent`` or ``gone``."""
        if self.seq is None:
            return "connected" if connected else "waiting"
        if connected is False:
            return "gone"
        if self.last_heartbeat_at is None or self.last_received_at is None:
            return "live"  # without heartbeats this is unknown
        silent = now - self.last_received_at > max(SILENT_SECONDS, _PAUSES * self._longest_pause)
        return "silent" if silent else "live"


class Workers:
    """All workers, in the order in which they were named or first received."""

    def __init__(
        self,
        prompt: Prompt | None = None,
        *,
        connected: Callable[[Sender], bool | None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.prompt = prompt
        self._prefixes = PrefixIndex()
        """Index for a prompt only."""
        self._held: dict[tuple[Hashable, int], Held] = {}
        self._connected, self._clock, self._wall = connected, clock, wall
        self._rows: dict[Sender, dict[int | None, WorkerRow]] = {}
        self._begun: set[Sender] = set()
        """Publishers received since their numbers began."""
        self.ignored_batches = 0
        """Batches of invalid ranks (`RANKS_MAX`)."""

    def expect(self, senders: Iterable[Sender]) -> None:
        """Add workers that nothing was received from yet."""
        for sender in senders:
            self._of(sender)

    def fold(self, sender: Sender, report: Report) -> None:
        """Apply a report of a worker, or an interruption."""
        if self.prompt is not None:
            self._prefixes.fold(sender, report)
        rows = self._of(sender)
        if not isinstance(report, Received):
            for row in rows.values():
                row.interrupt(report)
            if isinstance(report, Restarted):
                self._begun.discard(sender)
            return
        rank = report.batch.rank
        if rank is not None and not 0 <= rank < RANKS_MAX:
            self.ignored_batches += 1
            return
        if rank not in rows and None in rows and rows[None].seq is None:
            # Until now its rank was unknown.
            rows[rank] = rows.pop(None)
            rows[rank].rank = rank
        if rank not in rows:
            rows[rank] = WorkerRow(sender, rank, self._clock())
            rows[rank].partial = any(row.partial for row in rows.values())
        if sender not in self._begun:
            self._begun.add(sender)
            for row in rows.values():
                row.partial = report.seq > 0
        rows[rank].take(report, self._clock(), self._wall())

    def rows(self) -> list[WorkerRow]:
        """Return a row for each rank of each worker."""
        return [row for rows in self._rows.values() for row in rows.values()]

    def look(self) -> None:
        """Look up the prompt in all workers."""
        if self.prompt is not None:
            self._held = self.prompt.held_in(self._prefixes)

    def held(self, row: WorkerRow) -> Held:
        """Return how much of the prompt a worker held at the last `look`."""
        return self._held.get((row.sender, row.rank or 0), NOTHING)

    def longest(self) -> list[WorkerRow]:
        """Return the workers with the longest prefix of the prompt, and most of it in the fastest level; or none."""
        amounts = [(sum(held), held, row) for row in self.rows() if any(held := self.held(row))]
        best = max((amount[:2] for amount in amounts), default=None)
        return [row for *amount, row in amounts if tuple(amount) == best]

    def _of(self, sender: Sender) -> dict[int | None, WorkerRow]:
        if sender not in self._rows:
            self._rows[sender] = {None: WorkerRow(sender, None, self._clock())}
        return self._rows[sender]

    # -- for people

    def show(self, out: Output) -> None:
        """Print the first `ROWS_MAX` workers as a table, below facts that are not in the rows."""
        self.look()
        longest, every = self.longest(), self.rows()
        shown = every[:ROWS_MAX]
        out.heading(f"{iso(time.time_ns())}  {count(len(every), 'worker')}")
        for line in (*self._omitted(shown, len(every)), *self._prefix_line(longest)):
            out.line(line)
        cells = [self._cells(row) for row in shown]
        names = dict.fromkeys(name for cell in cells for name in cell)
        columns = [
            name for name in names if name in _ALWAYS or any(cell[name] not in ("", _NONE) for cell in cells)
        ]
        right = [name for name in columns if name not in ("worker", "topic")]
        styles = [self._style(row, best=row in longest) for row in shown]
        out.table([{name: cell[name] for name in columns} for cell in cells], right=right, styles=styles)

    def _cells(self, row: WorkerRow) -> dict[str, str]:
        index, now, known = row.index, self._clock(), row.seq is not None
        gpu, host, storage = map(_number, row.blocks)
        return {
            "worker": row.name,
            "topic": printable(row.topic) if row.sender.worker is None else "",
            "rank": _NONE if row.rank is None else str(row.rank),
            "GPU": gpu if known else _NONE,
            "host": host if known else _NONE,
            "storage": storage if row.blocks[STORAGE] else _NONE,
            "ev/s": _number(round(row.rate.per_second(now))),
            "lag": _NONE if row.lag is None else span(row.lag),
            "lost": _MANY if row.partial and not index.missed_batches else _number(index.missed_batches),
            "recovered": _number(index.recovered_batches),
            "restarts": _number(index.restarts),
            "resyncs": _number(index.restated) if index.restated else _NONE,
            "seen": self._last_received(row),
            "prefix": "" if self.prompt is None else _levels(self.held(row)) if known else _NONE,
        }

    def _state(self, row: WorkerRow) -> str:
        return row.state(self._connected(row.sender), self._clock())

    def _last_received(self, row: WorkerRow) -> str:
        state = self._state(row)
        age = "" if row.last_received_at is None else span(self._clock() - row.last_received_at)
        return age or state if state == "live" else f"{state} {age}".rstrip()

    def _style(self, row: WorkerRow, *, best: bool) -> str:
        color = {"gone": "red", "silent": "red", "waiting": "dim", "connected": "dim"}.get(
            self._state(row), ""
        )
        if not color and (row.partial or row.index.missed_batches):
            color = "yellow"
        return f"{'bold ' if best else ''}{color}".strip()

    def _omitted(self, shown: list[WorkerRow], number: int) -> Iterator[str]:
        if number > len(shown):
            yield f"showing {len(shown):,} of {count(number, 'worker')}; --json prints all"
        if self.ignored_batches:
            batches = count(self.ignored_batches, "batch")
            yield f"{batches} of ranks above {RANKS_MAX - 1:,} ignored"
        if partial := sum(row.partial for row in shown):
            yield (
                f"the blocks of {count(partial, 'worker')} are known in part: joined in the middle (lost: {_MANY}), or "
                "batches were lost; use ENDPOINT?replay=PORT to recover them"
            )

    def _prefix_line(self, longest: list[WorkerRow]) -> Iterator[str]:
        if self.prompt is None:
            return
        prompt = count(len(self.prompt.tokens), "token")
        if not longest:
            yield f"longest prefix: no worker has a block of the prompt ({prompt})"
            return
        held, first = self.held(longest[0]), longest[0]
        more = f", and {count(len(longest) - 1, 'other')}" if len(longest) > 1 else ""
        where = first.name + ("" if first.rank is None else f" rank {first.rank}") + more
        yield f"longest prefix: {sum(held):,} of {prompt} ({_levels(held)} on GPU+host+storage) at {where}"

    # -- for programs

    def to_json(self, counts: Callable[[str], dict[str, int]]) -> dict[str, Any]:
        """Return all workers; `counts` returns the counters of an endpoint."""
        self.look()
        longest, ts = self.longest(), time.time_ns()
        prompt = None if self.prompt is None else len(self.prompt.tokens)
        workers = [self._row_json(row, longest) | counts(row.sender.endpoint) for row in self.rows()]
        return {"ts": ts, "time": iso(ts), "prompt_tokens": prompt, "workers": workers}

    def _row_json(self, row: WorkerRow, longest: list[WorkerRow]) -> dict[str, Any]:
        worker, now = row.sender.worker, self._clock()
        return {
            "endpoint": row.sender.endpoint,
            "key": worker.key if worker is not None and worker.key else None,
            "state": self._state(row),
            **pick(row, "topic", "rank", "seq", "partial", lag_seconds="lag"),
            "blocks": _by_level(row.blocks),
            **pick(row.index, "batches", "events", "missed_batches", "recovered_batches", "restated"),
            **pick(row.index, "restarts", "orphans", "unknown_removals"),
            "events_per_second": round(row.rate.per_second(now), 3),
            "heard_seconds": None if row.last_received_at is None else now - row.last_received_at,
            "heartbeat_seconds": None if row.last_heartbeat_at is None else now - row.last_heartbeat_at,
            "prefix_tokens": None if self.prompt is None else _by_level(self.held(row)),
            "longest": None if self.prompt is None else row in longest,
        }


def _levels(held: Held) -> str:
    return "+".join(f"{tokens:,}" for tokens in held)


def _number(number: int) -> str:
    return f"{number:,}" if number < 1_000_000 else f"{number / 1e6:.2f}M"


def _by_level(values: Held) -> dict[str, int]:
    return dict(zip(("gpu", "host", "storage"), values, strict=True))
