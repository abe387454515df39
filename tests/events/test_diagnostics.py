"""Where the library's diagnostics go, in fresh interpreters that configure structlog in different ways."""

from __future__ import annotations

import pytest

from tests.support.commands import RunPython

REPORT = """
from sinks import SinkRunner

class Failing:
    def open(self): pass
    def write(self, batch): raise OSError(28, "full")
    def close(self): pass

from events.types import EventBatch
import time
runner = SinkRunner(Failing(), "failing", max_errors=1)
runner.start()
runner.put(EventBatch(0, 0, ()))
deadline = time.monotonic() + 20
while runner.stats().state != "quarantined" and time.monotonic() < deadline:
    time.sleep(0.001)
time.sleep(0.05)
"""
"""Makes the library report that a sink was given up."""


@pytest.mark.parametrize(
    "configured",
    [
        "",
        "structlog.configure(processors=[structlog.processors.JSONRenderer()])",
        "structlog.configure(cache_logger_on_first_use=True)",
        "structlog.configure(logger_factory=structlog.PrintLoggerFactory())",
        "structlog.configure(logger_factory=structlog.WriteLoggerFactory(sys.stdout))",
        "structlog.configure(logger_factory=structlog.PrintLoggerFactory(open(1, 'w', closefd=False)))",
        "structlog.configure([lambda *_: b'sink_quarantined'], logger_factory=structlog.BytesLoggerFactory())",
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_stdout_stays_clean(run_python: RunPython, configured: str, late: bool) -> None:
    """Reports go to stderr however structlog is set up, before or after the import of the library."""
    first, then = ("import sinks", configured) if late else (configured, "")
    done = run_python(f"import sys, structlog\n{first}\n{then}\n{REPORT}")
    assert done.stdout == ""
    assert done.stderr.count("sink_quarantined") == 1


def test_the_application_configures_all_else(run_python: RunPython) -> None:
    """Another stream, processors and the standard library's logging are left as the application set them."""
    done = run_python(
        "import io, logging, structlog\nlines = io.StringIO()\n"
        "structlog.configure(processors=[structlog.processors.JSONRenderer()], "
        f"logger_factory=structlog.WriteLoggerFactory(lines))\n{REPORT}"
        "structlog.configure(processors=[structlog.stdlib.add_logger_name, structlog.processors.KeyValueRenderer()], "
        "logger_factory=structlog.stdlib.LoggerFactory())\n"
        f"handler = logging.StreamHandler(lines)\nlogging.getLogger('sinks').addHandler(handler)\n{REPORT}"
        "told = [line for line in lines.getvalue().splitlines() if 'sink_quarantined' in line]\n"
        "as_json, plain = told\n"
        'assert \'"event": "sink_quarantined"\' in as_json and \'"sink": "failing"\' in as_json, as_json\n'
        "assert \"logger='sinks'\" in plain and \"event='sink_quarantined'\" in plain, plain\n"
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_without_stderr_nothing_is_written(run_python: RunPython) -> None:
    """A process without stderr, as a service may be, reports nowhere rather than to stdout."""
    done = run_python(f"import sys\nsys.stderr = None\n{REPORT}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
