"""What `tests.support.delays` does to threads."""

from __future__ import annotations

import threading

import pytest

from tests.support import delays


def test_all_threads_but_the_main_one_are_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each line, if the rate is one."""
    delayed = list[str]()
    monkeypatch.setattr(delays, "RATE", 1.0)
    monkeypatch.setattr(delays, "sleep", lambda _: delayed.append(threading.current_thread().name))

    def work() -> None:
        threading.get_ident()
        threading.get_ident()

    before = threading.gettrace()
    delays.start()
    try:
        thread = threading.Thread(target=work, name="other")
        thread.start()
        thread.join()
        work()
    finally:
        threading.settrace(before)
    assert delayed == ["other"] * 3
