"""The examples that need no torch run and show what they promise; `tests/tensors/test_examples.py` has the others."""

from __future__ import annotations

import re

from tests.support.commands import Play
from tests.support.examples import source


def test_beam_search(play: Play) -> None:
    """Beams share blocks and copy what they have in part; all is free at the end."""
    done = play(source("beam_search"))
    assert done.err == ""
    assert done.out.endswith(" copied, 0 held at the end\n")
    copied = int(done.out.splitlines()[1].split(", ")[1].split()[0])
    assert 0 < copied <= 64 * 3, "a branch copies at most the block that it begins in"


def test_preemption(play: Play) -> None:
    """All are served though not all fit, and who returns finds some of what it had computed."""
    done = play(source("preemption"))
    assert done.err == ""
    served, returning = done.out.splitlines()
    found = re.fullmatch(
        r"12 requests served, one was preempted (\d+) times, 0 blocks held at the end", served
    )
    assert found is not None
    assert int(found[1]) > 0
    assert int(returning.split()[0]) > 0
