"""Pinned memory is real but for the driver's part."""

from __future__ import annotations

import gc
import mmap

import pytest
import torch

from cuda_ops.host_memory import pinned_zeros


class Driver:
    """Stands in for the two calls to CUDA's runtime."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        if self.status == 0:
            self.registered[address] = size
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    return driver


def test_pinned_memory_is_registered_as_long_as_it_is_used(driver: Driver) -> None:
    """The whole region is registered while any view of it lives, and unregistered before it goes."""
    part = pinned_zeros(3 * mmap.PAGESIZE).view(3, -1)[1]
    gc.collect()
    assert list(driver.registered.values()) == [3 * mmap.PAGESIZE]
    (address,) = driver.registered
    assert address % mmap.PAGESIZE == 0
    assert part.sum() == 0
    part += 1
    del part
    gc.collect()
    assert driver.registered == {}


def test_no_pinned_memory_asks_for_nothing(driver: Driver) -> None:
    """An empty secondary level needs no driver."""
    assert pinned_zeros(0).shape == (0,)
    assert driver.registered == {}


def test_refused_pinning_says_what_to_do(driver: Driver) -> None:
    """The driver's refusal names the size, the error and the settings."""
    driver.status = 2
    with pytest.raises(MemoryError, match=r"4,096 bytes .*CUDA error 2.*host_cache_size"):
        pinned_zeros(4096)


def test_memory_that_cannot_be_mapped_is_a_memory_error() -> None:
    """A size beyond the address space is refused with its number."""
    with pytest.raises(MemoryError, match="4,611,686,018,427,387,904 bytes"):
        pinned_zeros(1 << 62)
