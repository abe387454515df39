"""What sinks cost an engine's steps, and how late a subscriber hears of them; for `benchmarks/feed.py`.

An engine in a process of its own makes steps: a simulated forward pass (it sleeps, as the host does while a GPU works),
and the manager's work for 32 sequences: one token for each, a new prompt of 512 tokens whenever one has ended, a flush.
The log is there in all modes:

- `none`: nobody listens;
- `none-again`: the same once more, which shows how far two runs of the same are apart;
- `in-process`: the engine has the sink ``zmq+pub:``;
- `five`: the engine has five sinks: that one, two files (with and without token ids), ``prometheus:``, and a pipe that
  is never read, so that its sink hangs, with a queue so short that it overflows;
- `sidecar`: `kvcache publish` follows the log in another process, with the sink ``zmq+pub:``;
- `sidecar-five`: a sidecar with the five sinks.

Each round takes all modes in turn, every other one backwards, and compares each with the round's own `none`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import structlog

from benchmarks.feed_ports import free_port
from events.formats.vllm import BlockStored
from events.subscribe.continuity import Received
from events.subscribe.subscriber import Subscriber
from events.tokens.names import ALGORITHMS
from kvcache import KVCacheConfig, KVCacheManager
from sinks import Sink, SinkContext, SinkRunner, open_sink

MODES = ("none", "none-again", "in-process", "five", "sidecar", "sidecar-five")
IN_FLIGHT = 32
PROMPT, OUTPUT = 512, 100
CONFIG = KVCacheConfig(
    max_sequence_length=PROMPT + OUTPUT + 1,
    tokens_per_block=16,
    primary_blocks=8192,
    block_hash="v2_sha256_64",
)
KEY_BYTES = ALGORITHMS["v2_sha256_64"].key_bytes
HANGING_EVENTS = 256
"""The queue of the sink that hangs: a few steps fill it."""
QUIET_SECONDS = 0.5
SETTLE_SECONDS = 1.0

Run = dict[str, Any]


class Engine:
    """Sequences that decode, each with a first token of its own, by which its blocks are known."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._random = random.Random(1)
        self._left: dict[int, int] = {}
        self._next = 0
        self.flushed: dict[int, float] = {}
        """When the first block of a request was told, by the request's own token."""

    def step(self, forward: float) -> float:
        """One step; returns the seconds that it took beyond the forward pass."""
        begun = time.perf_counter()
        new = self._admit()
        time.sleep(forward)
        manager = self._manager
        for request in new:
            manager.store_context_blocks(request, PROMPT)
        running = list(self._left)
        manager.add_tokens(running, [self._random.randrange(1000) for _ in running])
        for request in running:
            self._left[request] -= 1
            if not self._left[request]:
                manager.remove_sequence(request)
                del self._left[request]
        at = time.time()
        manager.flush()
        for request in new:
            self.flushed[10_000 + request] = at
        # The sleep is not taken as it was: waking up takes longer where other threads have the interpreter.
        return time.perf_counter() - begun - forward

    def _admit(self) -> list[int]:
        new: list[int] = []
        while len(self._left) < IN_FLIGHT and len(new) < 2:
            request = self._next
            self._next += 1
            self._manager.add_sequence(request, [10_000 + request] * PROMPT)
            self._left[request] = OUTPUT
            new.append(request)
        return new


def engine(log: str, urls: Sequence[str], steps: int, forward: float) -> None:
    """The engine's process: prints its steps' times, and when it told of which request."""
    # That the sink which hangs has lost batches is what it is there for.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with KVCacheManager(CONFIG, log=log, sinks=list(map(_sink, urls))) as manager:
        run = Engine(manager)
        sys.stdin.readline()  # until the listener is there
        for _ in range(IN_FLIGHT):
            run.step(forward)
        run.flushed.clear()
        cpu = time.process_time()
        times = [run.step(forward) for _ in range(steps)]
        cpu = time.process_time() - cpu
        dropped = {stats.name: stats.dropped_batches for stats in manager.sink_stats()}
        time.sleep(QUIET_SECONDS)
        print(json.dumps({"times": times, "flushed": run.flushed, "cpu": cpu, "dropped": dropped}))


def _sink(url: str) -> str | Sink | SinkRunner:
    if not url.startswith("file:") or "/pipe?" not in url:
        return url
    return SinkRunner(
        open_sink(url, SinkContext(KEY_BYTES, CONFIG.tokens_per_block)), "pipe", max_events=HANGING_EVENTS
    )


def measure(mode: str, steps: int, forward: float) -> Run:
    """One run of a mode."""
    with tempfile.TemporaryDirectory() as directory:
        place, log = Path(directory), f"{directory}/log"
        port = free_port()
        urls = _urls(mode, place, port)
        pipe = _never_read(place / "pipe")
        in_engine = [] if mode.startswith("sidecar") else urls
        command = [sys.executable, __file__, "--engine", log, *in_engine, "--steps", str(steps)]
        worker = subprocess.Popen(
            [*command, "--forward-ms", str(forward * 1000)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        sidecar = _sidecar(log, urls) if mode.startswith("sidecar") else None
        listener = Listener(port) if urls else None
        time.sleep(SETTLE_SECONDS)
        out, _ = worker.communicate("go\n")
        received = {} if listener is None else listener.stop()
        if sidecar is not None:
            sidecar.terminate()
            sidecar.wait()
        os.close(pipe)
    result = json.loads(out)
    late = [received[int(token)] - at for token, at in result["flushed"].items() if int(token) in received]
    missing = len(result["flushed"]) - len(late) if listener is not None else 0
    return {**result, "late": late, "missing": missing}


def _urls(mode: str, place: Path, port: int) -> list[str]:
    feed = f"zmq+pub://127.0.0.1:{port}?coalesce=0&heartbeat=0&state="
    if mode.startswith("none"):
        return []
    if not mode.endswith("five"):
        return [feed]
    files = [f"file:{place}/{name}?tokens={tokens}" for name, tokens in (("a", 1), ("b", 0), ("pipe", 1))]
    return [feed, "prometheus://127.0.0.1:0", *files]


def _never_read(path: Path) -> int:
    """A pipe that is open for reading, so that it can be opened for writing."""
    os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK)


def _sidecar(log: str, urls: Sequence[str]) -> subprocess.Popen[bytes]:
    arguments = [word for url in urls for word in ("--sink", url)]
    # What it says at its end about the sink that hangs is known.
    return subprocess.Popen(
        [sys.executable, "-m", "kvcache", "-q", "publish", log, *arguments], stderr=subprocess.DEVNULL
    )


class Listener:
    """Notes when it hears of each request's first block."""

    def __init__(self, port: int) -> None:
        self._endpoint = f"tcp://127.0.0.1:{port}"
        self._received: dict[int, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        with Subscriber(self._endpoint) as subscriber:
            while not self._over.is_set():
                for report in subscriber.poll(50):
                    now = time.time()
                    events = report.batch.events if isinstance(report, Received) else ()
                    for event in events:
                        if isinstance(event, BlockStored) and event.parent_block_hash is None:
                            token = event.token_ids[0]
                            assert isinstance(token, int)
                            self._received.setdefault(token, now)

    def stop(self) -> dict[int, float]:
        """What was heard."""
        self._over.set()
        self._thread.join()
        return self._received


def compare(modes: Sequence[str], steps: int, rounds: int, forward: float) -> dict[str, dict[str, float]]:
    """Figures per mode: medians over the rounds, in milliseconds, and how much longer steps are than without sinks."""
    runs: dict[str, list[Run]] = {mode: [] for mode in modes}
    for number in range(rounds):
        for mode in modes if number % 2 == 0 else modes[::-1]:
            runs[mode].append(measure(mode, steps, forward))
    table = {mode: _figures(its) for mode, its in runs.items()}
    for mode in modes if "none" in modes else ():
        table[mode] |= _longer(runs[mode], runs["none"], forward)
    return table


def _figures(runs: list[Run]) -> dict[str, float]:
    times = [run["times"] for run in runs]
    figures = {
        "step_ms_mean": statistics.median(map(statistics.fmean, times)) * 1e3,
        "step_ms_p50": statistics.median(map(statistics.median, times)) * 1e3,
        "step_ms_p99": statistics.median(quantile(each, 0.99) for each in times) * 1e3,
        "cpu_ms_per_step": statistics.median(run["cpu"] / len(run["times"]) for run in runs) * 1e3,
    }
    late = [run["late"] for run in runs if run["late"]]
    if late:
        figures["late_ms_p50"] = statistics.median(map(statistics.median, late)) * 1e3
        figures["late_ms_p99"] = statistics.median(quantile(each, 0.99) for each in late) * 1e3
    return {
        **figures,
        "missing": sum(run["missing"] for run in runs),
        "dropped": sum(sum(run["dropped"].values()) for run in runs),
    }


def _longer(runs: list[Run], others: list[Run], forward: float) -> dict[str, float]:
    """Percent by which whole steps are longer, the median over the rounds: on average, and for the median step."""

    def median_of_ratios(size: Callable[[list[float]], float]) -> float:
        pairs = zip(runs, others, strict=True)
        ratios = [(forward + size(run["times"])) / (forward + size(other["times"])) for run, other in pairs]
        return (statistics.median(ratios) - 1) * 100

    return {
        "longer_mean_%": median_of_ratios(statistics.fmean),
        "longer_p50_%": median_of_ratios(statistics.median),
    }


def quantile(values: list[float], part: float) -> float:
    """The value below which this part of them lies."""
    return sorted(values)[min(int(len(values) * part), len(values) - 1)]


def main() -> None:
    """The engine's process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", nargs="+", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--forward-ms", type=float, required=True)
    arguments = parser.parse_args()
    log, *urls = arguments.engine
    engine(log, urls, arguments.steps, arguments.forward_ms / 1000)


if __name__ == "__main__":
    main()
