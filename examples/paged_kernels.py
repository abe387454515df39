"""What the kernels of FlashInfer and flash-attn are given of this cache, and how close they come to plain torch.

    python examples/paged_kernels.py

Both read K and V where they lie, by the tables of a step. They need their packages and a GPU; what is missing is said.
The protocols below are those parts of their signatures that are used, as their documentation has them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from itertools import accumulate
from typing import Literal, NamedTuple, Protocol, cast

import torch

from cuda_ops.attention import PagedKV, attend
from kvcache import KVCacheConfig, KVCacheManager, Layout
from kvcache.pools import Pools

HEADS, KV_HEADS, HEAD_DIM, LONGEST = 8, 2, 64, 2048
WINDOWS = (300, LONGEST)
"""Of the two layers: a sliding one, and one that attends to everything."""


class Step(NamedTuple):
    """The tokens that a step computes of each sequence, from one position up to another."""

    names: list[str]
    starts: list[int]
    stops: list[int]

    @property
    def counts(self) -> list[int]:
        """How many these are."""
        return [stop - start for start, stop in zip(self.starts, self.stops, strict=True)]


class PagedWrapper(Protocol):
    """``flashinfer.BatchPrefillWithPagedKVCacheWrapper``, which computes chunks and single tokens alike."""

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
        causal: bool,
        window_left: int,
        q_data_type: torch.dtype,
    ) -> None:
        """Once for each step and window: before its layers."""

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor) -> torch.Tensor:
        """For each layer: [tokens, query heads, dim]. The cache is [pages, K and V, tokens, heads, dim] for NHD."""


class VarlenFunction(Protocol):
    """``flash_attn.flash_attn_varlen_func``."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        causal: bool,
        window_size: tuple[int, int],
        block_table: torch.Tensor,
    ) -> torch.Tensor:
        """[tokens, query heads, dim]. K and V are [pages, tokens, heads, dim], of a multiple of 256 tokens a page."""


Attention = Callable[[KVCacheManager, Pools, Step, int, torch.Tensor], torch.Tensor]
"""What a layer's queries, [tokens, query heads, dim], see in a step."""


def window_of(layer: int) -> int | None:
    """How many tokens a layer attends to; None: all."""
    return None if WINDOWS[layer] >= LONGEST else WINDOWS[layer]


def cumulative(numbers: list[int]) -> torch.Tensor:
    """Where each sequence begins among all, and where the last one ends."""
    return torch.tensor([0, *accumulate(numbers)], dtype=torch.int32)


def by_flashinfer(wrapper: PagedWrapper) -> Attention:
    """FlashInfer: rows of pages behind each other. Its window counts the tokens before the query's own; -1: all."""

    def attention(
        manager: KVCacheManager, pools: Pools, step: Step, layer: int, query: torch.Tensor
    ) -> torch.Tensor:
        tables = manager.tables.paged(step.names, WINDOWS[layer], stops=step.stops)
        indptr, indices, last_page_len = (torch.as_tensor(each) for each in tables)
        window = window_of(layer)
        wrapper.plan(
            cumulative(step.counts),
            indptr,
            indices,
            last_page_len,
            HEADS,
            KV_HEADS,
            HEAD_DIM,
            manager.config.tokens_per_block,
            causal=True,
            window_left=-1 if window is None else window - 1,
            q_data_type=query.dtype,
        )
        return wrapper.run(query, pools.layer(layer))

    return attention


def by_flash_attn(function: VarlenFunction) -> Attention:
    """flash-attn: a padded table. It needs the layout NHD, and `tokens_per_block` a multiple of 256."""

    def attention(
        manager: KVCacheManager, pools: Pools, step: Step, layer: int, query: torch.Tensor
    ) -> torch.Tensor:
        key, value = pools.kv(layer)
        lengths, window = (
            manager.tables.sequence_lengths(step.names, stops=step.stops).tolist(),
            window_of(layer),
        )
        return function(
            query,
            key,
            value,
            cumulative(step.counts).to(query.device),
            cumulative(lengths).to(query.device),
            max(step.counts),
            max(lengths),
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            block_table=torch.as_tensor(manager.tables.padded(step.names, WINDOWS[layer])).to(query.device),
        )

    return attention


def difference(
    attention: Attention,
    tokens_per_block: int,
    device: str,
    dtype: Literal["float16", "float32"] = "float16",
) -> float:
    """How far a step of a chunk and of two single tokens is from the same in plain torch, at most.

    One sequence is so long that the sliding window has released its first blocks.
    """
    torch.manual_seed(0)
    config = KVCacheConfig(
        max_sequence_length=LONGEST,
        tokens_per_block=tokens_per_block,
        primary_blocks=3 * LONGEST // tokens_per_block,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=dtype,
        max_attention_window=WINDOWS,
    )
    pools = Pools(Layout.of(config), device)
    with KVCacheManager(config, pools=pools) as manager:
        step = Step(["chunk", "long", "short"], [500, 1299, 6], [640, 1300, 7])
        for number, (name, start, stop) in enumerate(zip(*step, strict=True)):
            manager.add_sequence(name, [number] * stop)
            manager.store_context_blocks(name, start)
        worst = 0.0
        for layer in range(len(WINDOWS)):
            pools.layer(layer).normal_()  # as if a model had written it
            query = torch.randn(sum(step.counts), HEADS, HEAD_DIM, dtype=getattr(torch, dtype), device=device)
            tables = torch.as_tensor(manager.tables.padded(step.names, WINDOWS[layer]))
            plain = attend(
                query, PagedKV(*pools.kv(layer)), tables, step.stops, step.counts, window=window_of(layer)
            )
            found = attention(manager, pools, step, layer, query)
            worst = max(worst, float((found - plain).abs().max()))
    return worst


def flashinfer() -> float:
    """With FlashInfer's own kernels."""
    package = import_module("flashinfer")
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    wrapper = package.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    return difference(by_flashinfer(cast("PagedWrapper", wrapper)), 16, "cuda")


def flash_attn() -> float:
    """With those of flash-attn."""
    function = import_module("flash_attn").flash_attn_varlen_func
    return difference(by_flash_attn(cast("VarlenFunction", function)), 256, "cuda")


def main() -> None:
    """Run what can be run."""
    for run in (flashinfer, flash_attn):
        try:
            if not torch.cuda.is_available():
                raise ImportError("PyTorch finds no GPU")
            print(f"{run.__name__}: at most {run():.4f} from plain torch")
        except ImportError as missing:
            print(f"{run.__name__}: not run: {missing}", file=sys.stderr)


if __name__ == "__main__":
    main()
