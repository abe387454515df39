"""A seeded generator of chat traffic: the workload that a prefix cache exists for.

Users talk in turns; each prompt repeats the system prompt and all earlier turns. So prompts share a
start with many other users, grow along one conversation, and come back after a pause in which other
users have pressed their blocks out of the primary pool. With a cache smaller than all conversations
together that produces every kind of movement: partial and full reuse, offload, onboard and eviction.

The result has the Mooncake form, so it can be written to a file and played like any other trace. As in that
form, a shared start ends at a multiple of 512 tokens, and answers quoted in a later prompt are tokens
of their own: what a request generated is not found again.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from kvcache.errors import UsageError
from kvcache.workload.mooncake import TraceRequest
from kvcache.workload.tokens import TRACE_BLOCK_TOKENS


@dataclass(frozen=True)
class ChatOptions:
    """Sizes of a generated workload. Equal options give equal requests, on every platform."""

    seed: int = 0
    users: int = 64
    """Conversations."""
    system_prompts: int = 4
    """Of different popularity: the k-th is used in proportion to 1/k."""
    system_tokens: int = 1024
    """Length of each; a multiple of 512."""
    turns: tuple[int, int] = (2, 6)
    """Fewest and most turns of a conversation."""
    question_tokens: tuple[int, int] = (40, 400)
    """Shortest and longest question."""
    answer_tokens: tuple[int, int] = (20, 120)
    """Shortest and longest answer."""
    arrival_ms: int = 400
    """Mean time between the starts of two conversations."""
    think_ms: int = 8000
    """Mean time from the start of one turn to the next of the same user."""

    def __post_init__(self) -> None:
        for name in ("users", "system_prompts", "arrival_ms", "think_ms"):
            _require(getattr(self, name) >= 1, name, "must be at least 1")
        _require(self.system_tokens >= 0, "system_tokens", "must not be negative")
        aligned = self.system_tokens % TRACE_BLOCK_TOKENS == 0
        _require(aligned, "system_tokens", f"must be a multiple of {TRACE_BLOCK_TOKENS}")
        for name in ("turns", "question_tokens", "answer_tokens"):
            low, high = getattr(self, name)
            _require(1 <= low <= high, name, "must be (fewest, most) with 1 <= fewest <= most")


def generate_chats(options: ChatOptions | None = None) -> list[TraceRequest]:
    """Return the requests of all conversations by time of arrival."""
    options = options or ChatOptions()
    random = Random(options.seed)
    conversations = _Conversations(options, random)
    start = 0.0
    requests: list[TraceRequest] = []
    for _ in range(options.users):
        requests += conversations.generate(start)
        start += random.expovariate(1 / options.arrival_ms)
    # The sort is stable, so requests of the same millisecond stay in the order of their users.
    return sorted(requests, key=lambda request: request.timestamp)


class _Conversations:
    """Hands out block numbers: the first ones to system prompts, then fresh ones to each conversation."""

    def __init__(self, options: ChatOptions, random: Random) -> None:
        self._options = options
        self._random = random
        self._system_blocks = options.system_tokens // TRACE_BLOCK_TOKENS
        self._weights = [1 / rank for rank in range(1, options.system_prompts + 1)]
        self._next_id = options.system_prompts * self._system_blocks

    def generate(self, start_ms: float) -> list[TraceRequest]:
        """Return the turns of one conversation that begins at `start_ms`."""
        options, random = self._options, self._random
        ids = self._choose_system_prompt()
        length, time, requests = options.system_tokens, start_ms, []
        for _ in range(random.randint(*options.turns)):
            length += random.randint(*options.question_tokens)
            answer = random.randint(*options.answer_tokens)
            self._extend(ids, length)
            requests.append(TraceRequest(int(time), length, answer, tuple(ids)))
            length += answer
            time += random.expovariate(1 / options.think_ms)
        return requests

    def _choose_system_prompt(self) -> list[int]:
        [chosen] = self._random.choices(range(self._options.system_prompts), self._weights)
        return list(range(chosen * self._system_blocks, (chosen + 1) * self._system_blocks))

    def _extend(self, ids: list[int], length: int) -> None:
        missing = -(-length // TRACE_BLOCK_TOKENS) - len(ids)
        ids += range(self._next_id, self._next_id + missing)
        self._next_id += missing


def _require(holds: bool, name: str, rule: str) -> None:
    if not holds:
        raise UsageError(f"chat option {name} {rule}")
