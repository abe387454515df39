"""``kvcache subscribe``: live events of KV event publishers."""

from __future__ import annotations

import argparse
from functools import partial

from kvcache.cli.options import (
    TOKENS_HELP,
    add_namespace,
    add_shared,
    has_namespace,
    option,
    read_tokens,
)
from kvcache.cli.output import Output, paced
from kvcache.cli.process import StopSignals
from kvcache.cli.subscribe.lines import NativeLines, RouterLines
from kvcache.cli.subscribe.sources import IN_TOPIC, Subscriptions, add_connection_options, receive
from kvcache.cli.subscribe.workers import Prompt, Workers
from kvcache.errors import UsageError

_LIVE_SECONDS = 0.5
_EVERY_SECONDS = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Print the events of a KV event publisher in vLLM's wire format until Ctrl-C: stored and removed blocks, and "
        "missed\nbatches. Batches without events (heartbeats) are only counted. With --table, --prompt or several "
        "publishers, show\na live table of workers instead."
    )
    parser.epilog = (
        "Each line begins with the event's address, BATCH.INDEX. Text lines contain no token ids; --json does. "
        "`kvcache docs json`\ndescribes Missed, Restated, Restarted and the keys of the table, `kvcache docs wire` "
        "its columns."
    )
    add = partial(option, parser)
    add(
        "ENDPOINT",
        "address of a publisher, as in tcp://127.0.0.1:5557, or 'tcp://127.0.0.1:5557?replay=5558' with its replay "
        "port; an address to which many connect, as in tcp://*:5557; or a single broker stream, as in "
        "nats://127.0.0.1:4222/kvcache",
        nargs="+",
    )
    add(
        "--replay ENDPOINT",
        "replay endpoint of the publisher, or its port: start with all batches it has kept, and recover missed ones; "
        f"if many connect, {IN_TOPIC}: the endpoints in their topics",
    )
    add_connection_options(parser)
    add(
        "--format",
        "router: stored and removed blocks, in any format for routers (default); native: all events of a cache, from "
        "one ENDPOINT with format=native",
        choices=["router", "native"],
        default="router",
    )
    add("--count N", "stop after N batches with events")
    add_shared(
        parser,
        json="print one JSON object per line and event: seq, index, ts, rank, topic, replayed, type, and the event's "
        "fields; in lines about missed batches, resyncs and restarts those before type are null. For a table, one "
        "object per report",
    )
    _add_table_options(parser)


def _add_table_options(parser: argparse.ArgumentParser) -> None:
    table = parser.add_argument_group("table of workers")
    option(table, "--table", "show the table for a single ENDPOINT, too")
    add_shared(
        table,
        every=f"seconds between two reports if stdout is not a terminal (default: {_EVERY_SECONDS:.0f})",
    )
    purpose = f"show how much of this prompt each worker has cached, and which has most: {TOKENS_HELP}"
    option(table, "--prompt FILE", purpose, type=str)
    add_namespace(table, "--prompt")


def run(args: argparse.Namespace, out: Output) -> int:
    """Print reports until the requested number is reached, or a signal comes."""
    as_table = args.table or args.prompt is not None or len(args.endpoint) > 1
    if args.prompt is None and has_namespace(args):
        raise UsageError("--lora-id, --lora-name and --cache-salt require --prompt")
    if args.every is not None and not as_table:
        raise UsageError("--every requires --table: events are printed as they arrive")
    if args.format == "native" and as_table:
        raise UsageError(
            "--format native prints the events of one ENDPOINT: omit --table, --prompt and further endpoints"
        )
    with StopSignals() as stop, Subscriptions(args) as subscriptions:
        if as_table:
            _show_table(subscriptions, stop, args, out)
        else:
            _print_lines(subscriptions, stop, args, out)
    return stop.exit_code


def _print_lines(
    subscriptions: Subscriptions, stop: StopSignals, args: argparse.Namespace, out: Output
) -> None:
    lines = NativeLines() if args.format == "native" else RouterLines()
    for each in receive(subscriptions, stop, args, out):
        if each is not None:
            (_, worker), report = each
            for line in (lines.json if args.json else lines.text)(report, worker):
                print(line, flush=True)
    for line in lines.summary():
        out.note(line)


def _show_table(
    subscriptions: Subscriptions, stop: StopSignals, args: argparse.Namespace, out: Output
) -> None:
    workers = Workers(_read_prompt(args), connected=subscriptions.connected)
    workers.expect(subscriptions.expected)
    as_json = (lambda: workers.to_json(subscriptions.counts)) if args.json else None
    with out.live(lambda: workers.show(out), as_json) as (show, in_place):
        every = _LIVE_SECONDS if in_place else _EVERY_SECONDS if args.every is None else args.every
        show_if_due = paced(show, every, first=0.0 if in_place else every)
        for each in receive(subscriptions, stop, args, out):
            if each is None:
                show_if_due()
            else:
                workers.fold(*each)
        show()


def _read_prompt(args: argparse.Namespace) -> Prompt | None:
    """Read the prompt of `--prompt`, if given. Raises `UsageError` and `InvalidTokens`."""
    # Not at the top: subscribing needs no numpy.
    from kvcache.inputs import pack_tokens

    if args.prompt is None:
        return None
    tokens = memoryview(pack_tokens(read_tokens(args.prompt))).cast("i").tolist()
    adapter = args.lora_id if args.lora_name is None else args.lora_name
    return Prompt(tuple(tokens), adapter, args.cache_salt)
