"""What a sliding window keeps, lets go of and reuses: A-4, A-5, R-10, R-11, S-1 to S-9."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache.inputs import Request
from tests.support.engines.rig import GONE, Rig


def prompt(count: int, first: int = 1000) -> list[int]:
    """So many tokens: 1000, 1001, ..."""
    return list(range(first, first + count))


# -- what a sequence holds


def test_a_4_a_sequence_grows_through_a_small_window() -> None:
    """Window 3: the last token is computed next, and sees two more. So block 0 goes at 7 tokens, block 1 at 11."""
    rig = Rig(16, windows=(3,), enable_block_reuse=False)
    rig.add("a", prompt(2))
    states = []
    for _ in range(2, 12):
        states.append((*rig.gone("a"), rig.free))
        rig.go_on("a")
    assert states == [
        (1, 0, 15),  # 2 tokens
        (1, 0, 15),
        (1, 0, 15),
        (2, 0, 14),  # 5
        (2, 0, 14),
        (2, 1, 15),  # 7
        (2, 1, 15),
        (3, 1, 14),  # 9
        (3, 1, 14),
        (3, 2, 15),  # 11
    ]
    rig.end("a")
    assert rig.free == 16


def test_a_5_a_window_that_is_no_multiple_of_a_block() -> None:
    """Window 575 in blocks of 64: nothing is let go of before token 639."""
    settings: dict[str, Any] = {"max_sequence_length": 1024, "enable_block_reuse": False}
    rig = Rig(80, size=64, windows=(575,), **settings)
    rig.add("a", prompt(575))
    free = [rig.free]
    for _ in range(2):
        rig.go_on("a")
        free.append(rig.free)
    assert free == [71, 71, 70]
    rig.go_on("a", 61)
    assert rig.gone("a") == (10, 0)  # 638 tokens
    rig.go_on("a")
    assert rig.gone("a") == (10, 1)
    assert rig.free == 71
    rig.end("a")
    assert rig.free == 80
    names = [f"{number}" for number in range(8)]
    for name in names:
        rig.add(name, prompt(575))
    for name in names:
        rig.go_on(name)
    assert rig.free == 8
    rig.end(*names)
    assert rig.free == 80


# -- reuse


def test_r_10_prompts_that_begin_like_a_sequence_that_has_ended() -> None:
    """Blocks that were let go of are found again; only the last token of a prompt is always computed."""
    rig = Rig(16, windows=(16,), secondary_blocks=16)
    rig.add("0", prompt(20))
    first = rig.table("0")
    assert len(first) == 5
    rig.manager.store_context_blocks("0", 20)
    assert rig.table("0") == [GONE, *first[1:]]  # token 19 sees tokens 4 to 19
    rig.go_on("0", 4)
    assert rig.gone("0") == (6, 2)
    assert rig.table("0")[2:5] == first[2:]
    rig.end("0")
    assert rig.free == 16

    assert rig.add("1", prompt(7)) == 6
    table = rig.table("1")
    assert len(table) == 2
    assert table[0] == first[0]
    assert table[1] not in first
    rig.go_on("1", 2)
    assert rig.gone("1") == (3, 0)
    rig.end("1")

    assert rig.add("2", prompt(10)) == 9
    assert rig.table("2")[:2] == first[:2]
    rig.end("2")

    assert rig.add("3", prompt(15)) == 14
    assert rig.table("3")[:3] == first[:3]
    rig.go_on("3", 2)
    assert rig.gone("3") == (5, 0)
    rig.end("3")
    assert rig.free == 16


def test_r_11_two_windows_reuse_what_both_have() -> None:
    """The small window lets go of block 0 when the large one still has it; it is reused in both."""
    rig = Rig(16, windows=(16, 8), secondary_blocks=16)
    rig.add("0", prompt(11))
    assert [rig.gone("0", window) for window in (8, 16)] == [(3, 0), (3, 0)]
    rig.manager.store_context_blocks("0", 11)
    rig.go_on("0", 4)
    assert [rig.gone("0", window) for window in (8, 16)] == [(4, 1), (4, 0)]
    assert rig.manager.num_free_blocks_per_window() == {8: 13, 16: 12}
    rig.end("0")
    assert rig.add("1", prompt(7)) == 6
    rig.go_on("1", 2)
    assert [rig.gone("1", window) for window in (8, 16)] == [(3, 0), (3, 0)]
    rig.end("1")
    assert sum(rig.manager.num_free_blocks_per_window().values()) == 32


# -- blocks that were let go of


def test_s_1_a_block_that_was_let_go_of_is_reused() -> None:
    """Block 0 leaves the window with token 12; a prompt that begins with it copies its start, as ever."""
    rig = Rig(8, windows=(8,))
    rig.prefill("0", prompt(11))
    assert (rig.gone("0"), rig.free) == ((3, 0), 5)
    rig.go_on("0")
    assert (rig.gone("0"), rig.free) == ((3, 1), 6)
    rig.end("0")
    assert rig.free == 8
    assert rig.add("1", prompt(4)) == 3
    rig.end("1")
    assert rig.free == 8


def test_s_1_a_block_that_was_let_go_of_is_reused_alongside_its_sequence() -> None:
    """The same while the first sequence is running."""
    rig = Rig(10, windows=(8,))
    rig.prefill("0", prompt(11))
    rig.go_on("0", 2)
    assert (rig.gone("0"), rig.free) == ((4, 1), 7)
    assert rig.add("1", prompt(4)) == 3
    assert rig.free == 6
    assert not set(rig.table("1")) & set(rig.table("0"))
    rig.end("0", "1")
    assert rig.free == 10


def test_s_2_a_block_that_was_let_go_of_is_evicted_for_another_sequence() -> None:
    """A sequence needs all that is free, so block 0 of the first one goes; what the second has stored is reused."""
    rig = Rig(4, windows=(8,))
    rig.prefill("0", prompt(11))
    first = rig.table("0")
    assert rig.free == 1
    rig.go_on("0")
    assert rig.free == 2
    rig.prefill("1", prompt(8, 1100))
    assert rig.free == 0
    assert first[0] in rig.table("1")
    assert rig.table("0") == [GONE, *first[1:]]
    rig.end("0", "1")
    assert rig.free == 4
    assert rig.add("2", prompt(8, 1100)) == 7
    rig.end("2")
    assert rig.free == 4


def test_s_2_what_was_evicted_is_not_reused() -> None:
    """The only block that can be had is block 0: later its new content is found, its old one is not."""
    rig = Rig(3, windows=(8,))
    rig.prefill("0", prompt(11))
    first = rig.table("0")
    assert rig.free == 0
    rig.go_on("0")
    assert rig.free == 1
    rig.prefill("1", prompt(4, 1100))
    assert rig.free == 0
    assert rig.table("1") == first[:1]
    rig.end("0", "1")
    assert rig.free == 3
    assert rig.add("2", prompt(4, 1100)) == 3
    assert rig.reusable(prompt(4)) == 0
    rig.end("2")
    assert rig.add("3", prompt(4)) == 0
    rig.end("3")
    assert rig.free == 3


def test_s_2_what_was_evicted_is_gone_although_its_new_owner_stored_nothing() -> None:
    """Neither block 0 is found, nor block 1, which is cached still, without what comes before it."""
    rig = Rig(3, windows=(8,))
    rig.prefill("0", prompt(11))
    rig.go_on("0")
    rig.add("1", prompt(4, 1100))
    assert rig.free == 0
    rig.end("1", store=False)
    rig.end("0")
    assert rig.free == 3
    assert rig.add("2", prompt(4)) == 0
    rig.end("2", store=False)
    assert rig.add("3", prompt(4, 1004)) == 0
    rig.end("3", store=False)
    assert rig.free == 3


def test_s_3_a_blank_block_is_handed_out_at_once() -> None:
    """Without reuse, block 0 becomes blank when the window leaves it, and the next request gets it.

    Handing out first what has been free for longest would give it another one. Nothing is lost by not doing so: without
    reuse nobody asks for a block's content again, so any blank block is as good as any other.
    """
    rig = Rig(5, windows=(8,), enable_block_reuse=False)
    rig.prefill("0", prompt(11))
    first = rig.table("0")
    rig.go_on("0")
    assert (rig.table("0"), rig.free) == ([GONE, *first[1:]], 3)
    rig.add("1", prompt(4, 1100))
    assert rig.table("1") == first[:1]
    assert rig.free == 2
    rig.end("0", "1")
    assert rig.free == 5


@pytest.mark.parametrize("reuse", [False, True])
def test_s_4_what_a_scheduler_is_reported_alongside_a_sequence_that_has_let_go_of_blocks(reuse: bool) -> None:
    """What was let go of can be had, by others and by the sequence itself."""
    rig = Rig(5, windows=(8,), enable_block_reuse=reuse)
    rig.prefill("0", prompt(11))
    rig.go_on("0")
    manager = rig.manager
    assert rig.free == 3
    assert [manager.can_add([Request("1", prompt(count, 2000))]) for count in (12, 13)] == [1, 0]
    three = [Request(number, prompt(5, 1000 * number)) for number in (2, 3, 4)]
    assert manager.can_add(three) == 1
    growth = [manager.scheduling.remaining_blocks_to_completion("0", count) for count in (0, 1, 4, 5, 8)]
    assert growth == [0, 1, 1, 1, 1]  # from then on each new block is paid with one that leaves the window
    simulation = manager.scheduling.simulate()
    assert (simulation.remove("0"), simulation.has_free(5)) == ({8: 2}, True)
    rig.add("1", prompt(12, 2000))
    assert (rig.free, manager.can_add([Request("2", [1])])) == (0, 0)
    rig.end("1")
    rig.end("0")
    assert rig.free == 5


def test_s_5_a_window_of_one_block() -> None:
    """Window 4: block 0 is let go of when the prompt is stored, block 1 with the next token, block 2 is stored after.

    Letting go of both with that token would be as right: what stores the prompt need not be what lets go of blocks.
    """
    rig = Rig(8, windows=(4,))
    rig.add("0", prompt(11))
    assert rig.gone("0") == (3, 0)
    rig.manager.store_context_blocks("0", 11)
    assert (rig.gone("0"), rig.free) == ((3, 1), 6)
    rig.go_on("0")
    assert (rig.gone("0"), rig.free) == ((3, 2), 7)
    assert rig.reusable(prompt(13)) == 8
    rig.go_on("0")
    assert (rig.gone("0"), rig.free) == ((4, 2), 6)
    assert rig.reusable(prompt(13)) == 12
    assert rig.add("1", prompt(4)) == 3
    rig.end("0", "1")
    assert rig.free == 8


def test_s_6_chains_that_differ_in_their_second_block() -> None:
    """Whichever chain was stored last, all that is cached of a prompt is reused, and nothing stays occupied."""
    rig = Rig(8, windows=(8,))
    start, one, other = prompt(4), prompt(4, 1004), prompt(4, 1104)
    reused = []
    for number, second in enumerate([one, other, one, one]):
        reused.append(rig.prefill(f"{number}", [*start, *second, 1200]))
        rig.end(f"{number}")
        assert rig.free == 8
    assert reused == [0, 4, 8, 8]
    assert rig.reusable([*start, *other, 1200]) == 8


@pytest.mark.parametrize(("partial", "reused", "gone"), [(False, 24, 3), (True, 27, 4)])
def test_s_8_an_evicted_first_block_is_not_needed(partial: bool, reused: int, gone: int) -> None:
    """Of 28 tokens in a window of 12, the last full blocks are enough, though block 0 was evicted.

    24 tokens are in full blocks, of which the next token sees 13 to 23, in blocks 3 to 5. Where blocks are reused in
    part, all but the last token of block 6 are copied too: token 27 sees none before 16, so block 3 is not needed.
    """
    rig = Rig(16, windows=(12,), enable_partial_reuse=partial)
    rig.prefill("0", prompt(28))
    first = rig.table("0")
    assert (rig.gone("0"), rig.free) == ((7, 4), 13)
    rig.end("0")
    rig.add("1", prompt(40, 2000))  # 10 blocks, where 9 are blank
    rig.end("1", store=False)
    # 16 tokens need blocks 1 to 3, fewer need block 0.
    assert [rig.reusable(prompt(count)) for count in (4, 13, 17)] == [0, 0, 16]
    assert rig.add("2", prompt(28)) == reused
    assert rig.gone("2") == (7, gone)
    assert rig.table("2")[4:6] == first[4:6]
    rig.end("2")
    assert rig.free == 16


@pytest.mark.parametrize("computed", [False, True])
def test_s_9_all_blocks_in_use(computed: bool) -> None:
    """A second sequence gets what the first has let go of, whether that was cached or not, and both end."""
    rig = Rig(4, windows=(8,))
    (rig.prefill if computed else rig.add)("0", prompt(11))
    rig.go_on("0")
    assert rig.free == 2
    rig.add("1", prompt(8, 1100))
    assert rig.free == 0
    rig.end("0", "1")
    assert rig.free == 4
