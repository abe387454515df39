"""Breaks a recorder within an engine, and keeps what people are told of it."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

SECRET = "12345 is a token that no message may hold"
Place = tuple[Any, str]
"""A class, and the name of a method of its."""


class Messages(logging.Handler):
    """What the recorder tells people."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.texts.append(record.getMessage())


def broken(place: Place, at: int) -> Any:
    """A method that raises when it is called for this time, before or behind what it does."""
    owner, name = place
    method, calls = getattr(owner, name), 0

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at and at % 2:
            raise RuntimeError(SECRET)
        done = method(self, *args, **kwargs)
        if calls == at:
            raise RuntimeError(SECRET)
        return done

    return mock.patch.object(owner, name, call)
