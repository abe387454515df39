"""Where the library's diagnostics go, in processes that configure structlog in different ways."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from tests.support.commands import RunPython

REPORT = """
import time
from events.types import EventBatch
from sinks import Sink, SinkRunner

class Failing(Sink):
    def open(self): pass
    def write(self, batch): raise OSError(28, "full")
    def close(self): pass

runner = SinkRunner(Failing(), "failing", max_errors=1)
runner.start()
runner.put(EventBatch(0, 0, ()))
while runner.stats().state != "quarantined":
    time.sleep(0.001)
runner.close()
"""
"""Makes the library report that a sink was given up."""
WAYS = [
    "",
    "structlog.configure(processors=[structlog.processors.JSONRenderer()])",
    "structlog.configure(cache_logger_on_first_use=True)",
    "structlog.configure(logger_factory=structlog.PrintLoggerFactory())",
    "structlog.configure(logger_factory=structlog.WriteLoggerFactory(sys.stdout))",
    "structlog.configure(logger_factory=structlog.PrintLoggerFactory(open(1, 'w', closefd=False)))",
    "structlog.configure([lambda _, __, told: told['event'].encode()], logger_factory=structlog.BytesLoggerFactory())",
]
"""Of configuring structlog."""
BY_THE_APPLICATION = f"""
import io, logging
lines = io.StringIO()
structlog.configure(
    processors=[structlog.processors.JSONRenderer()], logger_factory=structlog.WriteLoggerFactory(lines)
)
{REPORT}
structlog.configure(
    processors=[structlog.stdlib.add_logger_name, structlog.processors.KeyValueRenderer()],
    logger_factory=structlog.stdlib.LoggerFactory(),
)
handler = logging.StreamHandler(lines)
logging.getLogger("sinks").addHandler(handler)
{REPORT}
told = [line for line in lines.getvalue().splitlines() if "sink_quarantined" in line]
as_json, plain = told
assert '"event": "sink_quarantined"' in as_json and '"sink": "failing"' in as_json, as_json
assert "logger='sinks'" in plain and "event='sink_quarantined'" in plain, plain
"""
FORKS = """
import json, os, sys, tempfile, traceback
import structlog

def said(code):
    out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    if (child := os.fork()) == 0:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        status = 1
        try:
            exec(code, {"sys": sys, "structlog": structlog})
            status = 0
        except BaseException:
            traceback.print_exc()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for file in (out, err):
        file.seek(0)
    return status, out.read().decode(), err.read().decode()

found = []
for first, codes in STAGES:
    exec(first)
    found += map(said, codes)
print(json.dumps(found))
"""
"""A child for each piece of code, which begins with what was imported by then."""


class Said(NamedTuple):
    """What a process has left."""

    code: int
    out: str
    err: str


def forked(run_python: RunPython, *stages: tuple[str, list[str]]) -> list[Said]:
    """What becomes of each code, run behind the code of its stage and of those before."""
    done = run_python(f"STAGES = {stages!r}\n{FORKS}")
    assert (done.returncode, done.stderr) == (0, "")
    return [Said(*each) for each in msgspec.json.decode(done.stdout)]


def test_stdout_stays_clean(run_python: RunPython) -> None:
    """Reports go to stderr however structlog is set up, before or after the import of the library."""
    codes = [way + REPORT for way in WAYS]
    for way, done in zip(2 * WAYS, forked(run_python, ("", codes), ("import sinks", codes)), strict=True):
        assert (done.code, done.out) == (0, ""), (way, done.err)
        assert done.err.count("sink_quarantined") == 1, way


def test_other_settings_and_none(run_python: RunPython) -> None:
    """Another stream, processors and the standard library's logging are left as the application set them.

    A process without stderr, as a service may be, reports nowhere rather than to stdout.
    """
    codes = [BY_THE_APPLICATION, f"sys.stderr = None\n{REPORT}"]
    assert forked(run_python, ("import sinks", codes)) == [Said(0, "", "")] * 2
