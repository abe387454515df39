"""The pattern that stands for K and V, in real tensors."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache.config import KVCacheConfig
from kvcache.errors import InvariantViolated
from kvcache.layout import Layout
from kvcache.pools import Pools
from kvcache.workload import pattern
from kvcache.workload.pattern import PatternMismatch, PatternSpan, PoolPattern, prefix_digests
from tests.support.commands import RunPython

BLOCK = 4
TOKENS = np.arange(100, 110, dtype=np.int32)
TABLE = np.array([6, 1, 4], dtype=np.int32)


def pools(**changes: Any) -> Pools:
    config = {"max_sequence_length": 64, "tokens_per_block": BLOCK, "primary_blocks": 8, **changes}
    return Pools(Layout.of(KVCacheConfig(**config)), "cpu")


def span(
    tokens: Any = TOKENS, table: Any = TABLE, begin: int = 0, end: int | None = None, namespace: Any = ()
) -> PatternSpan:
    tokens, table = np.asarray(tokens, dtype=np.int32), np.asarray(table, dtype=np.int32)
    return PatternSpan(
        (table,), prefix_digests(tokens, namespace), begin, len(tokens) if end is None else end
    )


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


SHAPES = [
    {},
    {"kv_layout": "HND"},
    {"kv_factor": 1, "num_kv_heads": 1, "head_dim": 12},
    {"dtype": "float8_e4m3fn", "head_dim": 6},
    {"dtype": "int8", "head_dim": 5, "kv_layout": "HND"},
    {"dtype": "float32", "head_dim": 3},
    {"num_layers": 3, "num_kv_heads": (1, 3, 1)},
    {"num_layers": 2, "max_attention_window": (16, 64)},
]


def spans(held: Pools, **changes: Any) -> PatternSpan:
    one = span(**changes)
    return PatternSpan(one.tables * len(held.groups), one.digests, one.begin, one.end)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_was_written_is_accepted(shape: dict[str, Any]) -> None:
    """In every layout and type, with several pools and windows, written rows compare equal, block by block."""
    held = pools(**shape)
    checker = PoolPattern(held)
    checker.write([spans(held, end=5), spans(held, begin=5)])
    assert checker.check("r", spans(held)) == 3 * len(held.groups)
    assert checker.check("r", spans(held, begin=3, end=5)) == 2 * len(held.groups)
    assert checker.check("r", spans(held, begin=4, end=4)) == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_every_byte_of_the_written_tokens_is_used_and_no_other(shape: dict[str, Any]) -> None:
    """Writing fills the rows of its tokens, all layers, heads, K and V of them, and leaves all others alone."""
    held = pools(**shape)
    for group in held.groups:
        for pool in group:
            raw(pool.primary).fill_(0xAB)
    PoolPattern(held).write([spans(held, begin=3, end=10)])
    for group in held.groups:
        for pool in group:
            rows = raw(pool.primary)
            if pool.layout.kv_layout == "HND":
                rows = rows.transpose(3, 4)
            written = {(6, 3), *((1, offset) for offset in range(4)), (4, 0), (4, 1)}
            for slot in range(8):
                for offset in range(BLOCK):
                    untouched = (rows[slot, :, :, offset] == 0xAB).all(dim=-1)
                    assert untouched.any().item() != ((slot, offset) in written)
                    assert untouched.all().item() != ((slot, offset) in written)


@pytest.mark.parametrize("shape", SHAPES)
@given(data=st.data())
def test_one_changed_bit_is_found(shape: dict[str, Any], data: st.DataObject) -> None:
    """Flipping any bit of any checked row is reported with its block, slot and layer."""
    held = pools(**shape)
    checker = PoolPattern(held)
    checker.write([spans(held)])
    pool = data.draw(st.sampled_from([pool for group in held.groups for pool in group]))
    position = data.draw(st.integers(0, len(TOKENS) - 1))
    slot, offset = int(TABLE[position // BLOCK]), position % BLOCK
    layer = data.draw(st.integers(0, len(pool.layout.layers) - 1))
    rows = raw(pool.primary)[slot, layer]
    if pool.layout.kv_layout == "HND":
        rows = rows.transpose(1, 2)
    row = rows[
        data.draw(st.integers(0, pool.layout.kv_factor - 1)),
        offset,
        data.draw(st.integers(0, pool.layout.num_kv_heads - 1)),
    ]
    row[data.draw(st.integers(0, len(row) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(PatternMismatch) as caught:
        checker.check("r", spans(held))
    found = (caught.value.block_index, caught.value.slot, caught.value.layer)
    assert found == (position // BLOCK, slot, pool.layout.layers[layer])


class TestWindows:
    """Sequences whose small window (16 tokens) has let go of their first blocks."""

    TOKENS = np.arange(27, dtype=np.int32)
    TABLE = (6, 1, 4, 0, 2, 3, 5)

    def checked(self, gone: int, spoilt: int | None = None, end: int = 27) -> int:
        """The number of blocks that are compared when so many are gone, and one slot of the small window is zeroed."""
        held = pools(num_layers=2, max_attention_window=(16, 64))
        checker = PoolPattern(held)
        checker.write([spans(held, tokens=self.TOKENS, table=self.TABLE)])
        if spoilt is not None:
            held.groups[0][0].primary[spoilt] = 0
        whole = spans(held, tokens=self.TOKENS, table=self.TABLE, end=end)
        table = np.array([*[-2] * gone, *self.TABLE[gone:]], np.int32)
        return checker.check("r", PatternSpan((table, whole.tables[1]), whole.digests, 0, end))

    def test_blocks_that_are_gone_are_left_out(self) -> None:
        """Only what the small window still has is compared there, and all of the large one."""
        assert self.checked(0) == 7 + 7
        assert self.checked(2) == 5 + 7
        assert self.checked(2, spoilt=1) == 5 + 7
        with pytest.raises(PatternMismatch, match=r"block 2 \(primary slot 4\) holds wrong bytes in layer 0"):
            self.checked(2, spoilt=4)

    def test_a_block_that_is_seen_must_be_there(self) -> None:
        """Token 26 sees tokens 11 to 26, token 27 one fewer: then block 2 may be gone."""
        with pytest.raises(InvariantViolated, match="released a block that it attends to"):
            self.checked(3, end=26)
        assert self.checked(3) == 4 + 7


class TestForeignBlocks:
    """Blocks that hold good bytes of something else."""

    def test_equal_tokens_after_another_prefix(self) -> None:
        """A block with the right tokens at the right place, but behind other tokens, is refused."""
        checker = PoolPattern(pools())
        other = TOKENS.copy()
        other[0] += 1
        checker.write([span(), span(other, [5, 2, 3])])
        checker.check("r", span())
        checker.check("r", span(other, [5, 2, 3]))
        with pytest.raises(PatternMismatch) as caught:
            checker.check("r", span(table=[6, 2, 4]))
        assert (caught.value.block_index, caught.value.slot) == (1, 2)

    def test_equal_tokens_of_another_namespace(self) -> None:
        """The same prompt of another namespace has other bytes, in its first block already."""
        checker = PoolPattern(pools())
        checker.write([span(namespace=(None, None, "a"))])
        with pytest.raises(PatternMismatch) as caught:
            checker.check("r", span(namespace=(None, None, "b")))
        assert caught.value.block_index == 0

    def test_never_written(self) -> None:
        """A block of zeros is refused."""
        checker = PoolPattern(pools())
        checker.write([span(end=8)])
        with pytest.raises(PatternMismatch) as caught:
            checker.check("r", span())
        assert (caught.value.block_index, caught.value.slot, caught.value.layer) == (2, 4, 0)
        with pytest.raises(PatternMismatch) as caught:
            checker.check("r", span(begin=6))
        assert (caught.value.block_index, caught.value.slot, caught.value.layer) == (2, 4, 0)

    @pytest.mark.parametrize("dim", [1, 2, 3, 4])
    def test_swapped_inside_the_block(self, dim: int) -> None:
        """Exchanging layers, K and V, tokens or heads inside a block is noticed."""
        held = pools()
        checker = PoolPattern(held)
        checker.write([span()])
        tensor = held.groups[0][0].primary
        tensor.copy_(tensor.flip(dim))
        with pytest.raises(PatternMismatch):
            checker.check("r", span())

    def test_negative_slot(self) -> None:
        """A padded table is not taken for a slot counted from the end."""
        with pytest.raises(InvariantViolated, match="below 0"):
            PoolPattern(pools()).write([span(table=[6, -1, 4])])


def test_mismatch_names_the_place_and_no_tokens() -> None:
    """The error says request, block, slot and layer, survives pickling, and quotes no token."""
    held = pools()
    checker = PoolPattern(held)
    checker.write([span()])
    held.groups[0][0].primary[1, 1] = 0
    with pytest.raises(PatternMismatch) as caught:
        checker.check("r7", span())
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.request_id, error.block_index, error.slot, error.layer) == ("r7", 1, 1, 1)
    assert "request 'r7': block 1 (primary slot 1) holds wrong bytes in layer 1" in str(error)
    assert not any(str(token) in str(error) for token in TOKENS)


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are made one token at a time are those that are made all at once, and errors name the same place."""
    held, again = pools(), pools()
    PoolPattern(held).write([span()])
    monkeypatch.setattr(pattern, "_CHUNK_BYTES", 1)
    checker = PoolPattern(again)
    checker.write([span()])
    assert torch.equal(raw(held.groups[0][0].primary), raw(again.groups[0][0].primary))
    raw(again.groups[0][0].primary)[4, 1] ^= 1
    with pytest.raises(PatternMismatch) as caught:
        checker.check("r", span())
    assert (caught.value.block_index, caught.value.slot, caught.value.layer) == (2, 4, 1)


def test_bytes_survive_the_way_through_secondary() -> None:
    """Whatever bits the pattern gives, copying them as elements of the pool's type keeps them: none is a lost NaN."""
    held = pools(secondary_blocks=8)
    checker = PoolPattern(held)
    checker.write([span()])
    pool = held.groups[0][0]
    pool.secondary.copy_(pool.primary)
    pool.primary.zero_()
    pool.primary.copy_(pool.secondary)
    checker.check("r", span())


class TestDigests:
    """One number per prefix."""

    @given(st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=40), st.data())
    def test_digest_stands_for_the_whole_prefix(self, tokens: list[int], data: st.DataObject) -> None:
        """Changing one token changes the digests from there on, and none before."""
        place = data.draw(st.integers(0, len(tokens) - 1))
        other = [*tokens[:place], tokens[place] ^ 1, *tokens[place + 1 :]]
        one, two = (prefix_digests(np.array(each, dtype=np.int32)) for each in (tokens, other))
        assert ((one == two) == (np.arange(len(tokens)) < place)).all()

    def test_order_counts(self) -> None:
        """Exchanging two tokens gives another prefix, also after both."""
        one, two = (prefix_digests(np.array(tokens, dtype=np.int32)) for tokens in ([5, 6, 7], [6, 5, 7]))
        assert not (one == two).any()

    def test_digests_do_not_depend_on_what_follows(self) -> None:
        """The digests of a prefix are the first ones of the whole."""
        assert np.array_equal(prefix_digests(TOKENS[:4]), prefix_digests(TOKENS)[:4])

    def test_namespaces_differ_in_every_part(self) -> None:
        """LoRA id, LoRA name and salt each make a namespace of their own; 1 is not "1"."""
        names = [
            (),
            (None, None, None),
            (1, None, None),
            ("1", None, None),
            (None, "1", None),
            (None, None, "1"),
        ]
        assert len({int(prefix_digests(TOKENS, name)[0]) for name in names}) == len(names)


def test_no_torch_without_pools(run_python: RunPython) -> None:
    """Importing the workload and reading a trace load no torch."""
    done = run_python("import sys, kvcache.workload; print('torch' in sys.modules)")
    assert (done.stdout, done.stderr) == ("False\n", "")
