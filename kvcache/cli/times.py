"""The wall clock of batches, for people and for programs.

`EventBatch.ts` is what the writer's clock showed when the batch was made, in nanoseconds since 1970 (UTC). People
mostly want to know how far into a log something happened; by the time of day they compare it with other logs.
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime, timedelta

from kvcache.audit.phrases import iso as iso
from kvcache.audit.phrases import since as since

FORMS = ("relative", "utc", "local")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = 1_000_000


def add_option(parser: argparse.ArgumentParser) -> None:
    """Declare ``--time``."""
    parser.add_argument(
        "--time",
        choices=FORMS,
        default="relative",
        help="how times are shown, cut to milliseconds: since the log's first batch (relative, as it is without this), "
        "or the time of day",
    )


class Times:
    """Times as one of `FORMS`; `first_ts` is of the log's first batch."""

    def __init__(self, form: str, first_ts: int = 0) -> None:
        self._form = form
        self.first_ts = first_ts

    def of(self, ts: int) -> str:
        """A batch's time, for people."""
        if self._form == "relative":
            return since(ts, self.first_ts)
        time = _EPOCH + timedelta(milliseconds=ts // _MS)
        if self._form == "local":
            return time.astimezone().isoformat(timespec="milliseconds")
        return f"{time.replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"


def span(seconds: float) -> str:
    """A time in few letters."""
    sign, seconds = "-" if seconds < 0 else "", abs(seconds)
    for below, unit, text in ((1.0, 1e-3, "{:.0f} ms"), (10.0, 1.0, "{:.1f} s"), (120.0, 1.0, "{:.0f} s")):
        if seconds < below:
            return sign + text.format(seconds / unit)
    for below, unit, text in ((7200.0, 60.0, "{:.0f} min"), (172_800.0, 3600.0, "{:.0f} h")):
        if seconds < below:
            return sign + text.format(seconds / unit)
    return f"{sign}{seconds / 86_400:,.0f} d"
