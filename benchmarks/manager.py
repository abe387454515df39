"""CPU time of the cache manager on a recorded workload, events off and with the log.

    python benchmarks/manager.py TRACE [--requests 2000] [--json]

The manager is driven as an engine would: up to 32 requests in flight; the full blocks of a prompt are stored at
admission (before the next one of the same step), then one token per step and sequence, blocks stored as they fill.
Token ids are made before anything is counted; everything else is: hashing, deciding, applying, encoding, and the log's
own thread. Each mode runs in a process of its own, several times and in turn; the minimum counts, because whatever else
the machine does can only add to it.

Set otherwise than by default: partial reuse is off, because the peers reuse full blocks; the log is not forced to the
disk (`fsync="never"`), because waiting for a disk is no CPU time and says nothing about the code; the log makes
the engine wait rather than lose batches, and the feed's queue has no bound, so that all of them are encoded.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from events.tokens.names import ALGORITHMS, DEFAULT_ALGORITHM
from kvcache import KVCacheConfig, KVCacheManager
from kvcache.config import LogConfig
from kvcache.errors import OutOfBlocks
from kvcache.record.outputs import open_log
from kvcache.workload.tokens import output_tokens
from kvcache.workload.traces import TraceRequest, read_trace
from sinks import SinkContext, SinkRunner, open_sink

TOKENS_PER_BLOCK = 16
PRIMARY_BLOCKS = 65_536
IN_FLIGHT = 32
MODES: dict[str, Any] = {
    "off": "auto",
    "off-named": "v2_sha256_64",
    "log": "auto",
    "log-xxh3": "xxh3_64",
    "log-kept": "auto",
    "wire": "auto",
    "wire-xxh3": "xxh3_64",
    "off-windows": "auto",
    "log-windows": "auto",
    "wire-windows": "auto",
}
"""Mode to hash: events off (where nobody listens, blocks get no names), off but named, the log, the log by xxh3, a log
of which only so much is kept (by a process that is not counted, as it takes another core), the feed for routers
(projected, encoded and sent over ZMQ, one batch per step, as the peers do), and the feed by xxh3; then again with two
windows, full attention and one that slides."""
SLIDING_WINDOW = 4096
KEPT_BYTES = 128 << 20
"""In segments of an eighth of it, each followed by a snapshot."""


class Clock:
    """CPU time of the process from now on; on request, wall time by kind of call."""

    def __init__(self, *, by_call: bool) -> None:
        self._by_call = by_call
        self.calls: defaultdict[str, float] = defaultdict(float)
        self._started = time.process_time()

    def timed(self, function: Any) -> Any:
        """The function, or one that also counts its wall time under its name."""
        if not self._by_call:
            return function

        def counting(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.calls[function.__name__] += time.perf_counter() - started

        return counting

    @property
    def cpu(self) -> float:
        """CPU seconds that count."""
        return time.process_time() - self._started


class Engine:
    """Requests in flight."""

    def __init__(self, manager: KVCacheManager, clock: Clock) -> None:
        self.add_sequence = clock.timed(manager.add_sequence)
        self.store_context_blocks = clock.timed(manager.store_context_blocks)
        self.add_tokens = clock.timed(manager.add_tokens)
        self.remove_sequence = clock.timed(manager.remove_sequence)
        self.flush = clock.timed(manager.flush)
        self.running: dict[int, Iterator[int]] = {}
        self.ends: defaultdict[int, list[int]] = defaultdict(list)
        """Step to the requests that get their last token in it."""
        self.step = 0
        self.hit_tokens = 0
        self.waits = 0

    def admit(self, number: int, prompt: Any, output: list[int]) -> bool:
        """Admit and prefill one request; False: no room now."""
        try:
            admission = self.add_sequence(number, prompt)
        except OutOfBlocks:
            self.waits += 1
            return False
        self.hit_tokens += admission.reused_tokens
        self.store_context_blocks(number, len(prompt))
        self.running[number] = iter(output)
        self.ends[self.step + len(output) - 1].append(number)
        return True

    def decode(self) -> None:
        """One token for each running sequence; those that are done end."""
        numbers = list(self.running)
        tokens = list(map(next, self.running.values()))
        self.add_tokens(numbers, tokens)
        for number in self.ends.pop(self.step, ()):
            del self.running[number]
            self.remove_sequence(number)
        self.step += 1


def _tokens(number: int, request: TraceRequest) -> tuple[Any, list[int]]:
    output = output_tokens(number, max(request.output_length, 1)).tolist()
    return request.prompt(), output


def drive(manager: KVCacheManager, requests: list[tuple[Any, list[int]]], clock: Clock) -> Engine:
    """Run the workload: prompts and outputs."""
    engine = Engine(manager, clock)
    for _ in steps(engine, requests):
        pass
    return engine


def steps(engine: Engine, requests: list[tuple[Any, list[int]]]) -> Iterator[None]:
    """The same step by step."""
    waiting = 0
    while waiting < len(requests) or engine.running:
        while waiting < len(requests) and len(engine.running) < IN_FLIGHT:
            if not engine.admit(waiting, *requests[waiting]):
                break
            waiting += 1
        engine.decode()
        engine.flush()
        yield


def feed(config: KVCacheConfig) -> SinkRunner:
    """The feed without coalescing, behind a queue in which everything has room."""
    url = "zmq+pub://127.0.0.1:0?coalesce=0"
    algorithm = DEFAULT_ALGORITHM if config.block_hash == "auto" else config.block_hash
    context = SinkContext(ALGORITHMS[algorithm].key_bytes, config.tokens_per_block)
    return SinkRunner(open_sink(url, context), url, max_events=1 << 40, max_bytes=1 << 40, drain_seconds=60)


def logged(mode: str) -> LogConfig:
    """How the log is written."""
    kept = KEPT_BYTES if mode == "log-kept" else None
    return LogConfig(overflow="block", fsync="never", retain_bytes=kept)


def measure(mode: str, trace: str, count: int, *, by_call: bool = False) -> dict[str, Any]:
    """One run in this process."""
    requests = list(read_trace(trace, count))
    longest = max(request.input_length + request.output_length for request in requests) + 1
    config = KVCacheConfig(
        max_sequence_length=longest,
        tokens_per_block=TOKENS_PER_BLOCK,
        primary_blocks=PRIMARY_BLOCKS,
        enable_partial_reuse=False,
        block_hash=MODES[mode],
        max_attention_window=(SLIDING_WINDOW, longest) if mode.endswith("-windows") else None,
    )
    tokens = [_tokens(number, request) for number, request in enumerate(requests)]
    with tempfile.TemporaryDirectory() as directory:
        gc.collect()
        gc.freeze()
        clock = Clock(by_call=by_call)
        log = open_log(Path(f"{directory}/log"), logged(mode)) if mode.startswith("log") else None
        manager = KVCacheManager(config, log=log, sinks=[feed(config)] if mode.startswith("wire") else [])
        engine = drive(manager, tokens, clock)
        clock.timed(manager.close)()
        cpu = clock.cpu
        stats = manager.stats()
        return {
            "mode": mode,
            "requests": len(requests),
            "cpu_seconds": cpu,
            "cpu_seconds_per_1000": cpu * 1000 / len(requests),
            "us_per_step": cpu * 1e6 / engine.step,
            "blocks_per_second": stats.blocks_allocated / cpu,
            "hit_tokens": engine.hit_tokens,
            "steps": engine.step,
            "waits": engine.waits,
            "events": stats.events,
            "log_bytes": log.bytes_written if log is not None else 0,
            "calls": dict(sorted(clock.calls.items(), key=lambda item: -item[1])),
        }


def measure_apart(mode: str, trace: str, count: int, *, by_call: bool = False) -> dict[str, Any]:
    """One run in a process of its own."""
    command = [sys.executable, __file__, trace, "--requests", str(count), "--one", mode]
    command += ["--by-call"] if by_call else []
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    result: dict[str, Any] = json.loads(output)
    return result


def best_of(trace: str, count: int, repeat: int, modes: list[str]) -> dict[str, dict[str, Any]]:
    """The run with the least CPU time per mode; the modes take turns, so that load from outside falls on all alike."""
    best: dict[str, dict[str, Any]] = {}
    for _ in range(repeat):
        for mode in modes:
            result = measure_apart(mode, trace, count)
            if mode not in best or result["cpu_seconds"] < best[mode]["cpu_seconds"]:
                best[mode] = result
    for mode in modes:
        # Timing each call costs something itself, so it has a run of its own.
        best[mode]["calls"] = measure_apart(mode, trace, count, by_call=True)["calls"]
    return best


def report(results: dict[str, dict[str, Any]]) -> None:
    """Print a table, and where the time goes."""
    print(f"{'mode':10} {'CPU s/1000':>10} {'us/step':>8} {'blocks/s':>12} {'hit tokens':>12} {'log MB':>7}")
    for mode, r in results.items():
        print(
            f"{mode:10} {r['cpu_seconds_per_1000']:10.3f} {r['us_per_step']:8.1f} {r['blocks_per_second']:12,.0f} "
            f"{r['hit_tokens']:12,} {r['log_bytes'] / 1e6:7.1f}"
        )
    for mode, r in results.items():
        calls = "  ".join(f"{name} {seconds:.3f}" for name, seconds in r["calls"].items())
        print(f"{mode}: wall seconds by call: {calls}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", help="a trace in the Mooncake form")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--repeat", type=int, default=3, help="processes per mode (the minimum counts)")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", choices=list(MODES), help=argparse.SUPPRESS)
    parser.add_argument("--by-call", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(
            json.dumps(measure(arguments.one, arguments.trace, arguments.requests, by_call=arguments.by_call))
        )
        return
    results = best_of(arguments.trace, arguments.requests, arguments.repeat, arguments.modes)
    if not arguments.json:
        report(results)
        return
    summary = {"modes": results}
    keys = {
        "log": "cpu_seconds_per_1000",
        "off": "cpu_seconds_per_1000_events_off",
        "wire": "cpu_seconds_per_1000_wire",
    }
    for mode, key in keys.items():
        if mode in results:
            summary[key] = results[mode]["cpu_seconds_per_1000"]
            summary["hit_tokens"] = results[mode]["hit_tokens"]
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
