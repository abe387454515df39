"""Writes and reads of one forward pass in the pools.

Transformers needs K and V of a layer as [rows, heads, columns, dim], with the columns of the pass at the end. A row's
column is a token of its sequence, or padding, which is not written and read as zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from cuda_ops.attention import PagedKV, gather, write
from kvcache.errors import Unsupported, UsageError
from kvcache.integrations.transformers.rows import Rows
from kvcache.manager import KVCacheManager


class Places(NamedTuple):
    """Places in the layers of one window."""

    writes: torch.Tensor
    """Slots to write, int64 [tokens]."""
    reads: torch.Tensor
    """Slots of all columns that the layers read, int64 [rows, columns]."""
    blank: torch.Tensor | None
    """Mask of padding, or of columns before the blocks that a sliding window still holds, bool [rows, columns]; None:
    none are. They are masked, but masked values are multiplied by 0, which NaN and infinities survive."""


class Span(NamedTuple):
    """Columns that a pass computes, and the tokens of each row that it writes."""

    start: int
    stop: int
    begins: list[int]
    """First missing token of each row."""
    ends: list[int]


class Step:
    """One forward pass."""

    def __init__(self, manager: KVCacheManager, names: list[str], rows: Rows, span: Span) -> None:
        self._manager, self._names, self._rows, self.span = manager, names, rows, span
        positions = rows.positions(span.start, span.stop)
        written = positions >= torch.tensor(span.begins)[:, None]
        self._written = None if bool(written.all()) else written
        """Mask of the columns to write; None: all."""
        self._places: dict[tuple[int, int], Places] = {}
        self._layers = set[int]()

    def places(self, window: int, first_column: int, device: torch.device) -> Places:
        """Return the places that the layers of a window write, and those of the columns from `first_column` on."""
        found = self._places.get((window, first_column))
        if found is None:
            found = self._places[window, first_column] = self._place(window, first_column, device)
        return found

    def _place(self, window: int, first_column: int, device: torch.device) -> Places:
        manager, names, span = self._manager, self._names, self.span
        writes = manager.tables.slot_mapping(names, window, starts=span.begins, stops=span.ends)
        tables = torch.as_tensor(manager.block_tables(names, window)).to(torch.int64)
        positions = self._rows.positions(first_column, span.stop)
        size = manager.config.tokens_per_block
        tokens = positions.clamp(min=0)
        reads = tables.gather(1, tokens // size) * size + tokens % size
        # A row that reuses more than others may have no block any more for columns that only others have to compute.
        blank = (positions < 0) | (reads < 0)
        return Places(
            torch.as_tensor(writes).to(device, non_blocking=True),
            reads.clamp(min=0).to(device, non_blocking=True),
            blank.to(device, non_blocking=True) if bool(blank.any()) else None,
        )

    def exchange(
        self, layer: int, kv: PagedKV, places: Places, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write K and V of the pass, each [rows, heads, columns, dim]; returns those of all columns that are read."""
        self._refuse_other_shape(layer, kv, key, value)
        new = [self._flat(each.detach()) for each in (key, value)]
        write(kv, places.writes, new[0], new[1])
        self._layers.add(layer)
        found = []
        for each in gather(kv, places.reads):
            if places.blank is not None:
                each.masked_fill_(places.blank[:, :, None, None], 0)
            found.append(each.to(key.dtype).transpose(1, 2))
        return found[0], found[1]

    def _flat(self, states: torch.Tensor) -> torch.Tensor:
        """Select the tokens to write, [tokens, heads, dim]."""
        columns = states.transpose(1, 2)
        return columns.flatten(0, 1) if self._written is None else columns[self._written.to(columns.device)]

    def _refuse_other_shape(self, layer: int, kv: PagedKV, key: torch.Tensor, value: torch.Tensor) -> None:
        if layer in self._layers:
            raise UsageError(f"layer {layer} passed K and V twice in one forward pass")
        heads, dim = kv.tokens(kv.key).shape[2:]
        expected = (len(self._names), heads, self.span.stop - self.span.start, dim)
        if tuple(key.shape) != expected or value.shape != key.shape:
            raise Unsupported(
                f"a layer with K and V of shape {list(key.shape)} and {list(value.shape)}, not {list(expected)}",
                "use the default cache of Transformers for this model",
            )

    def refuse_incomplete(self, num_layers: int) -> None:
        """Raise `UsageError` if a layer has written nothing."""
        if len(self._layers) != num_layers:
            raise UsageError(
                f"only {len(self._layers)} of {num_layers} layers passed K and V, so this forward pass is not "
                "cached: run all layers"
            )
