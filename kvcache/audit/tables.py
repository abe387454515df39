"""A log for programs: its batches, and tables of plain values derived from them.

docs/how-to/export.md defines each column. Times are the writer's wall clock in nanoseconds since 1970 (UTC), `seq` and
`..._seq` numbers of batches, windows in tokens, levels by name. A request is named twice: by the engine's id, which may
recur, and by its unique admission number in the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np

from events import types as ev
from events.errors import NotALog
from events.log import LogReader
from events.log.segments import is_log
from events.packed import HANDLE_BYTES, SLOT_BYTES, unpack_u32
from events.structs import LEVEL_NAMES
from events.types import EpochStarted, EventBatch, MoveReason, Namespace, RequestId
from kvcache.audit.admission import ExplainedAdmission, RequestOrigin
from kvcache.audit.contents import NOWHERE, Ids, Window
from kvcache.audit.history import HistoryFold, HistoryListener, RunningRequest
from kvcache.audit.reasons import Reason
from kvcache.fold.positional import shared_slots
from kvcache.fold.state import CacheState
from kvcache.replay import known_events


class RequestRow(NamedTuple):
    """One admission of a request with its outcome, or a request that was refused and never admitted."""

    admission: int | None
    """Admission number from 0. None if the admission is not in the log."""
    request_id: RequestId
    outcome: str
    """``ended``, ``running`` at the end of the log, ``lost`` with a restart or lost batches, or ``refused``."""
    lora_id: int | None = None
    lora_name: str | None = None
    salt_digest: str | None = None
    """Digest of the salt in hex digits; the salt itself is in no log."""
    uses_extra_ids: bool = False
    refusals: int = 0
    """Refusals before this admission, since the previous one of the same id."""
    first_refused_ts: int | None = None
    admitted_seq: int | None = None
    admitted_ts: int | None = None
    ended_seq: int | None = None
    ended_ts: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    """Output tokens, so far if the request has not ended."""
    reused_tokens: int | None = None
    stop: str | None = None
    """Stop reason reported by the engine."""
    tokens_by_reason: dict[str, int] = {}  # noqa: RUF012
    """Prompt tokens by reason (docs/how-to/audit.md), all of them; empty if the admission is not in the log."""
    session: str | None = None
    labels: dict[str, str] | None = None
    """Labels given by the engine; None if it gave none."""


class BlockLife(NamedTuple):
    """A full block in one window, from the event that caches it until its content is gone."""

    window: int
    content: int
    """Content number. Equal numbers: equal tokens, equal tokens before them, equal namespace."""
    num_tokens: int
    stored_by: RequestId | None
    stored_by_admission: int | None
    """Admission that stored the block; None, like `stored_by`, if it came with an exported state."""
    stored_seq: int
    stored_ts: int
    priority: int
    """Latest priority."""
    reused: int
    """Number of admissions that reused it."""
    last_used_ts: int
    """Time when it was last stored, reused, or released."""
    offloads: int
    last_offloaded_ts: int | None
    onboards: int
    last_onboarded_ts: int | None
    level: str | None
    """Level in which it is cached at the end of the log; None if it is gone."""
    gone_seq: int | None
    gone_ts: int | None
    gone_why: str | None
    """Reason for which it is gone: ``evicted``, ``dropped``, ``cleared``, ``copy_failed``, ``invalidated``,
    ``restarted`` (docs/how-to/audit.md)."""
    gone_for: RequestId | None
    gone_for_admission: int | None
    eviction: int | None
    """The `EvictionRow` that removed the block."""


class EvictionRow(NamedTuple):
    """Cached content of one window and level that was removed at once."""

    eviction: int
    """Eviction number from 0."""
    seq: int
    ts: int
    window: int
    level: str
    why: str
    """Reason as in `BlocksRemoved`: ``capacity``, ``superseded``, ``unreachable``, ``cleared`` or ``invalidated``."""
    blocks: int
    full_blocks: int
    """Number of full blocks. Others have fewer tokens, and no `BlockLife`."""
    never_reused: int
    """Number of full blocks that no admission reused since they were stored."""
    for_request: RequestId | None
    for_admission: int | None


class OccupancyRow(NamedTuple):
    """Blocks of one level of a window after a batch, by use."""

    window: int
    level: str
    blocks: int
    held: int
    """Blocks held by running requests."""
    unreferenced: int
    """Blocks that are cached and free to evict."""
    blank: int


class StepRow(NamedTuple):
    """One batch: its effects, and the cache after it."""

    seq: int
    ts: int
    admitted: int
    refused: int
    ended: int
    running: int
    """Requests that run after the batch."""
    prompt_tokens: int
    """Prompt tokens of the requests that the batch admitted."""
    reused_tokens: int
    computed_tokens: int
    """Remaining tokens of these prompts, which the engine has to compute, in this step or later."""
    output_tokens: int
    """Output tokens appended."""
    stored_blocks: int
    removed_blocks: int
    cleared_blocks: int
    """Blocks removed by clearing the cache."""
    offloaded_blocks: int
    onboarded_blocks: int
    occupancy: tuple[OccupancyRow, ...]


Row = TypeVar("Row")


class RowCollector(HistoryListener, Generic[Row]):
    """Listener that collects rows until they are taken."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def take(self) -> list[Row]:
        """Return the rows since the last call."""
        rows, self.rows = self.rows, []
        return rows

    def remaining(self, history: HistoryFold) -> Iterator[list[Row]]:
        """Yield the rows of what has not ended at the log's end, in portions."""
        yield from ()


class Requests(RowCollector[RequestRow]):
    """Rows of requests: one when a request ends; at the log's end those that still run or were never admitted."""

    def __init__(self) -> None:
        super().__init__()
        self._refused: dict[RequestId, RequestRow] = {}
        """Refused requests by id, since their last admission."""
        self._running: dict[int, RequestRow] = {}
        """Running requests by admission number."""
        self._exported: dict[int, RunningRequest] = {}
        """Running requests without an admission in the log, by number."""
        self._over: list[tuple[RunningRequest, dict[str, Any]]] = []
        """Requests that ended in this batch; their rows follow at its end, when its admissions are known."""

    def refused(self, history: HistoryFold, event: ev.AdmissionRefused) -> None:
        """Count a refusal."""
        new = RequestRow(None, event.request_id, "refused", first_refused_ts=history.now)
        row = self._refused.get(event.request_id, new)
        self._refused[event.request_id] = row._replace(refusals=row.refusals + 1)

    def admitted(self, history: HistoryFold, admission: ExplainedAdmission) -> None:
        """Record the admission until the request's end."""
        counts = zip(Reason, admission.counts.tolist(), strict=True)
        row = _row_of(admission.request_id, admission.namespace, admission.num_tokens, admission.origin)
        row = row._replace(
            admission=admission.number,
            admitted_seq=admission.batch,
            admitted_ts=admission.at,
            reused_tokens=admission.reused,
            tokens_by_reason={reason.label: count for reason, count in counts},
        )
        if (refused := self._refused.pop(admission.request_id, None)) is not None:
            row = row._replace(refusals=refused.refusals, first_refused_ts=refused.first_refused_ts)
        self._running[admission.number] = row
        self._exported.pop(admission.number, None)

    def forked(self, history: HistoryFold, child: RunningRequest) -> None:
        """Record the child without an admission, like requests that came with an exported state."""
        self._exported[child.number] = child

    def ended(self, history: HistoryFold, request: RunningRequest, event: ev.SequenceRemoved) -> None:
        """Record the end."""
        output = event.num_tokens - request.sequence.num_prompt_tokens
        outcome = "ended" if event.why == ev.EndReason.FINISHED else str(event.why)
        end = {"output_tokens": output, "ended_seq": history.batch, "ended_ts": history.now}
        self._over.append((request, {"outcome": outcome, "stop": event.stop, **end}))

    def restarted(self, history: HistoryFold) -> None:
        """Add rows for requests that the exported state lacks: they are lost."""
        known = {request.number: request for request in history.running.values()}
        for number in sorted(self._running.keys() - known.keys()):
            self.rows.append(self._running.pop(number)._replace(outcome="lost"))
        for number in sorted(self._exported.keys() - known.keys()):
            self._add(history, self._exported[number], {"outcome": "lost"})
        self._exported |= {number: known[number] for number in known.keys() - self._running.keys()}

    def batch_ended(self, history: HistoryFold) -> None:
        """Add rows for the requests that ended."""
        for request, end in self._over:
            self._add(history, request, end)
        self._over.clear()

    def _add(self, history: HistoryFold, request: RunningRequest, end: dict[str, Any]) -> None:
        row, sequence = self._running.pop(request.number, None), request.sequence
        self._exported.pop(request.number, None)
        if row is None:  # its admission is not in the log
            prompt = sequence.request_id, sequence.namespace, sequence.num_prompt_tokens
            row = _row_of(*prompt, history.origins[request.number])
        self.rows.append(row._replace(**end))

    def remaining(self, history: HistoryFold) -> Iterator[list[RequestRow]]:
        """Yield the rows of requests that still run, and of those refused last."""
        for request in history.running.values():
            output = request.sequence.num_tokens - request.sequence.num_prompt_tokens
            self._add(history, request, {"outcome": "running", "output_tokens": output})
        yield self.take()
        yield list(self._refused.values())


def _row_of(
    request_id: RequestId, namespace: Namespace, num_tokens: int, origin: RequestOrigin
) -> RequestRow:
    """Return the row of a request that runs, by its prompt alone."""
    digest = namespace.salt_digest
    return RequestRow(
        None,
        request_id,
        "running",
        lora_id=namespace.lora_id,
        lora_name=namespace.lora_name,
        salt_digest=None if digest is None else digest.hex(),
        uses_extra_ids=namespace.uses_extra_ids,
        prompt_tokens=num_tokens,
        session=origin.session,
        labels=origin.labels,
    )


class Lives(RowCollector[BlockLife]):
    """Rows of block lives: one when a block is gone; at the log's end one for each that is still cached."""

    def __init__(self) -> None:
        super().__init__()
        self._evictions = 0

    def removed(self, history: HistoryFold, window: Window, ids: Ids, event: ev.BlocksRemoved) -> None:
        """Add rows for evicted blocks."""
        self._end(history, window, ids, self._evictions)
        self._evictions += 1

    def lost(self, history: HistoryFold, window: Window, ids: Ids) -> None:
        """Add rows for blocks that were lost with the cache."""
        self._end(history, window, ids)

    def remaining(self, history: HistoryFold) -> Iterator[list[BlockLife]]:
        """Yield the rows of cached blocks."""
        for window in history.windows:
            ids = np.flatnonzero(window.of["level"] != NOWHERE)
            for begin in range(0, len(ids), _MOST):
                some = ids[begin : begin + _MOST]
                yield _rows(history, window, some, None)

    def _end(self, history: HistoryFold, window: Window, ids: Ids, eviction: int | None = None) -> None:
        if len(ids):
            self.rows += _rows(history, window, ids, eviction)


_MOST = 1 << 13
"""Maximum number of rows that are made at once."""


def _rows(history: HistoryFold, window: Window, ids: Ids, eviction: int | None) -> list[BlockLife]:
    """Return the lives of these blocks up to now."""
    known = window.of
    level = known["level"][ids]
    gone = level == NOWHERE
    by, gone_by = known["stored_by"][ids].tolist(), np.where(gone, known["gone_by"][ids], NOWHERE).tolist()
    offloads, onboards = known["offloads"][ids], known["onboards"][ids]
    count = len(ids)
    columns: list[list[Any]] = [
        [window.created.window] * count,
        ids.tolist(),
        [history.tokens_per_block] * count,
        list(map(history.request_id, by)),
        [None if number < 0 else number for number in by],
        known["stored_batch"][ids].tolist(),
        known["stored_at"][ids].tolist(),
        known["priority"][ids].tolist(),
        known["uses"][ids].tolist(),
        known["used_at"][ids].tolist(),
        offloads.tolist(),
        _where(offloads > 0, known["offloaded_at"][ids]),
        onboards.tolist(),
        _where(onboards > 0, known["onboarded_at"][ids]),
        [None if each < 0 else LEVEL_NAMES[each] for each in level.tolist()],
        _where(gone, known["gone_batch"][ids]),
        _where(gone, known["gone_at"][ids]),
        [None if why is None else _LABELS[why] for why in _where(gone, known["why"][ids])],
        list(map(history.request_id, gone_by)),
        [None if number < 0 else number for number in gone_by],
        [eviction] * count,
    ]
    return list(map(BlockLife._make, zip(*columns, strict=True)))


_LABELS = [reason.label for reason in Reason]


def _where(there: Any, values: Any) -> list[int | None]:
    """Return the values where `there` is set, None elsewhere."""
    return [
        value if is_there else None for value, is_there in zip(values.tolist(), there.tolist(), strict=True)
    ]


class Evictions(RowCollector[EvictionRow]):
    """Rows of evictions: one per `BlocksRemoved`."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def removed(self, history: HistoryFold, window: Window, ids: Ids, event: ev.BlocksRemoved) -> None:
        """Add a row."""
        request = None if event.handle is None else history.running.get(event.handle)
        row = EvictionRow(
            eviction=self._count,
            seq=history.batch,
            ts=history.now,
            window=window.created.window,
            level=LEVEL_NAMES[event.level],
            why=str(event.why),
            blocks=len(event.slots) // SLOT_BYTES,
            full_blocks=len(ids),
            never_reused=int((window.of["uses"][ids] == 0).sum()),
            for_request=None if request is None else request.sequence.request_id,
            for_admission=None if request is None else request.number,
        )
        self._count += 1
        self.rows.append(row)


_NOT_COUNTED = ("seq", "ts", "running", "computed_tokens", "occupancy")
_COUNTED = [name for name in StepRow._fields if name not in _NOT_COUNTED]


def step_row(batch: EventBatch, state: CacheState) -> StepRow:
    """Return the row of a batch. Held, free and blank blocks are counted in the state after it."""
    counts = dict.fromkeys(_COUNTED, 0)
    for event in known_events(batch):
        _count(event, counts)
    return StepRow(
        seq=batch.seq,
        ts=batch.ts,
        running=len(state.sequences),
        computed_tokens=counts["prompt_tokens"] - counts["reused_tokens"],
        occupancy=tuple(occupancy(state)),
        **counts,
    )


def _count(event: ev.Event, counts: dict[str, int]) -> None:
    """Add the event's counts."""
    match event:
        case ev.SequenceAdded():
            counts["admitted"] += 1
            counts["prompt_tokens"] += event.num_tokens
            counts["reused_tokens"] += event.reused
        case ev.SequenceRemoved():
            counts["ended"] += 1
        case ev.AdmissionRefused():
            counts["refused"] += 1
        case ev.TokensAppended():
            one_each = len(event.handles) // HANDLE_BYTES
            counts["output_tokens"] += int(unpack_u32(event.counts).sum()) if event.counts else one_each
        case ev.BlocksStored() | ev.BlocksFilled():
            counts["stored_blocks"] += len(event.slots) // SLOT_BYTES
        case ev.BlocksRemoved():
            counts["removed_blocks"] += len(event.slots) // SLOT_BYTES
        case ev.CacheCleared():
            # Blocks held by sequences keep their slots, but are no longer cached.
            counts["cleared_blocks"] += sum(map(sum, event.removed)) + sum(event.unnamed)
        case ev.BlocksMoved(why=MoveReason.OFFLOAD | MoveReason.ONBOARD):
            counts[f"{event.why}ed_blocks"] += len(event.from_slots) // SLOT_BYTES


def occupancy(state: CacheState) -> list[OccupancyRow]:
    """Return the occupancy of each level of each window."""
    windows = () if state.created is None else state.created.groups
    rows = list[OccupancyRow]()
    for created, group in zip(windows, state.groups, strict=True):
        for name, level in zip(LEVEL_NAMES, group.levels, strict=True):
            blank, unreferenced = len(level.blank), level.unreferenced
            if not rows:
                held, idle = shared_slots(state.positional)
                blank, unreferenced = blank - held - idle, unreferenced + idle
            held = level.size - blank - unreferenced
            rows.append(OccupancyRow(created.window, name, level.size, held, unreferenced, blank))
    return rows


TableName = Literal["requests", "blocks", "evictions", "steps"]
_COLLECTORS: dict[TableName, type[RowCollector[Any]]] = {
    "requests": Requests,
    "blocks": Lives,
    "evictions": Evictions,
}


class Log:
    """A log directory. Each iteration, and each call, reads it anew from its first batch to its end.

    Rows are yielded as soon as they are known and are not kept: a request's when it ends, a block's when it is gone,
    the rest at the end of the log. Reading raises `LogDamaged`, `LogTooNew`, and `Unreplayable` where batches do not
    follow from those before them; rows read until then have been yielded.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[EventBatch]:
        """Iterate over the batches; `EventBatch.ts` is the wall clock in ns. `events.packed` unpacks columns."""
        return iter(LogReader(self.path))

    @property
    def log_id(self) -> str | None:
        """The id given to the log by its writer, in hex digits; copies share it. None if the first batch has none."""
        first = next(iter(self), None)
        events = () if first is None else first.events
        return next((event.log_id.hex() for event in events if isinstance(event, EpochStarted)), None)

    def requests(self) -> Iterator[RequestRow]:
        """Yield each admission with its outcome, in the order of their ends, and requests that were only refused."""
        return self._rows("requests")

    def block_lives(self) -> Iterator[BlockLife]:
        """Yield each life of a full block in a window, in the order of their ends."""
        return self._rows("blocks")

    def evictions(self) -> Iterator[EvictionRow]:
        """Yield each removal of cached content, in order."""
        return self._rows("evictions")

    def steps(self) -> Iterator[StepRow]:
        """Yield each batch, with the cache after it."""
        return self._rows("steps")

    def _rows(self, name: TableName) -> Iterator[Any]:
        for _, rows in tables_of(self, name):
            yield from rows


def open_log(path: str | PathLike[str]) -> Log:
    """Open a log for reading; it may still be written to. Raises `NotALog`."""
    directory = Path(path)
    if not is_log(directory):
        raise NotALog(directory)
    return Log(directory)


def tables_of(batches: Iterable[EventBatch], *names: TableName) -> Iterator[tuple[TableName, list[Any]]]:
    """Yield the rows of several tables in one pass, each list with the name of its table."""
    collectors = {name: _COLLECTORS[name]() for name in names if name in _COLLECTORS}
    history = HistoryFold(*collectors.values())
    replayed = history.replayed
    for batch in batches:
        if collectors:
            history.fold(batch)
        else:
            replayed.fold(batch, verify=False)
        yield from ((name, collector.take()) for name, collector in collectors.items() if collector.rows)
        if "steps" in names:
            yield "steps", [step_row(batch, replayed.state)]
    for name, collector in collectors.items():
        for rows in collector.remaining(history):
            yield name, rows
