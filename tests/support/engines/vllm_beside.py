"""Chats as a trace has them for two of vLLM's schedulers, one with its own manager and one with ours.

    python -m tests.support.engines.vllm_beside REQUESTS SEED BLOCKS [--async] [--partial] [--watermark]

prints what each has done, as a line of JSON, with a watermark also what vLLM does without it. Runs where vLLM is
installed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

from events.log import LogReader
from kvcache.audit.totals import audit_batches
from kvcache.integrations.vllm.plugin import register
from kvcache.replay import replay
from kvcache.workload.chats import generate_chats
from tests.support.engines.stock_vllm import StockVLLM
from tests.support.engines.vllm_chats import IN_FLIGHT, TOKENS_PER_STEP, served
from tests.support.engines.vllm_model import write_model


def serve(
    requests: list[Any], blocks: int, kvcache: Any, directory: Path, *, ahead: bool, watermark: float
) -> dict[str, int]:
    """What one has done."""
    engine = StockVLLM(
        write_model(directory / "model"),
        blocks,
        runs_ahead=ahead,
        in_flight=IN_FLIGHT,
        tokens_per_step=TOKENS_PER_STEP,
        longest=1 + max(len(prompt) + len(output) for prompt, output in requests),
        additional={"kvcache": kvcache},
        watermark=watermark,
    )
    seen = Counter[str]()
    preempt = engine.scheduler._preempt_request

    def preempted(*args: Any, **kwargs: Any) -> None:
        seen["preempted"] += 1
        preempt(*args, **kwargs)

    engine.scheduler._preempt_request = preempted
    for _ in engine.serve(requests, 2 * IN_FLIGHT):
        seen["steps"] += 1
    engine.scheduler.shutdown()
    return {**seen, "hits": engine.hits, "queries": engine.queries}


def main(
    count: int, seed: int, blocks: int, *, ahead: bool, partial: bool, watermark: float
) -> dict[str, dict[str, int]]:
    """Serve so many requests in caches of so many blocks of 16 tokens."""
    register()
    requests = served(islice(generate_chats(count, seed), count))
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        ours = {"mode": "manager", "log": str(log), "settings": {"enable_partial_reuse": partial}}
        engines = [("stock", False, watermark), ("ours", ours, watermark)]
        if watermark:
            engines.append(("stock without", False, 0.0))
        found = {
            name: serve(requests, blocks, kvcache, Path(directory), ahead=ahead, watermark=kept)
            for name, kvcache, kept in engines
        }
        replayed = replay(log, verify=True)
        assert replayed.end is not None
        assert replayed.end.kind == "clean"
        audit = audit_batches((batch, True) for batch in LogReader(log))
        assert (audit.prompt_tokens, audit.reused) == (found["ours"]["queries"], found["ours"]["hits"])
    return found


if __name__ == "__main__":
    count, seed, blocks = map(int, sys.argv[1:4])
    watermark = 0.15 if "--watermark" in sys.argv else 0.0
    chosen = {"ahead": "--async" in sys.argv, "partial": "--partial" in sys.argv}
    print(json.dumps(main(count, seed, blocks, **chosen, watermark=watermark)))
