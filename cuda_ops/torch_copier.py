"""The copier over torch tensors: host to host, host to GPU, GPU to host, GPU to GPU.

A copy of whole blocks is a handful of plain copies of slices, one per run of slots that are adjacent on both sides. An
indexed copy (`index_select` into `index_copy_`) would be one call for all, but it passes every byte through a
temporary: on the host that is several times slower than the slices, and from a GPU to scattered host slots it cannot
run asynchronously at all, because the second half is the host's work.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from cuda_ops.blocks import Blocks, BlockStorage, merge, runs
from cuda_ops.copier import Copy, FinishedTicket, Ticket, first_line
from cuda_ops.streams import CopyStreams, TorchGpu


class TorchCopier:
    """Copies between the levels of the pools of each group.

    Host memory is copied before `submit` returns. With a GPU, `submit` only puts the copies on their own streams (see
    `cuda_ops.streams`).
    """

    def __init__(self, groups: Sequence[Sequence[BlockStorage]]) -> None:
        """Take the pools per group. Pools on several GPUs are refused with ValueError."""
        self._blocks = Blocks(groups)
        device = self._blocks.device
        self._streams = (
            None if device is None else CopyStreams(TorchGpu(device), self._blocks.sizes, self._blocks.on_gpu)
        )

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        """Carry out a batch; see `cuda_ops.copier.Copier`."""
        self._blocks.check(copies)
        merged = merge(copies)
        if self._streams is not None:
            return self._streams.submit([(copy, partial(self._move, copy)) for copy in merged])
        try:
            for copy in merged:
                self._move(copy)
        except RuntimeError as error:  # torch's way to report that memory gave out
            return FinishedTicket(failure=first_line(error))
        return FinishedTicket()

    def _move(self, copy: Copy, _stream: object = None) -> None:
        for levels in self._blocks.groups[copy.group]:
            source, target = levels[copy.source_level], levels[copy.target_level]
            found = runs(copy.source, copy.target, source.stride(0))
            for first_source, first_target, count in zip(*(each.tolist() for each in found), strict=True):
                copy_blocks(
                    source[first_source : first_source + count],
                    target[first_target : first_target + count],
                    copy.num_tokens,
                )


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
    """Copy whole blocks over, then keep the part.

    One transfer per run instead of one per row; a strided copy between devices would make torch gather the source on
    the host right now, before earlier copies into it have arrived.
    """
    whole = source.to(target.device, non_blocking=True)
    target[:, :, :num_tokens].copy_(whole[:, :, :num_tokens], non_blocking=True)


def copy_part_by_rows(source: torch.Tensor, target: torch.Tensor, num_tokens: int) -> None:
    """Copy each contiguous stretch by itself, so that only the device writes to the host's memory."""
    for source_block, target_block in zip(source, target, strict=True):
        for source_row, target_row in zip(source_block, target_block, strict=True):
            target_row[:num_tokens].copy_(source_row[:num_tokens], non_blocking=True)
