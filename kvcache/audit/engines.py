"""Where the logs of a fleet are read: in processes beside each other, or on a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.resource_tracker import ensure_running
from pathlib import Path
from typing import Any

from kvcache.audit.fleet import LeftOut, WorkerAudit, audit_or_leave_out
from kvcache.errors import InternalError, Unsupported

_SECONDS_BETWEEN = 0.5


def in_processes(logs: Sequence[Path], jobs: int, top: int = 10) -> Iterator[WorkerAudit | LeftOut]:
    """Audit logs in up to `jobs` processes; each as soon as it is done. Raises `InternalError` if one is killed.

    What cannot be read is left out.

    Processes hear no Ctrl-C; they end with the one that has started them, or when nobody wants more.
    """
    if jobs == 1 or len(logs) <= 1:
        yield from (audit_or_leave_out(log, top) for log in logs)
        return
    # Not forked: threads of the parent may hold locks.
    context, before = multiprocessing.get_context("spawn"), set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        min(jobs, len(logs)), mp_context=context, initializer=_end_with, initargs=(os.getpid(),)
    )
    try:
        with _deaf_children():
            futures = [pool.submit(audit_or_leave_out, log, top) for log in logs]
        for future in as_completed(futures):
            yield future.result()
    except BrokenProcessPool:
        raise InternalError(
            "a process that read logs was killed; is there enough memory for --jobs?"
        ) from None
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _deaf_children() -> Iterator[None]:
    """What is started inside hears no Ctrl-C of the terminal: whoever has started it decides."""
    ensure_running()  # it would undo what follows
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with(parent: int) -> None:
    """Let this process end soon after its parent has."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_SECONDS_BETWEEN)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def on_ray(logs: Sequence[Path], top: int = 10) -> Iterator[WorkerAudit | LeftOut]:
    """Audit logs as tasks of a Ray cluster, whose machines must see the same paths; what they cannot read is left out.

    Raises `Unsupported` where Ray is not installed.
    """
    try:
        ray: Any = import_module("ray")
    except ImportError:
        raise Unsupported("--engine ray", "install kvcache[ray], or leave it out") from None
    started = not ray.is_initialized()
    if started:
        ray.init(logging_level="ERROR", log_to_driver=False)
    try:
        task = ray.remote(audit_or_leave_out)
        waiting = [task.remote(log.absolute(), top) for log in logs]
        while waiting:
            done, waiting = ray.wait(waiting)
            yield from ray.get(done)
    finally:
        if started:
            ray.shutdown()
