"""``kvcache subscribe``: what a publisher of KV events in vLLM's wire format says, live."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from events.codec import json_line
from events.formats.vllm import BlockRemoved, BlockStored, Hash, Unknown, VLLMEvent
from events.subscribe.continuity import Received, Report
from events.subscribe.index import GPU, HOST, STORAGE, Index
from kvcache.cli import native_lines, watching
from kvcache.cli.hearing import Heard, heard, listen
from kvcache.cli.listening import IN_TOPIC, add_connection_options
from kvcache.cli.output import Output, count, paint
from kvcache.cli.parser import positive
from kvcache.cli.process import StopSignals
from kvcache.cli.subscribed_lines import interruption, json_interruption
from sinks.render import NAME_DIGITS, text

if TYPE_CHECKING:
    from events.subscribe.gathering import Worker

_LAST_SECOND = 1e9 * 9
"""In the year 2255: in nanoseconds, later times do not fit into 64 bits."""
_COLORS = {"BlockStored": "green", "BlockRemoved": "red", "AllBlocksCleared": "red"}
_ENVELOPE = ("seq", "index", "ts", "rank", "topic", "replayed")
"""What every JSON line begins with; null where a line is about no batch."""
_TYPE_WIDTH = max(map(len, _COLORS))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.description = (
        "Print what a publisher of KV events in vLLM's wire format says, until Ctrl-C: stores and removals of\n"
        "blocks, and batches that were missed. Batches without events (heartbeats) are only counted.\n"
        "With --table, and of several publishers: a table of workers instead, renewed all the time."
    )
    parser.epilog = (
        "An event's address is BATCH.INDEX. Lines for people hold no token ids; --json does. \n"
        "`kvcache docs json` has what Missed, Restated and Restarted say, and the keys of the table;\n"
        "`kvcache docs wire` what its columns mean."
    )
    add = parser.add_argument
    add(
        "endpoint",
        nargs="+",
        metavar="ENDPOINT",
        help="where one publishes, as tcp://127.0.0.1:5557, or 'tcp://127.0.0.1:5557?replay=5558' with its replay; "
        "where many connect, as tcp://*:5557; or, alone, a broker's stream, as nats://127.0.0.1:4222/kvcache",
    )
    add(
        "--replay",
        metavar="ENDPOINT",
        help="its replay socket, or the port alone: begin with all that it can still tell, and ask for what is missed; "
        f"of many, {IN_TOPIC}: the sockets that their topics name",
    )
    add(
        "--topic",
        default="",
        metavar="TOPIC",
        help="only topics that begin with this (replayed batches without any topic are shown, too)",
    )
    add_connection_options(parser)
    add(
        "--format",
        choices=["router", "native"],
        default="router",
        help="router: stores and removals, in any format that routers read; native: all events of a cache, of one "
        "ENDPOINT with format=native",
    )
    add("--count", type=positive, metavar="N", help="end after N batches with events")
    add(
        "--json",
        action="store_true",
        help="one JSON object per event and line: seq, index, ts, rank, topic, replayed, type and its fields; of lines "
        "about missed batches, a state told anew and a restart those before type are null. Of a table, one per report",
    )
    watching.add_options(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    """Print reports until there were enough, or a signal comes."""
    watching.check(args)
    if args.format == "native":
        native_lines.refuse_table(args)
    with StopSignals() as stop, listen(args) as listening:
        if args.format == "native":
            native_lines.print_events(listening, stop, args, out)
        elif watching.wanted(args):
            watching.watch(listening, heard(listening, stop, args, out), args, out)
        else:
            _print_events(heard(listening, stop, args, out), args, out)
    return stop.exit_code


def _print_events(reports: Iterator[Heard | None], args: argparse.Namespace, out: Output) -> None:
    indexes: dict[Worker | None, Index] = {}
    lines = _json_lines if args.json else _lines
    for each in reports:
        if each is None:
            continue
        (_, worker), report = each
        indexes.setdefault(worker, Index()).fold(report)
        for line in lines(report, worker):
            print(line, flush=True)
    for worker, index in indexes.items():
        out.note(_summary(index) if worker is None else f"{text(worker.topic)}: {_summary(index)}")
    if not indexes:
        out.note(_summary(Index()))


def _lines(report: Report, worker: Worker | None) -> Iterator[str]:
    """For people."""
    said_by = [] if worker is None else [f"from={text(worker.topic)}"]
    if not isinstance(report, Received):
        yield paint(" ".join([f"{'':>9}  {interruption(report)}", *said_by]), "yellow")
        return
    replayed = [*said_by, *["(replayed)"] * report.replayed]
    for number, event in enumerate(report.batch.events):
        kind, address = type(event).__name__, f"{report.seq}.{number}"
        name = paint(f"{kind:<{_TYPE_WIDTH}}", _COLORS.get(kind))
        details = " ".join([*_details(event), *replayed])
        yield f"{paint(f'{address:>9}', 'dim')}  {name}  {details}".rstrip()


def _details(event: VLLMEvent) -> list[str]:
    if isinstance(event, Unknown):
        return [f"type={text(event.name)}"]
    if not isinstance(event, BlockStored | BlockRemoved):
        return []
    words = [] if event.medium is None else [text(event.medium)]
    words += [
        f"group={event.group_idx or 0}",
        f"blocks={len(event.block_hashes)}",
        *_names(event.block_hashes),
    ]
    if isinstance(event, BlockStored):
        if event.parent_block_hash is not None:
            words.append(f"after {_name(event.parent_block_hash)}")
        words.append(f"tokens={len(event.token_ids)}")
        adapter = event.lora_id if event.lora_name is None else event.lora_name
        if adapter is not None:
            words.append(f"lora={text(adapter)}")
    return words


def _names(hashes: tuple[Hash, ...]) -> list[str]:
    return ["..".join(map(_name, dict.fromkeys((hashes[0], hashes[-1]))))] if hashes else []


def _name(name: Hash) -> str:
    return _hex(name)[:NAME_DIGITS]


def _hex(name: Hash) -> str:
    """16 digits. Of a whole digest the last 8 bytes, which are what its publisher would send as a number."""
    return name[-8:].hex() if isinstance(name, bytes) else f"{name & 0xFFFF_FFFF_FFFF_FFFF:016x}"


def _json_lines(report: Report, worker: Worker | None) -> Iterator[str]:
    """For programs; hashes in hex digits, since many read numbers as floats."""
    if not isinstance(report, Received):
        envelope = dict.fromkeys(_ENVELOPE) | ({} if worker is None else {"topic": worker.topic})
        yield _json({**envelope, **json_interruption(report)})
        return
    envelope = {"ts": _nanoseconds(report.batch.ts), "rank": report.batch.rank, "topic": report.topic}
    for number, event in enumerate(report.batch.events):
        address = {"seq": report.seq, "index": number, **envelope, "replayed": report.replayed}
        yield _json({**address, "type": type(event).__name__, **_fields(event)})


def _nanoseconds(seconds: float) -> int | None:
    """The wire's time as all our JSON has it; None for one that nobody can mean."""
    return round(seconds * 1e9) if abs(seconds) < _LAST_SECOND else None


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
    """Bytes in rows of rows as hex digits; they are nowhere deeper."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple | list) and depth:
        return [_hexed(each, depth - 1) for each in value]
    return value


def _json(value: Any) -> str:
    return json_line(value, enc_hook=lambda item: type(item).__name__).decode()


def _summary(index: Index) -> str:
    """What was heard, and what is resident now as far as it was told."""
    blocks = f"{count(index.count(GPU), 'block')} on GPU, {index.count(HOST):,} in host memory"
    if index.count(STORAGE):
        blocks += f", {index.count(STORAGE):,} in storage"
    parts = [f"{count(index.batches, 'batch', 'batches')}, {count(index.events, 'event')}", blocks]
    if index.recovered_batches:
        parts.append(f"{index.recovered_batches:,} missed and got by replay")
    if index.restated:
        parts.append(f"the state was told {count(index.restated, 'time')}")
    parts.append(f"{count(index.missed_batches, 'batch', 'batches')} lost")
    if index.restarts:
        parts.append(count(index.restarts, "restart"))
    return "; ".join(parts)
