"""Requests that are admitted together: R-14 to R-22.

Where several match a part of one block, theirs gives it to the last of them, which writes on in it; here each gets a
copy, and the block stays cached. Both take as many blocks from what is free.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.inputs import Request
from tests.support.engines.rig import UNKNOWN, Rig, prompt

START = prompt(0, 4)


def seeded(*seeds: Sequence[int], blocks: int = 16) -> Rig:
    """A cache that has seen these prompts."""
    rig = Rig(blocks)
    for number, seed in enumerate(seeds):
        rig.run(f"seed {number}", seed)
    return rig


def admit(rig: Rig, *prompts: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """Admit a batch; returns for each the tokens that it reuses, and its block table."""
    requests = [Request(number, tokens) for number, tokens in enumerate(prompts)]
    admitted = rig.manager.add_sequences(requests)
    rig.manager.check()
    tables = [rig.table(number) for number in range(len(prompts))]
    return [each.reused_tokens for each in admitted], tables


def slots_of(rig: Rig, tokens: Sequence[int]) -> list[int]:
    """Where the blocks lie that are cached of these tokens."""
    found = rig.manager.match([*tokens, UNKNOWN])
    return [block.slot for block in (*found.blocks, *found.partials)]


def test_r_14_two_requests_match_a_part_of_one_block() -> None:
    """Both share the full block, and each has a block of its own behind it."""
    rig = seeded(prompt(0, 7))
    full, part = slots_of(rig, prompt(0, 7))
    reused, (one, other) = admit(rig, [*START, 4, 10], [*START, 4, 20])
    assert reused == [5, 5]
    assert one[0] == other[0] == full
    assert len({one[1], other[1], part}) == 3
    assert rig.used == 3


def test_r_15_a_full_match_keeps_the_block_that_another_request_matches_in_part() -> None:
    """The partial match comes first in the batch, and gets another block."""
    rig = seeded(prompt(0, 9))
    cached = slots_of(rig, prompt(0, 8))
    reused, (part, full) = admit(rig, [*prompt(0, 7), 10], prompt(0, 9))
    assert reused == [7, 8]
    assert full[:2] == cached
    assert part[0] == full[0]
    assert part[1] not in full


def test_r_16_a_full_match_before_a_partial_one() -> None:
    """The same in the other order."""
    rig = seeded(prompt(0, 9))
    cached = slots_of(rig, prompt(0, 8))
    reused, (full, part) = admit(rig, prompt(0, 9), [*prompt(0, 7), 10])
    assert reused == [8, 7]
    assert full[:2] == cached
    assert part[0] == full[0]
    assert part[1] not in full


def test_r_17_a_full_match_between_two_partial_ones() -> None:
    """All three have another second block; the full match has the cached one."""
    rig = seeded(prompt(0, 9))
    cached = slots_of(rig, prompt(0, 8))
    reused, tables = admit(rig, [*prompt(0, 7), 10], prompt(0, 9), [*prompt(0, 7), 20])
    assert reused == [7, 8, 7]
    assert tables[1][:2] == cached
    assert len({table[1] for table in tables}) == 3
    assert len({table[0] for table in tables}) == 1


def test_r_18_two_requests_match_a_part_of_a_block_with_children() -> None:
    """The block that both copy from has two cached blocks behind it, which stay."""
    seeds = prompt(0, 8), [*START, *prompt(10, 14)]
    rig = seeded(*seeds)
    reused, tables = admit(rig, [0, 1, 2, 50], [0, 1, 60, 70])
    assert reused == [3, 2]
    assert [len(table) for table in tables] == [1, 1]
    assert tables[0] != tables[1]
    assert [len(slots_of(rig, seed)) for seed in seeds] == [2, 2]


def test_r_19_a_full_match_through_a_block_that_is_matched_in_part() -> None:
    """A prompt goes through the block of which another one of the batch matches the start."""
    rig = seeded([*prompt(0, 8), 99], [*START, *prompt(10, 14), 99])
    reused, (full, part) = admit(rig, prompt(0, 9), [0, 1, 2, 50])
    assert reused == [8, 3]
    assert part[0] not in full


def test_r_20_a_request_that_needs_the_whole_pool() -> None:
    """What is copied from is evicted by the same request, which needs all 8 blocks."""
    rig = seeded(prompt(0, 8), [*START, *prompt(10, 14)], blocks=8)
    reused, (table,) = admit(rig, [0, 1, *prompt(50, 80)])
    assert reused == [2]
    assert len(table) == 8
    assert rig.free == 0


def test_r_21_a_full_match_alongside_none() -> None:
    """Two requests that have nothing in common."""
    rig = seeded(prompt(0, 9))
    reused, (one, other) = admit(rig, prompt(0, 9), prompt(100, 109))
    assert reused == [8, 0]
    assert not {*one} & {*other}


def test_r_22_three_requests_match_a_part_of_one_block() -> None:
    """All share the full block, and have three blocks behind it."""
    rig = seeded(prompt(0, 7))
    reused, tables = admit(rig, *([*START, 4, last] for last in (10, 20, 30)))
    assert reused == [5, 5, 5]
    assert len({table[0] for table in tables}) == 1
    assert len({table[1] for table in tables}) == 3
    assert rig.used == 4
