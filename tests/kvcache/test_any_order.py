"""Whoever computes what, and whenever it is told: what the manager calls reusable or computed was written."""

from __future__ import annotations

import pytest

from tests.support.engines.free_engine import FreeEngine


def run_programs(seeds: range, commands: int) -> None:
    """A random program for each seed."""
    for seed in seeds:
        try:
            FreeEngine(seed).run(commands)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def test_all_that_may_be_read_was_written() -> None:
    """Forks, rewinds, reservations and drafts in every order that the documentation allows, with tensors."""
    run_programs(range(60), 40)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(1000, 51_000, 1000))
def test_all_that_may_be_read_was_written_for_long(first: int) -> None:
    """The same for 50,000 programs."""
    run_programs(range(first, first + 1000), 40)
