"""The prefix index, case by case: what routers rely on, what goes wrong, and what is saved."""

from __future__ import annotations

import hashlib
import os
import random
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from events.formats.vllm import AllBlocksCleared, BlockRemoved, BlockStored, VLLMBatch, VLLMEvent
from events.subscribe.continuity import Missed, Received, Restarted, Restated
from kvcache import PrefixIndex
from kvcache.errors import (
    InvalidTokens,
    SnapshotError,
    Unsupported,
)
from kvcache.prefixes.index import Overlap
from kvcache.prefixes.publisher import RANKS_MAX, WorkerRank
from kvcache.prefixes.tree import RUN_BLOCKS_MAX
from tests.support.feeds.prefix_streams import Honest, Liar
from tests.support.seeds import seeds
from tests.support.work import lines_run

HEADER = struct.Struct("<8sIQ32s")


def stored(names: Any, parent: Any = None, first: int = 0, **fields: Any) -> BlockStored:
    """Blocks of two tokens that count up from the first name's place."""
    names = tuple(names)
    tokens = tuple(range(2 * first, 2 * first + 2 * len(names)))
    return BlockStored(names, parent, fields.pop("tokens", tokens), 2, **fields)


def reported(*events: VLLMEvent, worker: Any = "a", index: PrefixIndex | None = None) -> PrefixIndex:
    index = PrefixIndex() if index is None else index
    index.apply(worker, VLLMBatch(0.0, events, 0))
    index.check()
    return index


def overlap(index: PrefixIndex, tokens: int = 20, worker: Any = "a", **scope: Any) -> tuple[int, int, int]:
    return index.match(list(range(tokens)), **scope).get(WorkerRank(worker, 0), (0, 0, 0))


class TestOverlap:
    def test_levels_count_from_the_fastest_on(self) -> None:
        """Blocks in host memory go on where those in GPU memory end, and those elsewhere behind them."""
        index = reported(
            stored([1, 2], medium="GPU"), stored([3], 2, 2, medium="CPU"), stored([4], 3, 3, medium="DISK")
        )
        assert overlap(index) == Overlap(4, 6, 8)
        assert index.match_hashes([1, 2, 3, 4]) == {("a", 0): Overlap(2, 3, 4)}
        assert index.resident("a") == (2, 1, 1)

    def test_a_notice_without_tokens_counts_where_the_name_is_known(self) -> None:
        """A block that is offloaded by a notice of its hash alone stays when its GPU copy is removed."""
        index = reported(
            stored([1, 2]), BlockStored((2,), None, (), 0, medium="CPU"), BlockRemoved((2,), "GPU")
        )
        assert overlap(index) == Overlap(2, 4, 4)
        index = reported(BlockStored((2,), None, (), 0, medium="CPU"))
        assert overlap(index) == (0, 0, 0)
        assert index.match_hashes([2]) == {("a", 0): Overlap(0, 1, 1)}
        assert overlap(reported(stored([1, 2]), index=index)) == Overlap(4, 4, 4)
        assert overlap(reported(BlockRemoved((2,), "GPU"), index=index)) == Overlap(2, 4, 4)

    def test_a_removed_middle_comes_back_with_all_after_it(self) -> None:
        """What stands behind a removed block is known still, and is reused when that block is computed again."""
        index = reported(stored([1, 2, 3, 4]), BlockRemoved((2,), "GPU"))
        assert overlap(index) == Overlap(2, 2, 2)
        assert overlap(reported(stored([2], 1, 1), index=index)) == Overlap(8, 8, 8)

    def test_adapter_salt_and_other_keys_keep_prompts_apart(self) -> None:
        """A prompt finds what was stored for its adapter, salt and images, and nothing else."""
        index = reported(
            stored([1]),
            stored([2], lora_name="style", extra_keys=(("style",),)),
            stored([3], lora_id=7),
            stored([4], extra_keys=(("pepper",),)),
            stored([5, 6], extra_keys=(None, (["img", 3],)), cache_salt="tenant"),
            stored([7], tokens=(0, 5), lora_name="style", extra_keys=(("style", "pepper"),)),
        )
        whole = Overlap(2, 2, 2)
        assert overlap(index) == overlap(index, lora="style") == overlap(index, lora=7) == whole
        assert overlap(index, salt="pepper") == overlap(index, salt="tenant") == whole
        assert overlap(index, salt="tenant", extra_keys=[None, [("img", 3)]]) == Overlap(4, 4, 4)
        assert overlap(index, salt="other") == overlap(index, lora="other") == (0, 0, 0)
        assert index.match([0, 5], lora="style", salt="pepper") == {("a", 0): whole}
        assert index.match([0, 5], salt="pepper") == {}

    def test_every_group_must_serve_the_prefix(self) -> None:
        """A window needs what it sees of the prefix; groups may have blocks of different sizes."""
        window: Any = {
            "group_idx": 1,
            "kv_cache_spec_kind": "sliding_window",
            "kv_cache_spec_sliding_window": 4,
        }
        index = reported(stored(range(1, 9)), stored(range(1, 9), **window))
        assert overlap(index) == Overlap(16, 16, 16)
        # The tokens from 13 on are seen from behind the last one, and lie in the last two blocks.
        reported(BlockRemoved((1, 2, 3, 4, 5, 6), "GPU", 1), index=index)
        assert overlap(index) == Overlap(16, 16, 16)
        assert overlap(index, 14) == (0, 0, 0)
        reported(BlockRemoved((8,), "GPU", 1), index=index)
        assert overlap(index) == (0, 0, 0)
        big = BlockStored((50, 51), None, tuple(range(8)), 4, group_idx=2, kv_cache_spec_kind="mla_attention")
        index = reported(stored(range(1, 9)), big)
        assert overlap(index) == Overlap(8, 8, 8)
        assert overlap(index, 7) == Overlap(4, 4, 4)

    def test_groups_of_unknown_kinds_are_counted_and_left_out(self) -> None:
        """They say nothing about the others; a group that turns out to be such a one is left out from then on."""
        mamba = stored([5], group_idx=1, kv_cache_spec_kind="mamba")
        index = reported(stored([1]), mamba, BlockRemoved((5,), "GPU", 1), stored([5], group_idx=10**18))
        assert overlap(index) == Overlap(2, 2, 2)
        assert index.counts("a").ignored_events == 3
        reported(stored([9], kv_cache_spec_kind="mamba"), index=index)
        assert index.resident("a") == (0, 0, 0)

    def test_ranks_are_publishers_of_their_own(self) -> None:
        """Each rank of a worker has its own cache; a batch that names none is of rank 0 unless it is said."""
        index = PrefixIndex()
        index.apply("a", VLLMBatch(0.0, (stored([1]),), 1))
        index.apply("a", VLLMBatch(0.0, (stored([1, 2]),), None))
        index.apply("a", VLLMBatch(0.0, (stored([1, 2, 3]),), 1), rank=5)
        assert {rank: found.primary for (_, rank), found in index.match(range(6)).items()} == {
            0: 4,
            1: 2,
            5: 6,
        }
        index.apply("a", VLLMBatch(0.0, (AllBlocksCleared(),), 1))
        assert index.match(range(6)).keys() == {("a", 0), ("a", 5)}

    def test_tokens_come_in_many_forms(self) -> None:
        """Lists, arrays and packed bytes; what is no token id is refused without being repeated."""
        index = reported(stored([1, 2]))
        packed = np.arange(5, dtype=np.int32)
        whole = {("a", 0): Overlap(4, 4, 4)}
        assert index.match(packed) == index.match(packed.tobytes()) == index.match(tuple(range(5))) == whole
        with pytest.raises(InvalidTokens) as caught:
            index.match([0, -77])
        assert "77" not in str(caught.value)

    def test_prompts_that_are_longer_than_a_run_are_followed(self) -> None:
        """Many blocks in one event and one by one, and a branch in the middle of each run."""
        count = 3 * RUN_BLOCKS_MAX + 7
        index = reported(stored(range(count)))
        for name in range(count):
            index.apply("b", VLLMBatch(0.0, (stored([-name - 1], -name if name else None, name),), 0))
        for at in range(100, count, 300):
            reported(stored([10**6 + at], at - 1, tokens=(-1, -1)), worker="a", index=index)
        assert index.match(range(2 * count)) == {(worker, 0): (2 * count,) * 3 for worker in "ab"}
        reported(BlockRemoved(tuple(range(count))[::-1], "GPU"), index=index)
        assert index.match(range(2 * count)).keys() == {("b", 0)}


class TestPublishersThatErr:
    def test_nobody_else_is_harmed(self) -> None:
        """Equal hashes of other contents, repeats and removals of another publisher's blocks change nothing for him."""
        index = reported(stored([1, 2, 3]), worker="good")
        rng = random.Random(5)
        liar = Liar(rng)
        for _ in range(500):
            reported(liar.event(), worker="bad", index=index)
            assert overlap(index, worker="good") == Overlap(6, 6, 6)
        assert index.match_hashes([1, 2, 3])[WorkerRank("good", 0)] == Overlap(3, 3, 3)

    def test_a_parent_that_is_not_known_is_no_start_of_a_prompt(self) -> None:
        """Such blocks are known by their hashes, and by their tokens when they are stored again."""
        index = reported(stored([1, 2], 99))
        assert (overlap(index), index.counts("a").orphans) == ((0, 0, 0), 1)
        assert index.match_hashes([1, 2]) == {("a", 0): Overlap(2, 2, 2)}
        reported(BlockRemoved((2, 1), "GPU"), index=index)
        assert index.counts("a").unknown_removals == 0
        assert overlap(reported(stored([1, 2]), index=index)) == Overlap(4, 4, 4)

    def test_tokens_that_do_not_fit_the_hashes(self) -> None:
        """Too few leave the last blocks without contents; with too many, or in a window, none has any."""
        short, long = stored([1, 2, 3], tokens=(0, 1, 2, 3, 4)), stored([1, 2], tokens=(0, 1, 2, 3, 4))
        assert overlap(reported(short)) == Overlap(4, 4, 4)
        assert overlap(reported(long)) == (0, 0, 0)
        window: Any = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 4}
        assert overlap(reported(stored([1, 2, 3], tokens=(0, 1, 2, 3), **window))) == (0, 0, 0)
        assert overlap(reported(stored([1, 2], tokens=((0, 1), (1, 2), (2, 3), (3, 4))))) == (0, 0, 0)
        assert overlap(reported(stored([1], tokens=(0, 2**31)))) == (0, 0, 0)

    def test_a_hash_that_comes_twice_means_what_it_meant_last(self) -> None:
        """Of one event neither is believed; of two the newer. A block may have two hashes, and stays with either."""
        index = reported(stored([1, 1]))
        assert (overlap(index), index.counts("a").contradictions) == ((0, 0, 0), 1)
        index = reported(stored([1]), stored([1], tokens=(7, 7)))
        assert (overlap(index), index.match([7, 7])) == ((0, 0, 0), {("a", 0): Overlap(2, 2, 2)})
        index = reported(stored([1]), stored([2]), BlockRemoved((1,), "GPU"))
        assert (overlap(index), index.counts("a").aliases) == (Overlap(2, 2, 2), 1)
        assert overlap(reported(BlockRemoved((2,), "GPU"), index=index)) == (0, 0, 0)

    def test_names_of_one_content_cost_the_same_however_many_there_are(self, tmp_path: Path) -> None:
        """Each is stored, matched, saved and removed; four times as many are four times the work."""

        def work(count: int) -> int:
            index = PrefixIndex()
            events: list[VLLMEvent] = [stored([name]) for name in range(count)]
            events += [BlockRemoved((name,), "GPU") for name in range(count)]
            batches = [VLLMBatch(0.0, (event,), 0) for event in events]

            def run() -> None:
                for batch in batches:
                    index.apply("a", batch)
                    index.match([0, 1])

            return lines_run(run)

        assert work(400) < 5 * work(100)
        index = reported(
            stored([1, 2, 3]),
            *(stored([10 * name, 10 * name + 1]) for name in range(1, 30)),
            *(stored([5, 6 + name], medium="CPU") for name in (0, 1)),
        )
        index.save(tmp_path / "i")
        loaded = PrefixIndex.load(tmp_path / "i")
        for each in (index, loaded):
            # A prompt that leaves it after a block cuts the run, and its second names with it.
            reported(stored([4], 1, 1, tokens=(7, 7)), index=each)
            reported(BlockRemoved((1, 2, 3), "GPU"), index=each)
            assert (overlap(each), each.match_hashes([290, 291])) == ((4, 4, 4), {("a", 0): Overlap(2, 2, 2)})
            reported(*(BlockRemoved((10 * name, 10 * name + 1), "GPU") for name in range(1, 30)), index=each)
            assert overlap(each) == (0, 4, 4)

    @pytest.mark.parametrize("name", [1, 2])
    def test_what_follows_a_name_whose_block_is_gone(self, name: int) -> None:
        """Behind the first name of a block it is known what it holds; behind a second one, which is forgotten, not."""
        index = reported(stored([1]), stored([2]), stored([3], name, 1), BlockRemoved((name,), "GPU"))
        index = reported(stored([4], name, 1, tokens=(9, 9)), index=index)
        index.check()
        assert index.counts("a").orphans == (name == 2)

    def test_ranks_that_nobody_has_are_ignored(self) -> None:
        """And counted: each would be a publisher that is remembered."""
        index = PrefixIndex()
        for rank in (0, RANKS_MAX - 1, RANKS_MAX, 10**9, -1):
            index.apply("a", VLLMBatch(0.0, (stored([1]),), rank))
        assert [each.rank for each in index.publishers] == [0, RANKS_MAX - 1]
        assert index.ignored_batches == 3
        index.apply("a", VLLMBatch(0.0, (), 0), rank=RANKS_MAX)
        assert index.ignored_batches == 4

    def test_a_block_that_is_its_own_parent_makes_no_loop(self) -> None:
        """Nor do two that are each other's."""
        index = reported(stored([1]), stored([1], 1, 1), stored([2], 1, 1), stored([1], 2, 2))
        index.check()
        assert overlap(index) == (0, 0, 0)

    def test_nothing_is_kept_of_what_has_gone(self, tmp_path: Path) -> None:
        """After everything was removed there is nothing left, however it was told."""
        rng = random.Random(3)
        index, names = PrefixIndex(), set()
        sources: list[Any] = [Honest(rng, 3, 0), Liar(rng)]
        for _ in range(300):
            event = rng.choice(sources).event()
            reported(event, index=index)
            names |= set(getattr(event, "block_hashes", ()))
        for group in range(4):
            for medium in ("GPU", "CPU", "DISK"):
                reported(BlockRemoved(tuple(names), medium, group), index=index)
        assert index.resident("a") == (0, 0, 0)
        index.check()  # Names without blocks are against its laws.
        index.save(tmp_path / "index")
        sources, runs = msgspec.msgpack.decode((tmp_path / "index").read_bytes()[HEADER.size :])
        [(*_, holders)] = sources
        assert runs == []
        assert [unresolved for _, unresolved, _ in holders] == [[]] * len(holders)


class TestReports:
    def test_reports_of_a_subscriber_are_taken_in(self) -> None:
        """What is missed is counted, who starts anew has nothing any more, and who tells all again is believed."""
        index = PrefixIndex()
        index.fold("a", Received(0, "", VLLMBatch(0.0, (stored([1]),), 0), False))
        index.fold("a", Missed(1, 3, recovered=False))
        index.fold("a", Missed(4, 4, recovered=True))
        index.fold("a", Restated(5, 6))
        counts = index.counts("a")
        assert (counts.missed_batches, counts.recovered_batches, counts.restated) == (3, 1, 1)
        assert overlap(index) == Overlap(2, 2, 2)
        index.fold("a", Restarted(6, 0))
        assert (overlap(index), index.counts("a").restarts) == ((0, 0, 0), 1)
        index.fold("b", Restarted(6, 0), rank=2)
        assert index.publishers == [("a", 0), ("b", 2)]

    def test_workers_are_forgotten(self) -> None:
        """One rank, all ranks, or everything; what others have stays."""
        index = PrefixIndex()
        for worker, rank in [("a", 0), ("a", 1), ("b", 0)]:
            index.apply(worker, VLLMBatch(0.0, (stored([1, 2]),), rank))
        index.remove_worker("a", 1)
        index.check()
        assert index.publishers == [("a", 0), ("b", 0)]
        index.remove_worker("a")
        index.remove_worker("nobody")
        index.check()
        assert index.match(range(4)) == {("b", 0): Overlap(4, 4, 4)}
        index.clear()
        index.check()
        assert (index.match(range(4)), index.publishers) == ({}, [])


class TestSnapshots:
    @pytest.fixture
    def index(self) -> PrefixIndex:
        index = reported(stored([1, 2, 3]), stored([4], 1, 5), BlockStored((9,), None, (), 0, medium="CPU"))
        reported(
            stored([b"x"], extra_keys=(("salt",),)), stored([2**64 - 1]), worker=("pod", 7, None), index=index
        )
        return index

    def test_what_is_loaded_goes_on(self, index: PrefixIndex, tmp_path: Path) -> None:
        """Answers, counters and later events are those of the index that was saved."""
        index.save(tmp_path / "index")
        again = PrefixIndex.load(tmp_path / "index")
        again.check()
        assert again.counts("a") == index.counts("a")
        for each in (index, again):
            reported(stored([5], 3, 3), BlockRemoved((9,), "CPU"), index=each)
        assert again.match(range(20)) == index.match(range(20)) != {}
        assert again.match_hashes([b"x"]) == index.match_hashes([b"x"]) != {}
        assert again.publishers == index.publishers
        assert [path.name for path in tmp_path.iterdir()] == ["index"]

    def test_a_save_that_fails_leaves_the_file_that_was_there(
        self, index: PrefixIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A full disk, or a worker whose id cannot be written: the older snapshot stays, and nothing else is left."""
        index.save(tmp_path / "index")
        before = (tmp_path / "index").read_bytes()
        reported(stored([1]), worker=frozenset(), index=index)
        with pytest.raises(Unsupported, match="frozenset"):
            index.save(tmp_path / "index")
        index.remove_worker(frozenset())

        def full(*_: object) -> None:
            raise OSError(28, os.strerror(28))

        monkeypatch.setattr("events.log.durable.write_all", full)
        with pytest.raises(OSError, match="No space"):
            index.save(tmp_path / "index")
        assert (tmp_path / "index").read_bytes() == before
        assert [path.name for path in tmp_path.iterdir()] == ["index"]

    def test_several_may_save_at_once(self, index: PrefixIndex, tmp_path: Path) -> None:
        """Each save is whole, and what somebody else has put beside the index stays."""
        path, other = tmp_path / "index", tmp_path / "index.new"
        other.write_text("mine")
        with ThreadPoolExecutor(4) as savers:
            list(savers.map(lambda _: index.save(path), range(100)))
        PrefixIndex.load(path).check()
        assert sorted(tmp_path.iterdir()) == [path, other]
        assert other.read_text() == "mine"

    def test_damage_is_reported(self, index: PrefixIndex, tmp_path: Path) -> None:
        """Any byte that is changed, and any end that is missing, is an error that names the file."""
        path = tmp_path / "index"
        index.save(path)
        content = path.read_bytes()
        for at in range(len(content)):
            path.write_bytes(content[:at] + bytes([content[at] ^ 0x41]) + content[at + 1 :])
            with pytest.raises(SnapshotError, match="index"):
                PrefixIndex.load(path)
            path.write_bytes(content[:at])
            with pytest.raises(SnapshotError, match=r"index is (not a saved prefix index|damaged)"):
                PrefixIndex.load(path)
        path.write_bytes(HEADER.pack(b"kvprefix", 2, 0, b""))
        with pytest.raises(SnapshotError, match="version 2"):
            PrefixIndex.load(path)
        path.write_bytes(b"something else")
        with pytest.raises(SnapshotError, match="not a saved prefix index"):
            PrefixIndex.load(path)

    @pytest.mark.parametrize("seed", seeds(range(6), quick=1))
    def test_a_file_that_lies_is_refused_or_keeps_the_laws(
        self, index: PrefixIndex, tmp_path: Path, seed: int
    ) -> None:
        """Contents that were changed together with their checksum give an index whose laws hold, or a typed error."""
        path = tmp_path / "index"
        index.save(path)
        payload = path.read_bytes()[HEADER.size :]
        rng, refused = random.Random(seed), 0
        for _ in range(500):
            at = rng.randrange(len(payload))
            forged = payload[:at] + bytes([rng.randrange(256)]) + payload[at + 1 :]
            path.write_bytes(
                HEADER.pack(b"kvprefix", 1, len(forged), hashlib.sha256(forged).digest()) + forged
            )
            try:
                PrefixIndex.load(path).check()
            except SnapshotError as error:
                refused += error.problem == "damaged"
        assert refused > 60
