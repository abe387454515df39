"""``kvcache top``: what a cache does now, from the log that it is writing."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvcache.cli import moments, top_views
from kvcache.cli.followed import Followed
from kvcache.cli.live import Paced, display
from kvcache.cli.output import Output
from kvcache.cli.process import StopSignals

_INTERVAL_NS = 10**9
_EPILOG = """\
Rates and reasons are those of the last seconds and of --window, by the clock of the log's writer. `kvcache docs audit`
says what the reasons mean, `kvcache docs monitoring` what the numbers do, and `kvcache docs json` has the keys.

Reading begins with the newest epoch or snapshot before the window. A log without any is read from its beginning, which
takes long where it is large; the settings log.retain_bytes and log.retain_seconds have snapshots made.

The log is followed until Ctrl-C, also when its writer closes it and begins again. Exit code 1: it is damaged, was
removed, or was replaced by another one.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.description = (
        "Watch the log of a cache that is being written: requests, hit rate, why prompt tokens are computed, how full\n"
        "the cache is, evictions and preemptions. On a terminal it is drawn in place (with rich)."
    )
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("log", type=Path, metavar="LOG", help="a log directory")
    add(
        "--window",
        type=moments.length,
        default="5m",
        metavar="TIME",
        help="how far rates and reasons reach back, in addition to those of now, as in 90s, 5m or 1h (5m)",
    )
    add(
        "--interval",
        type=moments.length,
        metavar="TIME",
        help="between two looks (1s); where stdout is no terminal there is one look without this",
    )
    add("--once", action="store_true", help="one look at the log as it is")
    add("--json", action="store_true", help="a JSON object for each look, one a line")


def run(args: argparse.Namespace, out: Output) -> int:
    """Show a log until a signal comes, or once."""
    log = Followed(args.log, args.window)
    as_json = (lambda: top_views.to_json(log)) if args.json else None
    with (
        StopSignals() as stop,
        display(lambda width, height: top_views.views(log, width, height), as_json, out) as (show, in_place),
    ):
        if not args.once and (in_place or args.json or args.interval is not None):
            paced = Paced(show, (args.interval or _INTERVAL_NS) / 1e9)
            log.read(paced.show_if_due, stop.is_set)
        else:
            log.read(lambda: None, stop.is_set, follow=False)
        show()
    return stop.exit_code
