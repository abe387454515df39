"""Lines about received batches: routers' events, and all events of a cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from events.codec import json_line, to_dict
from events.formats.vllm import BlockRemoved, BlockStored, Hash, Unknown, VLLMEvent
from events.subscribe.continuity import Missed, Received, ReceivedBatch, Restarted, Restated
from events.subscribe.index import GPU, HOST, STORAGE, Index
from kvcache.cli.events import event_lines
from kvcache.cli.output import paint, stamp
from kvcache.phrases import count
from sinks.render import NAME_DIGITS, StreamNames, text

if TYPE_CHECKING:
    from events.subscribe.fan_in import Worker

_LAST_SECOND = 1e9 * 9
"""Last valid time in seconds, in the year 2255: later times in nanoseconds exceed 64 bits."""
_COLORS = {"BlockStored": "green", "BlockRemoved": "red", "AllBlocksCleared": "red"}
_TYPE_WIDTH = max(map(len, _COLORS))


class RouterLines:
    """Stores and removals of blocks, in any format that routers read."""

    def __init__(self) -> None:
        self._indexes: dict[Worker | None, Index] = {}

    def text(self, report: Any, worker: Worker | None) -> Iterator[str]:
        """Yield lines for people."""
        self._indexes.setdefault(worker, Index()).fold(report)
        said_by = [] if worker is None else [f"from={text(worker.topic)}"]
        if not isinstance(report, Received):
            yield _interruption(report, said_by)
            return
        replayed = [*said_by, *["(replayed)"] * report.replayed]
        for number, event in enumerate(report.batch.events):
            kind, address = type(event).__name__, f"{report.seq}.{number}"
            name = paint(f"{kind:<{_TYPE_WIDTH}}", _COLORS.get(kind))
            details = " ".join([*_details(event), *replayed])
            yield f"{paint(f'{address:>9}', 'dim')}  {name}  {details}".rstrip()

    def json(self, report: Any, worker: Worker | None) -> Iterator[str]:
        """Yield lines for programs; hashes are in hex digits, since many readers parse numbers as floats."""
        self._indexes.setdefault(worker, Index()).fold(report)
        if not isinstance(report, Received):
            yield _json_interruption(report, worker, "seq", "index", "ts", "rank", "topic", "replayed")
            return
        ts = report.batch.ts
        nanoseconds = round(ts * 1e9) if abs(ts) < _LAST_SECOND else None  # None: an invalid time
        envelope = {"ts": nanoseconds, "rank": report.batch.rank, "topic": report.topic}
        for number, event in enumerate(report.batch.events):
            address = {"seq": report.seq, "index": number, **envelope, "replayed": report.replayed}
            yield _json({**address, "type": type(event).__name__, **_fields(event)})

    def summary(self) -> Iterator[str]:
        """Yield what was received, and which blocks are resident now."""
        for worker, index in (self._indexes or {None: Index()}).items():
            yield _summary(index) if worker is None else f"{text(worker.topic)}: {_summary(index)}"


class NativeLines:
    """All events of caches, as `kvcache events` shows those of a log."""

    def __init__(self) -> None:
        self._known: dict[Worker | None, StreamNames] = {}
        self._batches = self._events = 0

    def text(self, report: Any, worker: Worker | None) -> Iterator[str]:
        """Yield lines for people."""
        said_by = [] if worker is None else [f"from={text(worker.topic)}"]
        if not isinstance(report, ReceivedBatch):
            yield _interruption(report, said_by)
            return
        for line in event_lines(report.batch, self._take(report, worker)):
            yield " ".join([line, *said_by])

    def json(self, report: Any, worker: Worker | None) -> Iterator[str]:
        """Yield lines for programs."""
        if not isinstance(report, ReceivedBatch):
            names = ("seq", "index", "ts", "time", "message", "topic", "replayed")
            yield _json_interruption(report, worker, *names)
            return
        batch, known = report.batch, self._take(report, worker)
        for index, event in enumerate(batch.events):
            known.see(event)
            of = {"message": report.seq, "topic": report.topic, "replayed": report.replayed}
            address = {"seq": batch.seq, "index": index} | stamp(batch.seq, batch.ts)
            yield _json({**address, **of, **to_dict(event, known.key_bytes)})

    def summary(self) -> Iterator[str]:
        """Yield what was received."""
        yield f"{count(self._batches, 'batch')}, {count(self._events, 'event')}"

    def _take(self, report: ReceivedBatch, worker: Worker | None) -> StreamNames:
        self._batches, self._events = self._batches + 1, self._events + len(report.batch.events)
        return self._known.setdefault(worker, StreamNames())


def _interruption(report: Missed | Restated | Restarted, said_by: list[str]) -> str:
    """Format an interruption of a stream for people."""
    if isinstance(report, Restated):
        # Without the number in between: numbers that follow the clock may jump by millions.
        numbers = f"{report.first - 1} to {report.last + 1}"
        what = f"the publisher resends its whole state; its sequence numbers continue from {numbers}"
    elif isinstance(report, Restarted):
        what = f"the publisher restarted: batch {report.first} came after {report.last}"
    else:
        span = f"{report.first}" if report.first == report.last else f"{report.first}-{report.last}"
        fate = "recovered by replay, above" if report.recovered else f"lost: {report.reason}"
        what = f"missed {count(report.last - report.first + 1, 'batch')} ({span}), {fate}"
    return paint(" ".join([f"{'':>9}  {what}", *said_by]), "yellow")


def _json_interruption(report: Missed | Restated | Restarted, worker: Worker | None, *names: str) -> str:
    """Format an interruption for programs; `names` are null, except for the topic of one of many workers."""
    fields = msgspec.structs.asdict(report)
    span = {"first_seq": fields.pop("first"), "last_seq": fields.pop("last")}
    said_by = {} if worker is None else {"topic": worker.topic}
    return _json({**dict.fromkeys(names), **said_by, "type": type(report).__name__, **span, **fields})


def _details(event: VLLMEvent) -> list[str]:
    if isinstance(event, Unknown):
        return [f"type={text(event.name)}"]
    if not isinstance(event, BlockStored | BlockRemoved):
        return []
    ends = dict.fromkeys((event.block_hashes[0], event.block_hashes[-1])) if event.block_hashes else ()
    words = [
        *([] if event.medium is None else [text(event.medium)]),
        f"group={event.group_idx or 0}",
        f"blocks={len(event.block_hashes)}",
        *(["..".join(_hex(name)[:NAME_DIGITS] for name in ends)] if ends else []),
    ]
    if isinstance(event, BlockStored):
        if event.parent_block_hash is not None:
            words.append(f"after {_hex(event.parent_block_hash)[:NAME_DIGITS]}")
        words.append(f"tokens={len(event.token_ids)}")
        adapter = event.lora_id if event.lora_name is None else event.lora_name
        if adapter is not None:
            words.append(f"lora={text(adapter)}")
    return words


def _hex(name: Hash) -> str:
    """Format a name as 16 digits: of a whole digest the last 8 bytes, which its publisher would send as a number."""
    return name[-8:].hex() if isinstance(name, bytes) else f"{name & 0xFFFF_FFFF_FFFF_FFFF:016x}"


def _fields(event: VLLMEvent) -> dict[str, Any]:
    fields = msgspec.structs.asdict(event)
    fields.pop("more", None)
    if "block_hashes" in fields:
        fields["block_hashes"] = [_hex(name) for name in fields["block_hashes"]]
    if fields.get("parent_block_hash") is not None:
        fields["parent_block_hash"] = _hex(fields["parent_block_hash"])
    if fields.get("extra_keys") is not None:
        fields["extra_keys"] = _hexed(fields["extra_keys"])
    return fields


def _hexed(value: Any, depth: int = 3) -> Any:
    """Replace bytes in nested rows by hex digits; they are no deeper than that."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple | list) and depth:
        return [_hexed(each, depth - 1) for each in value]
    return value


def _json(value: Any) -> str:
    return json_line(value, enc_hook=lambda item: type(item).__name__).decode()


def _summary(index: Index) -> str:
    blocks = f"{count(index.count(GPU), 'block')} on GPU, {index.count(HOST):,} in host memory"
    if index.count(STORAGE):
        blocks += f", {index.count(STORAGE):,} in storage"
    parts = [f"{count(index.batches, 'batch')}, {count(index.events, 'event')}", blocks]
    if index.recovered_batches:
        parts.append(f"{index.recovered_batches:,} missed and recovered by replay")
    if index.restated:
        parts.append(count(index.restated, "resync"))
    parts.append(f"{count(index.missed_batches, 'batch')} lost")
    if index.restarts:
        parts.append(count(index.restarts, "restart"))
    return "; ".join(parts)
