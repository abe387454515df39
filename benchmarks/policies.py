"""Orders of eviction at many sizes: how many block requests a second are played, beside libCacheSim's Python binding.

    python benchmarks/policies.py TRACE [--sizes 3000,10000] [--policies lru,lfu,slru,s3fifo]

Both play the same block requests in one process; times are CPU times. Ours follow the rule of docs/curve.md. `flat` is
ours without it, each block being a prompt of its own: its LRU and FIFO have the hits of libCacheSim's, whose other
policies differ from ours in details. libCacheSim (`pip install libcachesim`) is left out where it is missing.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from kvcache.audit.policies import Policy, RequestRecorder, Workload
from kvcache.workload.traces import TracePrompts

try:
    import libcachesim
except ImportError:
    libcachesim = None

NAMES = {"lru": "LRU", "fifo": "FIFO", "lfu": "LFU", "slru": "SLRU", "s3fifo": "S3FIFO"}
"""Ours, and what libCacheSim calls them."""
REQUEST = np.dtype([("time", "<u4"), ("block", "<u8"), ("bytes", "<u4"), ("next", "<i8")])
"""A record of libCacheSim's oracleGeneral traces."""


def timed(play: Callable[[], float], requests: int) -> tuple[float, float]:
    """What a function returns, and millions of block requests per CPU second."""
    begin = time.process_time()
    found = play()
    return found, requests / max(time.process_time() - begin, 1e-9) / 1e6


def flat(workload: Workload, most: int) -> Workload:
    """The first block requests, each as a prompt of its own."""
    recorder = RequestRecorder()
    for block in workload.requests.blocks[:most].tolist():
        recorder.add([block])
    return recorder.workload(workload.tokens_per_block)


def hit_rate(policy: Policy, workload: Workload, size: int) -> float:
    """Ours."""
    return float(policy.hits(workload, size).sum()) / max(workload.block_requests, 1)


def peer(name: str, size: int, path: Path) -> float:
    """The hit rate of libCacheSim."""
    reader = libcachesim.TraceReader(str(path), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
    misses, _ = getattr(libcachesim, NAMES[name])(size).process_trace(reader)
    return 1 - float(misses)


def main() -> None:
    """Print a line for each policy and size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace")
    parser.add_argument("--sizes", default="3000,10000")
    parser.add_argument("--policies", default=",".join(NAMES))
    args = parser.parse_args()
    prompts, recorder = TracePrompts(args.trace), RequestRecorder()
    for blocks in prompts:
        recorder.add(blocks, arrival=prompts.at / 1e9)
    workload = recorder.workload(prompts.tokens_per_block)
    requests = workload.block_requests
    single = flat(workload, requests)
    print(f"{requests:,} block requests; hit rate, M requests per CPU second")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "requests"
        records = np.zeros(requests, REQUEST)
        records["block"], records["bytes"], records["next"] = workload.requests.blocks, 1, -1
        records.tofile(path)
        for name in args.policies.split(","):
            policy = Policy.named(name)
            policy.hits(workload, 2)  # compiled by then
            for size in map(int, args.sizes.split(",")):
                found = {
                    "ours": timed(partial(hit_rate, policy, workload, size), requests),
                    "flat": timed(partial(hit_rate, policy, single, size), requests),
                }
                if libcachesim is not None and name in NAMES:
                    found["libcachesim"] = timed(partial(peer, name, size, path), requests)
                cells = [f"{case} {rate:7.2%} {speed:6.2f} M/s" for case, (rate, speed) in found.items()]
                if "libcachesim" in found:
                    cells.append(f"ours/libcachesim {found['ours'][1] / found['libcachesim'][1]:.1f}")
                print(f"{name:8} {size:8,}  " + "  ".join(cells))
    if libcachesim is None:
        print("libCacheSim is not installed: pip install libcachesim")


if __name__ == "__main__":
    main()
