"""What goes first when room is needed, and what stays reusable: E-5 to E-8."""

from __future__ import annotations

import pytest

from kvcache.errors import OutOfBlocks
from tests.support.engines.rig import Rig, keep, prompt


def test_e_5_all_blocks_in_turn() -> None:
    """Two requests take all four blocks, and give them back; nobody gets more than there is."""
    rig = Rig(4)
    rig.prefill(0, prompt(0, 4))
    rig.generate(0, 0)
    rig.end(0)
    assert rig.add(1, [1, 1, 2, 3]) == 0
    assert rig.used == 1
    twelve = [2, 1, *prompt(2, 12)]
    assert rig.prefill(2, twelve) == 0
    assert rig.free == 0
    rig.end(1, 2)
    assert rig.prefill(3, twelve) == 11
    assert rig.free == 1
    rig.generate(3, 0)
    assert rig.free == 0
    with pytest.raises(OutOfBlocks):
        rig.add(4, [42])


def test_e_6_a_block_goes_after_those_after_it() -> None:
    """Of three blocks the middle one has priority 75: the last goes to secondary first, whatever the priorities."""
    rig = Rig(4, 1)
    tokens = prompt(0, 12)
    rig.prefill("a", prompt(0, 4))
    rig.generate("a", *prompt(4, 12))
    assert rig.used == 3
    rig.manager.set_priority("a", 75, start=4, stop=8)
    rig.prefill("b", prompt(100, 104))
    assert rig.free == 0
    rig.end("a")
    assert rig.free == 3
    rig.generate("b", 104)
    assert rig.levels(tokens) == [0, 0, 1]
    rig.generate("b", 105, 106, 107)
    assert rig.levels(tokens) == [0, 0, 1]
    rig.generate("b", 108)
    # Theirs moves block 0 down and keeps block 1. Both have 8 tokens left, of which one block must be brought back.
    # Here it is never a block before one that stays, so that the start of a prompt needs no copy.
    assert rig.levels(tokens) == [0, 1]
    assert rig.reusable(prompt(0, 9)) == 8


def test_e_7_a_prompt_is_found_across_both_levels() -> None:
    """A prompt's end lies in secondary; a request that shares its start goes on differently, and is found whole."""
    rig = Rig(4, 4)
    rig.run("a", prompt(0, 12))
    rig.run("b", [1, 1, *prompt(2, 12)])
    assert rig.levels(prompt(0, 12)) == [0, 1, 1]
    assert rig.prefill("c", prompt(0, 4)) == 3
    rig.generate("c", 4, 5, 6, 7, 0, 0)
    rig.end("c")
    assert rig.add("d", [*prompt(0, 8), 0, 0]) == 9


def test_e_8_a_first_block_of_lower_priority() -> None:
    """Of two blocks the first has priority 0 and the second 90; a prompt of four needs one of their places."""
    rig = Rig(5)
    rig.run("a", prompt(0, 8), keep((0, 4, 0), (4, 8, 90)))
    rig.prefill("b", prompt(100, 116))
    assert rig.free == 1
    # Theirs evicts the first block: what stays is not reachable without it. Here the first one stays, and is reused.
    assert rig.levels(prompt(0, 8)) == [0]
    rig.end("b")
    assert rig.add("b again", prompt(100, 116)) == 15


def test_e_8_a_last_block_of_lower_priority() -> None:
    """The first block has priority 90, the second 0: the second goes when a block is needed."""
    rig = Rig(4)
    rig.run("a", prompt(0, 8), keep((0, 4, 90), (4, 8, 0)))
    rig.run("b", prompt(100, 104))
    assert rig.free == 4
    rig.prefill("c", prompt(300, 308))
    assert rig.levels(prompt(0, 8)) == [0]
    assert rig.add("a again", [*prompt(0, 4), *prompt(200, 204)]) == 4


def test_e_8_a_chain_of_three_priorities() -> None:
    """Priorities 0, 35 and 90 from the first block on; two prompts need 4 of 6 blocks."""
    rig = Rig(6)
    rig.run("a", prompt(0, 12), keep((0, 4, 0), (4, 8, 35), (8, 12, 90)))
    rig.prefill("b", prompt(100, 104))
    assert rig.free == 5
    rig.end("b")
    rig.prefill("c", prompt(200, 212))
    assert rig.free == 3
    rig.end("c")
    assert rig.add("c again", prompt(200, 212)) >= 4


def test_e_8_a_chain_of_the_lowest_priority_in_front() -> None:
    """The same with a first block of priority 0 before two plain ones; other prompts come and come again."""
    rig = Rig(8)
    rig.run("a", prompt(0, 12), keep((0, 4, 0), (4, 12, 35)))
    assert rig.run("b", prompt(100, 112)) == 0
    assert rig.run("c", prompt(200, 204)) == 0
    assert rig.run("b again", prompt(100, 112)) > 0
    assert rig.free == 8
