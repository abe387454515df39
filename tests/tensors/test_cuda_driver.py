"""The calls of CUDA's driver, made into a library that has its symbols, and refuses what cuda.h forbids."""

from __future__ import annotations

import ctypes
import gc
import random
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cuda_ops import host_memory
from cuda_ops.copier import Copy, CopyFailed
from cuda_ops.dma import CopyLimits, CopyPieces, DmaCopier
from cuda_ops.driver import INVALID_VALUE, NOT_SUPPORTED, Driver, DriverError
from cuda_ops.hazards import schedule
from cuda_ops.probe import probe
from cuda_ops.simulated import SimulatedGpu
from cuda_ops.torch_copier import TorchCopier
from tests.support.engines.storage import Storage, pair, storage
from tests.support.needs import program
from tests.support.places import ROOT

pytestmark = pytest.mark.needs("cc")
SOURCE = ROOT / "tests" / "support" / "libcuda.c"


class StandIn:
    """The library, and what tests set and read in it."""

    def __init__(self, path: Path) -> None:
        self.library: Any = ctypes.CDLL(str(path))

    def __getitem__(self, name: str) -> int:
        return int(self._variable(name).value)

    def __setitem__(self, name: str, value: int) -> None:
        self._variable(name).value = value

    @property
    def synchronized(self) -> list[int]:
        """How often, per GPU."""
        return list((ctypes.c_size_t * 2).in_dll(self.library, "standin_synchronized"))

    def _variable(self, name: str) -> Any:
        kind = ctypes.c_int if name in ("version", "refuses_batches", "flags") else ctypes.c_size_t
        return kind.in_dll(self.library, f"standin_{name}")


@pytest.fixture
def libcuda(tmp_path: Path) -> StandIn:
    path = tmp_path / "libcuda.so"
    flags = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([program("cc"), *flags, "-o", str(path), str(SOURCE)], check=True)
    return StandIn(path)


def pieces(*each: tuple[torch.Tensor, torch.Tensor]) -> CopyPieces:
    """Copies of whole tensors, as (target, source)."""
    rows = [(target.data_ptr(), source.data_ptr(), source.nbytes) for target, source in each]
    return CopyPieces(*np.array(rows, np.uint64).T)


def random_copies(dice: random.Random, tokens: int) -> list[Copy]:
    found = []
    for _ in range(12):
        levels = dice.choice([(0, 1), (1, 0), (0, 0)])
        numbers = dice.sample(range(5), 2 * dice.randrange(1, 3))
        both = np.array(numbers, np.int32).reshape(2, -1)
        found.append(Copy(*levels, both[0], both[1], dice.choice([None, None, *range(1, tokens + 1)])))
    return found


@pytest.mark.parametrize("version", [13000, 12080, 12070])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_random_programs_leave_the_bytes_of_the_torch_copier(
    libcuda: StandIn, version: int, layout: str
) -> None:
    """In batches, or one by one where the driver is too old for these, all pools hold the same at the end."""
    libcuda["version"] = version
    dice = random.Random(f"{version} {layout}")
    for _ in range(10):
        groups = [[storage(heads, layout) for heads in (1, 4)]]
        copies = [Storage(tuple(each.clone() for each in pool.levels), pool.token_dim) for pool in groups[0]]
        gpu, limit = SimulatedGpu(0), dice.choice([1, 7, 256])
        by_dma = DmaCopier([copies], Driver(libcuda.library), gpu, CopyLimits(limit, 1000))
        all_copies = random_copies(dice, 4)
        for indices in schedule(all_copies):
            batch = [all_copies[index] for index in indices]
            TorchCopier(groups).submit(batch)
            by_dma.submit(batch).wait()
        for pool, copied in zip(groups[0], copies, strict=True):
            for right, found in zip(pool.levels, copied.levels, strict=True):
                assert torch.equal(right.view(torch.uint8), found.view(torch.uint8))
        assert libcuda["largest"] <= 256
    assert (libcuda["batches"] > 0) == (version >= 12080)
    assert (libcuda["singles"] > 0) == (version < 12080)


def bytes_of(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


@pytest.mark.parametrize("code", [INVALID_VALUE, NOT_SUPPORTED])
def test_a_driver_that_refuses_batches_at_the_start_copies_one_by_one(libcuda: StandIn, code: int) -> None:
    """Both answers are known of drivers that cannot; the reason is kept."""
    libcuda["refuses_batches"] = code
    driver = Driver(libcuda.library)
    found = probe(
        driver, SimulatedGpu(0), torch.zeros(8192, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    )
    assert found.memcpy is driver
    assert found.why == f"single copies by cuMemcpyAsync: the driver refuses batches (CUDA error {code})"
    assert libcuda["singles"] == 8


def test_a_driver_that_takes_batches_is_used(libcuda: StandIn) -> None:
    """A little is copied there and back at the start."""
    driver = Driver(libcuda.library)
    there = torch.zeros(4096, dtype=torch.uint8)
    found = probe(driver, SimulatedGpu(0), torch.zeros(8192, dtype=torch.uint8), there)
    assert (found.memcpy, found.why) == (driver, "batches of copies by cuMemcpyBatchAsync")
    assert (libcuda["batches"], libcuda["singles"]) == (2, 0)
    assert len(set(there.tolist())) > 100


def test_what_is_refused_later_is_a_bug_that_is_said(libcuda: StandIn) -> None:
    """An invalid copy is not tried again in another way: batch and ticket fail with what was asked for."""
    driver = Driver(libcuda.library)
    source, target = bytes_of(1, 2, 3, 4), bytes_of(0, 0, 0, 0)
    wrong = pieces((target[:2], source[:2]), (target[1:3], source[2:]))
    with pytest.raises(DriverError, match=r"refused copy 0 of 2, 2 bytes from 0x[0-9a-f]+ .* bug.*error 1"):
        driver.copy(wrong, SimulatedGpu(0).new_stream())
    assert target.tolist() == [0, 0, 0, 0]
    libcuda["refuses_batches"] = 700
    copier = DmaCopier([[storage(1, "NHD")]], driver, SimulatedGpu(0))
    with pytest.raises(CopyFailed, match=r"cuMemcpyBatchAsync of 1 copies: CUDA error 700"):
        copier.submit([pair(0, 0, (0, 1))]).done()
    assert libcuda["singles"] == 0


def test_blocks_copied_onto_themselves_are_left_alone(libcuda: StandIn) -> None:
    """A driver refuses such a copy, of which there is nothing to do."""
    copier = DmaCopier([[storage(1, "NHD")]], Driver(libcuda.library), SimulatedGpu(0))
    copier.submit([pair(0, 0, (0, 0)), pair(1, 1, (0, 1))]).wait()
    assert libcuda["batches"] == 1
    copier.submit([pair(0, 0, (0, 0), 2)]).wait()
    assert libcuda["batches"] == 1


@pytest.mark.parametrize("version", [13000, 12000])
def test_the_default_stream_is_refused(libcuda: StandIn, version: int) -> None:
    """Everything would wait for it."""
    libcuda["version"] = version
    stream = SimulatedGpu(0).new_stream()
    for handle in (0, 1):
        stream.cuda_stream = handle
        with pytest.raises(DriverError, match="error 1"):
            Driver(libcuda.library).copy(pieces((bytes_of(0), bytes_of(1))), stream)


def test_a_driver_without_the_calls_is_none(libcuda: StandIn) -> None:
    """It says what it lacks."""
    libcuda["version"] = 3000
    with pytest.raises(OSError, match="lacks cuMemcpyAsync"):
        Driver(libcuda.library)
    with pytest.raises(OSError, match="older than CUDA 12"):
        Driver(ctypes.CDLL(None))


def test_host_memory_is_locked_and_unlocked_by_the_driver(
    libcuda: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, as far as it lets; all goes back when what was given to the device has ended."""
    monkeypatch.setattr(host_memory, "CHUNK_BYTES", 8192)
    locker = Driver(libcuda.library).locker(1)
    tensor = host_memory.host_zeros(20_000, 512, locker)
    assert (libcuda["num_registered"], libcuda["flags"]) == (3, 1 | 2)  # of all contexts, and seen by kernels
    libcuda["lockable"] = 40_000
    with pytest.raises(
        MemoryError, match=r"after 16,384 of 40,960 \(cuMemHostRegister of 8,192 bytes: CUDA error 2"
    ):
        host_memory.host_zeros(40_960, 512, locker)
    gc.collect()
    assert (libcuda["num_registered"], *libcuda.synchronized) == (3, 0, 1)
    del tensor
    gc.collect()
    assert (libcuda["num_registered"], *libcuda.synchronized) == (0, 0, 2)
    with pytest.raises(DriverError, match="cuMemHostUnregister: CUDA error 713"):
        locker.unregister([4096])


def test_a_thread_without_a_context_frees_host_memory(libcuda: StandIn) -> None:
    """The last view may go in any thread: the right GPU is waited for, and nothing stays registered."""
    views = [host_memory.host_zeros(4096, 512, Driver(libcuda.library).locker(1))]
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    assert (libcuda["num_registered"], *libcuda.synchronized) == (0, 0, 1)


def test_a_gpu_without_a_context_locks_nothing(libcuda: StandIn) -> None:
    """It says which."""
    with pytest.raises(DriverError, match="cuDevicePrimaryCtxRetain of GPU 7: CUDA error 101"):
        Driver(libcuda.library).locker(7)


def test_no_copy_crosses_an_edge_of_registered_memory(
    libcuda: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a level in one direction are adjacent slots, and are cut where the driver would refuse them."""
    monkeypatch.setattr(host_memory, "CHUNK_BYTES", 8192)
    driver = Driver(libcuda.library)
    shape = (64, 1, 8, 64)  # 512 bytes a block, so 16 blocks a chunk
    region = torch.randint(0, 256, (64 * 512 + 4096,), dtype=torch.uint8)
    secondary = region[-region.data_ptr() % 4096 :][: 64 * 512].view(shape)
    for begin in range(0, 64, 16):
        driver.locker(0).register(secondary[begin].data_ptr(), 8192)
    primary = torch.zeros(shape, dtype=torch.uint8)
    copier = DmaCopier([[Storage((primary, secondary), 2)]], driver, SimulatedGpu(0))
    numbers = np.arange(64, dtype=np.int32)
    copier.submit([Copy(1, 0, numbers, numbers)]).wait()
    assert torch.equal(primary, secondary)
    both = pieces((primary[:32], secondary[:32]))
    with pytest.raises(DriverError):
        driver.copy(both, SimulatedGpu(0).new_stream())
