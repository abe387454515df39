"""The memory of the cache: one contiguous tensor per pool and level.

Primary lies on the GPU (on the host where there is none), secondary on the host, page-locked if a GPU is to
copy to and from it. All memory is taken at once, after it was compared with what is free: a cache that fails
to start is easier to live with than an engine that runs out of memory under load, and the host does not
refuse allocations that it cannot back.

A pool's tensor has the shape [blocks, layers, kv_factor, tokens, heads, dim] (layout NHD; tokens and heads are
swapped for HND), where kv_factor is 2 for K and V, and 1 for K only. A block's data is one run of bytes; the view of
one layer has the shape that paged-attention kernels take.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from weakref import ref

import numpy as np
import numpy.typing as npt

try:
    import torch
except ImportError as error:
    raise ImportError("pools need torch: install kvcache[torch]") from error

from cuda_ops.copier import Copier
from cuda_ops.host_memory import Placement, Progress, host_zeros
from events.types import PRIMARY, SECONDARY
from kvcache.config import KVCacheConfig
from kvcache.device.copying import copier_for, locker_for, placement_of
from kvcache.device.memory import free_bytes
from kvcache.device.secondary_file import SecondaryFile
from kvcache.errors import ConfigError, NotEnoughMemory, Unsupported, UsageError
from kvcache.layout import GroupLayout, Layout, PoolLayout, with_primary_blocks
from kvcache.sizes import INSTEAD

LOWER_PRIMARY = "primary_blocks, max_tokens or primary_bytes"
LOWER_SECONDARY = "secondary_blocks or host_cache_size"


class KVCacheBlockPool:
    """Block data of the layers of one group that share a number of KV heads."""

    def __init__(
        self,
        layout: PoolLayout,
        num_blocks: tuple[int, int],
        device: torch.device,
        secondary_bytes: torch.Tensor,
    ) -> None:
        """Allocate primary, zeroed, and view the bytes of secondary.

        The caller has verified that they fit.
        """
        self.layout = layout
        primary, secondary = num_blocks
        dtype = getattr(torch, layout.dtype)
        self.primary = torch.zeros((primary, *layout.block_shape), dtype=dtype, device=device)
        """Tensor that attention reads and writes, [blocks, *layout.block_shape]."""
        shape = (secondary, *layout.block_shape)
        self.secondary = secondary_bytes.view(dtype).view(shape)
        """Tensor on the host."""
        self.levels = (self.primary, self.secondary)

    @property
    def token_dim(self) -> int:
        """Index of the tensors' dimension of tokens in a block."""
        return 3 if self.layout.kv_layout == "NHD" else 4

    def layer(self, layer: int) -> torch.Tensor:
        """View one of the pool's layers in primary: [blocks, kv_factor, tokens, heads, dim] for NHD.

        K is at index 0 of the second dimension, V at 1; with kv_factor 1 there is only index 0.
        """
        return self.primary[:, self.layout.layers.index(layer)]

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """View K and V of one of the pool's layers apart, each [blocks, tokens, heads, dim] for NHD.

        With kv_factor 1 both are the same view.
        """
        both = self.layer(layer)
        return both[:, 0], both[:, -1]


def sized(config: KVCacheConfig, device: torch.device | str | None = None) -> KVCacheConfig:
    """Return the settings with the block counts of `free_gpu_memory_fraction` on `device` at this moment.

    Without that fraction they stay as they are. The counts take the place of all settings that limit primary. Raises
    ConfigError without a GPU to measure, and if a window gets no block.
    """
    fraction = config.free_gpu_memory_fraction
    if fraction is None:
        return config
    own = _device(device)
    if own.type != "cuda":
        problem = f"free_gpu_memory_fraction: given {fraction} for a cache on {own.type}; accepted: {INSTEAD} instead"
        raise ConfigError([problem])
    return with_primary_blocks(config, torch.cuda.mem_get_info(own)[0])


class PoolSizes:
    """Size of the pools of a cache, computed before anything is allocated."""

    def __init__(self, layout: Layout, device: torch.device | str | None = None) -> None:
        """Add up, for primary on `device` (None: the current GPU, else the host).

        Raises Unsupported for a device that is neither a GPU of CUDA nor the host.
        """
        if not isinstance(layout, Layout):
            raise UsageError(f"pools need a Layout, not {type(layout).__name__}: pass Layout.of(config)")
        self.layout, self.device = layout, _device(device)
        self.primary, self.secondary = (
            sum(group.num_blocks[level] * group.bytes_per_block for group in layout.groups)
            for level in (PRIMARY, SECONDARY)
        )
        """Bytes per level."""

    def require_room(self, *, in_file: bool = False) -> None:
        """Raise NotEnoughMemory unless there is room on the GPU and on the host, or on a host that holds both.

        With `in_file` secondary lies in a file, which allocates its own room.
        """
        in_memory = 0 if in_file else self.secondary
        on_host = self.primary + in_memory
        lower_on_host = f"{LOWER_PRIMARY}, or {LOWER_SECONDARY}" if in_memory else LOWER_PRIMARY
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0]
            if self.primary > free:
                raise NotEnoughMemory(self.primary, free, f"memory on {self.device}", LOWER_PRIMARY)
            on_host, lower_on_host = in_memory, LOWER_SECONDARY
        free = free_bytes()
        if on_host > free:
            raise NotEnoughMemory(on_host, free, "host memory", lower_on_host)


class Pools:
    """All pools of a cache."""

    def __init__(
        self,
        layout: Layout,
        device: torch.device | str | None = None,
        secondary_path: str | os.PathLike[str] | None = None,
        config: KVCacheConfig | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Allocate everything, with primary on `device` (None: the current GPU, else the host).

        `config` selects the copier, and the placement of host memory; by default as its defaults do. `progress` is
        called with the bytes of host memory that are ready: it is prepared for a GPU, or if `config` places it.

        With `secondary_path` the secondary level lies in this file, as in `KVCacheConfig.secondary_path`; existing
        content stays, for `KVCacheManager.open`. Raises NotEnoughMemory, before anything is allocated, if it does not
        fit, Unsupported for a device that is neither a GPU of CUDA nor the host, and for a file a
        `kvcache.device.secondary_file.SecondaryFileError`, or MemoryError if it cannot be page-locked.
        """
        sizes = PoolSizes(layout, device)
        sizes.require_room(in_file=secondary_path is not None)
        self.device, self.layout, self._config = sizes.device, layout, config
        self.bytes_primary, self.bytes_secondary = sizes.primary, sizes.secondary
        self.bytes_ready, self.ready_seconds = 0, 0.0
        """Bytes of host memory that were prepared, and the time that took."""
        self.secondary_file: SecondaryFile | None = None
        """File of secondary, if any. It is locked as long as these pools live, or until `close`."""
        if secondary_path is not None:
            self.secondary_file = SecondaryFile(
                _checked_path(secondary_path), layout, locker_for(self.device)
            )
        self.groups = tuple(
            tuple(
                KVCacheBlockPool(
                    pool, group.num_blocks, self.device, self._secondary(group, number, progress)
                )
                for number, pool in enumerate(group.pools)
            )
            for group in layout.groups
        )
        self._owner: ref[object] | None = None

    def _secondary(self, group: GroupLayout, number: int, progress: Progress | None) -> torch.Tensor:
        """Allocate the bytes of secondary of one pool."""
        if self.secondary_file is not None:
            return self.secondary_file.memory(group.index, number)
        each = group.pools[number].bytes_per_block
        size, placement = group.num_blocks[SECONDARY] * each, placement_of(self._config)
        if self.device.type != "cuda" and placement == Placement():
            return torch.zeros(size, dtype=torch.uint8)  # the system allocates its pages as they are written
        begun = time.perf_counter()

        def report(more: int) -> None:
            self.bytes_ready += more
            if progress is not None:
                progress(self.bytes_ready)

        found = host_zeros(size, each, locker_for(self.device), placement, report)
        self.ready_seconds += time.perf_counter() - begun
        return found

    def close(self) -> None:
        """Release the file of secondary, if there is one; nothing may be copied there any more.

        Raises `UsageError` while a manager has these pools.
        """
        self.refuse_taken()
        if self.secondary_file is not None:
            self.secondary_file.close()

    def take(self, owner: object) -> None:
        """Note the owner of the blocks. Raises `UsageError` while another one has not given them back.

        A garbage-collected owner has given them back.
        """
        self.refuse_taken()
        self._owner = ref(owner)

    def refuse_taken(self) -> None:
        """Raise `UsageError` if an owner has blocks here."""
        if self._owner is not None and self._owner() is not None:
            raise UsageError(
                "these pools still belong to another manager, and two would overwrite each other's blocks: "
                "close it first, or allocate other pools"
            )

    def release(self, owner: object) -> None:
        """Release the blocks of this owner; does nothing for any other."""
        if self._owner is not None and self._owner() is owner:
            self._owner = None

    def layer(self, layer: int, *, cross: bool = False) -> torch.Tensor:
        """View the K/V of one layer in primary, of the sequence's tokens or (`cross`) of the encoder's.

        See `KVCacheBlockPool.layer`. Raises KeyError if there is none.
        """
        return self._of(layer, cross=cross).layer(layer)

    def kv(self, layer: int, *, cross: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """View K and V of one layer, as `layer`; see `KVCacheBlockPool.kv`. Raises KeyError if there is none."""
        return self._of(layer, cross=cross).kv(layer)

    def _of(self, layer: int, *, cross: bool) -> KVCacheBlockPool:
        for group, pools in zip(self.layout.groups, self.groups, strict=True):
            for pool in pools if (group.kind == "cross") is cross else ():
                if layer in pool.layout.layers:
                    return pool
        raise KeyError(layer)

    def block_table(self, slots: npt.NDArray[np.int32]) -> torch.Tensor:
        """Wrap a block table in a tensor on the host that shares its memory."""
        return torch.from_numpy(slots)

    def fill_blank(self, group: int, slots: npt.NDArray[np.int32]) -> None:
        """Overwrite primary blocks with NaN (integers: the largest value) on the current stream, for debugging."""
        index = torch.from_numpy(slots.astype(np.int64)).to(self.device)
        for pool in self.groups[group]:
            # With all bits set a float of any size is NaN, and torch cannot fill all types.
            byte = 0x7F if pool.primary.dtype == torch.int8 else 0xFF
            pool.primary.view(torch.uint8).index_fill_(0, index, byte)

    def copier(self) -> Copier:
        """Create the copier between the levels of these pools. Needed once.

        Raises Unsupported if the config requests a copier that is not available.
        """
        return copier_for(self.groups, self.device, self._config)


def _checked_path(path: object) -> Path:
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str) or not os.fspath(path):
        raise UsageError(f"secondary_path must be the path of a file, not {type(path).__name__}")
    return Path(os.fspath(path))


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise UsageError("device must be a torch device name: 'cpu', 'cuda', 'cuda:1'") from None
    if device.type not in ("cuda", "cpu"):
        raise Unsupported(f"a cache on {device.type}", "use a CUDA device, or the CPU")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise Unsupported("a cache on cuda", "PyTorch finds no GPU: use the CPU")
    return torch.empty(0, device=device).device  # with the index of the GPU, if missing
