"""What recording costs vLLM's scheduler: CPU time, in turn without anything, with vLLM's own KV events, and recorded.

    python -m benchmarks.vllm_recorder TRACE [--manager] [--requests 200] [--rounds 5] [--dir DIR] [--json]

With `--manager` the others are a manager of ours in place of vLLM's: while vLLM hashes blocks all the same, without
(as in an engine), and without and with a log.

Runs where vLLM is installed, with this project on the import path. The scheduler, its KV cache manager and the hashing
of blocks are vLLM's; outputs that were made before take the place of a model. The log is written, and what its thread
takes counts, but for its last checkpoint. `thread` is the CPU time of the scheduler's own thread alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm.utils.gc_utils import freeze_gc_heap

from kvcache.integrations.vllm.plugin import register
from kvcache.workload.traces import read_trace
from tests.support.engines.stock_vllm import Served, StockVLLM
from tests.support.engines.vllm_chats import served
from tests.support.engines.vllm_model import write_model

BLOCKS, IN_FLIGHT, TOKENS_PER_STEP, BLOCK_SIZE = 65_536, 32, 8_192, 16
VARIANTS = ("stock", "events", "recorded")
MANAGED = ("stock", "hashing", "managed", "logged")


def make(variant: str, directory: Path, longest: int, *, runs_ahead: bool) -> StockVLLM:
    """An engine that is recorded, has a manager of ours, tells events, or nothing of these."""
    settings: dict[str, Any] | None = (
        {"log": str(directory / "log")} if variant in ("recorded", "logged") else None
    )
    if variant in MANAGED[1:]:
        settings = {"mode": "manager"} | (settings or {})
    engine = StockVLLM(
        write_model(directory / "model"),
        BLOCKS,
        block_size=BLOCK_SIZE,
        runs_ahead=runs_ahead,
        in_flight=IN_FLIGHT,
        tokens_per_step=TOKENS_PER_STEP,
        longest=longest,
        publishes_events=variant == "events",
        additional={} if settings is None else {"kvcache": settings},
    )
    if variant in ("managed", "logged"):
        engine.hash_nothing()
    return engine


def play(engine: StockVLLM, requests: list[Served]) -> dict[str, float]:
    """Serve them all; the CPU seconds that it took, of all threads and of this one, and vLLM's count of hits."""
    # An engine does so, too: what was there before it serves is not garbage.
    freeze_gc_heap()
    begun, begun_thread = time.process_time(), time.thread_time()
    # One comes for each that ends, so that some always wait.
    for _ in engine.serve(requests, 2 * IN_FLIGHT):
        pass
    took = {
        "cpu": time.process_time() - begun,
        "thread": time.thread_time() - begun_thread,
        "hits": engine.hits,
    }
    engine.scheduler.shutdown()
    gc.unfreeze()
    return took


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--async", dest="runs_ahead", action="store_true")
    parser.add_argument("--manager", dest="variants", action="store_const", const=MANAGED, default=VARIANTS)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    register()
    requests = served(read_trace(asked.trace, asked.requests))
    longest = max(len(prompt) + len(output) for prompt, output in requests) + 1
    found: dict[str, list[dict[str, float]]] = {variant: [] for variant in asked.variants}
    rng = random.Random(0)
    for _ in range(asked.rounds):
        for variant in rng.sample(asked.variants, len(asked.variants)):
            with tempfile.TemporaryDirectory(dir=asked.dir) as directory:
                engine = make(variant, Path(directory), longest, runs_ahead=asked.runs_ahead)
                found[variant].append(play(engine, requests))
    assert len({each["hits"] for rounds in found.values() for each in rounds}) == 1
    show(found, len(requests), as_json=asked.json)


def show(found: dict[str, list[dict[str, float]]], count: int, *, as_json: bool) -> None:
    """Medians: seconds for 1,000 requests, and paired ratios to stock; in JSON the least, too."""
    table: dict[str, Any] = {}
    for variant, rounds in found.items():
        table[variant] = {
            key: statistics.median(each[key] for each in rounds) * 1000 / count for key in ("cpu", "thread")
        } | {
            f"{key}_ratio": statistics.median(
                each[key] / stock[key] for each, stock in zip(rounds, found["stock"], strict=True)
            )
            for key in ("cpu", "thread")
        }
        table[variant] |= {
            f"{key}_least": min(each[key] for each in rounds) * 1000 / count for key in ("cpu", "thread")
        }
    if as_json:
        print(json.dumps(table))
        return
    print(f"{'':10}{'CPU s / 1,000':>15}{'× stock':>9}{'thread':>9}{'× stock':>9}")
    for variant, row in table.items():
        print(
            f"{variant:10}{row['cpu']:15.2f}{row['cpu_ratio']:9.2f}{row['thread']:9.2f}{row['thread_ratio']:9.2f}"
        )


if __name__ == "__main__":
    main()
