"""Attention over paged K and V in plain torch: for examples and tests, and for engines that have no kernel for it.

K and V of a layer are views of a pool, [blocks, tokens, heads, dim] in the layout NHD or [blocks, heads, tokens, dim]
in HND. A slot of a token is its block's slot times the tokens of a block, and its place in the block. `attend` compiles
and fuses nothing: K and V are gathered, sequence by sequence. `attend_flex` reads them in place, by `flex_attention`
with a mask of pages, which may be compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import gt
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

QUERY_BLOCK = 128
"""Number of queries for which `flex_attention` loads pages together."""


class PagedKV(NamedTuple):
    """One layer's K and V."""

    key: torch.Tensor
    value: torch.Tensor
    layout: Literal["NHD", "HND"] = "NHD"

    def tokens(self, view: torch.Tensor) -> torch.Tensor:
        """Return K or V as [blocks, tokens, heads, dim]; shares its memory."""
        return view if self.layout == "NHD" else view.transpose(1, 2)

    @property
    def tokens_per_block(self) -> int:
        """Tokens of a block."""
        return self.tokens(self.key).shape[1]

    @property
    def rows_per_block(self) -> int:
        """Rows of one token in the pool's memory from a block to the next: of this layer and of the others."""
        tokens = self.tokens(self.key)
        return tokens.stride(0) // tokens.stride(1)

    def rows(self, view: torch.Tensor) -> torch.Tensor:
        """Return K or V as if all the pool were tokens of this layer: [1, heads, rows, dim]; shares its memory."""
        tokens = self.tokens(view)
        blocks, size, heads, dim = tokens.shape
        shape = (1, heads, (blocks - 1) * self.rows_per_block + size, dim)
        return tokens.as_strided(shape, (0, tokens.stride(2), tokens.stride(1), tokens.stride(3)))


def write(kv: PagedKV, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Write K and V of a step's tokens, each [tokens, heads, dim], to their slots, int64 [tokens].

    Slots are not checked: pass only the used part of a longer buffer, since -1 after it means the pool's last token
    here. If both are one view (kv_factor 1), `key` is stored. Raises ValueError if there are not as many slots as
    tokens.
    """
    if not len(slots) == len(key) == len(value):
        raise ValueError(
            f"{len(slots)} slots, {len(key)} keys and {len(value)} values were given: pass one of each per "
            "token"
        )
    blocks, places = slots // kv.tokens_per_block, slots % kv.tokens_per_block
    kv.tokens(kv.value)[blocks, places] = value.to(kv.value.dtype)
    kv.tokens(kv.key)[blocks, places] = key.to(kv.key.dtype)


def gather(kv: PagedKV, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of these tokens, int64 [...], as copies: each [..., heads, dim]."""
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
    """Attend from the last `counts` tokens of each sequence to its `lengths` tokens: [tokens, query heads, dim].

    `query` has those tokens, sequence by sequence; several query heads may share one of K and V. `tables` are padded
    block tables, int [sequences, blocks]. A token attends to itself and earlier tokens, with a `window` to that many,
    itself included. `scale`: factor of the products, by default 1/√dim. Raises ValueError if a sequence has fewer
    tokens than queries, or the window is below 1.
    """
    if any(map(gt, counts, lengths)) or (window is not None and window < 1):
        raise ValueError("counts must not exceed lengths, and window must be at least 1")
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
    # Blocks visible to no token of the step may be gone.
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


def attend_flex(
    query: torch.Tensor,
    kv: PagedKV,
    tables: torch.Tensor,
    lengths: list[int],
    counts: list[int],
    *,
    window: int | None = None,
    scale: float | None = None,
    flex: Callable[..., Any] | None = None,
) -> torch.Tensor:
    """Attend like `attend`, by `flex_attention`: K and V are read in place, in the blocks of the mask.

    Needs PyTorch 2.5 or newer. `flex` is the function, such as ``torch.compile(flex_attention)``, by default
    `flex_attention` uncompiled, which makes the whole matrix of products. K and V must have the query's type. Masked
    values are multiplied by 0, so that nothing in the pool may be infinite or NaN: not with `debug_fill_blank`. A block
    that is in several tables has the same place in each, as shared prefixes have.
    """
    if not any(counts):
        return torch.empty_like(query)
    from torch.nn.attention.flex_attention import flex_attention

    result = (flex or flex_attention)(
        query.transpose(0, 1)[None],
        kv.rows(kv.key),
        kv.rows(kv.value),
        block_mask=page_mask(kv, tables, lengths, counts, window),
        scale=scale,
        enable_gqa=query.shape[1] != kv.tokens(kv.key).shape[2],
    )
    seen: torch.Tensor = result[0].transpose(0, 1)
    return seen


def page_mask(
    kv: PagedKV, tables: torch.Tensor, lengths: list[int], counts: list[int], window: int | None
) -> BlockMask:
    """Return the mask of the rows (`PagedKV.rows`) visible to each query: for `attend_flex`, in all layers."""
    from torch.nn.attention.flex_attention import BlockMask

    size, step, device = kv.tokens_per_block, kv.rows_per_block, kv.key.device
    held = _held(kv, tables, lengths, counts, window)
    owners = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(device)
    spans = zip(lengths, counts, strict=True)
    positions = torch.cat([torch.arange(length - count, length) for length, count in spans]).to(device)

    def sees(_batch: Any, _head: Any, query: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        index = held[owners[query], torch.clamp(row // step, max=held.shape[1] - 1)]
        distance = positions[query] - (index * size + row % step)
        near = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        return (index >= 0) & (row % step < size) & near

    padded = pad(owners, (0, -len(owners) % QUERY_BLOCK), value=int(owners[-1])).view(-1, QUERY_BLOCK)
    loaded = torch.stack([(held[of.unique()] >= 0).any(0) for of in padded])
    pages = loaded.int().argsort(dim=1, descending=True, stable=True) * (step // size)
    num_rows = (held.shape[1] - 1) * step + size
    return BlockMask.from_kv_blocks(
        loaded.sum(1, dtype=torch.int32)[None, None],
        pad(pages, (0, -(-num_rows // size) - held.shape[1])).int()[None, None],
        BLOCK_SIZE=(QUERY_BLOCK, size),
        mask_mod=sees,
        seq_lengths=(len(owners), num_rows),
    )


def _held(
    kv: PagedKV, tables: torch.Tensor, lengths: list[int], counts: list[int], window: int | None
) -> torch.Tensor:
    """Return each block's place in each sequence, -1 if not visible to the step: [sequences, blocks of the pool]."""
    size = kv.tokens_per_block
    held = torch.full((len(lengths), len(kv.key)), -1)
    for row, table, length, count in zip(held, tables.cpu(), lengths, counts, strict=True):
        begin = 0 if window is None else max(0, length - count - window + 1) // size
        end = -(-length // size)
        row[table[begin:end].long()] = torch.arange(begin, end)
    return held.to(kv.key.device)
