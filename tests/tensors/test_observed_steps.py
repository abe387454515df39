"""What an engine tells of its steps, and requests that come while it runs."""

from __future__ import annotations

import threading
from collections import Counter

from kvcache.config import KVCacheConfig
from kvcache.inputs import Request
from kvcache.manager import KVCacheManager
from kvcache.workload.driver import DriveOptions, Engine, ObservedStep
from kvcache.workload.tokens import output_tokens
from kvcache.workload.traces import read_trace
from kvcache.workload.waiting_queue import RequestQueue, Waiting
from tests.support.places import ROOT

CHATS = list(read_trace(ROOT / "tests" / "data" / "chats_small.jsonl"))
CONFIG = KVCacheConfig(max_sequence_length=4096, tokens_per_block=32, primary_blocks=200, secondary_blocks=60)


def test_steps_add_up_to_the_requests() -> None:
    """Of each prompt what was not reused is computed once, each output is sampled once, and each request ends once."""
    steps: list[ObservedStep] = []
    with KVCacheManager(CONFIG) as manager:
        Engine(manager, CHATS, DriveOptions(concurrency=8, prefill_tokens=500), watch=steps.append).run()
        reused = manager.stats().reused_tokens
    sampled = Counter(number for step in steps for number in step.sampled)
    assert sampled == {number: chat.output_length for number, chat in enumerate(CHATS) if chat.output_length}
    assert sorted(number for step in steps for number in step.ended) == list(range(len(CHATS)))
    admitted = {number: each for step in steps for number, each in step.admitted.items()}
    assert sum(each.reused_tokens for each in admitted.values()) == reused > 0
    prompts = sum(chat.input_length for chat in CHATS)
    assert sum(step.prefill_tokens for step in steps) == prompts - reused
    assert max(step.prefill_tokens for step in steps) == 500
    # The last output of a request is never computed, and the first one comes from the prompt.
    assert sum(step.decoding for step in steps) == sum(max(0, chat.output_length - 1) for chat in CHATS)


class OneByOne(RequestQueue):
    """Requests that come only when nothing is left to do."""

    def __init__(self) -> None:
        self._left = list(enumerate(CHATS[:5]))
        self._there: list[Waiting] = []

    def __bool__(self) -> bool:
        return bool(self._left or self._there)

    @property
    def next_arrival_ms(self) -> int:
        if self._left and not self._there:
            number, chat = self._left.pop(0)
            prompt = chat.prompt()
            outputs = output_tokens(number, chat.output_length)
            blocks = -(-(len(prompt) + len(outputs)) // CONFIG.tokens_per_block)
            self._there.append(Waiting(Request(number, prompt), outputs, blocks, 0))
        return 0

    def first(self, count: int) -> list[Waiting]:
        return self._there[:count]

    def take(self, count: int) -> None:
        del self._there[:count]

    def put_back(self, waiting: list[Waiting]) -> None:
        assert not waiting, "no copy can fail without pools"


def test_requests_may_come_while_the_engine_runs() -> None:
    """A line that grows is served like a trace: here each request ends before the next one is there."""
    steps: list[ObservedStep] = []
    with KVCacheManager(CONFIG) as manager:
        result = Engine(manager, OneByOne(), watch=steps.append).run(threading.Event())
    assert result.requests == 5
    order = [
        (kind, number) for step in steps for kind in ("admitted", "ended") for number in getattr(step, kind)
    ]
    assert order == [(kind, number) for number in range(5) for kind in ("admitted", "ended")]
