"""Choice of the copier that moves the blocks of some pools."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cuda_ops.blocks import BlockStorage
from cuda_ops.copier import Copier
from cuda_ops.dma import CopyLimits, DmaCopier
from cuda_ops.driver import DriverError, load
from cuda_ops.host_memory import PageLocker, Placement
from cuda_ops.probe import Probed, probed
from cuda_ops.streams import TorchGpu
from cuda_ops.torch_copier import TorchCopier
from kvcache.config import KVCacheConfig
from kvcache.errors import Unsupported


def chosen(device: torch.device, wanted: str = "auto") -> Probed:
    """Choose the copier to and from a device where `KVCacheConfig.copier` is `wanted`.

    Raises `Unsupported` for ``dma`` where that is impossible.
    """
    if wanted == "torch":
        return Probed(None, "torch's copies, as copier says")
    found = (
        probed(device)
        if device.type == "cuda"
        else Probed(None, f"torch's copies: primary is on the {device.type}")
    )
    if wanted == "dma" and found.memcpy is None:
        raise Unsupported(f"copier=dma ({found.why})", "give auto or torch")
    return found._replace(kernel=None) if wanted == "dma" else found


def copier_for(
    groups: Sequence[Sequence[BlockStorage]], device: torch.device, config: KVCacheConfig | None
) -> Copier:
    """Return the copier of the blocks of these pools, with their primary level on `device`. Raises as `chosen`."""
    found = chosen(device, "auto" if config is None else config.copier)
    if found.memcpy is None:
        return TorchCopier(groups)
    limits = CopyLimits() if config is None else CopyLimits(config.copy_pieces, config.copy_bytes)
    return DmaCopier(groups, found.memcpy, TorchGpu(device), limits, found.kernel)


def locker_for(device: torch.device) -> PageLocker | None:
    """Return the page-locker of host memory for a device; None on the host. Raises MemoryError without the GPU's
    driver.
    """
    if device.type != "cuda":
        return None
    try:
        return load().locker(device.index)
    except (OSError, DriverError) as error:
        raise MemoryError(f"cannot page-lock host memory: {error}") from error


def placement_of(config: KVCacheConfig | None) -> Placement:
    """Return the placement of host memory."""
    return Placement() if config is None else Placement(config.hugepages, config.numa_node)
