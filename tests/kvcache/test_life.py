"""The life of a block: no event does to a slot what the tables do not allow, and all that they allow happens."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from events.types import (
    PRIMARY,
    SECONDARY,
    BlocksPinned,
    BlocksUnpinned,
    CacheCreated,
    EncoderRemoved,
    Event,
    SequenceForked,
    SequenceRemoved,
    SequenceRewound,
)
from kvcache.errors import InvariantViolated
from kvcache.fold.full_group import FullGroup
from kvcache.fold.sequence import ONBOARDING
from kvcache.fold.slot_states import SlotState
from kvcache.fold.state import CacheState
from kvcache.manager import KVCacheManager
from tests.support.engines import strategies
from tests.support.engines.life import IN_PRIMARY, IN_SECONDARY
from tests.support.engines.lives import NoBytes, Step, Witness, explore, steps_of
from tests.support.engines.simulated import LateCopier
from tests.support.seeds import seeds


class FoldWitness(Witness):
    """Looks at the fold's states; a sequence that ends concerns all slots of its table."""

    kind = SlotState

    def __init__(self, created: CacheCreated) -> None:
        super().__init__(created)
        self.state = CacheState()
        self.apply = self.state.apply  # type: ignore[method-assign]
        self.apply(created)

    def states(self) -> list[list[int]]:
        return [states.tolist() for states in self.state.slot_states(self.group)]

    def named(self, event: Event) -> Iterable[tuple[int, bytes]]:
        if isinstance(event, SequenceRemoved | EncoderRemoved):
            return [(PRIMARY, self.state.sequences[event.handle].tables[self.group].tobytes())]
        if self.group and isinstance(event, SequenceForked | SequenceRewound):
            return []  # cross attention stays as it is
        if isinstance(event, SequenceForked):
            parent = self.state.sequences[event.handle]
            shared = parent.computed // self.state.tokens_per_block
            return [(PRIMARY, parent.tables[0][parent.detached[0] : shared].tobytes())]
        if isinstance(event, SequenceRewound):
            sequence = self.state.sequences[event.handle]
            blocks = min(sequence.computed, event.num_tokens - 1) // self.state.tokens_per_block
            needed = -(-event.num_tokens // self.state.tokens_per_block)
            first = self.state.groups[0].first_to_leave(sequence, blocks, needed)
            return [(PRIMARY, sequence.tables[0][first:].tobytes())]
        if isinstance(event, BlocksPinned):
            return [(PRIMARY, event.slots[self.group])]
        if isinstance(event, BlocksUnpinned):
            return [(PRIMARY, self.state.pins[event.pin].slots[self.group].tobytes())]
        return super().named(event)


RECORDED = {Step("primary", "REFERENCED", "BlocksRemoved", after) for after in ("HELD", "SHARED")}
"""What no manager does, but an engine may whose decisions are recorded: it invalidates blocks in use."""
ALLOWED = (steps_of(IN_PRIMARY, "primary") | steps_of(IN_SECONDARY, "secondary")) - RECORDED
COVERING = (2, 3, 10, 44, 55, 80, 100, 125, 128, 245, 286, 305, 332)
"""Programs that together meet all that is allowed; should they miss something one day, others are tried, too."""


def test_slots_live_as_the_tables_say() -> None:
    """Each event takes each slot to a state that the tables name; and each entry is needed."""
    assert explore(FoldWitness, ALLOWED, COVERING, range(1200)) == ALLOWED


@pytest.mark.parametrize("seed", seeds(range(300), quick=8))
def test_no_slot_lives_otherwise(seed: int) -> None:
    """Whatever happens, nothing takes a slot to a state that the tables do not name."""
    explore(FoldWitness, ALLOWED, [seed], ())


@pytest.fixture
def state() -> CacheState:
    """A cache with slots in nearly all states, whose first offload has not landed."""
    manager = KVCacheManager(
        strategies.config(primary_blocks=13, secondary_blocks=4), copier=LateCopier(NoBytes(), 9)
    )
    for request_id, prompt in {"a": [2] * 5, "b": [2] * 5, "old": [1] * 8, "new": [3] * 13}.items():
        manager.add_sequence(request_id, prompt)
        manager.start_transfers()
        manager.store_context_blocks(request_id, len(prompt))
        if request_id == "b":
            manager.clear()
        if request_id == "old":
            manager.remove_sequence("old")
    return manager.state


def test_states_of_slots(state: CacheState) -> None:
    """The states are those that the slots of this cache have."""
    names = [[SlotState(number).name for number in states] for states in state.slot_states(0)]
    assert names == [
        ["SHARED"] * 2 + ["HELD"] * 2 + ["UNREFERENCED"] * 2 + ["REFERENCED"] * 6 + ["HELD"],
        ["UNREFERENCED_IN_FLIGHT"] * 2 + ["BLANK"] * 2,
    ]
    state.check()


def contradict(state: CacheState, what: str) -> None:
    """Change one of the places that say something about slots, so that it disagrees with the others."""
    group = state.groups[0]
    primary, secondary = group.levels
    assert isinstance(group, FullGroup)
    offloaded = group.run_at(SECONDARY, 0)
    match what:
        case "free and cached":
            secondary.blank.append(0)
        case "neither free nor cached":
            secondary.blank.pop()
        case "held and cached":
            state.sequences[4].tables[0][-1] = 4
        case "held twice by one":
            state.sequences[4].tables[0][-1] = state.sequences[4].tables[0][0]
        case "no slot":
            state.sequences[4].tables[0][-1] = ONBOARDING
        case "owner":
            primary.run_ids[4] = offloaded.id
        case "level":
            offloaded.level = PRIMARY
        case "references":
            offloaded.refs = 1
        case "shared":
            group.shared.clear()
        case "shared by more":
            group.shared[0] += 1
        case "transfer":
            offloaded.transfer += 1
        case "transfers":
            state.transfers.clear()
        case "transfer's slots":
            state.transfers[offloaded.transfer].slots.pop()
        case "transfer's level":
            state.transfers[offloaded.transfer].level = PRIMARY
        case _:
            raise AssertionError(what)


@pytest.mark.parametrize(
    ("what", "law"),
    [
        ("free and cached", "a slot is in two places or in none"),
        ("neither free nor cached", "a slot is in two places or in none"),
        ("held and cached", "a slot is in two places or in none"),
        ("held twice by one", "a block table has a duplicate or missing slot"),
        ("no slot", "a block table has a duplicate or missing slot"),
        ("owner", "the owner of a slot is recorded wrongly"),
        ("level", "a slot is in two places or in none"),
        ("references", "reference counts differ"),
        ("shared", "the sharing of uncached blocks is recorded wrongly"),
        ("shared by more", "the sharing of uncached blocks is recorded wrongly"),
        ("transfer", "waits for a copy that does not target it"),
        ("transfers", "waits for a copy that does not target it"),
        ("transfer's slots", "waits for a copy that does not target it"),
        ("transfer's level", "waits for a copy that does not target it"),
    ],
)
def test_contradictions_are_found(state: CacheState, what: str, law: str) -> None:
    """A slot is in one state: where the places from which it follows disagree, the check says so."""
    contradict(state, what)
    with pytest.raises(InvariantViolated, match=law):
        state.check_slots()
