"""What a command itself says on stderr: lines for people, or JSON lines in the form of `logs`."""

from __future__ import annotations

import json
import sys
import traceback
from datetime import UTC, datetime

from kvcache.cli.process import forget
from kvcache.phrases import printable


class _Form:
    """The form of this process's messages."""

    as_json = False


def configure(*, as_json: bool) -> None:
    """Choose the form for this process."""
    _Form.as_json = as_json


def error(text: str, cause: BaseException | None = None) -> None:
    """Say what went wrong; with `cause`, also where it comes from."""
    where = "" if cause is None else "".join(traceback.format_exception(cause)).rstrip()
    if where and not _Form.as_json:
        _write("\n".join(map(printable, where.split("\n"))))
    _say("error", text, {"exception": where} if where else {})


def warning(text: str) -> None:
    """Say what may not be as it was meant."""
    _say("warning", text, {})


def note(text: str) -> None:
    """Say something that is worth knowing."""
    _say("info", text, {})


def _say(level: str, text: str, more: dict[str, str]) -> None:
    if _Form.as_json:
        timestamp = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        _write(json.dumps({"event": printable(text), **more, "level": level, "timestamp": timestamp}))
    else:
        _write(f"kvcache: {'' if level == 'info' else f'{level}: '}{printable(text)}")


def _write(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:  # the exit code has to do
        forget(sys.stderr)
