"""How long requests want their blocks kept: what they may state, and what becomes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from events.log import LogReader
from events.types import BlocksFilled, BlocksStored, BlocksUpdated, SequenceAdded, SequenceRemoved
from kvcache import KVCacheManager, Retention, RetentionRange
from kvcache.errors import UsageError
from kvcache.manager import Substitutes
from kvcache.replay import replay
from tests.support.engines import strategies
from tests.support.engines.inside import blocks_of
from tests.support.engines.rig import Rig, keep

RANGE = RetentionRange
BAD: list[tuple[str, Any]] = [
    ("must be a Retention, not dict", {}),
    ("must be a Retention, not RetentionRange", RANGE(0)),
    ("must be a RetentionRange, not tuple", Retention([(0, 4, 80)])),  # type: ignore[list-item]
    ("the ranges of a retention must be a list, not int", Retention(5)),  # type: ignore[arg-type]
    ("priority must be from 0 to 100, not 101", Retention([RANGE(0, 4, 101)])),
    ("priority must be from 0 to 100, not -1", Retention([RANGE(0, 4, -1)])),
    ("priority must be an integer, not str", Retention([RANGE(0, 4, "1234567")])),  # type: ignore[arg-type]
    ("decode_priority must be from 0 to 100", Retention(decode_priority=500)),
    ("start is -1", Retention([RANGE(-1, 4)])),
    ("start is 4, stop is 4", Retention([RANGE(4, 4)])),
    ("start is 5, stop is 4", Retention([RANGE(5, 4)])),
    ("one starts at 3, but the previous one stops at 4", Retention([RANGE(0, 4), RANGE(3, 8)])),
    ("one starts at 0, but the previous one stops at 8", Retention([RANGE(4, 8), RANGE(0, 4)])),
    ("only the last range", Retention([RANGE(0), RANGE(8, 9)])),
    ("duration_ms must be from 1", Retention([RANGE(0, duration_ms=0)])),
    ("duration_ms must be from 1", Retention([RANGE(0, duration_ms=2**61)])),
    ("duration_ms must be an integer, not float", Retention([RANGE(0, duration_ms=0.5)])),  # type: ignore[arg-type]
    ("decode_duration_ms must be an integer, not bool", Retention(decode_duration_ms=True)),
]


@pytest.mark.parametrize(("message", "retention"), BAD, ids=[message for message, _ in BAD])
def test_what_cannot_be_meant_is_refused(message: str, retention: Any) -> None:
    """With a `UsageError` that says what is wrong, before anything changes."""
    rig = Rig(8)
    before = rig.manager.fingerprint()
    with pytest.raises(UsageError, match=message) as refused:
        rig.add("a", [1, 2, 3], retention)
    assert "1234567" not in str(refused.value)
    assert rig.manager.fingerprint() == before
    assert not rig.events


def test_a_block_takes_the_range_of_its_first_token() -> None:
    """A range up to 17 covers blocks 0 and 1 of 16; one from 5 on does not touch block 0."""
    rig = Rig(8, size=16)
    rig.prefill("a", list(range(40)), keep((0, 17, 80), decode=20))
    rig.prefill("b", list(range(100, 140)), keep((5, None, 90), decode=20))
    stored = [(event.priority, len(event.slots) // 4) for event in rig.reported(BlocksStored)]
    assert stored == [(80, 2), (35, 1), (90, 1)]  # the prompts' last blocks are not full yet
    rig.end("a", "b")
    assert [event.priority for event in rig.reported(BlocksStored)] == [35, 90]


def test_what_is_decoded_together_is_stored_together_as_far_as_it_is_kept_alike() -> None:
    """One event per step and kind of retention, not one per sequence."""
    rig = Rig(24)
    names = list("abcd")
    for number, name in enumerate(names):
        rig.prefill(name, [number] * 4, keep(decode=60) if number % 2 else None)
    rig.events.clear()
    for token in range(9):
        rig.manager.add_tokens(names, [token] * 4)
    filled = [(event.priority, len(event.slots) // 4) for event in rig.reported(BlocksFilled)]
    # The first decoded block of those that keep it otherwise than their prompt begins a run: it is stored by itself.
    assert filled == [(35, 2), (35, 2), (60, 2)]


def test_time_runs_from_the_last_release_on_and_a_new_holder_stops_it() -> None:
    """A block that is held again does not expire, and has all of its time again afterwards."""
    rig = Rig(8)
    rig.prefill("a", [1] * 8, keep((0, None, 80, 10)))
    rig.wait(100)
    assert rig.priorities == {80}
    rig.end("a")
    rig.wait(9)
    rig.add("b", [1] * 8)
    rig.wait(50)
    rig.end("b", store=False)
    rig.wait(9)
    assert 80 in rig.priorities
    rig.wait(1)
    assert rig.priorities == {35}


def expired(manager: KVCacheManager, ticks: strategies.Ticks) -> list[list[tuple[int, list[int]]]]:
    """What expires in each of the next steps, as priority before and slots, until nothing does any more."""
    reported: list[Any] = []
    manager.bus.subscribe(reported.append)
    steps = []
    ticks.now += 100 * strategies.MS
    while blocks_of(manager).housekeeping.due:
        reported.clear()
        manager.flush()
        manager.check()
        updates = [event for event in reported if isinstance(event, BlocksUpdated)]
        steps.append(
            [(event.old_priority, np.frombuffer(event.slots, np.int32).tolist()) for event in updates]
        )
    return steps


@pytest.mark.parametrize("windows", [(100,), (8,), (8, 100)])
def test_step_ends_the_times_of_a_bounded_number_of_blocks(
    windows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest overdue first, and what has one time together; a manager that goes on from the state does alike."""
    monkeypatch.setattr("kvcache.decide.housekeeping.AT_ONCE", 6)
    rig = Rig(200 if len(windows) == 1 else (200, 200), windows=windows, checkpoint_spacing=10**6)
    for name in range(12):
        if name % 3:
            rig.ticks.now += strategies.MS  # every third one ends with the one before
        prompt = [name // 2 % 4, *([5] * 3), *([name] * 4)]
        rig.run(name, prompt, keep((0, None, 60 + 10 * (name % 2), 10)))
    resumed = KVCacheManager.resume(
        rig.manager.state, substitutes=Substitutes(monotonic_ns=(ticks := strategies.Ticks()))
    )
    steps = expired(rig.manager, rig.ticks)
    assert {block[-1] for block in strategies.cached_blocks(rig.manager.state).values()} == {35}
    sizes = [sum(len(slots) for _, slots in step) for step in steps]
    assert len(sizes) > 2
    assert all(6 <= size < 6 + 2 * 2 * len(windows) for size in sizes[:-1])
    assert steps == expired(resumed, ticks)
    assert resumed.fingerprint() == rig.manager.fingerprint()


def test_without_durations_no_event_reports_the_time() -> None:
    """Times are told from the first duration on, and count from the beginning of the cache."""
    rig = Rig(8)
    rig.ticks.now = 7
    rig.run("a", [1] * 8, keep((0, None, 80)))
    assert {event.clock for event in rig.events if isinstance(event, SequenceAdded | SequenceRemoved)} == {0}
    rig.events.clear()
    rig.run("b", [2] * 8, keep((0, None, 80, 10)))
    assert {event.clock for event in rig.events if isinstance(event, SequenceAdded | SequenceRemoved)} == {7}


def test_time_goes_on_after_a_resume(tmp_path: Path) -> None:
    """What had 4 of 10 ms left when the process ended has these when another one goes on."""
    ticks = strategies.Ticks()
    config = strategies.config(tokens_per_block=4)
    ticks.now = 50 * strategies.MS
    manager = KVCacheManager(config, log=tmp_path, substitutes=Substitutes(monotonic_ns=ticks))
    manager.add_sequence("a", [1] * 9, retention=keep((0, None, 80, 10)))
    manager.store_context_blocks("a", 9)
    manager.remove_sequence("a")
    ticks.now += 6 * strategies.MS
    manager.add_sequence("b", [2] * 5)  # tells the time
    manager.remove_sequence("b")
    manager.close()
    later = strategies.Ticks()
    later.now = 10**15
    resumed = KVCacheManager.resume(replay(tmp_path).state, substitutes=Substitutes(monotonic_ns=later))
    later.now += 3 * strategies.MS
    resumed.flush()
    assert 80 in {block[-1] for block in strategies.cached_blocks(resumed.state).values()}
    later.now += strategies.MS + 1
    resumed.flush()
    assert {block[-1] for block in strategies.cached_blocks(resumed.state).values()} == {35}
    resumed.check()


def test_a_clock_that_raises_stands_still() -> None:
    """No call fails for it; nothing expires meanwhile."""
    rig = Rig(8)
    rig.run("a", [1] * 8, keep((0, None, 80, 10)))
    working, rig.ticks.now = rig.ticks.now, None  # type: ignore[assignment]
    rig.manager.flush()
    rig.run("b", [2] * 8)
    assert 80 in rig.priorities
    rig.ticks.now = working + 20 * strategies.MS
    rig.manager.flush()
    assert rig.priorities == {35}


def test_time_begins_when_a_clock_answers_that_raised_at_first() -> None:
    """What it shows then is no time that has passed."""
    ticks = strategies.Ticks()
    rig, ticks.now = Rig(8), None  # type: ignore[assignment]
    rig.manager = KVCacheManager(rig.manager.config, substitutes=Substitutes(monotonic_ns=ticks))
    rig.run("a", [1] * 8, keep((0, None, 80, 10)))
    ticks.now = 10**15
    rig.manager.flush()
    assert rig.priorities == {80}
    ticks.now += 20 * strategies.MS
    rig.manager.flush()
    assert rig.priorities == {35}


@pytest.mark.parametrize("now", [2**62, 2**63, 10**30, 1e19])
@pytest.mark.parametrize("windows", [None, (6, 128), (2,)])
def test_a_clock_that_jumps_out_of_all_bounds_stops_at_the_last_time(
    tmp_path: Path, now: float, windows: tuple[int, ...] | None
) -> None:
    """What was kept for a time is over, no call fails, and the log replays."""
    rig, longest = Rig(16, windows=windows), 2**62 // strategies.MS
    rig.manager = KVCacheManager(
        rig.manager.config, log=tmp_path, substitutes=Substitutes(monotonic_ns=rig.ticks)
    )
    rig.run("a", [1] * 8, keep((0, None, 80, 10)))
    rig.ticks.now = now  # type: ignore[assignment]
    rig.manager.flush()
    assert rig.priorities == {35}
    rig.run("b", [2] * 8, keep((0, None, 90, longest)))
    rig.manager.flush()
    rig.manager.check()
    assert 90 in rig.priorities
    fingerprint = rig.manager.fingerprint()
    rig.manager.close()
    assert replay(tmp_path).fingerprint == fingerprint


def test_log_with_times_replays_with_and_without_tokens(tmp_path: Path) -> None:
    """Priorities, times and what is over are in the log."""
    for recorded in (True, False):
        log = {"record_tokens": recorded, "fsync": "never", "overflow": "block"}
        ticks = strategies.Ticks()
        config = strategies.config(tokens_per_block=4, log=log, num_layers=2, max_attention_window=(8, 24))
        manager = KVCacheManager(
            config, log=tmp_path / str(recorded), substitutes=Substitutes(monotonic_ns=ticks)
        )
        for number in range(4):
            manager.add_sequence(
                number, [number] * 17, retention=keep((0, 8, 90, 5), (8, None, 20, 1), decode=7)
            )
            manager.store_context_blocks(number, 17)
            manager.add_tokens([number], [1, 2, 3, 4, 5], [5])
            manager.remove_sequence(number)
            ticks.now += 2 * strategies.MS
            manager.flush()
        manager.close()
        replayed = replay(tmp_path / str(recorded), verify=True)
        assert replayed.checkpoints_verified
        assert not replayed.checkpoints_failed
        kinds = [event for batch in LogReader(tmp_path / str(recorded)) for event in batch.events]
        assert any(isinstance(event, BlocksUpdated) and event.why == "expired" for event in kinds)
