"""What a request states about cached blocks that it comes to hold."""

from __future__ import annotations

from collections.abc import Callable

from events.types import Event, Retention, UpdateReason
from kvcache.decide.priorities import change_blocks
from kvcache.decide.window_manager import WindowBlockManager
from kvcache.fold.sequence import Sequence


def lasts_a_time(retention: Retention) -> bool:
    """Whether anything of a request is to be kept for a time only."""
    return retention.duration > 0 or any(r.duration for r in retention.ranges)


def restate(
    window: WindowBlockManager, emit: Callable[[Event], None], sequence: Sequence, first: int, last: int
) -> None:
    """Keep cached blocks of its prompt that a sequence has come to hold as its request states, where it does."""
    retention, size = sequence.retention, window.tokens_per_block
    if retention is None:
        return
    last = min(last, window.blocks_for(sequence.num_prompt_tokens))
    for stated in retention.ranges:
        begin, stop = -(-stated.start // size), last if stated.stop is None else -(-stated.stop // size)
        if max(begin, first) < min(stop, last):
            change_blocks(
                window,
                emit,
                sequence,
                (max(begin, first), min(stop, last)),
                stated.priority,
                stated.duration,
                UpdateReason.RETENTION,
            )
