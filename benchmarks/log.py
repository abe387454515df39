"""What a log costs and gives, in one run: appending, an engine's steps, replaying.

    python benchmarks/log.py TRACE [--requests 1000] [--repeat 5] [--dir DIR] [--json]

- `append`: the batches of a run of the trace are given to a `LogWriter` as fast as it takes them, each group of them
  made durable; beside it, in turn, the same bytes are written to a file in the same portions, each made durable as
  well, by nothing else than `write` and `fdatasync`. Wall time, from the first batch to the last one on disk.
- `steps`: wall time of an engine's steps (admissions, a token for each of 32 sequences, a flush) without a log and with
  one that is made durable, in turn, each beside a simulated forward pass (it sleeps).
- `replay`: the log of the trace, replayed to its end and at a batch near it, with snapshots and without.

Where the files lie decides a lot: `--dir` should be on the disk that a log will have.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.manager import PRIMARY_BLOCKS, TOKENS_PER_BLOCK, Clock, Engine, _tokens, drive, steps
from events.log import LogReader, LogWriter, durable, output
from events.log.segments import first_seq, segment_paths
from events.types import EventBatch
from kvcache import KVCacheConfig, KVCacheManager
from kvcache.keep.snapshot import make_snapshot
from kvcache.replay import replay
from kvcache.workload.mooncake import read_trace

FORWARD_SECONDS = 0.01
SEGMENT_BYTES = 8 << 20
SNAPSHOT_EVERY = 2
"""Segments."""

Requests = list[tuple[Any, list[int]]]


class Portions:
    """Counts what a log writes between two syncs."""

    def __init__(self) -> None:
        self.sizes: list[int] = [0]

    def watching(self) -> Any:
        """Look at the writes and syncs of the log, while this is entered."""
        write, sync = durable.write_all, durable.sync_file

        def writing(descriptor: int, parts: Sequence[bytes]) -> None:
            self.sizes[-1] += sum(map(len, parts))
            write(descriptor, parts)

        def syncing(descriptor: int) -> None:
            self.sizes.append(0)
            sync(descriptor)

        return patch.multiple(output, write_all=writing, sync_file=syncing)


def load(trace: str, count: int) -> tuple[KVCacheConfig, Requests]:
    """The requests of a trace, with token ids, and a cache for them that is too small."""
    requests = list(read_trace(trace, count))
    longest = max(request.input_length + request.output_length for request in requests) + 1
    config = KVCacheConfig(
        max_sequence_length=longest, tokens_per_block=TOKENS_PER_BLOCK, primary_blocks=PRIMARY_BLOCKS
    )
    return config, [_tokens(number, request) for number, request in enumerate(requests)]


def write_log(config: KVCacheConfig, requests: Requests, directory: Path) -> None:
    """The log of the trace."""
    writer = LogWriter(directory, fsync="never", segment_bytes=SEGMENT_BYTES)
    with KVCacheManager(config, log=writer) as manager:
        drive(manager, requests, Clock(by_call=False))


# -- appending


def appended(batches: list[EventBatch], directory: Path) -> float:
    """Seconds until a log has all batches on disk."""
    writer = LogWriter(directory)
    begun = time.perf_counter()
    for batch in batches:
        writer.append(batch)
    writer.flush()
    seconds = time.perf_counter() - begun
    writer.close()
    return seconds


def written(sizes: Sequence[int], directory: Path) -> float:
    """Seconds until as many bytes are on disk, in the same portions."""
    directory.mkdir()
    portions = [os.urandom(size) for size in sizes]
    descriptor = os.open(directory / "raw", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    begun = time.perf_counter()
    for portion in portions:
        durable.write_all(descriptor, [portion])
        durable.sync_file(descriptor)
    seconds = time.perf_counter() - begun
    os.close(descriptor)
    return seconds


def appending(log: Path, scratch: Path, repeat: int) -> dict[str, Any]:
    """Medians of pairs."""
    batches = list(LogReader(log))
    events = sum(len(batch.events) for batch in batches)
    pairs, total = [], 0
    for number in range(repeat):
        portions = Portions()
        with portions.watching():
            mine = appended(batches, scratch / f"log-{number}")
        total = sum(portions.sizes)
        raw = written([size for size in portions.sizes if size], scratch / f"raw-{number}")
        pairs.append((mine, raw))
    mine = statistics.median(pair[0] for pair in pairs)
    return {
        "events_per_second": events / mine,
        "megabytes_per_second": total / mine / 1e6,
        "raw_megabytes_per_second": total / statistics.median(pair[1] for pair in pairs) / 1e6,
        "part_of_raw": statistics.median(raw / mine for mine, raw in pairs),
    }


# -- steps


def timed_steps(config: KVCacheConfig, requests: Requests, log: Path | None) -> list[float]:
    """Seconds of each step, without the forward pass."""
    seconds: list[float] = []
    writer = None if log is None else LogWriter(log)
    with KVCacheManager(config, log=writer) as manager:
        begun = time.perf_counter()
        for _ in steps(Engine(manager, Clock(by_call=False)), requests):
            seconds.append(time.perf_counter() - begun)
            time.sleep(FORWARD_SECONDS)
            begun = time.perf_counter()
    return seconds


def stepping(config: KVCacheConfig, requests: Requests, scratch: Path, repeat: int) -> dict[str, Any]:
    """Milliseconds: medians of rounds."""
    rounds: dict[str, list[list[float]]] = {"off": [], "on": []}
    for number in range(repeat):
        rounds["off"].append(timed_steps(config, requests, None))
        rounds["on"].append(timed_steps(config, requests, scratch / f"steps-{number}"))
    figures = {"p50": 0.5, "p99": 0.99}
    return {
        f"{name}_{mode}_ms": statistics.median(sorted(each)[int(part * len(each))] for each in rounds[mode])
        * 1e3
        for name, part in figures.items()
        for mode in rounds
    }


# -- replaying


def replaying(log: Path, repeat: int) -> dict[str, Any]:
    """Seconds, the best of some."""
    last = replay(log).last_seq
    assert last is not None
    near = last - last // 50

    def best(work: Callable[[], object]) -> float:
        times = []
        for _ in range(repeat):
            begun = time.perf_counter()
            work()
            times.append(time.perf_counter() - begun)
        return min(times)

    without = [best(lambda: replay(log)), best(lambda: replay(log, at=near))]
    for path in segment_paths(log)[SNAPSHOT_EVERY::SNAPSHOT_EVERY]:
        make_snapshot(log, first_seq(path))
    with_snapshots = [best(lambda: replay(log)), best(lambda: replay(log, at=near))]
    return {
        "log_megabytes": sum(path.stat().st_size for path in segment_paths(log)) / 1e6,
        "to_the_end_seconds": without[0],
        "near_the_end_seconds": without[1],
        "to_the_end_from_snapshot_seconds": with_snapshots[0],
        "near_the_end_from_snapshot_seconds": with_snapshots[1],
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", help="a trace in the Mooncake form")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--step-requests", type=int, default=100, help="of them, for the steps")
    parser.add_argument("--dir", type=Path, help="where the files lie meanwhile")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as directory:
        scratch = Path(directory)
        config, requests = load(arguments.trace, arguments.requests)
        write_log(config, requests, scratch / "trace")
        results = {
            "append": appending(scratch / "trace", scratch, arguments.repeat),
            "steps": stepping(config, requests[: arguments.step_requests], scratch, arguments.repeat),
            "replay": replaying(scratch / "trace", arguments.repeat),
        }
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    for part, figures in results.items():
        for name, figure in figures.items():
            print(f"{part:8} {name.replace('_', ' '):40} {figure:14,.3f}")


if __name__ == "__main__":
    main()
