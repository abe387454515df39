"""What requests reused and missed: R-7."""

from __future__ import annotations

from kvcache.manager import KVCacheManager
from tests.support.engines import strategies


def test_r_7_each_request_has_its_counts() -> None:
    """The first misses all of its three blocks; the second finds two of them and misses the one of its last token."""
    manager = KVCacheManager(
        strategies.config(tokens_per_block=4, primary_blocks=16, max_sequence_length=64), request_stats=1
    )
    reported = []
    for name in ("first", "second"):
        manager.add_sequence(name, range(9))
        manager.store_context_blocks(name, 9)
        manager.remove_sequence(name)
        reported += manager.take_request_stats()
    first, second = reported
    assert (first.blocks_reused, first.blocks_missed) == (0, 3)
    assert (first.blocks_allocated, first.blocks_allocated_new) == (3, 3)
    assert (second.blocks_reused, second.blocks_missed) == (2, 1)
    assert (second.blocks_allocated, second.blocks_allocated_new) == (1, 1)
    assert (first.block_hit_rate, second.block_hit_rate) == (0, 2 / 3)
    manager.flush()
    assert manager.stats().block_hit_rate == 2 / 6
