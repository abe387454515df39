"""The examples that need no torch run and show what they promise; `tests/tensors/test_examples.py` has the others."""

from __future__ import annotations

import ast
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


def test_record_your_engine(play: Play) -> None:
    """What the toy has counted is what the audit of its log says; misses are explained, and its manager is small."""
    code = source("record_your_engine")
    done = play(code)
    assert done.err == ""
    counted = re.match(r"the engine has found ([\d,]+) prompt tokens in its cache\n", done.out)
    assert counted is not None
    assert f"of which {counted[1]} were reused" in done.out
    assert "decided by     toy 1.0" in done.out
    assert re.search(r"evicted from primary +\d+\.\d ms before, .* to make room for request", done.out)
    (manager,) = (node for node in ast.parse(code).body if getattr(node, "name", "") == "BlockManager")
    assert (manager.end_lineno or 0) - manager.lineno < 75
