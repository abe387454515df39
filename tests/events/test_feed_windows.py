"""The feed of windows that slide: blocks without those before, and names that another window's events have given."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Iterable, Iterator, Sequence

import pytest

from events.feed.cache_fold import exported_runs
from events.feed.changes import Change, Cleared, Removed, Stored
from events.feed.fold import Feed
from events.ids import BlockIndex, GroupIndex, Handle
from events.tokens.sequences import NamedTokens
from events.types import (
    PRIMARY,
    SECONDARY,
    AnyEvent,
    BlocksFilled,
    BlocksReused,
    BlocksStored,
    CacheCreated,
    EventBatch,
    GroupCreated,
    GroupExported,
    Namespace,
    SequenceAdded,
    SequenceExported,
    SequenceRemoved,
    StateExported,
    TokensAppended,
    TransferExported,
    TransferLanded,
)
from kvcache import KVCacheConfig, KVCacheManager, Request
from tests.support.columns import pack_i32, pack_i64
from tests.support.engines.simulated import LateCopier
from tests.support.engines.strategies import key_of, split_names
from tests.support.feeds.batches import (
    FULL,
    PLAIN,
    SIZE,
    SLIDES,
    added,
    filled,
    names,
    offloaded,
    onboarded,
    removed,
    stored,
    tokens,
)
from tests.support.feeds.strict import Engine, NoBytes, StrictIndex, batches, landed_prefixes, resident_in
from tests.support.places import landed_level, slides
from tests.support.seeds import seeds


def reported(first: int, count: int, group: int = 0, level: int = PRIMARY) -> Stored:
    """Consecutive blocks, as routers hear of them."""
    above = names(first - 1) if first else b""
    return Stored(group, level, names(*range(first, first + count)), above, tokens(first, count), SIZE, PLAIN)


def landed(*transfers: int) -> TransferLanded:
    return TransferLanded(pack_i64(transfers))


class Stream:
    """A feed that is told events by hand; names are the whole keys."""

    def __init__(self, *groups: GroupCreated) -> None:
        self.feed = Feed()
        self._seq = 0
        assert self.apply_events(CacheCreated("{}", SIZE, groups, "xxh3_64", 8, "c")) == [Cleared()]

    def apply_events(self, *events: AnyEvent) -> list[Change]:
        """What routers hear of these events."""
        self._seq += 1
        return self.feed.fold(EventBatch(self._seq - 1, 0, events))

    def snapshot(self) -> list[Change]:
        """What who comes late hears, by the first block."""
        return sorted(self.feed.snapshot(), key=lambda change: change.names)  # type: ignore[union-attr]


class TestHoles:
    """Blocks without those before, event by event."""

    @pytest.mark.parametrize("group", [SLIDES, FULL], ids=["sliding", "full"])
    def test_a_block_whose_parent_routers_do_not_know(self, group: GroupCreated) -> None:
        """Where the window slides it is told at once, and its parent when it has landed; else it waits for that."""
        stream = Stream(group)
        stream.apply_events(added(1), stored(0, [3]), offloaded([0], [3], [5], 7), landed(7))
        assert stream.apply_events(onboarded(0, 5, 4, 8, 1)) == [Removed(0, SECONDARY, names(0))]
        children, parent = reported(1, 2), reported(0, 1)
        first, then = ([children], [parent]) if group is SLIDES else ([], [parent, children])
        assert stream.apply_events(stored(1, [6, 7])) == first == stream.snapshot()
        assert stream.apply_events(landed(8)) == then

    def test_who_comes_late_learns_of_blocks_after_a_hole(self) -> None:
        """With the name of the block before, which is not there; and once it is, of all in one."""
        stream = Stream(SLIDES)
        stream.apply_events(added(1), stored(0, [4, 5, 6, 7]))
        assert stream.apply_events(removed([1], [5])) == [Removed(0, PRIMARY, names(1))]
        assert stream.snapshot() == [reported(0, 1), reported(2, 2)]
        assert stream.apply_events(removed([0], [4])) == [Removed(0, PRIMARY, names(0))]
        assert stream.snapshot() == [reported(2, 2)]
        again = stream.apply_events(added(2), stored(0, [8, 9], handle=2))
        assert again == [reported(0, 2)]
        assert stream.snapshot() == [reported(0, 4)]

    def test_what_hangs_after_a_removed_block_stays(self) -> None:
        """Removing a block says nothing of those behind it, told or on their way."""
        stream = Stream(SLIDES)
        stream.apply_events(added(1), stored(0, [0, 1, 2]), offloaded([2], [2], [5], 7))
        assert stream.apply_events(removed([0], [0]), removed([1], [1])) == [
            Removed(0, PRIMARY, names(0)),
            Removed(0, PRIMARY, names(1)),
        ]
        assert stream.snapshot() == []
        assert stream.apply_events(landed(7)) == [reported(2, 1, level=SECONDARY)]

    def test_blocks_of_one_prefix_that_are_offloaded_in_any_order(self) -> None:
        """They leave at once and arrive each behind its own parent, wherever that is; the others stay as they are."""
        stream = Stream(SLIDES)
        stream.apply_events(added(1), stored(0, [0, 1, 2, 3]))
        (gone,) = stream.apply_events(offloaded([3, 0, 2], [3, 0, 2], [11, 12, 13], 7))
        assert isinstance(gone, Removed)
        assert (gone.level, set(split_names(gone.names))) == (PRIMARY, set(split_names(names(0, 2, 3))))
        assert stream.snapshot() == [reported(1, 1)]
        arrived = stream.apply_events(landed(7))
        assert sorted(
            split_names(b"".join(change.names for change in arrived if isinstance(change, Stored)))
        ) == (split_names(names(0, 2, 3)))
        alone = [reported(block, 1, level=SECONDARY) for block in (0, 2, 3)]
        assert set(blocks_of(arrived)) == set(blocks_of(alone))
        assert set(blocks_of(stream.snapshot())) == set(blocks_of([*alone, reported(1, 1)]))

    def test_blocks_that_are_offloaded_from_the_shallowest_on(self) -> None:
        """They are removed from the leaves up, and arrive as one."""
        stream = Stream(SLIDES)
        stream.apply_events(added(1), stored(0, [0, 1, 2]))
        gone = stream.apply_events(offloaded([0, 1, 2], [0, 1, 2], [7, 6, 5], 7))
        assert gone == [Removed(0, PRIMARY, names(2, 1, 0))]
        assert stream.apply_events(landed(7)) == [reported(0, 3, level=SECONDARY)]

    def test_a_block_that_is_onboarded_alone(self) -> None:
        """It leaves secondary at once, and is in primary when it has landed, behind a parent that stays below."""
        stream = Stream(SLIDES)
        stream.apply_events(
            added(1), stored(0, [0, 1, 2]), offloaded([1, 0, 2], [1, 0, 2], [4, 5, 6], 7), landed(7)
        )
        assert stream.apply_events(added(2), onboarded(2, 6, 9, 8, 2)) == [Removed(0, SECONDARY, names(2))]
        assert stream.snapshot() == [reported(0, 2, level=SECONDARY)]
        assert stream.apply_events(landed(8)) == [reported(2, 1)]
        assert stream.snapshot() == [reported(0, 2, level=SECONDARY), reported(2, 1)]


class TestNames:
    """An event gives only the keys that no earlier one about its sequence gave; routers hear all names."""

    def test_stored_in_one_window_after_the_other(self) -> None:
        """The second window's event has no keys, or those of its last blocks."""
        stream = Stream(SLIDES, FULL)
        assert stream.apply_events(added(1), stored(0, [0, 1]), stored(0, [5, 6], group=1, keys=b"")) == [
            reported(0, 2),
            reported(0, 2, group=1),
        ]
        assert stream.apply_events(stored(2, [2]), stored(2, [7, 8, 9], group=1, keys=names(3, 4))) == [
            reported(2, 1),
            reported(2, 3, group=1),
        ]
        assert stream.apply_events(stored(3, [3, 4], keys=b"")) == [reported(3, 2)]

    def test_filled_in_one_window_after_the_other(self) -> None:
        """The second event of a step has no keys at all; what is stored then knows the names, too."""
        stream = Stream(SLIDES, FULL)
        stream.apply_events(added(1), stored(0, [0]))
        assert stream.apply_events(filled(1, 3, 0, names(1)), filled(2, 4, 0, names(2))) == [
            reported(1, 1),
            reported(2, 1),
        ]
        assert stream.apply_events(stored(0, [5], group=1, keys=b""), filled(1, 6, 1, b"")) == [
            reported(0, 1, group=1),
            reported(1, 1, group=1),
        ]
        assert stream.apply_events(stored(2, [7], group=1, keys=b"")) == [reported(2, 1, group=1)]

    def test_filled_after_a_parent_on_its_way(self) -> None:
        """Also where a block waits for its parent, its name is that which the other window's event gave."""
        stream = Stream(FULL, FULL)
        stream.apply_events(
            added(1), stored(0, [3]), offloaded([0], [3], [5], 7), landed(7), onboarded(0, 5, 4, 8, 1)
        )
        stream.apply_events(stored(0, [3], group=1, keys=b""))
        assert stream.apply_events(filled(1, 9, 1, names(1)), filled(1, 9, 0, b"")) == [
            reported(1, 1, group=1)
        ]
        assert stream.apply_events(landed(8)) == [reported(0, 1), reported(1, 1)]

    def test_reused_blocks_come_with_the_names_of_those_before(self) -> None:
        """Those that a sliding window reuses tell the names of the blocks in front that it does not see."""
        stream = Stream(SLIDES, FULL)
        reused = BlocksReused(Handle(2), GroupIndex(0), PRIMARY, BlockIndex(2), pack_i32([2]), names(0, 1, 2))
        stream.apply_events(added(1), stored(0, [0, 1, 2]), added(2))
        assert stream.apply_events(reused, stored(0, [5, 6, 7], group=1, handle=2, keys=b"")) == [
            reported(0, 3, group=1)
        ]

    def test_moved_blocks_are_those_of_their_sequence(self) -> None:
        """One that takes back what it computed, or what was offloaded, knows the names of these blocks."""
        stream = Stream(SLIDES, FULL)
        stream.apply_events(
            added(1), stored(0, [0, 1]), offloaded([0, 1], [0, 1], [4, 5], 7), landed(7), added(2)
        )
        stream.apply_events(onboarded(0, 4, 8, 8, 2), onboarded(1, 5, 9, 9, 2))
        assert stream.apply_events(stored(0, [5, 6], group=1, handle=2, keys=b"")) == [
            reported(0, 2, group=1)
        ]

    def test_keys_of_blocks_that_were_never_stored(self) -> None:
        """Those that a window has left behind before anything was stored come first."""
        stream = Stream(SLIDES, FULL)
        assert stream.apply_events(added(1), stored(2, [4], keys=names(0, 1, 2))) == [reported(2, 1)]
        assert stream.apply_events(stored(0, [5, 6, 7], group=1, keys=b"")) == [reported(0, 3, group=1)]

    def test_names_after_others_that_are_not_known_yet(self) -> None:
        """They have their places; those before are filled in when an event gives them."""
        sequence = NamedTokens(array("i"), PLAIN)
        sequence.name(2, names(2))
        assert bytes(sequence.names) == bytes(16) + names(2)
        sequence.name(0, names(0, 1, 2, 3))
        assert bytes(sequence.names) == names(0, 1, 2, 3)

    def test_the_partial_block_of_the_end_is_not_reported(self) -> None:
        """Its key is the event's last; the full ones before it have the right names."""
        stream = Stream(SLIDES, FULL)
        stream.apply_events(added(1), stored(0, [0, 1]))
        last = BlocksStored(
            handle=Handle(1),
            group=GroupIndex(1),
            first_block=BlockIndex(0),
            parent=b"",
            keys=names(2),
            slots=pack_i32([5, 6, 7]),
            level=PRIMARY,
            priority=35,
            last_tokens=1,
        )
        assert stream.apply_events(last) == [reported(0, 2, group=1)]


def blocks_of(changes: Iterable[Change]) -> Iterator[tuple[int, int, bytes, bytes, bytes, Namespace]]:
    """Group, level, name, parent, tokens and namespace of each stored block."""
    for change in changes:
        if not isinstance(change, Stored):
            continue
        parent, size = change.parent, 4 * change.tokens_per_block
        for at, name in enumerate(split_names(change.names)):
            its_tokens = change.tokens[at * size : (at + 1) * size]
            yield change.group, change.level, name, parent, its_tokens, change.namespace
            parent = name


def exported(slots: Sequence[int], columns: Sequence[tuple[int, int]], last_tokens: int) -> GroupExported:
    """Two runs: all blocks but the last one, and that one behind them; columns are level and transfer."""
    count = len(slots)
    runs = [-1, count - 1, SIZE, *[0] * 7, 0, 1, last_tokens, *[0] * 7]
    return GroupExported(
        namespaces=(PLAIN,),
        runs=pack_i64(runs),
        symbols=tokens(0, count)[: 4 * ((count - 1) * SIZE + last_tokens)],
        slots=pack_i32(slots),
        keys=names(*range(count)),
        blank_slots=(b"", b""),
        shared=b"",
        blocks=pack_i64([number for level, copy in columns for number in (level, 35, 0, -1, 0, 0, copy)]),
    )


WITH_HOLES = exported(
    [4, 5, -1, 6, -1, 9, 10, 11, 7],
    [(0, 0), (0, 0), (0, 0), (0, 0), (0, 0), (1, 0), (1, 3), (1, 3), (1, 0)],
    SIZE,
)
"""Blocks 2 and 4 are not cached; from 5 on they are in secondary, 6 and 7 still on their way there."""


class TestExported:
    """A state that has holes."""

    def test_pieces(self) -> None:
        """Consecutive blocks in one level, by one copy, each piece with the name of the block before."""
        run, last = exported_runs(WITH_HOLES, SIZE, 8)
        assert [(state[0], state[2], begin, end) for state, begin, end in run.pieces()] == [
            (PRIMARY, 0, 0, 2),
            (PRIMARY, 0, 3, 4),
            (SECONDARY, 0, 5, 6),
            (SECONDARY, 3, 6, 8),
        ]
        before = [run.name_before(begin) for _, begin, _ in run.pieces()]
        assert before == [b"", *(names(at) for at in (2, 4, 5))]
        assert list(last.pieces()) == [((SECONDARY, 35, 0), 0, 1)]
        assert (last.name_before(0), last.names, last.symbols) == (names(7), names(8), tokens(8, 1))

    @pytest.mark.parametrize("slots", [[4, 5, 6], [4, -1, 6], [-1, -1, 6]])
    def test_partial_block_at_the_end(self, slots: list[int]) -> None:
        """It is in no piece, with or without blocks before it."""
        runs = exported_runs(exported(slots, [(0, 0)] * 3, 1), SIZE, 8)
        found = [slot for run in runs for _, begin, end in run.pieces() for slot in run.slots[begin:end]]
        assert found == [slot for slot in slots[:2] if slot >= 0]

    def test_installed(self) -> None:
        """Routers hear of what is there, then of what lands; sequences know the names that were given before."""
        sequence = SequenceExported(
            handle=Handle(1),
            request_id="r",
            namespace=PLAIN,
            num_tokens=8,
            tokens=tokens(0, 8),
            num_prompt_tokens=8,
            computed=8,
            stored=(2, 0),
            slots=(pack_i32([-2, 5, 8, 9]), pack_i32([0, 1, 2, 3])),
            keys=names(0, 1),
        )
        copies = (TransferExported(3, GroupIndex(0), SECONDARY, pack_i32([10, 11]), None),)
        empty = GroupExported((), b"", b"", b"", b"", (b"", b""), b"")
        stream = Stream(SLIDES, FULL)
        stream.feed.lost = True
        changes = stream.apply_events(StateExported((WITH_HOLES, empty), (sequence,), copies, 2, 4, 0, 0))
        assert changes[0] == Cleared()
        there = [
            reported(0, 2),
            reported(3, 1),
            reported(5, 1, level=SECONDARY),
            reported(8, 1, level=SECONDARY),
        ]
        assert sorted(blocks_of(changes)) == sorted(blocks_of(there))
        assert stream.apply_events(landed(3)) == [reported(6, 2, level=SECONDARY)]
        assert stream.apply_events(stored(0, [0, 1, 2], group=1, keys=names(2))) == [reported(0, 3, group=1)]
        assert stream.apply_events(stored(2, [8], keys=b"")) == [reported(2, 1)]


# -- random runs


class PlainEngine(Engine):
    """Prompts without items, whose names follow from tokens and salt; and now and then other priorities, or nothing."""

    def step(self) -> None:
        """One command, mostly one of those that engines give."""
        chance = self.rng.random()
        if chance < 0.01:
            self.manager.clear()
        elif chance < 0.1 and self.running:
            self.manager.set_priority(self.rng.choice(self.running), self.rng.randrange(30, 40))
        else:
            super().step()

    def request(self, request_id: int) -> Request:
        rng = self.rng
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
        return Request(request_id, prompt, cache_salt=rng.choice([None, None, None, "salt"]))


def config(rng: random.Random, windows: tuple[int, ...]) -> KVCacheConfig:
    """A small cache of these windows."""
    return KVCacheConfig(
        max_sequence_length=64,
        max_attention_window=windows,
        tokens_per_block=rng.choice([1, 2, 4]),
        primary_blocks=rng.choice([6, 12, 20]),
        secondary_blocks=rng.choice([2, 4, 12]),
        num_layers=len(windows),
        num_kv_heads=1,
        head_dim=1,
        block_hash="v2_sha256_64",
    )


def residency(manager: KVCacheManager, index: int, level: int) -> set[bytes]:
    """Names of the landed full blocks that a group holds in a level."""
    state, size = manager.state, manager.state.hashing.key_bytes
    return {
        bytes(run.keys[at * size : at * size + 8])
        for run in state.groups[index].tree.runs.values()
        for at in range(len(run.slots) - bool(run.partial))
        if landed_level(state, index, run, at) == level
    }


class Blocks:
    """The parent, tokens and namespace of each full block of all requests by its name, worked out from their tokens."""

    def __init__(self, size: int) -> None:
        self.known: dict[bytes, tuple[bytes, bytes, Namespace]] = {}
        self._size = size
        self._running: dict[int, tuple[array[int], Namespace]] = {}

    def take(self, batch: EventBatch) -> None:
        for event in batch.events:
            if isinstance(event, SequenceAdded):
                self._running[event.handle] = array("i", event.tokens), event.namespace
            elif isinstance(event, TokensAppended):
                assert not event.counts
                for handle, token in zip(array("q", event.handles), array("i", event.tokens), strict=True):
                    self._running[handle][0].append(token)
            elif isinstance(event, SequenceRemoved):
                self._note(*self._running.pop(event.handle))
        for sequence in self._running.values():
            self._note(*sequence)

    def _note(self, its_tokens: array[int], namespace: Namespace) -> None:
        key = key_of(((None, None, None if namespace.salt_digest is None else "salt"),))
        parent = b""
        for end in range(self._size, len(its_tokens) + 1, self._size):
            content = its_tokens[end - self._size : end].tobytes()
            key = hashlib.sha256(key + content).digest()
            self.known[key[:8]] = parent, content, namespace
            parent = key[:8]


class Router:
    """A feed, and what it makes a router know."""

    def __init__(self, manager: KVCacheManager, blocks: Blocks) -> None:
        self.manager, self.feed = manager, Feed()
        self.groups = range(len(manager.layout.groups))
        self._index = self._new_index()
        self._blocks = blocks

    def _new_index(self) -> StrictIndex:
        return StrictIndex([index for index in self.groups if slides(self.manager.state, index)])

    def take(self, batch: EventBatch) -> None:
        """Hear of a batch; each block's name must be that of what it is said to be."""
        changes = self.feed.fold(batch)
        assert not self.feed.lost
        for change in changes:
            self._index.apply(change)
        for _, _, name, *content in blocks_of(changes):
            assert tuple(content) == self._blocks.known[name]

    def knows(self) -> list[set[bytes]]:
        """By group and level."""
        return [self._index.names(level, group) for group in self.groups for level in (0, 1)]

    def check(self) -> None:
        """All that it should know; and who comes late knows the same."""
        for group in self.groups:
            must = [residency(self.manager, group, level) for level in (0, 1)]
            known = [self._index.names(level, group) for level in (0, 1)]
            if slides(self.manager.state, group):
                assert known == must
            else:
                least = landed_prefixes(self.manager, group)
                assert all(least[level] <= known[level] <= must[level] for level in (0, 1))
            assert known == [resident_in(self.feed, group, level) for level in (0, 1)]
        late, changes = self._new_index(), list(self.feed.snapshot())
        for change in changes:
            late.apply(change)
        assert all(tuple(content) == self._blocks.known[name] for _, _, name, *content in blocks_of(changes))
        assert [late.names(level, group) for group in self.groups for level in (0, 1)] == self.knows()


def installed(manager: KVCacheManager, seq: int, blocks: Blocks) -> Router:
    """A router that begins with the state as it is after a batch."""
    router = Router(manager, blocks)
    created = manager.state.created
    assert created is not None
    router.take(EventBatch(seq, 0, (created, manager.state.export())))
    return router


WINDOWS_AND_DELAYS = [
    (windows, delay) for delay in (0, 3, 9) for windows in ((4,), (5, 64), (1, 6, 64), (3, 8))
]


@pytest.mark.parametrize("seed", seeds(range(72), quick=12))
def test_routers_know_what_each_window_holds(seed: int) -> None:
    """Exactly what has landed where windows slide, by its right name; also who comes late, or begins with a state."""
    rng = random.Random(seed)
    windows, delay = WINDOWS_AND_DELAYS[seed % len(WINDOWS_AND_DELAYS)]
    copier = LateCopier(NoBytes(), delay)
    manager = KVCacheManager(config(rng, windows), copier=copier)
    blocks = Blocks(manager.config.tokens_per_block)
    routers, most = [Router(manager, blocks)], 0
    for number, batch in enumerate(batches(manager, rng, 250, PlainEngine)):
        blocks.take(batch)
        for router in routers:
            router.take(batch)
            router.check()
        most = max(most, sum(map(len, routers[0].knows())))
        if number % 15 == 14:
            routers = [*routers[:3], installed(manager, batch.seq, blocks)]
            routers[-1].check()
        copier.tick()
    assert most > 4


def test_events_give_each_key_once() -> None:
    """A manager with two windows gives the keys in the first one's events; both windows' blocks have their names."""
    manager = KVCacheManager(config(random.Random(1), (6, 64)).model_copy(update={"tokens_per_block": 2}))
    feed = Feed()
    feed.fold(EventBatch(0, 0, (manager.state.created,)))  # type: ignore[arg-type]
    manager.add_sequence("r", [1, 2, 3, 4, 5])
    manager.store_context_blocks("r", 5)
    manager.add_tokens(["r"], [6])
    manager.add_tokens(["r"], [7])
    batch = manager.flush()
    assert batch is not None
    keys = [
        (type(event).__name__, event.group, len(event.keys) // 32)
        for event in batch.events
        if isinstance(event, BlocksStored | BlocksFilled)
    ]
    assert keys == [
        ("BlocksStored", 0, 2),
        ("BlocksStored", 1, 0),
        ("BlocksFilled", 0, 1),
        ("BlocksFilled", 1, 0),
    ]
    feed.fold(batch)
    root = (None, None, None)
    path = [(root, (1, 2)), (root, (1, 2), (3, 4)), (root, (1, 2), (3, 4), (5, 6))]
    expected = {key_of(each)[:8] for each in path}
    assert resident_in(feed, 0, PRIMARY) == resident_in(feed, 1, PRIMARY) == expected
