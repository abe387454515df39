"""Events as human-readable lines: one line per event, counts instead of contents.

A line starts with the event's address (batch seq and index), so that it can be found again in the log::

     12.0  SequenceAdded     #7 request=chat-1 tokens=812 reused=512+64+3
     12.1  BlocksStored      request=chat-1 group=0 primary blocks=2 first=35 1f2e3d4c..9a8b7c6d priority=35

A sequence is named by its request, or by its handle, as in ``#7``, if the stream has not given its request (`Known`).
``reused`` counts tokens found in primary, found in secondary, and copied from a block that matched in part.

SECURITY: no line contains token ids, because lines end up in terminals, tickets and logs. Texts from outside
(request ids, adapter names, reasons) are quoted if they hold anything but plain characters, so that they
cannot forge lines or drive a terminal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from events import types as ev
from events.ids import epoch_of, first_number
from events.packed import (
    CHECKSUM_BYTES,
    COUNT_BYTES,
    HANDLE_BYTES,
    NAME_BYTES,
    SLOT_BYTES,
    TOKEN_BYTES,
    names_of_keys,
    unpack_i64,
    unpack_u32,
)
from events.structs import LEVEL_NAMES
from events.subscribe.workers import name_of
from events.types import PRIMARY, RequestId

MAX_REQUESTS = 1 << 16
"""Limit of known requests, of which the oldest are forgotten: after lost batches, some ends are never seen."""


class StreamNames:
    """Names collected from a stream: see every event, in order, before its line is made."""

    def __init__(self, key_bytes: int = 0) -> None:
        self.key_bytes = key_bytes
        """Key size of the cache (`CacheCreated.key_bytes`)."""
        self.requests: dict[int, RequestId] = {}
        """Ids of the requests that run, or have just ended, by handle; not for encoder inputs: `EncoderAdded` names the
        reader of one, and its branches may read longer."""
        self._ended: int | None = None
        self.workers: dict[int, str] = {}
        """Names of workers, by their numbers in a log of `kvcache tap`."""

    def see(self, event: ev.AnyEvent) -> None:
        """Collect the names in one event."""
        if self._ended is not None:
            # Not at its end: its last line names it as well.
            self.requests.pop(self._ended, None)
            self._ended = None
        if isinstance(event, ev.SequenceAdded):
            self._add(event.handle, event.request_id)
        elif isinstance(event, ev.SequenceForked):
            self._add(event.child, event.request_id)
        elif isinstance(event, ev.SequenceRemoved):
            self._ended = event.handle
        elif isinstance(event, ev.StateExported):
            inputs = {each.encoder for each in event.sequences}
            self.requests = {
                each.handle: each.request_id for each in event.sequences if each.handle not in inputs
            }
        elif isinstance(event, ev.CacheCreated):
            self.key_bytes = event.key_bytes
        elif isinstance(event, ev.WorkerSeen):
            self.workers[event.worker] = name_of(event)

    def _add(self, handle: int, request_id: RequestId) -> None:
        self.requests[handle] = request_id
        if len(self.requests) > MAX_REQUESTS:
            del self.requests[next(iter(self.requests))]


NAME_DIGITS = 8
"""Hex digits shown of a block's name: enough to distinguish blocks by eye, and to search the log for."""
TEXT_LENGTH_MAX = 64
_PLAIN_TEXT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@+-]*")
_TYPE_WIDTH = max(len(kind.__name__) for kind in ev.AnyEvent.__args__)


def render_batch(batch: ev.EventBatch, known: StreamNames) -> Iterator[str]:
    """Yield the lines of a batch, without newlines. All earlier events of the stream were seen by `known`."""
    for index, event in enumerate(batch.events):
        known.see(event)
        address = f"{batch.seq}.{index}"
        yield f"{address:>9}  {render_event(event, known)}"


def render_event(event: ev.AnyEvent, known: StreamNames) -> str:
    """Render one event, which was seen by `known`, without its address."""
    details = _DETAILS.get(type(event), _fields)(event, known)
    return f"{type(event).__name__:<{_TYPE_WIDTH}}  {details}".rstrip()


def _fields(event: ev.AnyEvent, known: StreamNames) -> str:
    """Render an event's fields, one by one."""
    fields = event.__struct_fields__
    said = (phrase(getattr(event, name), known) for name, phrase in _PHRASES.items() if name in fields)
    return " ".join(filter(None, said))


def text(value: object) -> str:
    """Render a text from outside, cut short, and quoted unless it is plain."""
    spelled = str(value)
    if len(spelled) > TEXT_LENGTH_MAX:
        spelled = spelled[: TEXT_LENGTH_MAX - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return spelled if _PLAIN_TEXT.fullmatch(spelled) else ascii(spelled)


def _request_of(handle: int, known: StreamNames) -> str:
    """Render the request, or the handle if the request is not known."""
    request_id = known.requests.get(handle)
    return _handle(handle) if request_id is None else f"request={text(request_id)}"


def _for(handle: int | None, known: StreamNames) -> str:
    return "" if handle is None else f" for {_request_of(handle, known)}"


def _handle(handle: int) -> str:
    """Render a handle, counted from 1 in each epoch; the epoch is shown unless it is the first."""
    epoch = epoch_of(handle)
    return f"#{epoch}.{handle - first_number(epoch) + 1}" if epoch else f"#{handle}"


def _sequences(handles: bytes, known: StreamNames) -> str:
    """Render the only sequence, otherwise their number."""
    unpacked = unpack_i64(handles)
    return _request_of(int(unpacked[0]), known) if len(unpacked) == 1 else f"sequences={len(unpacked)}"


def _transfers(transfers: bytes) -> str:
    """Render all transfer numbers: consecutive ones as 2..9."""
    spans: list[list[int]] = []
    for number in unpack_i64(transfers).tolist():
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    listed = ",".join(str(first) if first == last else f"{first}..{last}" for first, last in spans)
    return f"transfer{'' if listed.isdigit() else 's'}={listed}"


def _blocks(slots: bytes) -> str:
    return f"blocks={_count(slots)}"


def _count(slots: bytes | tuple[bytes, ...]) -> str:
    """Render the number of slots, or the number per group."""
    return _per_group(list(map(_count, slots))) if isinstance(slots, tuple) else str(len(slots) // SLOT_BYTES)


def _levels(counts: Sequence[tuple[int, int]]) -> list[str]:
    return [f"{primary}+{secondary}" for primary, secondary in counts]


def _per_group(values: Sequence[object]) -> str:
    """Render one value, or one per group."""
    return "/".join(map(str, values))


def _names(packed: bytes) -> str:
    """Render the first and the last name of a column."""
    if not packed:
        return ""
    first, last = _name(packed[:NAME_BYTES]), _name(packed[-NAME_BYTES:])
    return f" {first}" if len(packed) <= NAME_BYTES else f" {first}..{last}"


def _names_in(slots: bytes, names: bytes) -> str:
    """Render the names of the blocks in these slots; names of earlier blocks may come first."""
    return _names(names[max(0, len(names) - len(slots) // SLOT_BYTES * NAME_BYTES) :])


def _name(packed: bytes) -> str:
    return packed.hex()[:NAME_DIGITS]


def _namespace(namespace: ev.Namespace) -> str:
    adapter = namespace.lora_id if namespace.lora_name is None else namespace.lora_name
    lora = "" if adapter is None else f" lora={text(adapter)}"
    salt = "" if namespace.salt_digest is None else f" salt={_name(namespace.salt_digest)}"
    return lora + salt + (" extra_ids=yes" if namespace.uses_extra_ids else "")


def _cache_created(e: ev.CacheCreated, known: StreamNames) -> str:
    groups = " ".join(
        f"group{i}({_kind(g)} layers={len(g.layers)} blocks={g.num_blocks[0]}+{g.num_blocks[1]})"
        for i, g in enumerate(e.groups)
    )
    engine = f" engine={text(e.engine)}" if e.engine else ""
    engine += " drops_last_hit=yes" if e.drops_last_hit else ""
    return f"tokens_per_block={e.tokens_per_block} hash={text(e.hash_algorithm)} {groups}{engine}"


def _kind(group: ev.GroupCreated) -> str:
    return "cross" if group.kind == ev.CROSS else f"window={group.window}"


def _epoch_started(e: ev.EpochStarted, known: StreamNames) -> str:
    before = "" if e.previous_epoch is None else f" after={e.previous_epoch} clean={_yes(e.clean)}"
    software = " ".join(map(text, e.software[:TEXT_LENGTH_MAX].split(" ")))
    return f"epoch={e.epoch}{before} tokens_recorded={_yes(e.tokens_recorded)} by {software}"


def _sequence_added(e: ev.SequenceAdded, known: StreamNames) -> str:
    secondary = max(e.reused_secondary, default=0)
    reused = f"{e.reused - e.reused_partial - secondary}+{secondary}+{e.reused_partial}"
    who = f"{_handle(e.handle)} request={text(e.request_id)}"
    again = " resumed=yes" if e.resumed else ""
    outside = f" external={e.reused_external}" if e.reused_external else ""
    again += " lookup=no" if e.lookup is False else ""
    return f"{who} tokens={e.num_tokens} reused={reused}{outside}{again}{_namespace(e.namespace)}{_origin(e)}"


def _origin(e: ev.SequenceAdded) -> str:
    session = "" if e.session is None else f" session={text(e.session)}"
    labels = ",".join([f"{text(name)}:{text(value)}" for name, value in (e.labels or {}).items()])
    return f"{session} labels={labels}" if labels else session


def _blocks_stored(e: ev.BlocksStored, known: StreamNames) -> str:
    names = _names_in(e.slots, names_of_keys(e.keys, known.key_bytes) if e.keys else b"")
    parent = f" after {_name(e.parent)}" if e.parent else ""
    where = f"group={e.group} {_level(e.level)} {_blocks(e.slots)} first={e.first_block}"
    return (
        f"{_request_of(e.handle, known)} {where}{names}{parent} priority={e.priority}{_lasting(e.duration)}"
    )


def _blocks_filled(e: ev.BlocksFilled, known: StreamNames) -> str:
    names = _names(names_of_keys(e.keys, known.key_bytes) if e.keys else b"")
    where = f"group={e.group} {_level(PRIMARY)} {_blocks(e.slots)}"
    if len(e.slots) == len(e.blocks) == SLOT_BYTES:
        where += f" first={int(unpack_u32(e.blocks)[0])}"
        names += f" after {_name(e.parents)}" if e.parents else ""
    return f"{_sequences(e.handles, known)} {where}{names} priority={e.priority}{_lasting(e.duration)}"


def _blocks_updated(e: ev.BlocksUpdated, known: StreamNames) -> str:
    updated = f"group={e.group} {_level(e.level)} {_blocks(e.slots)}{_names(e.names)}"
    why = "" if e.why == ev.UpdateReason.SET else f" why={e.why}"
    duration = "" if e.why == ev.UpdateReason.EXPIRED else _lasting(e.duration)
    return f"{updated} priority={e.old_priority}->{e.priority}{duration}{why}{_for(e.handle, known)}"


def _lasting(duration: int | None) -> str:
    """Render a priority's duration, if limited."""
    return f" for={duration / 1e9:g}s" if duration else ""


def _tokens_appended(e: ev.TokensAppended, known: StreamNames) -> str:
    # Counted from `counts`, because the ids themselves may have been taken out.
    tokens = int(np.sum(unpack_u32(e.counts))) if e.counts else len(e.handles) // HANDLE_BYTES
    return f"{_sequences(e.handles, known)} tokens={tokens}{' draft' * e.draft}"


def _sequence_removed(e: ev.SequenceRemoved, known: StreamNames) -> str:
    kept = f"stored={_per_group(e.stored)} freed={_count(e.freed)}"
    why = "" if e.why == ev.EndReason.FINISHED else f" why={e.why}"
    stop = "" if e.stop is None else f" stop={text(e.stop)}"
    return f"{_request_of(e.handle, known)} tokens={e.num_tokens} computed={e.computed} {kept}{why}{stop}"


def _symbols_interned(e: ev.SymbolsInterned, known: StreamNames) -> str:
    items = list(dict.fromkeys(page.digest for page in e.pages if page.digest is not None))
    named = f" {_name(items[0])}" + (f"..{_name(items[-1])}" if len(items) > 1 else "") if items else ""
    return f"pages={len(e.pages)} items={len(items)}{named}"


def _worker(number: int, known: StreamNames) -> str:
    name = known.workers.get(number)
    return f"worker={number if name is None else text(name)}"


def _block_names(e: ev.FeedStored | ev.FeedRemoved, known: StreamNames) -> str:
    """Render worker, place, count, and the first and the last hash."""
    ends = dict.fromkeys(map(_hash, (e.block_hashes[:1] + e.block_hashes[-1:])))
    where = f"{text(e.medium or 'GPU')} group={e.group_idx or 0} blocks={len(e.block_hashes)}"
    return f"{_worker(e.worker, known)} {where}{' ' * bool(ends)}{'..'.join(ends)}"


def _hash(name: int | bytes) -> str:
    digits = name[-NAME_BYTES:].hex() if isinstance(name, bytes) else f"{name & (1 << 64) - 1:016x}"
    return digits[:NAME_DIGITS]


def _feed_stored(e: ev.FeedStored, known: StreamNames) -> str:
    parent = "" if e.parent_block_hash is None else f" after {_hash(e.parent_block_hash)}"
    adapter = e.lora_id if e.lora_name is None else e.lora_name
    lora = "" if adapter is None else f" lora={text(adapter)}"
    return f"{_block_names(e, known)}{parent} tokens={len(e.tokens) // TOKEN_BYTES}{lora}"


def _ends(numbers: Sequence[int] | Any) -> str:
    """Render the first and the last of some numbers."""
    return "..".join(dict.fromkeys([str(each) for each in (*numbers[:1], *numbers[-1:])]))


def _level(level: int) -> str:
    return LEVEL_NAMES[level] if PRIMARY <= level < len(LEVEL_NAMES) else f"level{level}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


_DETAILS: dict[type, Callable[[Any, StreamNames], str]] = {
    ev.CacheCreated: _cache_created,
    ev.EpochStarted: _epoch_started,
    ev.StateExported: lambda e, known: (
        f"blocks={sum([len(group.slots) for group in e.groups]) // SLOT_BYTES} sequences={len(e.sequences)}"
        f" transfers={len(e.transfers)}"
    ),
    ev.Gap: lambda e, known: f"missing={e.first_seq}..{e.last_seq} reason={text(e.reason)}",
    ev.SequenceAdded: _sequence_added,
    ev.BlocksReused: lambda e, known: (
        f"{_request_of(e.handle, known)} group={e.group} {_level(e.level)} {_blocks(e.slots)}"
        f" first={e.first_block}{_names_in(e.slots, e.names)}"
        + (f" replaced={_count(e.replaced)}" if e.replaced else "")
    ),
    ev.BlocksCopied: lambda e, known: (
        f"{_request_of(e.handle, known)} group={e.group} tokens={e.num_tokens} from {_level(e.source_level)}"
        f" block={e.block} transfer={e.transfer}"
    ),
    ev.BlocksStored: _blocks_stored,
    ev.BlocksFilled: _blocks_filled,
    ev.BlocksUpdated: _blocks_updated,
    ev.BlocksMoved: lambda e, known: (
        f"group={e.group} {_level(e.from_level)}->{_level(e.to_level)} {_blocks(e.from_slots)}{_names(e.names)}"
        f" why={e.why} transfer={e.transfer}{_for(e.handle, known)}"
    ),
    ev.BlocksRemoved: lambda e, known: (
        f"group={e.group} {_level(e.level)} {_blocks(e.slots)}{_names(e.names)} why={e.why}{_for(e.handle, known)}"
    ),
    ev.TokensAppended: _tokens_appended,
    ev.SequenceForked: lambda e, known: (
        f"{_request_of(e.handle, known)} into {_handle(e.child)} request={text(e.request_id)}"
    ),
    ev.SequenceRemoved: _sequence_removed,
    ev.EncoderAdded: lambda e, known: (
        f"{_handle(e.handle)} of {_request_of(e.sequence, known)} group={e.group} tokens={e.num_tokens}"
        f" reused_blocks={e.reused_primary}+{e.reused_secondary}{_namespace(e.namespace)}"
    ),
    ev.TransferLanded: lambda e, known: (
        _transfers(e.transfers) + (f" checksums={len(e.checksums) // CHECKSUM_BYTES}" if e.checksums else "")
    ),
    ev.Checkpoint: lambda e, known: (
        f"{_name(e.fingerprint)} sequences={e.num_sequences} cached={_per_group(_levels(e.num_cached))}"
    ),
    ev.SymbolsInterned: _symbols_interned,
    ev.SymbolsForgotten: lambda e, known: f"pages={len(e.pages) // COUNT_BYTES}",
    ev.PoolShared: lambda e, known: (
        f"groups={len(e.groups)}"
        f" {','.join([f'{text(each.kind)}:{each.tokens_per_block}' for each in e.groups])}"
        f" named={_per_group([len(each.named) // SLOT_BYTES for each in e.groups])}"
        f" held={_per_group([len(each.slots) // SLOT_BYTES for each in e.groups])}"
    ),
    ev.SlotsUnnamed: lambda e, known: (
        f"group={e.group} {_blocks(e.slots)}{_names(names_of_keys(e.keys, known.key_bytes))} why={e.why}"
        f"{_for(e.handle, known)}"
    ),
    ev.WorkerSeen: lambda e, known: (
        f"{_worker(e.worker, known)}{f' topic={text(e.topic)}' if e.topic else ''}"
        f"{'' if e.rank is None else f' rank={e.rank}'} complete={_yes(e.complete)}"
    ),
    ev.FeedReceived: lambda e, known: (
        f"{_worker(e.worker, known)} number={e.number}{' (replayed)' * e.replayed}"
    ),
    ev.FeedStored: _feed_stored,
    ev.FeedRemoved: _block_names,
    ev.FeedGap: lambda e, known: (
        f"{_worker(e.worker, known)} lost={e.first}..{e.last} reason={text(e.reason)}"
    ),
    ev.FeedRestarted: lambda e, known: f"{_worker(e.worker, known)} number={e.first} after={e.last}",
    ev.FeedUnknown: lambda e, known: f"{_worker(e.worker, known)} type={text(e.name)}",
}
"""Renderers of events with fields that are left out, or not in the order of `_PHRASES`."""

_PHRASES: dict[str, Callable[[Any, StreamNames], str]] = {
    "worker": _worker,
    "handle": _request_of,
    "handles": _sequences,
    "request_id": lambda value, known: f"request={text(value)}",
    "pin": lambda value, known: f"pin={value}",
    "transfers": lambda value, known: _transfers(value),
    "group": lambda value, known: f"group={value}",
    "slots": lambda value, known: f"blocks={_count(value)}",
    "keys": lambda value, known: _names(names_of_keys(value, known.key_bytes)).strip(),
    "indices": lambda value, known: f"at={_ends(unpack_u32(value))}",
    "positions": lambda value, known: f"at={_ends(unpack_u32(value))}",
    "num_tokens": lambda value, known: f"tokens={value}",
    "reused": lambda value, known: "reused" * value,
    "freed": lambda value, known: f"freed={_count(value)}",
    "removed": lambda value, known: f"removed={_per_group(_levels(value))}",
    "unnamed": lambda value, known: f"unnamed={_per_group(value)}",
    "needed": lambda value, known: f"needed={_per_group(value)}",
    "available": lambda value, known: f"available={_per_group(value)}",
    "why": lambda value, known: f"why={value}",
    "reason": lambda value, known: f"reason={text(value)}",
    "endpoints": lambda value, known: f"endpoints={','.join(map(text, value))}",
}
"""Renderers of the fields of all other events, in this order; other fields are left out."""
