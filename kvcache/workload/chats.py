"""A seeded generator of chat traffic: the workload that a prefix cache exists for.

Users talk in turns; each prompt repeats the system prompt and all earlier turns. So prompts share a start with those of
many other users, grow along one conversation, and return after a pause in which other users have evicted their blocks
from the primary pool. With a cache smaller than all conversations together, this produces every kind of movement:
partial and full reuse, offload, onboard and eviction.

The result has the Mooncake form and is played like any other trace. As in that form, a shared start ends at a
multiple of 512 tokens, and answers quoted in a later prompt are tokens of their own: what a request generated is
not found again.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from random import Random

from kvcache.workload.tokens import TRACE_BLOCK_TOKENS
from kvcache.workload.traces import TraceRequest

SYSTEM_PROMPTS = 4
"""Number of system prompts; the k-th is used in proportion to 1/k."""
SYSTEM_BLOCKS = 2
"""Length of each system prompt, in blocks of a trace."""
TURNS = (2, 6)
"""Minimum and maximum number of turns of a conversation."""
QUESTION_TOKENS = (40, 400)
"""Shortest and longest question."""
ANSWER_TOKENS = (20, 120)
"""Shortest and longest answer."""
_ARRIVAL_MS = 400
"""Mean time between the starts of two conversations, in ms."""
_THINK_MS = 8000
"""Mean time from the start of one turn to the next of the same user, in ms."""


def generate_chats(users: int, seed: int = 0) -> list[TraceRequest]:
    """Return the requests of `users` conversations by time of arrival, identical on every platform."""
    random = Random(seed)
    # The first numbers of blocks are those of system prompts, then come new ones for each conversation.
    new_ids = count(SYSTEM_PROMPTS * SYSTEM_BLOCKS)
    start = 0.0
    requests: list[TraceRequest] = []
    for _ in range(users):
        requests += _conversation(random, new_ids, start)
        start += random.expovariate(1 / _ARRIVAL_MS)
    # The sort is stable, so requests of the same millisecond stay in the order of their users.
    return sorted(requests, key=lambda request: request.timestamp)


def _conversation(random: Random, new_ids: Iterator[int], start_ms: float) -> Iterator[TraceRequest]:
    """Yield the turns of one conversation, which begins at `start_ms`."""
    weights = [1 / rank for rank in range(1, SYSTEM_PROMPTS + 1)]
    [chosen] = random.choices(range(SYSTEM_PROMPTS), weights)
    ids = list(range(chosen * SYSTEM_BLOCKS, (chosen + 1) * SYSTEM_BLOCKS))
    length, time = SYSTEM_BLOCKS * TRACE_BLOCK_TOKENS, start_ms
    for _ in range(random.randint(*TURNS)):
        length += random.randint(*QUESTION_TOKENS)
        answer = random.randint(*ANSWER_TOKENS)
        ids += islice(new_ids, -(-length // TRACE_BLOCK_TOKENS) - len(ids))
        yield TraceRequest(int(time), length, answer, tuple(ids))
        length += answer
        time += random.expovariate(1 / _THINK_MS)
