"""Host memory is real but for the driver's part."""

from __future__ import annotations

import gc
import mmap
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from cuda_ops import host_memory
from cuda_ops.host_memory import Placement, Stretch, host_zeros, mapped_file
from kvcache.config import KVCacheConfig
from kvcache.layout import Layout
from kvcache.pools import Pools

PAGE = mmap.PAGESIZE


class Locker:
    """Stands in for the driver; `most`: the bytes that it lets be locked."""

    def __init__(self, most: int = 1 << 40) -> None:
        self.most = most
        self.registered: dict[int, int] = {}
        self.calls: list[str] = []

    def register(self, address: int, num_bytes: int) -> None:
        assert address % PAGE == 0
        if sum(self.registered.values()) + num_bytes > self.most:
            raise RuntimeError("CUDA error 2")
        self.registered[address] = num_bytes

    def unregister(self, addresses: Sequence[int]) -> None:
        for address in addresses:
            del self.registered[address]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "CHUNK_BYTES", 2 * PAGE)


@pytest.mark.usefixtures("small_chunks")
def test_memory_is_locked_in_chunks_as_long_as_it_is_used() -> None:
    """Chunks have whole blocks and pages, all are locked while any view lives, and unlocked before it goes."""
    locker, reported = Locker(), list[int]()
    tensor = host_zeros(7 * PAGE, PAGE // 2, locker, progress=reported.append)
    begin = tensor.data_ptr()
    assert locker.registered == {
        begin + 2 * number * PAGE: (2 if number < 3 else 1) * PAGE for number in range(4)
    }
    assert reported == list(locker.registered.values())
    part = tensor.view(7, -1)[1]
    del tensor
    gc.collect()
    assert len(locker.registered) == 4
    assert part.sum() == 0
    part += 1
    del part
    gc.collect()
    assert locker.registered == {}


@pytest.mark.usefixtures("small_chunks")
def test_refused_locking_says_what_to_do_and_unlocks_the_rest() -> None:
    """The refusal names bytes, how far it came, the driver's error, the limit and the settings."""
    locker = Locker(5 * PAGE)
    message = r"lock 8,192 bytes .*after 16,384 of 40,960 \(CUDA error 2; ulimit -l is .*\).*host_cache_size"
    with pytest.raises(MemoryError, match=message):
        host_zeros(10 * PAGE, PAGE, locker)
    gc.collect()
    assert locker.registered == {}


def test_no_memory_asks_for_nothing() -> None:
    """An empty secondary level needs no driver."""
    locker = Locker()
    assert host_zeros(0, 64, locker).shape == (0,)
    assert locker.registered == {}


def test_memory_that_cannot_be_mapped_is_a_memory_error() -> None:
    """A size beyond the address space is refused with its number."""
    with pytest.raises(MemoryError, match="4,611,686,018,427,387,904 bytes"):
        host_zeros(1 << 62, 64, None)


@pytest.mark.usefixtures("small_chunks")
def test_of_a_file_the_blocks_are_locked(tmp_path: Path) -> None:
    """Each stretch has chunks of its own blocks, and what is between them is left."""
    path, locker = tmp_path / "file", Locker()
    path.write_bytes(bytes(12 * PAGE))
    with path.open("r+b") as file:
        tensor = mapped_file(
            file.fileno(),
            12 * PAGE,
            [Stretch(PAGE, 3 * PAGE, PAGE), Stretch(5 * PAGE, 6 * PAGE, 3 * PAGE)],
            locker,
        )
    begins = [(address - tensor.data_ptr()) // PAGE for address in locker.registered]
    assert (begins, [size // PAGE for size in locker.registered.values()]) == ([1, 3, 5, 8], [2, 1, 3, 3])
    tensor[PAGE] = 7
    assert path.read_bytes()[PAGE] == 7
    del tensor
    gc.collect()
    assert locker.registered == {}


def described(tensor: torch.Tensor, file: str) -> str:
    """What the system says of a tensor's mapping."""
    text = Path(f"/proc/self/{file}").read_text(encoding="utf-8")
    (found,) = re.findall(rf"^{tensor.data_ptr():x}[- ].*(?:\n(?![0-9a-f]+-).*)*", text, re.MULTILINE)
    return str(found)


@pytest.mark.skipif(
    not Path("/proc/self/numa_maps").exists(), reason="the system tells nothing of its memory"
)
def test_memory_is_on_the_node_that_was_asked_for() -> None:
    """The system says so; a node that is not there is refused by its number."""
    tensor = host_zeros(64 * PAGE, PAGE, None, Placement(numa_node=0))
    assert " bind:0 " in described(tensor, "numa_maps").splitlines()[0]
    for node in (1023, 5000):
        with pytest.raises(MemoryError, match=f"numa_node={node}"):
            host_zeros(PAGE, PAGE, None, Placement(numa_node=node))


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system tells nothing of its memory")
def test_huge_pages_are_asked_for_or_refused() -> None:
    """The flags of the mapping say so."""
    if "MADV_HUGEPAGE" not in vars(mmap) or not Path("/sys/kernel/mm/transparent_hugepage").exists():
        with pytest.raises(MemoryError, match="hugepages=always"):
            host_zeros(PAGE, PAGE, None, Placement(hugepages="always"))
        return
    for placement, flag in ((Placement("always"), "hg"), (Placement("never"), "nh")):
        tensor = host_zeros(PAGE, PAGE, None, placement)
        flags = re.findall(r"VmFlags:(.*)", described(tensor, "smaps"))[0].split()
        assert flag in flags


def test_pools_on_the_host_take_their_memory_as_they_are_asked_to() -> None:
    """With `numa_node` secondary is made ready at the start, and progress is told; else it is taken as it is used."""
    reported: list[int] = []
    settings = {"max_sequence_length": 64, "primary_blocks": 4, "secondary_blocks": 8}
    for node, expected in ((None, 0), (0, 1)):
        config = KVCacheConfig.model_validate({**settings, "numa_node": node})
        pools = Pools(Layout.of(config), "cpu", config=config, progress=reported.append)
        assert reported[-1:] == [pools.bytes_secondary] * expected
        assert pools.bytes_ready == expected * pools.bytes_secondary
        (group,) = pools.groups
        assert group[0].secondary.shape[0] == 8
        assert not group[0].secondary.any()
