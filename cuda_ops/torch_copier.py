"""The copier over torch tensors: host to host, host to GPU, GPU to host, GPU to GPU.

A block is one contiguous stretch of bytes in its pool, so a copy of whole blocks is a handful of plain
copies of slices, one per run of slots that are adjacent on both sides. An indexed copy (`index_select`
into `index_copy_`) would be one call for all, but it passes every byte through a temporary: on the host
that is several times slower than the slices, and from a GPU to scattered host slots it cannot run
asynchronously at all, because the second half is the host's work.

The first tokens of a block are contiguous only inside each layer, K or V, and (layout HND) head. All pools
are therefore seen as bytes in four dimensions, [blocks, rows, tokens, bytes], in which both layouts look
the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from cuda_ops.copier import Copy, FinishedTicket, Ticket
from cuda_ops.streams import CopyStreams

Run = tuple[int, int, int]
"""First source slot, first target slot, number of blocks."""


class BlockStorage(Protocol):
    """What the copier needs to know of a pool."""

    @property
    def levels(self) -> tuple[torch.Tensor, ...]:
        """Per level a contiguous tensor [blocks, ...]; the same shape but for the number of blocks."""
        ...

    @property
    def token_dim(self) -> int:
        """The dimension of these tensors that counts the tokens of a block."""
        ...


class TorchCopier:
    """Copies between the levels of the pools of each group.

    Host memory is copied before `submit` returns. With a GPU, `submit` only puts the copies on streams of
    their own (see `cuda_ops.streams`).
    """

    def __init__(self, groups: Sequence[Sequence[BlockStorage]]) -> None:
        """Take the pools per group. Pools on several GPUs are refused with ValueError."""
        self._groups = [
            [tuple(byte_rows(tensor, pool.token_dim) for tensor in pool.levels) for pool in pools]
            for pools in groups
        ]
        tensors = [tensor for pools in groups for pool in pools for tensor in pool.levels]
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        if len(devices) > 1:
            raise ValueError("one copier serves one GPU")
        self._streams = CopyStreams(devices.pop()) if devices else None

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        """Carry out a batch; see `cuda_ops.copier.Copier`."""
        for copy in copies:
            self._check(copy)
        jobs = [(copy.target_level, partial(self._move, copy)) for copy in merge(copies)]
        try:
            if self._streams is not None:
                return self._streams.run(jobs)
            for _, job in jobs:
                job()
        except RuntimeError as error:  # torch's way to say that memory or the device gave out
            return FinishedTicket(failure=(str(error) or type(error).__name__).splitlines()[0])
        return FinishedTicket()

    def _move(self, copy: Copy) -> None:
        found = runs(copy.source, copy.target)
        for levels in self._groups[copy.group]:
            source, target = levels[copy.source_level], levels[copy.target_level]
            for first_source, first_target, count in found:
                copy_blocks(
                    source[first_source : first_source + count],
                    target[first_target : first_target + count],
                    copy.num_tokens,
                )

    def _check(self, copy: Copy) -> None:
        """Refuse what is not there: on a GPU nothing else would stop a copy past the end of a pool."""
        if not 0 <= copy.group < len(self._groups):
            raise ValueError(f"there is no group {copy.group}")
        for levels in self._groups[copy.group]:
            for level, slots in ((copy.source_level, copy.source), (copy.target_level, copy.target)):
                if not 0 <= level < len(levels):
                    raise ValueError(f"there is no level {level}")
                if slots.max(initial=-1) >= levels[level].shape[0]:
                    raise ValueError(f"slot {slots.max()} of level {level}: it has {levels[level].shape[0]}")
            if copy.num_tokens is not None and not 0 < copy.num_tokens <= levels[0].shape[2]:
                raise ValueError(f"{copy.num_tokens} tokens of blocks of {levels[0].shape[2]}")


def byte_rows(tensor: torch.Tensor, token_dim: int) -> torch.Tensor:
    """See a pool's tensor as bytes [blocks, rows, tokens, bytes of one token in one row]."""
    shape = tensor.shape
    width = math.prod(shape[token_dim + 1 :]) * tensor.element_size()
    return tensor.view(torch.uint8).view(shape[0], math.prod(shape[1:token_dim]), shape[token_dim], width)


def merge(copies: Sequence[Copy]) -> list[Copy]:
    """Make one copy of all that go the same way, so that adjacent slots of different ones meet."""
    alike: dict[tuple[int, int, int, int | None], list[Copy]] = {}
    for copy in copies:
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


def runs(source: npt.NDArray[np.int32], target: npt.NDArray[np.int32]) -> list[Run]:
    """Cut pairs of slots, whose order does not matter, into as few runs as possible."""
    if source.size == 0:
        return []
    order = np.argsort(source)
    source, target = source[order], target[order]
    cuts = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
    starts = np.concatenate(([0], cuts))
    counts = np.diff(np.append(starts, source.size))
    return list(zip(source[starts].tolist(), target[starts].tolist(), counts.tolist(), strict=True))


def copy_blocks(source: torch.Tensor, target: torch.Tensor, num_tokens: int | None) -> None:
    """Copy blocks seen as byte rows, or only their first tokens, on the current stream."""
    if num_tokens is None or num_tokens == source.shape[2]:
        target.copy_(source, non_blocking=True)
    elif source.device == target.device:
        target[:, :, :num_tokens].copy_(source[:, :, :num_tokens])
    elif target.is_cuda:
        copy_part_through_target_device(source, target, num_tokens)
    else:
        copy_part_by_rows(source, target, num_tokens)


def copy_part_through_target_device(source: torch.Tensor, target: torch.Tensor, num_tokens: int) -> None:
    """Bring whole blocks over, then keep the part.

    One transfer per run instead of one per row; a strided copy between devices would have torch gather the
    source on the host right now, before earlier copies into it have arrived.
    """
    whole = source.to(target.device, non_blocking=True)
    target[:, :, :num_tokens].copy_(whole[:, :, :num_tokens], non_blocking=True)


def copy_part_by_rows(source: torch.Tensor, target: torch.Tensor, num_tokens: int) -> None:
    """Copy each contiguous stretch by itself, so that nothing but the device writes to the host's memory."""
    for source_block, target_block in zip(source, target, strict=True):
        for source_row, target_row in zip(source_block, target_block, strict=True):
            target_row[:num_tokens].copy_(source_row[:num_tokens], non_blocking=True)
