"""The example of an engine runs and shows what it promises."""

from __future__ import annotations

import ast
import re

from tests.support.commands import RunPython
from tests.support.places import ROOT


def test_engine_loop(run_python: RunPython) -> None:
    """It reuses the common start, moves blocks to host memory and back, prints its events, and its log replays."""
    code = (ROOT / "examples" / "engine_loop.py").read_text(encoding="utf-8")
    done = run_python(code)
    assert (done.returncode, done.stderr) == (0, "")
    assert "why=offload" in done.stdout
    assert "why=onboard" in done.stdout
    assert done.stdout.endswith(
        "prompt tokens that were reused: {'first': 0, 'second': 4, 'third': 8}\n"
        "the log replays to the same state: True\n"
    )
    assert len(code.splitlines()) <= 60


def test_beam_search(run_python: RunPython) -> None:
    """Beams share blocks and copy what they have in part; all is free at the end."""
    code = (ROOT / "examples" / "beam_search.py").read_text(encoding="utf-8")
    done = run_python(code)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(" copied, 0 held at the end\n")
    copied = int(done.stdout.splitlines()[1].split(", ")[1].split()[0])
    assert 0 < copied <= 64 * 3, "a branch copies at most the block that it begins in"


def test_preemption(run_python: RunPython) -> None:
    """All are served though not all fit, and who returns finds some of what it had computed."""
    done = run_python((ROOT / "examples" / "preemption.py").read_text(encoding="utf-8"))
    assert (done.returncode, done.stderr) == (0, "")
    served, returning = done.stdout.splitlines()
    found = re.fullmatch(
        r"12 requests served, one was preempted (\d+) times, 0 blocks held at the end", served
    )
    assert found is not None
    assert int(found[1]) > 0
    assert int(returning.split()[0]) > 0


def test_tiny_llm(run_python: RunPython) -> None:
    """A model generates through the cache: branches, guesses, preemption and offload, and an answer stays the same."""
    code = (ROOT / "examples" / "tiny_llm.py").read_text(encoding="utf-8")
    done = run_python(code, env={"OMP_NUM_THREADS": "1"})  # others run at the same time
    assert done.returncode == 0, done.stderr
    replayed, answers, reused, seconds = done.stdout.splitlines()
    found = re.fullmatch(r"19 answers, (\d+) preemptions, (\d+) right guesses", answers)
    assert found is not None
    assert min(map(int, found.groups())) > 0
    moved = [int(number) for number in re.findall(r"\d+", reused)]
    assert min(moved) > 0
    first, second = (float(number) for number in re.findall(r"[\d.]+", seconds))
    assert second < first
    assert replayed == "the log replays to the same state: True"
    assert len(code.splitlines()) <= 300
    (engine,) = (node for node in ast.parse(code).body if getattr(node, "name", "") == "Engine")
    assert (engine.end_lineno or 0) - engine.lineno < 80
