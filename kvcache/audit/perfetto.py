"""A log as a trace for ui.perfetto.dev: requests and steps on a time axis, and the cache's occupancy.

The form is Chrome's trace events as JSON, which Perfetto, Chrome and others open. Times are microseconds since the
log's first batch, to the nanosecond. Concurrent requests have lines of their own; a request keeps its line, which is
free for the next one when it has ended.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from heapq import heappop, heappush
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from events import types as ev
from events.types import EventBatch
from kvcache.audit.admission import ExplainedAdmission
from kvcache.audit.export import replacing
from kvcache.audit.history import EpochClock, HistoryFold, HistoryListener, RunningRequest, laid_out
from kvcache.audit.tables import RequestRow, Requests, StepRow, step_row
from kvcache.errors import UsageError
from kvcache.phrases import iso

_BEGIN, _END = b'{"traceEvents":[\n', b"\n],%s}\n"
_GZIP = b"\x1f\x8b"
_STEPS, _REQUESTS, _CACHE = 1, 2, 3
"""Groups of lines, which Chrome calls processes."""
_TITLES = {_STEPS: "steps", _REQUESTS: "requests", _CACHE: "cache"}
_OF_REQUEST = ("request_id", "outcome", "prompt_tokens", "reused_tokens", "output_tokens")
_PER_STEP = ("stored", "removed", "cleared", "offloaded", "onboarded")
Event = dict[str, Any]


class PerfettoWriter:
    """Writer of a log's batches as a trace; requests are written when they end.

    `events` counts the events written. A request whose admission is not in the log is left out.
    """

    def __init__(self, batches: Iterable[EventBatch]) -> None:
        self._batches = batches
        self.events = 0

    def write(self, path: Path, *, force: bool = False) -> None:
        """Write the trace to a new file, compressed if its name ends in ``.gz``; `force` replaces an earlier trace.

        Raises UsageError if there is no batch, and what `replacing` and reading a log raise.
        """
        packed, encoder = path.suffix == ".gz", msgspec.json.Encoder()
        header = _GZIP if packed else _BEGIN
        with replacing(path, force=force, header=header) as new, ExitStack() as files:
            file = cast("BinaryIO", files.enter_context((gzip.open if packed else open)(new, "xb")))
            file.write(_BEGIN)
            picture = _Picture()
            for event in picture.events(self._batches):
                file.write(b",\n" * bool(self.events) + encoder.encode(event))
                self.events += 1
            if picture.first is None:
                raise UsageError("the log has no batches yet: nothing to export")
            more = {"displayTimeUnit": "ms", "otherData": {"begin": iso(picture.first)}}
            file.write(_END % encoder.encode(more)[1:-1])


class _Picture:
    """Converter of a log to trace events."""

    def __init__(self) -> None:
        self.first: int | None = None
        """Beginning of the log, in ns."""
        self._now = 0
        self._lanes = _Lanes()
        self._running = 0
        self._counters: dict[str, dict[str, int]] = {}

    def events(self, batches: Iterable[EventBatch]) -> Iterator[Event]:
        """Yield all events, as soon as they are known."""
        yield from (_title(pid, "process_name", title) for pid, title in _TITLES.items())
        yield _title(_STEPS, "thread_name", "steps", tid=1)
        requests = Requests()
        history = HistoryFold(requests, self._lanes)
        for batch in laid_out(batches, EpochClock()):
            self.first = batch.ts if self.first is None else self.first
            history.fold(batch)
            yield from self._step(step_row(batch, history.replayed.state))
            yield from chain.from_iterable(map(self._request, requests.take()))
        for rows in requests.remaining(history):
            yield from chain.from_iterable(map(self._request, rows))
        yield from (
            _title(_REQUESTS, "thread_name", f"line {lane}", tid=lane)
            for lane in range(1, self._lanes.count + 1)
        )

    def _at(self, ts: int) -> float:
        return (ts - (self.first or 0)) / 1000

    def _slice(self, pid: int, tid: int, name: str, begin: int, end: int, args: Event) -> Event:
        """Return an event with a duration."""
        times = {"ts": self._at(begin), "dur": (end - begin) / 1000}
        return {"ph": "X", "pid": pid, "tid": tid, "name": name, **times, "args": args}

    def _step(self, row: StepRow) -> Iterator[Event]:
        """Yield the time since the previous step, if requests ran then, and the counters after it."""
        begin = self._now if self._running else row.ts
        counts = {
            name: value for name, value in row._asdict().items() if value and name not in ("ts", "occupancy")
        }
        yield self._slice(_STEPS, 1, f"step {row.seq}", min(begin, row.ts), row.ts, counts)
        self._now, self._running = max(self._now, row.ts), row.running
        windows = {level.window for level in row.occupancy}
        for level in row.occupancy:
            where = level.level if len(windows) == 1 else f"{level.level}, window {level.window}"
            values = {"held": level.held, "cached": level.unreferenced, "blank": level.blank}
            yield from self._counter(f"blocks of {where}", values)
        yield from self._counter("running requests", {"requests": row.running})
        yield from self._counter(
            "blocks per step", {name: getattr(row, f"{name}_blocks") for name in _PER_STEP}
        )

    def _counter(self, name: str, values: dict[str, int]) -> Iterator[Event]:
        """Yield a counter, only if its values have changed."""
        if self._counters.get(name) != values:
            self._counters[name] = values
            yield {"ph": "C", "pid": _CACHE, "name": name, "ts": self._at(self._now), "args": values}

    def _request(self, row: RequestRow) -> Iterator[Event]:
        """Yield a request's slice, and within it prefill and decoding."""
        name = f"request {row.request_id}"
        if row.outcome == "refused" and row.first_refused_ts is not None:
            at = {"ts": self._at(row.first_refused_ts), "s": "p"}
            yield {"ph": "i", "pid": _REQUESTS, "tid": 0, "name": f"{name} refused", **at}
        if row.admission is None or row.admitted_ts is None:
            return
        lane, computed = self._lanes.release(row.admission)
        begin, end = row.admitted_ts, self._now if row.ended_ts is None else row.ended_ts
        said = row._asdict()
        args = {name: said[name] for name in _OF_REQUEST}
        args |= {reason: tokens for reason, tokens in row.tokens_by_reason.items() if tokens}
        args |= {name: said[name] for name in ("session", "labels", "stop") if said[name] is not None}
        yield self._slice(_REQUESTS, lane, name, begin, end, args)
        middle = end if computed is None else computed
        yield self._slice(_REQUESTS, lane, "prefill", begin, middle, {})
        if computed is not None:
            yield self._slice(_REQUESTS, lane, "decode", middle, end, {})


class _Lanes(HistoryListener):
    """Lines of running requests, and the times when their prompts were computed, by admission number."""

    def __init__(self) -> None:
        self.count = 0
        self._free: list[int] = []
        self._of: dict[int, int] = {}
        self._computed: dict[int, int] = {}

    def admitted(self, history: HistoryFold, admission: ExplainedAdmission) -> None:
        """Assign the first free line."""
        if not self._free:
            self.count += 1
        self._of[admission.number] = heappop(self._free) if self._free else self.count

    def release(self, number: int) -> tuple[int, int | None]:
        """Free the line of a request; return it, and the time in ns when its prompt was computed."""
        lane = self._of.pop(number)
        heappush(self._free, lane)
        return lane, self._computed.pop(number, None)

    def ended(self, history: HistoryFold, request: RunningRequest, event: ev.SequenceRemoved) -> None:
        """Record the prompt of a request that ended in the step that computed it."""
        self._note(history, request)

    def batch_ended(self, history: HistoryFold) -> None:
        """Record the prompts that are computed."""
        for request in history.running.values():
            self._note(history, request)

    def _note(self, history: HistoryFold, request: RunningRequest) -> None:
        if request.number not in self._computed and request.computed >= request.sequence.num_prompt_tokens:
            self._computed[request.number] = history.now


def _title(pid: int, kind: str, name: str, **thread: int) -> Event:
    return {"ph": "M", "pid": pid, "name": kind, "args": {"name": name}, **thread}
