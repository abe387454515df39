"""Recorded requests played again: exactly as it was under the log's own settings, evidently under others."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from events import types as ev
from events.log import LogReader, LogWriter
from events.packed import NAME_BYTES, SLOT_BYTES
from events.tokens.rich import RichTokens
from kvcache.config import KVCacheConfig, LogConfig
from kvcache.errors import ConfigError, OutOfBlocks, PromptTooLong, UsageError
from kvcache.fold.prefix_tree import Run
from kvcache.fold.sequence import Sequence
from kvcache.manager import KVCacheManager, Substitutes
from kvcache.recorder import Recorder
from kvcache.whatif.commands import Compute, RecordedPrompt, Remove, Unplayable, prompts, recorded
from kvcache.whatif.playback import Playback, PlayedRequest, Tally
from kvcache.whatif.policies import AdaptiveReplacement, known_policies
from kvcache.whatif.trial import Trial, play, playback_of
from tests.support.engines import strategies
from tests.support.engines.foreign_engine import ForeignEngine
from tests.support.logs.random_logs import random_log
from tests.support.seeds import seeds

IMAGES = (b"\x11" * 32, b"\x22" * 32)


class Program:
    """A random engine, which does whatever an engine may do; with `branches` also forks, drafts and rewinds.

    With `ahead` it has slots before it needs them, and prompts get theirs chunk by chunk.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        seed: int,
        *,
        branches: bool = False,
        ahead: bool = False,
        ticks: strategies.Ticks | None = None,
        plain: bool = False,
    ) -> None:
        self._manager, self._rng, self._branches, self._ahead = manager, random.Random(seed), branches, ahead
        self._ticks = ticks or strategies.Ticks()
        """The manager's time, which goes on between two batches."""
        self._plain = plain
        """Whether it does nothing of which a log has only what came of it."""
        self._running: list[int] = []
        self._next = 0
        self._prompts: list[tuple[Any, list[Any]]] = []

    def run(self, steps: int) -> None:
        calls = [self._add] * 4 + [self._compute] * 4 + [self._append] * 4 + [self._remove] * 3
        calls += [self._prioritize] * (not self._plain) + [self._flush, self._flush]
        calls += [self._fork, self._fork, self._draft, self._rewind, self._rewind] * self._branches
        calls += [self._reserve] * 4 * self._ahead
        for _ in range(steps):
            self._rng.choice(calls)()
            if self._rng.random() < 0.02:
                self._manager.clear()
            if self._rng.random() < 0.1:
                self._manager.poll()
        self._flush()

    def _prompt(self) -> tuple[Any, list[Any]]:
        rng = self._rng
        if self._prompts and rng.random() < 0.7:
            space, before = rng.choice(self._prompts)
            kept = before[: rng.randrange(len(before) + 1)]
        else:
            space, kept = (
                rng.choice((strategies.NAMESPACES[0],) * 5 + (*strategies.NAMESPACES, strategies.EXTRA)),
                [],
            )
        more: list[Any] = [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
        if rng.random() < 0.2:
            digest = rng.choice(IMAGES)
            more += [(7, 0, digest, offset) for offset in range(rng.randrange(1, 5))]
        prompt = (space, [*kept, *more][: strategies.LIMIT - 2])
        self._prompts.append(prompt)
        return prompt

    def _add(self) -> None:
        requests = []
        for _ in range(self._rng.choice([1, 1, 2, 3])):
            self._next += 1
            chunk = self._rng.randint(1, 6) if self._ahead and self._rng.random() < 0.5 else None
            asked = strategies.request(self._next, *self._prompt(), reserve_tokens=chunk)
            requests.append(replace(asked, lookup=self._rng.random() > 0.1))
        try:
            self._manager.add_sequences(requests)
        except (OutOfBlocks, PromptTooLong):
            return
        self._running += [int(request.request_id) for request in requests]

    def _sequence(self, request_id: int) -> Sequence:
        state = self._manager.state
        return state.sequences[state.handles[request_id]]

    def _length(self, request_id: int) -> int:
        return self._sequence(request_id).num_tokens

    def _slots(self, request_id: int) -> int:
        return len(self._sequence(request_id).tables[0]) * self._manager.config.tokens_per_block

    def _compute(self) -> None:
        if self._running:
            request_id = self._rng.choice(self._running)
            most = min(self._length(request_id), self._slots(request_id))
            computed = self._rng.randint(0, most)
            # What a request has reused is not computed in its log, and without that reuse it would have been.
            self._manager.store_context_blocks(request_id, most if self._plain else computed)

    def _reserve(self) -> None:
        chosen = [each for each in self._running if self._rng.random() < 0.7]
        with suppress(OutOfBlocks, PromptTooLong):
            self._manager.reserve(chosen, [self._rng.randint(0, 5) for _ in chosen])

    def _decoding(self) -> list[int]:
        """Those that have slots for all of their tokens."""
        return [each for each in self._running if self._slots(each) >= self._length(each)]

    def _append(self) -> None:
        chosen = [each for each in self._decoding() if self._rng.random() < 0.7]
        counts = [self._rng.randint(1, 3) for _ in chosen] if self._rng.random() < 0.3 else None
        tokens = [self._rng.randrange(3) for _ in range(len(chosen) if counts is None else sum(counts))]
        try:
            self._manager.add_tokens(chosen, tokens, counts)
        except (OutOfBlocks, PromptTooLong):
            self._remove()

    def _fork(self) -> None:
        if self._running:
            self._next += 1
            with suppress(OutOfBlocks):
                self._manager.fork(self._rng.choice(self._running), self._next)
                self._running.append(self._next)

    def _draft(self) -> None:
        """Append drafts, of which some are rejected."""
        if decoding := self._decoding():
            request_id, count = self._rng.choice(decoding), self._rng.randint(1, 4)
            with suppress(OutOfBlocks, PromptTooLong):
                tokens = self._rng.choices(range(3), k=count)
                self._manager.add_tokens([request_id], tokens, [count], draft=True)
                self._rewind(request_id, self._rng.randint(0, count))

    def _rewind(self, request_id: int | None = None, taken_back: int | None = None) -> None:
        if self._running:
            request_id = self._rng.choice(self._running) if request_id is None else request_id
            length = self._length(request_id)
            taken_back = self._rng.randrange(length) if taken_back is None else taken_back
            with suppress(OutOfBlocks, UsageError):  # a window has let go of what would be needed
                self._manager.rewind(request_id, length - taken_back)

    def _remove(self) -> None:
        if self._running:
            request_id = self._running.pop(self._rng.randrange(len(self._running)))
            stop = self._rng.choice((None, *strategies.STOPS))
            self._manager.remove_sequence(
                request_id, store=self._plain or self._rng.random() < 0.7, stop=stop
            )

    def _prioritize(self) -> None:
        if self._running:
            start = self._rng.randrange(10)
            stop = start + self._rng.randrange(10)
            priority = self._rng.choice([0, 20, 80])
            self._manager.set_priority(self._rng.choice(self._running), priority, start=start, stop=stop)

    def _flush(self) -> None:
        if self._plain and not self._manager.bus.pending:
            return  # an empty flush ends retentions, and a log has no batch of it that would say when
        self._manager.flush()
        self._ticks.now += self._rng.choice((0, 0, strategies.MS))


def reported(event: Any) -> Any:
    """What must be the same: everything but names, and the numbers of requests."""
    match event:
        case ev.SequenceAdded():
            reused = (event.reused, event.reused_primary, event.reused_secondary, event.reused_partial)
            return "added", event.tokens, event.lookup, *reused
        case ev.BlocksMoved():
            return "moved", event.group, event.from_level, event.from_slots, event.to_slots, event.why
        case ev.BlocksRemoved():
            return "removed", event.group, event.level, event.slots, event.why
        case ev.BlocksAllocated():
            return "allocated", event.group, event.slots, event.why
        case ev.BlocksReturned():
            return "returned", event.group, event.slots
        case ev.SequenceRemoved():
            return "ended", event.stored, event.freed, event.num_tokens, event.computed, event.stop
        case ev.BlocksUpdated() if event.why != ev.UpdateReason.SET:  # one call may be played as several
            return "updated", event.group, event.level, event.slots, event.priority, event.duration, event.why
    return None


def play_again(log: Path) -> tuple[list[Any], list[Any], Tally, Tally]:
    """What was told and counted then, and what is now."""
    then: list[Any] = []
    now: list[Any] = []
    tally = Tally()
    playback = Playback(on_event=lambda event: now.append(reported(event)))
    for batch in recorded(log):
        then += map(reported, batch.events)
        for event in batch.events:
            tally.count(event)
        playback.play(batch)
    again = playback.finish()
    return [each for each in then if each], [each for each in now if each], tally, again


@example(
    strategies.config(num_layers=3, tokens_per_block=4, primary_blocks=5, append_only_tables=True),
    0,
    True,
    True,
)
@given(strategies.configs(), st.integers(0, 10**9), st.booleans(), st.booleans())
def test_random_logs_play_again_as_they_were(
    config: KVCacheConfig, seed: int, branches: bool, ahead: bool
) -> None:
    """Under a log's own settings each request reuses what it did, and the same blocks are evicted in the same order."""
    with TemporaryDirectory() as parent:
        log, ticks = strategies.log_directory(parent), strategies.Ticks()
        with KVCacheManager(config, log=log, substitutes=Substitutes(monotonic_ns=ticks)) as manager:
            Program(manager, seed, branches=branches, ahead=ahead, ticks=ticks).run(80)
        then, now, counted, tally = play_again(log)
    assert now == then
    counted.waited = 0  # requests that were refused and never admitted have left no tokens
    assert tally == counted


RULES = {"tool_calls": "60:3ms", "stop": 20, "*": 40}


@given(strategies.configs(), st.integers(0, 10**9))
def test_rules_for_stop_reasons_do_what_they_would_have_done(config: KVCacheConfig, seed: int) -> None:
    """On a log that was recorded without: it has the reasons, and the times of its batches."""
    received: list[list[Any]] = []
    with TemporaryDirectory() as parent:
        log = strategies.log_directory(parent)
        for rules in ({}, RULES):
            ticks = strategies.Ticks()
            set_otherwise = KVCacheConfig(**config.model_dump() | {"stop_retention": rules})
            substitutes = Substitutes(wall_ns=partial(_wall_ns, ticks), monotonic_ns=ticks)
            with KVCacheManager(
                set_otherwise, log=None if rules else log, substitutes=substitutes
            ) as manager:
                received.append([])
                manager.bus.subscribe(lambda event: received[-1].append(reported(event)))
                Program(manager, seed, ticks=ticks, plain=True).run(80)
                manager.flush()  # at the time of the end, which is in the log, too
        now: list[Any] = []
        trial = Trial({"stop_retention": RULES})
        playback = Playback(trial.settings, on_event=lambda event: now.append(reported(event)))
        for batch in recorded(log):
            playback.play(batch)
        playback.finish()
    without, live, played = ([each for each in events if each] for events in (*received, now))
    assume(_requests(without) == _requests(live))  # else other requests have fitted
    assert [*_by_call(played)] == [*_by_call(live)]


def _by_call(events: list[Any]) -> Iterator[Any]:
    """What is evicted and offloaded in a row is counted: in which parts that happens, a log does not settle."""
    for evictions, several in groupby(events, lambda event: event[0] in ("removed", "moved")):
        if evictions:
            yield Counter((each[0], each[2], each[-1]) for each in several for _ in range(len(each[3]) // 4))
        else:
            yield from several


def _wall_ns(ticks: strategies.Ticks) -> int:
    return 10**18 + ticks.now


def _requests(events: list[Any]) -> list[Any]:
    """Which prompts were admitted, and with how many tokens, and why, requests ended."""
    return [
        each[1] if each[0] == "added" else (each[3], each[5])
        for each in events
        if each[0] in ("added", "ended")
    ]


def log_of(parent: Path, config: KVCacheConfig, program: Any) -> Path:
    """The log of what a program does with a manager."""
    with KVCacheManager(config, log=parent / "log") as manager:
        program(manager)
    return parent / "log"


def play_one(log: Path, policy: str = "lru", **sets: Any) -> Tally:
    """What one combination counts."""
    return play(log, [Trial(sets, policy)])[1].tally


def serve(manager: KVCacheManager, request_id: Any, prompt: list[int], outputs: int = 0) -> None:
    """One request from its beginning to its end, a batch for each step."""
    manager.add_sequence(request_id, prompt)
    manager.store_context_blocks(request_id, len(prompt))
    manager.flush()
    for number in range(outputs):
        manager.add_tokens([request_id], [number])
        manager.flush()
    manager.remove_sequence(request_id)
    manager.flush()


class TestCommands:
    """What is read off events that do not name the command."""

    def test_an_end_that_stores_nothing(self, tmp_path: Path) -> None:
        """Whether the end of a request stored what was left is known by what is not stored."""

        def program(manager: KVCacheManager) -> None:
            for number, store in enumerate((True, False, True)):
                manager.add_sequence(number, [number] * 7)
                manager.store_context_blocks(number, 7)
                manager.remove_sequence(number, store=store)
                manager.flush()

        log = log_of(tmp_path, strategies.config(), program)
        commands = [command for batch in recorded(log) for command in batch.commands]
        assert [each.store for each in commands if isinstance(each, Remove)] == [True, False, True]

    def test_what_is_stored_again_after_a_clear(self, tmp_path: Path) -> None:
        """A call that had nothing new computed to tell is found by the blocks that it stored."""

        def program(manager: KVCacheManager) -> None:
            manager.add_sequence("a", [1] * 6)
            manager.store_context_blocks("a", 6)
            manager.clear()
            manager.store_context_blocks("a", 4)
            manager.flush()

        log = log_of(tmp_path, strategies.config(), program)
        commands = [command for batch in recorded(log) for command in batch.commands]
        assert [each.num_tokens for each in commands if isinstance(each, Compute)] == [6, 6]
        then, now, *_ = play_again(log)
        assert now == then

    def test_every_call_is_read_once(self, tmp_path: Path) -> None:
        """What the end of a request stores is no call of its own."""

        def program(manager: KVCacheManager) -> None:
            manager.add_sequence("a", [1, 1, 1])
            manager.store_context_blocks("a", 3)
            manager.add_tokens(["a"], [2])
            manager.remove_sequence("a")
            manager.clear()

        log = log_of(tmp_path, strategies.config(), program)
        commands = [type(command).__name__ for batch in recorded(log) for command in batch.commands]
        assert commands == ["Create", "Admit", "Compute", "Append", "Remove", "Clear"]

    def test_a_log_without_tokens(self, tmp_path: Path) -> None:
        """It cannot be played, and says what to do."""
        config = strategies.config(log=LogConfig(record_tokens=False, fsync="never"))
        log = log_of(tmp_path, config, lambda manager: serve(manager, 1, [1, 2, 3]))
        for read in (recorded, prompts):
            with pytest.raises(Unplayable, match=r"does not record tokens.*log\.record_tokens=true"):
                list(read(log))

    def test_a_log_that_begins_with_a_state(self, tmp_path: Path) -> None:
        """Nothing tells how what was cached at its beginning came there."""
        with KVCacheManager(strategies.config()) as first:
            serve(first, 1, [1] * 8)
            state = first.state
            with KVCacheManager.resume(state, log=tmp_path / "log") as manager:
                serve(manager, 2, [1] * 8)
        with pytest.raises(Unplayable, match="is not empty"):
            list(recorded(tmp_path / "log"))

    def test_epochs_begin_empty(self, tmp_path: Path) -> None:
        """A process that began anew had nothing cached, and has nothing when it is played."""
        for resume in (False, True):
            writer = LogWriter(tmp_path / "log", fsync="never", resume=resume)
            with KVCacheManager(strategies.config(), log=writer) as manager:
                serve(manager, "same", [1] * 8)
                serve(manager, "again", [1] * 8)
        then, now, counted, tally = play_again(tmp_path / "log")
        assert now == then
        assert tally.requests == counted.requests == 4
        assert tally.reused_tokens == 2 * 7


class TestLack:
    """Requests that do not fit when the log has them admitted."""

    def both(self, manager: KVCacheManager) -> None:
        """Two requests side by side, of 8 tokens and 2 outputs each."""
        for number in (1, 2):
            manager.add_sequence(number, [number] * 8)
            manager.store_context_blocks(number, 8)
            manager.flush()
        for _ in range(2):
            manager.add_tokens([1, 2], [7, 7])
            manager.flush()
        for number in (1, 2):
            manager.remove_sequence(number)
        manager.flush()

    def test_who_waits_comes_as_much_later(self, tmp_path: Path) -> None:
        """The second request waits for the first one's end, and then does all that it did, as much later."""
        log = log_of(tmp_path, strategies.config(primary_blocks=10), self.both)
        ended: list[Any] = []
        trial = Trial({"primary_blocks": 6})
        playback = Playback(trial.settings, on_event=ended.append)
        for batch in recorded(log):
            playback.play(batch)
        tally = playback.finish()
        assert (tally.requests, tally.waited, tally.unserved, tally.preempted) == (2, 1, 0, 0)
        # It was admitted in the batch in which the first one ended, so it went on in the one after that.
        assert tally.waited_batches == 4
        removed = [event for event in ended if isinstance(event, ev.SequenceRemoved)]
        assert [(event.handle, event.num_tokens, event.computed) for event in removed] == [
            (1, 10, 9),
            (2, 10, 9),
        ]

    def test_who_was_admitted_last_gives_way_to_tokens(self, tmp_path: Path) -> None:
        """Without a block for a sampled token the last request goes, and comes again with what it had."""
        log = log_of(tmp_path, strategies.config(primary_blocks=10), self.both)
        tally = play_one(log, primary_blocks=9)
        assert (tally.requests, tally.waited, tally.preempted) == (2, 0, 1)
        assert tally.prompt_tokens == 16
        # All 8 tokens of the prompt were stored; the last one is computed again, since some token has to be.
        assert tally.recomputed_tokens == 1
        assert tally.computed_tokens == 17

    def test_steps_come_as_much_later_as_the_admission(self) -> None:
        """A request that begins to wait in batch 3 and is admitted at the end of batch 7 goes on in batch 8."""
        request = PlayedRequest(RecordedPrompt(5, 5, ev.Namespace(), RichTokens(b"")))
        request.stopped_at = 3
        assert request.go_on(7) == 5
        request.steps += [(3, Remove(5, store=True)), (4, Remove(5, store=True))]
        assert [now for now in range(12) if request.is_due(now)] == [8, 9, 10, 11]
        request.steps.popleft()
        assert [now for now in range(12) if request.is_due(now)] == [9, 10, 11]

    def test_what_never_fits(self, tmp_path: Path) -> None:
        """A prompt that is longer than the cache is refused, an output that gets longer is cut short."""

        def program(manager: KVCacheManager) -> None:
            serve(manager, 1, [1] * 12)
            serve(manager, 2, [2] * 7, outputs=4)
            serve(manager, 3, [3] * 4)

        log = log_of(tmp_path, strategies.config(primary_blocks=10), program)
        tally = play_one(log, primary_blocks=4)
        assert (tally.too_long, tally.cut_short, tally.requests) == (1, 1, 2)
        assert (tally.prompt_tokens, tally.unserved_tokens) == (11, 12)

    def test_who_waits_for_nobody(self, tmp_path: Path) -> None:
        """What holds its blocks for ever leaves others unserved, and the play ends."""

        def program(manager: KVCacheManager) -> None:
            for number in (1, 2):
                manager.add_sequence(number, [number] * 8)
                manager.flush()

        tally = play_one(log_of(tmp_path, strategies.config(), program), primary_blocks=4)
        assert (tally.requests, tally.waited, tally.unserved) == (1, 1, 1)
        assert (tally.prompt_tokens, tally.unserved_tokens) == (8, 8)


class TestBranches:
    """Sequences that branch, and that take tokens back."""

    @pytest.mark.parametrize("policy", ["lru", "returns", "belady"])
    def test_a_branch_that_does_not_fit(self, tmp_path: Path, policy: str) -> None:
        """It is played as a request of its own, of which nobody knows before that it comes."""

        def program(manager: KVCacheManager) -> None:
            for number in (1, 2):
                manager.add_sequence(number, [number] * 8)
                manager.store_context_blocks(number, 8)
                manager.flush()
            manager.add_tokens([1], [7])
            manager.fork(1, 3)
            manager.flush()
            for number in (2, 1, 3):
                manager.remove_sequence(number)
                manager.flush()

        log = log_of(tmp_path, strategies.config(primary_blocks=12), program)
        fits, tight = (play_one(log, policy, primary_blocks=blocks) for blocks in (12, 9))
        assert (fits.requests, fits.waited, fits.unserved) == (2, 0, 0)
        # All but its last token is cached by then.
        assert (tight.requests, tight.waited, tight.unserved, tight.reused_tokens) == (3, 1, 0, 8)

    def rewinding(self, manager: KVCacheManager) -> None:
        """Two requests that run beside each other; the first takes back all but 5 of its 12 tokens."""
        for number in (1, 2):
            manager.add_sequence(number, [number] * 10)
            manager.store_context_blocks(number, 10)
            manager.flush()
        manager.add_tokens([1], [7, 7], [2])
        manager.flush()
        manager.rewind(1, 5)
        manager.add_tokens([1, 2], [8, 8])
        manager.flush()
        for number in (1, 2):
            manager.remove_sequence(number)
            manager.flush()

    def test_a_rewind_further_than_a_narrower_window_goes(self, tmp_path: Path) -> None:
        """The request ends and is admitted again with the tokens that are left, and goes on where it was."""
        log = log_of(tmp_path, strategies.config(primary_blocks=20), self.rewinding)
        trial = Trial({"max_attention_window": (3,)})
        received: list[Any] = []
        playback = Playback(trial.settings, on_event=received.append)
        for batch in recorded(log):
            playback.play(batch)
        tally = playback.finish()
        ended = [event.num_tokens for event in received if isinstance(event, ev.SequenceRemoved)]
        assert ended == [12, 6, 11]
        assert (tally.requests, tally.preempted, tally.waited, tally.prompt_tokens) == (2, 1, 0, 20)
        assert tally.recomputed_tokens == 1  # its blocks are cached still

    def test_a_request_that_gives_way_has_the_tokens_that_were_left(self, tmp_path: Path) -> None:
        """A request goes back into its prompt, is removed for want of a block, and comes again as short as it was."""

        def program(manager: KVCacheManager) -> None:
            for number in (1, 2):
                manager.add_sequence(number, [number] * 6)
            manager.rewind(2, 3)
            manager.flush()
            for _ in range(3):
                manager.add_tokens([1], [7])
                manager.flush()
            for number in (1, 2):
                manager.remove_sequence(number)
                manager.flush()

        log = log_of(tmp_path, strategies.config(primary_blocks=20), program)
        received: list[Any] = []
        playback = Playback(Trial({"primary_blocks": 6}).settings, on_event=received.append)
        for batch in recorded(log):
            playback.play(batch)
        tally = playback.finish()
        assert tally.preempted == 1
        assert [
            (event.handle, event.num_tokens) for event in received if isinstance(event, ev.SequenceRemoved)
        ] == [(2, 3), (1, 9), (3, 3)]


class TestChunks:
    """Prompts that get their slots chunk by chunk."""

    def two(self, manager: KVCacheManager) -> None:
        """Two prompts of 10 tokens, 4 tokens of each at a time, in turn."""
        for number in (1, 2):
            manager.add_sequence(number, [number] * 10, reserve_tokens=4)
            manager.store_context_blocks(number, 4)
        manager.flush()
        for computed in (8, 10):
            for number in (1, 2):
                manager.reserve([number], [4])
                manager.store_context_blocks(number, computed)
            manager.flush()
        for number in (1, 2):
            manager.remove_sequence(number)
            manager.flush()

    def test_chunks_come_when_they_did(self, tmp_path: Path) -> None:
        """In a cache that has kept the first half of a prompt, the slots for the other half come when they came."""

        def program(manager: KVCacheManager) -> None:
            serve(manager, 1, [1] * 11)
            serve(manager, 2, [2] * 24)  # takes all the room
            manager.add_sequence(3, [1] * 20, reserve_tokens=4)
            for computed in (4, 8, 12, 16, 20):
                if computed > 4:
                    manager.reserve([3], [4])
                manager.store_context_blocks(3, computed)
                manager.flush()

        log = log_of(tmp_path, strategies.config(primary_blocks=12, enable_partial_reuse=False), program)
        received: list[Any] = []
        playback, given = Playback(Trial({"primary_blocks": 40}).settings, on_event=received.append), []
        for batch in recorded(log):
            playback.play(batch)
            slots = [
                len(event.slots) // SLOT_BYTES for event in received if isinstance(event, ev.BlocksAllocated)
            ]
            given.append(sum(slots))
            received.clear()
        # Five blocks are found, and one more at least is needed: it serves up to token 12.
        assert given[-6:] == [1, 0, 0, 2, 2, 0]
        assert playback.finish().reused_tokens == 10

    def test_who_waits_gets_all_slots_at_once(self, tmp_path: Path) -> None:
        """There was room for all of the second prompt when it came; where there is none, it does not begin."""
        log = log_of(tmp_path, strategies.config(primary_blocks=12), self.two)
        received: list[Any] = []
        playback = Playback(Trial({"primary_blocks": 6}).settings, on_event=received.append)
        for batch in recorded(log):
            playback.play(batch)
        tally = playback.finish()
        assert (tally.requests, tally.waited, tally.preempted, tally.unserved) == (2, 1, 0, 0)
        given = [
            (event.why, list(memoryview(event.handles).cast("q")), len(event.slots) // SLOT_BYTES)
            for event in received
            if isinstance(event, ev.BlocksAllocated)
        ]
        prompt, reserve = ev.AllocateReason.PROMPT, ev.AllocateReason.RESERVE
        assert given == [(prompt, [1], 2), (reserve, [1], 2), (reserve, [1], 1), (prompt, [2], 5)]

    def test_a_chunk_that_does_not_fit(self, tmp_path: Path) -> None:
        """The request that came last gives way, and goes on behind what it had computed."""
        log = log_of(tmp_path, strategies.config(primary_blocks=12), self.two)
        tally = play_one(log, primary_blocks=7)
        assert (tally.requests, tally.preempted, tally.waited, tally.unserved) == (2, 1, 0, 0)
        assert 1 <= tally.recomputed_tokens <= 10
        assert tally.prompt_tokens == 20

    def test_what_is_reserved_ahead_is_left_out_where_there_is_no_room(self, tmp_path: Path) -> None:
        """Nobody gives way for tokens that are not there yet."""

        def program(manager: KVCacheManager) -> None:
            for number in (1, 2):
                manager.add_sequence(number, [number] * 4)
                manager.store_context_blocks(number, 4)
            for number in (1, 2):
                manager.reserve([number], [8])
            manager.flush()
            manager.add_tokens([1, 2], [7, 7])
            for number in (1, 2):
                manager.remove_sequence(number)
            manager.flush()

        log = log_of(tmp_path, strategies.config(primary_blocks=12), program)
        tally = play_one(log, primary_blocks=6)
        assert (tally.requests, tally.waited, tally.preempted, tally.cut_short) == (2, 0, 0, 0)

    @given(strategies.configs(), st.integers(0, 10**9), strategies.configs())
    def test_other_caches(self, config: KVCacheConfig, seed: int, other: KVCacheConfig) -> None:
        """Whatever happened, it is played in any cache, whose laws hold all the time; each request is accounted for."""
        names = ("tokens_per_block", "primary_blocks", "secondary_blocks", "max_attention_window")
        trial = Trial({name: getattr(other, name) for name in names})
        playback = Playback(trial.settings)
        counted = Tally()
        with TemporaryDirectory() as parent:
            log = strategies.log_directory(parent)
            with KVCacheManager(config, log=log) as manager:
                Program(manager, seed, ahead=True).run(60)
            for batch in recorded(log):
                playback.play(batch)
                playback.manager.check()
                for event in batch.events:
                    counted.count(event)
        tally = playback.finish()
        assert tally.prompt_tokens + tally.unserved_tokens == counted.prompt_tokens
        assert tally.requests + tally.too_long + tally.unserved >= counted.requests


class TestPreempted:
    """Requests that the log has preempted."""

    def preempting(self, manager: KVCacheManager) -> None:
        """The second of two requests makes room for the first, and comes back with the tokens that it had."""
        for number, prompt in (("a", [1] * 6), ("b", [2] * 6)):
            manager.add_sequence(number, prompt)
            manager.store_context_blocks(number, 6)
            manager.flush()
        manager.add_tokens(["b"], [7])
        manager.remove_sequence("b", why="preempted")
        manager.add_tokens(["a"], [7])
        manager.flush()
        manager.remove_sequence("a")
        manager.add_sequence("b", [2] * 6 + [7], resumed=True)
        manager.store_context_blocks("b", 7)
        manager.flush()
        manager.remove_sequence("b")
        manager.flush()

    def test_it_counts_as_one_request(self, tmp_path: Path) -> None:
        """As recorded, and in any cache: what it finds of its own is not reused, what it lost is computed again."""
        log = log_of(tmp_path, strategies.config(primary_blocks=7), self.preempting)
        then, again, roomy = play(log, [Trial({}), Trial({"primary_blocks": 40})])
        assert again.tally == then.tally
        assert (then.tally.requests, then.tally.prompt_tokens, then.tally.preempted) == (2, 12, 1)
        assert then.tally.reused_tokens == roomy.tally.reused_tokens == 0
        assert then.tally.recomputed_tokens >= roomy.tally.recomputed_tokens == 1

    def test_one_that_has_not_come_yet(self, tmp_path: Path) -> None:
        """It waits here when the log preempts it: it is given up, and is a new request when it comes back there."""
        log = log_of(tmp_path, strategies.config(primary_blocks=9), self.preempting)
        tally = play_one(log, primary_blocks=5)
        assert (tally.requests, tally.preempted, tally.unserved, tally.unserved_tokens) == (2, 0, 0, 0)
        assert (tally.prompt_tokens, tally.recomputed_tokens) == (6 + 7, 0)

    def test_one_that_gave_way_here_before(self, tmp_path: Path) -> None:
        """It waits for its turn when the log preempts it, too: it comes back once."""

        def program(manager: KVCacheManager) -> None:
            for number in ("a", "b"):
                manager.add_sequence(number, [ord(number)] * 6)
                manager.flush()
            for _ in range(3):
                manager.add_tokens(["a", "b"], [7, 8])
                manager.flush()
            manager.remove_sequence("b", why="preempted")
            manager.flush()
            manager.remove_sequence("a")
            manager.add_sequence("b", [ord("b")] * 6 + [8] * 3, resumed=True)
            manager.flush()
            manager.remove_sequence("b")
            manager.flush()

        log = log_of(tmp_path, strategies.config(primary_blocks=12), program)
        tally = play_one(log, primary_blocks=7)
        assert (tally.requests, tally.preempted, tally.waited, tally.unserved) == (2, 1, 0, 0)

    def test_one_that_was_cut_short(self, tmp_path: Path) -> None:
        """It does not come back either."""

        def program(manager: KVCacheManager) -> None:
            serve(manager, "long", [1] * 12)
            manager.add_sequence("long", [1] * 12)
            manager.flush()
            manager.remove_sequence("long", why="preempted")
            manager.add_sequence("long", [1] * 12, resumed=True)
            manager.flush()
            manager.remove_sequence("long")
            manager.flush()

        log = log_of(tmp_path, strategies.config(primary_blocks=12), program)
        tally = play_one(log, primary_blocks=4)
        assert (tally.requests, tally.too_long, tally.cut_short, tally.unserved_tokens) == (0, 2, 0, 24)


class TestEngines:
    """Logs in which another engine decided."""

    @pytest.mark.parametrize("seed", seeds(range(200), quick=8))
    def test_any_engine(self, seed: int, tmp_path: Path) -> None:
        """Chunks, copies, names of its own, preempted and aborted requests: all is played, in any cache.

        With so much room that nothing is lost, and what it passed over, each request reuses at least what it did.
        """
        engine = ForeignEngine(seed, (6, 12, 24)[seed % 3], (1, 2, 4)[seed // 3 % 3], tmp_path / "log")
        for _ in range(120):
            engine.act()
        engine.recorder.close()
        blocks = engine.recorder.config.primary_blocks
        assert isinstance(blocks, int)
        sizes = [Trial({"primary_blocks": size}) for size in (blocks, max(2, blocks // 2), 2000)]
        others = [Trial({"secondary_blocks": 30}, "levels"), Trial({"enable_partial_reuse": True}, "belady")]
        then, *played = play(tmp_path / "log", [*sizes, *others])
        assert then.engine == "foreign 1"
        assert then.tally.preempted == engine.counters.seen["preempted"]
        roomy = played[2].tally
        assert roomy.requests == then.tally.requests
        assert roomy.waited == roomy.unserved == roomy.cut_short == 0
        if not engine.counters.seen["cleared"]:
            assert roomy.reused_tokens >= then.tally.reused_tokens + then.passed_over

    def test_nothing_is_evicted_ahead(self, tmp_path: Path) -> None:
        """A cache of 64 blocks that is full: a token takes one, and the others are found again."""
        config = KVCacheConfig(tokens_per_block=1, primary_blocks=64, max_sequence_length=64)
        for name, evicted in (("engine", 1), ("manager", 4)):
            log = tmp_path / name
            if name == "engine":
                with Recorder(config, engine="mine 1", log=log) as recorder:
                    recorder.admitted("a", [1] * 62)
                    recorder.allocated("a", range(62))
                    recorder.stored("a", 62)
                    recorder.ended("a")
                    recorder.admitted("b", [2])
                    recorder.allocated("b", [62])
                    recorder.appended(["b"], [2])
                    recorder.allocated("b", [63])
                    recorder.appended(["b"], [2])
                    recorder.evicted([61], "b")
                    recorder.allocated("b", [61])
                    recorder.flush()
            else:
                with KVCacheManager(config, log=log) as manager:
                    manager.add_sequence("a", [1] * 62)
                    manager.store_context_blocks("a", 62)
                    manager.remove_sequence("a")
                    manager.add_sequence("b", [2])
                    manager.add_tokens(["b"], [2])
                    manager.add_tokens(["b"], [2])
                    manager.flush()
            then, now = play(log, [Trial({})])
            assert then.tally.blocks_removed_primary == now.tally.blocks_removed_primary == evicted

    def test_what_is_stored_before_its_last_token_counts(self, tmp_path: Path) -> None:
        """An engine names a block when it schedules the step that fills it; who comes in that step finds it."""
        config = KVCacheConfig(tokens_per_block=2, primary_blocks=20, max_sequence_length=20)
        with Recorder(config, engine="mine 1", log=tmp_path / "log") as recorder:
            recorder.admitted("a", [1, 2, 3])
            recorder.allocated("a", [0, 1])
            recorder.computed("a", 3)
            recorder.stored("a", 1)
            recorder.appended(["a"], [4])
            recorder.flush()
            recorder.stored("a", 2)
            recorder.admitted("b", [1, 2, 3, 4, 5], [0, 1])
            recorder.allocated("b", [2])
            recorder.flush()
        then, now = play(tmp_path / "log", [Trial({})])
        assert then.tally.reused_tokens == now.tally.reused_tokens == 4

    def test_slots_that_are_reported_later(self, tmp_path: Path) -> None:
        """An engine may tell of other requests, or end its step, between an admission and the slots for it."""
        config = KVCacheConfig(tokens_per_block=2, primary_blocks=20, max_sequence_length=20)
        with Recorder(config, engine="mine 1", log=tmp_path / "log") as recorder:
            recorder.admitted("a", [1, 2, 3, 4, 5])
            recorder.admitted("b", [6] * 7)
            recorder.allocated("a", [0, 1, 2])
            recorder.computed("a", 5)
            recorder.flush()
            recorder.allocated("b", [3, 4])
            recorder.computed("b", 4)
            recorder.allocated("b", [5, 6])
            recorder.computed("b", 7)
            recorder.flush()
            recorder.admitted("c", [6] * 7, resumed=False)
            recorder.ended("c", "aborted")
            recorder.flush()
        then, now = play(tmp_path / "log", [Trial({})])
        assert then.tally.requests == now.tally.requests == 3

    def test_what_it_passes_over(self, tmp_path: Path) -> None:
        """Tokens that were cached and that it did not take are counted, and are reused here."""
        config = KVCacheConfig(tokens_per_block=2, primary_blocks=20, max_sequence_length=20)
        with Recorder(config, engine="mine 1", log=tmp_path / "log") as recorder:
            for name, blocks in (("a", [0, 1, 2]), ("b", [3, 4, 5])):
                recorder.admitted(name, [1, 2, 3, 4, 5])
                recorder.allocated(name, blocks)
                recorder.stored(name, 2)
                recorder.flush()
            recorder.ended("b", "preempted")
            recorder.ended("a")
            recorder.flush()
            # What comes back reuses nothing that counts, so it passes over nothing either.
            recorder.admitted("b", [1, 2, 3, 4, 5], resumed=True)
            recorder.allocated("b", [6, 7, 8])
            recorder.flush()
        then, now = play(tmp_path / "log", [Trial({})])
        assert (then.tally.reused_tokens, then.passed_over, now.tally.reused_tokens) == (0, 4, 4)


class TestSettings:
    """What takes the place of recorded settings."""

    def test_a_given_size_is_not_limited_by_recorded_ones(self) -> None:
        """Whatever limited a level in the log is gone when another limit is given for it."""
        recorded_config = strategies.config(primary_blocks=None, max_tokens=8, host_cache_size=1 << 20)
        config = Trial({"primary_blocks": "30", "secondary_blocks": "7"}).settings(recorded_config)
        assert (config.primary_blocks, config.max_tokens) == (30, None)
        assert (config.secondary_blocks, config.host_cache_size) == (7, None)
        assert Trial({"tokens_per_block": "4"}).settings(recorded_config).max_tokens == 8

    def test_wrong_values_are_reported_as_ever(self) -> None:
        """The settings' own errors say what is accepted."""
        with pytest.raises(ConfigError, match="primary_blocks: given 'many'; accepted: an integer from 1"):
            Trial({"primary_blocks": "many"}).settings(strategies.config())


def hits(blocks: list[int], capacity: int, policy: str) -> int:
    """How many uses of blocks find them, in a cache of single blocks, worked out by hand."""
    cached: list[int] = []  # least recently used first
    found = 0
    for now, block in enumerate(blocks):
        coming = blocks[now + 1 :]
        if block in cached:
            found += 1
            cached.remove(block)
        elif len(cached) == capacity:
            never = len(blocks)
            distance = {each: coming.index(each) if each in coming else never for each in cached}
            if policy == "belady":
                cached.remove(max(cached, key=lambda each: distance[each]))
            elif policy == "returns":
                cached.remove(next((each for each in cached if distance[each] == never), cached[0]))
            else:
                cached.pop(0)
        cached.append(block)
    return found


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 6))
def test_clairvoyants_do_what_they_promise(blocks: list[int], capacity: int) -> None:
    """One block after the other, each order finds what a simple cache of that order finds."""

    def program(manager: KVCacheManager) -> None:
        for number, block in enumerate(blocks):
            serve(manager, number, [block, block, 99])

    config = strategies.config(primary_blocks=40, enable_partial_reuse=False)
    with TemporaryDirectory() as parent:
        log = log_of(Path(parent), config, program)
        names = ("lru", "returns", "belady")
        # One more for the last token, which is not cached.
        _, *played = play(log, [Trial({"primary_blocks": capacity + 1}, name) for name in names])
    for name, outcome in zip(names, played, strict=True):
        assert outcome.tally.reused_tokens_primary == 2 * hits(blocks, capacity, name), name


def test_siblings_of_which_the_parent_returns(tmp_path: Path) -> None:
    """Several leaves go at once although the parent of two of them becomes one run with the second when the first is
    gone; the parent is kept, since a prompt to come has it.
    """

    def program(manager: KVCacheManager) -> None:
        prompts = ([1, 1, 2, 2, 9], [1, 1, 3, 3, 9], [4, 4, 9], [6] * 13, [1, 1, 9])
        for number, prompt in enumerate(prompts):
            serve(manager, number, prompt)

    config = strategies.config(primary_blocks=8, enable_partial_reuse=False)
    log = log_of(tmp_path, config, program)
    assert [play_one(log, policy).reused_tokens for policy in ("lru", "returns", "belady")] == [2, 4, 4]


def test_blocks_of_one_run_go_at_different_times(tmp_path: Path) -> None:
    """With a secondary level that keeps what it has, the end of a run goes, then another run, and its start stays."""

    def program(manager: KVCacheManager) -> None:
        serve(manager, "kept", [8, 8, 9])
        for name, prompt in (("run", [1, 1, 2, 2, 9]), ("other", [4, 4, 9])):
            manager.add_sequence(name, prompt)
            manager.store_context_blocks(name, len(prompt))
        manager.add_sequence("first", [6] * 5)  # takes the only block that nobody holds to secondary
        for name in ("run", "other"):
            manager.remove_sequence(name)
        manager.flush()
        manager.add_sequence("second", [5] * 7)  # two blocks have to go
        for name in ("first", "second"):
            manager.remove_sequence(name, store=False)
        serve(manager, "kept again", [8, 8, 9])
        serve(manager, "run again", [1, 1, 9])

    config = strategies.config(primary_blocks=8, secondary_blocks=1, enable_partial_reuse=False)
    log = log_of(tmp_path, config, program)
    assert play_one(log, "belady").reused_tokens == 4


def test_uses_are_counted_by_content(tmp_path: Path) -> None:
    """What was used more often is kept, though it was released before: blocks are known by their content."""

    def program(manager: KVCacheManager) -> None:
        for number, block in enumerate([1, 1, 1, 2, 3, 4, 1]):
            serve(manager, number, [block, block, 9])

    config = strategies.config(primary_blocks=8, enable_partial_reuse=False)
    log = log_of(tmp_path, config, program)
    # Room for two blocks, and one for the last token.
    reused = {name: play_one(log, name, primary_blocks=3).reused_tokens for name in ("lru", "lfu", "belady")}
    assert reused == {"lru": 4, "lfu": 6, "belady": 6}


def arc_hits(blocks: list[int], room: int, ghosts: int) -> int:
    """How many uses of blocks find them under adaptive replacement, as its authors have it, on plain lists.

    Only that the room for a block is made before its ghost is looked for.
    """
    once: list[int] = []
    again: list[int] = []
    once_ghosts: list[int] = []
    again_ghosts: list[int] = []
    target = found = 0
    for block in blocks:
        if block in once + again:
            found += 1
            (once if block in once else again).remove(block)
            again.append(block)
            continue
        if len(once + again) == room:
            if once and (len(once) > target or not again):
                once_ghosts.append(once.pop(0))
            else:
                again_ghosts.append(again.pop(0))
        if block in once_ghosts:
            target = min(ghosts, target + max(1, len(again_ghosts) // len(once_ghosts)))
            once_ghosts.remove(block)
            again.append(block)
        elif block in again_ghosts:
            target = max(0, target - max(1, len(once_ghosts) // len(again_ghosts)))
            again_ghosts.remove(block)
            again.append(block)
        else:
            once.append(block)
        if len(once + once_ghosts) > ghosts and once_ghosts:
            once_ghosts.pop(0)
        if len(once_ghosts + again_ghosts) > ghosts:
            again_ghosts.pop(0)
    return found


@given(st.integers(0, 10**9), st.integers(1, 8))
def test_arc_does_what_its_authors_say(seed: int, room: int) -> None:
    """One block after the other, some more often than others, it finds what the algorithm on plain lists finds."""
    rng = random.Random(seed)
    spread = rng.choice([2, 6, 20])
    blocks = [min(int(rng.expovariate(1 / spread)), 40) for _ in range(60)]

    def program(manager: KVCacheManager) -> None:
        for number, block in enumerate(blocks):
            serve(manager, number, [block, block, 99])

    config = strategies.config(primary_blocks=40, enable_partial_reuse=False)
    with TemporaryDirectory() as parent:
        log = log_of(Path(parent), config, program)
        # One more for the last token, which is not cached; there are as many ghosts as blocks.
        tally = play_one(log, "arc", primary_blocks=room + 1)
    assert tally.reused_tokens_primary == 2 * arc_hits(blocks, room, room + 1)


class OneByOne(AdaptiveReplacement):
    """Asks before each block which one goes."""

    def num_same_rank(self, run: Run, count: int, other: Run | None = None) -> int:
        """Only the next one."""
        return 1


@given(strategies.configs(), st.integers(0, 10**9), st.integers(3, 14), st.integers(0, 8))
def test_arc_evicts_several_as_one_by_one(
    config: KVCacheConfig, seed: int, primary: int, secondary: int
) -> None:
    """The same blocks leave the cache in the same order when several are chosen at once."""
    trial = Trial({"primary_blocks": primary, "secondary_blocks": secondary})

    def evicted(log: Path, order: type[AdaptiveReplacement]) -> list[Any]:
        received: list[Any] = []
        playback = Playback(trial.settings, order, on_event=received.append, named=True)
        for batch in recorded(log):
            playback.play(batch)
        playback.finish()
        gone = [event for event in received if isinstance(event, ev.BlocksRemoved | ev.BlocksMoved)]
        return [
            (type(event), event.group, event.why, event.names[at : at + NAME_BYTES])
            for event in gone
            for at in range(0, len(event.names), NAME_BYTES)
        ]

    with TemporaryDirectory() as parent:
        log = log_of(Path(parent), config, lambda manager: Program(manager, seed).run(60))
        several, single = evicted(log, AdaptiveReplacement), evicted(log, OneByOne)
    assert Counter(several) == Counter(single)
    lost = [[each for each in found if each[0] is ev.BlocksRemoved] for found in (several, single)]
    assert lost[0] == lost[1]


@pytest.mark.parametrize(
    ("sizes", "prompts", "lru", "arc"),
    [
        pytest.param((4, 0), "1 1 2 2 3 4 5 1 2", 2, 4, id="a scan passes by what was used again"),
        # 3 and 4 come back as ghosts of what was used once: the target rises to 2, and 5 is kept.
        pytest.param((4, 0), "1 1 2 2 3 4 3 4 5 6 5", 5, 3, id="ghosts give room to what was used once"),
        # 2 was a ghost once, so the target is 1. Of 5 and 6, used once, one goes; then 4, which was used again.
        pytest.param((4, 0), "1 1 2 3 4 2 56 4 78 5", 2, 3, id="one list goes no further than its target"),
        # 3, 2 and 4 go, which were used once; 1 lies in one run with 2 and 3, but was used again.
        pytest.param((6, 0), "1 123 4 5678 1", 1, 2, id="blocks of one run are in different lists"),
        # 2 to 5 go to secondary one after the other: not evicted, so nothing comes back as a ghost.
        pytest.param((3, 2), "1 1 2 3 4 5 6 1", 1, 2, id="moving is no eviction"),
    ],
)
def test_arc_by_hand(tmp_path: Path, sizes: tuple[int, int], prompts: str, lru: int, arc: int) -> None:
    """How many blocks are found in primary. A digit is a block; behind each prompt comes a token that is not cached."""

    def program(manager: KVCacheManager) -> None:
        for number, prompt in enumerate(prompts.split()):
            serve(manager, number, [int(digit) for digit in prompt for _ in range(2)] + [9])

    log = log_of(tmp_path, strategies.config(primary_blocks=40, enable_partial_reuse=False), program)
    sets = dict(zip(("primary_blocks", "secondary_blocks"), sizes, strict=True))
    reused = [play_one(log, name, **sets).reused_tokens_primary // 2 for name in ("lru", "arc")]
    assert reused == [lru, arc]


@given(strategies.configs(), st.integers(0, 10**9), st.sampled_from(known_policies()), st.data())
def test_any_cache_can_play_any_log(config: KVCacheConfig, seed: int, policy: str, data: Any) -> None:
    """Under other settings and orders no request is lost, and the cache keeps its laws in every batch."""
    branches = data.draw(st.booleans())
    sets = {
        "primary_blocks": data.draw(st.integers(2, 14)),
        "secondary_blocks": data.draw(st.integers(0, 8)),
        "tokens_per_block": data.draw(st.sampled_from([1, 2, 4])),
        "max_attention_window": data.draw(st.sampled_from([config.max_attention_window, (3,), (2, 6)])),
    }
    with TemporaryDirectory() as parent:
        log = log_of(Path(parent), config, lambda manager: Program(manager, seed, branches=branches).run(60))
        playback, admitted = playback_of(log, Trial(sets, policy), {}), []
        for batch in recorded(log):
            admitted += [each.num_tokens for each in batch.events if isinstance(each, ev.SequenceAdded)]
            playback.play(batch)
            playback.manager.check()
        tally = playback.finish()
    assert tally.requests + tally.too_long + tally.unserved >= len(admitted)
    # A branch that is not on time, or does not fit, is one more request.
    more = tally.prompt_tokens + tally.unserved_tokens - sum(admitted)
    assert more >= 0 if branches else more == 0
    assert 0 <= tally.reused_tokens <= tally.prompt_tokens


@pytest.mark.parametrize("seed", [0, 4, 7, 8])
def test_lost_batches_are_refused_wherever_the_gap_stands(seed: int, tmp_path: Path) -> None:
    """The writer puts it behind what the batch continues: that cannot be applied either."""
    log = random_log(seed, tmp_path, branches=seed % 2 == 1)
    assert any(isinstance(event, ev.Gap) for batch in LogReader(log) for event in batch.events)
    with pytest.raises(Unplayable):
        list(recorded(log))
