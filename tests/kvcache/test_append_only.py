"""Workers that only append to block tables: a sequence keeps its own slots where it came to hold another's blocks."""

from __future__ import annotations

import random
from array import array

import msgspec
import pytest

from events.types import CROSS_WINDOW, PRIMARY, BlocksReused, Event, SequenceRemoved
from kvcache.audit.slots import occupant_of
from kvcache.cli.who import _in_words
from kvcache.config import KVCacheConfig
from kvcache.errors import CapacityError, InvariantViolated, OutOfBlocks
from kvcache.fold.state import CacheState
from kvcache.inputs import Request
from kvcache.manager import KVCacheManager
from kvcache.recorder import Recorder
from tests.support.engines import strategies

PROMPT = [1, 2, 3, 4, 5, 6, 7]


def config(**settings: object) -> KVCacheConfig:
    return strategies.config(
        **{"primary_blocks": 12, "max_sequence_length": 24, "append_only_tables": True} | settings
    )


def two_of_the_same(manager: KVCacheManager) -> list[int]:
    """Both compute three blocks, in two steps; returns the second one's slots of these and of the last."""
    manager.add_sequences([Request("a", PROMPT), Request("b", PROMPT)])
    own: list[int] = manager.block_table("b").tolist()
    for computed in (4, 6):
        for request_id in ("a", "b"):
            manager.store_context_blocks(request_id, computed)
    return own


def freed(events: list[Event]) -> list[int]:
    (removed,) = (event for event in events if isinstance(event, SequenceRemoved))
    return list(array("i", removed.freed[0]))


def test_replaced_slots_stay_until_the_end() -> None:
    """Nobody gets them, though all else in primary is taken; the end returns them after those of the table."""
    manager = KVCacheManager(config())
    own = two_of_the_same(manager)
    assert manager.block_table("b").tolist() == [*manager.block_table("a").tolist()[:3], own[3]]
    assert manager.num_free_blocks == 4
    manager.add_sequence("c", [9] * 8)
    assert set(manager.block_table("c").tolist()).isdisjoint(own)
    with pytest.raises(OutOfBlocks):
        manager.add_sequence("d", [8])
    manager.check()
    manager.flush()
    events: list[Event] = []
    manager.bus.subscribe(events.append)
    manager.remove_sequence("b", store=False)
    assert freed(events) == own[::-1]
    assert manager.num_free_blocks == 4
    manager.add_sequence("d", [8] * 8)
    assert manager.block_table("d").tolist() == own
    manager.check()


def test_the_event_is_the_same_as_without() -> None:
    """The setting is among those of `CacheCreated`; no other event up to the sequence's end differs."""
    found = []
    for append_only in (True, False):
        manager = KVCacheManager(config(append_only_tables=append_only))
        events: list[Event] = []
        manager.bus.subscribe(events.append)
        own = two_of_the_same(manager)
        replaced = [
            slot for each in events if isinstance(each, BlocksReused) for slot in array("i", each.replaced)
        ]
        assert replaced == [own[1], own[0], own[2]]
        assert manager.num_free_blocks == (4 if append_only else 7)
        found.append(events)
    assert found[0] == found[1]


def test_what_was_recomputed_ends_with_what_it_has_kept() -> None:
    """Blocks that a later call stores by the end are replaced, and freed by the same call."""
    manager = KVCacheManager(config())
    manager.add_sequences([Request("a", PROMPT), Request("b", PROMPT)])
    manager.store_context_blocks("a", 7)
    own = manager.block_table("b").tolist()
    manager.add_tokens(["b"], [8])  # its prompt and the block that this fills
    manager.remove_sequence("b")
    assert manager.num_free_blocks == 8
    manager.remove_sequence("a")
    manager.check()
    manager.add_sequence("c", [9] * 8)
    assert set(manager.block_table("c").tolist()) & set(own)


def test_a_snapshot_has_them() -> None:
    """A manager that goes on from the exported state frees the same slots in the same order."""
    manager = KVCacheManager(config())
    own = two_of_the_same(manager)
    other = KVCacheManager.resume(manager.state)
    assert other.config.append_only_tables
    assert other.fingerprint() == manager.fingerprint()
    for each in (manager, other):
        events: list[Event] = []
        each.bus.subscribe(events.append)
        each.remove_sequence("b", store=False)
        assert freed(events) == own[::-1]
        each.check()
    assert other.fingerprint() == manager.fingerprint()


def test_a_fork_gets_none_of_them() -> None:
    """The branch has the parent's table; what the parent keeps is freed by the parent's end alone."""
    manager = KVCacheManager(config())
    own = two_of_the_same(manager)
    manager.fork("b", "child")
    assert manager.block_table("child").tolist()[:3] == manager.block_table("a").tolist()[:3]
    free = manager.num_free_blocks
    manager.remove_sequence("child", store=False)
    assert manager.num_free_blocks == free + 1
    manager.remove_sequence("b", store=False)
    assert manager.num_free_blocks == free + 1 + len(own)
    manager.check()


def test_a_fork_counts_what_may_have_to_be_kept() -> None:
    """Storing first may leave the parent with two slots for a block: where that is too much, nothing changes."""
    manager = KVCacheManager(config(primary_blocks=8))
    manager.add_sequence("b", PROMPT)
    manager.store_context_blocks("b", 7)
    manager.clear()
    manager.add_sequence("c", PROMPT)
    manager.store_context_blocks("c", 7)
    manager.remove_sequence("c")
    manager.add_sequence("d", [9])
    assert manager.num_free_blocks == 3
    with pytest.raises(OutOfBlocks) as refused:
        manager.fork("b", "child")
    assert (refused.value.needed, refused.value.available) == ((4,), (3,))
    manager.remove_sequence("d")
    assert [each.block for each in manager.fork("b", "child").replaced] == [0, 1, 2]
    assert manager.num_free_blocks == 0
    manager.check()


def test_rewind_and_clear_leave_them() -> None:
    """Coarse, for what is rare: they stay the sequence's until it ends."""
    manager = KVCacheManager(config())
    own = two_of_the_same(manager)
    manager.rewind("b", 3)  # within a block that both hold: a copy
    manager.clear()
    manager.check()
    table = manager.block_table("b").tolist()
    assert set(table).isdisjoint(own[:3])
    manager.remove_sequence("a", store=False)
    manager.remove_sequence("b", store=False)
    assert manager.num_free_blocks == 12
    manager.check()


def test_sliding_windows_and_encoders_keep_them_too() -> None:
    """Each group by itself; an encoder's input until its last reader ends."""
    manager = KVCacheManager(
        config(primary_blocks=16, num_layers=2, max_attention_window=(4, 24), cross_kv_cache_fraction=0.5)
    )
    given = [5] * 4
    manager.add_sequences([Request(name, PROMPT, encoder_tokens=given) for name in ("a", "b")])
    for name in ("a", "b"):
        manager.store_context_blocks(name, 7)
        manager.store_encoder_blocks(name)
        manager.check()
    free = manager.num_free_blocks_per_window()
    window, full = manager.layout.groups[0].window, manager.layout.groups[1].window
    # Of eight blocks the first sequence holds four or, where the window has passed, three and fewer.
    assert free[full] == 16 - 4 - 1 - 3
    assert free[CROSS_WINDOW] == 16 - 2 - 2
    kept = {
        each.request_id: [len(slots) for slots in each.replaced] for each in manager.state.sequences.values()
    }
    assert kept["b"][-1] == 2
    manager.remove_sequence("b", store=False)
    assert manager.num_free_blocks_per_window()[CROSS_WINDOW] == 14
    manager.remove_sequence("a", store=False)
    assert manager.num_free_blocks_per_window() == {window: 16, full: 16, CROSS_WINDOW: 16}
    manager.check()


def test_schedulers_count_them_as_given_back() -> None:
    """What preempting a sequence would free."""
    manager = KVCacheManager(config())
    two_of_the_same(manager)
    (gain,) = manager.scheduling.simulate().remove("b").values()
    before = manager.num_free_blocks
    manager.remove_sequence("b", store=False)
    assert manager.num_free_blocks == before + gain == before + 4


@pytest.mark.parametrize("append_only", [True, False])
def test_a_lying_snapshot_is_refused(append_only: bool) -> None:
    """Slots that others have, or that no sequence keeps where the setting is off."""
    manager = KVCacheManager(config(append_only_tables=append_only))
    two_of_the_same(manager)
    assert manager.state.created is not None
    exported = manager.state.export()
    first, second = exported.sequences
    kept = second.slots[1:] if append_only else (array("i", [11]).tobytes(),)
    lie = msgspec.structs.replace(first, slots=(*first.slots, *kept))
    state = CacheState()
    state.apply(manager.state.created)
    with pytest.raises(InvariantViolated):
        state.apply(msgspec.structs.replace(exported, sequences=(lie, second)))


def test_the_history_of_a_slot_names_who_keeps_it() -> None:
    """It is in no table, and held all the same."""
    manager = KVCacheManager(config())
    slot, *_ = two_of_the_same(manager)
    occupant = occupant_of(manager.state, 0, PRIMARY, slot)
    assert (occupant.requests, occupant.block, occupant.cached) == (("b",), None, False)
    assert _in_words(occupant) == "replaced in its table, held by b"


def test_a_recorded_engine_returns_them() -> None:
    """What `Recorder.replaced` records is free, whatever the settings say."""
    with Recorder(config(), engine="toy") as recorder:
        assert not recorder.config.append_only_tables


class AppendingWorker:
    """An engine whose worker has tables of its own, and only appends to them; it notes what each slot holds.

    K/V of a token depends on all tokens before it, so a slot holds the tokens up to the last one written there.
    """

    def __init__(self, seed: int, **settings: object) -> None:
        self.rng = random.Random(seed)
        self.manager = KVCacheManager(config(primary_blocks=14, enable_partial_reuse=False, **settings))
        self.beginnings = [self.rng.choices(range(2), k=7) for _ in range(2)]
        self.memory: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}
        self.written: dict[int, int] = {}
        self.admitted = self.replaced = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            try:
                self.rng.choice(
                    [self.admit, self.admit, self.prefill, self.prefill, self.decode, self.decode, self.end]
                )()
            except CapacityError:
                self.end()
            self.read()
        self.manager.check()

    def admit(self) -> None:
        beginning = self.rng.choice(self.beginnings)
        prompt = [*beginning[: self.rng.randint(1, 7)], *self.rng.choices(range(2), k=self.rng.randint(0, 2))]
        self.admitted += 1
        admission = self.manager.add_sequence(self.admitted, prompt, lookup=self.rng.random() < 0.7)
        self.tokens[self.admitted], self.written[self.admitted] = prompt, admission.reused_tokens
        self.tables[self.admitted] = self.manager.block_table(self.admitted).tolist()

    def write(self, number: int, stop: int) -> None:
        tokens, table = self.tokens[number], self.tables[number]
        for token in range(self.written[number], stop):
            assert token % 2 == 0 or self.memory[table[token // 2]] == tokens[:token]
            self.memory[table[token // 2]] = tokens[: token + 1]
        self.written[number] = max(self.written[number], stop)

    def prefill(self) -> None:
        """A chunk for each of them."""
        for number, tokens in self.tokens.items():
            self.write(number, min(len(tokens), self.written[number] + self.rng.randint(1, 4)))
            result = self.manager.store_context_blocks(number, self.written[number])
            self.replaced += len(result.replaced)

    def decode(self) -> None:
        """A token for each that has its prompt; often the same, so that equal blocks are filled in one step."""
        ready = [number for number, tokens in self.tokens.items() if self.written[number] >= len(tokens) - 1]
        ready = [number for number in ready if len(self.tokens[number]) < 20]
        for number in ready:
            self.write(number, len(self.tokens[number]))
        sampled = [self.rng.choice([0, 0, 1]) for _ in ready]
        changed = self.manager.add_tokens(ready, sampled)
        self.replaced += sum(len(result.replaced) for result in changed.values())
        for number, token in zip(ready, sampled, strict=True):
            self.tokens[number].append(token)
            own = self.tables[number]
            own += self.manager.block_table(number).tolist()[len(own) :]

    def end(self) -> None:
        if self.tokens:
            number = self.rng.choice(list(self.tokens))
            self.manager.remove_sequence(number, store=self.rng.random() < 0.8)
            for each in (self.tokens, self.tables, self.written):
                each.pop(number)

    def read(self) -> None:
        """Each sequence finds what it has written, in the worker's table and in the manager's."""
        for number, tokens in self.tokens.items():
            for table in (self.tables[number], self.manager.block_table(number).tolist()):
                for first in range(0, self.written[number], 2):
                    assert self.memory[table[first // 2]] == tokens[: min(first + 2, self.written[number])]


@pytest.mark.parametrize("seed", range(12))
def test_a_worker_that_only_appends_reads_what_it_wrote(seed: int) -> None:
    """Though nobody tells it what was replaced, and it goes on writing where it did."""
    worker = AppendingWorker(seed, append_only_tables=True)
    worker.run(150)
    assert worker.replaced > 5


def test_without_the_setting_it_would_not() -> None:
    """Which is what shows that the test above would find it."""
    failed = 0
    for seed in range(12):
        try:
            AppendingWorker(seed, append_only_tables=False).run(150)
        except (AssertionError, KeyError):
            failed += 1
    assert failed > 6
