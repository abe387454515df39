"""The manager beside the model: random commands, and after each of them everything that both of them know is compared.

Along the way a second state folds the events, and from some point on a second manager that began with an export or
with a fold gets the same commands and has to emit the same events. At the end the log is replayed.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Hashable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from events.log import LogReader
from events.tokens import symbols as symbols_module
from events.tokens.symbols import UNKNOWN
from events.types import (
    PRIMARY,
    SECONDARY,
    AdmissionRefused,
    BlocksMoved,
    BlocksRemoved,
    BlocksUpdated,
    Checkpoint,
    Event,
    MoveReason,
)
from kvcache.config import KVCacheConfig
from kvcache.decide import block_manager
from kvcache.errors import KVCacheError, OutOfBlocks, PromptTooLong
from kvcache.fold.check import check
from kvcache.fold.exported_state import export
from kvcache.fold.fingerprint import fingerprint
from kvcache.fold.state import CacheState
from kvcache.manager import KVCacheManager
from kvcache.replay import Replayed, replay
from kvcache.results import Replacement
from tests import strategies
from tests.model import Model, Refused
from tests.strategies import Namespace, Symbol, cached_blocks, name_of, request, split_names

RequestId = str | int
AHEAD_SHARE = 3
"""So that decoding in these small caches evicts ahead: up to 4 blocks of 12."""


class ManagerBesideModel(RuleBasedStateMachine):
    """Each rule gives one command to both and compares the results; the invariants compare the states."""

    manager: KVCacheManager

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.mkdtemp(prefix="kvcache-model-")
        self.earlier: list[list[Symbol]] = []
        self.history: list[Event] = []
        self.seen = self.twin_seen = 0
        """Events of `history` and of the twin's that were looked at."""
        self.fingerprints: dict[int, bytes] = {}
        self.twin: KVCacheManager | None = None
        self.twin_history: list[Event] = []
        self.twin_since = 0
        """Events of `history` before the twin."""

    @initialize(settings=strategies.configs())
    def create(self, settings: KVCacheConfig) -> None:
        note(f"{settings!r}")
        self.config = settings
        self.manager = KVCacheManager(settings, log=strategies.log_directory(self.directory))
        self.fingerprints[0] = self.manager.fingerprint()
        self.mirror = strategies.mirror_of(self.manager)
        assert self.manager.state.created is not None
        self.history.append(self.manager.state.created)
        self.seen = 1
        self.manager.bus.subscribe(self.history.append)
        self.size = settings.tokens_per_block
        self.windows = [group.window for group in self.manager.layout.groups]
        """Groups of equal size in which equal things happen: the model is each of them."""
        assert settings.primary_blocks is not None
        assert settings.secondary_blocks is not None
        self.limit = min(settings.max_sequence_length, settings.primary_blocks * self.size)
        self.model = Model(
            self.size,
            (settings.primary_blocks, settings.secondary_blocks),
            reuse=settings.enable_block_reuse,
            partial=settings.enable_partial_reuse,
            offload_from=settings.secondary_offload_min_priority,
            ahead_share=AHEAD_SHARE,
        )

    # -- commands

    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        free = [each for each in strategies.IDS if each not in self.model.running]
        if not free:
            return
        batch = data.draw(strategies.batches(free, self.earlier), label="batch")
        requests = [request(*each) for each in batch]
        if any(len(tokens) > self.limit for _, _, tokens in batch):
            with pytest.raises(PromptTooLong):
                self.both("add_sequences", requests)
            return
        self.earlier = (self.earlier + [tokens for _, _, tokens in batch])[-8:]
        sources = [self.source_of(namespace, tokens) for _, namespace, tokens in batch]
        assert self.manager.can_add(requests) == self.model.fitting(batch)[0]
        try:
            expected = self.model.add(batch, [source for source in sources if source is not None])
        except Refused as refused:
            index, needed, available = refused.args
            with pytest.raises(OutOfBlocks) as raised:
                self.both("add_sequences", requests)
            assert (raised.value.index, raised.value.needed, raised.value.available) == (
                index,
                (needed,) * len(self.windows),
                (available,) * len(self.windows),
            )
            return
        admitted = self.both("add_sequences", requests)
        assert [(a.reused_primary, a.reused_secondary, a.reused_partial) for a in admitted] == expected
        assert [[len(table) for table in a.block_tables] for a in admitted] == [
            [-(-len(tokens) // self.size)] * len(self.windows) for _, _, tokens in batch
        ]

    def source_of(self, namespace: Namespace, tokens: Sequence[Symbol]) -> tuple[Any, ...] | None:
        """Which block the manager would copy from; compares its whole match on the way."""
        path, copied, candidates = self.model.match(namespace, tokens)
        asked = request(0, namespace, tokens)
        options: dict[str, Any] = {
            "lora_id": asked.lora_id,
            "lora_name": asked.lora_name,
            "cache_salt": asked.cache_salt,
            "multimodal": asked.multimodal,
            "extra_ids": asked.extra_ids,
        }
        found = self.manager.match(asked.tokens, **options)
        held = [path[:end] for end in range(2, len(path) + 1)]
        assert self.manager.count_reusable(asked.tokens, **options) == len(held)
        for window in self.windows:
            blocks = [block for block in found.blocks if block.window == window]
            assert [block.name for block in blocks] == [name_of(each).hex() for each in held]
            assert [block.level for block in blocks] == [self.model.cached[each].level for each in held]
        if not found.partials:
            assert not candidates
            return None
        assert [(each.window, each.num_tokens) for each in found.partials] == [
            (window, copied) for window in self.windows
        ]
        named = {name_of(each).hex(): each for each in candidates}
        assert found.partial is not None
        return named[found.partial.name]

    @precondition(lambda self: self.model.running)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(list(self.model.running)))
        num_tokens = data.draw(st.integers(0, len(self.model.running[request_id].tokens)))
        swapped = self.model.compute(request_id, num_tokens)
        result = self.both("store_context_blocks", request_id, num_tokens)
        assert result.stored_blocks == self.model.running[request_id].stored
        self.check_swaps(request_id, result.replaced, swapped)

    def check_swaps(self, request_id: Hashable, swaps: list[Replacement], expected: list[int]) -> None:
        for window in self.windows:
            places = [each for each in swaps if each.window == window]
            assert [each.block for each in places] == expected
            table = self.manager.block_table(request_id, window)  # type: ignore[arg-type]
            assert all(table[each.block] == each.new_slot != each.old_slot for each in places)

    @precondition(lambda self: self.model.running)
    @rule(data=st.data(), steps=st.integers(1, 3))
    def decode(self, data: st.DataObject, steps: int) -> None:
        """One token each, for the same sequences several times in a row."""
        ids = data.draw(st.lists(st.sampled_from(list(self.model.running)), min_size=1, unique=True))
        for _ in range(steps):
            self.append(
                ids, data.draw(st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids))), None
            )
            self.states_agree()

    @precondition(lambda self: self.model.running)
    @rule(data=st.data())
    def decode_many(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(list(self.model.running)), min_size=1, unique=True))
        counts = data.draw(st.lists(st.integers(1, 5), min_size=len(ids), max_size=len(ids)))
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=sum(counts), max_size=sum(counts)))
        self.append(ids, tokens, counts)

    def append(self, ids: list[Hashable], tokens: list[int], counts: list[int] | None) -> None:
        arguments = (ids, tokens) if counts is None else (ids, tokens, counts)
        growth = counts or [1] * len(ids)
        if any(
            len(self.model.running[each].tokens) + more > self.limit
            for each, more in zip(ids, growth, strict=True)
        ):
            with pytest.raises(PromptTooLong):
                self.both("add_tokens", *arguments)
            return
        try:
            expected = self.model.append(ids, tokens, growth)
        except Refused as refused:
            self.refused_from(refused.args[0], arguments)
            return
        changed = self.both("add_tokens", *arguments)
        assert set(changed) == set(expected)
        for request_id, result in changed.items():
            assert result.stored_blocks == self.model.running[request_id].stored
            self.check_swaps(request_id, result.replaced, expected[request_id])

    def refused_from(self, index: int, arguments: tuple[Any, ...]) -> None:
        with pytest.raises(OutOfBlocks) as raised:
            self.both("add_tokens", *arguments)
        assert raised.value.index == index

    @precondition(lambda self: self.model.running)
    @rule(
        data=st.data(),
        priority=st.sampled_from([0, 29, 35, 36, 100]),
        start=st.integers(0, 12),
        length=st.none() | st.integers(0, 12),
    )
    def set_priority(self, data: st.DataObject, priority: int, start: int, length: int | None) -> None:
        request_id = data.draw(st.sampled_from(list(self.model.running)))
        stop = None if length is None else start + length
        seen = len(self.history)
        changed = self.model.set_priority(
            request_id, priority, start, strategies.LIMIT if stop is None else stop
        )
        assert self.both("set_priority", request_id, priority, start=start, stop=stop) == len(changed)
        updates = [event for event in self.history[seen:] if isinstance(event, BlocksUpdated)]
        for group in range(len(self.windows)):
            names = [name for e in updates if e.group == group for name in split_names(e.names)]
            assert names == [name_of(path) for path in changed]
        assert all(event.old_priority != event.priority == priority for event in updates)

    @precondition(lambda self: self.model.running)
    @rule(data=st.data(), store=st.sampled_from([True, True, True, False]))
    def remove(self, data: st.DataObject, store: bool) -> None:
        request_id = data.draw(st.sampled_from(list(self.model.running)))
        self.earlier = [*self.earlier[-7:], self.model.running[request_id].tokens]
        self.model.end(request_id, store=store)
        self.both("remove_sequence", request_id, store)

    @rule()
    def flush(self) -> None:
        batch = self.both("flush")
        if batch is not None:
            self.fingerprints[batch.seq] = self.manager.fingerprint()

    @rule(really=st.integers(0, 3))
    def clear(self, really: int) -> None:
        if really:
            return  # a cleared cache is an easy one
        self.model.clear()
        self.both("clear")
        self.fingerprints[self.manager._journal._next_seq - 1] = self.manager.fingerprint()

    @precondition(lambda self: self.twin is None)
    @rule(folded=st.booleans())
    def begin_twin(self, folded: bool) -> None:
        """From here on another manager works beside this one, on a copy of the state as an export or the log has it."""
        created = self.history[0]
        events = self.history if folded else [created, export(self.manager.state)]
        self.twin = strategies.continue_from(self.config, *events)
        self.twin.bus.subscribe(self.twin_history.append)
        self.twin_since = len(self.history)
        assert self.twin.fingerprint() == self.manager.fingerprint()

    def both(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Give a command to the manager and to its twin, which must say and emit the same."""
        before, events = self.manager.fingerprint(), len(self.history)
        try:
            result = getattr(self.manager, method)(*arguments, **options)
        except KVCacheError as error:
            left = [event for event in self.history[events:] if not isinstance(event, AdmissionRefused)]
            assert (self.manager.fingerprint(), left) == (before, [])
            if self.twin is not None:
                with pytest.raises(type(error)):
                    getattr(self.twin, method)(*arguments, **options)
            raise
        if self.twin is not None:
            said = getattr(self.twin, method)(*arguments, **options)
            assert method in ("add_sequences", "flush") or said == result
        return result

    # -- comparing

    @invariant()
    def states_agree(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check()
        blocks = {
            name_of(path): (block.level, block.refs, block.stamp, len(path[-1]), block.priority)
            for path, block in self.model.cached.items()
        }
        for index, group in enumerate(self.manager.state.groups):
            assert cached_blocks(self.manager.state, index) == blocks
            assert [len(level.blank) for level in group.levels] == [
                self.model.blank(PRIMARY),
                self.model.blank(SECONDARY),
            ]
        assert self.manager.num_free_blocks == self.model.available()
        assert self.manager.num_sequences == len(self.model.running)
        symbols: set[tuple[int, Symbol]] = set()
        for request_id, expected in self.model.running.items():
            sequence = self.manager._blocks.sequence(request_id)  # type: ignore[arg-type]
            symbols |= set(zip(sequence.tokens.tolist(), expected.tokens, strict=True))
            assert sequence.computed == expected.computed
            assert sequence.stored == (expected.stored,) * len(self.windows)
        # Equal symbols stand for equal things and the other way round; plain tokens for themselves.
        assert (
            len(symbols) == len({number for number, _ in symbols}) == len({meaning for _, meaning in symbols})
        )
        assert all(
            number == meaning if isinstance(meaning, int) else UNKNOWN < number < 0
            for number, meaning in symbols
        )
        self.events_agree()
        self.folds_agree()

    def events_agree(self) -> None:
        """What left primary or the cache since the last look, and in which order."""
        events, self.seen = self.history[self.seen :], len(self.history)
        for group in range(len(self.windows)):
            self.removals_agree([event for event in events if getattr(event, "group", None) == group])
        self.model.offloaded.clear()
        self.model.removed.clear()

    def removals_agree(self, events: list[Event]) -> None:
        moved = [e for e in events if isinstance(e, BlocksMoved) and e.why == MoveReason.OFFLOAD]
        offloaded = [name for event in moved for name in split_names(event.names)]
        assert offloaded == [name_of(path) for path in self.model.offloaded]
        removed = [name for e in events if isinstance(e, BlocksRemoved) for name in split_names(e.names)]
        for paths in self.model.removed:
            names, removed = removed[: len(paths)], removed[len(paths) :]
            by_name = {name_of(path): path for path in paths}
            assert sorted(names) == sorted(by_name)
            order = [by_name[name] for name in names]
            assert not any(
                later[: len(path)] == path for at, path in enumerate(order) for later in order[at + 1 :]
            )
        assert not removed

    def folds_agree(self) -> None:
        live = self.manager.fingerprint()
        assert fingerprint(self.mirror) == live
        check(self.mirror)
        if self.twin is not None:
            assert self.twin.fingerprint() == live
            # The twin has no log, so it records no fingerprints.
            mine = [e for e in self.history[self.twin_since :] if not isinstance(e, Checkpoint)]
            assert self.twin_history == mine
            self.twin.check()

    def teardown(self) -> None:
        try:
            if hasattr(self, "manager"):
                self.log_replays()
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)

    def log_replays(self) -> None:
        self.manager.close()
        directory = strategies.log_directory(self.directory)
        last = self.manager._journal._next_seq - 1
        self.fingerprints[last] = fingerprint(self.manager.state)
        replayed = Replayed(CacheState())
        for batch in LogReader(directory):
            replayed.fold(batch, verify=True)
            assert replayed.fingerprint == self.fingerprints[batch.seq]
        assert replayed.last_seq == last
        assert replayed.checkpoints_verified
        assert not replayed.checkpoints_failed
        check(replayed.state)
        at = random.Random(last).randrange(last + 1)
        assert replay(directory, at).fingerprint == self.fingerprints[at]


def explore(
    examples: int, steps: int, machine: type[ManagerBesideModel] = ManagerBesideModel, **options: Any
) -> None:
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        **options,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symbols_module, "FORGET_ABOVE", 3)
        patch.setattr(block_manager, "EVICT_AHEAD_SHARE", AHEAD_SHARE)
        run_state_machine_as_test(machine, settings=chosen)


def test_manager_does_what_the_model_does() -> None:
    """After any commands both hold the same, say the same, and gave up the same blocks in the same order."""
    explore(200, 40)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_manager_does_what_the_model_does_for_long() -> None:
    """The same for minutes."""
    explore(5000, 60)
