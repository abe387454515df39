"""TensorRT-LLM's event dicts, as its `get_kv_cache_events` returns them, written and read.

One dict per event: ``{"event_id", "data": {"type": "created" | "stored" | "updated" | "removed", ...}, "window_size",
"hash_algo"}``, and ``"attention_dp_rank"`` if there is one. That format has no sequences, allocations or landings,
has no "cleared" (its readers ignore unknown events), and repeats the tokens in every stored block. So `EventDicts`
keeps track of a reader's blocks, and removes them by name.

It reads the dicts of the older manager, of the newer one, and its own. Unknown fields and types are ignored; anything
else that does not fit is refused, and its text is not repeated: it may hold a user's prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from events.codec import json_line
from events.errors import EventDecodeError
from events.feed.changes import AnyChange, Cached, Cleared, Created, Uncached, Updated
from events.formats.vllm import Hash, adapter_name
from events.packed import TOKEN_BYTES, unpack_i32, unpack_names
from events.tokens.rich import RichTokens

Data = dict[str, Any]


def _stored(cached: Cached) -> Data:
    """Return the data of blocks that became reusable.

    An adapter without a name is named by its number, since routers identify adapters by their names only.
    """
    namespace, size, tokens = cached.namespace, cached.tokens_per_block, cached.spelled
    items = tokens.items_by_block(size)
    salt = namespace.salt_digest.hex() if namespace.salt_digest is not None else None
    adapter = {"lora_id": namespace.lora_id} if namespace.lora_id is not None else {}
    blocks = [
        {
            "type": "stored_block",
            "block_hash": block_hash,
            "tokens": _unique_tokens(tokens, index * size, (index + 1) * size),
            "cache_level": cached.level,
            "priority": cached.priority,
            "mm_keys": [
                {"type": "mm_key", "hash": item.uuid or item.digest.hex(), "start_offset": item.offset}
                for item in items[index]
            ],
            "cache_salt": salt,
            **adapter,
        }
        for index, block_hash in enumerate(unpack_names(cached.names).tolist())
    ]
    parent = int.from_bytes(cached.parent, "big") if cached.parent else None
    return {
        "type": "stored",
        "parent_hash": parent,
        "blocks": blocks,
        "lora_id": namespace.lora_id,
        "lora_name": adapter_name(namespace),
    }


def _unique_tokens(tokens: RichTokens, begin: int, end: int) -> list[Data]:
    ids = unpack_i32(tokens.tokens[begin * TOKEN_BYTES : end * TOKEN_BYTES]).tolist()
    return [
        {"type": "unique_token", "token_id": token, "token_extra_id": extra_id}
        for token, extra_id in zip(ids, tokens.extra_ids_at(begin, end).tolist(), strict=True)
    ]


PIECE_BYTES = 1 << 16


class EventDicts:
    """Makes dicts from the changes of an inventory (`events.feed.inventory`), and keeps track of readers' blocks."""

    def __init__(self, piece_bytes: int = PIECE_BYTES) -> None:
        self._piece_bytes = piece_bytes
        self._next_id = 0
        self._envelopes: list[Data] = []
        """Per group: the fields around the data of its dicts."""
        self._known: list[set[int]] = []
        """Per group: names that readers consider cached."""
        self._unsure: list[tuple[int, list[int]]] = []
        """Removed in dicts that may not be sent yet: readers may still consider them cached."""

    def dicts(self, changes: Iterable[AnyChange]) -> Iterator[Data]:
        """Yield the dicts of changes; call `settle` when readers have received them."""
        for envelope, data in _merged(item for change in changes for item in self._data(change)):
            number, self._next_id = self._next_id, self._next_id + 1
            yield {"event_id": number, "data": data, **envelope}

    def lines(self, changes: Iterable[AnyChange]) -> Iterator[bytes]:
        """Yield each dict as a line of JSON, in pieces of about `piece_bytes`.

        Taking the next piece confirms that those before are sent. Lost lines leave a hole in the numbers, as in that
        engine.
        """
        for group, names in self._unsure:
            # Anything left here was removed the last time in dicts that were not sent.
            if group < len(self._known):
                self._known[group].update(names)
        self.settle()
        lines: list[bytes] = []
        size = 0
        for each in self.dicts(changes):
            lines.append(json_line(each) + b"\n")
            size += len(lines[-1])
            if size >= self._piece_bytes:
                yield b"".join(lines)
                lines, size = [], 0
        if lines:
            yield b"".join(lines)
        self.settle()

    def settle(self) -> None:
        """Confirm that readers have received all dicts made."""
        self._unsure.clear()

    def _data(self, change: AnyChange) -> Iterator[tuple[Data, Data]]:
        """Yield each dict as the fields around its data, and the data."""
        if isinstance(change, Cached):
            self._known[change.group].update(unpack_names(change.names).tolist())
            yield self._envelopes[change.group], _stored(change)
        elif isinstance(change, Updated):
            level, priority = _diff(change.level), _diff(change.priority)
            for name in unpack_names(change.names).tolist():
                data = {"type": "updated", "block_hash": name, "cache_level": level, "priority": priority}
                yield self._envelopes[change.group], data
        elif isinstance(change, Uncached):
            yield self._removed(change.group, unpack_names(change.names).tolist())
        elif isinstance(change, Created):
            # Earlier blocks, if any, were cleared.
            rank = {} if change.rank is None else {"attention_dp_rank": change.rank}
            self._envelopes = [
                {"window_size": group.window, "hash_algo": change.hash_algorithm, **rank}
                for group in change.groups
            ]
            self._known = [set() for _ in change.groups]
            for group, envelope in zip(change.groups, self._envelopes, strict=True):
                yield envelope, {"type": "created", "num_blocks_per_cache_level": list(group.num_blocks)}
        else:
            assert isinstance(change, Cleared)
            for index, known in enumerate(self._known):
                if known:
                    yield self._removed(index, sorted(known))

    def _removed(self, group: int, names: list[int]) -> tuple[Data, Data]:
        self._known[group].difference_update(names)
        self._unsure.append((group, names))
        return self._envelopes[group], {"type": "removed", "block_hashes": [*names]}


def _diff(values: tuple[int, int] | None) -> Data | None:
    return None if values is None else {"type": "event_diff", "new_value": values[1], "old_value": values[0]}


def _merged(items: Iterable[tuple[Data, Data]]) -> Iterator[tuple[Data, Data]]:
    """Yield consecutive removals of a group as one, as readers expect."""
    last: tuple[Data, Data] | None = None
    for envelope, data in items:
        if last is None:
            last = envelope, data
        elif envelope is last[0] and data["type"] == last[1]["type"] == "removed":
            last[1]["block_hashes"] += data["block_hashes"]
        else:
            yield last
            last = envelope, data
    if last is not None:
        yield last


class Token(msgspec.Struct, frozen=True, gc=False):
    """A token; in place of an item's, the newer manager has a digest."""

    token_id: int | str
    token_extra_id: int = 0


class Item(msgspec.Struct, frozen=True, gc=False):
    """An item in a block, and the item's offset at its part in the block."""

    hash: str
    start_offset: int = 0


class StoredBlock(msgspec.Struct, frozen=True):
    """A block, or the beginning of one."""

    block_hash: int | str
    tokens: tuple[Token, ...]
    cache_level: int = 0
    mm_keys: tuple[Item, ...] = ()
    cache_salt: str | None = None


class StoredDict(msgspec.Struct, frozen=True):
    """Blocks in a row."""

    blocks: tuple[StoredBlock, ...]
    parent_hash: int | str | None = None
    lora_id: int | None = None
    lora_name: str | None = None


class Difference(msgspec.Struct, frozen=True, gc=False):
    """A value, and the previous one."""

    new_value: int
    old_value: int


class UpdatedDict(msgspec.Struct, frozen=True):
    """A block changed its level or its priority."""

    block_hash: int | str
    cache_level: Difference | None = None


class RemovedDict(msgspec.Struct, frozen=True):
    """Blocks were removed."""

    block_hashes: tuple[int | str, ...]


class CreatedDict(msgspec.Struct, frozen=True):
    """The cache of a window was created."""


DictData = StoredDict | UpdatedDict | RemovedDict | CreatedDict
_TYPES: dict[str, type[DictData]] = {
    "stored": StoredDict,
    "updated": UpdatedDict,
    "removed": RemovedDict,
    "created": CreatedDict,
}


class _DictEnvelope(msgspec.Struct, frozen=True):
    event_id: int
    data: dict[str, Any]
    window_size: int = 0
    attention_dp_rank: int | None = None
    layer_group_id: int | None = None


class DictEvent(msgspec.Struct, frozen=True):
    """One dict."""

    number: int
    data: DictData | None
    """Data of the event; None if its type is unknown."""
    window: int
    rank: int | None
    group: int | None
    """The layer group, if given."""


_decode = msgspec.json.Decoder(_DictEnvelope | None).decode


def decode_line(line: bytes) -> DictEvent | None:
    """Decode the event of a line; None if it holds none (``{}`` or ``null``). Raises EventDecodeError."""
    if line.strip() == b"{}":
        return None
    try:
        envelope = _decode(line)
        if envelope is None:
            return None
        kind = _TYPES.get(envelope.data.get("type", ""))
        data = None if kind is None else msgspec.convert(envelope.data, kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError):
        raise EventDecodeError("the line is not a TensorRT-LLM event") from None
    return DictEvent(
        envelope.event_id, data, envelope.window_size, envelope.attention_dp_rank, envelope.layer_group_id
    )


def hash_of(name: int | str) -> Hash:
    """Return a block's hash; digests are written in hex. Raises EventDecodeError."""
    if isinstance(name, int):
        return name
    try:
        return bytes.fromhex(name)
    except ValueError:
        raise EventDecodeError("a block's hash is neither a number nor hex digits") from None
