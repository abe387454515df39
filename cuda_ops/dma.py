"""Copies by the copy engines of a GPU: a batch is a list of addresses, passed to a driver in a few calls.

Adjacent slots are one entry, and a part of a block is one for each row of it. So there is no temporary, nothing for
the host to gather, and no work for the processors on which the model runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from cuda_ops.blocks import Blocks, BlockStorage, merge, runs
from cuda_ops.copier import Copy, Ticket
from cuda_ops.streams import CopyStreams, Gpu, GpuStream

Addresses = npt.NDArray[np.uint64]


class CopyPieces(NamedTuple):
    """Stretches of bytes to be copied; each uint64 [n]."""

    targets: Addresses
    sources: Addresses
    sizes: npt.NDArray[np.uint64]


class Memcpy(Protocol):
    """An executor of copies on a stream."""

    def copy(self, pieces: CopyPieces, stream: Any) -> None:
        """Put copies on a stream, which run in any order but after its earlier work. The arrays are read in the call.

        Raises RuntimeError if refused; some of them may run then.
        """
        ...


@dataclass(frozen=True, slots=True)
class CopyLimits:
    """Limits of one call of a driver.

    The device begins when a call ends, and copies of the model meanwhile run between two calls.
    """

    pieces: int = 256
    num_bytes: int = 64 << 20


Kernel = Callable[[torch.Tensor, torch.Tensor, npt.NDArray[np.int32], int | None], None]
"""Copies blocks into the GPU on the current stream; see `cuda_ops.kernels.copy_blocks`."""


class DmaCopier:
    """Copies between the levels of the pools of each group."""

    def __init__(
        self,
        groups: Sequence[Sequence[BlockStorage]],
        memcpy: Memcpy,
        gpu: Gpu,
        limits: CopyLimits | None = None,
        kernel: Kernel | None = None,
    ) -> None:
        """Take the pools per group. Pools on several GPUs are refused with ValueError.

        `kernel`, if there is one, makes the copies inside level 0, and those of parts of blocks into it.
        """
        self._blocks = Blocks(groups)
        self._memcpy, self._limits, self._kernel = memcpy, limits or CopyLimits(), kernel
        self._streams = CopyStreams(gpu, self._blocks.sizes, self._blocks.on_gpu)

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        """Start a batch; see `cuda_ops.copier.Copier`."""
        self._blocks.check(copies)
        return self._streams.submit([(copy, partial(self._put, copy)) for copy in merge(copies)])

    def _put(self, copy: Copy, stream: GpuStream) -> None:
        inside = copy.source_level == 0 or copy.num_tokens is not None
        if self._kernel is not None and copy.target_level == 0 and inside and copy.source.size:
            pairs = np.stack((copy.source, copy.target), axis=1)
            for levels in self._blocks.groups[copy.group]:
                self._kernel(levels[copy.source_level], levels[0], pairs, copy.num_tokens)
            return
        for pieces in in_calls(self.pieces(copy), self._limits):
            self._memcpy.copy(pieces, stream)

    def pieces(self, copy: Copy) -> CopyPieces:
        """Return a copy's pieces in all pools of its group."""
        found = []
        for levels in self._blocks.groups[copy.group]:
            source, target = levels[copy.source_level], levels[copy.target_level]
            block, row, width = source.stride(0), source.stride(1), source.stride(2)
            if copy.num_tokens is None or copy.num_tokens == source.shape[2]:
                first, second, counts = runs(copy.source, copy.target, block)
                from_, to, sizes = cut(first * block, second * block, counts * block, self._limits.num_bytes)
            else:
                rows = np.arange(source.shape[1]) * row
                from_, to = (
                    (slots.astype(np.int64)[:, None] * block + rows).ravel()
                    for slots in (copy.source, copy.target)
                )
                sizes = np.full(from_.size, copy.num_tokens * width)
            found.append((to + target.data_ptr(), from_ + source.data_ptr(), sizes))
        return CopyPieces(*(np.concatenate(parts).astype(np.uint64) for parts in zip(*found, strict=True)))


def cut(
    source: npt.NDArray[np.int64], target: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], most: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Cut stretches, by offsets and sizes in bytes, into those of at most `most` bytes."""
    if sizes.max(initial=0) <= most:
        return source, target, sizes
    parts = -(-sizes // most)
    whole = np.repeat(np.arange(sizes.size), parts)
    begin = (np.arange(whole.size) - np.repeat(np.cumsum(parts) - parts, parts)) * most
    return source[whole] + begin, target[whole] + begin, np.minimum(sizes[whole] - begin, most)


def in_calls(pieces: CopyPieces, limits: CopyLimits) -> Iterator[CopyPieces]:
    """Divide pieces, in their order, into calls within the limits; a piece that exceeds them is a call by itself."""
    ends = np.cumsum(pieces.sizes)
    begin, taken = 0, 0
    while begin < ends.size:
        fitting = int(np.searchsorted(ends, np.uint64(taken + limits.num_bytes), side="right"))
        end = max(begin + 1, min(fitting, begin + limits.pieces))
        yield CopyPieces(*(each[begin:end] for each in pieces))
        begin, taken = end, int(ends[end - 1])
