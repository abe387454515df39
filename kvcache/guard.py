"""Who may call a manager, and when it must not be called any more."""

from __future__ import annotations

import threading
from types import TracebackType

from events.errors import type_and_place
from kvcache.errors import CapacityError, KVCacheError, ManagerClosed, Poisoned, WrongThread


class Guard:
    """One owner thread; poisoned by the first failure in the middle of a command.

    Used as a context manager around the part of a command that must happen whole.
    """

    __slots__ = ("_owner", "_owner_name", "closed", "failure")

    def __init__(self) -> None:
        self._owner = threading.get_ident()
        self._owner_name = threading.current_thread().name
        self.closed = False
        self.failure: str | None = None

    def refuse_other_threads(self) -> None:
        """Refuse a call from another thread only: closing must work after a failure."""
        if threading.get_ident() != self._owner:
            raise WrongThread(self._owner_name, threading.current_thread().name)

    def enter(self) -> None:
        """Refuse a call from another thread, after a failure, or after closing."""
        if threading.get_ident() != self._owner:
            self.refuse_other_threads()
        if self.failure is not None:
            raise Poisoned(self.failure)
        if self.closed:
            raise ManagerClosed

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A refusal for lack of room is decided before the first event.
        if error is not None and not isinstance(error, CapacityError):
            self.failure = _told(error)


def _told(error: BaseException) -> str:
    """What failed, and where. Only our own errors are quoted: others may hold tokens, as that of a dict's key."""
    if isinstance(error, KVCacheError):
        return f"{type(error).__name__}: {error}"
    return type_and_place(error)
