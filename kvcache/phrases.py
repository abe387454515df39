"""Numbers, times and names as text for people."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from events.log import LogEnd

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = 1_000_000
_LONG = 120
"""Seconds from which times are written with minutes."""


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Format a number with its noun: "1 block", "2,004 blocks", "3 batches"."""
    return f"{number:,} {noun if number == 1 else plural or noun + ('es' if noun.endswith('ch') else 's')}"


def batches(first: int, last: int, one: str = "", more: str = "") -> str:
    """Format batches by number, with the verb for one or for more of them: "batch 7 was", "batches 7 to 9 were"."""
    named = f"batch {first:,} {one}" if first == last else f"batches {first:,} to {last:,} {more}"
    return named.rstrip()


def duration(seconds: float) -> str:
    """A time for people, in the unit that suits it, from two minutes on in two."""
    if seconds >= _LONG:
        return _in_units(round(seconds), 2)
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def _in_units(seconds: int, most: int) -> str:
    """A time in days, hours, minutes and seconds, of which the `most` largest are written: "1 h 58 min"."""
    parts = list[str]()
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        number, seconds = divmod(seconds, length)
        if number or parts:
            parts.append(f"{number:,} {unit}")
    return " ".join(parts[:most])


def share(part: float) -> str:
    """Format a fraction in percent."""
    return f"{part:.1%}".replace("%", " %")


def few(number: float) -> str:
    """Format a number with three significant digits, without an exponent."""
    digits = 2 - math.floor(math.log10(number)) if number > 0 else 0
    return f"{number:,.{min(max(digits, 0), 9)}f}"


def size(num_bytes: int) -> str:
    """A number of bytes, in the unit that suits it."""
    for unit, length in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= length:
            return f"{num_bytes / length:.1f} {unit}"
    return f"{num_bytes} B"


def span(seconds: float) -> str:
    """Format a time in few characters, rounded to its significant part."""
    sign, seconds = "-" if seconds < 0 else "", abs(seconds)
    for below, unit, text in (
        *((1.0, 1e-3, "{:.0f} ms"), (10.0, 1.0, "{:.1f} s"), (120.0, 1.0, "{:.0f} s")),
        *((7200.0, 60.0, "{:.0f} min"), (172_800.0, 3600.0, "{:.0f} h")),
    ):
        if seconds < below:
            return sign + text.format(seconds / unit)
    return f"{sign}{seconds / 86_400:,.0f} d"


def since(ts: int, first_ts: int) -> str:
    """Format a time relative to the log's first batch, as in ``+12.345s``; below 0 where the clock was set back."""
    ms = abs(ts - first_ts) // _MS
    return f"{'-' if ts < first_ts else '+'}{ms // 1000}.{ms % 1000:03}s"


def later(ts: int, first_ts: int) -> str:
    """Format the time since the log's first batch as ``+1 h 50 min 6 s``; below two minutes like `since`."""
    seconds = (ts - first_ts) / 1e9
    if abs(seconds) < _LONG:
        return since(ts, first_ts)
    return ("-" if seconds < 0 else "+") + _in_units(int(abs(seconds)), 4)


def iso(ts: int) -> str:
    """Format a time for programs: ISO 8601, UTC, all nine digits of the nanoseconds; it sorts as text."""
    seconds, ns = divmod(ts, 1_000_000_000)
    return f"{(_EPOCH + timedelta(seconds=seconds)).replace(tzinfo=None).isoformat()}.{ns:09}Z"


def printable(text: str) -> str:
    """Remove everything from a text that could control a terminal."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def is_whole(end: LogEnd) -> bool:
    """True if the log contains everything that its writer published."""
    return end.kind == "clean" and not _lost(end)


def _lost(end: LogEnd) -> bool:
    return end.next_seq > (-1 if end.last_seq is None else end.last_seq) + 1


def describe_end(end: LogEnd) -> str:
    """Describe the end of a log in words."""
    if end.kind == "torn":
        where = f"{printable(str(end.path))}, byte {end.offset:,}"
        return f"torn: the writer stopped inside a batch ({where}); everything before it is whole"
    if _lost(end):
        last = -1 if end.last_seq is None else end.last_seq
        return f"closed, but {batches(last + 1, end.next_seq - 1, 'was', 'were')} lost before"
    if end.kind == "clean":
        return "closed in good order"
    return "open: a writer is at work, or was killed between two batches"
