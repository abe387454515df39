"""What `tests.support.forked` does at a process's end."""

from __future__ import annotations

import pytest

from tests.support.forked import Forked


def test_a_process_that_has_ended_needs_no_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is gone before its exit code has come here: nothing is left to be killed, and no error is raised."""
    process = Forked("print('it is done')")
    assert process.communicate() == ("it is done\n", "")
    with monkeypatch.context() as patch:
        patch.setattr(Forked, "returncode", None)
        process.kill()
    assert process.returncode == 0
