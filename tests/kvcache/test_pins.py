"""Pins: references that outlive the sequence for which they were taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcache import KVCacheManager, Request
from kvcache.errors import OutOfBlocks, PinsExceeded, UnknownRequest, UsageError
from kvcache.replay import replay
from tests.support.engines import strategies
from tests.support.engines.rig import Rig


def test_pinned_blocks_outlive_what_needs_room() -> None:
    """Everything else is evicted; the pinned prefix is reused, and goes like all others once it is let go of."""
    rig = Rig(6, max_pinned_share=0.5)
    rig.prefill("a", [1] * 13)
    pin = rig.manager.pin("a", stop=8)
    assert rig.manager.pins()[pin].blocks == {24: 2}
    rig.end("a")
    for number in range(5):
        rig.run(number, [10 + number] * 16)
    assert rig.free == 4
    assert rig.add("again", [1] * 13) == 8
    rig.end("again")
    rig.manager.unpin(pin)
    assert rig.free == 6
    rig.run("large", [50] * 24)
    assert rig.add("once more", [1] * 13) == 0
    rig.manager.check()


def test_pins_are_refused_beyond_their_share() -> None:
    """What is pinned already counts, the same block once; a refusal changes nothing."""
    rig = Rig(8, max_pinned_share=0.5)
    rig.prefill("a", [1] * 24)
    first = rig.manager.pin("a", 0, 12)
    rig.manager.pin("a", 4, 16)
    before = rig.manager.fingerprint()
    with pytest.raises(
        PinsExceeded, match="5 blocks would be pinned in the window of 32 tokens, but at most 4 may be"
    ):
        rig.manager.pin("a", 0, 20)
    assert rig.manager.fingerprint() == before
    rig.manager.unpin(first)
    with pytest.raises(PinsExceeded):
        rig.manager.pin("a", 0, 20)
    assert set(rig.manager.pins()) == {2}


class Unread(dict[int, Any]):
    """Pins that nobody may go through."""

    def __iter__(self) -> Any:
        raise AssertionError("a call goes through all pins")

    keys = values = items = __iter__


@pytest.mark.parametrize("windows", [None, (6, 32)])
def test_a_pin_is_made_without_looking_at_the_others(windows: tuple[int, ...] | None) -> None:
    """So thousands of them may be there; what they hold together is known all the same."""
    rig = Rig(8, windows=windows, max_pinned_share=0.5)
    rig.prefill("a", [1] * 16)
    rig.prefill("b", [2] * 16)
    pins = [rig.manager.pin("a") for _ in range(3)]
    state = rig.manager.state
    state.pins = Unread(state.pins)
    pins.append(rig.manager.pin("a", stop=8))
    with pytest.raises(PinsExceeded):
        rig.manager.pin("b")
    for number in pins:
        rig.manager.unpin(number)
    rig.manager.pin("b")
    state.pins = dict(dict.items(state.pins))
    rig.manager.check()


def test_clear_takes_the_names_and_not_the_blocks() -> None:
    """After it nothing is reused; the slots come back with the pin."""
    rig = Rig(6)
    rig.run("a", [1] * 13)
    rig.prefill("b", [1] * 9)
    pin = rig.manager.pin("b")
    rig.end("b")
    rig.manager.clear()
    assert (rig.free, rig.manager.pins()[pin].named) == (4, False)
    assert rig.add("c", [1] * 9) == 0
    rig.end("c")
    rig.manager.unpin(pin)
    assert rig.free == 6
    rig.manager.check()


@pytest.mark.parametrize("number", [0, 2, -1, 2**70, True, "1", None])
def test_only_pins_that_there_are_can_be_let_go_of(number: Any) -> None:
    """Any other number is refused, one that was let go of too."""
    rig = Rig(4)
    rig.prefill("a", [1] * 5)
    rig.manager.unpin(rig.manager.pin("a"))
    with pytest.raises(UsageError):
        rig.manager.unpin(1)
    with pytest.raises(UsageError):
        rig.manager.unpin(number)
    with pytest.raises(UnknownRequest):
        rig.manager.pin("b")
    with pytest.raises(UsageError, match="start <= stop"):
        rig.manager.pin("a", 5, 4)


def test_pins_replay(tmp_path: Path) -> None:
    """A replayed state holds them, and a manager that goes on from it lets go of them."""
    manager = KVCacheManager(strategies.config(tokens_per_block=4), log=tmp_path)
    manager.add_sequence("a", [1] * 9)
    manager.store_context_blocks("a", 9)
    manager.pin("a")
    manager.remove_sequence("a")
    manager.close()
    resumed = KVCacheManager.resume(replay(tmp_path, verify=True).state)
    assert resumed.pins()[1].blocks == {24: 2}
    with pytest.raises(OutOfBlocks):
        resumed.add_sequences([Request("b", [2] * 20), Request("c", [3] * 8)])
    resumed.unpin(1)
    resumed.check()
    assert resumed.num_free_blocks == 8
