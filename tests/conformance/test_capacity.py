"""How many blocks windows and sequences get: arithmetic, E-13 and E-14."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvcache.config import KVCacheConfig
from kvcache.layout import Layout
from kvcache.sizes import blocks_at_most, shares_of, split, weights_by_window

WINDOWS = (1024, 4096, 8192)


@pytest.mark.parametrize(
    ("num_tokens", "sink", "window", "blocks"),
    [
        (512, 0, 1024, 8),
        (513, 0, 1024, 9),
        (512, 0, 256, 5),
        (512, 0, 257, 6),
        (512, 64, 1024, 8),
        (513, 64, 1024, 9),
        (512, 64, 256, 5),
        (512, 64, 257, 6),
        (512, 65, 1024, 9),
        (513, 65, 1024, 9),
        (512, 65, 256, 6),
        (512, 65, 257, 6),
    ],
)
def test_e_13_blocks_of_a_sequence(num_tokens: int, sink: int, window: int, blocks: int) -> None:
    """A sequence takes blocks for its window, one more if that slides, and what sink tokens leave of a block."""
    assert blocks_at_most(num_tokens, window, 64, sink) == blocks


@pytest.mark.parametrize(("longest", "blocks", "window"), [(1279, 3, 192), (2048, 256, 2048)])
def test_e_13_the_largest_window(longest: int, blocks: int, window: int) -> None:
    """The largest window that fits is all of the sequence, or what the blocks hold."""
    (group,) = Layout.of(
        KVCacheConfig(max_sequence_length=longest, tokens_per_block=64, primary_blocks=blocks)
    ).groups
    assert group.window == window


def test_e_14_window_shares() -> None:
    """Equal bytes per token: the windows' lengths are their shares, and blocks are rounded down."""
    shares = shares_of(weights_by_window(WINDOWS, (1, 1, 1)))
    assert [round(float(share), 4) for share in shares] == [0.0769, 0.3077, 0.6154]
    assert split(16384, shares) == (1260, 5041, 10082)


@pytest.mark.parametrize(
    ("bytes_per_token", "parts"), [((2, 12, 2), (2048, 49152, 16384)), ((8, 2, 1), (8192, 8192, 8192))]
)
def test_e_14_shares_weigh_bytes_per_token(bytes_per_token: Sequence[int], parts: tuple[int, ...]) -> None:
    """A window weighs by its length and its bytes per token: 2:12:2 shift the shares, 8:2:1 make them thirds."""
    weights = weights_by_window(WINDOWS, bytes_per_token)
    assert weights == parts
    assert split(sum(parts), shares_of(weights)) == parts
