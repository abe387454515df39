"""How long prompts and sequences can be where there are several windows, and what refusals say about it."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache.config import KVCacheConfig
from kvcache.errors import KVCacheError, OutOfBlocks, PromptTooLong, UsageError
from kvcache.inputs import Request
from kvcache.manager import KVCacheManager
from kvcache.workload.waiting_queue import WaitingLimits


def manager(**settings: Any) -> KVCacheManager:
    """Windows of 64 tokens, with 6 blocks of 16, and of 256, with 16, but for the settings given."""
    defaults: dict[str, Any] = {
        "max_sequence_length": 256,
        "tokens_per_block": 16,
        "max_attention_window": (64, 256),
        "primary_blocks": (6, 16),
    }
    return KVCacheManager(KVCacheConfig(**(defaults | settings)))


def text(error: KVCacheError) -> str:
    """The last half of its sentence: where there is no room, and what to raise."""
    return str(error).partition(" exceed the limit of ")[2].lstrip("0123456789")


@pytest.mark.parametrize(
    ("settings", "longest", "prompt"),
    [
        ({}, 256, 96),
        ({"primary_blocks": (16, 16)}, 256, 256),
        ({"primary_blocks": (20, 20)}, 256, 256),
        # A window that cannot slide limits sequences, too.
        ({"primary_blocks": (4, 16)}, 64, 64),
        ({"primary_blocks": (6, 9)}, 144, 96),
    ],
)
def test_a_prompt_has_all_its_blocks_in_each_window(
    settings: dict[str, Any], longest: int, prompt: int
) -> None:
    """A prompt of `max_prompt_tokens` is admitted, and grows to `max_tokens`; one token more is refused."""
    cache = manager(**settings)
    assert (cache.max_tokens, cache.max_prompt_tokens) == (longest, prompt)
    with pytest.raises(PromptTooLong):
        cache.add_sequence("a", [1] * (prompt + 1))
    cache.add_sequence("a", [1] * prompt)
    cache.store_context_blocks("a", prompt)
    for _ in range(longest - prompt):
        cache.add_tokens(["a"], [1])
    with pytest.raises(PromptTooLong):
        cache.add_tokens(["a"], [1])


def test_what_has_grown_beyond_a_prompt_is_reusable_by_its_beginning_only() -> None:
    """A preempted sequence that is longer than a prompt can be is not admitted again, though it would be found."""
    cache, tokens = manager(), list(range(150))
    cache.add_sequence("a", tokens[:90])
    cache.store_context_blocks("a", 90)
    for token in tokens[90:]:
        cache.add_tokens(["a"], [token])
    cache.remove_sequence("a")
    assert cache.match(tokens).reused_tokens == 149
    with pytest.raises(PromptTooLong):
        cache.add_sequence("a", tokens)


@pytest.mark.parametrize(
    ("settings", "window", "said"),
    [
        ({}, 64, " in window 64: pass fewer, end the sequence, or raise primary_blocks"),
        (
            {"primary_blocks": None, "primary_bytes": 12 * 16 * 64},
            64,
            " in window 64: pass fewer, end the sequence, or raise primary_bytes, or its part by window_shares",
        ),
        ({"primary_blocks": 20}, None, ": pass fewer, end the sequence, or raise max_sequence_length"),
        (
            {"primary_blocks": (20, 16)},
            256,
            " in window 256: pass fewer, end the sequence, or raise max_sequence_length and primary_blocks",
        ),
        (
            {"max_attention_window": None, "primary_blocks": 10},
            None,
            ": pass fewer, end the sequence, or raise primary_blocks",
        ),
    ],
)
def test_a_prompt_that_is_too_long_says_in_which_window(
    settings: dict[str, Any], window: int | None, said: str
) -> None:
    """Whether it is given as a list, or as what is not even read; and what is to be raised."""
    for tokens in ([1] * 300, range(10**12)):
        with pytest.raises(PromptTooLong) as refused:
            manager(**settings).add_sequence("a", tokens)
        assert (refused.value.length, refused.value.window) == (len(tokens), window)
        assert text(refused.value) == said


def test_a_prompt_that_is_too_long_at_once_says_how_it_can_be_served() -> None:
    """The window holds 192 of its tokens, and 256 when it lets go of what it has left."""
    cache = manager()
    with pytest.raises(PromptTooLong, match=r"at once.* in chunks \(reserve_tokens\)"):
        cache.add_sequence("a", [1] * 200)
    cache.add_sequence("a", [1] * 200, reserve_tokens=16)


def test_a_sequence_that_is_too_long_says_in_which_window() -> None:
    """It may be another one than a prompt's."""
    cache = manager(primary_blocks=(6, 9))
    cache.add_sequence("a", [1] * 90)
    with pytest.raises(PromptTooLong, match="145 tokens exceed the limit of 144 in window 144"):
        cache.add_tokens(["a"], [1] * 55, [55])
    for _ in range(54):
        cache.add_tokens(["a"], [1])
    with pytest.raises(PromptTooLong, match="145 tokens exceed the limit of 144 in window 144"):
        cache.add_tokens(["a"], [1])


def test_too_few_blocks_are_reported_by_window() -> None:
    """By the number of the group, as in events, and by its window in tokens."""
    cache = manager()
    with pytest.raises(OutOfBlocks) as refused:
        cache.add_sequences([Request(name, [1] * 90) for name in "ab"])
    assert refused.value.windows == (64, 256)
    assert "12 needed, 6 free or evictable in group 0 (window 64);" in str(refused.value)


def test_tables_are_asked_for_by_a_window_as_it_was_given() -> None:
    """Full attention has the table of the longest window, whatever number was given for it; no other one may be off."""
    cache = manager(max_attention_window=(64, 1 << 20), primary_blocks=(6, 9))
    cache.add_sequence("a", [1] * 20)
    tables = [cache.block_table("a", window).tolist() for window in (144, 256, 1 << 20)]
    assert tables == [[0, 1]] * 3
    for window in (65, 255):
        with pytest.raises(UsageError, match=rf"no window of {window} tokens; the windows are \[64, 144\]"):
            cache.block_table("a", window)


def test_a_trace_is_refused_by_window() -> None:
    """`kvcache run` refuses what could not begin again, and says in which window."""
    cache = manager()
    limits = WaitingLimits.of(cache.config, cache.layout)
    assert limits.obstacle(96) is None
    assert limits.obstacle(97) == "97 tokens need 7 blocks, primary has 6 for window 64"


def test_what_a_sequence_still_needs_is_reported_of_each_window() -> None:
    """The window that needs the most may be another one than that with the fewest free blocks."""
    cache = manager(primary_blocks=(6, 16))
    cache.add_sequence("a", [1] * 64)
    assert cache.scheduling.remaining_blocks_per_window("a", 192) == {64: 1, 256: 12}
    assert cache.scheduling.remaining_blocks_to_completion("a", 192) == 12
    assert cache.num_free_blocks == 2
    assert cache.num_free_blocks_per_window() == {64: 2, 256: 12}
    for _ in range(192):
        cache.add_tokens(["a"], [1])


def test_counts_of_blocks_say_of_which_window() -> None:
    """Of a call the window with the most or the fewest, as it says; in statistics the sum."""
    cache = manager()
    cache.add_sequence("a", [1] * 96)
    assert cache.store_context_blocks("a", 96).stored_blocks == 6
    # The narrow window holds what it sees: 2 of the 6 blocks were let go of.
    assert cache.set_priority("a", 80) == 6
    cache.remove_sequence("a")
    cache.flush()
    assert cache.stats().blocks_updated == 6 + 4
    assert cache.stats().blocks_stored == 6 + 6
