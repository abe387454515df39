"""Multimodal items and extra ids as they come from engines, validated. Errors show no token, extra id or digest."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import index
from typing import Any

import numpy as np

from events.tokens.rich import DIGEST_BYTES, ExtraIds, ItemSpan, RichTokens
from kvcache.errors import InvalidTokens, UsageError
from kvcache.inputs.arguments import checked_integer, checked_text, listed

_LIMIT = 2**64


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """An image, a sound, ... that `length` tokens of a prompt stand for, from the token `position` on.

    `digest` is 32 bytes that no other content has. What follows equal tokens and equal items is shared, so two
    prompts that hold different lengths of one item share its common beginning. `uuid` is a name of the engine's for
    the item; it appears in TensorRT-LLM's dicts instead of the digest, and decides nothing.
    """

    digest: bytes
    position: int
    length: int
    uuid: str | None = None


def rich_tokens(tokens: bytes, multimodal: Any, extra_ids: Any) -> RichTokens | None:
    """A prompt (packed int32) with its items and extra ids; None if it has neither.

    Raises `UsageError`, or `InvalidTokens` for extra ids.
    """
    if extra_ids is None and type(multimodal) is tuple and not multimodal:
        return None  # nearly always
    items = () if multimodal is None else _spans(listed(multimodal, "multimodal"), len(tokens) // 4)
    if not items and extra_ids is None:
        return None
    packed = None if extra_ids is None else _packed(extra_ids, len(tokens) // 4)
    return RichTokens(tokens, packed, items)


def _spans(items: Sequence[Any], num_tokens: int) -> tuple[ItemSpan, ...]:
    spans = [_span(number, item, num_tokens) for number, item in enumerate(items)]
    spans.sort(key=lambda span: span.begin)
    for before, after in pairwise(spans):
        if after.begin < before.end:
            raise UsageError(
                f"two multimodal items overlap at token {after.begin}: each token is of one at most"
            )
    return tuple(spans)


def _span(number: int, item: Any, num_tokens: int) -> ItemSpan:
    what = f"multimodal item {number}"
    if not isinstance(item, MultimodalItem):
        raise UsageError(f"{what} must be a MultimodalItem, not {type(item).__name__}")
    digest: object = item.digest
    if not isinstance(digest, bytes) or len(digest) != DIGEST_BYTES:
        raise UsageError(f"the digest of {what} must be {DIGEST_BYTES} bytes")
    begin = checked_integer(item.position, f"the position of {what}")
    length = checked_integer(item.length, f"the length of {what}")
    if begin < 0 or length < 1 or begin + length > num_tokens:
        raise UsageError(
            f"{what} covers {length} tokens from {begin} on: it must have one at least, "
            f"and end with the prompt's {num_tokens}"
        )
    uuid = None if item.uuid is None else checked_text(item.uuid, f"the uuid of {what}")
    return ItemSpan(begin, begin + length, bytes(digest), 0, uuid)


def _packed(extra_ids: Any, num_tokens: int) -> ExtraIds:
    """The extra ids as uint64."""
    if isinstance(extra_ids, str | bytes | bytearray):
        raise InvalidTokens("text or bytes were given as extra ids: pass integers (a list, array, or tensor)")
    try:
        length = len(extra_ids)
    except Exception:  # noqa: BLE001
        raise InvalidTokens(f"extra ids must be a list of integers, not {type(extra_ids).__name__}") from None
    if length != num_tokens:
        raise InvalidTokens(f"{length} extra ids were given for {num_tokens} tokens: one each is needed")
    if isinstance(extra_ids, list | tuple):
        return _packed_list(extra_ids)
    return _packed_buffer(extra_ids)


def _packed_list(extra_ids: Sequence[Any]) -> ExtraIds:
    try:
        # Packed, True would be 1.
        packed = array("Q", extra_ids) if bool not in map(type, extra_ids) else None
    except Exception:  # noqa: BLE001  whatever an item's __index__ raised may quote it
        packed = None
    if packed is None:
        raise InvalidTokens("an extra id must be an integer from 0 to 2**64 - 1", _first_wrong(extra_ids))
    return np.frombuffer(packed, np.uint64)


def _first_wrong(extra_ids: Sequence[Any]) -> int | None:
    for position, extra_id in enumerate(extra_ids):
        try:
            fits = 0 <= index(extra_id) < _LIMIT and type(extra_id) is not bool
        except Exception:  # noqa: BLE001
            fits = False
        if not fits:
            return position
    return None


def _packed_buffer(extra_ids: Any) -> ExtraIds:
    try:
        values = np.asarray(extra_ids)
    except Exception:  # noqa: BLE001
        raise InvalidTokens(f"{type(extra_ids).__name__} cannot be read as an array of integers") from None
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise InvalidTokens(
            f"extra ids must be one row of integers, not {values.ndim} dimensions of {values.dtype}"
        )
    if values.size and int(values.min()) < 0:
        raise InvalidTokens("an extra id must not be negative", int((values < 0).argmax()))
    return values.astype(np.uint64)
