"""Whoever computes what, and whenever it is told: what the manager calls reusable or computed was written."""

from __future__ import annotations

import pytest

from tests.support.engines.free_engine import FreeEngine
from tests.support.seeds import seeds


@pytest.mark.parametrize("seed", seeds(range(60), quick=30))
def test_all_that_may_be_read_was_written(seed: int) -> None:
    """Forks, rewinds, reservations and drafts in every order that the documentation allows, with tensors."""
    FreeEngine(seed).run(40)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(1000, 51_000, 1000))
def test_all_that_may_be_read_was_written_for_long(first: int) -> None:
    """The same for 50,000 programs."""
    for seed in range(first, first + 1000):
        try:
            FreeEngine(seed).run(40)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
