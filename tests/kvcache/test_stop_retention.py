"""What becomes of the blocks of a sequence whose output ended for a reason of which the settings state something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from events.log import LogReader
from events.types import BlocksUpdated, SequenceRemoved
from kvcache import KVCacheManager
from kvcache.manager import Substitutes
from kvcache.replay import replay
from tests.support.engines import strategies
from tests.support.engines.rig import Rig, keep, prompt

RULES = {"tool_calls": "60:10ms", "stop": 20}
AGENT = prompt(0, 17)
"""Four blocks of 4 and a token."""


def stop(rig: Rig, name: str, tokens: list[int], reason: str | None, **options: Any) -> None:
    """A request that is computed and ends for this reason."""
    rig.prefill(name, tokens, **options)
    rig.manager.remove_sequence(name, stop=reason)
    rig.manager.check()


def flood(rig: Rig, requests: int) -> None:
    """Requests of two blocks and a token each, that share nothing."""
    for number in range(requests):
        rig.run(f"flood {number}", prompt(1000 + 100 * number, 1009 + 100 * number))


@pytest.mark.parametrize(("rules", "reused"), [(RULES, 16), ({}, 0), ({"length": 60}, 0)])
@pytest.mark.parametrize("windows", [None, (20, 128)])
def test_the_session_of_an_agent_survives_a_flood(
    rules: dict[str, Any], reused: int, windows: tuple[int, ...] | None
) -> None:
    """While a tool works others ask for four times as much as the cache holds; then the session comes back."""
    rig = Rig((12, 12) if windows else 12, windows=windows, stop_retention=rules)
    stop(rig, "agent", AGENT, "tool_calls")
    flood(rig, 16)
    assert rig.reusable([*AGENT, 500]) == reused


def test_what_comes_after_a_prompt_s_full_blocks_is_not_kept_longer() -> None:
    """Nor is what is sampled; where the priority is below the default all of it goes."""
    for reason, priorities in (("tool_calls", [60] * 4 + [35] * 2), ("stop", [20] * 6)):
        rig = Rig(12, stop_retention=RULES)
        rig.prefill("agent", AGENT)
        rig.generate("agent", *prompt(17, 23))
        rig.manager.remove_sequence("agent", stop=reason)
        tokens = [*AGENT, *prompt(17, 22)]
        kept = [cached[-1] for cached in strategies.cached_blocks(rig.manager.state).values()]
        assert sorted(kept) == sorted(priorities)
        assert rig.reusable([*tokens, 5]) == 22


def test_it_does_not_when_its_time_is_over() -> None:
    """A tool that takes longer than the settings state: from then on its blocks are like others."""
    rig = Rig(12, stop_retention=RULES)
    rig.wait(1)
    stop(rig, "agent", AGENT, "tool_calls")
    rig.wait(9)
    flood(rig, 4)
    assert 60 in rig.priorities
    rig.wait(1)
    assert rig.priorities == {35}
    flood(rig, 16)
    assert rig.reusable([*AGENT, 500]) == 0


@pytest.mark.parametrize(("rules", "left"), [({}, ["young"]), (RULES, ["old"])])
def test_a_conversation_that_is_over_goes_first(rules: dict[str, Any], left: list[str]) -> None:
    """Though it ended later than another one."""
    rig = Rig(8, stop_retention=rules)
    prompts = {"old": prompt(0, 13), "young": prompt(100, 113)}
    stop(rig, "old", prompts["old"], None)
    stop(rig, "young", prompts["young"], "stop")
    flood(rig, 1)
    assert [name for name, tokens in prompts.items() if rig.reusable([*tokens, 5]) == 13] == left


def test_the_next_turn_states_anew() -> None:
    """A turn that calls a tool keeps the conversation, the last one gives it up."""
    rig = Rig(12, stop_retention=RULES)
    stop(rig, "turn 1", AGENT, "tool_calls")
    assert rig.priorities == {60, 35}
    longer = [*AGENT, *prompt(17, 25)]
    stop(rig, "turn 2", longer, "stop")
    assert rig.priorities == {20}
    rig.wait(100)
    assert rig.priorities == {20}  # and has no time any more


def test_what_others_hold_stays_as_it_is() -> None:
    """The beginning that a running request has in common with one that ends; a pin is a holder, too."""
    rig = Rig(12, stop_retention=RULES)
    rig.prefill("other", AGENT[:9])
    rig.prefill("agent", AGENT)
    pinned = rig.manager.pin("agent", 8, 12)
    rig.manager.remove_sequence("agent", stop="stop")
    rig.manager.check()
    (updated,) = rig.reported(BlocksUpdated)
    assert (len(updated.slots) // 4, updated.old_priority, updated.priority, updated.duration) == (
        2,
        35,
        20,
        0,
    )
    rig.end("other")
    rig.manager.unpin(pinned)
    assert rig.priorities == {35, 20}


def test_what_a_request_states_itself_goes_before() -> None:
    """Of its blocks nothing changes."""
    rig = Rig(12, stop_retention=RULES)
    stop(rig, "agent", AGENT, "stop", retention=keep((0, 8, 90)))
    assert rig.priorities == {90, 35}
    assert rig.reported(BlocksUpdated) == []


@pytest.mark.parametrize("reason", [None, "length", ""])
def test_a_reason_without_a_rule_changes_nothing(reason: str | None) -> None:
    """The events are those of a manager without rules."""
    logs = []
    for rules in (RULES, {}):
        rig = Rig(8, stop_retention=rules)
        stop(rig, "a", AGENT, reason)
        flood(rig, 3)
        logs.append(rig.events)
    assert logs[0] == logs[1]
    assert {event.stop for event in logs[0] if isinstance(event, SequenceRemoved)} == {reason, None}


def test_a_rule_for_any_other_reason() -> None:
    """And for an end without one; a reason's own rule goes before."""
    for reason, priorities in (("stop", {40, 35}), ("length", {60, 35}), (None, {60, 35})):
        rig = Rig(12, stop_retention={"*": "60:10ms", "stop": 40})
        stop(rig, "agent", AGENT, reason)
        assert rig.priorities == priorities


def test_the_reason_is_in_the_log_and_replays(tmp_path: Path) -> None:
    """So does what follows from it, also where another manager goes on."""
    ticks = strategies.Ticks()
    config = strategies.config(tokens_per_block=4, primary_blocks=12, stop_retention=RULES)
    manager = KVCacheManager(config, log=tmp_path, substitutes=Substitutes(monotonic_ns=ticks))
    ticks.now += strategies.MS
    for number, reason in enumerate(("tool_calls", "stop", None, "length")):
        manager.add_sequence(number, [number] * 9)
        manager.store_context_blocks(number, 9)
        manager.remove_sequence(number, stop=reason)
    ticks.now += 4 * strategies.MS
    manager.add_sequence("tells the time", [9])
    manager.remove_sequence("tells the time", store=False)
    manager.flush()
    fingerprint = manager.fingerprint()
    manager.close()
    ended = [
        event for batch in LogReader(tmp_path) for event in batch.events if isinstance(event, SequenceRemoved)
    ]
    assert [event.stop for event in ended][:4] == ["tool_calls", "stop", None, "length"]
    replayed = replay(tmp_path, verify=True)
    assert replayed.checkpoints_verified
    assert replayed.fingerprint == fingerprint
    later = strategies.Ticks()
    resumed = KVCacheManager.resume(replayed.state, substitutes=Substitutes(monotonic_ns=later))
    assert resumed.config.stop_retention == config.stop_retention
    later.now += 5 * strategies.MS
    resumed.flush()
    assert 60 in {block[-1] for block in strategies.cached_blocks(resumed.state).values()}
    later.now += strategies.MS
    resumed.flush()
    resumed.check()
    assert {block[-1] for block in strategies.cached_blocks(resumed.state).values()} == {35, 20}


def test_a_low_priority_is_not_kept_in_secondary() -> None:
    """Below `secondary_offload_min_priority` (30) blocks are dropped; above they are only the first to go there."""
    for priority, reusable in ((20, 0), (34, 12)):
        rig = Rig(4, 8, stop_retention={"stop": priority})
        stop(rig, "agent", AGENT[:13], "stop")
        rig.prefill("other", prompt(1000, 1016))
        assert rig.reusable(AGENT[:13]) == reusable
