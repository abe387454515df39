"""The options by which a command takes sinks: URLs, or vLLM's configuration of its publisher."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvcache.cli.output import Output
from kvcache.cli.parser import natural
from kvcache.errors import UsageError
from sinks import SinkContext, SinkURLError, open_sink
from sinks.router.kv_events import kv_events_sink


def add_sink_options(add: argparse._ArgumentGroup) -> None:
    """Declare them."""
    add.add_argument(
        "--sink",
        action="append",
        default=[],
        dest="sinks",
        metavar="URL",
        help="publish events, as in stdout:, file:e.jsonl or zmq+pub://127.0.0.1:5557?replay=5558",
    )
    add.add_argument(
        "--kv-events-config",
        metavar="JSON",
        help="publish to routers as vLLM does with the same JSON, or @FILE with it: enable_kv_cache_events (false), "
        "publisher (zmq), endpoint (tcp://*:5557), replay_endpoint, buffer_steps, hwm, max_queue_size, topic",
    )
    add.add_argument(
        "--kv-events-options",
        default="",
        metavar="OPTIONS",
        help="what that JSON has no field for, as options of a sink zmq+pub:, as in 'curve_key=K&curve_clients=DIR'",
    )
    add.add_argument(
        "--kv-events-rank",
        type=natural,
        default=0,
        metavar="N",
        help="data-parallel rank, added to both ports (0)",
    )


def take_kv_events(args: argparse.Namespace, out: Output) -> None:
    """Add the sink that vLLM's configuration asks for to those that were given. Raises UsageError."""
    if args.kv_events_config is None:
        if args.kv_events_options or args.kv_events_rank:
            raise UsageError("--kv-events-options and --kv-events-rank need --kv-events-config JSON")
        return
    config = _told(args.kv_events_config)
    url = kv_events_sink(config, rank=args.kv_events_rank, options=args.kv_events_options)
    if url is None:
        out.warning(
            "--kv-events-config asks for no sink: events are published with "
            '"enable_kv_cache_events": true, and not with "publisher": "null"'
        )
        return
    try:
        open_sink(url, SinkContext(0, 1))
    except SinkURLError as error:
        where = "options of a sink go into --kv-events-options, as in --kv-events-options insecure=1"
        raise UsageError(f"--kv-events-config: {error.reason}; {where}") from None
    args.sinks.append(url)


def _told(config: str) -> str:
    """The JSON that was given, or that the file holds which was named by @."""
    if not config.startswith("@"):
        return config
    try:
        return Path(config[1:]).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UsageError(f"--kv-events-config: {config[1:]} cannot be read: {reason}") from None
