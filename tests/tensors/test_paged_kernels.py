"""What examples/paged_kernels.py gives to kernels, beside kernels that do in torch what the packages document.

The kernels themselves are run where their package and a GPU are.
"""

from __future__ import annotations

import inspect
import math
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.support.examples import load

KERNELS = load("paged_kernels")
CLOSE = 1e-5
"""In float32, of values about 1."""


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, left: int) -> torch.Tensor:
    """Causal, aligned at the last tokens; a query sees `left` tokens before its own one, -1: all."""
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
    products = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(query.shape[2])
    distance = torch.arange(len(key) - len(query), len(key))[:, None] - torch.arange(len(key))
    hidden = (distance < 0) | (distance > (len(key) if left < 0 else left))
    return torch.einsum("hqk,khd->qhd", products.masked_fill(hidden, -math.inf).softmax(-1), value)


class Wrapper:
    """As FlashInfer documents `plan` and `run`: int32 rows, `last_page_len` from 1 to the page size."""

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        window_left: int = -1,
        q_data_type: torch.dtype = torch.float16,
    ) -> None:
        rows = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert {each.dtype for each in rows} == {torch.int32}
        assert causal
        self.heads, self.left, self.dtype = (
            (num_qo_heads, num_kv_heads, head_dim_qk),
            window_left,
            q_data_type,
        )
        self.spans = []
        for number, last in enumerate(paged_kv_last_page_len.tolist()):
            assert 1 <= last <= page_size
            pages = paged_kv_indices[paged_kv_indptr[number] : paged_kv_indptr[number + 1]].long()
            begin, end = qo_indptr[number : number + 2].tolist()
            self.spans.append((slice(begin, end), pages, (len(pages) - 1) * page_size + last))

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor) -> torch.Tensor:
        assert (*q.shape[1:2], *paged_kv_cache.shape[3:]) == self.heads
        assert q.dtype == self.dtype
        found = []
        for rows, pages, length in self.spans:
            key, value = (paged_kv_cache[pages, half].flatten(0, 1)[:length] for half in (0, 1))
            found.append(dense(q[rows], key, value, self.left))
        return torch.cat(found)


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    block_table: torch.Tensor,
) -> torch.Tensor:
    """As flash-attn documents it: pages of a multiple of 256 tokens, int32, and windows to the left and right."""
    assert k.shape[1] % 256 == 0
    assert k.stride(-1) == v.stride(-1) == 1
    assert {each.dtype for each in (cu_seqlens_q, cu_seqlens_k, block_table)} == {torch.int32}
    assert causal
    found = []
    queries, keys = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert (max(queries), max(keys)) == (max_seqlen_q, max_seqlen_k)
    for rows, length, table in zip(torch.split(q, queries), keys, block_table, strict=True):
        # All of a row is loaded: every entry must be a page.
        key, value = (each[table.long()].flatten(0, 1)[:length] for each in (k, v))
        found.append(dense(rows, key, value, window_size[0]))
    return torch.cat(found)


@pytest.mark.parametrize("tokens_per_block", [16, 64])
def test_flashinfer_is_given_what_it_documents(tokens_per_block: int) -> None:
    """Rows of pages, also where a window has let go of blocks, give what plain torch computes."""
    assert KERNELS.difference(KERNELS.by_flashinfer(Wrapper()), tokens_per_block, "cpu", "float32") < CLOSE


def test_flash_attn_is_given_what_it_documents() -> None:
    """Padded tables with lengths, and K and V apart, give what plain torch computes."""
    assert KERNELS.difference(KERNELS.by_flash_attn(varlen), 256, "cpu", "float32") < CLOSE


def test_a_window_that_is_one_off_shows() -> None:
    """The comparison sees one token more or less, and pages in another order."""

    class Short(Wrapper):
        def plan(self, *of: Any, window_left: int = -1, **how: Any) -> None:
            super().plan(*of, window_left=window_left - (window_left > 0), **how)

    class Turned(Wrapper):
        def plan(self, *of: Any, **how: Any) -> None:
            turned: Any = (*of[:2], of[2].flip(0), *of[3:])
            super().plan(*turned, **how)

    for wrapper in (Short(), Turned()):
        assert KERNELS.difference(KERNELS.by_flashinfer(wrapper), 16, "cpu", "float32") > 100 * CLOSE


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_gpu_or_package_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is run, and the reason is told."""
    KERNELS.main()
    assert capsys.readouterr().err.splitlines() == [
        f"{name}: not run: PyTorch finds no GPU" for name in ("flashinfer", "flash_attn")
    ]


def requires(package: str) -> pytest.MarkDecorator:
    missing = "a GPU" if not torch.cuda.is_available() else package if find_spec(package) is None else None
    return pytest.mark.skipif(missing is not None, reason=f"needs {missing}")


@requires("flashinfer")
def test_flashinfer() -> None:
    """The kernels of FlashInfer, in float16."""
    assert KERNELS.flashinfer() < 0.01


@requires("flash_attn")
def test_flash_attn() -> None:
    """The kernels of flash-attn, in float16."""
    assert KERNELS.flash_attn() < 0.01


@requires("flash_attn")
def test_flash_attn_has_these_parameters() -> None:
    """The protocol of the example is a part of the real signature."""
    from importlib import import_module

    real = inspect.signature(import_module("flash_attn").flash_attn_varlen_func).parameters
    assert set(inspect.signature(varlen).parameters) <= set(real)
