"""Play a trace on workers behind a load balancer: routed round robin first, then by cached prefixes."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from kvcache.errors import UsageError
from kvcache.workload.chats import generate_chats
from kvcache.workload.traces import TraceRequest, read_trace

if TYPE_CHECKING:
    from examples.kv_aware_router.rounds import Round, Setting

_CHATS = 128
"""Number of conversations if no trace is given."""


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = argparse.ArgumentParser(prog="python -m examples.kv_aware_router", description=__doc__)
    add = made.add_argument
    add(
        "trace",
        nargs="?",
        type=Path,
        help="requests as JSON lines (Mooncake form); default: generated chats",
    )
    add("--limit", type=int, metavar="N", help="play only the first N requests")
    add("--workers", type=int, default=4, metavar="N", help="number of workers (4)")
    add("--blocks", type=int, default=6250, metavar="N", help="blocks of each worker (6250: 400,000 tokens)")
    add(
        "--secondary-blocks",
        type=int,
        default=15625,
        metavar="N",
        help="blocks in host memory (15625: 1,000,000 tokens)",
    )
    add("--tokens-per-block", type=int, default=64, metavar="N", help="block size (64)")
    add("--faster", type=float, metavar="X", help="divide arrival times by X (1; generated chats 8)")
    add("--speed", type=float, metavar="X", help="most simulated seconds per second (8; chats 1)")
    add("--load-weight", type=float, default=1.0, metavar="X", help="weight of load against overlap (1)")
    add("--port", type=int, default=0, metavar="N", help="port of the balancer and its page (any free one)")
    add("--page", type=Path, metavar="FILE", help="write the page with all data at the end")
    add("--hold", type=float, default=0, metavar="SECONDS", help="keep serving the page after the end")
    add("--no-kill", action="store_true", help="leave out the round in which a worker is killed")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the rounds and print the results."""
    args = parser().parse_args(arguments)
    try:
        return asyncio.run(_main(args))
    except (UsageError, OSError) as error:
        print(f"kv_aware_router: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


async def _main(args: argparse.Namespace) -> int:
    try:
        from examples.kv_aware_router import page, policies, rounds, service, table
    except ModuleNotFoundError as error:
        raise UsageError(f"{error}: pip install 'kvcache[example]'") from error
    setting = _setting(args)
    played = [rounds.Round(policies.RoundRobin()), rounds.Round(policies.KVAware(args.load_weight))]
    if not args.no_kill:
        played.append(rounds.Round(policies.KVAware(args.load_weight), kills=True))

    async with service.Service(page.page(), lambda: _state(played, setting), args.port) as served:
        print(
            f"{len(setting.trace):,} requests for {setting.workers} workers; live at {served.url}", flush=True
        )
        for each in played:
            await each.play(served, setting)
            print(f"{each.name}: hit rate {each.tally.hit_rate:.1%}", flush=True)
        print(f"\n{table.table(played)}\n\n{table.gain(*played[:2])}\n\n{table.by_worker(played)}")
        if any(each.notes for each in played):
            print(f"\n{table.notes(played)}")
        if args.page is not None:
            args.page.write_text(page.page(_state(played, setting)), encoding="utf-8")
            print(f"\n{args.page} shows it")
        await asyncio.sleep(args.hold)
    return 1 if any(each.tally.lost for each in played) else 0


def _setting(args: argparse.Namespace) -> Setting:
    from examples.kv_aware_router.fleet import Sizes
    from examples.kv_aware_router.rounds import Setting

    faster = args.faster if args.faster is not None else 8.0 if args.trace is None else 1.0
    speed = args.speed if args.speed is not None else 1.0 if args.trace is None else 8.0
    if min(args.workers, args.blocks, args.tokens_per_block) < 1 or min(speed, faster) <= 0:
        raise UsageError("--workers, --blocks, --tokens-per-block, --speed and --faster must be above 0")
    trace = _trace(args.trace, args.limit, faster)
    longest = max(request.input_length + max(1, request.output_length) for request in trace)
    sizes = Sizes(args.blocks, args.secondary_blocks, args.tokens_per_block, longest)
    return Setting(trace, args.workers, sizes, speed)


def _trace(path: Path | None, limit: int | None, faster: float) -> list[TraceRequest]:
    requests = generate_chats(_CHATS) if path is None else read_trace(path, limit)
    trace = [
        structs.replace(each, timestamp=int(each.timestamp / faster)) for each in islice(requests, limit)
    ]
    if not trace:
        raise UsageError(f"{path or 'the workload'} contains no requests")
    return trace


def _state(played: Sequence[Round], setting: Setting) -> dict[str, Any]:
    return {
        "requests": len(setting.trace),
        "end_ms": setting.trace[-1].timestamp,
        "workers": [f"worker {number}" for number in range(1, setting.workers + 1)],
        "blocks": setting.sizes.blocks + setting.sizes.secondary_blocks,
        "speed": setting.speed,
        "rounds": [each.state() for each in played if each.samples],
    }


if __name__ == "__main__":
    sys.exit(main())
