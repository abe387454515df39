"""In which format a feed writes its batches, as its URL says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from events.feed.changes import AnyChange, Stored, Told
from events.formats.vllm_encode import Salts
from events.formats.wires import ARRAY_OVERHEAD, ENCODERS, Encode
from events.types import GroupCreated
from sinks.base import SinkURL, SinkURLError

WireFormat = Literal["vllm", "sglang"]
Style = Literal["map", "array"]


class Form(NamedTuple):
    """What writes a batch."""

    encode: Encode = ENCODERS["vllm"]
    overhead: int = 1
    """Up to so many times the bytes that are reckoned for a batch."""


class FormOptions(Protocol):
    """The options by which a URL chooses."""

    @property
    def format(self) -> WireFormat:
        """Whose events they look like."""

    @property
    def style(self) -> Style:
        """Maps, or arrays."""

    @property
    def tokens(self) -> bool:
        """Whether token ids are told."""


def form_of(url: SinkURL, options: FormOptions) -> Form:
    """What writes the batches. Raises SinkURLError."""
    form = _named(url, options)
    return form if options.tokens else form._replace(encode=_WithoutTokens(form.encode))


def _named(url: SinkURL, options: FormOptions) -> Form:
    if options.style == "array":
        if options.format != "vllm":
            raise SinkURLError(str(url), "style=array is a form of format=vllm: SGLang writes maps only")
        return Form(ENCODERS["vllm-array"], ARRAY_OVERHEAD)
    return Form(ENCODERS[options.format])


class _WithoutTokens:
    """Writes no token ids: blocks are known by their names alone."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode

    def __call__(
        self,
        changes: Sequence[AnyChange],
        ts: float,
        rank: int = 0,
        groups: Sequence[GroupCreated] = (),
        *,
        salts: Salts | None = None,
    ) -> bytes:
        """As `Encode` says."""
        return self._encode([_without_tokens(each) for each in changes], ts, rank, groups, salts=salts)


def _without_tokens(change: AnyChange) -> AnyChange:
    if isinstance(change, Stored):
        return msgspec.structs.replace(change, tokens=b"")
    if isinstance(change, Told):
        event = msgspec.msgpack.decode(change.encoded)
        if "token_ids" in event:
            return Told(msgspec.msgpack.encode(event | {"token_ids": []}))
    return change


MAPS = Form()
"""vLLM's maps: what is written where nothing else is asked for."""
