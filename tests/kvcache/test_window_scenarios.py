"""What a sliding window keeps, lets go of and reuses, in cases worked out by hand.

The ids in the names are those of cases in which TensorRT-LLM behaves alike, but for which slot is which, and where a
test says so. S-7, a chain of pinned blocks, is left out: nothing can be pinned here.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from events.types import BlocksRemoved, BlocksStored
from kvcache.inputs.requests import Request
from kvcache.manager import KVCacheManager
from tests import strategies

GONE = -2
"""In a block table: a block that the window has let go of."""


def prompt(count: int, first: int = 1000) -> list[int]:
    """So many tokens: 1000, 1001, ..."""
    return list(range(first, first + count))


class Cache:
    """A manager without tensors, and the tokens of its sequences."""

    def __init__(self, primary_blocks: int, *windows: int, **settings: Any) -> None:
        defaults = {
            "max_sequence_length": 128,
            "tokens_per_block": 4,
            "num_layers": len(windows),
            "max_attention_window": windows,
        }
        self.manager = KVCacheManager(
            strategies.config(primary_blocks=primary_blocks, **(defaults | settings))
        )
        self.last: dict[str, int] = {}

    def add(self, name: str, tokens: Sequence[int], *, computed: bool = False) -> int:
        """Admit a request, and report its whole prompt as `computed`; returns how many tokens are reused."""
        admission = self.manager.add_sequence(name, tokens)
        self.last[name] = tokens[-1]
        if computed:
            self.manager.store_context_blocks(name, len(tokens))
        return admission.reused_tokens

    def generate(self, name: str, count: int = 1) -> None:
        """Append tokens, one step each: they go on counting where the prompt ended."""
        for _ in range(count):
            self.last[name] += 1
            self.manager.add_tokens([name], [self.last[name]])

    def remove(self, *names: str, store: bool = True) -> None:
        for name in names:
            self.manager.remove_sequence(name, store)
            self.manager.check()

    def table(self, name: str, window: int | None = None) -> list[int]:
        """The block table; slots are told apart."""
        found: list[int] = self.manager.block_table(name, window).tolist()
        held = [slot for slot in found if slot != GONE]
        assert len(set(held)) == len(held)
        assert min(held) >= 0
        return found

    def gone(self, name: str, window: int | None = None) -> tuple[int, int]:
        """Entries of the block table, and how many of them the window has let go of: the first ones."""
        table = self.table(name, window)
        count = table.count(GONE)
        assert table[:count] == [GONE] * count
        return len(table), count

    def reusable(self, tokens: Sequence[int]) -> int:
        """Tokens that a prompt would reuse now."""
        return self.manager.match(tokens).reused_tokens

    @property
    def free(self) -> int:
        """Of the window that has the fewest."""
        self.manager.check()
        return self.manager.num_free_blocks


# -- what a sequence holds


def test_a_4_a_sequence_grows_through_a_small_window() -> None:
    """Window 3: the last token is computed next, and sees two more. So block 0 goes at 7 tokens, block 1 at 11."""
    cache = Cache(16, 3, enable_block_reuse=False)
    cache.add("a", prompt(2))
    states = []
    for _ in range(2, 12):
        states.append((*cache.gone("a"), cache.free))
        cache.generate("a")
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
    cache.remove("a")
    assert cache.free == 16


def test_a_5_a_window_that_is_no_multiple_of_a_block() -> None:
    """Window 575 in blocks of 64: nothing is let go of before token 639."""
    settings = {"tokens_per_block": 64, "max_sequence_length": 1024, "enable_block_reuse": False}
    cache = Cache(80, 575, **settings)
    cache.add("a", prompt(575))
    free = [cache.free]
    for _ in range(2):
        cache.generate("a")
        free.append(cache.free)
    assert free == [71, 71, 70]
    cache.generate("a", 61)
    assert cache.gone("a") == (10, 0)  # 638 tokens
    cache.generate("a")
    assert cache.gone("a") == (10, 1)
    assert cache.free == 71
    cache.remove("a")
    assert cache.free == 80
    names = [f"{number}" for number in range(8)]
    for name in names:
        cache.add(name, prompt(575))
    for name in names:
        cache.generate(name)
    assert cache.free == 8
    cache.remove(*names)
    assert cache.free == 80


# -- reuse


def test_r_10_prompts_that_begin_like_a_sequence_that_has_ended() -> None:
    """Blocks that were let go of are found again; only the last token of a prompt is always computed."""
    cache = Cache(16, 16, secondary_blocks=16)
    cache.add("0", prompt(20))
    first = cache.table("0")
    assert len(first) == 5
    cache.manager.store_context_blocks("0", 20)
    assert cache.table("0") == [GONE, *first[1:]]  # token 19 sees tokens 4 to 19
    cache.generate("0", 4)
    assert cache.gone("0") == (6, 2)
    assert cache.table("0")[2:5] == first[2:]
    cache.remove("0")
    assert cache.free == 16

    assert cache.add("1", prompt(7)) == 6
    table = cache.table("1")
    assert len(table) == 2
    assert table[0] == first[0]
    assert table[1] not in first
    cache.generate("1", 2)
    assert cache.gone("1") == (3, 0)
    cache.remove("1")

    assert cache.add("2", prompt(10)) == 9
    assert cache.table("2")[:2] == first[:2]
    cache.remove("2")

    assert cache.add("3", prompt(15)) == 14
    assert cache.table("3")[:3] == first[:3]
    cache.generate("3", 2)
    assert cache.gone("3") == (5, 0)
    cache.remove("3")
    assert cache.free == 16


def test_r_11_two_windows_reuse_what_both_have() -> None:
    """The small window lets go of block 0 when the large one still has it; it is reused in both."""
    cache = Cache(16, 16, 8, secondary_blocks=16)
    cache.add("0", prompt(11))
    assert [cache.gone("0", window) for window in (8, 16)] == [(3, 0), (3, 0)]
    cache.manager.store_context_blocks("0", 11)
    cache.generate("0", 4)
    assert [cache.gone("0", window) for window in (8, 16)] == [(4, 1), (4, 0)]
    assert cache.manager.num_free_blocks_per_window() == {8: 13, 16: 12}
    cache.remove("0")
    assert cache.add("1", prompt(7)) == 6
    cache.generate("1", 2)
    assert [cache.gone("1", window) for window in (8, 16)] == [(3, 0), (3, 0)]
    cache.remove("1")
    assert sum(cache.manager.num_free_blocks_per_window().values()) == 32


# -- blocks that were let go of


def test_s_1_a_block_that_was_let_go_of_is_reused() -> None:
    """Block 0 leaves the window with token 12; a prompt that begins with it copies its start, as ever."""
    cache = Cache(8, 8)
    cache.add("0", prompt(11), computed=True)
    assert (cache.gone("0"), cache.free) == ((3, 0), 5)
    cache.generate("0")
    assert (cache.gone("0"), cache.free) == ((3, 1), 6)
    cache.remove("0")
    assert cache.free == 8
    assert cache.add("1", prompt(4)) == 3
    cache.remove("1")
    assert cache.free == 8


def test_s_1_a_block_that_was_let_go_of_is_reused_beside_its_sequence() -> None:
    """The same while the first sequence is running."""
    cache = Cache(10, 8)
    cache.add("0", prompt(11), computed=True)
    cache.generate("0", 2)
    assert (cache.gone("0"), cache.free) == ((4, 1), 7)
    assert cache.add("1", prompt(4)) == 3
    assert cache.free == 6
    assert not set(cache.table("1")) & set(cache.table("0"))
    cache.remove("0", "1")
    assert cache.free == 10


def test_s_2_a_block_that_was_let_go_of_is_evicted_for_another_sequence() -> None:
    """A sequence needs all that is free, so block 0 of the first one goes; what the second has stored is reused."""
    cache = Cache(4, 8)
    cache.add("0", prompt(11), computed=True)
    first = cache.table("0")
    assert cache.free == 1
    cache.generate("0")
    assert cache.free == 2
    cache.add("1", prompt(8, 1100), computed=True)
    assert cache.free == 0
    assert first[0] in cache.table("1")
    assert cache.table("0") == [GONE, *first[1:]]
    cache.remove("0", "1")
    assert cache.free == 4
    assert cache.add("2", prompt(8, 1100)) == 7
    cache.remove("2")
    assert cache.free == 4


def test_s_2_what_was_evicted_is_not_reused() -> None:
    """The only block that can be had is block 0: later its new content is found, its old one is not."""
    cache = Cache(3, 8)
    cache.add("0", prompt(11), computed=True)
    first = cache.table("0")
    assert cache.free == 0
    cache.generate("0")
    assert cache.free == 1
    cache.add("1", prompt(4, 1100), computed=True)
    assert cache.free == 0
    assert cache.table("1") == first[:1]
    cache.remove("0", "1")
    assert cache.free == 3
    assert cache.add("2", prompt(4, 1100)) == 3
    assert cache.reusable(prompt(4)) == 0
    cache.remove("2")
    assert cache.add("3", prompt(4)) == 0
    cache.remove("3")
    assert cache.free == 3


def test_s_2_what_was_evicted_is_gone_although_its_new_owner_stored_nothing() -> None:
    """Neither block 0 is found, nor block 1, which is cached still, without what comes before it."""
    cache = Cache(3, 8)
    cache.add("0", prompt(11), computed=True)
    cache.generate("0")
    cache.add("1", prompt(4, 1100))
    assert cache.free == 0
    cache.remove("1", store=False)
    cache.remove("0")
    assert cache.free == 3
    assert cache.add("2", prompt(4)) == 0
    cache.remove("2", store=False)
    assert cache.add("3", prompt(4, 1004)) == 0
    cache.remove("3", store=False)
    assert cache.free == 3


def test_s_3_a_blank_block_is_handed_out_at_once() -> None:
    """Without reuse, block 0 becomes blank when the window leaves it, and the next request gets it.

    Handing out first what has been free for longest would give it another one. Nothing is lost by not doing so: without
    reuse nobody asks for a block's content again, so any blank block is as good as any other.
    """
    cache = Cache(5, 8, enable_block_reuse=False)
    cache.add("0", prompt(11), computed=True)
    first = cache.table("0")
    cache.generate("0")
    assert (cache.table("0"), cache.free) == ([GONE, *first[1:]], 3)
    cache.add("1", prompt(4, 1100))
    assert cache.table("1") == first[:1]
    assert cache.free == 2
    cache.remove("0", "1")
    assert cache.free == 5


@pytest.mark.parametrize("reuse", [False, True])
def test_s_4_what_a_scheduler_is_told_beside_a_sequence_that_has_let_go_of_blocks(reuse: bool) -> None:
    """What was let go of can be had, by others and by the sequence itself."""
    cache = Cache(5, 8, enable_block_reuse=reuse)
    cache.add("0", prompt(11), computed=True)
    cache.generate("0")
    manager = cache.manager
    assert cache.free == 3
    assert [manager.can_add([Request("1", prompt(count, 2000))]) for count in (12, 13)] == [1, 0]
    three = [Request(number, prompt(5, 1000 * number)) for number in (2, 3, 4)]
    assert manager.can_add(three) == 1
    growth = [manager.remaining_blocks_to_completion("0", count) for count in (0, 1, 4, 5, 8)]
    assert growth == [0, 1, 1, 1, 1]  # from then on each new block is paid with one that leaves the window
    cache.add("1", prompt(12, 2000))
    assert (cache.free, manager.can_add([Request("2", [1])])) == (0, 0)
    cache.remove("1")
    cache.remove("0")
    assert cache.free == 5


def test_s_5_a_window_of_one_block() -> None:
    """Window 4: block 0 is let go of when the prompt is stored, block 1 with the next token, block 2 is stored after.

    Letting go of both with that token would be as right: what stores the prompt need not be what lets go of blocks.
    """
    cache = Cache(8, 4)
    cache.add("0", prompt(11))
    assert cache.gone("0") == (3, 0)
    cache.manager.store_context_blocks("0", 11)
    assert (cache.gone("0"), cache.free) == ((3, 1), 6)
    cache.generate("0")
    assert (cache.gone("0"), cache.free) == ((3, 2), 7)
    assert cache.reusable(prompt(13)) == 8
    cache.generate("0")
    assert (cache.gone("0"), cache.free) == ((4, 2), 6)
    assert cache.reusable(prompt(13)) == 12
    assert cache.add("1", prompt(4)) == 3
    cache.remove("0", "1")
    assert cache.free == 8


def test_s_6_chains_that_differ_in_their_second_block() -> None:
    """Whichever chain was stored last, all that is cached of a prompt is reused, and nothing stays occupied."""
    cache = Cache(8, 8)
    start, one, other = prompt(4), prompt(4, 1004), prompt(4, 1104)
    reused = []
    for number, second in enumerate([one, other, one, one]):
        reused.append(cache.add(f"{number}", [*start, *second, 1200], computed=True))
        cache.remove(f"{number}")
        assert cache.free == 8
    assert reused == [0, 4, 8, 8]
    assert cache.reusable([*start, *other, 1200]) == 8


@pytest.mark.parametrize(("partial", "reused", "gone"), [(False, 24, 3), (True, 27, 4)])
def test_s_8_an_evicted_first_block_is_not_needed(partial: bool, reused: int, gone: int) -> None:
    """Of 28 tokens in a window of 12, the last full blocks are enough, though block 0 was evicted.

    24 tokens are in full blocks, of which the next token sees 13 to 23, in blocks 3 to 5. Where blocks are reused in
    part, all but the last token of block 6 are copied too: token 27 sees none before 16, so block 3 is not needed.
    """
    cache = Cache(16, 12, enable_partial_reuse=partial)
    cache.add("0", prompt(28), computed=True)
    first = cache.table("0")
    assert (cache.gone("0"), cache.free) == ((7, 4), 13)
    cache.remove("0")
    cache.add("1", prompt(40, 2000))  # 10 blocks, where 9 are blank
    cache.remove("1", store=False)
    # 16 tokens need blocks 1 to 3, fewer need block 0.
    assert [cache.reusable(prompt(count)) for count in (4, 13, 17)] == [0, 0, 16]
    assert cache.add("2", prompt(28)) == reused
    assert cache.gone("2") == (7, gone)
    assert cache.table("2")[4:6] == first[4:6]
    cache.remove("2")
    assert cache.free == 16


@pytest.mark.parametrize("computed", [False, True])
def test_s_9_all_blocks_in_use(computed: bool) -> None:
    """A second sequence gets what the first has let go of, whether that was cached or not, and both end."""
    cache = Cache(4, 8)
    cache.add("0", prompt(11), computed=computed)
    cache.generate("0")
    assert cache.free == 2
    cache.add("1", prompt(8, 1100))
    assert cache.free == 0
    cache.remove("0", "1")
    assert cache.free == 4


# -- events


def stored_and_removed(cache: Cache) -> list[tuple[str, int, int]]:
    """Of the events since the last flush: (kind, group, blocks)."""
    batch = cache.manager.flush()
    assert batch is not None
    return [
        (type(event).__name__, event.group, len(array("i", event.slots)))
        for event in batch.events
        if isinstance(event, BlocksStored | BlocksRemoved)
    ]


def test_v_5_windows_ascend_and_store_each_for_itself() -> None:
    """The smaller window is group 0, whatever the order of the layers; a prompt is stored once in each."""
    cache = Cache(8, 16, 12, secondary_blocks=2)
    created = cache.manager.state.created
    assert created is not None
    assert [group.window for group in created.groups] == [12, 16]
    assert [group.layers for group in created.groups] == [(1,), (0,)]
    cache.add("0", range(8), computed=True)
    assert stored_and_removed(cache) == [("BlocksStored", 0, 2), ("BlocksStored", 1, 2)]


def test_v_8_what_is_removed_is_told_before_what_takes_its_place() -> None:
    """A prompt that displaces another one: in each window the removals come first, then what is stored."""
    cache = Cache(4, 8, 16, max_sequence_length=16)
    cache.add("0", range(9), computed=True)
    cache.remove("0")
    cache.manager.flush()
    cache.add("1", range(100, 109), computed=True)
    told = stored_and_removed(cache)
    for group in range(2):
        of_group = [(kind, blocks) for kind, each, blocks in told if each == group]
        *removed, stored = of_group
        assert stored == ("BlocksStored", 2)
        assert {kind for kind, _ in removed} == {"BlocksRemoved"}
        assert sum(blocks for _, blocks in removed) == 2
