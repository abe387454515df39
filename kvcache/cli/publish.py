"""``kvcache publish``: follow a log that another process writes, and run the sinks in this process."""

from __future__ import annotations

import argparse
import shutil
import sys
from functools import partial

from kvcache.cli.options import add_shared, add_status_options, option
from kvcache.cli.output import Output, StatusLines, left_of_log, pick, stamp
from kvcache.cli.process import StopSignals
from kvcache.errors import UsageError
from kvcache.phrases import count, duration, printable
from kvcache.publish.follower import Progress, Until
from kvcache.publish.publisher import Publisher, PublishStats

_LIVE_SECONDS = 0.2
"""Refresh interval at a terminal."""
_EPILOG = """\
Sinks run in this process, so a slow sink or reader never affects the engine, which only writes its log. Start this
before or after the engine; either may restart. Each sink resumes after the last batch it took, which is kept in
--state, and routers receive "cleared" and the whole state whenever this command starts.

A slow, failing or hanging sink lags without delaying other sinks, and loses nothing: batches that it did not take are
retried, also with --once. The lag of each sink is printed on stderr, in one line on a terminal. Feeds and metrics open
after the last epoch of the log was replayed; until then the rest of the log is shown.

Ctrl-C and SIGTERM shut down cleanly. Exits with 1 if the log is damaged or its beginning was removed; the routers of a
feed then receive "cleared".
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = "Publish the events of a log that another process writes."
    parser.epilog = _EPILOG
    add_shared(parser, log="a log directory, which may not exist yet")
    add_status_options(parser, "the lag of sinks")
    add = partial(option, parser)
    add(
        "--sink URL",
        "destination, as in zmq+pub://127.0.0.1:5557?replay=5558 or file:e.jsonl; repeatable",
        action="append",
        required=True,
        dest="sinks",
    )
    add(
        "--state DIR",
        "directory for the positions of sinks and the sequence numbers of feeds (default: LOG)",
    )
    ends = parser.add_mutually_exclusive_group()
    option(ends, "--once", "stop at the current end of the log")
    option(ends, "--until-closed", "stop when the engine has closed the log")


def run(args: argparse.Namespace, out: Output) -> int:
    """Publish until a signal comes, or all is done."""
    if args.json and any(url.partition(":")[0] == "stdout" for url in args.sinks):
        raise UsageError("--json and the sink stdout: both write to stdout; omit one of them")
    until: Until = "end" if args.once else "closed" if args.until_closed else "stopped"
    publisher = Publisher(args.log, args.sinks, state_dir=args.state, until=until)
    progress = _PublishProgress(args, out)
    with StopSignals() as stop:
        try:
            publisher.run(stop.is_set, progress.show)
        finally:
            progress.end(publisher.stats())
    return stop.exit_code


class _PublishProgress:
    """Reporter of the sinks' progress."""

    def __init__(self, args: argparse.Namespace, out: Output) -> None:
        self._log, self._out = printable(str(args.log)), out
        self._live = not (args.json or out.quiet or args.log_json) and sys.stderr.isatty()
        self._notes_opened = not (self._live or args.json)
        every = _LIVE_SECONDS if self._live else args.every
        self._lines, self._in_form = StatusLines(out, every), to_json if args.json else _line
        self._noted: set[str] = set()

    def show(self, stats: PublishStats) -> None:
        """Print progress if it is due. Call often."""
        self._note(
            f"waiting for {self._log}: no log there yet" if stats.head is None else f"publishing {self._log}"
        )
        if self._notes_opened:  # for programs that wait for open ports
            for sink in stats.sinks:
                if sink.is_open:
                    self._note(f"{printable(sink.sink)} is open")
        if stats.head is None or not self._lines.is_due():
            return
        if self._live:
            self._draw(_line(stats))
        else:
            self._lines.say(self._in_form(stats))

    def end(self, stats: PublishStats) -> None:
        """Print the final progress."""
        if self._live:
            self._draw("")
        if stats.head is not None:
            self._lines.say(self._in_form(stats))

    def _note(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self._out.note(text)

    def _draw(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        # The cursor returns to the line's start, so that other messages begin their own line.
        sys.stderr.write(f"\x1b[K{text[:width]}\r")
        sys.stderr.flush()


def _line(stats: PublishStats) -> str:
    """Format progress for people."""
    head = stats.head
    if head is None:
        return "no log yet"
    closed = ", closed" if head.closed else ""
    sinks = "; ".join(map(_described, stats.sinks))
    return f"batch {head.seq:,} of epoch {head.epoch}{closed}: {sinks}"


def _described(sink: Progress) -> str:
    words = []
    if sink.lag_batches:
        by = f" ({duration(sink.lag_seconds)})" if sink.lag_seconds is not None else ""
        words.append(f"{count(sink.lag_batches, 'batch')}{by} behind")
    elif sink.state in ("running", "ended") and sink.lag_batches == 0 and sink.waits_for is None:
        words.append("up to date")
    if sink.catch_up is not None:
        words.append(left_of_log(sink.catch_up) + ("" if sink.is_open else "; not open yet"))
    elif sink.state == "catching up":
        words.append(sink.state)
    if sink.state == "failing":
        words.append(f"failing: {sink.last_error}")
    elif sink.waits_for is not None or not words:
        words.append(f"{sink.state}: {printable(sink.waits_for)}" if sink.waits_for else sink.state)
    return f"{printable(sink.sink)} {', '.join(words)}"


def to_json(stats: PublishStats) -> dict[str, object]:
    """Return progress for programs."""
    head = stats.head
    log = dict.fromkeys(("seq", "ts", "time", "epoch", "closed"))
    if head is not None:
        log = stamp(head.seq, head.ts) | pick(head, "epoch", "closed")
    return {**log, "sinks": [_sink_json(sink) for sink in stats.sinks]}


def _sink_json(sink: Progress) -> dict[str, object]:
    pace = ("bytes_left", "batches_per_second")
    return {
        **pick(
            sink, "sink", "state", "waits_for", "batches", "events", "lost_batches", "errors", "last_error"
        ),
        **pick(sink, open="is_open"),
        **pick(sink, "lag_batches", "lag_seconds"),
        "seq": None if sink.seq == -1 else sink.seq,
        **(dict.fromkeys(pace) if sink.catch_up is None else pick(sink.catch_up, *pace)),
    }
