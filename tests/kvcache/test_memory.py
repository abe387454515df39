"""How much host memory is free is read from real files."""

from __future__ import annotations

from pathlib import Path

from events.types import FULL, SLIDING
from kvcache.device.memory import bookkeeping_bytes, free_bytes
from kvcache.fold.sliding_group import SlidingGroup
from kvcache.manager import KVCacheManager
from tests.support.engines import strategies


def container(directory: Path, limit: str, used: int, inactive_file: int) -> Path:
    directory.joinpath("memory.max").write_text(f"{limit}\n")
    directory.joinpath("memory.current").write_text(f"{used}\n")
    directory.joinpath("memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\n")
    return directory


def kernel(directory: Path, kibibytes: int) -> Path:
    path = directory / "meminfo"
    path.write_text(f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable: {kibibytes} kB\n")
    return path


def test_available_memory_is_what_the_kernel_says(tmp_path: Path) -> None:
    """Without a container's limit the kernel's number counts, in bytes."""
    assert free_bytes(tmp_path, kernel(tmp_path, 7)) == 7 * 1024
    assert free_bytes(container(tmp_path, "max", 5, 0), kernel(tmp_path, 7)) == 7 * 1024


def test_a_container_s_limit_counts_if_it_is_smaller(tmp_path: Path) -> None:
    """What is left of the limit, with the file pages that can be given back, is all there is."""
    assert free_bytes(container(tmp_path, "1000", 600, 100), kernel(tmp_path, 7)) == 500
    assert free_bytes(container(tmp_path, "1000000", 0, 0), kernel(tmp_path, 7)) == 7 * 1024
    assert free_bytes(container(tmp_path, "1000", 2000, 0), kernel(tmp_path, 7)) == 0


def test_sliding_windows_take_more() -> None:
    """The estimate covers what the state of a window keeps for its slots."""
    config = strategies.config(max_sequence_length=64, primary_blocks=2000, max_attention_window=8)
    [group] = KVCacheManager(config).state.groups
    assert isinstance(group, SlidingGroup)
    columns = [group.positions, group.refs, group.priorities, group.expiries]
    columns += [group.released_at, group.transfers, group.levels[0].blank, group.levels[0].run_ids]
    held = sum(len(column) * column.itemsize for column in columns)
    assert bookkeeping_bytes(2000, FULL) < held <= bookkeeping_bytes(2000, SLIDING) <= 1.5 * held


def test_elsewhere_the_physical_memory_is_the_bound(tmp_path: Path) -> None:
    """Systems without these files still give a number."""
    assert free_bytes(tmp_path, tmp_path / "missing") > 1 << 26
