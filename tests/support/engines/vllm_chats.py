"""Chats as a trace has them for vLLM's own scheduler with a recorder beside it.

    python -m tests.support.engines.vllm_chats REQUESTS SEED BLOCKS [--async]

compares both after each step, and the closed log batch by batch with what vLLM had then. It prints what happened, as a
line of JSON. Runs where vLLM is installed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from events.log import LogReader
from events.types import BlocksRemoved, EndReason, SequenceRemoved
from kvcache.fold.state import CacheState
from kvcache.integrations.vllm.plugin import register
from kvcache.replay import Replayed
from kvcache.workload.chats import generate_chats
from kvcache.workload.tokens import output_tokens
from kvcache.workload.traces import TraceRequest
from tests.support.engines.stock_vllm import Served, StockVLLM
from tests.support.engines.vllm_mirror import compare, compare_log, names_of
from tests.support.engines.vllm_model import write_model

IN_FLIGHT, TOKENS_PER_STEP = 16, 2048


def served(lines: Iterable[TraceRequest]) -> list[Served]:
    """Prompts and outputs of a trace's requests."""
    return [
        (
            line.prompt().tolist(),
            output_tokens(index, max(1, line.output_length)).tolist(),
        )
        for index, line in enumerate(lines)
    ]


def main(count: int, seed: int, blocks: int, *, runs_ahead: bool) -> Counter[str]:
    """Serve so many requests in a cache of so many blocks of 16 tokens."""
    register()
    requests = served(islice(generate_chats(count, seed), count))
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        engine = StockVLLM(
            write_model(Path(directory) / "model"),
            blocks,
            runs_ahead=runs_ahead,
            in_flight=IN_FLIGHT,
            tokens_per_step=TOKENS_PER_STEP,
            longest=1 + max(len(prompt) + len(output) for prompt, output in requests),
            additional={"kvcache": {"log": str(log)}},
        )
        had, last = dict[int, frozenset[bytes]](), 0
        for _ in engine.serve(requests, 2 * IN_FLIGHT):
            compare(engine)
            before, last = last, engine.attached.recorder.stats().batches - 1
            if last > before:
                had[last] = frozenset(name for _, name in engine.names())
        engine.scheduler.shutdown()
        audit = compare_log(engine, log)
        assert audit.prompt_tokens == engine.queries, (audit.prompt_tokens, engine.queries)
        seen = compare_batches(log, had)
    return seen + Counter(
        requests=len(requests), admitted=audit.requests, refused=audit.refusals, hits=engine.hits
    )


def compare_batches(log: Path, had: dict[int, frozenset[bytes]]) -> Counter[str]:
    """Fold a log: after these of its batches these names are cached."""
    folded, seen = Replayed(CacheState()), Counter[str]()
    for batch in LogReader(log):
        folded.fold(batch, verify=True)
        for event in batch.events:
            seen["evictions"] += isinstance(event, BlocksRemoved)
            seen["preempted"] += isinstance(event, SequenceRemoved) and event.why is EndReason.PREEMPTED
        if batch.seq in had:
            assert names_of(folded.state) == had[batch.seq], f"after batch {batch.seq}"
            seen["batches"] += 1
    assert seen["batches"] == len(had)
    return seen


if __name__ == "__main__":
    count, seed, blocks = map(int, sys.argv[1:4])
    print(json.dumps(main(count, seed, blocks, runs_ahead="--async" in sys.argv)))
