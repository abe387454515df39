"""What a feed for routers costs the engine, and how late its subscriber hears: in the engine, and from a sidecar.

    python benchmarks/feed.py [--steps 1000] [--forward-ms 10] [--runs 3] [--json]

An engine in a process of its own makes steps: a simulated forward pass (it sleeps, as the host does while a GPU works),
and the manager's work for 32 sequences: one token for each, a new prompt of 512 tokens whenever one has ended, a flush.
Modes:

- `none`: nobody listens, but there is a log, which all modes have;
- `in-process`: the engine has the sink ``zmq+pub:``;
- `sidecar`: `kvcache publish` follows the log in another process;
- `hanging`: a sidecar with five sinks, of which one is never read.

Of each: the time of a step beyond the forward pass, and the time from the flush to the subscriber, p50 and p99. Feeds
do not wait for more here (``coalesce=0``); what they are told to wait comes on top of it. Modes take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from events.formats.vllm import BlockStored
from events.subscribe.continuity import Received
from events.subscribe.subscriber import Subscriber
from kvcache import KVCacheConfig, KVCacheManager

MODES = ("none", "in-process", "sidecar", "hanging")
IN_FLIGHT = 32
PROMPT, OUTPUT = 512, 100
CONFIG = KVCacheConfig(
    max_sequence_length=PROMPT + OUTPUT + 1,
    tokens_per_block=16,
    primary_blocks=8192,
    block_hash="v2_sha256_64",
)
PORT = 27_557
URL = f"zmq+pub://127.0.0.1:{PORT}?coalesce=0&heartbeat=0&state="
QUIET_SECONDS = 1.0
SETTLE_SECONDS = 1.5


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


def engine(log: str, mode: str, steps: int, forward: float) -> None:
    """The engine's process: prints its steps' times, and when it told of which request."""
    sinks = [URL] if mode == "in-process" else []
    with KVCacheManager(CONFIG, log=log, sinks=sinks) as manager:
        run = Engine(manager)
        sys.stdin.readline()  # until the listener is there
        for _ in range(IN_FLIGHT):
            run.step(forward)
        run.flushed.clear()
        cpu = time.process_time()
        times = [run.step(forward) for _ in range(steps)]
        cpu = time.process_time() - cpu
        time.sleep(QUIET_SECONDS)
        print(json.dumps({"times": times, "flushed": run.flushed, "cpu": cpu}))


def measure(mode: str, steps: int, forward: float) -> dict[str, Any]:
    """One run of a mode."""
    with tempfile.TemporaryDirectory() as place:
        log = f"{place}/log"
        command = [sys.executable, __file__, "--engine", log, mode, "--steps", str(steps), "--forward-ms"]
        worker = subprocess.Popen(
            [*command, str(forward * 1000)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        sidecar = (
            None if mode in ("none", "in-process") else _sidecar(Path(place), log, hanging=mode == "hanging")
        )
        listener = None if mode == "none" else Listener()
        time.sleep(SETTLE_SECONDS)
        out, _ = worker.communicate("go\n")
        told = {} if listener is None else listener.stop()
        if sidecar is not None:
            sidecar.terminate()
            sidecar.wait()
    result = json.loads(out)
    late = sorted(told[int(token)] - at for token, at in result["flushed"].items() if int(token) in told)
    return {
        "times": result["times"],
        "cpu": result["cpu"],
        "late": late,
        "missing": len(result["flushed"]) - len(late) if listener is not None else 0,
    }


def _sidecar(place: Path, log: str, *, hanging: bool) -> subprocess.Popen[bytes]:
    sinks = [URL]
    if hanging:
        os.mkfifo(place / "pipe")
        # Open for reading, and never read.
        os.open(place / "pipe", os.O_RDONLY | os.O_NONBLOCK)
        sinks += [f"file:{place}/{name}.jsonl?tokens=1" for name in "abc"] + [f"file:{place}/pipe?tokens=1"]
    arguments = [word for url in sinks for word in ("--sink", url)]
    return subprocess.Popen([sys.executable, "-m", "kvcache", "-q", "publish", log, *arguments])


class Listener:
    """Notes when it hears of each request's first block."""

    def __init__(self) -> None:
        self._told: dict[int, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        with Subscriber(f"tcp://127.0.0.1:{PORT}") as subscriber:
            while not self._over.is_set():
                for report in subscriber.poll(50):
                    now = time.time()
                    events = report.batch.events if isinstance(report, Received) else ()
                    for event in events:
                        if isinstance(event, BlockStored) and event.parent_block_hash is None:
                            token = event.token_ids[0]
                            assert isinstance(token, int)
                            self._told.setdefault(token, now)

    def stop(self) -> dict[int, float]:
        """What was heard."""
        self._over.set()
        self._thread.join()
        return self._told


def quantile(values: list[float], part: float) -> float:
    """In milliseconds."""
    return sorted(values)[min(int(len(values) * part), len(values) - 1)] * 1e3 if values else float("nan")


def report(results: dict[str, list[dict[str, Any]]], forward: float) -> dict[str, dict[str, float]]:
    """Per mode the medians over the runs, in milliseconds."""
    table = {}
    for mode, runs in results.items():
        table[mode] = {
            "step_ms_mean": statistics.median(statistics.fmean(run["times"]) * 1e3 for run in runs),
            "step_ms_p50": statistics.median(quantile(run["times"], 0.5) for run in runs),
            "step_ms_p99": statistics.median(quantile(run["times"], 0.99) for run in runs),
            "cpu_ms_per_step": statistics.median(run["cpu"] * 1e3 / len(run["times"]) for run in runs),
            "late_ms_p50": statistics.median(quantile(run["late"], 0.5) for run in runs),
            "late_ms_p99": statistics.median(quantile(run["late"], 0.99) for run in runs),
            "missing": sum(run["missing"] for run in runs),
        }
    for kind in ("mean", "p50"):
        for values in table.values() if "none" in table else ():
            base = table["none"][f"step_ms_{kind}"] + forward * 1e3
            values[f"{kind}_longer_%"] = (values[f"step_ms_{kind}"] + forward * 1e3 - base) / base * 100
    return table


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--forward-ms", type=float, default=10)
    parser.add_argument("--runs", type=int, default=3, help="of each mode (medians count)")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--engine", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    forward = arguments.forward_ms / 1000
    if arguments.engine:
        log, mode = arguments.engine
        engine(log, mode, arguments.steps, forward)
        return
    results: dict[str, list[dict[str, Any]]] = {mode: [] for mode in arguments.modes}
    turns = deque(list(arguments.modes) * arguments.runs)
    while turns:
        mode = turns.popleft()
        results[mode].append(measure(mode, arguments.steps, forward))
    table = report(results, forward)
    if arguments.json:
        print(json.dumps(table, indent=2))
        return
    names = list(next(iter(table.values())))
    print(f"{'':12}" + "".join(f"{name:>17}" for name in names))
    for mode, values in table.items():
        print(f"{mode:12}" + "".join(f"{values[name]:17.3f}" for name in names))


if __name__ == "__main__":
    main()
