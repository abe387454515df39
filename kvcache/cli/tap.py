"""``kvcache tap``: record the cache events of running engines in a log."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from events.brokers.address import is_broker
from events.errors import without_login
from events.log.segments import is_log
from kvcache.cli.feed_log import worker_json
from kvcache.cli.options import add_status_options, option
from kvcache.cli.output import Output, StatusLines, pick
from kvcache.cli.process import StopSignals
from kvcache.cli.subscribe.sources import (
    IN_TOPIC,
    NOTHING_RECEIVED,
    SILENCE_SECONDS,
    add_connection_options,
    endpoints_of,
)
from kvcache.errors import UsageError
from kvcache.phrases import count, printable

if TYPE_CHECKING:
    from kvcache.tap.tap import Endpoint, Tap

_WORK_SECONDS = 0.2
_TWICE = "an ENDPOINT is given twice: omit one of them"
_EPILOG = """\
An ENDPOINT is the address of a publisher (vLLM, SGLang, TensorRT-LLM, or a zmq+pub: sink), or an address of this
machine to which many publishers connect (tcp://*:PORT, --bind). file:PATH is a growing file of TensorRT-LLM's event
dicts, one JSON object per line; file:PATH?block_size=N leaves out partial blocks. Without a replay endpoint, events
published before this starts, or missed later, are lost.

The log has kind feed: `kvcache events`, `replay`, `match` and `audit` read it, and `kvcache publish` publishes it to
routers, which may connect late without missing anything. Ctrl-C and SIGTERM shut down cleanly.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = "Record live KV events of vLLM, SGLang or TensorRT-LLM in a log."
    parser.epilog = _EPILOG
    add = partial(option, parser)
    add(
        "ENDPOINT",
        "address of a publisher, as in tcp://127.0.0.1:5557, or tcp://127.0.0.1:5557?replay=5558 with its replay port",
        nargs="+",
    )
    add(
        "--log DIR",
        "directory of the log: a new one, or with --resume an existing one",
        required=True,
    )
    add("--resume --continue", "continue the log in DIR")
    add(
        "--replay ENDPOINT",
        f"replay endpoint of the only publisher; if many connect, {IN_TOPIC}: the endpoints in their topics",
    )
    add("--no-tokens", "do not record token ids; such a log cannot be published to routers")
    add_connection_options(parser)
    add_status_options(parser, "what was received")


def run(args: argparse.Namespace, out: Output) -> int:
    """Record until a signal comes."""
    # Not at the top: no other command needs ZeroMQ, and loading it takes a while.
    from kvcache.tap.tap import Tap

    endpoints = list(_endpoints(args))
    if not args.resume and is_log(args.log):
        raise UsageError(
            f"{args.log} already contains a log: choose another directory, or add --resume to continue it"
        )
    with (
        StopSignals() as stop,
        Tap(endpoints, args.log, resume=args.resume, record_tokens=not args.no_tokens) as tap,
    ):
        out.note(f"recording {', '.join(map(printable, tap.endpoints))} into {printable(str(args.log))}")
        lines, in_form = StatusLines(out, args.every, first=args.every), to_json if args.json else _line
        silence_at = time.monotonic() + SILENCE_SECONDS
        while not stop.is_set():
            tap.work(_WORK_SECONDS)
            if time.monotonic() >= silence_at:
                silence_at = math.inf
                for endpoint in sorted(tap.silent):
                    out.note(NOTHING_RECEIVED.format(printable(endpoint)))
            if lines.is_due():
                lines.say(in_form(tap))
        lines.say(in_form(tap))
    return stop.exit_code


def _endpoints(args: argparse.Namespace) -> Iterator[Endpoint]:
    from kvcache.tap.lines import SCHEME, LineListener
    from kvcache.tap.tap import Endpoint

    if len({*args.endpoint}) < len(args.endpoint):
        raise UsageError(_TWICE)
    for text in filter(is_broker, args.endpoint):
        raise UsageError(
            f"{without_login(text).partition('?')[0]}: tap reads engines and files, not brokers; use "
            "`kvcache subscribe`"
        )
    files = [text for text in args.endpoint if text.startswith(SCHEME)]
    for text in files:
        LineListener(text)  # raises before anything is created
        yield Endpoint(text)
    args.endpoint = [text for text in args.endpoint if text not in files]
    given = endpoints_of(args)
    if len({each.endpoint for each in given}) < len(given):
        raise UsageError(_TWICE)
    for each in given:
        curve = each.curve(args)
        each.check(args)
        if each.binds(args):
            yield Endpoint(each.endpoint, each.replay == IN_TOPIC, True, args.topic, curve, args.insecure)
        else:
            yield Endpoint(each.endpoint, each.replay, False, args.topic, curve)


def _line(tap: Tap) -> str:
    """Format progress for people."""
    received, log, state = tap.recorder, tap.log_stats(), tap.state
    blocks = sum(worker.num_blocks for worker in state.workers.values())
    workers = f"{count(blocks, 'block')} in {count(len(state.workers), 'worker')}"
    if unsure := sum(not worker.complete for worker in state.workers.values()):
        workers += f", {unsure:,} of them incomplete"
    parts = [f"{count(received.batches, 'batch')}, {count(received.events, 'event')}", workers]
    if received.recovered:
        parts.append(f"{received.recovered:,} missed and recovered by replay")
    if lost := sum(worker.lost for worker in state.workers.values()):
        parts.append(f"{count(lost, 'batch')} lost")
    if tap.ignored:
        parts.append(f"{count(tap.ignored, 'message')} of excess workers ignored")
    if log.state == "suspended":
        parts.append(f"the log cannot be written: {log.last_error}")
    return "; ".join(parts)


def to_json(tap: Tap) -> dict[str, object]:
    """Return progress for programs."""
    log = tap.log_stats()
    return {
        **pick(tap.recorder, "batches", "events", recovered_batches="recovered"),
        **pick(log, "dropped_batches", log_state="state", log_error="last_error"),
        "ignored_messages": tap.ignored,
        "silent": sorted(tap.silent),
        "workers": [worker_json(worker) for worker in tap.state.workers.values()],
    }
