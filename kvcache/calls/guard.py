"""Access to a manager: the owner thread, no calls within calls, none after a failure or closing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial, wraps
from threading import get_ident
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from events.errors import type_and_place
from kvcache.errors import CapacityError, KVCacheError, ManagerBusy, ManagerClosed, Poisoned, WrongThread

P = ParamSpec("P")
R = TypeVar("R")


class Guard:
    """One owner thread and one call at a time; poisoned by the first failure in the middle of a command.

    Used as a context manager around the atomic part of a command.
    """

    def __init__(self) -> None:
        self._owner = get_ident()
        self._owner_name = threading.current_thread().name
        self.caller: int | None = self._owner
        """Thread that may call; None after a failure, and once closed."""
        self.busy = False
        """True while a call is in progress."""
        self.closed = False
        self.failure: str | None = None
        self.interrupted = False
        """True if the failure was an interruption by the caller, as by Ctrl-C, and no bug."""
        self.deferred: Callable[[], None] | None = None
        """Action to run when the call in progress has ended."""
        self.clock: Callable[[], int] | None = None
        """Clock in nanoseconds; None while calls are not timed."""
        self.began_ns = self.spent_ns = 0
        """Start of the call in progress, and time spent in calls since timing began."""

    def refuse_other_threads(self) -> None:
        """Refuse a call from another thread only: closing must work after a failure."""
        if get_ident() != self._owner:
            raise WrongThread(self._owner_name, threading.current_thread().name)

    def refuse(self) -> None:
        """Raise the error that explains why the manager must not be called now."""
        self.refuse_other_threads()
        if self.failure is not None:
            raise Poisoned(self.failure, self.interrupted)
        if self.closed:
            raise ManagerClosed
        raise ManagerBusy

    def catch_up(self) -> None:
        """Run the deferred action."""
        deferred, self.deferred = self.deferred, None
        if deferred is not None:
            deferred()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.note(error)

    def note(self, error: BaseException) -> None:
        """Handle an error as `with` does; called directly in code that runs at every step, where `with` would cost
        more.
        """
        # A refusal for lack of room is decided before the first event.
        if not isinstance(error, CapacityError):
            self.caller = None
            self.failure, self.interrupted = _described(error), not isinstance(error, Exception)

    def close(self) -> None:
        """Refuse all further calls."""
        self.caller, self.closed = None, True


def _described(error: BaseException) -> str:
    """Describe a failure and its place. Only our own errors are quoted: others may hold tokens, as that of a dict's
    key.
    """
    if isinstance(error, KVCacheError):
        return f"{type(error).__name__}: {error}"
    return type_and_place(error)


class _Guarded(Protocol):
    @property
    def _guard(self) -> Guard: ...


S = TypeVar("S", bound=_Guarded)


def exclusive(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A public call of a manager: by its owner, between other calls, while it is open and whole.

    Another call in the middle of one would meet, and record, half a command. It can come from a signal handler, from a
    clock, a copier or a subscriber of the bus that the manager calls, or from an iterable that it was given.
    """

    @wraps(method)
    def guarded(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        guard = self._guard
        if get_ident() != guard.caller or guard.busy:
            guard.refuse()
        if guard.clock is not None:
            guard.began_ns = guard.clock()
        # From here to the call, and after it, nothing is called: Python runs signal handlers only at calls.
        try:
            guard.busy = True
            return method(self, *args, **kwargs)
        finally:
            guard.busy = False
            if guard.clock is not None:
                guard.spent_ns += guard.clock() - guard.began_ns
            if guard.deferred is not None:
                guard.catch_up()

    return guarded


def closing(method: Callable[[S], None]) -> Callable[[S], None]:
    """The call that closes a manager: by its owner, also after a failure; within another call it is deferred to its
    end.

    Further ones do nothing.
    """

    @wraps(method)
    def guarded(self: S) -> None:
        guard = self._guard
        if not guard.closed:
            guard.refuse_other_threads()
        if guard.busy:
            guard.deferred = partial(guarded, self)
        elif not guard.closed:
            try:
                guard.busy = True
                method(self)
            finally:
                guard.busy, guard.deferred = False, None

    return guarded
