"""Between the wire of vLLM's KV events, and SGLang's and older forms of it, and the events of a log of kind `feed`.

Nothing is lost on the way there and back but the order of a map's keys, and whether what is nothing is left out or nil.
"""

from __future__ import annotations

from array import array
from typing import Any, cast

import msgspec

from events.formats.vllm_decode import AllBlocksCleared, BlockRemoved, BlockStored, Unknown, VLLMEvent
from events.types import (
    FeedCleared,
    FeedRemoved,
    FeedStored,
    FeedUnknown,
)

AnyTold = FeedStored | FeedRemoved | FeedCleared | FeedUnknown
_pack = msgspec.msgpack.encode
_unpack = msgspec.msgpack.decode
_IN_MORE = (
    "extra_keys",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "session_id",
    "lookahead_token_ids",
    "cache_salt",
)
CLEARED = _pack({"type": "AllBlocksCleared"})


def from_wire(worker: int, event: VLLMEvent) -> AnyTold:
    """What a worker told, as an event of the log."""
    if isinstance(event, BlockStored):
        return _stored(worker, event)
    if isinstance(event, BlockRemoved):
        return FeedRemoved(
            worker=worker,
            block_hashes=event.block_hashes,
            medium=event.medium,
            group_idx=event.group_idx,
            locality=event.locality,
            ownership=event.ownership,
            more=_pack(event.more) if event.more else b"",
        )
    if isinstance(event, Unknown):
        return FeedUnknown(worker=worker, name=event.name)
    assert isinstance(event, AllBlocksCleared)
    return FeedCleared(worker)


def _stored(worker: int, event: BlockStored) -> FeedStored:
    more = {name: value for name in _IN_MORE if (value := getattr(event, name)) is not None}
    try:
        tokens = array("i", cast("tuple[int, ...]", event.token_ids)).tobytes()
    except (TypeError, OverflowError):
        tokens = b""
        more["token_ids"] = event.token_ids
    if event.more:
        more = event.more | more
    return FeedStored(
        worker=worker,
        block_hashes=event.block_hashes,
        parent_block_hash=event.parent_block_hash,
        tokens=tokens,
        block_size=event.block_size,
        medium=event.medium,
        group_idx=event.group_idx,
        lora_id=event.lora_id,
        lora_name=event.lora_name,
        locality=event.locality,
        ownership=event.ownership,
        more=_pack(more) if more else b"",
    )


def to_wire(event: FeedStored | FeedRemoved) -> bytes:
    """The event as one of vLLM's maps, in msgpack: all fields that vLLM always has, and others that have a value."""
    fields: dict[str, Any] = {"block_hashes": event.block_hashes}
    if isinstance(event, FeedStored):
        fields |= {
            "parent_block_hash": event.parent_block_hash,
            "token_ids": array("i", event.tokens).tolist(),
            "block_size": event.block_size,
            "lora_id": event.lora_id,
            "medium": event.medium,
            "lora_name": event.lora_name,
        }
    else:
        fields["medium"] = event.medium
    for name in ("group_idx", "locality", "ownership"):
        if (value := getattr(event, name)) is not None:
            fields[name] = value
    more = _unpack(event.more) if event.more else {}
    return _pack({"type": f"Block{type(event).__name__.removeprefix('Feed')}", **fields, **more})
