"""What the feed for routers costs and gives, in one run.

    python benchmarks/feed.py [--only steps streams index] [--steps 300] [--rounds 9] [--blocks 1000000] [--repeat 3]
                              [--peer COMMAND] [--index-peer COMMAND] [--json]

- `steps` (`benchmarks/feed_steps.py`): the time of an engine's steps with a feed in the engine, with five sinks of
  which one hangs, and with a sidecar, each beside none, and how long after the flush a subscriber hears;
- `streams` (`benchmarks/feed_streams.py`): blocks per second published and consumed, how long who joins late waits
  for a million blocks, and our subscriber beside a `--peer`;
- `index` (`benchmarks/index.py`): `PrefixIndex`, beside an `--index-peer`.

Feeds do not wait for more here (``coalesce=0``); what they are told to wait comes on top of it. What is compared takes
turns, and ratios are medians over the turns. Each part's file says what is measured, and what a peer must be.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from benchmarks import feed_steps, feed_streams, index

Figures = dict[str, Any]


def steps(arguments: argparse.Namespace) -> Figures:
    """Per mode, see `feed_steps.compare`."""
    forward = arguments.forward_ms / 1000
    return feed_steps.compare(arguments.modes, arguments.steps, arguments.rounds, forward)


def streams(arguments: argparse.Namespace) -> Figures:
    """See `feed_streams.measure`."""
    return feed_streams.measure(arguments.blocks, arguments.repeat, arguments.peer)


def prefix_index(arguments: argparse.Namespace) -> Figures:
    """See `index.compare`."""
    return index.compare(arguments.blocks, arguments.repeat, arguments.index_peer)


PARTS: dict[str, Callable[[argparse.Namespace], Figures]] = {
    "steps": steps,
    "streams": streams,
    "index": prefix_index,
}


def show(part: str, figures: Figures) -> None:
    """Print a part's table."""
    if part == "index":
        index.show(figures)
    elif part == "streams":
        for name, value in figures.items():
            print(f"{name:<20}{value:>14,.2f} {feed_streams.UNITS[name]}")
    else:
        names = list(dict.fromkeys(name for values in figures.values() for name in values))
        print(f"{'':<14}" + "".join(f"{name:>17}" for name in names))
        for mode, values in figures.items():
            cells = (f"{values[name]:.3f}" if name in values else "" for name in names)
            print(f"{mode:<14}" + "".join(f"{cell:>17}" for cell in cells))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--steps", type=int, default=300, help="of each run of a mode")
    parser.add_argument("--forward-ms", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=9, help="runs of each mode")
    parser.add_argument("--modes", nargs="+", default=list(feed_steps.MODES), choices=feed_steps.MODES)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="of streams and index")
    parser.add_argument("--repeat", type=int, default=3, help="runs of streams and index")
    parser.add_argument("--peer", metavar="COMMAND", help="another subscriber")
    parser.add_argument("--index-peer", metavar="COMMAND", help="another index")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results: Figures = {}
    for part in arguments.only:
        results[part] = PARTS[part](arguments)
        if not arguments.json:
            print(f"{part}:")
            show(part, results[part])
    if arguments.json:
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
