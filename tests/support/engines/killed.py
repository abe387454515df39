"""Lives of a cache that end by SIGKILL at any moment: ``python -m tests.support.engines.killed DIRECTORY SEED KILLS``.

Each life is a process of its own, forked from this one so that it need not load anything. It serves chats, compares
every reused byte with what computing it again would give, and is killed. Then the blocks that the next life must find
are counted from log and file. A line of JSON on stdout for each life; one that ends by itself has failed.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch

from events.log import LogReader
from kvcache.config import KVCacheConfig
from kvcache.layout import Layout
from kvcache.manager import KVCacheManager
from kvcache.pools import Pools
from kvcache.workload.pattern import PatternSpan, PoolPattern, prefix_digests
from kvcache.workload.tokens import Int32s
from tests.oracles.survivors import survivors
from tests.support.waiting import wait_until

CHATS = 40
LONGEST = 160


def settings(directory: Path) -> KVCacheConfig:
    return KVCacheConfig(
        max_sequence_length=LONGEST + 16,
        tokens_per_block=16,
        num_layers=2,
        primary_blocks=40,
        secondary_blocks=200,
        model="killed",
        secondary_path=str(directory / "secondary"),
    )


def chat(number: int) -> Int32s:
    return np.random.default_rng(number).integers(0, 50_000, LONGEST, dtype=np.int32)


def serve(directory: Path, seed: int) -> None:
    """Go on until somebody ends it."""
    config, r = settings(directory), random.Random(seed)
    pools = Pools(Layout.of(config), "cpu", config.secondary_path)
    manager, pattern = KVCacheManager.open(config, directory / "log", pools=pools), PoolPattern(pools)
    survey = manager.restored.survey if manager.restored else None
    report = {
        "found": survey.found if survey else 0,
        "verified": survey.verified if survey else 0,
        "checked": 0,
        "served": 0,
    }
    for number in itertools.count():
        tokens = chat(r.randrange(CHATS))[: r.randrange(20, LONGEST)]
        request = f"{seed} {number}"
        admission = manager.add_sequence(request, tokens)
        ticket = manager.start_transfers()
        if ticket is not None:
            ticket.wait()
        tables, digests = (np.asarray(manager.block_table(request)),), prefix_digests(tokens)
        if admission.reused_tokens:
            report["checked"] += pattern.check(
                request, PatternSpan(tables, digests, 0, admission.reused_tokens)
            )
        pattern.write([PatternSpan(tables, digests, admission.reused_tokens, len(tokens))])
        manager.store_context_blocks(request, len(tokens))
        manager.remove_sequence(request)
        manager.flush()
        report["served"] += 1
        said = directory / "said.new"
        said.write_text(json.dumps(report))
        said.rename(directory / "said")


def life(directory: Path, seed: int, requests: int, seconds: float) -> int:
    """Let one begin, and kill it when it has served so many `requests`, or, for none of them, some `seconds` later.

    Returns how it ended.
    """
    child = os.fork()
    if child == 0:
        try:
            serve(directory, seed)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    ended = 0, 0

    def is_over() -> bool:
        nonlocal ended
        ended = os.waitpid(child, os.WNOHANG)
        return ended[0] == child or report_of(directory).get("served", 0) >= requests

    try:
        if requests:
            wait_until(is_over, "it serves nobody")
        else:
            time.sleep(seconds)
    finally:
        if ended[0] != child:
            os.kill(child, signal.SIGKILL)
            ended = os.waitpid(child, 0)
    return ended[1]


def report_of(directory: Path) -> dict[str, int]:
    """Return what a life has said last, if anything."""
    said = directory / "said"
    report: dict[str, int] = json.loads(said.read_text()) if said.exists() else {}
    return report


def main() -> None:
    directory, seed, kills = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    r = random.Random(seed)
    for number in range(kills):
        expected, last_seq = 0, -1
        if any((directory / "log").glob("*.kvlog")) and (directory / "secondary").exists():
            layout = Layout.of(settings(directory))
            expected = len(survivors(directory / "log", directory / "secondary", layout))
            for batch in LogReader(directory / "log"):
                last_seq = batch.seq
        (directory / "said").unlink(missing_ok=True)
        # Some die while they begin, most while they serve.
        requests = r.randrange(1, 30) if r.random() < 0.8 else 0
        status = life(directory, seed * 1000 + number, requests, 0.1 * r.random())
        line = {"signal": os.WTERMSIG(status), "expected": expected, "last_seq": last_seq}
        line |= report_of(directory)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
