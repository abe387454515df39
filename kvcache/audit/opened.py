"""A log, opened for programs: its batches, and what they tell as rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from events.errors import NotALog
from events.log import LogReader
from events.log.segments import is_log
from events.types import EpochStarted, EventBatch
from kvcache.audit.collecting import Collector, Several
from kvcache.audit.evictions import Evictions
from kvcache.audit.fold import HistoryFold
from kvcache.audit.lives import Lives
from kvcache.audit.requests import Requests
from kvcache.audit.rows import BlockLife, EvictionRow, RequestRow, StepRow
from kvcache.audit.steps import step_row

TableName = Literal["requests", "blocks", "evictions", "steps"]
_COLLECTORS: dict[TableName, type[Collector[Any]]] = {
    "requests": Requests,
    "blocks": Lives,
    "evictions": Evictions,
}


class Log:
    """A log directory. Each iteration, and each call, reads it anew from its first batch to its end.

    Rows come as soon as they are known and are not kept: a request's when it ends, a block's when it is gone, and at
    the end what is not over. Reading raises `LogDamaged`, `LogTooNew`, and `Unreplayable` where batches do not follow
    from those before them; what was read until then has been given.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[EventBatch]:
        """The batches; `EventBatch.ts` is the wall clock in ns. Columns are unpacked by `events.packed`."""
        return iter(LogReader(self.path))

    @property
    def log_id(self) -> str | None:
        """What its writer called it, in hex digits; copies have the same. None where the first batch does not say."""
        first = next(iter(self), None)
        events = () if first is None else first.events
        return next((event.log_id.hex() for event in events if isinstance(event, EpochStarted)), None)

    def requests(self) -> Iterator[RequestRow]:
        """Each admission with its outcome, in the order in which they ended, and requests that were only refused."""
        return self._rows("requests")

    def block_lives(self) -> Iterator[BlockLife]:
        """Each life of a full block in a window, in the order in which they ended."""
        return self._rows("blocks")

    def evictions(self) -> Iterator[EvictionRow]:
        """Each removal of cached content, in order."""
        return self._rows("evictions")

    def steps(self) -> Iterator[StepRow]:
        """Each batch, and the cache after it."""
        return self._rows("steps")

    def _rows(self, name: TableName) -> Iterator[Any]:
        for _, rows in tables_of(self, name):
            yield from rows


def open_log(path: str | PathLike[str]) -> Log:
    """Open a log for reading; a writer may be at work in it. Raises `NotALog`."""
    directory = Path(path)
    if not is_log(directory):
        raise NotALog(directory)
    return Log(directory)


def tables_of(batches: Iterable[EventBatch], *names: TableName) -> Iterator[tuple[TableName, list[Any]]]:
    """The rows of several tables in one pass, each list with the name of its table."""
    collectors = {name: _COLLECTORS[name]() for name in names if name in _COLLECTORS}
    history = HistoryFold(Several(list(collectors.values())))
    replayed = history.replayed
    for batch in batches:
        if collectors:
            history.fold(batch)
        else:
            replayed.fold(batch, verify=False)
        yield from _taken(collectors)
        if "steps" in names:
            yield "steps", [step_row(batch, replayed.state)]
    for name, collector in collectors.items():
        for rows in collector.remaining(history):
            yield name, rows


def _taken(collectors: dict[TableName, Collector[Any]]) -> Iterator[tuple[TableName, list[Any]]]:
    for name, collector in collectors.items():
        if collector.rows:
            yield name, collector.take()
