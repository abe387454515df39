"""What attention kernels take: each form of tables against the plain ones, and against what is written through them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from kvcache import CROSS_WINDOW, KVCacheManager, Layout
from kvcache.errors import UsageError
from kvcache.pools import Pools
from tests.support.engines import strategies
from tests.support.engines.inside import sequence_of

SIZE = 4


def cache(**settings: Any) -> KVCacheManager:
    return KVCacheManager(strategies.config(**({"tokens_per_block": SIZE, "primary_blocks": 12} | settings)))


def slot_of(manager: KVCacheManager, request_id: str, token: int) -> int:
    """From the plain table."""
    return int(manager.block_table(request_id)[token // SIZE]) * SIZE + token % SIZE


def two_requests() -> KVCacheManager:
    """One decodes, of the other's prompt of ten tokens four are computed."""
    manager = cache()
    manager.add_sequence("a", [1, 2, 3])
    manager.store_context_blocks("a", 3)
    manager.add_tokens(["a"], [4])
    manager.add_sequence("b", range(10, 20))
    manager.store_context_blocks("b", 4)
    return manager


def test_slots_are_those_of_the_tokens_to_be_computed() -> None:
    """The token that was sampled last, and what is left of the prompt."""
    manager = two_requests()
    mapping = manager.tables.slot_mapping(["a", "b"])
    assert np.asarray(mapping).dtype == np.int64
    assert mapping.tolist() == [
        slot_of(manager, "a", 3),
        *(slot_of(manager, "b", token) for token in range(4, 10)),
    ]
    assert manager.tables.slot_mapping([]).tolist() == []


def test_a_step_may_be_a_part() -> None:
    """A chunk, from where the engine has got to without having told, and reserved slots."""
    manager = two_requests()
    mapping = manager.tables.slot_mapping(["b"], starts=[6], stops=[8])
    assert mapping.tolist() == [slot_of(manager, "b", 6), slot_of(manager, "b", 7)]
    manager.reserve(["a"], [2])
    assert manager.tables.slot_mapping(["a"], starts=[4], stops=[6]).tolist() == [
        slot_of(manager, "a", 4),
        slot_of(manager, "a", 5),
    ]
    assert manager.tables.sequence_lengths(["b", "a"], stops=[8, 6]).tolist() == [8, 6]


def test_paged_tables_hold_what_the_step_reads() -> None:
    """Rows behind each other, of the blocks up to the step's last token; what is reserved behind that is left out."""
    manager = two_requests()
    manager.reserve(["a"], [9])
    tables = manager.tables.paged(["b", "a"], stops=[9, 4])
    assert [np.asarray(each).dtype for each in tables] == [np.int32] * 3
    assert tables.indptr.tolist() == [0, 3, 4]
    assert tables.indices.tolist() == [*manager.block_table("b")[:3], manager.block_table("a")[0]]
    assert tables.last_page_len.tolist() == [1, 4]
    assert [each.tolist() for each in manager.tables.paged([])] == [[0], [], []]


def test_padded_tables_may_be_read_anywhere() -> None:
    """Short ones end in the filler; where a window has left a block behind stands one that is still held."""
    manager = cache(max_attention_window=4)
    manager.add_sequence("long", range(11))
    manager.store_context_blocks("long", 11)
    manager.add_sequence("short", [50])
    plain = manager.block_table("long").tolist()
    assert plain[0] == -2
    held = next(slot for slot in plain if slot >= 0)
    safe = [slot if slot >= 0 else held for slot in plain]
    assert manager.tables.padded(["long", "short"], filler=7).tolist() == [
        safe,
        [*manager.block_table("short").tolist(), 7, 7],
    ]
    assert manager.tables.paged(["long"]).indices.tolist() == safe


@pytest.mark.parametrize("filler", [-1, 1 << 31, "0"])
def test_fillers_that_are_no_slot(filler: Any) -> None:
    """They are refused."""
    with pytest.raises(UsageError, match="filler must"):
        two_requests().tables.padded(["a"], filler=filler)


def test_a_buffer_is_used_again() -> None:
    """What was in it before is overwritten, also behind what is asked for; the result is a part of it."""
    manager = two_requests()
    for out in (np.full((3, 5), 99, np.int32), torch.full((3, 5), 99, dtype=torch.int32)):
        tables = manager.tables.padded(["a", "b"], filler=1, out=out)
        assert tables.tolist() == manager.tables.padded(["a", "b"], filler=1).tolist()
        assert out.tolist() == [
            [*manager.block_table("a").tolist(), 1, 1, 1, 1],
            [*manager.block_table("b").tolist(), 1, 1],
            [1] * 5,
        ]
    slots = torch.full((9,), 77, dtype=torch.int64)
    mapping = manager.tables.slot_mapping(["a", "b"], out=slots)
    assert mapping.tolist() == manager.tables.slot_mapping(["a", "b"]).tolist()
    assert slots.tolist() == [*mapping.tolist(), -1, -1]
    lengths = np.full(3, 77, np.int32)
    manager.tables.sequence_lengths(["a", "b"], out=lengths)
    assert lengths.tolist() == [4, 10, 0]


@pytest.mark.parametrize(
    "out",
    [
        np.zeros((2, 3), np.int64),
        np.zeros((1, 3), np.int32),
        np.zeros((2, 2), np.int32),
        np.zeros(6, np.int32),
        [[0] * 3] * 2,
        np.zeros((2, 3), np.int32).tobytes(),
        torch.zeros((2, 3)),
        torch.zeros((2, 3), dtype=torch.int32, device="meta"),
    ],
)
def test_buffers_that_do_not_fit_are_refused(out: Any) -> None:
    """The error says which one is needed."""
    manager = two_requests()
    with pytest.raises(UsageError, match=r"int32 .* of at least \[2, 3\]"):
        manager.tables.padded(["a", "b"], out=out)
    readonly = np.zeros((2, 3), np.int32)
    readonly.flags.writeable = False
    with pytest.raises(UsageError, match="writable"):
        manager.tables.padded(["a", "b"], out=readonly)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda m: m.tables.slot_mapping(["b"], stops=[13]), "slots for only 12 tokens"),
        (lambda m: m.tables.slot_mapping(["b"], stops=[-1]), "stops must not be negative"),
        (lambda m: m.tables.slot_mapping(["b"], stops=[1, 2]), "stops must have one number for each of 1"),
        (lambda m: m.tables.slot_mapping(["b"], starts=[]), "starts must have one number for each of 1"),
        (lambda m: m.tables.slot_mapping(["b"], starts=[5], stops=[4]), "starts must not exceed stops"),
        (lambda m: m.tables.paged(["b"], stops=["4"]), "stops must be an integer"),
        (lambda m: m.tables.padded(["b"], filler=-1), "filler must not be negative"),
        (lambda m: m.tables.padded("b"), "request_ids must be a list"),
        (lambda m: m.tables.padded(["b"], 5), "no window of 5 tokens"),
    ],
)
def test_bad_input(call: Any, match: str) -> None:
    """Says what is wrong, and changes nothing."""
    manager = two_requests()
    before = manager.fingerprint()
    with pytest.raises(UsageError, match=match):
        call(manager)
    assert manager.fingerprint() == before


def test_nothing_can_be_written_after_a_window() -> None:
    """Where a slot is gone, another sequence's K/V would be overwritten."""
    manager = cache(max_attention_window=4)
    manager.add_sequence("a", range(11))
    manager.store_context_blocks("a", 11)
    with pytest.raises(UsageError, match="token 2 has left the sliding window"):
        manager.tables.slot_mapping(["a"], starts=[2])


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_factor", [1, 2])
def test_what_is_written_by_slots_is_found_by_tables(kv_layout: str, kv_factor: int) -> None:
    """Random steps: tokens are written as kernels do, flat, and read through each form of tables."""
    rng = random.Random(3)
    config = strategies.config(
        tokens_per_block=SIZE, primary_blocks=24, num_layers=2, kv_layout=kv_layout, kv_factor=kv_factor
    )
    pools = Pools(Layout.of(config), "cpu")
    manager = KVCacheManager(config, pools=pools)
    names = ["a", "b", "c"]
    for name in names:
        manager.add_sequence(name, [ord(name)] * rng.randint(1, 9))
    for _ in range(6):
        mapping = torch.as_tensor(manager.tables.slot_mapping(names))
        lengths = manager.tables.sequence_lengths(names).tolist()
        stamp = torch.arange(len(mapping), dtype=torch.float32) + 1
        for layer in range(2):
            for half, view in enumerate(pools.kv(layer)[:kv_factor]):
                tokens = view if kv_layout == "NHD" else view.transpose(1, 2)
                tokens[mapping // SIZE, mapping % SIZE] = (stamp + half * 100).to(view.dtype).view(-1, 1, 1)
        done = 0
        padded = torch.as_tensor(manager.tables.padded(names))
        paged = manager.tables.paged(names)
        for number, name in enumerate(names):
            begin = sequence_of(manager, name).computed
            blocks = paged.indices[paged.indptr[number] : paged.indptr[number + 1]]
            assert padded[number, : len(blocks)].tolist() == blocks.tolist()
            for layer in range(2):
                key, value = pools.kv(layer)
                for view, more in ((key, 0), (value, 100 * (kv_factor - 1))):
                    tokens = view if kv_layout == "NHD" else view.transpose(1, 2)
                    read = tokens[torch.as_tensor(blocks).long()].flatten(0, 1)[begin : lengths[number]]
                    expected = stamp[done : done + len(read)] + more
                    assert read[:, 0, 0].float().tolist() == expected.tolist()
            done += lengths[number] - begin
        manager.add_tokens(names, [1, 2, 3])


def test_k_and_v_share_the_pools_memory() -> None:
    """No copies: what is written to a view is in the pool."""
    config = strategies.config(num_layers=2)
    pools = Pools(Layout.of(config), "cpu")
    key, value = pools.kv(1)
    key[3, 1, 0, 0], value[3, 1, 0, 0] = 5, 6
    assert pools.layer(1)[3, :, 1, 0, 0].tolist() == [5, 6]
    with pytest.raises(KeyError):
        pools.kv(2)


def test_encoders_inputs_have_tables_too() -> None:
    """For cross attention: the slots of all that the encoder computes, and its length without what fills the block."""
    manager = cache(primary_blocks=(12, 6), cross_kv_cache_fraction=0.5)
    manager.add_sequence("a", [1, 2, 3], encoder_tokens=[5] * 6)
    table = manager.block_table("a", CROSS_WINDOW).tolist()
    mapping = manager.tables.slot_mapping(["a"], CROSS_WINDOW).tolist()
    assert mapping == [table[token // SIZE] * SIZE + token % SIZE for token in range(6)]
    assert manager.tables.sequence_lengths(["a"], CROSS_WINDOW).tolist() == [6]
    assert manager.tables.sequence_lengths(["a"]).tolist() == [3]
    paged = manager.tables.paged(["a"], CROSS_WINDOW)
    assert [each.tolist() for each in paged] == [[0, 2], table, [2]]
    manager.store_encoder_blocks("a")
    assert manager.tables.slot_mapping(["a"], CROSS_WINDOW).tolist() == []
