"""Lines that say now and then how a command is doing that runs until it is stopped."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from kvcache.cli.output import Output
from kvcache.cli.parser import seconds

Status = TypeVar("Status")


def add_options(parser: argparse.ArgumentParser, what: str) -> None:
    """Declare when they come, and in which form; they tell `what`."""
    parser.add_argument(
        "--every",
        type=seconds,
        default=10.0,
        metavar="SECONDS",
        help=f"between two lines that tell {what} (10)",
    )
    parser.add_argument("--json", action="store_true", help="these lines as JSON on stdout, one object each")


class StatusLines(Generic[Status]):
    """Notes for people, or JSON on stdout; none that says the same as the one before.

    One is due `first` seconds from now, and then at most one in `every` seconds.
    """

    def __init__(
        self,
        out: Output,
        in_words: Callable[[Status], str],
        to_json: Callable[[Status], dict[str, object]],
        *,
        as_json: bool,
        every: float,
        first: float = 0,
    ) -> None:
        self._out, self._in_words, self._to_json = out, in_words, to_json
        self._as_json, self._every = as_json, every
        self._due = time.monotonic() + first
        self._said = ""

    def is_due(self) -> bool:
        """Whether it is time for a line. Then the time of the next one begins."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + self._every
        return True

    def say(self, status: Status) -> None:
        """A line, if something has changed."""
        text = json.dumps(self._to_json(status)) if self._as_json else self._in_words(status)
        if text == self._said:
            return
        self._said = text
        if self._as_json:
            print(text, flush=True)
        else:
            self._out.note(text)
