"""Logs of several workers together: tokens that one computed although another had them cached at that moment.

Contents are compared by their names, so all logs must name blocks in the same way, and times by the workers' clocks.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.resource_tracker import ensure_running
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from events import types as ev
from events.log import LogEnd, LogReader
from events.tokens.names import NAMED_BY_ENGINE
from events.types import EventBatch
from kvcache.audit.admission import ExplainedAdmission
from kvcache.audit.contents import ContentIds, Ids, Window
from kvcache.audit.history import HistoryFold, HistoryListener
from kvcache.audit.prefill import PrefillModel, PrefillSeconds, PrefillTotals
from kvcache.audit.reasons import CountedByReason, Reason
from kvcache.audit.totals import Audit, AuditTotals, chains_of
from kvcache.errors import InternalError, Unsupported
from kvcache.replay import Unreplayable

_Names = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Computed:
    """Distinct full blocks of prompts that a worker computed, by name, each with the one before it (0: none)."""

    names: _Names
    parents: _Names
    depths: npt.NDArray[np.int64]
    """Number of blocks before each."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Consecutive blocks that the same workers computed, with no other such blocks next to them."""

    name: str
    """Name of the last block, 16 hex digits."""
    first: int
    stop: int
    """End of the prefix in tokens of the prompt, which starts at `first`."""
    workers: tuple[str, ...]
    duplicated_tokens: int
    """Computed tokens of each worker but one."""


def computed(missed: Ids, names: _Names, contents: ContentIds) -> Computed:
    """Return the named contents that a worker missed and computed."""
    ids = np.unique(missed)
    ids = ids[names[ids] != 0]
    parents = contents.parents()
    depths = np.zeros(len(parents), np.int64)
    above = parents[ids]
    while (deeper := above >= 0).any():
        depths[ids] += deeper
        above = np.where(deeper, parents[above], -1)
    before = parents[ids]
    return Computed(names[ids], np.where(before >= 0, names[before], 0).astype(np.uint64), depths[ids])


def spread(workers: Sequence[tuple[str, Computed]], tokens_per_block: int, top: int) -> list[Spread]:
    """Return the prefixes with the most tokens computed by several workers, in descending order."""
    names, times = np.unique(
        np.concatenate([np.empty(0, np.uint64), *(each.names for _, each in workers)]), return_counts=True
    )
    by: defaultdict[int, list[str]] = defaultdict(list)
    """Workers that computed a block, by its name."""
    places: dict[int, tuple[int, int]] = {}
    """The block before it, and the number of blocks before it."""
    for worker, each in workers:
        at = np.isin(each.names, names[times > 1])
        columns = (each.names[at].tolist(), each.parents[at].tolist(), each.depths[at].tolist())
        for name, *place in zip(*columns, strict=True):
            by[name].append(worker)
            places[name] = place[0], place[1]
    children: defaultdict[int, list[int]] = defaultdict(list)
    for name, (parent, _) in places.items():
        children[parent].append(name)
    roots = [name for name, (parent, _) in places.items() if parent not in places]
    found = []
    for _, _, chain in chains_of(children, roots, by.__getitem__):
        depth, those = places[chain[0]][1], by[chain[0]]
        begin, stop = depth * tokens_per_block, (depth + len(chain)) * tokens_per_block
        last = np.uint64(chain[-1]).tobytes().hex()
        found.append(Spread(last, begin, stop, tuple(those), (len(those) - 1) * (stop - begin)))
    return sorted(found, key=lambda each: (-each.duplicated_tokens, each.first, each.name))[:top]


_Times = npt.NDArray[np.int64]
_Tokens = npt.NDArray[np.int64]
_FOREVER = np.iinfo(np.int64).max


@dataclass(slots=True)
class WorkerAudit:
    """One worker's log: contents cached over time in its first window, and its misses."""

    name: str
    audit: Audit
    tokens_per_block: int
    algorithm: str
    """Algorithm that names blocks, and tokens per block."""
    lives: tuple[_Names, _Times, _Times]
    """Lives of cached full blocks: names, start times, end times."""
    misses: tuple[_Names, _Times, _Tokens]
    """Computed full blocks of prompts: names, lookup times, tokens of each."""
    computed: Computed | None = None
    """Distinct blocks among the misses, with those they continue."""
    end: LogEnd | None = None
    """End of its log when it was read."""
    prefill: PrefillSeconds | None = None
    """Prefill time; None if no model was given."""


@dataclass(slots=True)
class Fleet(CountedByReason):
    """All workers of a fleet."""

    workers: list[WorkerAudit]
    elsewhere: list[int]
    """Per worker: tokens that it computed while another worker had their blocks cached."""
    computed_on: dict[int, int]
    """Number of distinct blocks by the number of workers that computed them."""
    spread: list[Spread]
    """Prefixes with the most tokens computed by several workers, in descending order."""
    reasons: npt.NDArray[np.int64]
    """Prompt tokens of all workers by `Reason`."""


class _Presence(HistoryListener):
    """Listener for lives and misses of the first window, as content numbers, times, and times or tokens."""

    def __init__(self) -> None:
        none = np.empty(0, np.int64)
        self.lives: list[tuple[Ids, _Times, _Times]] = [(none, none, none)]
        self.misses: list[tuple[Ids, _Times, _Tokens]] = [(none, none, none)]

    def looked_up(self, history: HistoryFold, admission: ExplainedAdmission) -> None:
        blocks = len(admission.ids)
        missed = np.flatnonzero(admission.reasons[:blocks] > Reason.LAST_TOKEN)
        at = np.full(len(missed), history.now)
        self.misses.append((admission.ids[missed], at, admission.tokens()[missed]))

    def lost(self, history: HistoryFold, window: Window, ids: Ids) -> None:
        self._end(history, window, ids, history.now)

    def _end(self, history: HistoryFold, window: Window, ids: Ids, now: int) -> None:
        if len(ids) and window.of is history.windows[0].of:
            begins = window.of["stored_at"][ids]
            self.lives.append((ids, begins, np.maximum(begins, now)))

    def finish(self, history: HistoryFold) -> None:
        """End the lives of blocks cached at the end of the log at infinity."""
        for window in history.windows[:1]:
            self._end(history, window, np.flatnonzero(window.of["level"] >= 0), _FOREVER)


def audit_worker(path: Path, top: int = 10, model: PrefillModel | None = None) -> WorkerAudit:
    """Audit one log of a fleet. Raises `Unsupported` for one without names or tokens, `Unreplayable`."""
    totals, presence = AuditTotals(), _Presence()
    prefill = [] if model is None else [PrefillTotals(model)]
    history = HistoryFold(totals, presence, *prefill)
    algorithm = ""
    reader = LogReader(path)
    for batch in reader:
        _fold(history, batch, path)
        for event in batch.events:
            if isinstance(event, ev.CacheCreated):
                of = f" of {event.engine}" if event.hash_algorithm in NAMED_BY_ENGINE.values() else ""
                algorithm = f"{event.hash_algorithm}{of}, blocks of {event.tokens_per_block} tokens"
    if algorithm and (not history.key_bytes or not history.tokens_recorded):
        raise Unsupported(
            f"comparing {path} with other logs", "record tokens and names of blocks (block_hash)"
        )
    presence.finish(history)
    names = history.names["name"]
    ids, begins, ends = map(np.concatenate, zip(*presence.lives, strict=True))
    missed, at, tokens = map(np.concatenate, zip(*presence.misses, strict=True))
    known = names[missed] != 0
    return WorkerAudit(
        path.name,
        totals.finish(history, top),
        history.tokens_per_block,
        algorithm,
        (names[ids], begins, ends),
        (names[missed][known], at[known], tokens[known]),
        computed(missed, names, history.contents),
        reader.end,
        prefill[0].finish() if prefill else None,
    )


def _fold(history: HistoryFold, batch: EventBatch, path: Path) -> None:
    """Fold a batch; name the log in an error."""
    try:
        history.fold(batch)
    except Unreplayable as error:
        raise Unreplayable(error.seq, error.reason, str(path)) from error


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A log that cannot be read. The others can be audited without it."""

    path: Path
    reason: str
    """Reason, in the words of the system."""

    @classmethod
    def of(cls, path: Path, error: OSError) -> LeftOut:
        """Return the log with the system's reason for refusing it."""
        return cls(path, error.strerror or str(error))


def audit_or_leave_out(path: Path, top: int = 10, model: PrefillModel | None = None) -> WorkerAudit | LeftOut:
    """Audit one log as `audit_worker` does, or return `LeftOut` if the system refuses to read it."""
    try:
        return audit_worker(path, top, model)
    except OSError as error:
        return LeftOut.of(path, error)


def together(workers: Iterable[WorkerAudit], top: int = 10) -> Fleet:
    """Compare workers; name the `top` prefixes that several of them computed.

    Raises `Unsupported` if their blocks cannot be compared by name.
    """
    workers = sorted(workers, key=lambda worker: worker.name)
    # A log that has just begun has no cache yet.
    kinds = sorted({worker.algorithm for worker in workers} - {""})
    if len(kinds) > 1:
        what = f"comparing blocks that are named differently ({'; '.join(kinds)})"
        raise Unsupported(what, "audit the logs one by one")
    elsewhere = [
        int(worker.misses[2][_covered(worker, [other for other in workers if other is not worker])].sum())
        for worker in workers
    ]
    asked = np.concatenate([np.empty(0, np.uint64), *(np.unique(worker.misses[0]) for worker in workers)])
    _, times = np.unique(asked, return_counts=True)
    numbers, blocks = np.unique(times, return_counts=True)
    size = max((worker.tokens_per_block for worker in workers), default=0)
    known = [(worker.name, worker.computed) for worker in workers if worker.computed is not None]
    on = dict(zip(numbers.tolist(), blocks.tolist(), strict=True))
    reasons = sum((worker.audit.reasons for worker in workers), np.zeros(len(Reason), np.int64))
    return Fleet(workers, elsewhere, on, spread(known, size, top), reasons)


def _covered(worker: WorkerAudit, others: list[WorkerAudit]) -> npt.NDArray[np.bool_]:
    """Return, for each miss, if another worker had the block cached at that time: more lives had begun than ended."""
    asked, at, _ = worker.misses
    lives = [other.lives for other in others]
    moments = [(names, begins, 1) for names, begins, _ in lives]
    moments += [(names, ends, -1) for names, _, ends in lives]
    moments.append((asked, at, 0))
    names, times = (np.concatenate([each[column] for each in moments]) for column in (0, 1))
    steps = np.repeat([step for _, _, step in moments], [len(names) for names, _, _ in moments])
    order = np.lexsort([steps == 0, times, names])
    cached = np.empty(len(order), np.int64)
    cached[order] = np.cumsum(steps[order])
    return cached[len(cached) - len(asked) :] > 0


_SECONDS_BETWEEN = 0.5


def in_processes(
    logs: Sequence[Path], jobs: int, top: int = 10, model: PrefillModel | None = None
) -> Iterator[WorkerAudit | LeftOut]:
    """Audit logs in up to `jobs` processes; yield each as soon as it is done. Raises `InternalError` if one is killed.

    Unreadable logs are left out.

    The processes ignore Ctrl-C; they end with their parent, or when the iteration is abandoned.
    """
    if jobs == 1 or len(logs) <= 1:
        yield from (audit_or_leave_out(log, top, model) for log in logs)
        return
    with processes(min(jobs, len(logs))) as pool:
        with interrupts_ignored():
            futures = [pool.submit(audit_or_leave_out, log, top, model) for log in logs]
        for future in as_completed(futures):
            yield future.result()


@contextmanager
def processes(count: int, prepare: Callable[[], object] = dict) -> Iterator[ProcessPoolExecutor]:
    """Yield up to `count` processes, each set up by `prepare`. Raises `InternalError` if one is killed.

    They end with this process, and are killed if the block ends with an exception.
    """
    # Not forked: threads of the parent may hold locks.
    context, before = multiprocessing.get_context("spawn"), set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_begin, initargs=(os.getpid(), prepare))
    try:
        yield pool
    except BrokenProcessPool:
        raise InternalError(
            "a worker process was killed, perhaps for lack of memory: try fewer --jobs"
        ) from None
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Make processes started inside ignore signals of terminals and launchers, even at startup: the parent decides."""
    ensure_running()  # it would undo what follows
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(parent: int, prepare: Callable[[], object]) -> None:
    """Set up a process that ends soon after its parent."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_SECONDS_BETWEEN)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    prepare()


def on_ray(
    logs: Sequence[Path], top: int = 10, model: PrefillModel | None = None
) -> Iterator[WorkerAudit | LeftOut]:
    """Audit logs as tasks of a Ray cluster, in which all machines see the same paths; leave unreadable logs out.

    Raises `Unsupported` if Ray is not installed.
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
        waiting = [task.remote(log.absolute(), top, model) for log in logs]
        while waiting:
            done, waiting = ray.wait(waiting)
            yield from ray.get(done)
    finally:
        if started:
            ray.shutdown()
