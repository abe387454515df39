"""Prompts of a batch, padded as in Transformers, and as sequences."""

from __future__ import annotations

from typing import Any

import torch

from kvcache.errors import UsageError


class Rows:
    """Columns of tokens: a row has `pads` columns of padding, then its tokens."""

    def __init__(self, input_ids: Any, attention_mask: Any) -> None:
        """Raise `UsageError` for anything but token ids, padded on the left if at all."""
        ids = _matrix(input_ids, "input_ids")
        self.columns: list[list[int]] = ids.tolist()
        self.width = ids.shape[1]
        mask = torch.ones_like(ids) if attention_mask is None else _matrix(attention_mask, "attention_mask")
        if mask.shape != ids.shape:
            raise UsageError(
                f"attention_mask must have the shape of input_ids, {list(ids.shape)}, not {list(mask.shape)}"
            )
        self.pads: list[int] = (self.width - (mask != 0).sum(1)).tolist()
        if not self.agree(mask):
            raise UsageError(
                "attention_mask may mask columns on the left only: tokenize with padding_side='left'"
            )
        if max(self.pads) == self.width:
            raise UsageError("a prompt is empty: attention_mask masks its whole row")

    def prompts(self) -> list[list[int]]:
        """Tokens of each row."""
        return [row[pad:] for row, pad in zip(self.columns, self.pads, strict=True)]

    def agree(self, mask: torch.Tensor) -> bool:
        """True if a mask, which may have more columns, hides the padding and nothing else."""
        return bool(torch.equal((mask != 0).cpu(), self.seen(0, mask.shape[1])))

    def seen(self, start: int, stop: int) -> torch.Tensor:
        """Mask of the columns with a token, [rows, columns]."""
        return self.positions(start, stop) >= 0

    def positions(self, start: int, stop: int) -> torch.Tensor:
        """Index of each column's token in its row, [rows, columns]; below 0 for padding."""
        return torch.arange(start, stop) - torch.tensor(self.pads)[:, None]

    def append(self, columns: list[list[int]]) -> None:
        """Append tokens to each row."""
        for row, more in zip(self.columns, columns, strict=True):
            row.extend(more)
        self.width = len(self.columns[0])

    def select(self, rows: list[int]) -> None:
        """Replace all rows by these."""
        self.columns = [list(self.columns[row]) for row in rows]
        self.pads = [self.pads[row] for row in rows]


def _matrix(values: Any, what: str) -> torch.Tensor:
    if (
        not isinstance(values, torch.Tensor)
        or values.ndim != 2
        or values.is_floating_point()
        or not values.numel()
    ):
        raise UsageError(f"{what} must be a tensor of integers [rows, columns], as returned by a tokenizer")
    return values.cpu()
