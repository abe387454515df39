"""Real bytes in real tensors, compared with numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cuda_ops import host_memory
from cuda_ops.blocks import byte_rows, merge, runs
from cuda_ops.copier import Copier, Copy, CopyFailed
from cuda_ops.dma import CopyLimits, DmaCopier
from cuda_ops.simulated import SimulatedGpu
from cuda_ops.torch_copier import TorchCopier, copy_part_by_rows, copy_part_through_target_device
from tests.support.engines.storage import BLOCKS, TOKENS, Storage, storage


def content(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    return tensor.view(torch.uint8).numpy()


def expected_after(pool: Storage, copies: Sequence[Copy]) -> list[npt.NDArray[np.uint8]]:
    """What numpy makes of the copies, one after another, by indexing the token dimension."""
    levels = [content(tensor).copy() for tensor in pool.levels]
    for copy in copies:
        tokens = slice(None) if copy.num_tokens is None else slice(0, copy.num_tokens)
        for source, target in zip(copy.source, copy.target, strict=True):
            to = np.moveaxis(levels[copy.target_level][target], pool.token_dim - 1, 0)
            to[tokens] = np.moveaxis(levels[copy.source_level][source], pool.token_dim - 1, 0)[tokens]
    return levels


def slots(*numbers: int) -> npt.NDArray[np.int32]:
    return np.array(numbers, np.int32)


def dma(groups: Sequence[Sequence[Storage]]) -> Copier:
    gpu = SimulatedGpu(len(groups))
    return DmaCopier(groups, gpu, gpu, CopyLimits(pieces=5, num_bytes=100))


KINDS: dict[str, Callable[[Sequence[Sequence[Storage]]], Copier]] = {"torch": TorchCopier, "dma": dma}
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_blocks_and_parts_of_blocks_arrive_in_all_pools(layout: str, dtype: str, kind: str) -> None:
    """Whole blocks and first tokens land bit by bit in pools of different heads, and nothing else changes."""
    pools = [storage(heads, layout, getattr(torch, dtype)) for heads in (1, 4)]
    other_group = storage(2, layout, getattr(torch, dtype))
    batch = [
        Copy(0, 1, slots(3, 0, 1), slots(2, 4, 0)),
        Copy(1, 0, slots(1), slots(2)),
        Copy(0, 0, slots(5), slots(4), num_tokens=3),
        Copy(0, 1, slots(5), slots(3), num_tokens=1),
    ]
    expected = [expected_after(pool, batch) for pool in pools]
    untouched = expected_after(other_group, [])
    KINDS[kind]([pools, [other_group]]).submit(batch).wait()
    for pool, levels in [*zip(pools, expected, strict=True), (other_group, untouched)]:
        for tensor, level in zip(pool.levels, levels, strict=True):
            np.testing.assert_array_equal(content(tensor), level)


@kinds
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("num_tokens", range(1, TOKENS + 1))
def test_only_the_first_tokens_change(layout: str, num_tokens: int, kind: str) -> None:
    """A part of a block is its first tokens in every layer, K and V and head; the rest stays as it was."""
    pool = storage(2, layout)
    before = content(pool.levels[0]).copy()
    KINDS[kind]([[pool]]).submit([Copy(0, 0, slots(1), slots(0), num_tokens)]).wait()
    after = np.moveaxis(content(pool.levels[0]), pool.token_dim, 1)
    before = np.moveaxis(before, pool.token_dim, 1)
    np.testing.assert_array_equal(after[0, :num_tokens], before[1, :num_tokens])
    np.testing.assert_array_equal(after[0, num_tokens:], before[0, num_tokens:])


@kinds
def test_a_copy_reaches_only_its_group(kind: str) -> None:
    """The group's number chooses the pools."""
    pools = [storage(1, "NHD"), storage(1, "NHD")]
    expected = [expected_after(pools[0], []), expected_after(pools[1], [Copy(0, 1, slots(0), slots(0))])]
    KINDS[kind]([[pools[0]], [pools[1]]]).submit([Copy(0, 1, slots(0), slots(0), group=1)]).wait()
    for pool, levels in zip(pools, expected, strict=True):
        np.testing.assert_array_equal(content(pool.levels[1]), levels[1])


@pytest.mark.parametrize("copy_part", [copy_part_by_rows, copy_part_through_target_device])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_ways_between_devices_copy_the_same_part(layout: str, copy_part) -> None:  # type: ignore[no-untyped-def]
    """Both ways to bring first tokens to another device leave what a plain copy leaves."""
    pool = storage(2, layout)
    expected = expected_after(pool, [Copy(0, 1, slots(2, 3), slots(1, 2), num_tokens=3)])
    source, target = (byte_rows(tensor, pool.token_dim) for tensor in pool.levels)
    copy_part(source[2:4], target[1:3], 3)
    np.testing.assert_array_equal(content(pool.levels[1]), expected[1])


@pytest.mark.parametrize(
    "copy",
    [
        Copy(0, 1, slots(0), slots(BLOCKS[1])),
        Copy(0, 1, slots(BLOCKS[0]), slots(0)),
        Copy(0, 2, slots(0), slots(0)),
        Copy(-1, 0, slots(0), slots(0)),
        Copy(0, 1, slots(0), slots(0), group=1),
        Copy(0, 1, slots(0), slots(0), num_tokens=0),
        Copy(0, 1, slots(0), slots(0), num_tokens=TOKENS + 1),
    ],
)
@kinds
def test_what_does_not_exist_is_refused_before_anything_moves(copy: Copy, kind: str) -> None:
    """A bad copy raises, and the good one before it in the batch has not run."""
    pool = storage(2, "NHD")
    before = expected_after(pool, [])
    with pytest.raises(ValueError, match=r"group|level|slot|num_tokens=\d: accepted: 1 to 4"):
        KINDS[kind]([[pool]]).submit([Copy(0, 1, slots(1), slots(1)), copy])
    np.testing.assert_array_equal(content(pool.levels[1]), before[1])


def test_trouble_in_torch_fails_the_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that runs out of memory is a failed batch, not an exception in the engine's step."""

    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory left\nand a long table")

    monkeypatch.setattr("cuda_ops.torch_copier.copy_blocks", out_of_memory)
    ticket = TorchCopier([[storage(1, "NHD")]]).submit([Copy(0, 1, slots(0), slots(0))])
    with pytest.raises(CopyFailed, match=r"no memory left$"):
        ticket.done()


@kinds
def test_pools_without_blocks_are_fine(kind: str) -> None:
    """A cache without a secondary level has empty tensors there."""
    pool = storage(2, "NHD")
    empty = Storage((pool.levels[0], pool.levels[1][:0]), pool.token_dim)
    ticket = KINDS[kind]([[empty]]).submit([Copy(0, 0, slots(0), slots(1)), Copy(0, 1, slots(), slots())])
    ticket.wait()
    assert ticket.done()
    np.testing.assert_array_equal(content(pool.levels[0])[1], content(pool.levels[0])[0])


def runs_of(
    source: npt.NDArray[np.int32], target: npt.NDArray[np.int32], block_bytes: int = 64
) -> list[tuple[int, ...]]:
    return list(zip(*(each.tolist() for each in runs(source, target, block_bytes)), strict=True))


@given(st.integers(0, 30).flatmap(lambda n: st.tuples(*[st.permutations(range(30))] * 2, st.just(n))))
def test_runs_are_the_same_pairs(drawn: tuple[list[int], list[int], int]) -> None:
    """Spelled out again, runs are the pairs they were made of."""
    source, target, count = drawn
    pairs = set(zip(source[:count], target[:count], strict=True))
    found = runs_of(slots(*source[:count]), slots(*target[:count]))
    spelled = [(first + i, second + i) for first, second, length in found for i in range(length)]
    assert len(spelled) == count
    assert set(spelled) == pairs


def test_adjacent_pairs_become_one_run() -> None:
    """Pairs of several copies that are neighbours on both sides are copied in one piece."""
    copies = [Copy(0, 1, slots(3, 2), slots(8, 7)), Copy(0, 1, slots(4, 9), slots(9, 1))]
    (merged,) = merge(copies)
    assert runs_of(merged.source, merged.target) == [(2, 7, 3), (9, 1, 1)]


def test_no_run_crosses_an_edge_of_what_is_page_locked_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """On either side a run ends with the chunk, which has whole blocks and whole pages."""
    monkeypatch.setattr(host_memory, "CHUNK_BYTES", 3 * 4096)
    assert host_memory.blocks_per_chunk(1024) == 12
    assert host_memory.blocks_per_chunk(4096 * 5) == 1
    assert host_memory.blocks_per_chunk(6144) == 2
    numbers = slots(*range(8))
    assert runs_of(numbers, numbers + 2, 4096) == [
        (0, 2, 1),
        (1, 3, 2),
        (3, 5, 1),
        (4, 6, 2),
        (6, 8, 1),
        (7, 9, 1),
    ]


def test_copies_that_differ_are_not_merged() -> None:
    """Direction, group and number of tokens keep copies apart."""
    copies = [
        Copy(0, 1, slots(0), slots(0)),
        Copy(1, 0, slots(1), slots(1)),
        Copy(0, 1, slots(2), slots(2), num_tokens=1),
        Copy(0, 1, slots(3), slots(3), group=1),
    ]
    assert [copy.source.tolist() for copy in merge(copies)] == [[0], [1], [2], [3]]
