"""The example of an engine runs and shows what it promises."""

from __future__ import annotations

from tests.conftest import ROOT, RunPython


def test_engine_loop(run_python: RunPython) -> None:
    """It reuses the common start, moves blocks to host memory and back, and prints its events."""
    code = (ROOT / "examples" / "engine_loop.py").read_text(encoding="utf-8")
    done = run_python(code)
    assert (done.returncode, done.stderr) == (0, "")
    assert "second: 4 of 7 prompt tokens are reused" in done.stdout
    assert "third: 8 of 9 prompt tokens are reused" in done.stdout
    assert "why=offload" in done.stdout
    assert "why=onboard" in done.stdout
    assert done.stdout.endswith("12 of 25 prompt tokens were reused\n")
