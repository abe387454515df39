"""Attachment of a recording to an engine's methods: it is called along with them, until the first error.

Its errors never reach the engine: they detach it for good and restore the engine's methods.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, Protocol

from events.errors import FieldsError, type_and_place
from events.log import LogWriter
from kvcache.record.journal import EventSourcedCache

_LONGEST_NAME = 512


def describe_error(error: BaseException) -> str:
    """Describe an error; texts other than our own may quote tokens."""
    return str(error) if isinstance(error, FieldsError) else type_and_place(error)


def as_utf8(text: str) -> str:
    """Return the text without anything that UTF-8 cannot encode."""
    return text.encode(errors="backslashreplace").decode()


def request_name(request_id: str, longest: int = _LONGEST_NAME) -> str:
    """Name of a request, or a session, in a log: its id or, as clients choose it, the beginning of a very long one."""
    name = as_utf8(request_id)
    return name if len(name) <= longest else f"{name[:longest]}-{hashlib.sha256(name.encode()).hexdigest()}"


class EngineRecording(Protocol):
    """Converts the actions of an engine to calls of a recorder, or a manager."""

    @property
    def recorder(self) -> EventSourcedCache:
        """Writer of the log."""

    def stepped(self, *_: Any) -> None:
        """Record the rest of a step, at its end."""


class Attachment:
    """Recording attached to an engine's methods, until the first error or the engine's end.

    `log`: the log of its recorder. `logger` gets one warning if it detaches.
    """

    def __init__(self, recording: EngineRecording, log: LogWriter | None, logger: logging.Logger) -> None:
        self.recorder, self.attached = recording.recorder, True
        """True while it records."""
        self._recording, self._log, self._logger = recording, log, logger
        self._pid = os.getpid()
        self._wrapped: list[tuple[Any, str, Any]] = []

    def follow(self, owner: Any, name: str, record: Callable[..., None]) -> None:
        """Call `record` with the result and the arguments after each call of a method."""
        method = getattr(owner, name)

        def followed(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            self.call(record, result, *args, **kwargs)
            return result

        self.wrap(owner, name, followed)

    def precede(self, owner: Any, name: str, record: Callable[..., None]) -> None:
        """Call `record` with the arguments before each call of a method."""
        method = getattr(owner, name)

        def preceded(*args: Any, **kwargs: Any) -> Any:
            self.call(record, *args, **kwargs)
            return method(*args, **kwargs)

        self.wrap(owner, name, preceded)

    def wrap(self, owner: Any, name: str, wrapped: Any) -> None:
        """Put `wrapped` in place of an object's method."""
        setattr(owner, name, wraps(getattr(owner, name))(wrapped))
        self._wrapped.append((owner, name, wrapped))

    def call(self, record: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Call `record`, unless it is detached; detach if that raises."""
        if self.attached:
            try:
                record(*args, **kwargs)
            except Exception as error:  # noqa: BLE001
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        with suppress(Exception):
            self.release()
            self._logger.warning("The KV cache is no longer recorded: %s", describe_error(error))
        if self._log is not None:
            self._log.mark_incomplete()
        self._end()

    def release(self) -> None:
        """Restore the engine's methods."""
        self.attached = False
        for owner, name, wrapped in self._wrapped:
            # A later wrapper keeps a function that does nothing more.
            if vars(owner).get(name) is wrapped:
                delattr(owner, name)
        self._wrapped.clear()

    def close(self) -> None:
        """Close the log. Closing twice is harmless, and so it is in a forked process."""
        if os.getpid() != self._pid or not self.attached:
            return
        self.call(self._recording.stepped)
        if self.attached:
            with suppress(Exception):
                self.release()
            self._end()

    def close_at_end(self) -> None:
        """Close when the process ends, also by a signal without another handler."""
        atexit.register(self.close)
        alone = threading.current_thread() is threading.main_thread()
        if alone and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminate)

    def _terminate(self, *_: object) -> None:
        self.close()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _end(self) -> None:
        with suppress(Exception):
            atexit.unregister(self.close)
            if signal.getsignal(signal.SIGTERM) == self._terminate:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            self.recorder.close()
        except Exception as error:  # noqa: BLE001
            with suppress(Exception):
                self._logger.warning("The log of the KV cache is incomplete: %s", describe_error(error))
            with suppress(Exception):
                if self._log is not None:
                    self._log.close()
