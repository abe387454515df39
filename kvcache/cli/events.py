"""``kvcache events``: the events of a log, one line each, all or those that concern something."""

from __future__ import annotations

import argparse
import re
import sys
import typing
from array import array
from collections.abc import Callable
from pathlib import Path

import msgspec

from events import types as ev
from events.codec import to_dict
from events.log import LogReader
from events.packed import HANDLE_BYTES, NAME_BYTES
from kvcache.cli.event_lines import event_line
from kvcache.cli.narrowing import filled_rows, part_of_sequences
from kvcache.cli.output import Output
from kvcache.cli.parser import natural
from kvcache.cli.process import nobody_reads
from kvcache.cli.replay import describe_end
from kvcache.errors import UsageError
from sinks.known import Known

TYPES = sorted(kind.__name__ for kind in typing.get_args(ev.AnyEvent))
_BY_LOWER = {name.lower(): name for name in TYPES}
_NAME = re.compile(r"[0-9a-f]{4,64}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.description = "Print the events of a log. With several conditions, events that meet all of them."
    parser.epilog = (
        "An event's address is BATCH.INDEX. Lines for people hold no token ids; --json does. Of an event that "
        "concerns\nseveral sequences, --request shows only its own part; of a BlocksFilled, --block that of the block. "
        "The exit\ncode is 2 if there is no such event."
    )
    add = parser.add_argument
    add("log", type=Path, metavar="LOG", help="a log directory")
    add(
        "--type",
        action="append",
        dest="types",
        metavar="TYPE",
        type=lambda text: _BY_LOWER.get(text.lower(), text),
        choices=TYPES,
        help="only events of this type; may be given several times",
    )
    add(
        "--request",
        metavar="ID",
        help="only what happened to this request, its copies and refusals included "
        "(lines for people leave out the steps that only append a token, unless --type asks for them)",
    )
    add("--block", metavar="NAME", help="only events that name this block: its first hex digits, at least 4")
    add("--since", type=natural, default=0, metavar="SEQ", help="from this batch on (0)")
    add("--follow", action="store_true", help="wait for more at the end, until Ctrl-C")
    add("--no-tokens", action="store_true", help="leave token ids out of the JSON")
    add(
        "--json", action="store_true", help="one JSON object per event and line: seq, index, ts, type, fields"
    )


def run(args: argparse.Namespace, out: Output) -> int:
    """Stream the log through the conditions."""
    known = Known()
    conditions = _conditions(args, known)
    reader = LogReader(args.log, follow=args.follow, stop=_end_with_the_reader)
    printer = _Printer(
        known,
        as_json=args.json,
        tokens=not args.no_tokens,
        narrowing=[each for each in conditions if isinstance(each, OfRequest | NamingBlock)],
    )
    last = -1
    for batch in reader:
        last = batch.seq
        for index, event in enumerate(batch.events):
            known.see(event)
            # All of them see every event: one that comes later may refer to it.
            wanted = [condition(event) for condition in conditions]
            if batch.seq >= args.since and all(wanted):
                printer.print(batch, index, event)
        if args.follow:
            sys.stdout.flush()
    if reader.end.kind == "torn":
        out.note(f"the log is {describe_end(reader.end)}")
    if args.since > max(last, 0):
        ending = f"its last one is {last}" if last >= 0 else "it holds none"
        raise UsageError(f"the log ends before batch {args.since}: {ending}")
    if conditions and not printer.lines:
        whose = "" if args.request is None else f" of request {args.request!r}"
        raise UsageError(f"the log has no such event{whose}")
    return 0


def _end_with_the_reader() -> bool:
    """Asked while there is nothing new: never to stop, unless nobody would see what comes."""
    if nobody_reads(sys.stdout):
        raise BrokenPipeError
    return False


class _Printer:
    """Writes events in the form that was asked for."""

    def __init__(
        self, known: Known, *, as_json: bool, tokens: bool, narrowing: list[OfRequest | NamingBlock]
    ) -> None:
        self._known, self._narrowing = known, narrowing
        self._as_json = as_json
        self._tokens = tokens
        self.lines = 0

    def print(self, batch: ev.EventBatch, index: int, event: ev.AnyEvent) -> None:
        """Write one event, or the part of it that was asked for."""
        for condition in self._narrowing:
            event = condition.part(event)
            if isinstance(event, ev.BlocksFilled) and not event.handles:
                return  # one row is the request's, and another one the block's
        self.lines += 1
        if self._as_json:
            address = {"seq": batch.seq, "index": index, "ts": batch.ts}
            fields = to_dict(event, self._known.key_bytes, self._tokens)
            print(msgspec.json.encode(address | fields).decode())
        else:
            print(event_line(batch, index, event, self._known))


Condition = Callable[[ev.AnyEvent], bool]


def _conditions(args: argparse.Namespace, known: Known) -> list[Condition]:
    """What is asked of each event that `known` has seen; each epoch may have other keys."""
    conditions: list[Condition] = []
    if args.types:
        types = frozenset(args.types)
        conditions.append(lambda event: type(event).__name__ in types)
    if args.request is not None:
        conditions.append(OfRequest(args.request, known))
        if not (args.json or args.types):
            # One line per engine step, and about all requests that ran in it.
            conditions.append(lambda event: not isinstance(event, ev.TokensAppended))
    if args.block is not None:
        name = args.block.lower().removeprefix("0x")
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"--block {args.block}: a block's name is written in hex digits, at least 4 of them"
            )
        conditions.append(NamingBlock(name, known))
    return conditions


class OfRequest:
    """Events of the requests with one id: it may be a number or a text, and come again after its end."""

    def __init__(self, request_id: str, known: Known) -> None:
        self._id, self._known = request_id, known
        self._handles: set[int] = set()
        self._transfers: set[int] = set()

    def __call__(self, event: ev.AnyEvent) -> bool:
        """Whether the event concerns one of them."""
        if isinstance(event, ev.SequenceAdded):
            if str(event.request_id) == self._id:
                self._handles.add(event.handle)
        elif isinstance(event, ev.StateExported):
            # After a gap, this may be the first that is heard of a request.
            ours = [entry.handle for entry in event.sequences if str(entry.request_id) == self._id]
            self._handles.update(ours)
            self._transfers.update(entry.transfer for entry in event.transfers if entry.handle in ours)
            return bool(ours)
        return self._concerns(event)

    def part(self, event: ev.AnyEvent) -> ev.AnyEvent:
        """What the event, which concerns one of them, says of them."""
        return part_of_sequences(event, self._handles, self._transfers, self._known.key_bytes)

    def _concerns(self, event: ev.AnyEvent) -> bool:
        if getattr(event, "handle", None) in self._handles:
            # 0 stands for "nothing is copied" and is no transfer's number.
            if transfer := getattr(event, "transfer", 0):
                self._transfers.add(transfer)
            return True
        if (handles := getattr(event, "handles", None)) is not None:
            return not self._handles.isdisjoint(array("q", handles))
        if (transfers := getattr(event, "transfers", None)) is not None:
            return not self._transfers.isdisjoint(array("q", transfers))
        return isinstance(event, ev.AdmissionRefused) and str(event.request_id) == self._id


class NamingBlock:
    """Events that carry the name of a block, or its key, whose first digits it is."""

    def __init__(self, digits: str, known: Known) -> None:
        self._digits, self._known = digits, known

    def __call__(self, event: ev.AnyEvent) -> bool:
        """Whether the event names the block."""
        if isinstance(event, ev.BlocksStored):
            return self._within(event.keys, self._known.key_bytes) or self._within(event.parent, NAME_BYTES)
        if isinstance(event, ev.BlocksFilled):
            return self._within(event.keys, self._known.key_bytes) or self._within(event.parents, NAME_BYTES)
        if isinstance(event, ev.StateExported):
            return any(self._within(group.keys, self._known.key_bytes) for group in event.groups)
        return self._within(getattr(event, "names", b""), NAME_BYTES)

    def part(self, event: ev.AnyEvent) -> ev.AnyEvent:
        """Of an event of several sequences, which names the block, those that name it as their own or its parent."""
        if not isinstance(event, ev.BlocksFilled):
            return event
        key_bytes = self._known.key_bytes
        rows = [filled_rows(event, [row], key_bytes) for row in range(len(event.handles) // HANDLE_BYTES)]
        return filled_rows(event, [row for row, part in enumerate(rows) if self(part)], key_bytes)

    def _within(self, column: bytes, width: int) -> bool:
        """Whether an entry of the column begins with the digits (of a name, as many as it has)."""
        if not column or not width:
            return False
        digits = self._digits[: 2 * width]
        text, step = column.hex(), 2 * width
        place = text.find(digits)
        while place >= 0:
            if place % step == 0:
                return True
            place = text.find(digits, place + 1)
        return False
