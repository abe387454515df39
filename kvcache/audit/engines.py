"""Where the logs of a fleet are read: in processes beside each other, or on a Ray cluster."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from pathlib import Path
from typing import Any

from kvcache.audit.fleet import WorkerAudit, audit_worker
from kvcache.errors import Unsupported


def in_processes(logs: Sequence[Path], jobs: int, top: int = 10) -> Iterator[WorkerAudit]:
    """Audit logs in up to `jobs` processes; each as soon as it is done."""
    if jobs == 1 or len(logs) == 1:
        yield from (audit_worker(log, top) for log in logs)
        return
    # Not forked: threads of the parent may hold locks.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(logs)), mp_context=context) as pool:
        futures = [pool.submit(audit_worker, log, top) for log in logs]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


def on_ray(logs: Sequence[Path], top: int = 10) -> Iterator[WorkerAudit]:
    """Audit logs as tasks of a Ray cluster, whose machines must see the same paths.

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
        task = ray.remote(audit_worker)
        waiting = [task.remote(log.absolute(), top) for log in logs]
        while waiting:
            done, waiting = ray.wait(waiting)
            yield from ray.get(done)
    finally:
        if started:
            ray.shutdown()
