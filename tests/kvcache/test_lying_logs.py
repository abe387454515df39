"""Logs whose checksums are right and whose events are not: folding says so instead of answering wrongly."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from msgspec.structs import replace

from events.ids import BlockIndex, GroupIndex, Handle, LevelIndex
from events.types import (
    AllocateReason,
    BlocksAllocated,
    BlocksFilled,
    BlocksMoved,
    BlocksRemoved,
    BlocksReused,
    BlocksStored,
    BlocksUpdated,
    CacheCreated,
    ContextComputed,
    Event,
    EventBatch,
    MoveReason,
    Namespace,
    RemoveReason,
    SequenceAdded,
    StateExported,
    TokensAppended,
    TransferFailed,
    TransferLanded,
)
from kvcache import replay as module
from kvcache.errors import InvariantViolated
from kvcache.fold.state import CacheState
from kvcache.manager import KVCacheManager
from kvcache.replay import Replayed, TooLarge, Unreplayable, fold
from tests.support.engines import strategies
from tests.support.engines.inside import sequence_of

NUMBERS = (
    "parent",
    "blocks",
    "last_tokens",
    "level",
    "priority",
    "duration",
    "expiry",
    "stamp",
    "refs",
    "transfer",
)


def folded(*events: Event, tokens_recorded: bool = True) -> Replayed:
    replayed = Replayed(CacheState(tokens_recorded=tokens_recorded))
    replayed.fold(EventBatch(0, 0, events), verify=False)  # type: ignore[arg-type]
    return replayed


@pytest.fixture(scope="module")
def manager() -> KVCacheManager:
    """A cache of 8 and 4 blocks of 2 tokens with a running sequence and two cached blocks of an ended one."""
    manager = KVCacheManager(strategies.config(secondary_blocks=4))
    manager.add_sequence("ended", [1, 2, 3, 4, 5])
    manager.store_context_blocks("ended", 5)
    manager.remove_sequence("ended", store=False)
    manager.add_sequence("running", [6, 7, 8])
    manager.store_context_blocks("running", 3)
    return manager


@pytest.fixture
def created(manager: KVCacheManager) -> CacheCreated:
    assert manager.state.created is not None
    return manager.state.created


@pytest.fixture
def exported(manager: KVCacheManager) -> StateExported:
    return manager.state.export()


@pytest.mark.parametrize(
    "change",
    [
        {"tokens_per_block": 0},
        {"tokens_per_block": -4},
        {"tokens_per_block": 2**40},
        {"groups": ()},
        {"hash_algorithm": "nope"},
        {"key_bytes": 8},
        {"config": "{"},
        {"config": "[]"},
        {"config": "[" * 100_000},
    ],
    ids=str,
)
def test_impossible_caches_are_refused(created: CacheCreated, change: dict[str, Any]) -> None:
    """A cache that cannot have been created is not created."""
    with pytest.raises(Unreplayable, match="batch 0 does not fit"):
        folded(replace(created, **change))


@pytest.mark.parametrize("num_blocks", [(-5, 0), (8, -1), (2**31, 0)])
def test_impossible_sizes_are_refused(
    created: CacheCreated, num_blocks: tuple[int, int], monkeypatch: Any
) -> None:
    """Neither fewer than no blocks nor more than slots can number."""
    monkeypatch.setattr(module, "free_bytes", lambda: 2**60)
    [group] = created.groups
    with pytest.raises(Unreplayable, match="impossible number of blocks"):
        folded(replace(created, groups=(replace(group, num_blocks=num_blocks),)))


def test_caches_larger_than_the_machine_are_refused(created: CacheCreated) -> None:
    """A few bytes that ask for more memory than there is get an error that says how much, not the memory."""
    [group] = created.groups
    many = replace(group, num_blocks=(2**31 - 1, 0))
    with pytest.raises(TooLarge, match="bytes of memory") as raised:
        folded(replace(created, groups=(many,) * 1000))
    assert raised.value.needed > raised.value.free > 0


def group_with(exported: StateExported, **changes: Any) -> StateExported:
    return replace(exported, groups=(replace(exported.groups[0], **changes),))


@pytest.mark.parametrize("number", [0, -1, 2**63 - 1, 2**63, 2**64 - 1])
def test_numbers_that_no_epoch_gives_are_refused(
    created: CacheCreated, exported: StateExported, number: int
) -> None:
    """A handle or transfer id that is to come, or that an admission has, is one that fits its columns."""
    for field in ("next_handle", "next_transfer"):
        with pytest.raises(Unreplayable, match=r"out of range"):
            folded(created, replace(exported, **{field: number}))
    if number > 0:
        with pytest.raises(Unreplayable, match="a handle was used twice, or is out of range"):
            folded(created, SequenceAdded(Handle(number), "r", Namespace(), 1, slots(1), 0, (0,), (0,), 0))


def run_with(name: str, value: int) -> Callable[[StateExported], StateExported]:
    def change(exported: StateExported) -> StateExported:
        runs = array("q", exported.groups[0].runs)
        runs[NUMBERS.index(name)] = value
        return group_with(exported, runs=runs.tobytes())

    return change


def column_with(name: str, edit: Callable[[bytes], bytes]) -> Callable[[StateExported], StateExported]:
    return lambda exported: group_with(exported, **{name: edit(getattr(exported.groups[0], name))})


def free_with(edit: Callable[[bytes], bytes]) -> Callable[[StateExported], StateExported]:
    def change(exported: StateExported) -> StateExported:
        primary, secondary = exported.groups[0].blank_slots
        return group_with(exported, blank_slots=(edit(primary), secondary))

    return change


def sequence_with(**changes: Any) -> Callable[[StateExported], StateExported]:
    return lambda exported: replace(exported, sequences=(replace(exported.sequences[0], **changes),))


def slots(*numbers: int) -> bytes:
    return array("i", numbers).tobytes()


LIES: dict[str, Callable[[StateExported], StateExported]] = {
    "run without blocks": run_with("blocks", 0),
    "run of too many blocks": run_with("blocks", 2**40),
    "run of too few blocks": run_with("blocks", 1),
    "run behind nothing": run_with("parent", 7),
    "level below": run_with("level", -1),
    "level above": run_with("level", 5),
    "other level": run_with("level", 1),
    "block of no tokens": run_with("last_tokens", 0),
    "block of too many tokens": run_with("last_tokens", 3),
    "references": run_with("refs", 2),
    "slot below": column_with("slots", lambda column: slots(-3) + column[4:]),
    "slot above": column_with("slots", lambda column: slots(1000) + column[4:]),
    "slot twice": column_with("slots", lambda column: column[4:8] + column[4:]),
    "slots left over": column_with("slots", lambda column: column + slots(6)),
    "tokens missing": column_with("symbols", lambda column: column[:-4]),
    "tokens left over": column_with("symbols", lambda column: column + bytes(8)),
    "keys missing": column_with("keys", lambda column: column[:-32]),
    "blank slots repeated": free_with(lambda column: column * 20),
    "blank slots missing": free_with(lambda column: column[4:]),
    "blank slots of elsewhere": free_with(lambda column: slots(10**6, -7)),
    "cached slot is blank": free_with(lambda column: slots(0) + column[4:]),
    "sequence without tokens": sequence_with(num_tokens=0, tokens=b""),
    "sequence of other tokens": sequence_with(num_tokens=2),
    "sequence of endless tokens": sequence_with(num_tokens=2**40),
    "prompt longer than its sequence": sequence_with(num_prompt_tokens=4),
    "computed beyond the end": sequence_with(computed=4),
    "cached beyond its blocks": sequence_with(stored=(3,)),
    "cached less than nothing": sequence_with(stored=(-1,)),
    "handle of a running sequence is out of range": sequence_with(handle=2**31),
    "two of one handle": lambda exported: replace(exported, sequences=exported.sequences * 2),
}


def test_the_truth_is_believed(
    manager: KVCacheManager, created: CacheCreated, exported: StateExported
) -> None:
    """The state that the lies are made of is installed without complaint."""
    assert folded(created, exported).fingerprint == manager.fingerprint()


@pytest.mark.parametrize("lie", LIES)
def test_impossible_states_are_refused(created: CacheCreated, exported: StateExported, lie: str) -> None:
    """An exported state that no cache can have had is refused where it is installed, without verifying."""
    with pytest.raises(Unreplayable, match="batch 0 does not fit"):
        folded(created, LIES[lie](exported))


def added(num_tokens: int, tokens: bytes) -> SequenceAdded:
    return SequenceAdded(Handle(1), "r", Namespace(), num_tokens, tokens, 0, (0,), (0,), 0)


@pytest.mark.parametrize(
    ("num_tokens", "tokens"), [(-5, b""), (0, b""), (5, b""), (1, slots(1, 2)), (17, slots(*[1] * 17))]
)
def test_impossible_prompts_are_refused(created: CacheCreated, num_tokens: int, tokens: bytes) -> None:
    """A prompt has as many tokens as it counts, at least one, and no more than the cache has room for."""
    with pytest.raises(Unreplayable, match=r"reused tokens|tokens of a sequence|token count of a sequence"):
        folded(created, added(num_tokens, tokens))
    folded(created, added(16, slots(*[1] * 16)))


@pytest.mark.parametrize("count", [2**40, 25, 17])
def test_numbers_alone_take_no_memory(created: CacheCreated, count: int) -> None:
    """Without token ids, a sequence cannot claim more of them than its blocks hold."""
    with pytest.raises(Unreplayable, match="the token count of a sequence is out of range"):
        folded(created, added(count, b""), tokens_recorded=False)


@pytest.mark.parametrize("counts", [(14,), (2**32 - 1,), (7, 7)])
def test_appended_numbers_alone_take_no_memory(created: CacheCreated, counts: tuple[int, ...]) -> None:
    """Nor can it grow beyond them, not even by being named twice."""
    handles = array("q", [1] * len(counts)).tobytes()
    event = TokensAppended(handles, array("I", counts).tobytes(), b"")
    with pytest.raises(Unreplayable, match="outgrows the cache"):
        folded(created, added(3, b""), event, tokens_recorded=False)


ONE, FIVE = array("q", [1]).tobytes(), slots(1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    "event",
    [
        TokensAppended(ONE, b"", slots(1, 2)),
        TokensAppended(ONE, b"", b""),
        TokensAppended(ONE, slots(2), slots(1)),
        TokensAppended(ONE, slots(2), b""),
        ContextComputed(Handle(1), 6),
        ContextComputed(Handle(1), -1),
        BlocksReused(Handle(1), GroupIndex(0), LevelIndex(-1), BlockIndex(0), slots(0), bytes(8)),
        BlocksReused(Handle(1), GroupIndex(0), LevelIndex(0), BlockIndex(0), slots(0), bytes(8), slots(9)),
        BlocksAllocated(ONE, b"", GroupIndex(0), slots(-1), AllocateReason.DECODE),
        BlocksUpdated(GroupIndex(0), LevelIndex(0), slots(0), bytes(8), 35, 50),
        BlocksStored(Handle(1), GroupIndex(7), BlockIndex(0), b"", bytes(32), slots(0), LevelIndex(0), 35, 2),
    ],
    ids=lambda event: type(event).__name__,
)
def test_impossible_steps_are_refused(created: CacheCreated, event: Event) -> None:
    """What does not fit the sequence or the cache is refused, whichever way it fails inside."""
    with pytest.raises(Unreplayable, match="batch 0 does not fit"):
        folded(created, added(5, FIVE), event)


TWO = array("q", [2]).tobytes()
"""The handle of the running sequence."""


@pytest.mark.parametrize(
    "event",
    [
        BlocksAllocated(b"", b"", GroupIndex(0), b"", AllocateReason.DECODE),
        BlocksAllocated(TWO, slots(0), GroupIndex(0), b"", AllocateReason.DECODE),
        BlocksReused(Handle(2), GroupIndex(0), LevelIndex(0), BlockIndex(1), b"", b""),
        BlocksReused(Handle(2), GroupIndex(0), LevelIndex(1), BlockIndex(1), b"", b""),
        BlocksStored(Handle(2), GroupIndex(0), BlockIndex(1), b"", b"", b"", LevelIndex(0), 35, 2),
        BlocksStored(Handle(2), GroupIndex(0), BlockIndex(1), b"", b"", b"", LevelIndex(0), 35, 1),
        BlocksFilled(b"", GroupIndex(0), b"", b"", b"", b"", 35),
        BlocksUpdated(GroupIndex(0), LevelIndex(0), b"", b"", 35, 50),
        BlocksMoved(GroupIndex(0), b"", LevelIndex(0), b"", LevelIndex(1), b"", MoveReason.OFFLOAD, 9),
        BlocksMoved(
            GroupIndex(0),
            b"",
            LevelIndex(1),
            b"",
            LevelIndex(0),
            b"",
            MoveReason.ONBOARD,
            9,
            Handle(2),
            BlockIndex(1),
        ),
        BlocksMoved(
            GroupIndex(0),
            b"",
            LevelIndex(1),
            b"",
            LevelIndex(0),
            b"",
            MoveReason.RECOMPUTED,
            0,
            Handle(2),
            BlockIndex(1),
        ),
        BlocksRemoved(GroupIndex(0), LevelIndex(0), b"", b"", RemoveReason.CAPACITY),
        TransferLanded(b""),
        TransferFailed(b"", "nothing"),
    ],
    ids=lambda event: f"{type(event).__name__} {getattr(event, 'why', '')}",
)
def test_what_happens_to_nothing_takes_nothing(
    manager: KVCacheManager, created: CacheCreated, exported: StateExported, event: Event
) -> None:
    """An event without a single block is refused, or leaves every block where it was."""
    if isinstance(event, BlocksStored):
        tail = sequence_of(manager, "running").path_ends[0]
        event = replace(event, parent=tail.key_of_last(32)[:8])
    try:
        state = folded(created, exported, event).state
    except Unreplayable:
        return
    state.check()
    assert strategies.cached_blocks(state) == strategies.cached_blocks(manager.state)
    assert [level.blank for level in state.groups[0].levels] == [
        level.blank for level in manager.state.groups[0].levels
    ]


@pytest.mark.parametrize("level", [-1, 2])
@pytest.mark.parametrize(
    ("event", "name"),
    [
        (
            BlocksMoved(
                GroupIndex(0),
                bytes(8),
                LevelIndex(0),
                slots(1),
                LevelIndex(1),
                slots(0),
                MoveReason.OFFLOAD,
                1,
            ),
            "to_level",
        ),
        (BlocksRemoved(GroupIndex(0), LevelIndex(0), slots(1), bytes(8), RemoveReason.CAPACITY), "level"),
        (BlocksUpdated(GroupIndex(0), LevelIndex(0), slots(1), bytes(8), 35, 50), "level"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_states_know_two_levels(
    created: CacheCreated, exported: StateExported, event: Event, name: str, level: int
) -> None:
    """A state refuses an event with another one by itself, too, and not only where a log is read."""
    for change in ({}, {name: LevelIndex(level)}):
        state = CacheState()
        state.apply(created)
        state.apply(exported)
        with pytest.raises(InvariantViolated, match="unknown level") if change else nullcontext():
            state.apply(replace(event, **change))


@pytest.mark.parametrize("levels", [(1, 0), (0, 0), (1, 1)])
def test_moves_go_where_their_reason_says(created: CacheCreated, levels: tuple[int, int]) -> None:
    """What is offloaded goes from primary to secondary: readers that look at the levels see what the state does."""
    allocated = BlocksAllocated(ONE, slots(3), GroupIndex(0), slots(0, 1, 2), AllocateReason.PROMPT)
    stored = BlocksStored(
        Handle(1), GroupIndex(0), BlockIndex(0), b"", bytes(64), slots(0, 1), LevelIndex(0), 35, 2
    )
    source, target = map(LevelIndex, levels)
    moved = BlocksMoved(GroupIndex(0), b"", source, b"", target, b"", MoveReason.OFFLOAD, 0)
    with pytest.raises(Unreplayable, match="levels of a move"):
        folded(created, added(5, FIVE), allocated, ContextComputed(Handle(1), 4), stored, moved)


@pytest.mark.parametrize(
    "changes",
    [
        {"level": 1},
        {"level": 2},
        {"slots": slots(2)},
        {"slots": slots(1, 0)},
        {"slots": slots(0, 7)},
        {"old_priority": 36},
        {"priority": 101},
        {"priority": -1},
    ],
    ids=str,
)
def test_impossible_priorities_are_refused(created: CacheCreated, changes: dict[str, Any]) -> None:
    """Only cached blocks in a row, with the priority that they had, get one between 0 and 100."""
    stored = BlocksStored(
        Handle(1), GroupIndex(0), BlockIndex(0), b"", bytes(64), slots(0, 1), LevelIndex(0), 35, 2
    )
    allocated = BlocksAllocated(ONE, slots(3), GroupIndex(0), slots(0, 1, 2), AllocateReason.PROMPT)
    events = (created, added(5, FIVE), allocated, ContextComputed(Handle(1), 4), stored)
    first, second = (
        BlocksUpdated(GroupIndex(0), LevelIndex(0), slots(0), bytes(8), 35, 50),
        BlocksUpdated(GroupIndex(0), LevelIndex(0), slots(1), bytes(8), 35, 36),
    )
    folded(*events, first, second)
    with pytest.raises(Unreplayable, match="batch 0 does not fit"):
        folded(*events, first, replace(second, **changes))


class TestParents:
    """Whoever reads the log, or a feed made of it, knows a block's place by its parent's name."""

    @pytest.fixture(params=["v2_sha256_64", "xxh3_64", "none"])
    def events(self, request: pytest.FixtureRequest) -> list[Event]:
        """Two sequences store two blocks and later one more, and fill a fourth in the same step."""
        manager = KVCacheManager(
            strategies.config(block_hash=request.param, primary_blocks=16, event_buffer_max_size=1)
        )
        for name, tokens in (("a", [1, 2, 3, 4, 5]), ("b", [6, 7, 8, 9, 10])):
            manager.add_sequence(name, tokens)
            manager.store_context_blocks(name, 4)
            manager.add_tokens([name], [1, 1], [2])
        manager.add_tokens(["a", "b"], [1, 1])
        manager.add_tokens(["a", "b"], [1, 1])
        assert manager.state.created is not None
        return [manager.state.created, *manager.bus.pending]

    @staticmethod
    def lie(events: list[Event], kind: type[Event], last: bool, **changes: Any) -> None:
        at = [number for number, event in enumerate(events) if isinstance(event, kind)][-last]
        folded(*events)
        with pytest.raises(Unreplayable, match="name"):
            folded(*events[:at], replace(events[at], **changes))

    def test_filled_blocks_have_parents(self, events: list[Event]) -> None:
        """Each of the names is compared, and that there are no more of them."""
        [filled] = [event for event in events if isinstance(event, BlocksFilled)]
        assert len(filled.blocks) == 8
        names = filled.parents
        for lie in (names[8:] + names[:8], names[:-1] + b"?", b"?" + names[1:], names[:8], names + names[:8]):
            if lie != names:
                self.lie(events, BlocksFilled, True, parents=lie)

    def test_stored_blocks_have_a_parent(self, events: list[Event]) -> None:
        """None at the start of a prompt, else the name of the block before."""
        stored = [event for event in events if isinstance(event, BlocksStored)]
        assert (stored[0].first_block, stored[-1].first_block > 0) == (0, True)
        for first_lie in (stored[-1].parent, b"?" * 8):
            if first_lie:
                self.lie(events, BlocksStored, False, parent=first_lie)
        for lie in (b"", b"?" * 8, stored[-1].parent[:-1] + b"?"):
            if lie != stored[-1].parent:
                self.lie(events, BlocksStored, True, parent=lie)

    def test_stored_blocks_have_a_name_each(self, events: list[Event]) -> None:
        """Keys that are too many or too few would be another block's."""
        keys = next(event.keys for event in events if isinstance(event, BlocksStored))
        for lie in (keys + bytes(8), keys[: len(keys) // 2]):
            if lie != keys:
                self.lie(events, BlocksStored, False, keys=lie)


def test_slots_given_back_are_the_sequences_own(manager: KVCacheManager, created: CacheCreated) -> None:
    """A sequence cannot give back a slot that another one holds."""
    twin = KVCacheManager(strategies.config(secondary_blocks=4))
    for name in ("a", "b"):
        twin.add_sequence(name, [1, 2, 3])
    twin.store_context_blocks("a", 3)
    twin.store_context_blocks("b", 3)
    events = [created, *twin.bus.pending]
    at = next(n for n, event in enumerate(events) if isinstance(event, BlocksReused) and event.replaced)
    folded(*events)
    events[at] = replace(events[at], replaced=slots(1))
    with pytest.raises(Unreplayable, match="do not belong to the sequence"):
        folded(*events)


@pytest.mark.parametrize("error", [TypeError, ZeroDivisionError, AttributeError, MemoryError, IndexError])
def test_whatever_fails_inside_is_the_logs_fault(
    created: CacheCreated, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Folding, fingerprint and check fail as one error that names the batch and none of the log's content."""

    def fail(*_: object) -> None:
        raise error("the prompt")

    replayed = fold([EventBatch(3, 0, (created,))])
    monkeypatch.setattr(module, "fingerprint", fail)
    monkeypatch.setattr(CacheState, "check", fail)
    monkeypatch.setattr(CacheState, "apply", fail)
    for use in (
        lambda: replayed.fingerprint,
        replayed.check,
        lambda: replayed.fold(EventBatch(3, 0, (created,)), verify=False),
    ):
        with pytest.raises(Unreplayable, match=f"^batch 3 .*{error.__name__}") as raised:
            use()
        assert "prompt" not in str(raised.value)
