"""The prefix index for routers: how fast it takes events, how fast it answers, and how much memory a block takes.

    python benchmarks/index.py [--blocks 1000000] [--repeat 3] [--beside COMMAND] [--json]

Eight workers store sequences of 128 blocks of 16 tokens, 16 blocks per event, of which the first 32 are one of 64
prefixes; then prompts that are stored are asked for, as packed tokens and as lists; then everything is removed, leaf
first, 8 blocks per event. Events are decoded before anything is counted, but for `wire`, which decodes, too.

`--beside` runs another index on the same work, in turn with ours, and prints ratios. The command is given the path of a
file, `marshal` of ``(stores, prompts, removals)``: rows of (worker, parent or None, hashes, tokens), of tokens, and of
(worker, hashes). It prints one JSON object with what it has of our figures.

Each figure is the best of several runs, each in a process of its own: what else the machine does can only add to it.
"""

from __future__ import annotations

import argparse
import gc
import json
import marshal
import random
import shlex
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from events.formats.vllm import BlockRemoved, BlockStored, VLLMBatch, decode_batch
from kvcache import PrefixIndex

WORKERS, PREFIXES, PREFIX_BLOCKS, SEQUENCE_BLOCKS = 8, 64, 32, 128
BLOCK, STORED_AT_ONCE, REMOVED_AT_ONCE = 16, 16, 8
VOCABULARY = 150_000
PROMPTS = 2000
UNITS = {
    "store": "M blocks/s",
    "wire": "M blocks/s",
    "remove": "M blocks/s",
    "match_packed": "us",
    "match_packed_p99": "us",
    "match_list": "us",
    "memory": "bytes/block",
}
"""Figures and their units; of those per second more is better."""

Work = tuple[list[tuple[int, int | None, tuple[int, ...], tuple[int, ...]]], list[list[int]], list[Any]]


def make_work(blocks: int, seed: int = 1) -> Work:
    """Stores, prompts and removals."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(VOCABULARY) for _ in range(PREFIX_BLOCKS * BLOCK)] for _ in range(PREFIXES)]
    names = [[rng.getrandbits(64) for _ in range(PREFIX_BLOCKS)] for _ in range(PREFIXES)]
    known: set[tuple[int, int]] = set()
    stores, prompts, removals, total = [], [], [], 0
    while total < blocks:
        worker, prefix = rng.randrange(WORKERS), rng.randrange(PREFIXES)
        own = SEQUENCE_BLOCKS - PREFIX_BLOCKS
        tokens = prefixes[prefix] + [rng.randrange(VOCABULARY) for _ in range(own * BLOCK)]
        hashes = names[prefix] + [rng.getrandbits(64) for _ in range(own)]
        first = PREFIX_BLOCKS if (worker, prefix) in known else 0
        known.add((worker, prefix))
        for at in range(first, SEQUENCE_BLOCKS, STORED_AT_ONCE):
            end = at + STORED_AT_ONCE
            parent = hashes[at - 1] if at else None
            stores.append((worker, parent, tuple(hashes[at:end]), tuple(tokens[at * BLOCK : end * BLOCK])))
        ends = range(SEQUENCE_BLOCKS, first, -REMOVED_AT_ONCE)
        removals.append([(worker, tuple(hashes[end - REMOVED_AT_ONCE : end][::-1])) for end in ends])
        total += SEQUENCE_BLOCKS - first
        prompts.append(tokens)
    # The first sequences brought the prefixes: they go last.
    return stores, prompts[:PROMPTS], [each for sequence in reversed(removals) for each in sequence]


def batch_of(parent: int | None, hashes: tuple[int, ...], tokens: tuple[int, ...]) -> VLLMBatch:
    """A store as it comes from the wire."""
    extras = (None,) * len(hashes)
    event = BlockStored(hashes, parent, tokens, BLOCK, None, "GPU", None, extras, 0, "full_attention")
    return VLLMBatch(0.0, (event,), 0)


def payload_of(batch: VLLMBatch) -> bytes:
    """The bytes of a batch."""
    [event] = batch.events
    fields = {"type": "BlockStored", **msgspec.structs.asdict(event)}
    return msgspec.msgpack.encode([batch.ts, [fields], batch.rank])


def measure(work: Work) -> dict[str, float]:
    """All figures of one run."""
    stores, prompts, removals = work
    batches = [(worker, batch_of(parent, hashes, tokens)) for worker, parent, hashes, tokens in stores]
    blocks = sum(len(hashes) for _, _, hashes, _ in stores)
    gone = [(worker, VLLMBatch(0.0, (BlockRemoved(hashes, "GPU", 0),), 0)) for worker, hashes in removals]
    removed = sum(len(hashes) for _, hashes in removals)
    gc.collect()
    gc.freeze()
    index = PrefixIndex()
    figures = {"store": blocks / _seconds(lambda: _apply(index, batches)) / 1e6}
    lists = _times(index, prompts)
    packed = _times(index, [array("i", prompt).tobytes() for prompt in prompts])
    figures |= {
        "match_list": _at(lists, 0.5),
        "match_packed": _at(packed, 0.5),
        "match_packed_p99": _at(packed, 0.99),
    }
    figures["remove"] = removed / _seconds(lambda: _apply(index, gone)) / 1e6
    payloads = [(worker, payload_of(batch)) for worker, batch in batches[: len(batches) // 4]]
    index.clear()
    fewer = sum(len(hashes) for _, _, hashes, _ in stores[: len(payloads)])
    figures["wire"] = fewer / _seconds(lambda: _decode(index, payloads)) / 1e6
    return figures


def measure_memory(path: Path) -> dict[str, float]:
    """Bytes of the process for each block that is stored, while it reads one payload after the other."""
    index, before = PrefixIndex(), _resident_bytes()
    with path.open("rb") as file:
        for _ in range(marshal.load(file)):
            index.apply(*_loaded(file))
    return {
        "memory": (_resident_bytes() - before) / sum(sum(index.resident(each)) for each in range(WORKERS))
    }


def _loaded(file: BinaryIO) -> tuple[int, VLLMBatch]:
    worker, payload = marshal.load(file)
    return worker, decode_batch(payload)


def _write_payloads(path: Path, work: Work) -> None:
    with path.open("wb") as file:
        marshal.dump(len(work[0]), file)
        for worker, parent, hashes, tokens in work[0]:
            marshal.dump((worker, payload_of(batch_of(parent, hashes, tokens))), file)


def _apply(index: PrefixIndex, batches: list[tuple[int, VLLMBatch]]) -> None:
    for worker, batch in batches:
        index.apply(worker, batch)


def _decode(index: PrefixIndex, payloads: list[tuple[int, bytes]]) -> None:
    for worker, payload in payloads:
        index.apply(worker, decode_batch(payload))


def _seconds(task: Callable[[], None]) -> float:
    start = time.perf_counter()
    task()
    return time.perf_counter() - start


def _times(index: PrefixIndex, prompts: list[Any]) -> list[float]:
    """Microseconds of each question, in order of size."""
    times = []
    for prompt in prompts:
        start = time.perf_counter()
        found = index.match(prompt)
        times.append((time.perf_counter() - start) * 1e6)
        assert max(overlap.primary for overlap in found.values()) == SEQUENCE_BLOCKS * BLOCK
    return sorted(times)


def _at(times: list[float], share: float) -> float:
    return times[int(len(times) * share)]


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def run_apart(command: list[str]) -> dict[str, float]:
    """What a process of its own measures."""
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def best(runs: list[dict[str, float]]) -> dict[str, float]:
    """The best of each figure."""
    chosen = {name: max if unit.endswith("/s") else min for name, unit in UNITS.items()}
    return {
        name: choose(run[name] for run in runs if name in run)
        for name, choose in chosen.items()
        if any(name in run for run in runs)
    }


def compare(blocks: int, repeat: int, beside: str | None) -> dict[str, dict[str, float]]:
    """Figures of ours, and of another one, taking turns."""
    own: list[dict[str, float]] = []
    others: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "work"
        work = make_work(blocks)
        path.write_bytes(marshal.dumps(work))
        for _ in range(repeat):
            own.append(run_apart([sys.executable, __file__, "--measure", str(path)]))
            if beside is not None:
                others.append(run_apart([*shlex.split(beside), str(path)]))
        _write_payloads(path, work)
        own.append(run_apart([sys.executable, __file__, "--measure-memory", str(path)]))
    return {"ours": best(own), "beside": best(others)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--beside", metavar="COMMAND", help="another index: a command that takes the file of the work"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--measure-memory", metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(marshal.loads(Path(args.measure).read_bytes()))))
        return
    if args.measure_memory:
        print(json.dumps(measure_memory(Path(args.measure_memory))))
        return
    figures = compare(args.blocks, args.repeat, args.beside)
    if args.json:
        print(json.dumps(figures))
    else:
        show(figures)


def show(figures: dict[str, dict[str, float]]) -> None:
    """Print a table of what `compare` has found."""
    for name, unit in UNITS.items():
        ours, other = figures["ours"][name], figures["beside"].get(name)
        line = f"{name:<18}{ours:>8.2f} {unit:<12}"
        if other:
            ratio = ours / other if unit.endswith("/s") else other / ours
            line += f" beside {other:>8.2f}   {ratio:.2f} times as good"
        print(line)


if __name__ == "__main__":
    main()
