"""What a command itself says on stderr: lines for people, or JSON lines in the form of `logs`."""

from __future__ import annotations

import json
import sys
import traceback
from datetime import UTC, datetime
from typing import Literal

from kvcache.cli.process import forget


class _Form:
    """The form of this process's messages."""

    as_json = False


def configure(*, as_json: bool) -> None:
    """Choose the form for this process."""
    _Form.as_json = as_json


def error(text: str, cause: BaseException | None = None) -> None:
    """Say what went wrong; with `cause`, also where it comes from."""
    where = None if cause is None else "".join(traceback.format_exception(cause)).rstrip()
    if _Form.as_json:
        _write_json("error", text, {} if where is None else {"exception": where})
        return
    if where is not None:
        _say(where)
    _say(f"kvcache: error: {printable(text)}")


def warning(text: str) -> None:
    """Say what may not be as it was meant."""
    if _Form.as_json:
        _write_json("warning", text, {})
    else:
        _say(f"kvcache: warning: {printable(text)}")


def note(text: str) -> None:
    """Say something that is worth knowing."""
    if _Form.as_json:
        _write_json("info", text, {})
    else:
        _say(f"kvcache: {printable(text)}")


def printable(text: str) -> str:
    """The text without anything that could drive a terminal."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def _say(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:  # the exit code has to do
        forget(sys.stderr)


def _write_json(level: Literal["error", "warning", "info"], text: str, more: dict[str, str]) -> None:
    timestamp = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    _say(json.dumps({"event": printable(text), **more, "level": level, "timestamp": timestamp}))
