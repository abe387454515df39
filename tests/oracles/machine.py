"""The manager beside the plain model as a state machine: each command goes to both, and their states are compared."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Hashable, Sequence
from dataclasses import replace
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
from events.types import (
    CROSS_WINDOW,
    AdmissionRefused,
    BlocksUpdated,
    Checkpoint,
    Event,
    UpdateReason,
)
from kvcache.config import KVCacheConfig
from kvcache.decide import block_manager
from kvcache.errors import (
    DuplicateRequest,
    KVCacheError,
    OutOfBlocks,
    PinsExceeded,
    PromptTooLong,
    UsageError,
)
from kvcache.fold.fingerprint import fingerprint
from kvcache.fold.sequence import Sequence as RunningSequence
from kvcache.fold.state import CacheState
from kvcache.inputs import Request
from kvcache.manager import KVCacheManager, Substitutes
from kvcache.replay import Replayed, replay
from kvcache.results import StoreResult
from tests.oracles import agreement
from tests.oracles.cache_model import Model, Refused, reader_namespace
from tests.oracles.window_model import Path, Retention, Running
from tests.support.engines import strategies
from tests.support.engines.inside import journal_of, sequence_of
from tests.support.engines.strategies import Namespace, Symbol, name_of, request, split_names

RequestId = str | int
Requested = tuple[RequestId, Namespace, list[Symbol], Retention | None, int | None, tuple[int, ...] | None]
"""As the model has it."""
AHEAD_SHARE = 3
"""So that decoding in these small caches evicts ahead: up to 4 blocks of 12."""


class ManagerAgainstModel(RuleBasedStateMachine):
    """Each rule gives one command to both and compares the results; the invariants compare the states."""

    manager: KVCacheManager

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.mkdtemp(prefix="kvcache-model-")
        self.earlier: list[list[Symbol]] = []
        self.preempted: dict[Hashable, Requested] = {}
        """Requests that will come back."""
        self.history: list[Event] = []
        self.seen = 0
        """Events of `history` that were looked at."""
        self.fingerprints: dict[int, bytes] = {}
        self.twin: KVCacheManager | None = None
        self.twin_history: list[Event] = []
        self.twin_since = 0
        """Events of `history` before the twin."""
        self.kept: dict[tuple[str, Hashable], set[tuple[int, int]]] = {}
        """Groups and slots that requests, and encoders' inputs, keep though others are in their tables."""

    @initialize(settings=strategies.configs(cross=st.sampled_from([None, None, None, 0.5])))
    def create(self, settings: KVCacheConfig) -> None:
        self.begin(settings)

    def begin(self, settings: KVCacheConfig) -> None:
        note(f"{settings!r}")
        self.config = settings
        self.ticks = strategies.Ticks()
        log = strategies.log_directory(self.directory)
        self.manager = KVCacheManager(settings, log=log, substitutes=Substitutes(monotonic_ns=self.ticks))
        self.ticks.now = strategies.MS
        self.fingerprints[0] = self.manager.fingerprint()
        self.mirror = strategies.mirror_of(self.manager)
        assert self.manager.state.created is not None
        self.history.append(self.manager.state.created)
        self.seen = 1
        self.manager.bus.subscribe(self.history.append)
        self.size = settings.tokens_per_block
        self.windows = [group.window for group in self.manager.layout.windows]
        self.inputs: list[tuple[int, ...]] = []
        assert isinstance(settings.primary_blocks, int)
        assert isinstance(settings.secondary_blocks, int)
        self.longest_prompt = min(settings.max_sequence_length, settings.primary_blocks * self.size)
        self.limit = self.manager.max_tokens
        groups = self.manager.layout.windows
        self.model = Model(
            self.size,
            (settings.primary_blocks, settings.secondary_blocks),
            [group.window if group.kind == "sliding" else settings.max_sequence_length for group in groups],
            settings.max_sequence_length,
            reuse=settings.enable_block_reuse,
            partial=settings.enable_partial_reuse,
            offload_from=settings.secondary_offload_min_priority,
            ahead_share=AHEAD_SHARE,
            evict_ahead=settings.evict_ahead,
            levels=settings.eviction_policy == "levels",
            cross=settings.cross_kv_cache_fraction is not None,
            append_only=settings.append_only_tables,
            keep_reserved=settings.keep_reservations,
            stops={
                stop: (rule.priority, (rule.duration_ms or 0) * strategies.MS)
                for stop, rule in settings.stop_retention.items()
            },
        )
        self.model.now = self.ticks.now

    # -- commands

    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        free = [each for each in strategies.IDS if each not in self.model.running]
        if not free:
            return
        drawn = data.draw(strategies.batches(free, self.earlier), label="batch")
        batch = [(*each, self.draw_input(data)) for each in drawn]
        blind = data.draw(st.sets(st.sampled_from([each[0] for each in batch]), max_size=1), label="blind")
        blind = blind if data.draw(st.integers(0, 4)) == 0 else set()
        self.add(batch, [replace(request(*each), lookup=each[0] not in blind) for each in batch])

    def add(self, batch: list[Requested], requests: list[Request]) -> None:
        self.model.blind = {each.request_id for each in requests if not each.lookup}
        if any(
            max(len(tokens), self.excess(given)) > (self.longest_prompt if reserve is None else self.limit)
            for _, _, tokens, _, reserve, given in batch
        ):
            with pytest.raises(PromptTooLong):
                self.both("add_sequences", requests)
            return
        self.earlier = (self.earlier + [tokens for _, _, tokens, *_ in batch])[-8:]
        self.inputs = (self.inputs + [given for *_, given in batch if given is not None])[-4:]
        sources = [
            self.sources_of(each, namespace, tokens, given) for each, namespace, tokens, _, _, given in batch
        ]
        assert self.manager.can_add(requests) == self.model.fitting(batch)[0]
        try:
            expected = self.model.add(batch, sources)
        except Refused as refused:
            index, needed, available = refused.args
            with pytest.raises(OutOfBlocks) as raised:
                self.both("add_sequences", requests)
            refusal = raised.value
            assert (refusal.index, refusal.needed, refusal.available) == (index, needed, available)
            return
        for said, known in zip(self.both("add_sequences", requests), expected, strict=True):
            agreement.admissions_agree(said, known, self.model)

    def draw_input(self, data: st.DataObject) -> tuple[int, ...] | None:
        """What an encoder reads for a request."""
        return data.draw(strategies.encoder_inputs(self.inputs)) if self.model.cross else None

    def excess(self, given: tuple[int, ...] | None) -> int:
        """By how much an input is too long: more than any prompt may have, if it is."""
        blocks = self.config.primary_blocks
        assert isinstance(blocks, int)
        return strategies.LIMIT + 1 if given is not None and len(given) > blocks * self.size else 0

    def sources_of(
        self,
        request_id: RequestId,
        namespace: Namespace,
        tokens: Sequence[Symbol],
        given: tuple[int, ...] | None,
    ) -> list[Path | None]:
        """Which block the manager would copy from in each window; compares its whole match on the way."""
        expected = self.model.match(reader_namespace(namespace, given), tokens)
        asked = request(0, namespace, tokens, encoder_tokens=given)
        options: dict[str, Any] = {
            "lora_id": asked.lora_id,
            "lora_name": asked.lora_name,
            "cache_salt": asked.cache_salt,
            "multimodal": asked.multimodal,
            "extra_ids": asked.extra_ids,
            "encoder_tokens": given,
        }
        found = self.manager.match(asked.tokens, **options)
        assert self.manager.count_reusable(asked.tokens, **options) == len(expected.path) - 1
        agreement.matches_agree(found, expected, dict(zip(self.windows, self.model.windows, strict=True)))
        if given is not None:
            path = self.model.match_input(namespace, given)
            names = [name_of(path[: block + 2]).hex() for block in range(len(path) - 1)]
            assert [block.name for block in found.encoder_blocks] == names
            assert found.reused_encoder_tokens == min(len(given), len(names) * self.size)
        if request_id in self.model.blind or not found.partials:
            return [None] * len(self.windows)
        return [
            {name_of(each).hex(): each for each in paths}[partial.name]
            for paths, partial in zip(expected.sources, found.partials, strict=True)
        ]

    @precondition(lambda self: self.model.running)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(list(self.model.running)))
        num_tokens = data.draw(st.integers(0, len(self.model.running[request_id].tokens)))
        if num_tokens > self.model.blocks_of(request_id) * self.size:
            with pytest.raises(UsageError, match="has slots for"):
                self.both("store_context_blocks", request_id, num_tokens)
            return
        swapped = self.model.compute(request_id, num_tokens)
        result = self.both("store_context_blocks", request_id, num_tokens)
        self.check_stored(request_id, result, swapped)

    def check_stored(self, request_id: Hashable, result: StoreResult, swapped: list[list[int]]) -> None:
        # How many each window has is compared with the model in states_agree.
        stored = sequence_of(self.manager, request_id).stored  # type: ignore[arg-type]
        assert result.stored_blocks == min(stored[: len(self.windows)])
        tables = {window: self.manager.block_table(request_id, window) for window in self.windows}  # type: ignore[arg-type]
        agreement.swaps_agree(result.replaced, dict(zip(self.windows, swapped, strict=True)), tables)
        self.keep("request", request_id, result)

    def keep(self, what: str, holder: Hashable, result: StoreResult) -> None:
        """Note the slots that stay with whom they were replaced for."""
        names = [*self.windows, CROSS_WINDOW] if self.config.append_only_tables else []
        slots = {(names.index(each.window), each.old_slot) for each in result.replaced if names}
        self.kept.setdefault((what, holder), set()).update(slots)

    @precondition(lambda self: self.model.running and self.model.cross)
    @rule(data=st.data())
    def compute_input(self, data: st.DataObject) -> None:
        """The encoder has run for one of them."""
        request_id = data.draw(st.sampled_from(list(self.model.running)))
        swapped = self.model.compute_input(request_id)
        result = self.both("store_encoder_blocks", request_id)
        number = self.model.running[request_id].input
        assert result.stored_blocks == self.model.cross[0].stored(number)
        table = self.manager.block_table(request_id, CROSS_WINDOW)  # type: ignore[arg-type]
        agreement.swaps_agree(result.replaced, {CROSS_WINDOW: swapped}, {CROSS_WINDOW: table})
        self.keep("input", number, result)

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
    @rule(data=st.data(), draft=st.sampled_from([False, False, True]))
    def decode_many(self, data: st.DataObject, draft: bool) -> None:
        ids = data.draw(st.lists(st.sampled_from(list(self.model.running)), min_size=1, unique=True))
        counts = data.draw(st.lists(st.integers(1, 5), min_size=len(ids), max_size=len(ids)))
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=sum(counts), max_size=sum(counts)))
        self.append(ids, tokens, counts, draft=draft)

    @precondition(lambda self: self.model.running)
    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(list(self.model.running)), min_size=1, unique=True))
        counts = data.draw(st.lists(st.integers(0, 5), min_size=len(ids), max_size=len(ids)))
        if any(
            len(self.model.running[each].tokens) + more > self.limit and self.has_slots(each)
            for each, more in zip(ids, counts, strict=True)
        ):
            with pytest.raises(PromptTooLong):
                self.both("reserve", ids, counts)
            return
        try:
            self.model.reserve(ids, counts)
        except Refused as refused:
            self.refused_from(refused.args[0], "reserve", ids, counts)
            return
        self.both("reserve", ids, counts)

    def has_slots(self, request_id: Hashable) -> bool:
        """Whether each of its tokens has a slot."""
        return self.model.blocks_of(request_id) * self.size >= len(self.model.running[request_id].tokens)

    def refused_from(self, index: int, method: str, *arguments: Any, **options: Any) -> None:
        with pytest.raises(OutOfBlocks) as raised:
            self.both(method, *arguments, **options)
        assert raised.value.index == index

    def append(
        self, ids: list[Hashable], tokens: list[int], counts: list[int] | None, *, draft: bool = False
    ) -> None:
        arguments = (ids, tokens) if counts is None else (ids, tokens, counts)
        growth = counts or [1] * len(ids)
        if not all(self.has_slots(each) for each in ids):
            with pytest.raises((UsageError, PromptTooLong)):
                self.both("add_tokens", *arguments, draft=draft)
            return
        if any(
            len(self.model.running[each].tokens) + more > self.limit
            for each, more in zip(ids, growth, strict=True)
        ):
            with pytest.raises(PromptTooLong):
                self.both("add_tokens", *arguments, draft=draft)
            return
        try:
            expected = self.model.append(ids, tokens, growth, draft)
        except Refused as refused:
            self.refused_from(refused.args[0], "add_tokens", *arguments, draft=draft)
            return
        changed = self.both("add_tokens", *arguments, draft=draft)
        assert {request_id for request_id, result in changed.items() if result.replaced} == set(expected)
        for request_id, swapped in expected.items():
            self.check_stored(request_id, changed[request_id], swapped)

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
        assert self.both("set_priority", request_id, priority, start=start, stop=stop) == max(
            map(len, changed)
        )
        updates = [event for event in self.history[seen:] if isinstance(event, BlocksUpdated)]
        for group, paths in enumerate(changed):
            names = [name for e in updates if e.group == group for name in split_names(e.names)]
            assert names == [name_of(path) for path in paths]
        assert all(event.old_priority != event.priority == priority for event in updates)

    @precondition(lambda self: self.model.running)
    @rule(
        data=st.data(),
        store=st.sampled_from([True, True, True, False]),
        stop=st.sampled_from([None, *strategies.STOPS]),
    )
    def remove(self, data: st.DataObject, store: bool, stop: str | None) -> None:
        request_id = data.draw(st.sampled_from(list(self.model.running)))
        self.earlier = [*self.earlier[-7:], self.model.running[request_id].tokens]
        self.model.end(request_id, store=store, stop=stop)
        self.both("remove_sequence", request_id, store, stop=stop)

    @precondition(lambda self: self.model.running)
    @rule()
    def preempt(self) -> None:
        """The youngest makes room; what it has computed may stay."""
        request_id = list(self.model.running)[-1]
        running = self.model.running[request_id]
        namespace, given = running.namespace, None
        if self.model.cross:
            _, namespace, given = running.namespace  # type: ignore[misc]
        self.preempted[request_id] = request_id, namespace, running.tokens, running.retention, None, given  # type: ignore[assignment]
        self.model.end(request_id, store=True)
        self.both("remove_sequence", request_id, why="preempted")

    @precondition(lambda self: self.preempted.keys() - self.model.running.keys())
    @rule()
    def return_(self) -> None:
        """One that was preempted comes back with all its tokens."""
        request_id = next(each for each in self.preempted if each not in self.model.running)
        requested = self.preempted.pop(request_id)
        self.add([requested], [replace(request(*requested), resumed=True)])

    @rule()
    def flush(self) -> None:
        seen = len(self.history)
        batch = self.both("flush")
        self.model.expire(self.order_of_expiry(self.history[seen:]))
        if batch is not None:
            self.fingerprints[batch.seq] = self.manager.fingerprint()
        agreement.gauges_agree(self.manager.stats(), self.model)

    @precondition(lambda self: self.model.running)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(list(self.model.running)))
        free = [each for each in strategies.IDS if each not in self.model.running]
        if not free:
            with pytest.raises(DuplicateRequest):
                self.both("fork", parent, parent)
            return
        child = data.draw(st.sampled_from(free))
        try:
            swapped = self.model.fork(parent, child)
        except Refused:
            with pytest.raises(OutOfBlocks):
                self.both("fork", parent, child)
            return
        self.check_stored(parent, self.both("fork", parent, child), swapped)

    @precondition(lambda self: self.model.running)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(list(self.model.running)))
        length = len(self.model.running[request_id].tokens)
        if length < 2:
            return
        num_tokens = length - data.draw(st.integers(1, min(6, length - 1)))
        try:
            self.model.rewind(request_id, num_tokens)
        except Refused as refused:
            with pytest.raises(UsageError if refused.args[0] else OutOfBlocks):
                self.both("rewind", request_id, num_tokens)
            return
        self.both("rewind", request_id, num_tokens)

    @precondition(lambda self: self.model.running)
    @rule(data=st.data(), start=st.integers(0, 8), length=st.none() | st.integers(0, 12))
    def pin(self, data: st.DataObject, start: int, length: int | None) -> None:
        request_id = data.draw(st.sampled_from(list(self.model.running)))
        stop = None if length is None else start + length
        try:
            number = self.model.pin(
                request_id, start, strategies.LIMIT if stop is None else stop, self.config.max_pinned_share
            )
        except Refused:
            with pytest.raises(PinsExceeded):
                self.both("pin", request_id, start, stop)
            return
        assert self.both("pin", request_id, start, stop) == number
        pinned = self.manager.pins()[number]
        assert list(pinned.blocks.values()) == [len(each.pins[number]) for each in self.model.groups]

    @precondition(lambda self: self.model.windows[0].pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.model.windows[0].pins)))
        self.model.unpin(number)
        self.both("unpin", number)

    def order_of_expiry(self, events: Sequence[Event]) -> list[dict[Path, int]]:
        """In which order the manager has told of blocks whose time was over, by window."""
        reported = [event for event in events if isinstance(event, BlocksUpdated)]
        assert all(event.why == UpdateReason.EXPIRED and event.clock == self.ticks.now for event in reported)
        order = []
        for index, window in enumerate(self.model.groups):
            names = [name for event in reported if event.group == index for name in split_names(event.names)]
            assert len(set(names)) == len(names)
            paths = {name_of(path): path for path in window.cached}
            order.append({paths[name]: rank for rank, name in enumerate(names)})
        return order

    @rule(ms=st.integers(1, 4))
    def wait(self, ms: int) -> None:
        """Time goes on."""
        self.ticks.now += ms * strategies.MS
        self.model.now = self.ticks.now

    @rule(really=st.integers(0, 3))
    def clear(self, really: int) -> None:
        if really:
            return  # a cleared cache is an easy one
        self.model.clear()
        self.both("clear")
        self.fingerprints[journal_of(self.manager).next_seq - 1] = self.manager.fingerprint()

    @precondition(lambda self: self.twin is None)
    @rule(folded=st.booleans())
    def begin_twin(self, folded: bool) -> None:
        """From here on another manager works beside this one, on a copy of the state as an export or the log has it."""
        created = self.history[0]
        events = self.history if folded else [created, self.manager.state.export()]
        self.twin = strategies.continue_from(self.config, *events, ticks=self.ticks)
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
        for index, window in enumerate(self.model.groups):
            agreement.blocks_agree(self.manager.state, index, window)
            agreement.uses_agree(self.manager.state, index, window)
        free = [window.available() for window in self.model.windows]
        assert self.manager.num_free_blocks == min(free)
        names = [*self.windows, CROSS_WINDOW]
        of_all = dict(zip(names, [window.available() for window in self.model.groups], strict=False))
        assert self.manager.num_free_blocks_per_window() == of_all
        assert self.manager.num_sequences == len(self.model.running)
        symbols: set[tuple[int, Symbol]] = set()
        for request_id, expected in self.model.running.items():
            sequence = sequence_of(self.manager, request_id)  # type: ignore[arg-type]
            symbols |= set(zip(sequence.tokens.tolist(), expected.tokens, strict=True))
            assert sequence.computed == expected.computed
            for window, tokens, stored in zip(
                self.model.windows, self.windows, sequence.stored, strict=False
            ):
                agreement.tables_agree(window, request_id, self.manager.block_table(request_id, tokens))  # type: ignore[arg-type]
                assert max(stored, window.detached(request_id)) == window.stored(request_id)
            self.inputs_agree(request_id, expected, sequence)
        agreement.symbols_agree(symbols)
        running = {"request": self.model.running.keys(), "input": self.model.inputs.keys()}
        self.kept = {key: slots for key, slots in self.kept.items() if key[1] in running[key[0]]}
        agreement.kept_agree(self.manager.state, list(self.kept.values()))
        self.events_agree()
        self.folds_agree()

    def inputs_agree(self, request_id: Hashable, expected: Running, sequence: RunningSequence) -> None:
        """What an encoder has read for it."""
        for window in self.model.cross:
            table = self.manager.block_table(request_id, CROSS_WINDOW)  # type: ignore[arg-type]
            agreement.tables_agree(window, expected.input, table)
            encoder, known = sequence.encoder, self.model.inputs[expected.input]
            assert encoder is not None
            assert (encoder.tokens.tolist(), encoder.computed) == (known.tokens, known.computed)
            assert encoder.stored[-1] == window.stored(expected.input)

    def events_agree(self) -> None:
        """What left primary or the cache since the last look, and in which order."""
        events, self.seen = self.history[self.seen :], len(self.history)
        for index, window in enumerate(self.model.groups):
            own = [event for event in events if getattr(event, "group", None) == index]
            agreement.removals_agree(own, window)
            agreement.detachments_agree(self.manager.state, own, window)
            window.offloaded.clear()
            window.removed.clear()
            window.let_go.clear()

    def folds_agree(self) -> None:
        live = self.manager.fingerprint()
        assert fingerprint(self.mirror) == live
        self.mirror.check()
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
        last = journal_of(self.manager).next_seq - 1
        self.fingerprints[last] = fingerprint(self.manager.state)
        replayed = Replayed(CacheState())
        for batch in LogReader(directory):
            replayed.fold(batch, verify=True)
            assert replayed.fingerprint == self.fingerprints[batch.seq]
        assert replayed.last_seq == last
        assert replayed.checkpoints_verified
        assert not replayed.checkpoints_failed
        replayed.state.check()
        at = random.Random(last).randrange(last + 1)
        assert replay(directory, at).fingerprint == self.fingerprints[at]


def explore(
    examples: int, steps: int, machine: type[ManagerAgainstModel] = ManagerAgainstModel, **options: Any
) -> None:
    """Compare the manager with the model in this many random programs of at most this many steps."""
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        suppress_health_check=list(HealthCheck),
        **options,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symbols_module, "FORGET_ABOVE", 3)
        patch.setattr(block_manager, "EVICT_AHEAD_SHARE", AHEAD_SHARE)
        run_state_machine_as_test(machine, settings=chosen)
