"""Pools: shapes, sizes, and the refusal of what does not fit."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from cuda_ops.copier import Copy
from cuda_ops.torch_copier import TorchCopier
from events.log import LogWriter
from kvcache import pools as pools_module
from kvcache.config import KVCacheConfig
from kvcache.errors import NotEnoughMemory, Unsupported, UsageError
from kvcache.layout import Layout
from kvcache.manager import KVCacheManager, Substitutes
from kvcache.pools import Pools, PoolSizes
from sinks import SinkURLError
from tests.support.engines.inside import blocks_of
from tests.support.engines.simulated import LateCopier


def layout(**changes: object) -> Layout:
    settings: dict[str, object] = {
        "max_sequence_length": 64,
        "tokens_per_block": 4,
        "num_layers": 4,
        "num_kv_heads": (1, 2, 2, 1),
        "head_dim": 8,
        "max_attention_window": (16, 64),
        "primary_blocks": 6,
        "secondary_blocks": 5,
    }
    return Layout.of(KVCacheConfig.model_validate(settings | changes))


def test_each_pool_has_the_shape_of_its_layers_and_heads() -> None:
    """Windows become groups and numbers of heads become pools, at both levels."""
    pools = Pools(layout(), "cpu")
    shapes = [[tuple(pool.primary.shape) for pool in group] for group in pools.groups]
    assert shapes == [[(6, 1, 2, 4, 1, 8), (6, 1, 2, 4, 2, 8)]] * 2
    assert [tuple(pool.secondary.shape) for pool in pools.groups[1]] == [
        (5, 1, 2, 4, 1, 8),
        (5, 1, 2, 4, 2, 8),
    ]


def test_a_block_table_shares_its_memory() -> None:
    """The tensor of a block table is the array that was built, not a copy."""
    slots = np.array([[1, 2], [3, -1]], np.int32)
    table = Pools(layout(), "cpu").block_table(slots)
    slots[0, 0] = 5
    assert table.tolist() == [[5, 2], [3, -1]]


@pytest.mark.parametrize(("kv_layout", "token_dim"), [("NHD", 3), ("HND", 4)])
def test_the_token_dimension_follows_the_layout(kv_layout: str, token_dim: int) -> None:
    """In NHD the tokens come before the heads, in HND after them."""
    pool = Pools(layout(kv_layout=kv_layout, num_kv_heads=2), "cpu").groups[0][0]
    assert pool.token_dim == token_dim
    assert pool.primary.shape[token_dim] == 4
    assert pool.primary.shape[7 - token_dim] == 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "int8"])
def test_the_bytes_are_those_of_the_tensors(dtype: str) -> None:
    """What is announced and checked is what is allocated, for every type of element."""
    pools = Pools(layout(dtype=dtype), "cpu")
    for level, announced in enumerate((pools.bytes_primary, pools.bytes_secondary)):
        tensors = [pool.levels[level] for group in pools.groups for pool in group]
        assert sum(tensor.nbytes for tensor in tensors) == announced
        assert all(tensor.dtype == getattr(torch, dtype) for tensor in tensors)
        assert all(not tensor.view(torch.uint8).any() for tensor in tensors)


def test_a_layer_is_a_view_into_its_pool() -> None:
    """Writing to a layer's view changes that layer in primary and no other."""
    pools = Pools(layout(max_attention_window=None, dtype="float32"), "cpu")
    pools.layer(2)[3, 1] = 1.0
    (one_head, two_heads) = pools.groups[0]
    assert two_heads.layout.layers == (1, 2)
    assert two_heads.primary[3, 1, 1].min() == 1.0
    assert two_heads.primary.sum() == two_heads.primary[3, 1, 1].numel()
    assert one_head.primary.sum() == 0
    with pytest.raises(KeyError):
        pools.layer(4)


@pytest.mark.parametrize(("kv_layout", "inner"), [("NHD", (4, 1, 8)), ("HND", (1, 4, 8))])
def test_kv_factor_1_keeps_k_only(kv_layout: str, inner: tuple[int, ...]) -> None:
    """With K alone a layer's view and a block's bytes are half, and the first tokens of a block are copied as ever."""
    both, one = (layout(num_kv_heads=1, kv_layout=kv_layout, kv_factor=factor) for factor in (2, 1))
    pools = Pools(one, "cpu")
    assert tuple(pools.layer(3).shape) == (6, 1, *inner)
    assert (pools.bytes_primary * 2, one.groups[1].bytes_per_block * 2) == (
        PoolSizes(both, "cpu").primary,
        both.groups[1].bytes_per_block,
    )
    pools.layer(3)[2] = 1.0
    slots = np.array([2], np.int32), np.array([4], np.int32)
    assert pools.copier().submit([Copy(0, 0, *slots, group=1, num_tokens=3)]).done()
    copied = pools.layer(3)[4, 0].transpose(0, 1) if kv_layout == "HND" else pools.layer(3)[4, 0]
    assert copied.float().sum(dim=(1, 2)).tolist() == [8, 8, 8, 0]


def test_the_pools_copier_moves_blocks_between_the_levels() -> None:
    """The copier that the pools make reaches the tensors of every pool of the group."""
    pools = Pools(layout(dtype="float32"), "cpu")
    for pool in pools.groups[1]:
        pool.primary[2] = 3.0
    slots = np.array([2], np.int32), np.array([4], np.int32)
    assert pools.copier().submit([Copy(0, 1, *slots, group=1)]).done()
    assert [float(pool.secondary[4].min()) for pool in pools.groups[1]] == [3.0, 3.0]
    assert all(float(pool.secondary.max()) == 0.0 for pool in pools.groups[0])


@pytest.mark.parametrize("secondary", [0, 5])
def test_too_large_a_cache_is_refused_before_it_is_allocated(
    monkeypatch: pytest.MonkeyPatch, secondary: int
) -> None:
    """One byte too few is refused with both numbers and the settings; exactly enough is fine."""
    wanted = layout(secondary_blocks=secondary)
    needed = sum(sum(group.num_blocks) * group.bytes_per_block for group in wanted.groups)
    monkeypatch.setattr(pools_module, "free_bytes", lambda: needed)
    Pools(wanted, "cpu")
    monkeypatch.setattr(pools_module, "free_bytes", lambda: needed - 1)
    monkeypatch.setattr(pools_module, "KVCacheBlockPool", lambda *_: pytest.fail("allocated"))
    with pytest.raises(NotEnoughMemory, match=f"{needed:,} bytes of host memory") as caught:
        Pools(wanted, "cpu")
    assert (caught.value.needed, caught.value.free) == (needed, needed - 1)
    assert "primary_blocks" in str(caught.value)
    assert ("secondary_blocks" in str(caught.value)) == bool(secondary)


def test_a_cache_beyond_this_machine_s_memory_is_refused() -> None:
    """The real amount of free memory is asked for, not only a stand-in."""
    with pytest.raises(NotEnoughMemory):
        Pools(layout(primary_blocks=(1 << 31) - 1, head_dim=1024), "cpu")


def test_other_devices_are_refused() -> None:
    """A device that is neither the host nor CUDA is named in the refusal."""
    with pytest.raises(Unsupported, match="meta"):
        Pools(layout(), "meta")


def test_sizes_are_known_before_anything_is_allocated() -> None:
    """The sizes tell the bytes of both levels, and the device."""
    sizes = PoolSizes(layout(), "cpu")
    assert (sizes.primary, sizes.secondary, sizes.device.type) == (4608, 3840, "cpu")


def test_pools_say_which_extra_they_need() -> None:
    """Without torch the import fails with the name of the extra."""
    code = "import sys; sys.modules['torch'] = None\nimport kvcache.pools"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "install kvcache[torch]" in result.stderr


def test_pools_of_another_layout_are_refused() -> None:
    """Slots of the config's numbers would lie outside of these tensors."""
    config = KVCacheConfig(max_sequence_length=64, tokens_per_block=4, primary_blocks=8, secondary_blocks=8)
    other = config.model_copy(update={"primary_blocks": 4})
    with pytest.raises(UsageError, match="do not match the layout of config"):
        KVCacheManager(config, pools=Pools(Layout.of(other), device="cpu"))


class TestOneManagerAtATime:
    """Two managers would write the same tensors."""

    @pytest.fixture
    def config(self) -> KVCacheConfig:
        return KVCacheConfig(max_sequence_length=64, tokens_per_block=4, primary_blocks=8)

    @pytest.fixture
    def pools(self, config: KVCacheConfig) -> Pools:
        return Pools(Layout.of(config), device="cpu")

    def test_a_second_one_waits_for_the_first_to_close(
        self, config: KVCacheConfig, pools: Pools, tmp_path: Path
    ) -> None:
        """While the first manager is not closed, another one is refused before it opens anything; then it works."""
        with KVCacheManager(config, pools=pools):
            with pytest.raises(UsageError, match="close it first, or allocate other pools"):
                KVCacheManager(config, pools=pools, log=tmp_path / "log")
            assert list(tmp_path.iterdir()) == []
        with KVCacheManager(config, pools=pools) as second:
            second.add_sequence("a", [1])

    def test_closing_twice_takes_them_from_nobody(self, config: KVCacheConfig, pools: Pools) -> None:
        """The pools of the second manager stay its own if the first is closed once more."""
        first = KVCacheManager(config, pools=pools)
        first.close()
        second = KVCacheManager(config, pools=pools)
        first.close()
        pools.release(first)
        with pytest.raises(UsageError, match="still belong to another manager"):
            KVCacheManager(config, pools=pools)
        second.close()

    def test_who_cannot_be_made_does_not_keep_them(self, config: KVCacheConfig, pools: Pools) -> None:
        """A constructor that fails leaves the pools to the next, also while its error is looked at."""
        with pytest.raises(UsageError) as raised:
            KVCacheManager(config, pools=pools, substitutes=Substitutes(wall_ns=iter([1.5, 2.5]).__next__))  # type: ignore[arg-type]
        with pytest.raises(SinkURLError):
            KVCacheManager(config, pools=pools, sinks=["nonsense:"])
        KVCacheManager(config, pools=pools).close()
        assert raised.value.__traceback__ is not None

    def test_who_is_made_meanwhile_has_them(
        self, config: KVCacheConfig, pools: Pools, tmp_path: Path
    ) -> None:
        """Of two managers made at the same time one gets the pools, and the other one closes what it has opened."""
        others: list[KVCacheManager] = []

        def make_another() -> int:
            others.append(KVCacheManager(config, pools=pools))
            return 0

        with pytest.raises(UsageError, match="still belong to another manager"):
            KVCacheManager(
                config, pools=pools, log=tmp_path / "log", substitutes=Substitutes(wall_ns=make_another)
            )
        LogWriter(tmp_path / "log", resume=True).close()
        others[0].add_sequence("a", [1])

    def test_who_is_forgotten_does_not_keep_them(self, config: KVCacheConfig, pools: Pools) -> None:
        """A manager that was never closed, and that nothing refers to any more, is no obstacle."""
        manager = KVCacheManager(config, pools=pools)
        manager.add_sequence("a", [1, 2, 3])
        del manager
        gc.collect()
        KVCacheManager(config, pools=pools).close()

    def test_who_failed_gives_them_back_when_its_copies_are_over(
        self, config: KVCacheConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Closing a poisoned manager waits for what it has started, and then leaves the pools to the next."""
        config = config.model_copy(update={"secondary_blocks": 8})
        pools = Pools(Layout.of(config), device="cpu")
        copier = LateCopier(pools.copier(), 3)
        manager = KVCacheManager(config, pools=pools, copier=copier)
        manager.add_sequence("a", [1] * 32)
        manager.store_context_blocks("a", 32)
        manager.remove_sequence("a")
        manager.add_sequence("b", [2] * 32)
        manager.start_transfers()
        assert copier.waiting
        monkeypatch.setattr(blocks_of(manager).housekeeping, "clear", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            manager.clear()
        with pytest.raises(UsageError, match="still belong to another manager"):
            KVCacheManager(config, pools=pools)
        manager.close()
        assert not copier.waiting
        KVCacheManager(config, pools=pools).close()


def test_pools_are_made_of_a_layout_on_a_device_that_is_there() -> None:
    """A config instead of its layout, or a device that torch does not know, gets an error that says what to do."""
    config = KVCacheConfig(max_sequence_length=64, tokens_per_block=4, primary_blocks=8)
    with pytest.raises(UsageError, match=r"pass Layout\.of\(config\)"):
        Pools(config)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="'cpu', 'cuda'"):
        Pools(Layout.of(config), device="gpu")


@pytest.mark.parametrize("copier", ["auto", "torch", "dma"])
def test_what_copies_is_a_setting(copier: str) -> None:
    """On the host there are torch's copies only, and another copier is refused by name."""
    config = KVCacheConfig.model_validate(
        {"max_sequence_length": 64, "tokens_per_block": 4, "primary_blocks": 8, "copier": copier}
    )
    pools = Pools(Layout.of(config), "cpu", config=config)
    if copier == "dma":
        with pytest.raises(Unsupported, match=r"copier=dma \(.*primary is on the cpu\).*auto or torch"):
            pools.copier()
    else:
        assert isinstance(pools.copier(), TorchCopier)
