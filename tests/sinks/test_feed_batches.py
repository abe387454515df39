"""Cutting changes into batches: nothing lost, nothing reordered, nothing too large."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.feed.changes import AnyChange, Cleared, Removed, Stored
from events.formats.vllm import encode_batch, with_salts
from events.types import Namespace
from sinks.base import MAX_SALT_BYTES
from sinks.router.feed import change_bytes, in_batches
from tests.support.feeds.feed_source import BLOCK, Reader, names, state_of, tokens

SPACES = [
    Namespace(),
    Namespace(3, "adapter-\N{GREEK SMALL LETTER PHI}" * 5, b"\xff" * 32),
    Namespace(2**62, None, b"\xff" * 32),
]


def stored(handle: int, blocks: int, space: Namespace = SPACES[0]) -> Stored:
    return Stored(0, 0, names(handle, blocks), b"", tokens(handle, blocks), BLOCK, space)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("blocks", [1, 15, 16, 1000, 70_000])
def test_the_bound_holds(space: Namespace, blocks: int) -> None:
    """No encoded batch is larger than the sizes that its changes were taken for."""
    changes: list[AnyChange] = [Cleared(), stored(1, blocks, space), Removed(0, 0, names(1, blocks))]
    for change in changes:
        assert len(encode_batch([change], 1.5, 2**31)) <= change_bytes(change) + 64
    assert len(encode_batch(changes, 1.5, 0)) <= sum(map(change_bytes, changes)) + 64
    longest = {b"\xff" * 32: "s" * MAX_SALT_BYTES}
    for change in changes:
        assert len(encode_batch(with_salts([change], longest.get), 1.5, 2**31)) <= change_bytes(change) + 64


def with_items(handle: int, blocks: int, items: int, space: Namespace = SPACES[0]) -> Stored:
    """A store of blocks that lie in so many items each."""
    extras = tuple(
        tuple((f"{block:064x}", -(2**31) + item) for item in range(items)) for block in range(blocks)
    )
    return msgspec.structs.replace(stored(handle, blocks, space), extras=extras)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("blocks", [1, 16, 200])
@pytest.mark.parametrize("items", [1, 20, 300])
def test_the_bound_holds_with_items(space: Namespace, blocks: int, items: int) -> None:
    """The items of each block are counted as well."""
    change = with_items(1, blocks, items, space)
    assert len(encode_batch([change], 1.5, 2**31)) <= change_bytes(change) + 64


@pytest.mark.parametrize("max_bytes", [1000, 10_000])
def test_items_stay_with_their_blocks(max_bytes: int) -> None:
    """Where a store is cut, each block keeps its own items, and no batch is larger than the bound."""
    whole = with_items(1, 100, 2)
    batches = list(in_batches([whole], max_bytes))
    assert len(batches) > 1
    pieces = [change for batch in batches for change in batch if isinstance(change, Stored)]
    assert tuple(extras for piece in pieces for extras in piece.extras) == whole.extras
    assert all(len(piece.extras) * 8 == len(piece.names) for piece in pieces)
    assert max(len(encode_batch(batch, 1.5, 0)) for batch in batches) <= max_bytes


@given(
    sizes=st.lists(st.integers(1, 60), max_size=12),
    max_bytes=st.integers(1, 6000),
    removes=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_cut_changes_mean_the_same(sizes: list[int], max_bytes: int, removes: list[bool]) -> None:
    """Whatever the bound, a reader of the batches ends where a reader of the changes ends."""
    changes: list[AnyChange] = []
    for handle, size in enumerate(sizes):
        changes.append(stored(handle, size))
        if removes[handle]:
            gone = names(handle, size)
            leaves_first = b"".join(gone[at : at + 8] for at in range(len(gone) - 8, -1, -8))
            changes.append(Removed(0, 0, leaves_first))
    batches = list(in_batches(changes, max_bytes))
    assert state_of(batches) == state_of([changes])
    kept = [change.names for batch in batches for change in batch if isinstance(change, Stored)]
    assert b"".join(kept) == b"".join(names(handle, size) for handle, size in enumerate(sizes))


@pytest.mark.parametrize("max_bytes", [1000, 2000, 10_000, 1 << 20])
def test_batches_keep_to_the_bound(max_bytes: int) -> None:
    """Encoded batches are within the bound, and not much smaller, so that few are needed."""
    changes: list[AnyChange] = [stored(handle, blocks) for handle, blocks in enumerate([1, 400, 3, 90, 2000])]
    batches = list(in_batches(changes, max_bytes))
    sizes = [len(encode_batch(batch, 1.5, 0)) for batch in batches]
    assert max(sizes) <= max_bytes
    assert len(batches) <= 3 + 4 * sum(map(change_bytes, changes)) // max_bytes


def test_a_block_larger_than_the_bound_still_goes_out() -> None:
    """A single block is never cut and never dropped."""
    big = Stored(0, 0, names(1, 2), b"", tokens(1, 2, 4096), 4096, Namespace())
    batches = list(in_batches([big], 1000))
    assert [len(batch) for batch in batches] == [1, 1]
    reader = Reader()
    for batch in batches:
        reader.take_payload(encode_batch(batch, 1.5, 0))
    assert len(reader.state) == 2
