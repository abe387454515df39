"""The feed: what routers are told equals what the cache holds, in an order that they can follow."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeGuard, cast

import msgspec
import pytest

from events.feed.changes import Change, Cleared, Stored
from events.feed.fold import Feed
from events.formats.vllm import encode_sglang
from events.ids import BlockIndex, GroupIndex, Handle
from events.packed import NAME_BYTES
from events.types import PRIMARY, AnyEvent, BlocksFilled, BlocksStored, EventBatch, Gap
from kvcache import KVCacheConfig, KVCacheManager, MultimodalItem
from kvcache.errors import CapacityError
from sinks.router.feed import in_batches
from tests.support.columns import pack_i64, pack_u32
from tests.support.engines.simulated import LateCopier
from tests.support.feeds.strict import NoBytes, StrictIndex, batches, landed_prefixes, resident_in
from tests.support.seeds import seeds


def residency(manager: KVCacheManager, level: int) -> set[bytes]:
    """Names of the landed full blocks that the manager holds in a level."""
    size = manager.state.hashing.key_bytes
    return {
        bytes(run.keys[index * size : index * size + NAME_BYTES])
        for run in manager.state.groups[0].tree.runs.values()
        if run.level == level and not run.transfer
        for index in range(len(run.slots) - bool(run.partial))
    }


def config(rng: random.Random) -> KVCacheConfig:
    """A small cache."""
    return KVCacheConfig(
        max_sequence_length=64,
        tokens_per_block=rng.choice([1, 2, 4]),
        primary_blocks=rng.choice([4, 8, 12]),
        secondary_blocks=rng.choice([0, 2, 4, 8]),
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        block_hash="v2_sha256_64",
    )


def with_filled_blocks(batch: EventBatch, size: int) -> EventBatch:
    """The batch with single full blocks behind others told by `BlocksFilled`, those in a row by one."""
    events: list[AnyEvent] = []
    for event in batch.events:
        if is_filled_block(event, size):
            before = events.pop() if events and isinstance(events[-1], BlocksFilled) else None
            event = filled(event, before)
        events.append(event)
    return EventBatch(batch.seq, batch.ts, tuple(events))


def is_filled_block(event: AnyEvent, size: int) -> TypeGuard[BlocksStored]:
    """Whether it could be one that decoding filled."""
    if not isinstance(event, BlocksStored) or not event.parent:
        return False
    return (event.level, event.last_tokens, len(event.slots)) == (PRIMARY, size, 4)


def filled(stored: BlocksStored, before: AnyEvent | None) -> BlocksFilled:
    """The block, and those `before` it."""
    handle, block = pack_i64([stored.handle]), pack_u32([stored.first_block])
    if before is None:
        return BlocksFilled(
            handle, GroupIndex(0), block, stored.parent, stored.keys, stored.slots, stored.priority
        )
    before = cast(BlocksFilled, before)
    return BlocksFilled(
        before.handles + handle,
        GroupIndex(0),
        before.blocks + block,
        before.parents + stored.parent,
        before.keys + stored.keys,
        before.slots + stored.slots,
        before.priority,
    )


def with_stored_blocks(batch: EventBatch, size: int) -> EventBatch:
    """The batch with one `BlocksStored` for each block of a `BlocksFilled`."""
    events: list[AnyEvent] = []
    for event in batch.events:
        if not isinstance(event, BlocksFilled):
            events.append(event)
            continue
        width = len(event.keys) // (len(event.slots) // 4)
        events += [
            BlocksStored(
                Handle(int.from_bytes(event.handles[8 * at : 8 * at + 8], "little")),
                event.group,
                BlockIndex(int.from_bytes(event.blocks[4 * at : 4 * at + 4], "little")),
                event.parents[NAME_BYTES * at : NAME_BYTES * (at + 1)],
                event.keys[width * at : width * (at + 1)],
                event.slots[4 * at : 4 * at + 4],
                PRIMARY,
                event.priority,
                size,
            )
            for at in range(len(event.slots) // 4)
        ]
    return EventBatch(batch.seq, batch.ts, tuple(events))


@pytest.mark.parametrize("seed", seeds(range(60), quick=6))
def test_what_routers_hold_is_what_the_manager_holds(seed: int) -> None:
    """After every batch the feed and a strict index hold exactly the landed full blocks, level by level."""
    rng = random.Random(seed)
    manager, feed, index = KVCacheManager(config(rng)), Feed(), StrictIndex()
    for batch in batches(manager, rng, 200):
        for change in feed.fold(batch):
            index.apply(change)
        for level in (0, 1):
            assert resident_in(feed, 0, level) == index.names(level) == residency(manager, level)


SEES_COPIES_UNDER_WAY = 19
"""A seed of the test below in which names are waited for many times."""


@pytest.mark.parametrize("seed", seeds(range(40), quick=4, always=[SEES_COPIES_UNDER_WAY]))
def test_late_copies_are_reported_when_they_have_landed(seed: int) -> None:
    """With copies that land steps later nothing is told early, no child before its parent, and in the end all is."""
    rng = random.Random(1000 + seed)
    settings = config(rng)
    copier = LateCopier(NoBytes(), 3)
    manager, feed, index = KVCacheManager(settings, copier=copier), Feed(), StrictIndex()
    waiting_seen = 0
    for batch in batches(manager, rng, 200):
        for change in feed.fold(batch):
            index.apply(change)
        for level in (0, 1):
            assert index.names(level) == resident_in(feed, 0, level)
            assert index.names(level) <= residency(manager, level)
            waiting_seen += index.names(level) != residency(manager, level)
        copier.tick()
    for _ in range(4):
        copier.tick()
    last = manager.flush()
    for change in feed.fold(last) if last is not None else []:
        index.apply(change)
    assert [index.names(level) for level in (0, 1)] == [residency(manager, level) for level in (0, 1)]
    assert waiting_seen or seed != SEES_COPIES_UNDER_WAY


def short_lives(manager: KVCacheManager, rng: random.Random, steps: int) -> Iterator[EventBatch]:
    """The stream of requests that begin alike and end soon, so that blocks go back and forth between the levels."""
    yield EventBatch(0, 0, (manager.state.created,))  # type: ignore[arg-type]
    bases = [[rng.randrange(2) for _ in range(8)] for _ in range(3)]
    running: list[int] = []
    for number in range(steps):
        prompt = rng.choice(bases)[: rng.randrange(1, 9)] + rng.choices(range(3), k=rng.choice([0, 0, 1, 2]))
        with suppress(CapacityError):
            manager.add_sequence(number, prompt)
            running.append(number)
            manager.start_transfers()
            manager.store_context_blocks(number, len(prompt))
            if rng.random() < 0.3:
                manager.add_tokens([number], [1])
        while running and (len(running) > 2 or rng.random() < 0.8):
            manager.remove_sequence(running.pop(rng.randrange(len(running))))
        manager.start_transfers()
        batch = manager.flush()
        if batch is not None:
            yield batch


def run_late(seed: int) -> None:
    """Copies land seven steps late, in pools that are always too small; what has landed is told at each step."""
    rng = random.Random(seed)
    settings = config(rng).model_copy(
        update={"tokens_per_block": rng.choice([1, 2]), "secondary_blocks": rng.choice([6, 12, 24])}
    )
    copier = LateCopier(NoBytes(), 7)
    manager, feed, index = KVCacheManager(settings, copier=copier), Feed(), StrictIndex()
    for number, batch in enumerate(short_lives(manager, rng, 150)):
        for change in feed.fold(batch):
            index.apply(change)
        landed = landed_prefixes(manager)
        for level in (0, 1):
            reported = index.names(level)
            assert landed[level] <= reported <= residency(manager, level), (seed, number)
            assert reported == resident_in(feed, 0, level)
        if number % 8 == 0:
            assert snapshot_again(feed) == [index.names(0), index.names(1)], (seed, number)
        if rng.random() < 0.7:
            copier.tick()
    while copier.waiting:
        copier.tick()
    last = manager.flush()
    for change in feed.fold(last) if last is not None else []:
        index.apply(change)
    assert snapshot_again(feed) == [residency(manager, 0), residency(manager, 1)]
    assert [index.names(0), index.names(1)] == [residency(manager, 0), residency(manager, 1)], seed


def snapshot_again(feed: Feed) -> list[set[bytes]]:
    """What who comes late knows then, per level."""
    late = StrictIndex()
    for change in feed.snapshot():
        late.apply(change)
    return [late.names(0), late.names(1)]


@pytest.mark.parametrize("first", seeds(range(0, 3000, 10), quick=2))
def test_what_has_landed_with_its_whole_prefix_is_reported(first: int) -> None:
    """However blocks move while others wait for them: nothing that routers could know is kept from them."""
    for seed in range(first, first + 10):
        run_late(seed)


def test_blocks_that_land_one_by_one_from_the_deepest_on() -> None:
    """A long prefix that was evicted block by block is told when its first block has landed, however long it is."""
    size = 1500
    settings = config(random.Random(0)).model_copy(
        update={
            "tokens_per_block": 1,
            "primary_blocks": size,
            "secondary_blocks": size,
            "max_sequence_length": size,
        }
    )
    copier = LateCopier(NoBytes(), 1)
    manager, feed, index = KVCacheManager(settings, copier=copier), Feed(), StrictIndex()
    feed.fold(EventBatch(0, 0, (manager.state.created,)))  # type: ignore[arg-type]
    manager.add_sequence("old", [7] * size)
    manager.store_context_blocks("old", size)
    manager.remove_sequence("old")
    for number in range(size - 2):
        manager.add_sequence(number, [1], cache_salt=str(number))
        manager.start_transfers()
    batches = [manager.flush()]
    copier.tick()
    batches.append(manager.flush())
    for batch in batches:
        assert batch is not None
        for change in feed.fold(batch):
            index.apply(change)
    assert len(index.names(1)) > 1400
    assert index.names(1) == residency(manager, 1)


@pytest.mark.parametrize("seed", seeds(range(60), quick=4))
def test_who_comes_late_knows_what_the_others_know(seed: int) -> None:
    """Also while blocks are on their way and others hang behind them: a snapshot and what follows tell the same."""
    rng = random.Random(4000 + seed)
    settings = config(rng)
    copier = LateCopier(NoBytes(), 3)
    manager, feed = KVCacheManager(settings, copier=copier), Feed()
    indexes = [StrictIndex()]
    for batch in batches(manager, rng, 150):
        for change in feed.fold(batch):
            for index in indexes:
                index.apply(change)
        late = StrictIndex()
        for change in feed.snapshot():
            late.apply(change)
        indexes = [*indexes[:20], late]
        for level in (0, 1):
            assert {frozenset(index.names(level)) for index in indexes} == {
                frozenset(resident_in(feed, 0, level))
            }
        copier.tick()


@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.parametrize("seed", seeds(range(30), quick=2))
def test_filled_blocks_are_reported_as_stored_ones(seed: int, delay: int) -> None:
    """One `BlocksFilled` says what a `BlocksStored` for each of its blocks says, also behind parents still hidden."""
    rng = random.Random(2000 + seed)
    settings = config(rng)
    size = settings.tokens_per_block
    copier = LateCopier(NoBytes(), delay)
    manager, together, apart = KVCacheManager(settings, copier=copier), Feed(), Feed()
    num_filled = 0
    for batch in batches(manager, rng, 200):
        one_each = with_stored_blocks(batch, size)
        merged = with_filled_blocks(one_each, size)
        num_filled += sum(isinstance(event, BlocksFilled) for event in merged.events)
        assert together.fold(merged) == apart.fold(one_each)
        assert list(together.snapshot()) == list(apart.snapshot())
        copier.tick()
    assert num_filled


def test_snapshot_reports_everything_parents_first() -> None:
    """A snapshot alone builds the same index as the whole stream."""
    rng = random.Random(5)
    manager, feed, index = KVCacheManager(config(rng)), Feed(), StrictIndex()
    for batch in batches(manager, rng, 150):
        for change in feed.fold(batch):
            index.apply(change)
        late = StrictIndex()
        for change in feed.snapshot():
            late.apply(change)
        assert all(late.names(level) == index.names(level) for level in (0, 1))


@pytest.mark.parametrize("seed", seeds(range(30), quick=3))
def test_snapshot_reports_what_the_stream_reported(seed: int) -> None:
    """Tokens and namespace of each block in a snapshot are those with which it was announced."""
    rng = random.Random(3000 + seed)
    manager, feed = KVCacheManager(config(rng)), Feed()
    reported: dict[bytes, tuple[bytes, object]] = {}
    namespaces: set[object] = set()
    for batch in batches(manager, rng, 150):
        reported.update(blocks_of(feed.fold(batch)))
        snapshot = dict(blocks_of(feed.snapshot()))
        assert snapshot == {name: reported[name] for name in snapshot}
        namespaces.update(namespace for _, namespace in snapshot.values())
    assert len(namespaces) > 1


def blocks_of(changes: Iterable[Change]) -> Iterator[tuple[bytes, tuple[bytes, object]]]:
    """Name, tokens and namespace of each stored block."""
    for change in changes:
        if isinstance(change, Stored):
            size = 4 * change.tokens_per_block
            for index in range(len(change.names) // NAME_BYTES):
                name = change.names[index * NAME_BYTES : (index + 1) * NAME_BYTES]
                yield name, (change.tokens[index * size : (index + 1) * size], change.namespace)


def test_lost_batch_silences_the_feed_until_the_whole_state_comes() -> None:
    """After a hole nothing is told; the exported state then tells everything anew, and the stream goes on."""
    rng = random.Random(7)
    manager, feed, index = KVCacheManager(config(rng)), Feed(), StrictIndex()
    for number, made in enumerate(batches(manager, rng, 150)):
        if number == 20:
            continue  # lost
        # Behind the batch that has the state, all have a number more.
        batch = msgspec.structs.replace(made, seq=made.seq + (number > 30))
        for change in feed.fold(batch):
            index.apply(change)
        if number == 30:
            assert feed.lost
            reported = index.names(0)
            for change in feed.fold(EventBatch(batch.seq + 1, batch.ts, (manager.state.export(),))):
                index.apply(change)
            assert not feed.lost
            assert index.names(0) == residency(manager, 0) != reported
        elif 20 < number < 30:
            assert feed.lost
    assert [index.names(level) for level in (0, 1)] == [residency(manager, level) for level in (0, 1)]


@pytest.mark.parametrize("seed", range(3))
def test_by_sglangs_tokens_no_two_blocks_are_the_same(seed: int) -> None:
    """With images and extra ids, too: blocks of different names have different tokens or salts up to their end."""
    rng = random.Random(seed)
    manager, feed = KVCacheManager(config(rng)), Feed()
    ends: dict[int, tuple[Any, ...]] = {}
    for batch in batches(manager, rng, 150):
        for change in feed.fold(batch):
            for event in msgspec.msgpack.decode(encode_sglang([change], 0.0))[1]:
                if event["type"] == "BlockStored":
                    size, end = (
                        event["block_size"],
                        ends.get(event["parent_block_hash"], (event.get("cache_salt"),)),
                    )
                    for at, name in enumerate(event["block_hashes"]):
                        end = (*end, *event["token_ids"][at * size : (at + 1) * size])
                        ends[name] = end
    assert len(set(ends.values())) == len(ends) > 10


def test_sglang_replaces_the_tokens_of_an_image() -> None:
    """By a number that the first 8 bytes of its digest determine, as SGLang does; text around it stays, also if cut."""
    manager, feed = (
        KVCacheManager(config(random.Random(0)).model_copy(update={"tokens_per_block": 4})),
        Feed(),
    )
    feed.fold(EventBatch(0, 0, (manager.state.created,)))  # type: ignore[arg-type]
    digest = hashlib.sha256(b"a cat").digest()
    manager.add_sequence("a", [*range(12), 0], multimodal=[MultimodalItem(digest, position=2, length=4)])
    manager.store_context_blocks("a", 12)
    batch = manager.flush()
    assert batch is not None
    pad = 1_000_000 + int.from_bytes(digest[:8], "big") % 2**30
    changes = feed.fold(batch)
    for cut in ([changes], in_batches(changes, 1)):
        events = [event for each in cut for event in msgspec.msgpack.decode(encode_sglang(each, 0.0))[1]]
        tokens = [token for event in events for token in event["token_ids"]]
        assert tokens == [0, 1, pad, pad, pad, pad, *range(6, 12)]


def test_a_gap_that_the_feed_did_not_suffer_is_ignored() -> None:
    """A log's own loss passes through the stream; whoever has seen those batches goes on."""
    manager, feed = KVCacheManager(config(random.Random(1))), Feed()
    feed.fold(EventBatch(0, 0, (manager.state.created,)))  # type: ignore[arg-type]
    feed.fold(EventBatch(1, 0, ()))
    feed.fold(EventBatch(2, 0, (Gap(0, 1, "the disk was slow"),)))
    assert not feed.lost
    feed.fold(EventBatch(3, 0, (Gap(3, 5, "the queue was full"),)))
    assert feed.lost


def test_clear_is_reported_at_once() -> None:
    """Clearing the cache is one change, and forgets what was on its way."""
    manager, feed = KVCacheManager(config(random.Random(3))), Feed()
    feed.fold(EventBatch(0, 0, (manager.state.created,)))  # type: ignore[arg-type]
    manager.add_sequence("a", [1, 2, 3, 4, 5])
    manager.store_context_blocks("a", 5)
    batch = manager.flush()
    assert batch is not None
    assert [type(change) for change in feed.fold(batch)] == [Stored]
    received = list[AnyEvent]()
    manager.bus.subscribe(received.append)
    manager.clear()
    assert [type(change) for change in feed.fold(EventBatch(2, 0, tuple(received)))] == [Cleared]
    assert not resident_in(feed, 0, 0)
