"""Detection of a usable GPU driver, by a small copy there and back."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from cuda_ops.copier import first_line
from cuda_ops.dma import CopyPieces, Kernel, Memcpy
from cuda_ops.driver import Driver, load
from cuda_ops.host_memory import host_zeros
from cuda_ops.streams import Gpu, TorchGpu

_BYTES = 4096


class Probed(NamedTuple):
    """The usable ways to copy on a GPU."""

    memcpy: Memcpy | None
    """Executor of DMA copies; None: only torch works."""
    why: str
    """The reason, in words."""
    kernel: Kernel | None = None


@cache
def probed(device: torch.device) -> Probed:
    """Try the driver of this machine on a GPU, once in the life of a process."""
    try:
        driver = load()
        there = torch.zeros(_BYTES, dtype=torch.uint8, device=device)
        host = host_zeros(2 * _BYTES, _BYTES, driver.locker(there.device.index))  # as that of pools
        found = probe(driver, TorchGpu(device), host, there)
        return found if found.memcpy is None else with_kernel(found, host, there)
    except (OSError, RuntimeError, MemoryError) as error:
        return Probed(None, f"no driver for DMA copies ({error})")


def with_kernel(found: Probed, host: torch.Tensor, there: torch.Tensor) -> Probed:
    """Add Triton's kernel, if it is installed and copies right: within `there`, and from `host` into it."""
    try:
        from cuda_ops.kernels import copy_blocks

        blocks, far = host.view(-1, 2, 4, 128), there.view(-1, 2, 4, 128)
        far[:2] = torch.arange(256, dtype=torch.uint8).repeat(8).view(2, 2, 4, 128)
        blocks[:1] = torch.randint(0, 256, blocks[:1].shape, dtype=torch.uint8)
        copy_blocks(far, far, np.array([[1, 2]], np.int32), None)
        copy_blocks(blocks, far, np.array([[0, 1]], np.int32), 3)
        right = torch.equal(far[2], far[0]) and torch.equal(far[1, :, :3].cpu(), blocks[0, :, :3])
        if right:
            return found._replace(why=f"{found.why}; Triton kernel inside the GPU", kernel=copy_blocks)
        why = "it copies the wrong bytes"
    except Exception as error:  # noqa: BLE001  compilers fail in many ways, and without one there are lists still
        why = first_line(error)
    return found._replace(why=f"{found.why}; no Triton kernel ({why})")


def probe(driver: Driver, gpu: Gpu, host: torch.Tensor, there: torch.Tensor) -> Probed:
    """Try a driver: copy the first half of `host` there, and back into the second half.

    Raises RuntimeError if the driver refuses.
    """
    content = torch.randint(0, 256, (_BYTES,), dtype=torch.uint8)
    host[:_BYTES] = content
    stream = gpu.new_stream()
    stream.wait_stream(gpu.current_stream())
    with gpu.on(stream):
        for target, source in ((there, host[:_BYTES]), (host[_BYTES:], there)):
            # Several pieces, so that it is a batch.
            begins, sizes = (
                np.arange(0, _BYTES, 1024).astype(np.uint64),
                np.full(_BYTES // 1024, 1024, np.uint64),
            )
            pieces = CopyPieces(
                begins + np.uint64(target.data_ptr()), begins + np.uint64(source.data_ptr()), sizes
            )
            driver.probe(pieces, stream)
    stream.synchronize()
    if not torch.equal(host[_BYTES:], content):
        return Probed(None, "DMA copies returned the wrong bytes")
    if driver.why_single:
        return Probed(driver, f"single copies by cuMemcpyAsync: {driver.why_single}")
    return Probed(driver, "batches of copies by cuMemcpyBatchAsync")
