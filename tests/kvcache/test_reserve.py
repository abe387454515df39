"""Slots ahead of tokens, tokens that may be taken back, and prompts that get their slots chunk by chunk."""

from __future__ import annotations

from typing import Any

import pytest

from events.types import AllocateReason, BlocksAllocated, BlocksReturned, BlocksStored, TokensAppended
from kvcache.errors import InvalidTokens, OutOfBlocks, PromptTooLong, UnknownRequest, UsageError
from kvcache.inputs import Request
from kvcache.manager import KVCacheManager
from tests.support.engines import strategies
from tests.support.engines.inside import sequence_of


def cache(**settings: Any) -> tuple[KVCacheManager, list[Any]]:
    """Twelve blocks of four tokens, and what happens to them."""
    manager = KVCacheManager(strategies.config(**({"tokens_per_block": 4, "primary_blocks": 12} | settings)))
    events: list[Any] = []
    manager.bus.subscribe(events.append)
    return manager, events


def table(manager: KVCacheManager, request_id: str) -> list[int]:
    return manager.block_table(request_id).tolist()


class TestReserve:
    def test_tokens_take_what_is_reserved(self) -> None:
        """The next step's K/V has its slot before the token is known; nothing is allocated when it comes."""
        manager, events = cache()
        manager.add_sequence("a", [1, 2, 3, 4])
        manager.store_context_blocks("a", 4)
        manager.reserve(["a"], [1])
        reserved = table(manager, "a")
        assert len(reserved) == 2
        events.clear()
        manager.add_tokens(["a"], [5])
        assert [type(event) for event in events] == [TokensAppended]
        assert table(manager, "a") == reserved
        manager.check()

    def test_the_rest_is_given_back(self) -> None:
        """Of seven tokens ahead one was accepted, and one sampled: they fit into the block that was there."""
        manager, events = cache()
        manager.add_sequence("a", [1, 2])
        manager.store_context_blocks("a", 2)
        manager.reserve(["a"], [7])
        assert (len(table(manager, "a")), manager.num_free_blocks) == (3, 9)
        given = table(manager, "a")[1:]
        manager.add_tokens(["a"], [3, 4], [2])
        assert (len(table(manager, "a")), manager.num_free_blocks) == (1, 11)
        returned = next(event for event in events if isinstance(event, BlocksReturned))
        assert list(memoryview(returned.slots).cast("i")) == given[::-1]
        # What was given back is what is taken next, the shallowest first.
        manager.reserve(["a"], [7])
        assert table(manager, "a")[1:] == given
        manager.check()

    @pytest.mark.parametrize("counts", [None, [1]])
    def test_the_rest_is_kept(self, counts: list[int] | None) -> None:
        """With `keep_reservations` step after step, until the tokens have used it up; then they take one slot each."""
        manager, events = cache(keep_reservations=True)
        manager.add_sequences([Request("a", [1, 2]), Request("b", [9])])
        manager.store_context_blocks("a", 2)
        manager.reserve(["a"], [7])
        reserved = table(manager, "a")
        events.clear()
        for token in range(3, 10):  # "b" fills a block meanwhile
            manager.add_tokens(["a", "b"], [token, token], counts and counts * 2)
            assert table(manager, "a") == reserved
            manager.check()
        allocated = [event for event in events if isinstance(event, BlocksAllocated)]
        assert [event.why for event in allocated] == [AllocateReason.DECODE]
        assert not any(isinstance(event, BlocksReturned) for event in events)
        assert sequence_of(manager, "a").stored_blocks == 2
        for token in range(10, 14):
            manager.add_tokens(["a", "b"], [token, token], counts and counts * 2)
        assert table(manager, "a")[:3] == reserved
        assert len(table(manager, "a")) == 4
        manager.check()

    def test_what_is_kept_goes_back_when_asked(self) -> None:
        """Another count replaces the reservation, 0 returns it; and so do a rewind and the end."""
        manager, _ = cache(keep_reservations=True)
        manager.add_sequence("a", [1, 2])
        for count, blocks in ((10, 3), (2, 2)):
            manager.reserve(["a"], [count])
            manager.add_tokens(["a"], [3])
            assert len(table(manager, "a")) == blocks
        manager.reserve(["a"], [0])
        assert (len(table(manager, "a")), manager.num_free_blocks) == (1, 11)
        manager.reserve(["a"], [10])
        assert len(table(manager, "a")) == 4
        manager.rewind("a", 2)
        assert (len(table(manager, "a")), manager.num_free_blocks) == (1, 11)
        manager.reserve(["a"], [10])
        manager.remove_sequence("a", store=False)
        assert manager.num_free_blocks == 12
        manager.check()

    def test_what_is_kept_is_in_a_snapshot(self) -> None:
        """A manager that goes on from it appends as this one does."""
        manager, _ = cache(keep_reservations=True)
        manager.add_sequence("a", [1, 2])
        manager.reserve(["a"], [7])
        manager.add_tokens(["a"], [3])
        other = KVCacheManager.resume(manager.state)
        for each in (manager, other):
            each.add_tokens(["a"], [4])
            assert len(table(each, "a")) == 3
            each.check()
        assert manager.fingerprint() == other.fingerprint()

    def test_another_count_takes_its_place(self) -> None:
        """It is not added to the one before, and none gives back all."""
        manager, events = cache()
        manager.add_sequence("a", [1, 2])
        lengths = []
        for count in (10, 10, 3, 0, 0):
            manager.reserve(["a"], [count])
            lengths.append(len(table(manager, "a")))
        assert lengths == [3, 3, 2, 1, 1]
        assert sum(isinstance(event, BlocksAllocated) for event in events) == 2
        assert [event.why for event in events if isinstance(event, BlocksAllocated)][
            -1
        ] == AllocateReason.RESERVE

    def test_steps_store_what_they_fill(self) -> None:
        """Overlapped: each step is launched before the last one's token is read, and blocks are cached all the same."""
        manager, _ = cache()
        manager.add_sequence("a", [0])
        manager.store_context_blocks("a", 1)
        for token in range(1, 17):
            manager.reserve(["a"], [1])
            manager.add_tokens(["a"], [token])
            assert manager.match(range(20)).reused_tokens // 4 == token // 4
            manager.check()

    def test_others_keep_theirs(self) -> None:
        """A call is about the sequences that it names."""
        manager, _ = cache()
        for name in ("a", "b"):
            manager.add_sequence(name, [ord(name)])
        manager.reserve(["a", "b"], [8, 8])
        manager.add_tokens(["a"], [2])
        assert (len(table(manager, "a")), len(table(manager, "b"))) == (1, 3)
        manager.remove_sequence("b")
        assert manager.num_free_blocks == 11

    def test_a_branch_does_not_hold_it(self) -> None:
        """What is reserved is for tokens of the one sequence."""
        manager, _ = cache()
        manager.add_sequence("a", [1, 2, 3])
        manager.reserve(["a"], [9])
        manager.fork("a", "b")
        assert (len(table(manager, "a")), len(table(manager, "b"))) == (3, 1)
        manager.rewind("a", 2)
        assert len(table(manager, "a")) == 1
        manager.check()

    @pytest.mark.parametrize(
        ("ids", "counts", "error"),
        [
            (["b"], [1], UnknownRequest),
            (["a", "a"], [1, 1], UsageError),
            (["a"], [], InvalidTokens),
            (["a"], [-1], InvalidTokens),
            (["a"], [True], InvalidTokens),
            (["a"], b"\x01", InvalidTokens),
            (["a"], [1.0], InvalidTokens),
            (["a"], ["x"], InvalidTokens),
            (["a"], [21], PromptTooLong),
            ("a", [1], UsageError),
        ],
    )
    def test_refusals_leave_no_trace(self, ids: Any, counts: Any, error: type[Exception]) -> None:
        """Nothing is reserved for anybody."""
        manager, events = cache()
        manager.add_sequence("a", [7, 7, 7, 7])
        events.clear()
        before = manager.fingerprint()
        with pytest.raises(error) as raised:
            manager.reserve(ids, counts)
        assert (manager.fingerprint(), events) == (before, [])
        assert "7, 7" not in str(raised.value)

    @pytest.mark.parametrize("window", [None, 4])
    def test_what_one_returns_another_takes(self, window: Any) -> None:
        """In one call, where nothing else is free: of a reservation that moves, and of tokens that did not need all."""
        manager, _ = cache(primary_blocks=4, max_attention_window=window)
        manager.add_sequence("a", [1, 2, 3])
        manager.add_sequence("b", [5, 6, 7])
        manager.reserve(["a"], [6])
        manager.reserve(["a", "b"], [0, 6])
        assert (len(table(manager, "a")), len(table(manager, "b"))) == (1, 3)
        manager.add_tokens(["a", "b"], [4, 5, 8], [2, 1])
        assert (len(table(manager, "a")), len(table(manager, "b"))) == (2, 1)
        before = manager.fingerprint()
        with pytest.raises(OutOfBlocks) as raised:
            manager.reserve(["b", "a"], [0, 9])
        assert (raised.value.index, raised.value.needed[0], raised.value.available[0]) == (1, 2, 1)
        assert manager.fingerprint() == before
        manager.check()

    def test_no_room(self) -> None:
        """The first that does not fit is named, and nobody gets anything."""
        manager, _ = cache(primary_blocks=4)
        for name in ("a", "b"):
            manager.add_sequence(name, [1, 2, 3, 4])
        before = manager.fingerprint()
        with pytest.raises(OutOfBlocks) as raised:
            manager.reserve(["a", "b"], [4, 8])
        assert (raised.value.index, raised.value.needed, raised.value.available) == (1, (3,), (2,))
        assert manager.fingerprint() == before


class TestRewind:
    @pytest.mark.parametrize("window", [8, 5])
    def test_it_takes_the_block_that_it_leaves(self, window: int) -> None:
        """Where no other is free, the cached block becomes the copy of its own beginning."""
        manager, _ = cache(primary_blocks=2, max_sequence_length=8, max_attention_window=window)
        manager.add_sequence("a", range(1, 9))
        manager.store_context_blocks("a", 8)
        left = table(manager, "a")[1]
        assert manager.num_free_blocks == 0
        manager.rewind("a", 7)
        assert table(manager, "a")[1] == left
        manager.check()

    def test_it_is_refused_where_another_holds_that_block(self) -> None:
        """Nothing changes then."""
        manager, _ = cache(primary_blocks=2, max_sequence_length=8)
        manager.add_sequence("a", range(1, 9))
        manager.store_context_blocks("a", 8)
        manager.fork("a", "b")
        before = manager.fingerprint()
        with pytest.raises(OutOfBlocks):
            manager.rewind("a", 7)
        assert manager.fingerprint() == before
        manager.remove_sequence("b")
        manager.rewind("a", 7)
        manager.check()


class TestDrafts:
    def test_nothing_is_stored_before_it_is_confirmed(self) -> None:
        """Six drafts fill a block; one is taken back, and the next sampled token confirms the others."""
        manager, events = cache()
        manager.add_sequence("a", [1, 2, 3])
        manager.store_context_blocks("a", 3)
        manager.add_tokens(["a"], [4])
        manager.add_tokens(["a"], [5, 6, 7, 8, 9, 10], [6], draft=True)
        assert manager.match([*range(1, 11), 0]).reused_tokens == 0
        assert not any(isinstance(event, BlocksStored) for event in events)
        manager.rewind("a", 9)
        manager.add_tokens(["a"], [100])
        assert manager.match([*range(1, 11), 0]).reused_tokens == 8
        manager.check()

    def test_a_rewind_needs_no_copy(self) -> None:
        """Rejected drafts are in blocks of the sequence's own: slots come back, nothing moves."""
        manager, events = cache()
        manager.add_sequence("a", [1, 2, 3])
        manager.add_tokens(["a"], [4])
        kept = table(manager, "a")
        manager.add_tokens(["a"], range(10, 18), [8], draft=True)
        events.clear()
        manager.rewind("a", 4)
        assert [type(event).__name__ for event in events] == ["SequenceRewound"]
        assert table(manager, "a") == kept

    def test_what_ends_unconfirmed_is_not_kept(self) -> None:
        """Nobody has said that the drafts were right."""
        manager, _ = cache(enable_partial_reuse=False)
        manager.add_sequence("a", [1, 2, 3])
        manager.add_tokens(["a"], [4])
        manager.add_tokens(["a"], range(5, 13), [8], draft=True)
        manager.remove_sequence("a")
        assert manager.match(range(1, 20)).reused_tokens == 0

    def test_windows_keep_what_a_rewind_needs(self) -> None:
        """A sliding window lets go of nothing that unconfirmed tokens have left."""
        manager, _ = cache(max_attention_window=4)
        manager.add_sequence("a", [1, 2, 3])
        manager.add_tokens(["a"], [4])
        manager.add_tokens(["a"], range(5, 16), [11], draft=True)
        assert -2 not in table(manager, "a")
        manager.rewind("a", 5)
        manager.add_tokens(["a"], range(100, 112), [12])
        assert table(manager, "a")[:2] == [-2, -2]
        manager.check()


class TestChunks:
    def test_slots_come_with_the_chunks(self) -> None:
        """A prompt of eleven blocks beside another one, in twelve blocks: three at a time."""
        manager, _ = cache(max_sequence_length=64)
        prompt = list(range(44))
        manager.add_sequence("a", prompt, reserve_tokens=12)
        assert len(table(manager, "a")) == 3
        manager.add_sequence("b", [50] * 4)
        for computed in (12, 24, 36, 44):
            manager.store_context_blocks("a", computed)
            if computed < 44:
                manager.reserve(["a"], [12])
            manager.check()
        assert len(table(manager, "a")) == 11
        assert manager.match([*prompt, 0]).reused_tokens == 44

    def test_reused_tokens_come_before_the_first_chunk(self) -> None:
        """Eight tokens are cached; the first chunk is of those behind them."""
        manager, _ = cache()
        manager.add_sequence("a", range(8))
        manager.store_context_blocks("a", 8)
        admission = manager.add_sequence("b", range(20), reserve_tokens=5)
        assert (admission.reused_tokens, len(table(manager, "b"))) == (8, 4)

    def test_a_long_prompt_goes_through_a_small_window(self) -> None:
        """A sliding window has six blocks, the prompt sixteen: it lets go of what it has left, chunk by chunk."""
        manager, _ = cache(max_attention_window=8, primary_blocks=6, max_sequence_length=64)
        prompt = list(range(64))
        assert manager.max_prompt_tokens == 24
        with pytest.raises(PromptTooLong):
            manager.add_sequence("a", prompt)
        manager.add_sequence("a", prompt, reserve_tokens=8)
        for computed in range(8, 65, 8):
            manager.store_context_blocks("a", computed)
            if computed < 64:
                manager.reserve(["a"], [8])
            manager.check()
        assert len(table(manager, "a")) == 16

    def test_computed_tokens_need_slots(self) -> None:
        """Nothing can have been written where there is no slot, so it is no K/V to be reused."""
        manager, events = cache()
        manager.add_sequence("a", range(20), reserve_tokens=1)
        events.clear()
        with pytest.raises(UsageError, match="slots for only 4 of its 20 tokens"):
            manager.store_context_blocks("a", 5)
        for counts, draft in ((None, False), ([1], False), ([1], True)):
            with pytest.raises(UsageError, match="slots for only 4 of its 20 tokens"):
                manager.add_tokens(["a"], [1], counts, draft=draft)
        assert events == []

    @pytest.mark.parametrize("reserve", [0, -1, True, 1.5, "4"])
    def test_bad_numbers(self, reserve: Any) -> None:
        """At least one token, since the last one of a prompt is always computed."""
        manager, events = cache()
        with pytest.raises(UsageError, match="reserve_tokens"):
            manager.add_sequence("a", [1, 2], reserve_tokens=reserve)
        assert events == []

    def test_chunks_replay_and_go_on(self) -> None:
        """A manager that goes on from the state in the middle of a prompt decides as this one."""
        manager, events = cache()
        manager.add_sequence("a", range(20), reserve_tokens=4)
        manager.store_context_blocks("a", 4)
        created = manager.state.created
        twin = strategies.continue_from(manager.config, created, *events)
        for each in (manager, twin):
            each.reserve(["a"], [9])
            each.store_context_blocks("a", 12)
        assert twin.fingerprint() == manager.fingerprint()


@pytest.mark.parametrize("draft", ["yes", 1, None])
def test_draft_is_a_flag(draft: Any) -> None:
    """True or False, nothing like it."""
    manager, events = cache()
    manager.add_sequence("a", [1])
    events.clear()
    with pytest.raises(UsageError, match="draft"):
        manager.add_tokens(["a"], [2], draft=draft)
    assert events == []
