"""Attention over paged K and V in plain torch: for examples and tests, and for engines that have no kernel for it.

K and V of a layer are views of a pool, [blocks, tokens, heads, dim] in the layout NHD or [blocks, heads, tokens, dim]
in HND. A slot of a token is its block's slot times the tokens of a block, and its place in the block. Nothing is
compiled and nothing is fused: K and V of each sequence are gathered, sequence by sequence.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention


class PagedKV(NamedTuple):
    """What one layer keeps."""

    key: torch.Tensor
    value: torch.Tensor
    layout: Literal["NHD", "HND"] = "NHD"

    def tokens(self, view: torch.Tensor) -> torch.Tensor:
        """One of both as [blocks, tokens, heads, dim]; shares its memory."""
        return view if self.layout == "NHD" else view.transpose(1, 2)

    @property
    def tokens_per_block(self) -> int:
        """Tokens of a block."""
        return self.tokens(self.key).shape[1]


def write(kv: PagedKV, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Write K and V of a step's tokens, each [tokens, heads, dim], to their slots, int64 [tokens].

    Where both are one view (kv_factor 1), `key` is what is kept.
    """
    blocks, places = slots // kv.tokens_per_block, slots % kv.tokens_per_block
    kv.tokens(kv.value)[blocks, places] = value.to(kv.value.dtype)
    kv.tokens(kv.key)[blocks, places] = key.to(kv.key.dtype)


def gather(kv: PagedKV, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of these tokens, int64 [...], as copies: each [..., heads, dim]."""
    blocks, places = slots // kv.tokens_per_block, slots % kv.tokens_per_block
    return kv.tokens(kv.key)[blocks, places], kv.tokens(kv.value)[blocks, places]


def attend(
    query: torch.Tensor,
    kv: PagedKV,
    tables: torch.Tensor,
    lengths: list[int],
    counts: list[int],
    *,
    window: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """What the last `counts` tokens of each sequence see of its `lengths` tokens: [tokens of all, query heads, dim].

    `query` has those tokens, sequence by sequence; several query heads may share one of K and V. `tables` are padded
    block tables, int [sequences, blocks]. A token sees itself and what is before it, with a `window` only that many
    tokens, itself among them. `scale`: of the products, by default 1/√dim.
    """
    seen = []
    for rows, table, length, count in zip(torch.split(query, counts), tables, lengths, counts, strict=True):
        if count:
            seen.append(_attend_one(rows, kv, table, length, window, scale))
    return torch.cat(seen) if seen else torch.empty_like(query)


def _attend_one(
    query: torch.Tensor,
    kv: PagedKV,
    table: torch.Tensor,
    length: int,
    window: int | None,
    scale: float | None,
) -> torch.Tensor:
    size, first = kv.tokens_per_block, length - len(query)
    # Blocks that no token of the step sees may be gone.
    begin = 0 if window is None else max(0, first - window + 1) // size
    blocks = table[begin : -(-length // size)].to(kv.key.device, torch.int64)
    begin *= size
    key, value = (
        kv.tokens(view)[blocks].flatten(0, 1)[: length - begin].to(query.dtype) for view in (kv.key, kv.value)
    )
    distance = torch.arange(first, length)[:, None] - torch.arange(begin, length)
    mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    heads_first = [each.transpose(0, 1)[None] for each in (query, key, value)]
    result = scaled_dot_product_attention(
        heads_first[0],
        heads_first[1],
        heads_first[2],
        attn_mask=mask.to(query.device),
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return result[0].transpose(0, 1)
