"""Hits by cache size and by timeout: against caches that are played, and against all that any eviction could do."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from events.ids import Handle
from events.log import LogReader, LogWriter
from events.tokens import symbols
from events.types import AnyEvent, CacheCreated, EventBatch, Gap, SequenceAdded
from kvcache import KVCacheConfig, KVCacheManager, MultimodalItem
from kvcache.audit.curve import (
    ENOUGH,
    CurveRecorder,
    EmptySamples,
    HitCurve,
    InconsistentBlocks,
    LoggedPrompts,
    PrefixSums,
    SpanDistances,
    TimeoutCurve,
    best_hits,
    enough_for,
    measure,
)
from kvcache.errors import Unsupported, UsageError
from kvcache.manager import Substitutes
from kvcache.replay import Unreplayable
from kvcache.workload.traces import TracePrompts
from tests.support.prompts import Prompts, numbered, reuses_of, some_prompts
from tests.support.seeds import seeds


def played(prompts: Prompts, size: int) -> int:
    """Hits of a cache that is played block by block."""
    return sum(played_each(prompts, size))


def played_each(prompts: Prompts, size: int) -> list[int]:
    """Hits of each prompt in a cache that evicts leaves: the definition, word by word."""
    cached: dict[int, tuple[int, int, int | None]] = {}
    """Block to last use, depth, parent."""
    hits = list[int]()
    for now, prompt in enumerate(prompts):
        found = 0
        while found < len(prompt) and prompt[found] in cached:
            found += 1
        hits.append(found)
        for depth, block in enumerate(prompt[:size]):
            parent = prompt[depth - 1] if depth else None
            if block not in cached and len(cached) == size:
                parents = {above for _, _, above in cached.values()}
                ahead = set(prompt[:depth])
                leaves = [each for each in cached if each not in parents and each not in ahead]
                victim = min(leaves, key=lambda each: (cached[each][0], -cached[each][1]))
                del cached[victim]
            cached[block] = (now, depth, parent)
        assert len(cached) <= size
    return hits


def best_of_all(prompts: Prompts, size: int) -> int:
    """The most hits that any choice of leaves can have, by trying all of them."""
    parents = {block: prompt[at - 1] if at else None for prompt in prompts for at, block in enumerate(prompt)}

    @cache
    def best(now: int, held: frozenset[int]) -> int:
        if now == len(prompts):
            return 0
        prompt = prompts[now]
        found = 0
        while found < len(prompt) and prompt[found] in held:
            found += 1
        must = frozenset(prompt[:size])
        others = sorted(held - must)
        most = min(len(others), size - len(must))
        # To hold fewer than fit can never be better, but closed sets of just that many may not exist.
        kept = (frozenset(each) | must for count in range(most + 1) for each in combinations(others, count))
        return found + max(
            best(now + 1, after)
            for after in kept
            if all(parents[block] is None or parents[block] in after for block in after)
        )

    return best(0, frozenset())


class TestLRU:
    """The curve of all sizes at once."""

    @pytest.mark.parametrize("seed", seeds(range(300), quick=20))
    def test_equals_a_cache_that_is_played(self, seed: int) -> None:
        """At ten sizes, those that are too small for a prompt among them, hits are those of the definition."""
        random_ = random.Random(seed)
        prompts = some_prompts(random_, random_.randint(1, 40), random_.choice((2, 3, 20)), 12)
        curve = measure(prompts)
        most = curve.distinct_blocks + 3
        assert curve.distinct_blocks == len({block for prompt in prompts for block in prompt})
        sizes = [1, most, *(random_.randint(1, most) for _ in range(8))]
        assert {size: curve.hits(size) for size in sizes} == {size: played(prompts, size) for size in sizes}
        spans = SpanDistances.of(reuses_of(prompts))
        for size in sizes:
            assert spans.hits(size).tolist() == played_each(prompts, size)

    def test_by_hand(self) -> None:
        """Five prompts worked out on paper.

        Order before each (most recent first), and places of the blocks that were there before:
        abc; [abc] abd: a 1, b 2; [abdc] e; [eabdc] abc: a 2, b 3, c 5; [abced] ef: e 4.
        """
        a, b, c, d, e, f = range(6)
        prompts = [[a, b, c], [a, b, d], [e], [a, b, c], [e, f]]
        curve = measure(prompts)
        assert (curve.block_requests, curve.distinct_blocks) == (12, 6)
        assert [curve.hits(size) for size in range(8)] == [0, 1, 3, 4, 5, 6, 6, 6]
        assert curve.hits(10**12) == 6
        assert curve.hit_rate(4) == 5 / 12
        assert curve.by_level(2, 2) == (3, 2)
        assert curve.by_level(2, 0) == (3, 0)
        assert curve.error(4) == 0.0

    @pytest.mark.parametrize("seed", seeds(range(20), quick=2))
    def test_larger_is_never_worse(self, seed: int) -> None:
        """Hits only grow with the size, up to all blocks that were there before."""
        prompts = some_prompts(random.Random(seed), 200, 4, 20)
        curve = measure(prompts)
        hits = [curve.hits(size) for size in range(curve.distinct_blocks + 1)]
        assert hits == sorted(hits)
        assert hits[0] == 0
        assert hits[-1] == curve.block_requests - curve.distinct_blocks

    def test_nothing_to_measure(self) -> None:
        """No prompts, and prompts without blocks, have no hits and no knee."""
        cases: list[Prompts] = [[], [[], []], [[1, 2], [3]]]
        for prompts in cases:
            curve = measure(prompts)
            assert (curve.hits(10), curve.hit_rate(10), curve.knee) == (0, 0.0, None)

    @pytest.mark.parametrize("seed", seeds(range(20), quick=2))
    def test_knee(self, seed: int) -> None:
        """From the knee on no doubling gains a hundredth; one block below some doubling does."""
        curve = measure(some_prompts(random.Random(seed), 400, 6, 20))
        sizes = range(1, curve.distinct_blocks + 1)
        worth = [
            size for size in sizes if curve.hits(2 * size) - curve.hits(size) >= 0.01 * curve.block_requests
        ]
        assert curve.knee == max(worth, default=0) + 1

    def test_knee_by_hand(self) -> None:
        """Eight prompts of one block in turn hit from 8 blocks on: doubling 4, 5, 6 or 7 pays, doubling 8 does not."""
        assert measure([[number % 8] for number in range(80)]).knee == 8
        assert measure([[1]] * 5).knee == 1

    @pytest.mark.parametrize(
        ("prompts", "at"),
        [
            ([[1, 2, 3], [9, 2, 3]], (1, 0)),
            ([[1, 1]], (0, 0)),
            ([[1, 2], [3, 4], [1, 4]], (2, 1)),
        ],
    )
    def test_blocks_that_are_no_tree(self, prompts: Prompts, at: tuple[int, int]) -> None:
        """A number that stands behind two different blocks is refused, and where is said."""
        with pytest.raises(InconsistentBlocks, match="number blocks so that") as caught:
            measure(prompts)
        assert (caught.value.request, caught.value.block) == at

    def test_few_spans(self) -> None:
        """A long prompt that comes again is one span, however many blocks it has."""
        spans = [spans for _, spans in reuses_of([list(range(10_000))] * 3 + [list(range(5_000))]).prompts()]
        assert spans == [[], [(0, 10_000)], [(1, 10_000)], [(2, 5_000)]]

    def test_prefix_sums(self) -> None:
        """Sums are those of the plain row, at each place."""
        random_, row = random.Random(1), [0] * 37
        sums = PrefixSums(37)
        for _ in range(200):
            place, amount = random_.randrange(37), random_.randint(-5, 9)
            row[place] += amount
            sums.add(place, amount)
            assert [sums.through(each) for each in range(37)] == np.cumsum(row).tolist()


class TestBest:
    """The bound."""

    @pytest.mark.parametrize("seed", seeds(range(150), quick=10))
    def test_equals_the_best_of_all_choices(self, seed: int) -> None:
        """On small cases no choice of leaves is better, and one is as good, at each size."""
        random_ = random.Random(seed)
        prompts = some_prompts(random_, random_.randint(2, 8), random_.choice((2, 3)), 4)
        reuses = reuses_of(prompts)
        sizes = range(1, min(reuses.distinct, 7) + 1)
        assert [best_hits(reuses, size) for size in sizes] == [best_of_all(prompts, size) for size in sizes]

    @pytest.mark.parametrize("seed", seeds(range(30), quick=3))
    def test_never_below_lru(self, seed: int) -> None:
        """LRU is one of the choices; without evictions both are the same."""
        prompts = some_prompts(random.Random(seed), 150, 4, 16)
        curve, reuses = measure(prompts), reuses_of(prompts)
        sizes = range(1, curve.distinct_blocks + 2, 3)
        best = [best_hits(reuses, size) for size in sizes]
        assert all(bound >= curve.hits(size) for bound, size in zip(best, sizes, strict=True))
        assert best == sorted(best)
        assert any(bound > curve.hits(size) for bound, size in zip(best, sizes, strict=True))
        assert best_hits(reuses, reuses.distinct) == curve.hits(curve.distinct_blocks)

    def test_by_hand(self) -> None:
        """Three blocks in turn with room for two: LRU never hits, the best keeps one of them every other time."""
        prompts = [[number % 3] for number in range(9)]
        assert measure(prompts).hits(2) == 0
        # 0 1 2: drop 1. 0 hits. 1: drop 0. 2 hits. 0: drop 2. 1 hits. 2 misses.
        assert best_hits(reuses_of(prompts), 2) == 3


@pytest.fixture(scope="module")
def chats() -> Prompts:
    """Conversations that all begin with the same few blocks: 20,000 different blocks."""
    random_ = random.Random(7)
    talks = [[0, 1, 2, talk + 10] for talk in range(400)]
    contents = []
    for turn in range(2_500):
        talk = random_.choice(talks[: 40 + turn // 6])
        talk += [random_.randrange(10**6) for _ in range(8)]
        contents.append(talk[:120])
    return numbered(contents)


@pytest.fixture(scope="module")
def exact(chats: Prompts) -> HitCurve:
    """Their curve."""
    return measure(chats)


class TestSampling:
    """Estimates from some of the blocks."""

    @pytest.mark.parametrize("samples", [4, pytest.param(12, marks=pytest.mark.long)])
    def test_error_is_small_and_reported(self, chats: Prompts, exact: HitCurve, samples: int) -> None:
        """Over some seeds hit rates are some points off, on average less than one, and as much as is said."""
        sizes = (200, 1_000, 4_000, 16_000)
        off: list[list[float]] = []
        reported = []
        for seed in range(0, 4 * samples, 4):
            recorder = CurveRecorder(0.1, seed=seed)
            for prompt in chats:
                recorder.add(prompt)
            estimate = recorder.curve()
            off.append([estimate.hit_rate(size) - exact.hit_rate(size) for size in sizes])
            reported.append([estimate.error(size) for size in sizes])
        errors, said = np.array(off), np.array(reported)
        assert np.abs(errors).max() < 0.06
        assert np.abs(errors.mean(axis=0)).max() < 0.01
        actual = np.sqrt((errors**2).mean(axis=0))
        assert (actual < 1.3 * said.mean(axis=0)).all()
        assert (actual > said.mean(axis=0) / 1.3).all()

    def test_numbers_that_are_counted(self, chats: Prompts, exact: HitCurve) -> None:
        """Requests are counted, not estimated; of the blocks each sample has about its part."""
        recorder = CurveRecorder(0.05)
        for prompt in chats:
            recorder.add(prompt)
        estimate = recorder.curve()
        assert (recorder.prompts, estimate.block_requests) == (len(chats), exact.block_requests)
        assert estimate.distinct_blocks == pytest.approx(exact.distinct_blocks, rel=0.05)
        assert exact.knee is not None
        assert estimate.knee == pytest.approx(exact.knee, rel=0.5)
        assert len({len(misses) for misses in estimate.misses}) > 1

    def test_all_blocks_are_a_sample_without_error(self, chats: Prompts, exact: HitCurve) -> None:
        """As the rate nears 1, the estimate nears the curve."""
        estimate = measure(chats, 1 - 1e-12)
        for size in (0, 1, 100, 5_000, 10**6):
            assert estimate.hits(size) == pytest.approx(exact.hits(size), abs=20)

    @pytest.mark.parametrize("rate", [0, -1, 1.5, float("nan")])
    def test_impossible_rates(self, rate: float) -> None:
        """A rate is a part, and there is something in it."""
        with pytest.raises(UsageError, match="above 0 and at most 1"):
            measure([], rate)

    def test_small_samples_have_no_knee_and_no_error(self, chats: Prompts, exact: HitCurve) -> None:
        """With few sampled blocks neither is told, since both would be noise; hits still are."""
        vague, clear = measure(chats, 0.001), measure(chats, enough_for(exact.distinct_blocks))
        assert vague.is_vague
        assert 0 < min(vague.sampled_blocks) < ENOUGH
        assert (vague.knee, vague.error(1000)) == (None, None)
        assert vague.hits(1000) >= 0
        assert not clear.is_vague
        assert clear.knee is not None
        assert clear.error(1000)

    @pytest.mark.parametrize("rate", [1e-9, 1e-300])
    def test_empty_samples_are_refused(self, chats: Prompts, rate: float) -> None:
        """Nothing can be said of nothing; the rate that is named instead is enough, and not all."""
        chats = [
            [block + 1 for block in prompt] for prompt in chats
        ]  # the hash of 0 is 0, lower than any rate
        with pytest.raises(EmptySamples) as refused:
            measure(chats, rate)
        assert refused.value.rate == rate
        assert refused.value.enough < 1
        assert f"{refused.value.enough:g} or more" in str(refused.value)
        again = measure(chats, refused.value.enough)
        assert not again.is_vague
        assert min(again.sampled_blocks) < 20 * ENOUGH

    def test_no_prompts_are_no_empty_sample(self) -> None:
        """Where there are no blocks, none is missing."""
        assert measure([[]], 0.1).distinct_blocks == 0

    def test_few_blocks_need_all(self) -> None:
        """Of fewer blocks than a sample should have the rate is 1, and the message says what that is."""
        with pytest.raises(EmptySamples, match="a sample rate of 1, which takes all"):
            measure([[1, 2, 3]], 1e-9)

    def test_no_bound_of_samples(self) -> None:
        """The bound asks for the whole workload."""
        with pytest.raises(UsageError, match="omit the sample rate"):
            _ = CurveRecorder(0.5).reuses


CONFIG = KVCacheConfig(max_sequence_length=64, tokens_per_block=4, primary_blocks=20, secondary_blocks=7)


def config(**changes: Any) -> KVCacheConfig:
    return KVCacheConfig(**{**CONFIG.model_dump(), **changes})


def admitted(manager: KVCacheManager, name: str, prompt: list[int], **options: Any) -> None:
    """A request from its admission to its end, of which the last token is never computed."""
    manager.add_sequence(name, prompt, **options)
    manager.store_context_blocks(name, len(prompt) - 1)
    manager.remove_sequence(name)
    manager.flush()


def one_prompt(directory: Path, **changes: Any) -> tuple[CacheCreated, SequenceAdded]:
    """What a log says of a cache and of one prompt with three full blocks."""
    with KVCacheManager(config(**changes), log=directory) as manager:
        admitted(manager, "a", list(range(13)))
    events = [event for batch in LogReader(directory) for event in batch.events]
    created = next(event for event in events if isinstance(event, CacheCreated))
    return created, next(event for event in events if isinstance(event, SequenceAdded))


def write(directory: Path, *batches: Sequence[AnyEvent]) -> Path:
    with LogWriter(directory, fsync="never") as log:
        for seq, events in enumerate(batches):
            log.append(EventBatch(seq, 0, tuple(events)))
    return directory


class TestLog:
    """Block requests of a log."""

    def test_which_blocks_are_asked_for(self, tmp_path: Path) -> None:
        """Full blocks that end before the last token, equal where all before and the namespace are, too."""
        with KVCacheManager(CONFIG, log=tmp_path / "log") as manager:
            admitted(manager, "a", list(range(13)))  # 3 blocks, and one token to compute
            admitted(manager, "b", list(range(12)))  # the third block ends with the prompt
            admitted(manager, "c", [9, *range(1, 13)])  # differs in the first block
            admitted(manager, "d", list(range(13)), cache_salt="pepper")
            admitted(manager, "e", list(range(13)), lora_id=1)
            admitted(manager, "f", [1])
        read = LoggedPrompts(tmp_path / "log")
        a, b, c, d, e, f = read
        assert [len(each) for each in (a, b, c, d, e, f)] == [3, 2, 3, 3, 3, 0]
        assert a[:2] == b
        assert len({*a, *c, *d, *e}) == 12
        assert (read.admissions, read.skipped, read.gaps, read.tokens_per_block) == (6, 0, 0, 4)
        assert (read.size.primary, read.size.secondary, read.window) == (20, 7, 64)
        assert (
            read.size.bytes_per_block == 4 * 2 * 2 * 2 * 8 * 2
        )  # tokens, layers, K and V, heads, dim, bfloat16
        assert (read.reused_primary, read.reused_secondary) == (8, 0)

    @pytest.mark.parametrize("blocks", [6, 9, 14, 30])
    def test_curve_is_what_the_cache_does(self, tmp_path: Path, blocks: int) -> None:
        """A cache that gets one prompt after the other reuses exactly what the curve says.

        The last token of a prompt is in a block that is not kept: so much less room is there for those that are.
        """
        random_ = random.Random(blocks)
        starts = [[random_.randrange(99) for _ in range(8)] for _ in range(6)]
        one_by_one = config(
            primary_blocks=blocks, secondary_blocks=None, enable_partial_reuse=False, max_sequence_length=24
        )
        with KVCacheManager(one_by_one, log=tmp_path / "log") as manager:
            for number in range(200):
                more = [random_.randrange(3) for _ in range(random_.choice((0, 4, 8, 12)))]
                admitted(manager, str(number), [*random_.choice(starts), *more, 0])
        read = LoggedPrompts(tmp_path / "log")
        curve = measure(read)
        assert read.reused_primary == 4 * curve.hits(blocks - 1) > 0

    def test_images(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tokens of items are told apart by the item, also where its symbols were given away in between."""
        monkeypatch.setattr(symbols, "FORGET_ABOVE", 1)
        small = KVCacheConfig(max_sequence_length=12, tokens_per_block=4, primary_blocks=3)
        with KVCacheManager(small, log=tmp_path / "log") as manager:
            for number in (0, 1, 2, 0):
                item = MultimodalItem(bytes([number]) * 32, 0, 8)
                admitted(manager, f"{number}", [7] * 9, multimodal=[item])
        first, second, third, again = LoggedPrompts(tmp_path / "log")
        assert first == again
        assert len({*first, *second, *third}) == 6

    def test_several_windows(self, tmp_path: Path) -> None:
        """The window with full attention counts; a log that has none is refused."""
        two = config(max_attention_window=(8, 64), primary_blocks=(12, 20), secondary_blocks=None)
        with KVCacheManager(two, log=tmp_path / "two") as manager:
            admitted(manager, "a", list(range(13)))
            admitted(manager, "b", list(range(13)))
        read = LoggedPrompts(tmp_path / "two")
        assert [len(each) for each in read] == [3, 3]
        assert (read.windows, read.window, read.size.primary, read.reused_primary) == (2, 64, 20, 12)
        one_prompt(tmp_path / "sliding", max_attention_window=(8,))
        with pytest.raises(Unsupported, match="windows all slide"):
            list(LoggedPrompts(tmp_path / "sliding"))

    def test_without_tokens(self, tmp_path: Path) -> None:
        """In a log without tokens blocks are known by name: prompts are alike as they are in one with tokens."""
        logs = []
        for name, recorded in (("tokens", True), ("names", False)):
            with KVCacheManager(config(log={"record_tokens": recorded}), log=tmp_path / name) as manager:
                manager.flush()
                for number, tokens in enumerate(([1] * 13, [1] * 8 + [2] * 9, [1] * 13, [2])):
                    admitted(manager, str(number), tokens)
            logs.append(list(LoggedPrompts(tmp_path / name)))
        assert [len(each) for each in logs[1]] == [3, 4, 3, 0]
        alike = [{at: each.index(block) for at, block in enumerate(each)} for each in map(flat, logs)]
        assert alike[0] == alike[1]
        assert len(set(alike[1].values())) == 3 + 2

    def test_another_block_size(self, tmp_path: Path) -> None:
        """A log that goes on with larger blocks is cut into the first ones, and its size is in these."""
        first = one_prompt(tmp_path / "first")
        created, added = one_prompt(tmp_path / "second", tokens_per_block=8)
        second: list[AnyEvent] = [created, replace(added, handle=Handle(2))]
        read = LoggedPrompts(write(tmp_path / "log", list(first), second))
        one, other = read
        assert one == other
        assert (len(one), read.tokens_per_block, read.size.primary, read.size.secondary) == (3, 4, 40, 14)
        alone = LoggedPrompts(tmp_path / "first")
        assert list(alone) == [one]
        assert alone.size.bytes_per_block == read.size.bytes_per_block

    def test_gap(self, tmp_path: Path) -> None:
        """Prompts in a batch before a gap count if plain tokens say all; else they are left out, and counted."""
        created, added = one_prompt(tmp_path / "log")
        gap = Gap(first_seq=1, last_seq=2, reason="lost")
        unknown = replace(added, tokens=np.array([-5] * 13, "<i4").tobytes())
        events: list[AnyEvent] = [added, unknown, gap, added]
        read = LoggedPrompts(write(tmp_path / "gap", [created], events))
        assert [len(each) for each in read] == [3, 3]
        assert (read.admissions, read.skipped, read.gaps, read.last_seq) == (2, 1, 1, 1)

    def test_no_log_of_a_cache(self, tmp_path: Path) -> None:
        """What no cache can have written is a fault of the log; a log without any cache is said to be one."""
        created, added = one_prompt(tmp_path / "log")
        unknown = replace(added, tokens=np.array([-5] * 13, "<i4").tobytes())
        impossible = replace(created, tokens_per_block=0)
        lies: list[list[AnyEvent]] = [[added], [created, unknown], [created, impossible]]
        for number, lie in enumerate(lies):
            with pytest.raises(Unreplayable):
                list(LoggedPrompts(write(tmp_path / str(number), lie)))
        with pytest.raises(UsageError, match="has no cache"):
            list(LoggedPrompts(write(tmp_path / "none")))


SECOND = 10**9


def played_with_timeout(prompts: Prompts, times: list[int], timeout: float) -> int:
    """Hits of a cache without bounds: what was idle for longer is dropped before each prompt is looked up."""
    used: dict[int, int] = {}
    hits = 0
    for prompt, now in zip(prompts, times, strict=True):
        used = {block: at for block, at in used.items() if now - at <= timeout * SECOND}
        for block in prompt:
            if block not in used:
                break
            hits += 1
        used.update(dict.fromkeys(prompt, now))
    return hits


def timeouts_of(prompts: Prompts, times: list[int], rate: float = 1.0) -> TimeoutCurve:
    recorder = CurveRecorder(rate)
    for prompt, at in zip(prompts, times, strict=True):
        recorder.add(prompt, at)
    return TimeoutCurve.of(recorder)


class TestTimeouts:
    """Hits by how long idle blocks are kept."""

    @pytest.mark.parametrize("seed", seeds(range(100), quick=15))
    def test_equals_a_cache_that_is_played(self, seed: int) -> None:
        """At timeouts between, at and beyond the times between prompts, of which some come at the same moment."""
        random_ = random.Random(seed)
        prompts = some_prompts(random_, random_.randint(1, 60), random_.choice((2, 3, 20)), 12)
        now, times = 10**18, []
        for _ in prompts:
            now += random_.choice((0, SECOND, 7 * SECOND, random_.randrange(60 * SECOND)))
            times.append(now)
        curve = timeouts_of(prompts, times)
        timeouts = [0, 1, 7, 8, 60, 3600, *(random_.random() * 200 for _ in range(8))]
        assert {each: curve.hits(each) for each in timeouts} == {
            each: played_with_timeout(prompts, times, each) for each in timeouts
        }
        assert curve.hits() == curve.hits(10**9) == played_with_timeout(prompts, times, math.inf)
        assert curve.seconds == (times[-1] - times[0]) / SECOND
        assert curve.block_requests == sum(map(len, prompts))

    def test_by_hand(self) -> None:
        """Three prompts: the shared block was used 5 s ago by the second, its own block 15 s ago by the first."""
        curve = timeouts_of([[1, 2], [1, 3], [1, 2]], [0, 10 * SECOND, 15 * SECOND])
        # The second hits 1 after 10 s; the third 1 after 5 s and 2 after 15 s.
        assert [curve.hits(each) for each in (4.9, 5, 9, 10, 14, 15)] == [0, 1, 1, 2, 2, 3]
        assert curve.hit_rate(10) == 2 / 6
        assert [curve.quantile(each) for each in (0.1, 0.5, 0.9)] == [5.0, 10.0, 15.0]

    def test_a_clock_that_is_set_back(self) -> None:
        """What seems to come before the one before it is taken to come with it."""
        assert timeouts_of([[1], [1], [1]], [10 * SECOND, 0, 11 * SECOND]).hits(1) == 2

    def test_nothing_to_measure(self) -> None:
        """No prompts, and prompts that share nothing."""
        for prompts in ([], [[1], [2]]):
            curve = timeouts_of(prompts, [0] * len(prompts))
            assert (curve.hits(), curve.hit_rate(5), curve.quantile(0.5)) == (0, 0.0, None)

    def test_samples_are_near(self) -> None:
        """A part of the blocks tells nearly the same."""
        random_ = random.Random(1)
        prompts = some_prompts(random_, 3000, 30, 30)
        times = [number * SECOND for number in range(len(prompts))]
        exact, estimate = timeouts_of(prompts, times), timeouts_of(prompts, times, 0.2)
        for timeout in (1, 10, 100, 1000, math.inf):
            assert abs(exact.hit_rate(timeout) - estimate.hit_rate(timeout)) < 0.05
        assert 0.1 < exact.hit_rate(100) < 0.2 < exact.hit_rate(1000) < exact.hit_rate()

    def test_times_of_a_log(self, tmp_path: Path) -> None:
        """Are those of the batches; where the clock begins again with an epoch, it goes on where it was."""
        for times in ([100, 103, 110], [50, 51]):
            now = iter([times[0], *times, times[-1]])
            stamps = Substitutes(wall_ns=lambda now=now: next(now) * SECOND)  # type: ignore[misc]
            with (
                LogWriter(tmp_path / "log", resume=(tmp_path / "log").exists()) as log,
                KVCacheManager(CONFIG, log=log, substitutes=stamps) as manager,
            ):
                manager.flush()
                for number in range(len(times)):
                    admitted(manager, f"{number}", list(range(13)))
        prompts = LoggedPrompts(tmp_path / "log")
        seen = [(prompts.at // SECOND, len(blocks)) for blocks in prompts]
        assert seen == [(100, 3), (103, 3), (110, 3), (110, 3), (111, 3)]

    def test_times_of_a_trace(self, tmp_path: Path) -> None:
        """Are those of its requests, since the first."""
        lines = (f'{{"timestamp": {at}, "prompt_token_ids": {[*range(17)]}}}' for at in (10, 12.5, 70))
        (tmp_path / "trace").write_text("\n".join(lines))
        prompts = TracePrompts(tmp_path / "trace", tokens_per_block=4)
        assert [(prompts.at, len(blocks)) for blocks in prompts] == [
            (0, 4),
            (2_500_000_000, 4),
            (60_000_000_000, 4),
        ]

    @pytest.mark.parametrize("times", [(0, 1000, 3_600_000), (0, 3_600_000, 1000), (3_600_000, 1000, 0)])
    def test_hours_of_a_trace(self, tmp_path: Path, times: tuple[int, ...]) -> None:
        """Are those from the earliest request to the latest, in whatever order the lines are."""
        rest = '"input_length": 5, "output_length": 1, "hash_ids": [1]}'
        (tmp_path / "trace").write_text("\n".join(f'{{"timestamp": {at}, {rest}' for at in times))
        prompts = TracePrompts(tmp_path / "trace")
        assert len(list(prompts)) == 3
        assert prompts.hours == 1


TRACE = os.environ.get("MOONCAKE_TRACE")


@pytest.mark.long
@pytest.mark.skipif(TRACE is None, reason="MOONCAKE_TRACE names no file: Mooncake's conversation trace")
def test_known_points_of_a_trace() -> None:
    """The hash ids of Mooncake's conversation trace give what other programs found."""

    def prompts() -> Iterator[list[int]]:
        with Path(str(TRACE)).open(encoding="utf-8") as file:
            yield from (json.loads(line)["hash_ids"] for line in file)

    read = list(prompts())
    recorder = CurveRecorder()
    for prompt in read:
        recorder.add(prompt)
    curve = recorder.curve()
    assert (recorder.prompts, curve.block_requests, curve.distinct_blocks) == (12_031, 288_500, 182_790)
    assert [curve.hits(size) for size in (1_000, 10_000, 50_000, 10**9)] == [12_847, 61_046, 102_290, 105_710]
    assert [best_hits(recorder.reuses, size) for size in (1_000, 3_000, 10_000)] == [51_705, 84_121, 105_710]
    estimate = measure(read, 0.01)
    for size in (1_000, 10_000, 50_000, 10**9):
        assert abs(estimate.hit_rate(size) - curve.hit_rate(size)) < 0.03


def flat(prompts: list[list[int]]) -> list[int]:
    """The blocks of all prompts, one after the other."""
    return [block for each in prompts for block in each]
