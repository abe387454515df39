"""Sizes of the windows: bytes divided over them, windows cut to what their blocks hold, blocks of one sequence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from events.types import CacheCreated
from kvcache import pools as pools_module
from kvcache.config import PRIMARY_LIMITS, KVCacheConfig
from kvcache.errors import ConfigError
from kvcache.layout import CutWindow, Layout, with_primary_blocks
from kvcache.manager import KVCacheManager
from kvcache.pools import Pools, sized
from kvcache.replay import replay
from kvcache.sizes import blocks_at_most, shares_of

BLOCK = 1024
"""Bytes of a block of one layer: 16 tokens × K and V × 1 head × 16 dims × 2 bytes."""


def config(**settings: Any) -> KVCacheConfig:
    """A cache of two layers with windows of 64 and 256 tokens, but for the settings given."""
    defaults: dict[str, Any] = {
        "max_sequence_length": 256,
        "tokens_per_block": 16,
        "num_kv_heads": 1,
        "head_dim": 16,
        "max_attention_window": (64, 256),
    }
    return KVCacheConfig(**(defaults | settings))


def counts(**settings: Any) -> list[tuple[int, int]]:
    return [group.num_blocks for group in Layout.of(config(**settings)).groups]


def refusal(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Layout.of(config(**settings))
    (line,) = caught.value.problems
    return line


class TestWindowShares:
    def test_shares_by_window(self) -> None:
        """With shares by window each holds tokens in proportion to its length, whatever its tokens take."""
        (small, large) = counts(primary_bytes=100 * BLOCK, window_shares="window", num_kv_heads=(3, 1))
        # Weights 64 × 3 and 256 × 1: 192/448 and 256/448 of 102400 bytes, in blocks of 3072 and 1024 bytes.
        assert (small[0], large[0]) == (14, 57)

    def test_equal_shares_are_equal_bytes(self) -> None:
        """Where nothing is said each window gets as many bytes as the others, hence fewer blocks of larger ones."""
        given = {"num_kv_heads": (3, 1), "primary_bytes": 96 * BLOCK, "host_cache_size": 13 * BLOCK}
        assert counts(**given) == [(16, 2), (48, 6)]

    def test_given_shares(self) -> None:
        """Numbers are proportions; a decimal one counts as it is written, to the last byte."""
        for shares in ((7, 3), (0.7, 0.3), (1.4, 0.6)):
            assert counts(primary_bytes=40 * BLOCK, host_cache_size=10 * BLOCK, window_shares=shares) == [
                (28, 7),
                (12, 3),
            ]
        assert shares_of((0.1, 0.9)) == shares_of((1, 9))

    @pytest.mark.parametrize(
        ("limits", "primary"),
        [
            ({"primary_bytes": 20 * BLOCK, "primary_blocks": 7}, (5, 7)),
            ({"primary_bytes": 20 * BLOCK, "max_tokens": 16 * 9}, (5, 9)),
            ({"primary_bytes": 20 * BLOCK, "primary_blocks": (6, 4)}, (5, 4)),
            ({"primary_blocks": (6, 4), "max_tokens": 16 * 5}, (5, 4)),
        ],
    )
    def test_the_smallest_limit_wins_in_each_window(
        self, limits: dict[str, Any], primary: tuple[int, int]
    ) -> None:
        """Of several limits each window has the smallest, which need not be the same one."""
        found = counts(**limits, window_shares=(1, 3), max_attention_window=(16, 64), max_sequence_length=64)
        assert tuple(level[0] for level in found) == primary

    def test_too_few_bytes_for_a_window(self) -> None:
        """Bytes that give some window no block are refused with that window and what would do."""
        line = refusal(primary_bytes=4 * BLOCK - 1, window_shares=(1, 3))
        assert line == (
            f"primary_bytes: given {4 * BLOCK - 1}; accepted: at least {4 * BLOCK} bytes, "
            f"since one block of window 64 has {BLOCK} (windows are cut to the capacity of their blocks)"
        )
        assert counts(primary_bytes=4 * BLOCK, window_shares=(1, 3))[0] == (1, 0)
        line = refusal(primary_blocks=16, host_cache_size=5 * BLOCK, num_kv_heads=(1, 3))
        assert "0, or at least 6144 bytes, since one block of window 256 has 3072" in line
        assert counts(primary_blocks=16, host_cache_size=6 * BLOCK, num_kv_heads=(1, 3))[1] == (16, 1)

    def test_block_counts_per_window(self) -> None:
        """A list of block counts has one number per window that there is, cut ones counted once."""
        assert counts(primary_blocks=(5, 20), secondary_blocks=[0, 3]) == [(5, 0), (20, 3)]
        assert counts(primary_blocks=[16], max_attention_window=(256, 999)) == [(16, 0)]
        for name in ("primary_blocks", "secondary_blocks", "window_shares"):
            with pytest.raises(ConfigError) as caught:
                config(**{"primary_blocks": 4, name: (1, 2, 3)})
            assert caught.value.problems == (f"{name}: given 3 numbers; accepted: 2 (one per window)",)
        with pytest.raises(ConfigError) as caught:
            config(primary_blocks=(4, 4), max_attention_window=(256, 999))
        (line,) = caught.value.problems
        assert line.endswith("accepted: 1 (one per window, those of at least max_sequence_length being one)")


class TestFreeMemory:
    @pytest.fixture
    def gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A GPU with 100 blocks of free memory, as far as measuring goes."""
        monkeypatch.setattr(pools_module, "_device", lambda _: torch.device("cuda:0"))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100 * BLOCK, 200 * BLOCK))

    @pytest.mark.usefixtures("gpu")
    def test_a_fraction_becomes_block_counts(self) -> None:
        """The measured counts stand for every limit of primary, and give the layout that was measured."""
        measured = sized(config(free_gpu_memory_fraction=0.6, max_tokens=25 * 16, window_shares=(1, 3)))
        assert [getattr(measured, name) for name in PRIMARY_LIMITS] == [(15, 25), None, None, None]
        assert [group.num_blocks[0] for group in Layout.of(measured).groups] == [15, 25]
        assert KVCacheConfig.model_validate_json(measured.model_dump_json()) == measured
        assert sized(config(free_gpu_memory_fraction=0.6)).primary_blocks == 30

    @pytest.mark.usefixtures("gpu")
    def test_too_small_a_fraction(self) -> None:
        """A fraction that gives some window no block is refused with what it comes to."""
        with pytest.raises(ConfigError) as caught:
            sized(config(free_gpu_memory_fraction=0.01))
        assert caught.value.problems == (
            (
                "free_gpu_memory_fraction: given 0.01, which is 1024 of 102400 free bytes; "
                "accepted: at least 2048 bytes, since one block of window 256 has 1024 "
                "(windows are cut to the capacity of their blocks)"
            ),
        )

    def test_on_the_host(self) -> None:
        """Where there is no GPU the error says what to give instead; other settings need none."""
        with pytest.raises(
            ConfigError, match=r"0\.5 for a cache on cpu; accepted: primary_blocks, max_tokens"
        ):
            sized(config(free_gpu_memory_fraction=0.5), "cpu")
        assert sized(config(primary_bytes=9 * BLOCK), "cpu") == config(primary_bytes=9 * BLOCK)

    def test_not_measured(self) -> None:
        """A layout or a manager cannot be made of a fraction that nobody has measured."""
        with pytest.raises(ConfigError, match=r"what kvcache\.pools\.sized\(config\) returns"):
            Layout.of(config(free_gpu_memory_fraction=0.5))
        with pytest.raises(ConfigError, match="primary_blocks, max_tokens or primary_bytes instead"):
            KVCacheManager(config(free_gpu_memory_fraction=0.5))

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_on_a_gpu(self) -> None:
        """Pools of a fraction of what is free take no more than that."""
        free = torch.cuda.mem_get_info()[0]
        pools = Pools(Layout.of(sized(config(free_gpu_memory_fraction=0.01))))
        assert 0.009 * free < pools.bytes_primary <= 0.01 * free


@pytest.mark.parametrize(
    "settings",
    [
        {"primary_bytes": 90 * BLOCK, "host_cache_size": 40 * BLOCK, "window_shares": "window"},
        {"primary_bytes": 9 * BLOCK, "window_shares": (0.3, 0.7)},
        {"primary_blocks": (3, 2)},
        {"free_gpu_memory_fraction": 0.5},
    ],
    ids=str,
)
def test_the_record_describes_the_groups(settings: dict[str, Any], tmp_path: Path) -> None:
    """The recorded settings give the recorded groups, and a manager that resumes has these, too."""
    given = config(**settings)
    if given.free_gpu_memory_fraction is not None:
        given = with_primary_blocks(given, 100 * BLOCK)
    with KVCacheManager(given, log=tmp_path) as manager:
        manager.add_sequence("a", [1, 2, 3])
    state = replay(tmp_path).state
    assert isinstance(state.created, CacheCreated)
    recorded = KVCacheConfig.model_validate_json(state.created.config)
    groups = tuple(group.group_created() for group in Layout.of(recorded).groups)
    assert groups == state.created.groups
    assert json.loads(state.created.config)["free_gpu_memory_fraction"] is None
    assert KVCacheManager.resume(state).layout == manager.layout


class TestCutWindows:
    @pytest.mark.parametrize(
        ("blocks", "reported", "longest"), [(5, [], 256), (4, [("window_full", 64, 64)], 64)]
    )
    def test_enough_blocks_cut_nothing(
        self, blocks: int, reported: list[tuple[str, int, int]], longest: int
    ) -> None:
        """Where each window fits, to the token, none is cut; one that has no block more cannot slide, and says so."""
        with structlog.testing.capture_logs() as logs:
            manager = KVCacheManager(config(primary_blocks=(blocks, 16)))
        assert [(each["event"], each["window"], each["max_tokens"]) for each in logs] == reported
        assert manager.max_tokens == longest
        assert [(group.window, group.kind) for group in manager.layout.groups] == [
            (64, "sliding"),
            (256, "full"),
        ]
        assert manager.layout.cut_windows == ()

    def test_a_cut_window_is_reported_as_it_was_given(self) -> None:
        """Also where `max_sequence_length` had cut it already."""
        layout = Layout.of(config(max_attention_window=(64, 1 << 20), primary_blocks=(5, 9)))
        assert layout.cut_windows == (CutWindow(1 << 20, 144),)

    @pytest.mark.parametrize(
        ("windows", "blocks", "groups", "cut"),
        [
            # Both are cut, each to its own blocks.
            ((96, 256), (2, 9), [(32, "sliding", 2), (144, "full", 9)], [(96, 32), (256, 144)]),
            # Two sliding ones are cut to the same.
            (
                (96, 128, 256),
                (4, 4, 16),
                [(64, "sliding", 4), (256, "full", 16)],
                [(96, 64), (128, 64)],
            ),
            # One is cut to another, which has more blocks.
            ((64, 128, 256), (9, 4, 16), [(64, "sliding", 4), (256, "full", 16)], [(128, 64)]),
            # A sliding one is as wide as what is left of the full one, or wider, and never slides.
            ((64, 256), (9, 4), [(64, "full", 4)], [(256, 64)]),
            ((96, 256), (9, 4), [(64, "full", 4)], [(96, 64), (256, 64)]),
            ((96, 256), (4, 4), [(64, "full", 4)], [(96, 64), (256, 64)]),
            # No layer attends to everything.
            ((32, 128), (2, 4), [(32, "sliding", 2), (64, "sliding", 4)], [(128, 64)]),
        ],
    )
    def test_windows_that_are_cut_to_one(
        self,
        windows: tuple[int, ...],
        blocks: tuple[int, ...],
        groups: list[tuple[int, str, int]],
        cut: list[tuple[int, int]],
    ) -> None:
        """Windows stay different and ascending: those that are cut to one length are one group, with fewest blocks."""
        layout = Layout.of(
            config(max_attention_window=windows, num_layers=len(windows), primary_blocks=blocks)
        )
        assert [(each.window, each.kind, each.num_blocks[0]) for each in layout.groups] == groups
        assert layout.cut_windows == tuple(CutWindow(*each) for each in cut)
        assert sorted(layer for each in layout.groups for layer in each.layers) == list(range(len(windows)))

    def test_merged_groups_have_all_pools(self) -> None:
        """Layers of windows that became one are in its pools, ascending, and tables are asked for by its window."""
        settings = config(num_layers=4, num_kv_heads=(1, 1, 2, 1), primary_blocks=3, secondary_blocks=(5, 2))
        (group,) = Layout.of(settings).groups
        assert [(pool.num_kv_heads, pool.layers) for pool in group.pools] == [(1, (0, 1, 3)), (2, (2,))]
        assert (group.window, group.num_blocks) == (48, (3, 2))
        manager = KVCacheManager(settings)
        manager.add_sequence("a", [1] * 20)
        assert manager.block_table("a", 48).tolist() == [0, 1]

    def test_content_id_ignores_what_a_full_window_is_cut_to(self) -> None:
        """A full group's blocks mean the same in a small cache; those of a sliding window that was cut do not."""
        ids = [Layout.of(config(primary_blocks=blocks)).content_id for blocks in (16, 5, (4, 16), (2, 16))]
        assert ids[0] == ids[1] == ids[2] != ids[3]


class TestBlocksAtMost:
    @pytest.mark.parametrize("size", [1, 2, 4, 8])
    def test_it_is_what_sliding_takes(self, size: int) -> None:
        """It is the most blocks that a sequence holds which lets go, after each token, of those its window has left."""
        for window in range(1, 20):
            left = most = 0
            for tokens in range(1, 60):
                most = max(most, -(-tokens // size) - left)  # the new token's block is taken first
                while tokens - left * size >= window + size:
                    left += 1
                assert blocks_at_most(tokens, window, size) >= most
            assert most == blocks_at_most(59, window, size)
