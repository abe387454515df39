"""Times and places in a log, parsed and formatted: a batch, a time, or a time since the log's first batch.

`EventBatch.ts` is the writer's clock at the batch's creation, in nanoseconds since 1970 (UTC). A time denotes the last
batch at or before it. Logs are read from their beginning, and clocks may be set back: the batches up to a time
are those before the first one that is later. So if a clock shows the same time twice, the first one is used; batches
that it dates back are addressed by number, or by a time later than all before them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Literal

from events.log import LogReader
from events.log.segments import is_log
from events.log.snapshots import snapshots
from events.types import EventBatch
from kvcache.errors import CapacityError, KVCacheError, UsageError
from kvcache.phrases import iso, since
from kvcache.replay import BeyondEnd

FORMS = ("relative", "utc", "local")
FORMS_HELP = (
    "A MOMENT is a batch number (600; 12,224 and an event's address such as 600.17 also work), a time "
    "(2026-01-01T00:00:12.5Z, or with an offset such as +02:00; UTC if there is none), or a time since the log's first "
    "batch in ms, s (the default), m or min, h, d (+90, +1.5s, +5min, +1h5m). A time selects the last batch at or "
    "before it; if the writer's clock was set back, the batch before the first later one. A MOMENT after the end of "
    "the log is an error, except for --until, where it means the end."
)

_BATCH = re.compile(r"(\d{1,3}(?:,\d{3}){1,5}|\d{1,18})(?:\.\d{1,9})?", re.ASCII)
"""Batch number, also with commas, or an event's address (BATCH.INDEX), as they are printed."""
_NUMBER = r"\d{1,12}(?:\.\d{1,9})?"
_UNIT = r"ms|s|min|m|h|d"
_LENGTH = re.compile(rf"(?:{_NUMBER}|(?:{_NUMBER}(?:{_UNIT})){{1,6}})", re.ASCII)
_PART = re.compile(rf"({_NUMBER})({_UNIT})?", re.ASCII)
_TIME = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[T ](\d\d:\d\d(?::\d\d(?:\.(\d{1,9}))?)?)(Z|[+-]\d\d:\d\d)?)?",
    re.ASCII | re.IGNORECASE,
)
_NS = {"ms": 10**6, "s": 10**9, "m": 60 * 10**9, "min": 60 * 10**9, "h": 3600 * 10**9, "d": 86400 * 10**9}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(eq=False, repr=False)
class NoBatch(CapacityError):
    """A moment was given for a log without batches."""

    moment: str
    text = "the log has no batches yet, so there is none at {moment}"


Where = Literal["before the log's first batch,", "after the log's last batch,", "in a gap after batch"]


@dataclass(eq=False, repr=False)
class OutsideLog(CapacityError):
    """A log has no batch at a moment; `where` is its relation to batch `seq`."""

    moment: str
    where: Where
    seq: int
    ts: int
    """Time of that batch, nanoseconds since 1970."""
    first_ts: int
    """Time of the log's first batch."""

    def __str__(self) -> str:
        when = f"{since(self.ts, self.first_ts)}, {iso(self.ts)}"
        return f"{self.moment} is {self.where} {self.seq} ({when})"


@dataclass(frozen=True)
class LogPosition:
    """A place in a log: a batch's number, nanoseconds since 1970 (UTC), or nanoseconds since the log's first batch."""

    kind: Literal["batch", "time", "since"]
    value: int
    given: str
    """Original spelling."""

    def __str__(self) -> str:
        return f"batch {self.value}" if self.kind == "batch" else self.given

    @classmethod
    def parse(cls, text: str) -> LogPosition:
        """Parse an argument. Raises ArgumentTypeError."""
        if match := _BATCH.fullmatch(text):
            return cls("batch", int(match[1].replace(",", "")), text)
        if text[:1] == "+" and (ns := _length(text[1:])) is not None:
            return cls("since", ns, text)
        if match := _TIME.fullmatch(text):
            return cls("time", _nanoseconds(text, *match.groups()), text)
        raise _no_moment(text)

    def distance(self, batch: EventBatch, first_ts: int) -> int:
        """Return a number that is negative before the moment, positive after it. `first_ts` is the log's first time."""
        if self.kind == "batch":
            return batch.seq - self.value
        return batch.ts - self.value - (first_ts if self.kind == "since" else 0)


def _length(text: str) -> int | None:
    """Parse a length of time into nanoseconds; None if it is none."""
    if not _LENGTH.fullmatch(text):
        return None
    return sum(int(Fraction(number) * _NS[unit or "s"]) for number, unit in _PART.findall(text))


def length(text: str) -> int:
    """Parse an argument that is a length of time above 0, into nanoseconds."""
    ns = _length(text)
    if not ns:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a duration: use ms, s, m or min, h, d, as in 90, 5m, 1.5s, 1h5m"
        )
    return ns


def _no_moment(text: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(
        f"{text!r} is not a moment of a log: give a batch (600), a time (2026-01-01T00:00:12Z), or the time since the "
        "log's first batch in ms, s, m or min, h, d (+90, +1.5s, +5min, +1h5m)"
    )


def _nanoseconds(text: str, day: str, time: str | None, fraction: str | None, zone: str | None) -> int:
    """Return nanoseconds since 1970. Python's own parser has no nanoseconds, so it gets whole seconds."""
    whole = (time or "00:00").partition(".")[0]
    offset = "+00:00" if zone in (None, "Z", "z") else zone
    try:
        moment = datetime.fromisoformat(f"{day}T{whole}{offset}")
    except ValueError:  # no such day, hour or zone
        raise _no_moment(text) from None
    return (moment - _EPOCH) // timedelta(seconds=1) * 10**9 + int((fraction or "").ljust(9, "0"))


class UpTo:
    """Batches of a log up to a moment (None: all), iterable once.

    Afterwards `check` raises unless the log has a batch at the moment.
    """

    def __init__(self, batches: Iterable[EventBatch], moment: LogPosition | None) -> None:
        self._reader = batches if isinstance(batches, LogReader) else None
        self._batches = iter(batches)
        self._moment = moment
        self._reached = False
        """True if a batch was at the moment or, for a time, one before it and one after it."""
        self._later: EventBatch | None = None
        """First batch after a time: it has to be read to know that the previous one was the last."""
        self.first: EventBatch | None = None
        """First batch read."""
        self.first_ts = 0
        """Time of the log's first batch, even if that was removed; 0 before anything was read."""
        self.last: EventBatch | None = None
        """Last batch yielded."""
        self.ended = False
        """True if the log ended before the moment."""

    def __iter__(self) -> Iterator[EventBatch]:
        moment = self._moment
        by_number = moment is not None and moment.kind == "batch"
        for batch in self._batches:
            if self.first is None:
                begun = None if self._reader is None else self._reader.first_ts
                self.first, self.first_ts = batch, batch.ts if begun is None else begun
            distance = -1 if moment is None else moment.distance(batch, self.first_ts)
            if distance > 0:
                self._later = batch
                self._reached = self._reached or (self.last is not None and not by_number)
                return
            self._reached = self._reached or distance == 0
            self.last = batch
            yield batch
            if distance == 0 and by_number:
                return
        self.ended = True

    def rest(self) -> Iterator[EventBatch]:
        """Yield the batches after the moment."""
        later = [] if self._later is None else [self._later]
        return chain(later, self._batches)

    def check(self) -> None:
        """Raise `BeyondEnd`, `OutsideLog` or `NoBatch` if the log has no batch at the moment."""
        moment = self._moment
        if moment is None or self._reached:
            return
        if self.ended:
            raise self.after_end(moment)
        if self.last is None:
            raise self._outside(moment, "before the log's first batch,", self.first)
        if moment.kind == "batch":
            raise self._outside(moment, "in a gap after batch", self.last)

    def after_end(self, moment: LogPosition) -> KVCacheError:
        """Return the error for a moment after the log's last batch."""
        if self.last is not None and moment.kind == "batch":
            return BeyondEnd(moment.value, self.last.seq)
        return self._outside(moment, "after the log's last batch,", self.last)

    def _outside(self, moment: LogPosition, where: Where, batch: EventBatch | None) -> KVCacheError:
        if batch is None or self.first is None:
            return NoBatch(str(moment))
        return OutsideLog(str(moment), where, batch.seq, batch.ts, self.first_ts)


def state_before(log: Path, moment: LogPosition | None) -> LogReader:
    """Open a log up to a moment (None: all) for the state there, from the newest earlier snapshot on."""
    if moment is None:
        return LogReader(log, state_at=sys.maxsize)
    if moment.kind == "batch":
        return LogReader(log, state_at=moment.value)
    for snapshot in snapshots(log, newest_first=True) if is_log(log) else ():
        about = snapshot.about
        # The batches up to a time are those before the first later one.
        if about.latest_ts <= moment.value + (about.first_ts if moment.kind == "since" else 0):
            return LogReader(log, state_at=snapshot.seq)
    return LogReader(log)


def at(batches: UpTo) -> Iterator[tuple[EventBatch, bool]]:
    """Yield the batches, each with True if it is the one at the moment: the last. Raises what `UpTo.check` does."""
    held = None
    for batch in batches:
        if held is not None:
            yield held, False
        held = batch
    batches.check()
    if held is not None:
        yield held, True


def span(batches: UpTo, begin: LogPosition | None) -> Iterator[tuple[EventBatch, bool]]:
    """Yield the batches, each with True from the first one at `begin` or later on.

    Raises what `UpTo.check` does if none comes, and `UsageError` if `begin` is later than where `batches` end.
    """
    begun = begin is None
    for batch in batches:
        begun = begun or begin is None or begin.distance(batch, batches.first_ts) >= 0
        yield batch, begun
    if batches.last is None and not batches.ended:
        batches.check()
    elif begin is not None and not begun and (batches.last is not None or begin.value):
        if not batches.ended:
            raise UsageError(f"nothing to show: {begin} is after the given end")
        raise batches.after_end(begin)


class Times:
    """Formatter of batch times in one of `FORMS`; `first_ts` is the time of the log's first batch.

    `relative` formats a time relative to it: to the millisecond, as `--at` takes it, or for people (`later`).
    """

    def __init__(self, form: str, first_ts: int = 0, relative: Callable[[int, int], str] = since) -> None:
        self._form, self._relative = form, relative
        self.first_ts = first_ts

    def of(self, ts: int) -> str:
        """Format a batch's time."""
        if self._form == "relative":
            return self._relative(ts, self.first_ts)
        time = _EPOCH + timedelta(milliseconds=ts // _NS["ms"])
        if self._form == "local":
            return time.astimezone().isoformat(timespec="milliseconds")
        return f"{time.replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"
