"""Trials in processes beside each other."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.resource_tracker import ensure_running
from os import PathLike

from kvcache.errors import InternalError
from kvcache.whatif.trial import Outcome, Trial, play

_SECONDS_BETWEEN = 0.1
"""How often a worker tells how far it is, and how often anybody asks whether to stop."""
Prepare = Callable[[], None]
"""Sets a process up; must be picklable."""


class Stopped(Exception):
    """No error: the trials were given up before their end."""


def play_side_by_side(
    log: str | PathLike[str],
    trials: Sequence[Trial],
    jobs: int,
    *,
    stop: Callable[[], bool],
    progress: Callable[[int], None],
    prepare: Prepare,
) -> list[Outcome]:
    """`kvcache.whatif.trial.play` in `jobs` processes, each of which reads the log for its part of the trials.

    With one job it is this process. Raises `Stopped` when `stop` says so, and what `play` raises. `progress` hears how
    many batches the slowest one has done.
    """
    jobs = max(1, min(jobs, len(trials)))
    if jobs == 1:
        return _play_here(log, trials, stop, progress)
    workers: list[_Worker] = []
    try:
        with _deaf_children():
            workers.extend(_Worker(log, trials[start::jobs], prepare) for start in range(jobs))
        while busy := [worker for worker in workers if worker.outcomes is None]:
            if stop():
                raise Stopped
            told = wait([worker.connection for worker in busy], _SECONDS_BETWEEN)
            for worker in busy:
                if worker.connection in told:
                    worker.hear()
            progress(min(worker.batches for worker in workers))
    finally:
        for worker in workers:
            worker.end()
    return _in_order([worker.outcomes or [] for worker in workers], len(trials))


def _play_here(
    log: str | PathLike[str],
    trials: Sequence[Trial],
    stop: Callable[[], bool],
    progress: Callable[[int], None],
) -> list[Outcome]:
    def told(batches: int) -> None:
        if stop():
            raise Stopped
        progress(batches)

    return play(log, trials, told)


def _in_order(parts: Sequence[list[Outcome]], count: int) -> list[Outcome]:
    """The outcomes as the trials were given: what was recorded, which each part begins with, comes first."""
    return [parts[0][0], *(parts[index % len(parts)][1 + index // len(parts)] for index in range(count))]


@contextmanager
def _deaf_children() -> Iterator[None]:
    """What is started inside hears no signals of the terminal and of launchers, not even while it begins: whoever has
    started it decides.
    """
    ensure_running()  # it would undo what follows
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Worker:
    """A process, and what was heard of it."""

    def __init__(self, log: str | PathLike[str], trials: Sequence[Trial], prepare: Prepare) -> None:
        context = get_context("spawn")
        self.connection, theirs = context.Pipe(duplex=False)
        self.batches = 0
        self.outcomes: list[Outcome] | None = None
        arguments = (theirs, log, list(trials), prepare)
        self._process: SpawnProcess = context.Process(target=_work, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def hear(self) -> None:
        """Take what it says; raises what it failed with."""
        try:
            said = self.connection.recv()
        except EOFError:
            self._process.join()
            raise InternalError(f"a process ended with exit code {self._process.exitcode}") from None
        if isinstance(said, Exception):
            raise said
        if isinstance(said, int):
            self.batches = said
        else:
            self.outcomes = said

    def end(self) -> None:
        """Let the process go, done or not."""
        if self.outcomes is None:
            self._process.kill()
        self._process.join()
        self.connection.close()


def _work(connection: Connection, log: str | PathLike[str], trials: list[Trial], prepare: Prepare) -> None:
    """What a process does."""
    prepare()
    told = 0.0

    def progress(batches: int) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= _SECONDS_BETWEEN:
            told = now
            connection.send(batches)

    with suppress(BrokenPipeError):  # nobody is there any more
        try:
            result: object = play(log, trials, progress)
        except BrokenPipeError:
            raise
        except Exception as error:  # noqa: BLE001  whatever it is, it is told where it can be understood
            result = error
        connection.send(result)
