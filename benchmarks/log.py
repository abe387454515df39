"""What a log costs and gives, in one run: appending, an engine's steps, replaying.

    python benchmarks/log.py TRACE... [--requests 1000] [--repeat 5] [--dir DIR] [--json]

- `sizes`, for each trace, and for the first one with English text in the place of its tokens (words as they follow each
  other in this repository's documentation): bytes of the log for each prompt token, written as it is, compressed, and
  compressed with a write for each batch, as an engine's steps make them; beside these the same bytes compressed at once
  as by `zstd -1 --long=27`. CPU milliseconds that writing takes for each megabyte of what is written, and how much of
  that is compression.
- `append`: the batches of a run of the trace are given to a `LogWriter` that does not compress them, as fast as it
  takes them, each group of them made durable; beside it, in turn, the same bytes are written to a file in the same
  portions, each made durable as well, by nothing else than `write` and `fdatasync`. Wall time, from the first batch to
  the last one on disk.
- `steps`: wall time of an engine's steps (admissions, a token for each of 32 sequences, a flush) without a log and with
  one that is made durable, in turn, each beside a simulated forward pass (it sleeps).
- `replay`: the log of the trace, compressed and not, replayed to its end and at a batch near it, with snapshots and
  without.

The first trace is that of all but `sizes`.

Where the files lie decides a lot: `--dir` should be on the disk that a log will have.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.manager import PRIMARY_BLOCKS, Clock, Engine, _tokens, drive, steps
from events.log import LogReader, LogWriter, durable, output
from events.log.segments import first_seq, segment_paths
from events.log.writer import Compression
from events.log.zstd import MAX_WINDOW_LOG, Compressor
from events.types import EventBatch
from kvcache import KVCacheConfig, KVCacheManager
from kvcache.maintenance.prune import make_snapshot
from kvcache.replay import replay
from kvcache.workload.tokens import TRACE_BLOCK_TOKENS, mix64
from kvcache.workload.traces import read_trace

DOCS = Path(__file__).parents[1] / "docs"
TOKENS_PER_BLOCK = 64
FORWARD_SECONDS = 0.01
SEGMENT_BYTES = 8 << 20
SNAPSHOT_EVERY = 2
"""Segments."""

Requests = list[tuple[Any, list[int]]]


class Portions:
    """Counts what a log writes between two syncs."""

    def __init__(self) -> None:
        self.sizes: list[int] = [0]

    def measured(self) -> Any:
        """Look at the writes and syncs of the log, while this is entered."""
        write, sync = durable.write_all, durable.sync_file

        def writing(descriptor: int, parts: Sequence[bytes]) -> None:
            self.sizes[-1] += sum(map(len, parts))
            write(descriptor, parts)

        def syncing(descriptor: int) -> None:
            self.sizes.append(0)
            sync(descriptor)

        return patch.multiple(output, write_all=writing, sync_file=syncing)


def load(trace: str, count: int, text: Text | None = None) -> tuple[KVCacheConfig, Requests]:
    """The requests of a trace, with token ids, and a cache for them that is too small."""
    requests = list(read_trace(trace, count))
    longest = max(request.input_length + request.output_length for request in requests) + 1
    config = KVCacheConfig(
        max_sequence_length=longest, tokens_per_block=TOKENS_PER_BLOCK, primary_blocks=PRIMARY_BLOCKS
    )
    loaded = [_tokens(number, request) for number, request in enumerate(requests)]
    if text is not None:
        loaded = [
            (text.prompt(request.hash_ids)[: request.input_length], output)
            for request, (_, output) in zip(requests, loaded, strict=True)
        ]
    return config, loaded


class Text:
    """English: each word is followed by what follows it somewhere in the documentation."""

    def __init__(self) -> None:
        texts = [path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))]
        words, self._words = np.unique(re.findall(r"\w+|[^\w\s]", " ".join(texts)), return_inverse=True)
        order = np.argsort(self._words[:-1], kind="stable")
        self._next = self._words[1:][order]
        self._begin = np.searchsorted(self._words[:-1][order], np.arange(len(words) + 1))

    def prompt(self, hash_ids: Sequence[int]) -> Any:
        """The tokens of the blocks with these numbers: equal numbers, equal tokens."""
        streams = mix64(np.array(hash_ids, np.uint64))
        token = self._words[streams % np.uint64(len(self._words))]
        tokens = np.empty((len(hash_ids), TRACE_BLOCK_TOKENS), np.int32)
        for at in range(TRACE_BLOCK_TOKENS):
            tokens[:, at] = token
            count = np.maximum(self._begin[token + 1] - self._begin[token], 1)
            streams = mix64(streams + np.uint64(at))
            chosen = self._begin[token] + (streams % count.astype(np.uint64)).astype(np.int64)
            token = self._next[np.minimum(chosen, len(self._next) - 1)]
        return tokens.reshape(-1)


def write_log(
    config: KVCacheConfig, requests: Requests, directory: Path, compression: Compression = "none"
) -> None:
    """The log of the trace."""
    writer = LogWriter(directory, fsync="never", segment_bytes=SEGMENT_BYTES, compression=compression)
    with KVCacheManager(config, log=writer) as manager:
        drive(manager, requests, Clock(by_call=False))


# -- sizes


def size_of(log: Path) -> int:
    """Bytes of its segments."""
    return sum(path.stat().st_size for path in segment_paths(log))


def written_again(
    batches: list[EventBatch], directory: Path, compression: Compression, *, each: bool = False
) -> tuple[int, float]:
    """Bytes of a log of these batches, and CPU seconds that it takes; with `each`, they are written one by one."""
    begun = time.process_time()
    with LogWriter(directory, fsync="never", compression=compression) as writer:
        for batch in batches:
            writer.append(batch)
            if each:
                writer.flush()
    return size_of(directory), time.process_time() - begun


def sizing(config: KVCacheConfig, requests: Requests, scratch: Path) -> dict[str, Any]:
    """Of one workload."""
    write_log(config, requests, scratch / "source")
    batches, tokens = list(LogReader(scratch / "source")), sum(len(prompt) for prompt, _ in requests)
    plain, plain_cpu = written_again(batches, scratch / "plain", "none")
    small, small_cpu = written_again(batches, scratch / "zstd", "zstd")
    by_step, _ = written_again(batches, scratch / "by step", "zstd", each=True)
    content = b"".join(path.read_bytes() for path in segment_paths(scratch / "plain"))
    begun = time.process_time()
    at_once = len(Compressor(MAX_WINDOW_LOG).compressed(content))
    megabytes = plain / 1e6
    return {
        "megabytes": megabytes,
        "prompt_tokens": tokens,
        "bytes_per_token": plain / tokens,
        "bytes_per_token_compressed": small / tokens,
        "bytes_per_token_compressed_by_step": by_step / tokens,
        "times_smaller": plain / small,
        "times_smaller_by_step": plain / by_step,
        "part_of_zstd_at_once": small / at_once,
        "part_of_zstd_at_once_by_step": by_step / at_once,
        "cpu_ms_per_megabyte": small_cpu / megabytes * 1e3,
        "cpu_ms_per_megabyte_of_compression": (small_cpu - plain_cpu) / megabytes * 1e3,
        "cpu_ms_per_megabyte_of_zstd_at_once": (time.process_time() - begun) / megabytes * 1e3,
    }


# -- appending


def appended(batches: list[EventBatch], directory: Path) -> float:
    """Seconds until a log has all batches on disk."""
    writer = LogWriter(directory, compression="none")
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
        with portions.measured():
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
        "log_megabytes": size_of(log) / 1e6,
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
    parser.add_argument("trace", nargs="+", help="traces in the Mooncake form")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--step-requests", type=int, default=100, help="of them, for the steps")
    parser.add_argument("--dir", type=Path, help="where the files lie meanwhile")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as directory:
        scratch = Path(directory)
        results, text = dict[str, dict[str, Any]](), Text()
        for name, trace, words in [
            *((Path(trace).stem, trace, None) for trace in arguments.trace),
            ("English", arguments.trace[0], text),
        ]:
            with tempfile.TemporaryDirectory(dir=arguments.dir) as place:
                results[f"sizes, {name}"] = sizing(*load(trace, arguments.requests, words), Path(place))
        config, requests = load(arguments.trace[0], arguments.requests)
        write_log(config, requests, scratch / "plain")
        write_log(config, requests, scratch / "compressed", "zstd")
        results |= {
            "append": appending(scratch / "plain", scratch, arguments.repeat),
            "steps": stepping(config, requests[: arguments.step_requests], scratch, arguments.repeat),
            "replay": replaying(scratch / "plain", arguments.repeat),
            "replay, compressed": replaying(scratch / "compressed", arguments.repeat),
        }
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    for part, figures in results.items():
        for name, figure in figures.items():
            print(f"{part:20} {name.replace('_', ' '):40} {figure:14,.3f}")


if __name__ == "__main__":
    main()
