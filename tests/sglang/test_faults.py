"""Whatever breaks in the recorder, SGLang's scheduler decides as it would without, and the log is closed and whole."""

from __future__ import annotations

import pytest

from tests.support.engines.in_vllm import SECONDS, reported, run_where
from tests.support.seeds import day

pytestmark = [pytest.mark.needs("sglang"), pytest.mark.timeout(SECONDS)]


def test_a_broken_recorder_lets_go() -> None:
    """Each call of ours raises once, before or behind what it does: the same decisions, one warning without tokens."""
    broke = reported(run_where("sglang", "tests.support.engines.sglang_faults", day()))
    assert len(broke) > 15, broke
