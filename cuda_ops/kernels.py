"""A small kernel where copy engines are slow: for copies inside a GPU, and parts of blocks from the host.

In Triton, so this module is imported only if that is installed and can compile. Blocks are read and written by base and
slot: a table of addresses would halve the width of each access.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_TILE = 1024
"""Words moved at once by a program."""
_PROGRAMS_OVER_PCIE, _PROGRAMS = 12, 64
"""About the number that keeps a link busy, and the number that a model can spare for a moment."""


@triton.jit(do_not_specialize=["tiles", "rows", "tiles_of_row"])  # type: ignore[untyped-decorator]
def _copy(
    source: tl.tensor,
    target: tl.tensor,
    pairs: tl.tensor,
    tiles: tl.tensor,
    rows: tl.tensor,
    tiles_of_row: tl.tensor,
    block: tl.tensor,
    row: tl.tensor,
    part: tl.tensor,
    tile: tl.constexpr,
) -> None:
    """Copy a tile. Sizes are in words: of a block, of a row, and of the beginning of each row that is copied.

    It is not compiled again for other numbers of tiles and rows, which would hold up a step. Triton compiles
    annotations, too, so they are its own types.
    """
    lanes = tl.arange(0, tile)
    at = tl.program_id(0)
    while at < tiles:
        pair = at // (rows * tiles_of_row)
        inside = at % (rows * tiles_of_row)
        offsets = (inside % tiles_of_row) * tile + lanes
        begin = (inside // tiles_of_row).to(tl.int64) * row
        mask = offsets < part
        first = tl.load(pairs + 2 * pair).to(tl.int64) * block + begin
        second = tl.load(pairs + 2 * pair + 1).to(tl.int64) * block + begin
        tl.store(target + second + offsets, tl.load(source + first + offsets, mask=mask), mask=mask)
        at += tl.num_programs(0)


def copy_blocks(
    source: torch.Tensor,
    target: torch.Tensor,
    pairs: npt.NDArray[np.int32],
    num_tokens: int | None,
) -> None:
    """Copy blocks seen as byte rows (`cuda_ops.blocks`), or their first tokens, on the current stream of their GPU.

    `pairs`: slots to read and to write, [n, 2]. `target` is on a GPU, `source` there as well, or in page-locked memory
    of the host. Raises RuntimeError if the kernel cannot be compiled.
    """
    _, rows, tokens, width = source.shape
    if num_tokens is None or num_tokens == tokens:
        rows, part = 1, source.stride(0)
    else:
        part = num_tokens * width
    row = source.stride(0) // rows
    word = math.gcd(8, row, part, source.data_ptr(), target.data_ptr())
    sizes = [each // word for each in (source.stride(0), row, part)]
    tiles_of_row = -(-sizes[2] // _TILE)
    tiles = len(pairs) * rows * tiles_of_row
    numbers = torch.from_numpy(pairs)
    if target.is_cuda:
        # Torch keeps the page-locked memory until the copy out of it has run.
        numbers = numbers.pin_memory().to(target.device, non_blocking=True)
    most = _PROGRAMS if source.device == target.device else _PROGRAMS_OVER_PCIE
    flat = [each.reshape(-1).view(_WORDS[word]) for each in (source, target)]
    # Triton launches on the current GPU.
    with torch.cuda.device_of(target):  # type: ignore[no-untyped-call]
        _copy[(min(tiles, most),)](*flat, numbers, tiles, rows, tiles_of_row, *sizes, tile=_TILE)
