"""The example of an engine runs and shows what it promises."""

from __future__ import annotations

from tests.conftest import ROOT, RunPython


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
