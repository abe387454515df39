"""Common parts of the sinks that feed routers: options of their URLs, the form of batches, the worker."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import msgspec

from events.feed.changes import AnyChange, Batched, EncodedEvent, Stored
from events.feed.fold import Feed
from events.formats import vllm
from events.formats.native import NativeCodec
from events.subscribe.workers import WorkerFeed
from events.types import EventBatch, GroupCreated, WorkerSeen
from sinks.base import SinkContext, SinkURL
from sinks.router.feed import FeedTransport, RouterFeed
from sinks.router.native import NativeFeed
from sinks.router.numbers import FeedNumbers

WireFormat = Literal["vllm", "vllm-array", "sglang", "native", "native-json"]
_ENCODERS: dict[str, vllm.Encode] = {
    "vllm": vllm.encode_batch,
    "vllm-array": vllm.encode_arrays,
    "sglang": vllm.encode_sglang,
}
INT32 = 2**31 - 1
"""Largest value accepted for a socket option or a rank."""


class FeedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of all sinks that feed routers."""

    format: WireFormat = "vllm"
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

    @property
    def is_native(self) -> bool:
        """True if batches of events are published as they are."""
        return self.format in ("native", "native-json")

    @property
    def has_tokens(self) -> bool:
        """True if token ids are published: routers find blocks by them, other readers do not need them."""
        return not self.is_native if self.tokens is None else self.tokens


_NOT_NATIVE = ("engine", "salts", "coalesce", "pad")
"""Options specific to other formats."""


@dataclass(frozen=True)
class PayloadWriter:
    """The writer of one feed's batches in its format."""

    encoder: vllm.Encode = vllm.encode_batch
    joiner: vllm.Join = vllm.join_batches
    overhead: int = 1
    """Factor by which payloads may exceed the estimated size of a batch."""
    is_cut: bool = False
    """True if a payload that is too large for a broker may be cut anywhere."""
    rank: int = 0
    salts: vllm.Salts | None = None
    """Finds a cache salt by its digest, to publish it in clear; None: all are published as digests."""
    holds: str = "token ids"
    """Description of the secrets in the payloads."""

    def for_worker(self, worker: WorkerSeen | None) -> PayloadWriter:
        """Return the same with the rank of another engine's worker, if no rank was set."""
        return self if self.rank or worker is None else replace(self, rank=worker.rank or 0)

    def encode(self, changes: Sequence[AnyChange], ts: float, groups: Sequence[GroupCreated]) -> bytes:
        """Encode a batch as a payload."""
        return self.encoder(vllm.with_salts(changes, self.salts), ts, self.rank, groups)

    def join(self, payloads: Sequence[bytes]) -> bytes:
        """Join several payloads into one with all their events, and the time of the last one."""
        return self.joiner(payloads, self.rank)


def writer_of(url: SinkURL, options: FeedOptions, context: SinkContext) -> PayloadWriter:
    """Make the writer of the batches. Raises SinkURLError."""
    if options.is_native:
        for name in _NOT_NATIVE:
            if name in url.options:
                reason = "does not apply to format=native, which publishes batches unchanged: omit it"
                raise url.error(f"{name}= {reason}")
        codec = NativeCodec("json" if options.format == "native-json" else "msgpack", context.key_bytes)
        encode, join = _encode_native(codec), lambda payloads, rank: codec.join(payloads)
    else:
        encode, join = _ENCODERS[options.format], vllm.join_batches
        if not options.has_tokens:
            encode = _encode_without_tokens(encode)
    salts = context.salts.ask() if options.salts == "plain" else None
    secrets = {"token ids": options.has_tokens, "cache salts": salts is not None}
    return PayloadWriter(
        encode,
        join,
        overhead=vllm.ARRAY_OVERHEAD if options.format == "vllm-array" else 1,
        is_cut=options.is_native,
        rank=options.rank,
        salts=salts,
        holds=", ".join(name for name, is_held in secrets.items() if is_held) or "block names",
    )


def _encode_native(codec: NativeCodec) -> vllm.Encode:
    """Make an encoder of the only batch among the changes."""

    def encode(changes: Sequence[AnyChange], ts: float, rank: int, groups: Sequence[GroupCreated]) -> bytes:
        batches = [change.batch for change in changes if isinstance(change, Batched)]
        return codec.encode(batches[0] if batches else EventBatch(-1, int(ts * 1e9), ()))

    return encode


def _encode_without_tokens(encode: vllm.Encode) -> vllm.Encode:
    """Make an encoder without token ids: blocks are known by their names alone."""
    return lambda changes, *rest: encode([_without_tokens(each) for each in changes], *rest)


def _without_tokens(change: AnyChange) -> AnyChange:
    if isinstance(change, Stored):
        return msgspec.structs.replace(change, tokens=b"", padded=b"")
    if isinstance(change, EncodedEvent):
        event = msgspec.msgpack.decode(change.encoded)
        if "token_ids" in event:
            return EncodedEvent(msgspec.msgpack.encode(event | {"token_ids": []}))
    return change


def make_feed(
    url: SinkURL,
    options: FeedOptions,
    context: SinkContext,
    transport: FeedTransport,
    numbers_file: str | None,
    *,
    overhead: int = 1,
    first: int | None = None,
) -> RouterFeed:
    """Return the sink that feeds this transport; raises SinkURLError.

    - `numbers_file`: by default the feed's numbers are kept there, in the context's `state_dir`; None: in memory.
    - `overhead`: the transport's writer's.
    - `first`: first number if neither a file nor the URL has one; None: from the clock.
    """
    coalesce, max_batch, heartbeat = [
        url.quantity(options, name) for name in ("coalesce", "max_batch", "heartbeat")
    ]
    path = None
    if options.state is not None:
        path = url.file_path(options.state) if options.state else None
    elif context.state_dir is not None and numbers_file is not None:
        path = context.state_dir / numbers_file
    microseconds = time.time_ns() // 1000
    begin = next(each for each in (options.first, first, microseconds) if each is not None)
    numbers = FeedNumbers(path, first=begin)
    if options.is_native:
        tokens = options.has_tokens
        return NativeFeed(transport, numbers, context, tokens=tokens, heartbeat_seconds=heartbeat)
    return RouterFeed(
        transport,
        numbers,
        coalesce_seconds=coalesce,
        max_batch_bytes=int(max_batch / overhead),
        heartbeat_seconds=heartbeat,
        feed=_fold(url, options.engine, context),
    )


def _fold(url: SinkURL, engine: str | None, context: SinkContext) -> Feed | WorkerFeed:
    if context.kind == "feed":
        return WorkerFeed(engine)
    if context.kind == "cache" and engine is not None:
        raise url.error(
            "engine= selects an engine in a log of `kvcache tap`, but this is the log of a cache: omit it"
        )
    return Feed()
