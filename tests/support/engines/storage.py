"""Pools of random bytes, without a cache, and copies of single blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from cuda_ops.copier import Copy

LAYERS, TOKENS, DIM = 3, 4, 8
BLOCKS = (6, 5)


@dataclass
class Storage:
    levels: tuple[torch.Tensor, ...]
    token_dim: int


def storage(heads: int, layout: str, dtype: torch.dtype = torch.bfloat16) -> Storage:
    inner = (TOKENS, heads) if layout == "NHD" else (heads, TOKENS)
    levels = []
    for blocks in BLOCKS:
        shape = (blocks, LAYERS, 2, *inner, DIM)
        raw = torch.randint(0, 256, (*shape[:-1], DIM * dtype.itemsize), dtype=torch.uint8)
        levels.append(raw.view(dtype))
    return Storage(tuple(levels), 3 if layout == "NHD" else 4)


def pair(source: int, target: int, levels: tuple[int, int], num_tokens: int | None = None) -> Copy:
    """A copy of one block."""
    return Copy(*levels, np.array([source], np.int32), np.array([target], np.int32), num_tokens)
