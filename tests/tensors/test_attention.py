"""Paged attention in torch beside the same sums written out, token by token."""

from __future__ import annotations

import itertools
import math
import random
import shutil
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Literal

import pytest
import torch

from cuda_ops.attention import PagedKV, attend, attend_flex, write

SIZE, HEADS, DIM, BLOCKS = 4, 2, 8, 32


def written_out(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Of one sequence: the last tokens see those before them. [tokens, query heads, dim]"""
    result = torch.empty_like(query)
    first = len(key) - len(query)
    for row in range(len(query)):
        position = first + row
        begin = 0 if window is None else max(0, position - window + 1)
        for head in range(query.shape[1]):
            own = head * HEADS // query.shape[1]
            products = [
                float(query[row, head] @ key[at, own]) / math.sqrt(DIM) for at in range(begin, position + 1)
            ]
            weights = [math.exp(each - max(products)) for each in products]
            result[row, head] = sum(
                value[begin + at, own] * (weight / sum(weights)) for at, weight in enumerate(weights)
            )
    return result


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize("query_heads", [HEADS, 3 * HEADS])
def test_paged_attention(layout: Literal["NHD", "HND"], window: int | None, query_heads: int) -> None:
    """Chunks and single tokens of several sequences, in scattered blocks; all else in the pool is not a number."""
    rng = random.Random(7)
    torch.manual_seed(7)
    shape = (BLOCKS, SIZE, HEADS, DIM) if layout == "NHD" else (BLOCKS, HEADS, SIZE, DIM)
    kv = PagedKV(
        torch.full(shape, math.nan, dtype=torch.float64),
        torch.full(shape, math.nan, dtype=torch.float64),
        layout,
    )
    lengths, counts = [9, 1, 14, 5], [3, 1, 14, 0]
    slots = rng.sample(range(BLOCKS), 16)
    tables = torch.tensor(slots).view(4, 4)
    keys = [torch.randn(length, HEADS, DIM, dtype=torch.float64) for length in lengths]
    values = [torch.randn(length, HEADS, DIM, dtype=torch.float64) for length in lengths]
    for table, key, value in zip(tables, keys, values, strict=True):
        positions = torch.arange(len(key))
        write(kv, table[positions // SIZE] * SIZE + positions % SIZE, key, value)
    queries = [torch.randn(count, query_heads, DIM, dtype=torch.float64) for count in counts]
    found = attend(torch.cat(queries), kv, tables, lengths, counts, window=window)
    expected = [
        written_out(query, key, value, window)
        for query, key, value in zip(queries, keys, values, strict=True)
    ]
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-12, atol=1e-12)


def test_blocks_that_a_window_has_left_are_not_read() -> None:
    """They belong to somebody else by now: the result is the same whatever is there."""
    torch.manual_seed(1)
    kv = PagedKV(torch.randn(4, SIZE, HEADS, DIM), torch.randn(4, SIZE, HEADS, DIM))
    query = torch.randn(1, HEADS, DIM)
    before = attend(query, kv, torch.tensor([[0, 1, 2]]), [12], [1], window=5)
    kv.key[0], kv.value[0] = math.nan, math.nan
    assert torch.equal(attend(query, kv, torch.tensor([[0, 1, 2]]), [12], [1], window=5), before)


def test_a_step_of_nothing() -> None:
    """Nobody computes anything."""
    kv = PagedKV(torch.zeros(4, SIZE, HEADS, DIM), torch.zeros(4, SIZE, HEADS, DIM))
    assert attend(torch.empty(0, HEADS, DIM), kv, torch.empty(0, 0), [], []).shape == (0, HEADS, DIM)


def test_what_does_not_fit_together_is_refused() -> None:
    """Fewer slots than tokens, sequences shorter than what is computed of them, windows of nothing."""
    kv = PagedKV(torch.zeros(4, SIZE, HEADS, DIM), torch.zeros(4, SIZE, HEADS, DIM))
    tokens, tables = torch.ones(3, HEADS, DIM), torch.tensor([[0]])
    with pytest.raises(ValueError, match="1 slots, 3 keys and 3 values"):
        write(kv, torch.arange(1), tokens, tokens)
    assert not kv.key.any()
    with pytest.raises(ValueError, match="must not exceed lengths"):
        attend(tokens, kv, tables, [2], [3])
    with pytest.raises(ValueError, match="window must be at least 1"):
        attend(tokens, kv, tables, [3], [3], window=0)


def test_scale_and_types() -> None:
    """K and V are kept in the pool's type, and computed with in the query's; the products are scaled as told."""
    torch.manual_seed(2)
    kv = PagedKV(
        torch.zeros(2, SIZE, HEADS, DIM, dtype=torch.bfloat16),
        torch.zeros(2, SIZE, HEADS, DIM, dtype=torch.bfloat16),
    )
    key, value = (torch.randn(3, HEADS, DIM) for _ in range(2))
    write(kv, torch.arange(3), key, value)
    query = torch.randn(1, HEADS, DIM)
    found = attend(query, kv, torch.tensor([[0]]), [3], [1], scale=1.0)
    products = torch.einsum("hd,thd->ht", query[0], key.bfloat16().float()).softmax(1)
    expected = torch.einsum("ht,thd->hd", products, value.bfloat16().float())
    torch.testing.assert_close(found[0], expected)


COVERING = {("NHD", None, HEADS), ("HND", 3, 3 * HEADS), ("HND", 1, HEADS), ("NHD", 6, 3 * HEADS)}
"""Each layout, each window and each number of heads."""
flex_only = pytest.mark.skipif(
    find_spec("torch.nn.attention.flex_attention") is None, reason="this torch has no flex_attention"
)


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Without the warning that `flex_attention` is slow when it is not compiled."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        yield


def scattered(
    layout: Literal["NHD", "HND"], dtype: torch.dtype, size: int = SIZE
) -> tuple[PagedKV, dict[str, Any]]:
    """The second layer of a pool of three, with chunks and single tokens in it; two sequences share a block."""
    torch.manual_seed(3)
    inner = (size, HEADS, DIM) if layout == "NHD" else (HEADS, size, DIM)
    pool = torch.randn(BLOCKS, 3, 2, *inner, dtype=dtype)
    kv = PagedKV(pool[:, 1, 0], pool[:, 1, 1], layout)
    lengths, counts = [9, 1, 14, 5, 7], [3, 1, 14, 0, 1]
    lengths = [length * size // SIZE for length in lengths]
    slots = random.Random(7).sample(range(BLOCKS), 20)
    tables = torch.tensor(slots).view(5, 4)
    tables[4, 0] = tables[0, 0]
    return kv, {"tables": tables, "lengths": lengths, "counts": counts}


@flex_only
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("layout", "window", "query_heads"),
    [
        pytest.param(*each, marks=[] if each in COVERING else [pytest.mark.long])
        for each in itertools.product(["NHD", "HND"], [None, 1, 3, 6], [HEADS, 3 * HEADS])
    ],
)
def test_flex_attention_reads_the_same_in_place(
    layout: Literal["NHD", "HND"], window: int | None, query_heads: int
) -> None:
    """By a mask of pages over the pool's own memory, the other layers' beside it: as what is gathered."""
    kv, step = scattered(layout, torch.float64)
    assert kv.rows(kv.key).data_ptr() == kv.key.data_ptr()
    query = torch.randn(sum(step["counts"]), query_heads, DIM, dtype=torch.float64)
    for scale in (None, 1.0):
        found = attend_flex(query, kv, **step, window=window, scale=scale)
        expected = attend(query, kv, **step, window=window, scale=scale)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@flex_only
@pytest.mark.usefixtures("uncompiled")
def test_flex_attention_of_many_queries_and_of_none() -> None:
    """More than are loaded together; and a step of nothing."""
    kv, step = scattered("NHD", torch.float64, 64)
    step["counts"] = step["lengths"]
    query = torch.randn(sum(step["counts"]), HEADS, DIM, dtype=torch.float64)
    found = attend_flex(query, kv, **step, window=70)
    torch.testing.assert_close(found, attend(query, kv, **step, window=70), rtol=1e-12, atol=1e-12)
    assert attend_flex(query[:0], kv, torch.empty(0, 0), [], []).shape == (0, HEADS, DIM)


@flex_only
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU needs g++")
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.filterwarnings("ignore")
def test_compiled_flex_attention(layout: Literal["NHD", "HND"]) -> None:
    """What torch compiles of it loads only the blocks that the mask names: NaN in all others does not show."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention)
    kv, step = scattered(layout, torch.float32, 16)
    for window in (None, 20):
        query = torch.randn(sum(step["counts"]), 2 * HEADS, DIM)
        expected = attend(query, kv, **step, window=window)
        torch.testing.assert_close(attend_flex(query, kv, **step, window=window, flex=compiled), expected)
    free = sorted(set(range(BLOCKS)) - set(step["tables"].flatten().tolist()))
    kv.key[free], kv.value[free] = math.nan, math.nan
    query = torch.randn(sum(step["counts"]), 2 * HEADS, DIM)
    expected = attend(query, kv, **step)
    torch.testing.assert_close(attend_flex(query, kv, **step, flex=compiled), expected)
