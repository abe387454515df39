"""Whatever breaks in the recorder, SGLang's scheduler decides as it would without, and the log is closed and whole."""

from __future__ import annotations

import pytest

from tests.support.engines.in_vllm import SECONDS, reported, run_where
from tests.support.seeds import day, one_a_day

pytestmark = [pytest.mark.needs("sglang"), pytest.mark.timeout(SECONDS)]


@pytest.mark.parametrize(
    ("model", "least"),
    one_a_day([pytest.param("full", 16, id="full"), pytest.param("sliding", 11, id="sliding")]),
)
def test_a_broken_recorder_lets_go(model: str, least: int) -> None:
    """Each call of ours raises once, before or behind what it does: the same decisions, one warning without tokens."""
    broke = reported(run_where("sglang", "tests.support.engines.sglang_faults", day(), model))
    assert len(broke) >= least, broke
