"""Priorities and retention: E-1 to E-4, V-3, V-7, R-23."""

from __future__ import annotations

from events.types import BlocksRemoved, BlocksStored, BlocksUpdated, UpdateReason
from tests.support.engines.rig import Rig, keep, prompt


def test_e_1_blocks_of_higher_priority_stay() -> None:
    """Of two prompts with a range each, the block of priority 90 outlives that of 10 and plain ones."""
    rig = Rig(4)
    rig.prefill("a", prompt(0, 8), keep((0, 4, 90), (4, 8, 10), decode=20))
    rig.prefill("b", prompt(8, 16))
    rig.end("a", "b")
    rig.run("c", prompt(16, 24), keep((0, None, 20)))
    assert rig.run("b", prompt(8, 16)) == 4
    assert rig.free == 4
    assert rig.add("a", prompt(0, 8)) == 4
    assert rig.add("c", prompt(16, 24)) == 0


def test_e_2_decoded_blocks_have_a_priority_of_their_own() -> None:
    """What a request of priority 5 leaves goes before all of one of priority 90."""
    rig = Rig(8)
    rig.prefill("a", prompt(0, 12), keep((0, None, 90), decode=90))
    assert rig.free == 5
    rig.generate("a", 0)
    assert rig.free == 4
    rig.prefill("b", prompt(12, 24), keep((0, None, 5), decode=5))
    assert rig.free == 1
    rig.generate("b", 0)
    assert rig.free == 0
    rig.end("a", "b")
    assert rig.free == 8
    rig.run("c", prompt(100, 112))
    assert rig.add("a again", prompt(0, 12)) == 11


def test_e_3_what_was_to_be_kept_for_a_time_goes_like_all_others_after_it() -> None:
    """After its 10 ms a prompt of priority 80 is evicted before one of priority 50."""
    rig = Rig(8)
    rig.run("a", prompt(0, 12), keep((0, None, 80, 10)))
    rig.run("b", prompt(12, 24), keep((0, None, 50)))
    rig.wait(50)
    rig.run("c", [1] * 12)
    assert rig.add("b again", prompt(12, 24)) == 11


def test_e_4_decoded_blocks_are_kept_for_a_time() -> None:
    """What was decoded at priority 100 for 20 ms is evicted after that; all of the prompt before it stays."""
    rig = Rig(9)
    first, second = [1, 1, *prompt(2, 12)], prompt(0, 12)
    rig.prefill("a", first, keep((0, None, 50), decode=50))
    rig.generate("a", 0, 0, 0)
    rig.end("a")
    rig.prefill("b", second, keep(decode=100, decode_ms=20))
    rig.generate("b", 0, 0, 0)
    rig.end("b")
    rig.wait(50)
    expired = [event for event in rig.reported(BlocksUpdated) if event.why == UpdateReason.EXPIRED]
    assert [(event.old_priority, event.priority) for event in expired] == [(100, 35)]
    rig.run("c", [0] * 8)
    assert rig.free == 9
    # Theirs reuses 8: the decoded block goes behind all others of priority 35, so that one of the prompt goes first.
    # Here nothing goes before what hangs behind it, which no prompt could reach any more.
    assert rig.add("b again", second) == 11


def test_v_3_priorities_are_reported_as_stated() -> None:
    """Stored with what the ranges say; only a request that states something changes what is cached."""
    rig = Rig(8, 2)
    rig.prefill("a", prompt(0, 8), keep((0, None, 50), decode=35))
    assert [event.priority for event in rig.reported(BlocksStored)] == [50]
    rig.end("a")
    # Here a block is cached as soon as it is computed, so that the prompt's last one needs no second event.
    assert not rig.reported(BlocksStored)
    rig.run("plain", prompt(0, 8))
    assert not rig.reported(BlocksUpdated)
    rig.prefill("again", prompt(0, 8), keep((0, None, 10)))
    updated = rig.reported(BlocksUpdated)
    assert {(event.old_priority, event.priority, event.why) for event in updated} == {
        (50, 10, UpdateReason.RETENTION)
    }
    assert sum(len(event.slots) // 4 for event in updated) == 2


def test_v_7_removals_are_reported_before_what_is_stored_instead() -> None:
    """Blocks of priority 0 make room for a new prompt: gone first, then the new ones."""
    rig = Rig(5)
    rig.run("a", prompt(0, 9), keep((0, 4, 80), (4, None, 0)))
    rig.events.clear()
    rig.prefill("b", prompt(100, 115))
    kinds = [type(event) for event in rig.events if isinstance(event, BlocksRemoved | BlocksStored)]
    assert kinds[0] is BlocksRemoved
    assert kinds[-1] is BlocksStored
    rig.end("b")
    assert rig.add("a again", prompt(0, 9)) == 4


def test_r_23_a_block_has_the_priority_that_its_request_states() -> None:
    """All blocks of a request that states 80 have 80."""
    rig = Rig(8)
    rig.run("a", prompt(0, 12), keep((0, None, 80), decode=80))
    assert rig.priorities == {80}
