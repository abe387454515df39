"""Blocks as stretches of bytes: the common part of all copiers over tensors.

A block is one contiguous stretch of bytes in its pool. Its first tokens are contiguous only inside each layer, K or V,
and (layout HND) head. All pools are therefore seen as bytes in four dimensions, [blocks, rows, tokens, bytes], in which
both layouts look the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from cuda_ops.copier import Copy
from cuda_ops.host_memory import blocks_per_chunk


class BlockStorage(Protocol):
    """A pool, as copiers need it."""

    @property
    def levels(self) -> tuple[torch.Tensor, ...]:
        """Per level a contiguous tensor [blocks, ...]; the same shape except for the number of blocks."""
        ...

    @property
    def token_dim(self) -> int:
        """The dimension of these tensors for the tokens of a block."""
        ...


class Runs(NamedTuple):
    """Stretches of slots that are adjacent on both sides of a copy; each int64 [runs]."""

    source: npt.NDArray[np.int64]
    """First slots to read."""
    target: npt.NDArray[np.int64]
    """First slots to write."""
    counts: npt.NDArray[np.int64]
    """Blocks."""


class Blocks:
    """The blocks of all pools."""

    def __init__(self, groups: Sequence[Sequence[BlockStorage]]) -> None:
        """Take the pools per group. Pools on several GPUs are refused with ValueError."""
        self.groups = [
            [tuple(byte_rows(tensor, pool.token_dim) for tensor in pool.levels) for pool in pools]
            for pools in groups
        ]
        """Rows of blocks per group, pool and level: uint8 [blocks, rows, tokens, bytes]."""
        self.sizes = [[tensor.shape[0] for tensor in pools[0]] for pools in self.groups]
        """Numbers of slots, per group and level."""
        tensors = (tensor for pools in groups for pool in pools for tensor in pool.levels)
        self.on_gpu = [tensor for tensor in tensors if tensor.is_cuda]
        """The pools' tensors on a GPU."""
        devices = {tensor.device for tensor in self.on_gpu}
        if len(devices) > 1:
            raise ValueError("a copier serves one GPU only")
        self.device = devices.pop() if devices else None
        """The GPU, if there is one."""

    def check(self, copies: Sequence[Copy]) -> None:
        """Raise ValueError for slots that do not exist: on a GPU nothing else would stop a copy past a pool's end."""
        for copy in copies:
            if not 0 <= copy.group < len(self.groups):
                raise ValueError(f"unknown group {copy.group}")
            for levels in self.groups[copy.group]:
                for level, slots in ((copy.source_level, copy.source), (copy.target_level, copy.target)):
                    if not 0 <= level < len(levels):
                        raise ValueError(f"unknown level {level}")
                    if slots.max(initial=-1) >= levels[level].shape[0]:
                        raise ValueError(
                            f"slot {slots.max()} is out of range: level {level} has {levels[level].shape[0]} "
                            "slots"
                        )
                if copy.num_tokens is not None and not 0 < copy.num_tokens <= levels[0].shape[2]:
                    raise ValueError(f"num_tokens={copy.num_tokens}: accepted: 1 to {levels[0].shape[2]}")


def byte_rows(tensor: torch.Tensor, token_dim: int) -> torch.Tensor:
    """View a pool's tensor as bytes [blocks, rows, tokens, bytes of one token in one row]."""
    shape = tensor.shape
    width = math.prod(shape[token_dim + 1 :]) * tensor.element_size()
    return tensor.view(torch.uint8).view(shape[0], math.prod(shape[1:token_dim]), shape[token_dim], width)


def merge(copies: Sequence[Copy]) -> list[Copy]:
    """Merge all copies that go the same way, so that adjacent slots of different ones meet; drop those in place."""
    alike: dict[tuple[int, int, int, int | None], list[Copy]] = {}
    for copy in (each for each in copies if not each.moves_nothing):
        key = (copy.group, copy.source_level, copy.target_level, copy.num_tokens)
        alike.setdefault(key, []).append(copy)
    return [
        replace(
            parts[0],
            source=np.concatenate([copy.source for copy in parts]),
            target=np.concatenate([copy.target for copy in parts]),
        )
        for parts in alike.values()
    ]


def runs(source: npt.NDArray[np.int32], target: npt.NDArray[np.int32], block_bytes: int) -> Runs:
    """Cut pairs of slots, in any order, into as few runs as possible.

    None crosses an edge of the chunks in which host memory of such blocks is page-locked: a driver refuses that.
    """
    order = np.argsort(source)
    first, second = source[order].astype(np.int64), target[order].astype(np.int64)
    cut = (first[1:] != first[:-1] + 1) | (second[1:] != second[:-1] + 1)
    chunk = blocks_per_chunk(block_bytes)
    for slots in (first, second):
        if slots.max(initial=0) >= chunk:
            cut |= slots[1:] // chunk != slots[:-1] // chunk
    starts = np.concatenate(([0], np.flatnonzero(cut) + 1))[: source.size]
    return Runs(first[starts], second[starts], np.diff(np.append(starts, source.size)))
