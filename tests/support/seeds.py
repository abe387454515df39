"""Which seeds of a random test are run: a few, others each day, in the quick run, and the rest in the long one."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Iterable
from typing import Any

import pytest

VARIABLE = "TEST_SEEDS"
"""Which day's seeds the quick run takes, as an integer; today's unless it is set. The header of a run says it."""


def day() -> int:
    """Return the number that chooses the seeds; it is the same in all workers of a run."""
    today = dt.datetime.now(dt.UTC).date().toordinal()
    return int(os.environ.setdefault(VARIABLE, str(today)))


def one_a_day(params: list[Any]) -> list[Any]:
    """Return parameters of which the quick run takes one, another each day, and the long run the rest."""
    chosen = day() % len(params)
    return [
        each
        if number == chosen
        else pytest.param(*each.values, marks=[*each.marks, pytest.mark.long], id=each.id)
        for number, each in enumerate(params)
    ]


def seeds(every: Iterable[int], *, quick: int, always: Iterable[int] = ()) -> list[Any]:
    """Return the values to parametrize a test with.

    Args:
        every: All seeds. The long run takes those that the quick one leaves.
        quick: How many of them the quick run takes, beginning at a place that moves on from day to day.
        always: Seeds that once found a defect: the quick run takes them each time.
    """
    fixed, all_seeds = list(always), [seed for seed in every if seed not in set(always)]
    begin = day() * quick % len(all_seeds)
    chosen = {all_seeds[(begin + step) % len(all_seeds)] for step in range(min(quick, len(all_seeds)))}
    rest = [seed if seed in chosen else pytest.param(seed, marks=pytest.mark.long) for seed in all_seeds]
    return [*fixed, *rest]
