"""``kvcache top``: live view of a cache, from the log that it is writing."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from events.log import LogEnd, LogReader
from events.log.reader import Beginning, LogHead, beginnings, first_batch
from events.log.segments import Segment, segment_paths
from events.types import PRIMARY, SECONDARY, EpochStarted, EventBatch
from kvcache.audit.history import HistoryFold
from kvcache.audit.recent import Recent, RecentTotals
from kvcache.audit.tables import occupancy
from kvcache.cli.audit import reasons_json, show_reasons
from kvcache.cli.options import add_shared, option
from kvcache.cli.output import Output, by_level, left_of_log, paced, pick, stamp
from kvcache.cli.process import StopSignals
from kvcache.cli.replay import has_secondary, levels_json, show_levels
from kvcache.fold.state import CacheState
from kvcache.maintenance.prune import state_batch
from kvcache.phrases import batches, iso, printable, share, span
from kvcache.publish.errors import LogReplaced
from kvcache.publish.follower import CatchUp

_INTERVAL_NS = 10**9
_CONTENTS_MAX = 1 << 20
"""Maximum number of distinct blocks with a known history, unless more are cached; a fifth of a gigabyte."""
_POLL_SECONDS = 0.1
_LAG_SECONDS = 1.0
"""Seconds without reaching the end of the log after which a reader lags."""
NOW_NS = 10 * 10**9
"""Interval of current rates, in ns."""
_NONE = "–"
_EPILOG = """\
Rates and reasons cover the last seconds and --window, by the clock of the log's writer. `kvcache docs audit` defines
the reasons, `kvcache docs monitoring` the numbers, and `kvcache docs json` the keys.

Reading starts from the newest epoch or snapshot before the window. Without one, the whole log is read, which takes long
if it is large; the settings log.retain_bytes and log.retain_seconds make snapshots.

The log is followed until Ctrl-C, also if its writer closes it and starts again. Exits with 1 if the log is damaged, was
removed, or was replaced by another one.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Watch a running cache by its log: requests, hit rate, reasons for computed prompt tokens, occupancy, "
        "evictions\nand preemptions. On a terminal the view is updated in place (if rich is installed)."
    )
    parser.epilog = _EPILOG
    add = partial(option, parser)
    add_shared(parser, log="a log directory", json="print each update as a line with a JSON object")
    add(
        "--window TIME",
        "period of the longer rates and of the reasons, as in 90s, 5m or 1h (default: 5m)",
        default="5m",
    )
    add(
        "--interval TIME",
        "time between updates (default: 1s on a terminal; otherwise the state is printed once)",
    )
    add("--once", "print the current state once")


def run(args: argparse.Namespace, out: Output) -> int:
    """Show a log until a signal comes, or once."""
    log = Followed(args.log, args.window)
    as_json = (lambda: to_json(log)) if args.json else None
    with StopSignals() as stop, out.live(lambda: show(log, out), as_json) as (look, in_place):
        if not args.once and (in_place or args.json or args.interval is not None):
            log.read(paced(look, (args.interval or _INTERVAL_NS) / 1e9), stop.is_set)
        else:
            log.read(lambda: None, stop.is_set, follow=False)
        look()
    return stop.exit_code


class Followed:
    """A log, read from the newest epoch or snapshot that is at least `window` ns older than its last batch."""

    def __init__(
        self,
        log: Path,
        window: int,
        *,
        wall_ns: Callable[[], int] = time.time_ns,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.log = log
        self.window = window
        self._wall_ns, self._clock = wall_ns, clock
        self._recent = Recent(window)
        self.history = HistoryFold(self._recent)
        self.known_since: tuple[int, int] | None = None
        """Batch with the state of which reading began, and its time; None if reading began with the log."""
        self.end: LogEnd | None = None
        """End of the log, if it was not followed."""
        self._reader: LogReader | None = None
        self._started: EpochStarted | None = None
        """Start of the current epoch."""
        self._batches = 0
        self._came_at: float | None = None
        """Arrival time of the last batch, by the clock; None if it existed when reading began."""
        self._begun_at = self._clock()
        self._at_end_at: float | None = None
        """Time when the end of the log was first reached; None if not yet."""

    def read(
        self, look: Callable[[], None], stop: Callable[[], bool] = lambda: False, *, follow: bool = True
    ) -> None:
        """Read the log to its end, and `follow` it until `stop()`; `look` is called after each batch and meanwhile.

        Raises what reading and folding do, and LogReplaced.
        """

        def waiting() -> bool:
            self._at_end_at = self._clock()
            self._refuse_other_log()
            look()
            return stop()

        begin = self._beginning()
        start = None if begin is None or begin.is_snapshot else begin.seq
        state_at = begin.seq if begin is not None and begin.is_snapshot else None
        self._reader = reader = LogReader(
            self.log, follow=follow, stop=waiting, start=start, state_at=state_at, poll_seconds=_POLL_SECONDS
        )
        try:
            for batch in reader:
                self._fold(batch)
                look()
                if stop():
                    return
        except FileNotFoundError:
            if self.log.is_dir():
                raise
            raise LogReplaced(self.log) from None
        self._at_end_at = self._clock()
        self.end = reader.end

    @property
    def state(self) -> CacheState:
        """State of the cache after the last batch."""
        return self.history.replayed.state

    @property
    def closed(self) -> bool:
        """True if the writer has closed the log, so that only a new epoch can follow."""
        return self._reader is not None and self._reader.closed

    @property
    def age(self) -> float:
        """Seconds since the last batch: since its arrival, or by the wall clock if it existed before; at least 0."""
        if self._came_at is not None:
            return self._clock() - self._came_at
        last = self.history.replayed.last_ts
        return 0.0 if last is None else max(0, self._wall_ns() - last) / 1e9

    @property
    def waiting(self) -> int:
        """Requests that were refused or preempted in the window, and not admitted since."""
        return self._recent.waiting(self._until)

    def recent_totals(self, length: int) -> RecentTotals:
        """Return counts over the last `length` ns, or over those before the end of a closed log."""
        return self._recent.over(length, self._until)

    def catch_up(self) -> CatchUp | None:
        """Return the distance from the end of the log; None if it is reached. Raises OSError."""
        reader = self._reader
        if reader is None or not self._is_lagging:
            return None
        seconds = max(self._clock() - self._begun_at, 1e-3)
        return CatchUp(reader.bytes_left(), reader.bytes_read / seconds, self._batches / seconds)

    @property
    def _until(self) -> int:
        return self._recent.last_at + (0 if self.closed else int(self.age * 1e9))

    @property
    def _is_lagging(self) -> bool:
        return self._at_end_at is None or self._clock() - self._at_end_at > _LAG_SECONDS

    def _beginning(self) -> Beginning | None:
        with closing(LogHead(self.log)) as head:
            found = head.look()
        if found is None or found.ts is None:
            return None
        for each in reversed(beginnings(self.log)):
            batch = first_batch(self.log, each)
            if batch is not None and batch.ts <= found.ts - self.window:
                return each
        return None

    def _fold(self, batch: EventBatch) -> None:
        assert self._reader is not None
        if not self._batches and (batch.seq or self._reader.snapshot is not None):
            self.known_since = batch.seq, batch.ts
        first = batch.events[0] if batch.events else None
        if isinstance(first, EpochStarted):
            self._started = first
        self.history.fold(batch)
        self._batches += 1
        self._came_at = None if self._is_lagging else self._clock()
        known = len(self.history.contents)
        if known > _CONTENTS_MAX and known > 2 * sum(each.blocks for each in occupancy(self.state)):
            self._forget()

    def _forget(self) -> None:
        """Restart the history with the cached blocks only: else memory would grow with the log."""
        before = self.history
        assert self._started is not None
        batch = state_batch(before.replayed, self._started)
        self.history = HistoryFold()  # without listeners: this batch has been counted
        self.history.fold(batch)
        self.history.epochs, self.history.replayed.gaps = before.epochs, before.replayed.gaps
        self.history.listeners = (self._recent,)
        self.known_since = batch.seq, batch.ts

    def _refuse_other_log(self) -> None:
        """Raise LogReplaced if the log is gone, or is another one than was read."""
        paths = segment_paths(self.log)
        known = None if self._started is None else self._started.log_id
        if not paths and known is not None:
            raise LogReplaced(self.log)
        with suppress(FileNotFoundError):  # compressed or moved in the meantime
            for path in paths[-1:]:
                with Segment(path) as segment:
                    header = segment.header()
                if header is not None and known not in (None, header.log_id):
                    raise LogReplaced(self.log)


# -- for people


def show(log: Followed, out: Output) -> None:
    """Print everything known now."""
    created, name = log.state.created, printable(str(log.log))
    if created is not None:
        name += f": epoch {log.state.epoch}, decided by {printable(created.engine or 'kvcache')}"
    out.heading(name)
    for line in (*_status(log), *_notes(log)):
        out.line(line)
    if created is None:
        return
    _show_rates(log, out)
    out.line()
    show_levels(log.state, out, bars=True)
    out.line()
    recent = log.recent_totals(log.window)
    # Most first, because a terminal may cut off the last.
    show_reasons(f"prompt tokens of the last {span(recent.seconds)}", recent.reasons, out, most_first=True)
    if not recent.reasons.any():
        out.line("no request was admitted in this period")


def _status(log: Followed) -> Iterator[str]:
    replayed = log.history.replayed
    if replayed.last_ts is None:
        yield "no batch has been written yet"
        return
    last = f"batch {replayed.last_seq:,}, {span(log.age)} ago"
    if log.closed:
        last += "; the log was closed by its writer"
    elif log.end is not None and log.end.kind == "torn":
        last += "; the log has a torn end: its writer was killed, or is active"
    yield last
    if (catch_up := log.catch_up()) is not None:
        yield left_of_log(catch_up)
    since = f"refused or preempted in the last {span(log.window / 1e9)}"
    yield f"{len(log.state.sequences):,} running, {log.waiting:,} waiting ({since})"


def _show_rates(log: Followed, out: Output) -> None:
    """Print rates of two intervals in columns: now, and in the window."""
    spans = [log.recent_totals(min(NOW_NS, log.window)), log.recent_totals(log.window)]
    if span(spans[0].seconds) == span(spans[1].seconds):
        spans = spans[:1]
    rates: list[tuple[str, Callable[[RecentTotals], int]]] = [
        ("prompt tokens/s", lambda recent: recent.prompt_tokens),
        ("requests/s", lambda recent: recent.admitted),
        ("refusals/s", lambda recent: recent.refused),
        ("preemptions/s", lambda recent: recent.preempted),
        ("evictions/s from primary", lambda recent: recent.evicted[PRIMARY]),
    ]
    if has_secondary(log.state):
        rates.append(("evictions/s from secondary", lambda recent: recent.evicted[SECONDARY]))
    columns = [f"last {span(each.seconds)}" for each in spans]
    hits = [share(each.reused_tokens / each.prompt_tokens) if each.prompt_tokens else _NONE for each in spans]
    cells = [("token hit rate", hits)]
    cells += [(name, [_per_second(of(each), each.seconds) for each in spans]) for name, of in rates]
    out.table([{"": name} | dict(zip(columns, row, strict=True)) for name, row in cells], right=columns)


def _per_second(number: int, seconds: float) -> str:
    rate = number / seconds if seconds else None
    return _NONE if rate is None else f"{rate:,.1f}" if rate < 100 else f"{rate:,.0f}"


def _notes(log: Followed) -> Iterator[str]:
    """Yield notes on unknown values."""
    if log.known_since is not None:
        seq, ts = log.known_since
        yield f"history known from batch {seq:,} ({iso(ts)}): blocks evicted or lost earlier count as never seen"
    for gap in log.history.replayed.gaps[-1:]:
        yield f"{batches(gap.first_seq, gap.last_seq, 'is missing and', 'are missing and')} not counted"
    if log.state.created is not None and not log.history.tokens_recorded:
        yield "the log does not record tokens, so the reasons for computed tokens are unknown"


# -- for programs


def to_json(log: Followed) -> dict[str, Any]:
    """Return everything known now."""
    replayed, state, since = log.history.replayed, log.state, log.known_since
    ts = replayed.last_ts
    return {
        **stamp(None if ts is None else replayed.last_seq, ts),
        "epoch": None if ts is None else state.epoch,
        "engine": log.history.engine or None,
        **pick(log, "closed", "waiting"),
        "last_batch_age_seconds": None if ts is None else log.age,
        "caught_up": log.catch_up() is None,
        "known_since_seq": None if since is None else since[0],
        "tokens_recorded": log.history.tokens_recorded,
        "running": len(state.sequences),
        "groups": levels_json(state),
        "now": _recent_json(log.recent_totals(min(NOW_NS, log.window))),
        "recent": _recent_json(log.recent_totals(log.window)),
    }


def _recent_json(recent: RecentTotals) -> dict[str, Any]:
    return {
        **pick(recent, "seconds", "first_seq", "preempted", "prompt_tokens", "reused_tokens"),
        **pick(recent, batches="steps", requests="admitted", refusals="refused"),
        "hit_rate": recent.reused_tokens / recent.prompt_tokens if recent.prompt_tokens else None,
        "evicted": by_level(recent.evicted),
        "reasons": reasons_json(recent.reasons),
    }
