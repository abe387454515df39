"""What `tests.support.delays` does to threads."""

from __future__ import annotations

import sys
import threading

import pytest

from tests.support import delays


def test_threads_are_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each line, if the rate is one; the main one a few times in a function."""
    delayed = list[str]()
    monkeypatch.setattr(delays, "RATE", 1.0)
    monkeypatch.setattr(delays, "MAIN_RATE", 1.0)
    monkeypatch.setattr(delays, "sleep", lambda _: delayed.append(threading.current_thread().name))

    def work() -> None:
        for _ in range(5):
            threading.get_ident()

    before, before_main = threading.gettrace(), sys.gettrace()
    thread = threading.Thread(target=work, name="other")
    delays.start()
    try:
        thread.start()
        thread.join()
        work()
    finally:
        sys.settrace(before_main)
        threading.settrace(before)
    main = threading.current_thread().name
    assert delayed.count("other") > 10
    assert delayed[-delays.MAIN_MOST :] == [main] * delays.MAIN_MOST
    assert delayed.count(main) == delays.MAIN_MOST
