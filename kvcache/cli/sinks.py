"""The options by which a command takes sinks: URLs, or vLLM's configuration of its publisher."""

from __future__ import annotations

import argparse

from kvcache.cli.parser import natural
from kvcache.errors import UsageError
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
        help="publish to routers as vLLM does with the same JSON: enable_kv_cache_events, publisher, endpoint, "
        "replay_endpoint, buffer_steps, hwm, max_queue_size, topic",
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


def take_kv_events(args: argparse.Namespace) -> None:
    """Add the sink that vLLM's configuration asks for to those that were given."""
    if args.kv_events_config is None:
        if args.kv_events_options or args.kv_events_rank:
            raise UsageError("--kv-events-options and --kv-events-rank need --kv-events-config JSON")
        return
    url = kv_events_sink(args.kv_events_config, rank=args.kv_events_rank, options=args.kv_events_options)
    args.sinks += [url] * (url is not None)
