"""What the sinks that feed routers have in common: options of their URLs, the form of batches, whose feed it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple, Protocol

import msgspec

from events.feed.changes import AnyChange, Batched, EncodedEvent, Stored
from events.feed.fold import Feed
from events.formats.native import Encoding, NativeCodec, codec_of
from events.formats.vllm import ARRAY_OVERHEAD, ENCODERS, Encode, Join, Salts, join_batches
from events.subscribe.workers import WorkerFeed
from events.types import EventBatch, GroupCreated
from sinks.base import SinkContext, SinkURL, SinkURLError
from sinks.router.feed import FeedTransport, RouterFeed
from sinks.router.native import NativeFeed
from sinks.router.numbers import FeedNumbers, clock_number

WireFormat = Literal["vllm", "sglang", "native"]
Style = Literal["map", "array"]


class Form(NamedTuple):
    """What writes a batch."""

    encode: Encode = ENCODERS["vllm"]
    overhead: int = 1
    """Up to so many times the bytes that are reckoned for a batch."""
    join: Join = join_batches
    """Makes one payload of several."""
    is_cut: bool = False
    """Whether a payload may be cut anywhere, where one is too large for a broker."""


INT32 = 2**31 - 1
"""More than any socket, and any rank, can be given."""


class FeedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of all sinks that feed routers."""

    format: WireFormat = "vllm"
    style: Style = "map"
    encoding: Encoding = "msgpack"
    tokens: bool | None = None
    engine: str | None = None
    rank: Annotated[int, msgspec.Meta(ge=0, le=INT32)] = 0
    salts: Literal["digest", "plain"] = "digest"
    coalesce: str = "50ms"
    max_batch: str = "1MiB"
    heartbeat: str = "1s"
    state: str | None = None
    first: Annotated[int, msgspec.Meta(ge=0, le=2**62)] | None = None
    insecure: bool = False


_NOT_NATIVE = ("style", "engine", "salts", "coalesce", "pad")
"""Options about what other formats have."""


def tells_tokens(options: FeedOptions) -> bool:
    """Whether token ids are told: routers find blocks by them, others need not know them."""
    return options.format != "native" if options.tokens is None else options.tokens


def form_of(url: SinkURL, options: FeedOptions, context: SinkContext) -> Form:
    """What writes the batches. Raises SinkURLError."""
    if options.format == "native":
        return _native(url, options, context)
    if "encoding" in url.options:
        raise SinkURLError(str(url), "encoding= is about format=native: leave it out")
    form = _named(url, options)
    return form if tells_tokens(options) else form._replace(encode=_WithoutTokens(form.encode))


def _native(url: SinkURL, options: FeedOptions, context: SinkContext) -> Form:
    for name in _NOT_NATIVE:
        if name in url.options:
            raise SinkURLError(
                str(url),
                f"{name}= is about other formats: format=native tells batches as they are, leave it out",
            )
    codec = codec_of(options.encoding, context.key_bytes)
    return Form(_Batches(codec), join=lambda payloads, rank: codec.join(payloads), is_cut=True)


def _named(url: SinkURL, options: FeedOptions) -> Form:
    if options.style == "array":
        if options.format != "vllm":
            raise SinkURLError(str(url), "style=array is a form of format=vllm: SGLang writes maps only")
        return Form(ENCODERS["vllm-array"], ARRAY_OVERHEAD)
    return Form(ENCODERS["sglang" if options.format == "sglang" else "vllm"])


class _Batches:
    """Writes the only batch that is told."""

    def __init__(self, codec: NativeCodec) -> None:
        self._codec = codec

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
        told = [change.batch for change in changes if isinstance(change, Batched)]
        return self._codec.encode(told[0] if told else EventBatch(-1, int(ts * 1e9), ()))


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
        return msgspec.structs.replace(change, tokens=b"", padded=b"")
    if isinstance(change, EncodedEvent):
        event = msgspec.msgpack.decode(change.encoded)
        if "token_ids" in event:
            return EncodedEvent(msgspec.msgpack.encode(event | {"token_ids": []}))
    return change


MAPS = Form()
"""vLLM's maps: what is written where nothing else is asked for."""


class OpensAs(FeedTransport, Protocol):
    """A transport that takes the topic and the rank of an engine where its settings have none."""

    def speak_as(self, topic: str, rank: int) -> None:
        """Take them, before `open`."""


def make_feed(
    url: SinkURL,
    options: FeedOptions,
    context: SinkContext,
    transport: OpensAs,
    numbers_file: str | None,
    *,
    first: int | None = None,
) -> RouterFeed:
    """Return the sink that feeds this transport; raises SinkURLError.

    - `numbers_file`: by default the feed's numbers are kept there, in the context's `state_dir`; None: in memory.
    - `first`: where numbers begin if neither a file nor the URL says so; None: with the clock.
    """
    coalesce, max_batch, heartbeat = [
        url.quantity(options, name) for name in ("coalesce", "max_batch", "heartbeat")
    ]
    path = None
    if options.state is not None:
        path = url.file_path(options.state) if options.state else None
    elif context.state_dir is not None and numbers_file is not None:
        path = context.state_dir / numbers_file
    begin = options.first if options.first is not None else clock_number() if first is None else first
    numbers = FeedNumbers(path, first=begin)
    if options.format == "native":
        return NativeFeed(
            transport, numbers, context, tokens=tells_tokens(options), heartbeat_seconds=heartbeat
        )
    return RouterFeed(
        transport,
        numbers,
        coalesce_seconds=coalesce,
        max_batch_bytes=int(max_batch / form_of(url, options, context).overhead),
        heartbeat_seconds=heartbeat,
        feed=_fold(url, options.engine, context),
        opens_as=transport.speak_as,
    )


def _fold(url: SinkURL, engine: str | None, context: SinkContext) -> Feed | WorkerFeed:
    if context.kind == "feed":
        return WorkerFeed(engine)
    if context.kind == "cache" and engine is not None:
        reason = "engine= chooses one of the engines in a log of `kvcache tap`, but this is of one cache: leave it out"
        raise SinkURLError(str(url), reason)
    return Feed()
