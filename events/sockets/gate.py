"""Lets those connect whose public key lies in a directory, and nobody else.

ZeroMQ asks about every client of an encrypted server (its ZAP protocol), within a context; `zmq.auth` answers on a
thread of its own, and asks here. Without an answer nobody gets in. The directory is looked at again when somebody
comes, at most once a second: a key that is put there is let in, one that is taken away is not when it comes next. A
file that is no key lets nobody in, and keeps nobody else out.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from events.diagnostics import get_logger
from events.sockets.curve import DOMAIN, KeyFileError, read_directory, sort_directory

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

LOOK_SECONDS = 1.0
KEYS_TOLD = 100
"""Of the keys that are turned away so many are logged, each once: whoever makes new ones must not fill the log."""

_log = get_logger("sockets")


class Gate:
    """Stands before all encrypted servers of a context, from `open` to `close`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], clients: Path) -> None:
        self._context, self._clients = context, clients
        self._keys = read_directory(clients)
        self._looked_at = time.monotonic()
        self._handler: ThreadAuthenticator | None = None
        self._told: set[bytes] = set()
        self._wrong: list[str] = []
        """What was wrong with the directory's files when it was looked at last."""
        self.refused = 0
        """Clients that came with a key which is not in the directory."""

    def open(self) -> None:
        """Begin, before a server is bound."""
        from zmq.auth.thread import ThreadAuthenticator

        self._handler = ThreadAuthenticator(self._context)
        self._handler.start()
        self._handler.configure_curve_callback(DOMAIN, credentials_provider=self)

    def close(self) -> None:
        """End; those who are in stay in. May be called twice."""
        handler, self._handler = self._handler, None
        if handler is not None:
            handler.stop()

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client with this public key is let in; asked by `zmq.auth`, on its thread."""
        del domain
        now = time.monotonic()
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            self._look_again()
        allowed = key in self._keys
        if not allowed:
            self.refused += 1
            self._tell(key)
        return allowed

    def _tell(self, key: bytes) -> None:
        """Say which key that was, for who has forgotten to put it there; it is public."""
        if key not in self._told and len(self._told) < KEYS_TOLD:
            self._told.add(key)
            _log.warning("key_refused", key=key.decode(errors="replace"), directory=str(self._clients))

    def _look_again(self) -> None:
        # Whoever cannot be read may have been taken off the list.
        try:
            self._keys, errors = sort_directory(self._clients)
        except KeyFileError as error:
            self._keys, errors = frozenset(), [error]
        wrong = [str(error) for error in errors]
        for reason in wrong:
            if reason not in self._wrong:
                _log.error("allow_list_unreadable", reason=reason)
        self._wrong = wrong
