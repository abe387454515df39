"""KV events as SGLang writes them.

A batch is ``[ts, [event, ...], rank]``, events are maps. Hashes are signed, host memory is ``CPU_PINNED``, salts have a
key of their own, and what is None is left out. Nothing is said beside the tokens: those of an image are replaced by a
number that its hash determines, as SGLang does itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from events.feed.changes import AnyChange, Removed, Stored, Told
from events.formats.vllm_arrays import token_ids
from events.formats.vllm_encode import Salts, adapter_name, told_salt, with_salts
from events.packed import unpack_names
from events.types import CROSS, GroupCreated

_ALWAYS = ("parent_block_hash", "lora_id")
SGLANG_MEDIA = ("GPU", "CPU_PINNED")
"""By level."""
_pack = msgspec.msgpack.encode


def encode_sglang(
    changes: Sequence[AnyChange],
    ts: float,
    rank: int = 0,
    groups: Sequence[GroupCreated] = (),
    *,
    salts: Salts | None = None,
) -> bytes:
    """One batch of SGLang's maps; the arguments are those of `vllm.encode_batch`."""
    events: list[dict[str, Any]] = []
    crosses = {index for index, group in enumerate(groups) if group.kind == CROSS}
    for change in with_salts(changes, salts):
        if isinstance(change, Stored | Removed) and change.group in crosses:
            continue  # its readers would take it for prompts
        if isinstance(change, Stored):
            events.append(_stored_map(change))
        elif isinstance(change, Removed):
            events.append(
                {
                    "type": "BlockRemoved",
                    "block_hashes": _signed(change.names),
                    "medium": SGLANG_MEDIA[change.level],
                }
            )
        elif isinstance(change, Told):
            told = _with_signed_hashes(msgspec.msgpack.decode(change.encoded))
            events.append({key: value for key, value in told.items() if value is not None or key in _ALWAYS})
        else:
            events.append({"type": "AllBlocksCleared"})
    return _pack([ts, events, rank])


def _stored_map(stored: Stored) -> dict[str, Any]:
    event = {
        "type": "BlockStored",
        "block_hashes": _signed(stored.names),
        "parent_block_hash": _signed(stored.parent)[0] if stored.parent else None,
        "token_ids": token_ids(stored.padded or stored.tokens),
        "block_size": stored.tokens_per_block,
        "lora_id": None,
        "medium": SGLANG_MEDIA[stored.level],
    }
    more = {"lora_name": adapter_name(stored.namespace), "cache_salt": told_salt(stored.namespace)}
    return event | {key: value for key, value in more.items() if value is not None}


def _with_signed_hashes(told: dict[str, Any]) -> dict[str, Any]:
    """What an engine told, with 64-bit hashes as SGLang's readers take them; whole digests stay."""
    told["block_hashes"] = list(map(_as_signed, told["block_hashes"]))
    if "parent_block_hash" in told:
        told["parent_block_hash"] = _as_signed(told["parent_block_hash"])
    return told


def _as_signed(value: Any) -> Any:
    return value - 2**64 if isinstance(value, int) and value >= 2**63 else value


def _signed(names: bytes) -> list[int]:
    numbers: list[int] = unpack_names(names).view(">i8").tolist()
    return numbers
