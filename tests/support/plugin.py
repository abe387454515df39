"""How tests run: profiles of hypothesis, the number of workers, seeds, and what is checked after each test."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Generator, Iterator

import pytest
import structlog
from hypothesis import is_hypothesis_test, settings

from events.subscribe.subscriber import Publication
from sinks import runner
from tests.support import delays
from tests.support.logs.accounting import accounted
from tests.support.needs import Needs
from tests.support.seeds import VARIABLE, day
from tests.support.waiting import WAIT

# Machines that run tests are slow at times, which is no fault of the code: pytest-timeout stops what hangs.
# A failure prints the line that repeats it.
settings.register_profile("fast", deadline=None, print_blob=True, max_examples=25)
settings.register_profile("thorough", settings.get_profile("fast"), max_examples=300)
settings.load_profile("fast")

WAITING = 2
"""Workers more than there are cores: tests of processes and servers wait for most of their time."""


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """What `-n auto` means."""
    return (yield) + WAITING


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--delays", action="store_true", help="delay threads at random lines")


def pytest_configure(config: pytest.Config) -> None:
    """Choose how thorough random tests are, before the modules that ask for it are imported."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As after `make test &` in a script: commands that tests interrupt would ignore it, too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if _is_long(config):
        settings.load_profile("thorough")
    day()
    config.pluginmanager.register(Needs(), "needs")


def pytest_report_header() -> str:
    return f"seeds: {VARIABLE}={day()} repeats them"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The long run has all that hypothesis drives, with many examples."""
    if _is_long(config):
        for item in items:
            if is_hypothesis_test(getattr(item, "obj", None)):
                item.add_marker(pytest.mark.long)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what modules have made out of garbage collections, which many tests ask for, and make those rarer that
    nothing asks for: they took a tenth of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    if session.config.option.delays:
        delays.start()


def _is_long(config: pytest.Config) -> bool:
    return str(config.option.markexpr).startswith("long")


@pytest.fixture(autouse=True)
def no_logging_left() -> Iterator[None]:
    """What a command has set up for its messages does not reach the next test, nor what a log of its run has."""
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def no_thread_left(no_logging_left: None) -> Iterator[None]:
    """What a test leaves running would write its warnings into what the next one prints."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("kvcache-"):
            thread.join(WAIT)
            assert not thread.is_alive(), f"{thread.name} goes on"


@pytest.fixture(autouse=True)
def patient_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give sinks the time that they need to open and to take what is queued, however busy the machine is."""
    monkeypatch.setattr(runner, "OPEN_SECONDS", WAIT)
    defaults = runner.SinkRunner.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "drain_seconds", WAIT)


@pytest.fixture(autouse=True)
def patient_subscribers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for an answer as long as a busy machine may need for it, where a test does not say how long."""
    defaults = Publication.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "replay_timeout", WAIT)


@pytest.fixture(autouse=True)
def every_batch_is_accounted_for(no_thread_left: None) -> Iterator[None]:
    """Of each log that is written in this process: appended = durable + in flight + dropped."""
    with accounted():
        yield


@pytest.fixture(autouse=True)
def torch_stays_out(request: pytest.FixtureRequest) -> Iterator[None]:
    """The core's tests do not load torch, which takes seconds in each worker."""
    was_loaded = _torch_is_loaded()
    yield
    loads_it = not was_loaded and _torch_is_loaded() and "tensors" not in request.path.parts
    assert not loads_it, "this test loads torch, so its place is tests/tensors"


def _torch_is_loaded() -> bool:
    """Return whether it is there, and not only something that stands for it."""
    return getattr(sys.modules.get("torch"), "__file__", None) is not None
