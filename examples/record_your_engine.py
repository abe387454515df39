"""A toy engine with its own block manager, recorded by `kvcache.Recorder`.

    python examples/record_your_engine.py [LOG]

Six people chat, four times each, in a cache that holds about half of it. The block manager is what small engines have:
a queue of free blocks, and a hash map from the hash of a prefix to its last block. Each decision is recorded by one
call, in the manager's own block ids. The log then explains why prompt tokens were computed.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, deque
from hashlib import sha256
from itertools import count
from tempfile import TemporaryDirectory

from kvcache import KVCacheConfig, Recorder
from kvcache.cli import main as kvcache

SIZE = 16
"""Tokens per block."""
BLOCKS = 96
OUTPUT = 24
"""Tokens that each request wants."""


class BlockManager:
    """Block tables, reference counts, a prefix cache, and a queue of free blocks in order of release."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.free = deque(range(BLOCKS))
        self.found: dict[bytes, list[int]] = {}
        self.names: dict[int, bytes] = {}
        self.tables: dict[str, list[int]] = {}
        self.holders = Counter[int]()

    def admit(self, request: str, tokens: list[int]) -> int | None:
        """Reuse cached blocks of a prompt and allocate the rest; returns the cached tokens, or None without room."""
        hits: list[int] = []
        for name in chain(tokens)[: (len(tokens) - 1) // SIZE]:  # the last token is always computed
            if name not in self.found:
                break
            hits.append(self.found[name][0])
        needed = -(-len(tokens) // SIZE) - len(hits)
        if needed > len(self.free) - sum(not self.holders[block] for block in hits):
            self.recorder.refused(request, needed)
            return None
        for block in hits:
            if not self.holders[block]:
                self.free.remove(block)
        self.holders.update(hits)
        self.recorder.admitted(request, tokens, hits)
        self.tables[request] = [*hits]
        self.grow(request, needed)
        return len(hits) * SIZE

    def grow(self, request: str, num_blocks: int) -> None:
        """Append free blocks to a request's table, which evicts what was cached in them."""
        blocks = [self.free.popleft() for _ in range(num_blocks)]
        evicted = [block for block in blocks if block in self.names]
        for block in evicted:
            name = self.names.pop(block)
            self.found[name].remove(block)
            if not self.found[name]:
                del self.found[name]
        self.recorder.evicted(evicted, request)
        self.recorder.allocated(request, blocks)
        self.tables[request] += blocks
        self.holders.update(blocks)

    def store(self, request: str, tokens: list[int]) -> None:
        """Add a request's full blocks to the prefix cache; duplicates are kept."""
        names = chain(tokens)
        for name, block in zip(names, self.tables[request], strict=False):
            if block not in self.names:
                self.names[block] = name
                self.found.setdefault(name, []).append(block)
        self.recorder.stored(request, len(names))

    def end(self, request: str) -> None:
        """Release a request's blocks in reverse order, so that the last one is evicted first."""
        for block in reversed(self.tables.pop(request)):
            self.holders[block] -= 1
            if not self.holders[block]:
                self.free.append(block)
        self.recorder.ended(request)


def chain(tokens: list[int]) -> list[bytes]:
    """Return the names of the full blocks of these tokens: chained hashes of all tokens up to each block's end."""
    names = [b""]
    for end in range(SIZE, len(tokens) + 1, SIZE):
        names.append(sha256(names[-1] + repr(tokens[end - SIZE : end]).encode()).digest())
    return names[1:]


def chat(manager: BlockManager, rng: random.Random, waiting: deque[tuple[str, list[int]]]) -> int:
    """Serve requests, two at a time; returns how many prompt tokens were cached."""
    running: dict[str, list[int]] = {}
    left = Counter[str]()
    cached = 0
    while waiting or running:
        while waiting and len(running) < 2:
            request, prompt = waiting[0]
            hit = manager.admit(request, prompt)
            if hit is None:
                break
            waiting.popleft()
            manager.store(request, prompt)  # by the forward pass that is about to run
            running[request], left[request], cached = [*prompt], OUTPUT, cached + hit
        sampled = {request: rng.randrange(1000) for request in running}
        manager.recorder.appended(list(sampled), list(sampled.values()))
        for request, token in sampled.items():
            tokens = running[request]
            tokens.append(token)
            if len(tokens) % SIZE == 1:
                manager.store(request, tokens[:-1])
            if len(tokens) > len(manager.tables[request]) * SIZE:
                manager.grow(request, 1)
            left[request] -= 1
            if not left[request]:
                manager.end(request)
                del running[request]
        manager.recorder.flush()  # the step is over
    return cached


def serve(log: str) -> None:
    """Play the chats; each prompt is the system prompt and the whole conversation so far."""
    rng = random.Random(1)
    config = KVCacheConfig(tokens_per_block=SIZE, primary_blocks=BLOCKS, max_sequence_length=BLOCKS * SIZE)
    clock = count(1_767_225_600_000_000_000, 20_000_000)  # a step takes 20 ms
    with Recorder(config, engine="toy 1.0", log=log, wall_ns=clock.__next__) as recorder:
        manager = BlockManager(recorder)
        system = [rng.randrange(1000) for _ in range(100)]
        said = {person: [*system] for person in "abcdef"}
        prompts = deque[tuple[str, list[int]]]()
        for turn in range(4):
            for person, tokens in said.items():
                tokens += [rng.randrange(1000) for _ in range(100)]
                prompts.append((f"{person}{turn}", [*tokens]))
        cached = chat(manager, rng, prompts)
    print(f"the engine has found {cached:,} prompt tokens in its cache\n")


if __name__ == "__main__":
    with TemporaryDirectory() as directory:
        log = sys.argv[1] if len(sys.argv) > 1 else f"{directory}/log"
        serve(log)
        kvcache(["audit", log, "--top", "1", "--quiet"])
        kvcache(["explain", log, "--request", "a3", "--quiet"])
