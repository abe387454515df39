"""Filters of events (by type, request, sequence or block name), which narrow an event to its matching parts."""

from __future__ import annotations

import argparse
import re
import typing
from array import array
from collections.abc import Callable, Container, Iterable
from functools import partial
from itertools import accumulate

from msgspec.structs import replace

from events import types as ev
from events.ids import MAX_EPOCH, MAX_NUMBER, PER_EPOCH, first_number
from events.packed import HANDLE_BYTES, NAME_BYTES, SLOT_BYTES, TOKEN_BYTES
from kvcache.cli.options import option
from kvcache.errors import UsageError
from sinks.render import StreamNames

TYPES = sorted(kind.__name__ for kind in typing.get_args(ev.AnyEvent))
_BY_LOWER = {name.lower(): name for name in TYPES}
_NAME = re.compile(r"[0-9a-f]{4,64}")
_HANDLE = re.compile(r"#?(?:(\d{1,7})\.)?(\d{1,19})", re.ASCII)
_INDEX_BYTES = 4
_TRANSFER_BYTES = 8
Condition = Callable[[ev.AnyEvent], bool]


def add_filters(parser: argparse.ArgumentParser) -> None:
    """Declare the filters."""
    add = partial(option, parser)
    add(
        "--type TYPE",
        "only events of this type; repeatable",
        action="append",
        dest="types",
        type=lambda text: _BY_LOWER.get(text.lower(), text),
        choices=TYPES,
    )
    add(
        "--request ID",
        "only events of this request, including its copies and refusals (text lines omit TokensAppended unless --type "
        "selects it)",
    )
    add("--session ID", "only events of the requests of this session, likewise")
    add(
        "--handle N",
        "only events of this sequence, likewise: 18, or #2.170 (the 170th of epoch 2) as printed in lines",
        type=_handle,
    )
    add(
        "--block NAME",
        "only events that name this block, by the first hex digits of its name, at least 4. With several windows only "
        "the first one's events name blocks, and events of windows that release blocks do not: use --request for those",
    )


def _handle(text: str) -> int:
    """Parse a handle, as a number or in the form of lines for people."""
    match = _HANDLE.fullmatch(text)
    epoch, number = (int(match[1] or 0), int(match[2])) if match else (0, 0)
    if not 0 < number <= MAX_NUMBER or epoch > MAX_EPOCH or (match and match[1] and number >= PER_EPOCH):
        raise argparse.ArgumentTypeError(f"{text!r} is not a handle: give a number, or EPOCH.NUMBER")
    return first_number(epoch) + number - 1


def conditions_of(args: argparse.Namespace, known: StreamNames) -> list[Condition]:
    """Return the conditions on each event that `known` has seen; each epoch may have other keys. Raises UsageError."""
    conditions: list[Condition] = []
    if args.types:
        types = frozenset(args.types)
        conditions.append(lambda event: type(event).__name__ in types)
    if args.request is not None:
        conditions.append(OfSequences(known, request_id=args.request))
    if args.session is not None:
        conditions.append(OfSequences(known, session=args.session))
    if args.handle is not None:
        conditions.append(OfSequences(known, handle=args.handle))
    if conditions and not (args.json or args.types):
        # One line per engine step, and about all requests that ran in it.
        conditions.append(lambda event: not isinstance(event, ev.TokensAppended))
    if args.block is not None:
        name = args.block.lower().removeprefix("0x")
        if not _NAME.fullmatch(name):
            raise UsageError(f"--block {args.block}: give at least 4 hex digits of the block's name")
        conditions.append(NamingBlock(name, known))
    return conditions


class OfSequences:
    """Events of one sequence, of one session's requests, or of those with one id (number or text), which may recur."""

    def __init__(
        self,
        known: StreamNames,
        *,
        request_id: str | None = None,
        session: str | None = None,
        handle: int | None = None,
    ) -> None:
        self._id, self._session, self._known = request_id, session, known
        self._handles = set() if handle is None else {handle}
        self._transfers: set[int] = set()

    def __call__(self, event: ev.AnyEvent) -> bool:
        """Return True if the event concerns one of them."""
        if isinstance(event, ev.SequenceAdded):
            same = self._session is not None and event.session == self._session
            if same or str(event.request_id) == self._id:
                self._handles.add(event.handle)
        elif isinstance(event, ev.SequenceForked):
            same = self._session is not None and event.handle in self._handles
            if same or str(event.request_id) == self._id or event.child in self._handles:
                self._handles.add(event.child)
                return True
        elif isinstance(event, ev.EncoderAdded):
            if event.sequence in self._handles:
                self._handles.add(event.handle)
        elif isinstance(event, ev.StateExported):
            # After a gap, this may be the first event of a request.
            named = [entry.handle for entry in event.sequences if str(entry.request_id) == self._id]
            self._handles.update(named)
            ours = [entry.handle for entry in event.sequences if entry.handle in self._handles]
            self._transfers.update(entry.transfer for entry in event.transfers if entry.handle in ours)
            return bool(ours)
        return self._concerns(event)

    def part(self, event: ev.AnyEvent) -> ev.AnyEvent:
        """Return the part of a matching event that concerns them."""
        return _part_of_sequences(event, self._handles, self._transfers, self._known.key_bytes)

    def _concerns(self, event: ev.AnyEvent) -> bool:
        if getattr(event, "handle", None) in self._handles:
            # 0 means "nothing is copied" and is no transfer's number.
            if transfer := getattr(event, "transfer", 0):
                self._transfers.add(transfer)
            return True
        if (handles := getattr(event, "handles", None)) is not None:
            return not self._handles.isdisjoint(array("q", handles))
        if (transfers := getattr(event, "transfers", None)) is not None:
            return not self._transfers.isdisjoint(array("q", transfers))
        return isinstance(event, ev.AdmissionRefused | ev.HitDeferred) and str(event.request_id) == self._id


class NamingBlock:
    """Events with the name of a block, or its key, that begins with the given digits."""

    def __init__(self, digits: str, known: StreamNames) -> None:
        self._digits, self._known = digits, known

    def __call__(self, event: ev.AnyEvent) -> bool:
        """Return True if the event names the block."""
        key_bytes = self._known.key_bytes
        if isinstance(event, ev.StateExported | ev.PoolShared):
            return any(self._within(group.keys, key_bytes) for group in event.groups)
        if isinstance(event, ev.FeedStored | ev.FeedRemoved):
            hashes = (*event.block_hashes, getattr(event, "parent_block_hash", None))
            return any(self._within(_packed(each), NAME_BYTES) for each in hashes if each is not None)
        columns = {"keys": key_bytes, "names": NAME_BYTES, "parent": NAME_BYTES, "parents": NAME_BYTES}
        return any(self._within(getattr(event, name, b""), width) for name, width in columns.items())

    def part(self, event: ev.AnyEvent) -> ev.AnyEvent:
        """Return the sequences of a matching event that have the block as their own or its parent."""
        if not isinstance(event, ev.BlocksFilled):
            return event
        key_bytes = self._known.key_bytes
        rows = [_filled_rows(event, [row], key_bytes) for row in range(len(event.handles) // HANDLE_BYTES)]
        return _filled_rows(event, [row for row, part in enumerate(rows) if self(part)], key_bytes)

    def _within(self, column: bytes, width: int) -> bool:
        """Return True if an entry of the column begins with the digits (up to the length of a name)."""
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


def _packed(name: int | bytes) -> bytes:
    """Format an engine's hash like a name."""
    return (
        name[-NAME_BYTES:] if isinstance(name, bytes) else (name & (1 << 64) - 1).to_bytes(NAME_BYTES, "big")
    )


def _part_of_sequences(
    event: ev.AnyEvent, handles: Container[int], transfers: Container[int], key_bytes: int
) -> ev.AnyEvent:
    """Return the part of the event about these sequences and these copies of theirs.

    The cached blocks of an exported state stay: they belong to no sequence.
    """
    match event:
        case ev.BlocksFilled():
            return _filled_rows(event, _chosen("q", event.handles, handles), key_bytes)
        case ev.BlocksAllocated() | ev.BlocksReturned():
            own, counts, slots = _counted(event.handles, event.counts, event.slots, handles)
            return replace(event, handles=own, counts=counts, slots=slots)
        case ev.BlocksDetached():
            own, counts, slots = _counted(event.handles, event.counts, event.slots, handles)
            freed = array("i", [slot for slot in array("i", event.freed) if slot in array("i", slots)])
            return replace(event, handles=own, counts=counts, slots=slots, freed=freed.tobytes())
        case ev.TokensAppended():
            own, counts, tokens = _counted(event.handles, event.counts, event.tokens, handles)
            return replace(event, handles=own, counts=counts, tokens=tokens)
        case ev.TransferLanded() | ev.TransferFailed():
            rows = _chosen("q", event.transfers, transfers)
            return replace(event, transfers=_cut(event.transfers, _TRANSFER_BYTES, rows))
        case ev.StateExported():
            return replace(
                event,
                sequences=tuple(each for each in event.sequences if each.handle in handles),
                transfers=tuple(each for each in event.transfers if each.handle in handles),
            )
    return event


def _filled_rows(event: ev.BlocksFilled, rows: list[int], key_bytes: int) -> ev.BlocksFilled:
    """Return the event with only these of its rows."""
    return ev.BlocksFilled(
        handles=_cut(event.handles, HANDLE_BYTES, rows),
        group=event.group,
        blocks=_cut(event.blocks, _INDEX_BYTES, rows),
        parents=_cut(event.parents, NAME_BYTES, rows),
        keys=_cut(event.keys, key_bytes, rows),
        slots=_cut(event.slots, SLOT_BYTES, rows),
        priority=event.priority,
    )


def _chosen(kind: str, column: bytes, wanted: Container[int]) -> list[int]:
    """Return the rows with a wanted entry in a column of numbers."""
    return [row for row, entry in enumerate(array(kind, column)) if entry in wanted]


def _cut(column: bytes, width: int, rows: Iterable[int]) -> bytes:
    return b"".join(column[row * width : (row + 1) * width] for row in rows)


def _counted(
    handles: bytes, counts: bytes, column: bytes, wanted: Container[int]
) -> tuple[bytes, bytes, bytes]:
    """Filter handles, counts and a column of slots or tokens: `counts` per handle, or one each without counts."""
    rows = _chosen("q", handles, wanted)
    if not counts:
        return _cut(handles, HANDLE_BYTES, rows), b"", _cut(column, TOKEN_BYTES, rows)
    ends = list(accumulate(array("I", counts), initial=0))
    parts = [column[ends[row] * TOKEN_BYTES : ends[row + 1] * TOKEN_BYTES] for row in rows]
    return _cut(handles, HANDLE_BYTES, rows), _cut(counts, _INDEX_BYTES, rows), b"".join(parts)
