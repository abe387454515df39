"""Whether copies can be given to a GPU's driver: found out by copying a little, there and back."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from cuda_ops.dma import CopyPieces, Memcpy
from cuda_ops.driver import Driver, load
from cuda_ops.streams import Gpu, TorchGpu

_BYTES = 4096


class Probed(NamedTuple):
    """What copies on a GPU."""

    memcpy: Memcpy | None
    """None: only torch does."""
    why: str
    """In words."""


@cache
def probed(device: torch.device) -> Probed:
    """Try the driver of this machine on a GPU, once in the life of a process."""
    try:
        driver = load()
        host = torch.zeros(2 * _BYTES, dtype=torch.uint8).pin_memory()
        return probe(driver, TorchGpu(device), host, torch.zeros(_BYTES, dtype=torch.uint8, device=device))
    except (OSError, RuntimeError) as error:
        return Probed(None, f"no driver for copies by DMA ({error})")


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
        return Probed(None, "copies by DMA brought other bytes")
    if driver.why_single:
        return Probed(driver, f"copies one by one by cuMemcpyAsync: {driver.why_single}")
    return Probed(driver, "batches of copies by cuMemcpyBatchAsync")
