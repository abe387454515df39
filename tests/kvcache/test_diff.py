"""Comparing two logs: the first divergence, and the reuse of requests that both have."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from events.ids import Handle
from events.structs import GroupCreated, GroupExported, RequestId
from events.types import (
    CacheCreated,
    Checkpoint,
    ContextComputed,
    EpochStarted,
    EventBatch,
    Gap,
    Namespace,
    SequenceAdded,
    StateExported,
    TransferLanded,
)
from kvcache.audit.diff import changed_settings, compare_reuse, first_divergence
from tests.support.columns import pack_i32, pack_i64

GROUP = GroupCreated(64, "full", (0,), (), (8, 0))
STARTED = EpochStarted(0, b"a" * 16, None, None, True, True, "kvcache 1")
CREATED = CacheCreated('{"primary_blocks": 8, "log": {"fsync": "group"}}', 4, (GROUP,), "none", 0, "c")
EXPORTED = StateExported(
    (GroupExported((), b"", b"", b"", b"", (pack_i32([1, 0]), b""), b""),), (), (), 1, 1, 0, 0
)
CHECKPOINT = Checkpoint(bytes(32), 0, ((0, 0),))


def batches(*steps: Iterable[Any], ts: int = 0) -> list[EventBatch]:
    return [EventBatch(seq, ts + seq, tuple(events)) for seq, events in enumerate(steps)]


def computed(number: int) -> ContextComputed:
    return ContextComputed(Handle(1), number)


def added(request_id: RequestId, reused: int, tokens: int = 100) -> SequenceAdded:
    return SequenceAdded(Handle(1), request_id, Namespace(), tokens, b"", reused, (0,), (0,), 0)


def where(a: list[EventBatch], b: list[EventBatch]) -> tuple[tuple[int, int] | None, ...] | None:
    """The address on each side."""
    found = first_divergence(a, b)
    if found is None:
        return None
    return tuple(None if place is None else (place.batch.seq, place.index) for place in (found.a, found.b))


class TestDivergence:
    """The first place where two logs differ."""

    def test_header_and_times(self) -> None:
        """What a log says of itself, its cache's settings and its times may differ; that an epoch begins may not."""
        rest = [computed(1), TransferLanded(pack_i64([1]))]
        a = batches([STARTED, CREATED, EXPORTED, *rest], rest)
        other = replace(STARTED, log_id=b"b" * 16, epoch=3, software="other")
        b = batches(
            [other, replace(CREATED, config='{"primary_blocks": 9}'), EXPORTED, *rest], rest, ts=10**18
        )
        assert where(a, b) is None
        assert where(a, batches([STARTED, EXPORTED, *rest], rest)) == ((0, 1), (0, 1))
        assert where(a, batches(a[0].events, [STARTED, *rest])) == ((1, 0), (1, 0))

    def test_events(self) -> None:
        """The first event that differs is named with its fields, whatever comes behind it."""
        a = batches([computed(1)], [computed(2), computed(3)], [computed(4)])
        b = batches([computed(1)], [computed(2), computed(9)], [computed(4)])
        found = first_divergence(a, b)
        assert found is not None
        assert found.fields == ("num_tokens",)
        assert where(a, b) == ((1, 1), (1, 1))
        assert found.a is not None
        assert found.a.event == computed(3)
        kinds = first_divergence(a, batches([CHECKPOINT]))
        assert kinds is not None
        assert kinds.fields == ()

    def test_batches(self) -> None:
        """The same events in other batches are not the same, nor is a log that ends earlier."""
        one = batches([computed(1), computed(2)])
        assert where(one, batches([computed(1)], [computed(2)])) == ((0, 1), (0, 1))
        assert where(one, [*one, *batches([], [computed(3)])[1:]]) == (None, (1, 0))
        assert where([*one, *batches([], [computed(3)])[1:]], one) == ((1, 0), None)
        assert where([], []) is None
        assert where([], one) == (None, (0, 0))

    def test_end_of_a_batch(self) -> None:
        """Where a batch has no further event, its end is the place."""
        found = first_divergence(batches([computed(1)]), batches([computed(1), computed(2)]))
        assert found is not None
        assert found.a is not None
        assert found.b is not None
        assert (found.a.event, found.b.event, found.fields) == (None, computed(2), ())

    def test_caches_of_other_sizes(self) -> None:
        """Blank slots and fingerprints count where the caches have the same blocks, and only there."""
        larger = replace(CREATED, groups=(replace(GROUP, num_blocks=(9, 0)),))
        exported = replace(
            EXPORTED, groups=(replace(EXPORTED.groups[0], blank_slots=(pack_i32([2, 1, 0]), b"")),)
        )
        checkpoint = replace(CHECKPOINT, fingerprint=b"x" * 32)
        a = batches([STARTED, CREATED, EXPORTED], [CHECKPOINT])
        assert where(a, batches([STARTED, larger, exported], [checkpoint])) is None
        assert where(a, batches([STARTED, CREATED, exported], [checkpoint])) == ((0, 2), (0, 2))
        assert where(a, batches([STARTED, CREATED, EXPORTED], [checkpoint])) == ((1, 0), (1, 0))
        for event in (replace(exported, releases=1), replace(exported, next_handle=2)):
            assert where(a, batches([STARTED, larger, event])) == ((0, 2), (0, 2))
        fewer = replace(checkpoint, num_sequences=1)
        assert where(a, batches([STARTED, larger, exported], [fewer])) == ((1, 0), (1, 0))
        again: list[list[Any]] = [[STARTED, CREATED, EXPORTED], [CHECKPOINT]]
        assert where(
            batches([STARTED, CREATED], *again), batches([STARTED, larger], again[0], [checkpoint])
        ) == ((2, 0), (2, 0))

    def test_reads_no_further(self) -> None:
        """Nothing behind the first difference is read."""

        def endless(number: int) -> Iterator[EventBatch]:
            for seq in range(3):
                yield EventBatch(seq, 0, (computed(number if seq == 2 else seq),))
            raise AssertionError

        assert first_divergence(endless(7), endless(8)) is not None

    def test_gaps(self) -> None:
        """Lost batches are a difference like any other."""
        gap = [Gap(1, 2, "full"), EXPORTED]
        assert where(batches([STARTED], gap), batches([STARTED], [EXPORTED])) == ((1, 0), (1, 0))


class TestSettings:
    """What the caches are made of."""

    def test_names_and_values(self) -> None:
        """Settings have the names that they are set by; what one log has not is said to be none."""
        groups = (replace(GROUP, num_blocks=(9, 4)),)
        config = '{"primary_blocks": 9, "log": {"fsync": "group"}, "new": null}'
        changed = changed_settings(CREATED, replace(CREATED, config=config, groups=groups))
        assert [(each.name, each.a, each.b) for each in changed] == [
            ("primary_blocks", 8, 9),
            ("windows", [[64, 8, 0]], [[64, 9, 4]]),
            ("new", "(none)", None),
        ]
        nested = replace(CREATED, config='{"primary_blocks": 8, "log": {"fsync": "none"}}')
        assert [each.name for each in changed_settings(CREATED, nested)] == ["log.fsync"]
        assert changed_settings(CREATED, CREATED) == []

    @pytest.mark.parametrize("config", ["", "[", "3", "[" * 10**5, "{}"])
    def test_lying_settings(self, config: str) -> None:
        """Settings that are none are no reason to fail."""
        assert changed_settings(CREATED, replace(CREATED, config=config))


@dataclass
class Request:
    name: RequestId
    reused: int
    tokens: int = 100


def log(requests: list[Request], chance: random.Random) -> Iterator[EventBatch]:
    """A log of these admissions, some of which share batches."""
    left, seq = list(requests), 0
    while left:
        take = chance.randrange(4)
        yield EventBatch(seq, 0, tuple(added(r.name, r.reused, r.tokens) for r in left[:take]))
        left, seq = left[take:], seq + 1


class TestReuse:
    """Request by request."""

    def test_against_lists(self) -> None:
        """Of random requests, which come in other orders, more than once, or in one log alone, lists say the same."""
        chance = random.Random(3)
        for _ in range(200):
            sides = []
            for _ in "ab":
                names = [chance.choice([*range(9), "1", "x"]) for _ in range(chance.randrange(25))]
                sides.append(
                    [Request(name, chance.randrange(50), chance.choice([100, 120])) for name in names]
                )
            top = chance.randrange(5)
            found = compare_reuse(log(sides[0], chance), log(sides[1], chance), top)
            numbered: list[dict[Any, Request]] = [
                {
                    (
                        type(r.name),
                        r.name,
                        [x.name for x in side[:place] if type(x.name) is type(r.name)].count(r.name),
                    ): r
                    for place, r in enumerate(side)
                }
                for side in sides
            ]
            a, b = numbered
            both = [(a[key], b[key]) for key in a if key in b]
            assert found.a.requests == found.b.requests == len(both)
            for totals, place in ((found.a, 0), (found.b, 1)):
                assert totals.reused_tokens == sum(pair[place].reused for pair in both)
                assert totals.prompt_tokens == sum(pair[place].tokens for pair in both)
            assert found.other_prompts == sum(one.tokens != other.tokens for one, other in both)
            changes = sorted((abs(other.reused - one.reused) for one, other in both), reverse=True)
            changes = [change for change in changes if change]
            assert found.changed == len(changes)
            assert [abs(each.reused_tokens) for each in found.largest] == changes[:top]
            for only, own, others in ((found.only_a, a, b), (found.only_b, b, a)):
                alone = [own[key] for key in own if key not in others]
                assert only.requests == len(alone)
                assert only.reused_tokens == sum(request.reused for request in alone)
                assert {name for name, _ in only.first} <= {request.name for request in alone}
                assert len(only.first) == min(top, len(alone))

    def test_what_is_listed(self) -> None:
        """A change says which request, in which batches, from how much to how much; the first of equal ones first."""
        a = batches([added("x", 10), added("y", 0)], [added("z", 5)])
        b = batches([added("z", 5)], [added("y", 20, 120)], [added("x", 0)])
        found = compare_reuse(a, b, 1)
        [largest] = found.largest
        assert (largest.request_id, largest.reused_tokens) == ("y", 20)
        assert (largest.a.seq, largest.a.prompt_tokens, largest.a.reused_tokens) == (0, 100, 0)
        assert (largest.b.seq, largest.b.prompt_tokens, largest.b.reused_tokens) == (1, 120, 20)
        tie = compare_reuse(batches([added("p", 1), added("q", 1)]), batches([added("p", 2), added("q", 0)]))
        assert [each.request_id for each in tie.largest] == ["p", "q"]

    def test_only_in_one(self) -> None:
        """Who is in one log alone is listed in its order."""
        found = compare_reuse(batches([added(3, 1), added(1, 1)], [added(2, 1)]), batches([added(1, 1)]), 9)
        assert [name for name, _ in found.only_a.first] == [3, 2]
        assert found.only_b.requests == 0

    def test_memory_is_bounded(self) -> None:
        """However long both logs are, hardly more than the two next admissions are read ahead of each other."""
        ahead, most = [0, 0], 0

        def side(number: int, per_batch: int) -> Iterator[EventBatch]:
            nonlocal most
            for seq in range(3000 // per_batch):
                ahead[number] += per_batch
                most = max(most, abs(ahead[0] - ahead[1]))
                ids = range(seq * per_batch, (seq + 1) * per_batch)
                yield EventBatch(seq, 0, tuple(added(each, each % 7) for each in ids))

        assert compare_reuse(side(0, 1), side(1, 10)).a.requests == 3000
        assert most <= 11


def test_admissions_before_a_gap_do_not_count() -> None:
    """What stands before a gap continues what is missing, so that a partner may have been in there."""
    lossy = batches([added("a", 4), added("b", 8), Gap(1, 2, "full"), EXPORTED, added("c", 12)])
    found = compare_reuse(lossy, batches([added("a", 4), added("b", 0)], [added("c", 12)]))
    assert (found.a.requests, found.a.reused_tokens, found.changed) == (1, 12, 0)
    assert (found.only_a.requests, found.only_b.requests) == (0, 2)
