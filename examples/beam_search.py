"""Beam search on a cache: 4 beams, 64 steps. Beams are forks of one sequence that share their common prefix.

    python examples/beam_search.py

The model is a hash: it scores four tokens for each beam, and the best four of all continue. A beam that is continued
by several tokens is forked; one that is continued by none ends. There are no tensors, only the bookkeeping.
"""

from __future__ import annotations

from heapq import nlargest
from itertools import count
from zlib import crc32

from kvcache import KVCacheConfig, KVCacheManager

BEAMS, STEPS, PROMPT = 4, 64, list(range(100))


def scores(tokens: tuple[int, ...]) -> dict[int, float]:
    """Return scores of four possible next tokens, as a model would."""
    return {token: crc32(repr((tokens, token)).encode()) / 2**32 for token in range(4)}


def search(manager: KVCacheManager) -> tuple[float, tuple[int, ...]]:
    """Return the score and the tokens of the best beam."""
    names = count(1)
    manager.add_sequence(0, PROMPT)
    manager.start_transfers()
    manager.store_context_blocks(0, len(PROMPT))
    beams: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for _ in range(STEPS):
        options = [
            (score + more, beam, (*tokens, token))
            for beam, (score, tokens) in beams.items()
            for token, more in scores(tokens).items()
        ]
        going_on: dict[int, tuple[float, tuple[int, ...]]] = {}
        for score, beam, tokens in nlargest(BEAMS, options):
            name = beam
            if beam in going_on:  # another token continues it as well
                name = next(names)
                manager.fork(beam, name)
            going_on[name] = score, tokens
        for beam in beams.keys() - going_on.keys():
            manager.remove_sequence(beam, store=False)
        manager.start_transfers()
        manager.add_tokens(list(going_on), [tokens[-1] for _, tokens in going_on.values()])
        manager.flush()
        beams = going_on
    for beam in beams:
        manager.remove_sequence(beam)
    return max(beams.values())


def main() -> None:
    """Search, and print the statistics."""
    config = KVCacheConfig(max_sequence_length=256, primary_blocks=64, num_layers=1)
    with KVCacheManager(config) as manager:
        best, tokens = search(manager)
        stats = manager.stats()
        held = (
            config.primary_blocks - manager.num_free_blocks if isinstance(config.primary_blocks, int) else 0
        )
        print(f"best of {BEAMS} beams after {STEPS} steps: {best:.3f}, ending in {tokens[-5:]}")
        print(
            f"{stats.blocks_allocated} blocks allocated, {stats.blocks_copied} copied, {held} held at the end"
        )


if __name__ == "__main__":
    main()
