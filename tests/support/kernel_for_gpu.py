"""Compile the kernel of copies as for an H100, without one: Triton does all but the launch.

Prints the GPU of each launch, the number of compiled variants, and the instructions of the first one that access
memory. The current GPU is 0, and all tensors are taken for those of GPU 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget

from cuda_ops import kernels

current, launched = [0], set[int]()


@contextmanager
def device_of(_tensor: torch.Tensor) -> Iterator[None]:
    current.append(1)
    yield
    current.pop()


def pretend() -> SimpleNamespace:
    """A driver of Triton whose launches do nothing."""
    return SimpleNamespace(
        get_current_device=lambda: current[-1],
        get_current_stream=lambda _device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        launcher_cls=lambda _source, _metadata: lambda *_: launched.add(current[-1]),
        utils=SimpleNamespace(
            get_device_properties=lambda _device: {"max_shared_mem": 1 << 17},
            load_binary=lambda *_: (object(), object(), 0, 0, 1024),
        ),
    )


def main() -> None:
    triton.runtime.driver.set_active(pretend())
    torch.cuda.device_of = device_of  # type: ignore[assignment,misc]
    blocks = torch.zeros((40, 4, 16, 256), dtype=torch.uint8)
    for number in (1, 2, 16, 17):
        pairs = np.arange(2 * number, dtype=np.int32).reshape(2, -1).T.copy()
        for num_tokens in (None, 1, 3, 8, 15, 16):
            kernels.copy_blocks(blocks, blocks, pairs, num_tokens)
    made: Any = [kernel for caches in kernels._copy.device_caches.values() for kernel in caches[0].values()]
    print(*launched, len(made), *sorted(set(re.findall(r"(?:ld|st)\.global\S*", made[0].asm["ptx"]))))


if __name__ == "__main__":
    main()
