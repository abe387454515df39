"""Preemption: twelve requests in a cache with room for five outputs. The youngest is preempted, and resumes later.

    python examples/preemption.py

Prompts are admitted as long as they fit, however long their outputs will get. Where the next tokens do not fit, the
request that was admitted last is preempted: its computed blocks stay cached while there is room, so that resuming it
is cheap. There are no tensors, and the model is a hash: only the bookkeeping is real.
"""

from __future__ import annotations

from collections import deque
from zlib import crc32

from kvcache import KVCacheConfig, KVCacheManager, Request
from kvcache.errors import OutOfBlocks

OUTPUT = 64
"""Tokens that each request wants."""
SYSTEM = list(range(1000, 1032))
"""Common prefix of all prompts."""


def sample(tokens: list[int]) -> int:
    """Return the next token, as a model would."""
    return crc32(repr(tokens[-8:]).encode()) % 50_000


Tokens = dict[int, list[int]]


def admit(manager: KVCacheManager, waiting: deque[int], tokens: Tokens, preempted: set[int]) -> list[int]:
    """Admit waiting requests while they fit; returns those admitted."""
    requests = [Request(number, tokens[number], resumed=number in preempted) for number in waiting]
    admitted = [waiting.popleft() for _ in range(manager.can_add(requests))]
    manager.add_sequences(requests[: len(admitted)])
    manager.start_transfers()
    for number in admitted:
        manager.store_context_blocks(number, len(tokens[number]))
    return admitted


def serve(manager: KVCacheManager, prompts: Tokens) -> Tokens:
    """Serve all requests; returns their prompts and outputs."""
    tokens = {number: list(prompt) for number, prompt in prompts.items()}
    waiting, running = deque(prompts), list[int]()
    preempted: set[int] = set()
    while running or waiting:
        running += admit(manager, waiting, tokens, preempted)
        sampled = {number: sample(tokens[number]) for number in running}
        while True:
            try:
                manager.add_tokens(running, [sampled[number] for number in running])
                break
            except OutOfBlocks:
                youngest = running.pop()
                manager.remove_sequence(youngest, why="preempted")
                preempted.add(youngest)
                waiting.appendleft(youngest)
        for number in running:
            tokens[number].append(sampled[number])
        for number in [each for each in running if len(tokens[each]) == len(prompts[each]) + OUTPUT]:
            manager.remove_sequence(number)
            running.remove(number)
        manager.flush()
    return tokens


def main() -> None:
    """Serve, and print the statistics."""
    config = KVCacheConfig(max_sequence_length=256, tokens_per_block=16, primary_blocks=32, num_layers=1)
    prompts = {number: [*SYSTEM, *range(number * 16, number * 16 + 16)] for number in range(12)}
    with KVCacheManager(config, request_stats=100) as manager:
        served = serve(manager, prompts)
        stats = manager.stats()
        preempted = sum(record.why == "preempted" for record in manager.take_request_stats())
        held = 32 - manager.num_free_blocks
        print(
            f"{len(served)} requests served, one was preempted {preempted} times, {held} blocks held at the end"
        )
        print(f"{stats.reused_tokens_own} tokens of returning requests needed no computing")


if __name__ == "__main__":
    main()
