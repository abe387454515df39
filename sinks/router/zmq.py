"""``zmq+pub://127.0.0.1:5557?replay=5558`` feeds routers that speak vLLM's KV event protocol.

Each batch is one message of three frames (topic, number, payload) to whoever subscribes. Who connects, late or again,
is first told "cleared" and the whole state, alone, in one batch under the last number (`sinks.router.publisher`). A
subscriber that falls behind by more than `hwm` messages misses some; with ``replay=PORT`` it can ask for them there
(`sinks.router.replay_server`), whatever it missed.

Options:

- ``format``: what payloads look like; ``vllm``.
- ``replay``: port on the same host where missed batches are answered. Without it nobody can ask.
- ``topic``: by default ``kv@HOST:PORT@MODEL``, the form in which llm-d finds pod and model. Bound to all interfaces,
  HOST is this machine's address in its network.
- ``model``: for the topic; by default that of the cache, else ``unknown``.
- ``rank``: data-parallel rank, in each payload.
- ``salts``: how a prompt's cache salt is told: ``digest``, its SHA-256 in hex, or ``plain``, as the request gave it,
  which is what NVIDIA Dynamo looks for. A salt is a secret that keeps tenants apart: who knows one can find out, by how
  long requests take, what was asked under it. So ``plain`` is for ports that routers alone can reach. A salt that no
  request has used since the process began (a resumed state), that is longer than 128 bytes, or that was used before
  the last 65,536 others, goes out as its digest all the same.
- ``coalesce``, ``max_batch``, ``heartbeat``: see `sinks.router.feed.RouterFeed`; as in ``50ms``, ``1MiB``, ``1s``.
- ``ring``: memory for batches kept as they were sent. What is older is answered from the state.
- ``pad``: ``true`` for readers that want every number from the one they ask for, as llm-d does: empty batches fill up.
- ``hwm``: messages that wait per subscriber before it loses some.
- ``state``: file for the numbers (`sinks.router.numbers`); by default ``feed-HOST-PORT.numbers`` in the context's
  `state_dir`. ``state=`` without a path, port 0, and a context without `state_dir` mean: in memory.
- ``first``: the number to begin with where no file knows better; by default the clock's, so that routers which followed
  an earlier feed hear this one; with ``pad`` 0.
- ``linger``: how long closing waits for subscribers to take what was sent.

Port 0 takes any free one. The payloads hold token ids, that is the users' prompts: without a host the sockets are
bound to loopback, and anything wider is warned of, since nothing on the wire is encrypted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from events.units import parse_bytes, parse_seconds
from sinks.base import SinkContext, SinkURL, SinkURLError
from sinks.router.feed import RouterFeed
from sinks.router.numbers import FeedNumbers, clock_number
from sinks.router.transport import INT32, ZMQSettings, ZMQTransport

MAX_CHUNK_BYTES = 8 << 20


class ZMQOptions(msgspec.Struct, frozen=True):
    """Options of the URL."""

    format: Literal["vllm"] = "vllm"
    replay: int | None = None
    topic: str | None = None
    model: str | None = None
    rank: Annotated[int, msgspec.Meta(le=INT32)] = 0
    salts: Literal["digest", "plain"] = "digest"
    coalesce: str = "50ms"
    max_batch: str = "1MiB"
    ring: str = "64MiB"
    pad: bool = False
    heartbeat: str = "1s"
    hwm: Annotated[int, msgspec.Meta(le=INT32)] = 1000
    state: str | None = None
    first: Annotated[int, msgspec.Meta(le=2**62)] | None = None
    linger: str = "1s"


def create(url: SinkURL, context: SinkContext) -> RouterFeed:
    """The sink for a ``zmq+pub:`` URL; its only transport is a `ZMQTransport`."""
    options = url.read_options(ZMQOptions)
    settings = _settings(url, options, context)
    pace = {name: _quantity(url, options, name) for name in ("coalesce", "max_batch", "heartbeat")}
    _refuse_idle(url, options)
    return RouterFeed(
        ZMQTransport(settings),
        FeedNumbers(_state_path(url, options, settings.host, context), first=_first_number(options)),
        coalesce_seconds=pace["coalesce"],
        max_batch_bytes=int(pace["max_batch"]),
        heartbeat_seconds=pace["heartbeat"],
    )


def _settings(url: SinkURL, options: ZMQOptions, context: SinkContext) -> ZMQSettings:
    url.refuse_login(
        "the feed asks nobody who he is, so a user and a password protect nothing: leave them out, "
        "and let only those reach the port who may read prompts"
    )
    if url.path not in ("", "/"):
        raise SinkURLError(str(url), "it takes no path; use zmq+pub://127.0.0.1:5557")
    if url.port is None:
        raise SinkURLError(str(url), "a port is needed, as in zmq+pub://127.0.0.1:5557")
    for name, value, low in (("rank", options.rank, 0), ("hwm", options.hwm, 1), ("first", options.first, 0)):
        if value is not None and value < low:
            raise SinkURLError(str(url), f"bad option: {name} must be at least {low}")
    if options.replay is not None and not 0 <= options.replay < 1 << 16:
        raise SinkURLError(str(url), "bad option: replay must be a port")
    if options.replay is not None and options.replay == url.port != 0:
        reason = f"port {url.port} cannot be both its own and the replay's: name another in replay= (0: any)"
        raise SinkURLError(str(url), reason)
    model = options.model or context.model or "unknown"
    if options.topic is None and "@" in model:
        reason = "routers cut the topic kv@HOST:PORT@MODEL at each @, so the model must have none: add model= or topic="
        raise SinkURLError(str(url), reason)
    host = url.host or "127.0.0.1"
    return ZMQSettings(
        host="127.0.0.1" if host == "localhost" else host,
        port=url.port,
        replay_port=options.replay,
        topic=options.topic,
        model=model,
        rank=options.rank,
        ring_bytes=int(_quantity(url, options, "ring")),
        chunk_bytes=min(int(_quantity(url, options, "max_batch")), MAX_CHUNK_BYTES),
        pad=options.pad,
        hwm=options.hwm,
        linger_seconds=_quantity(url, options, "linger"),
        salts=context.salts.ask() if options.salts == "plain" else None,
    )


def _refuse_idle(url: SinkURL, options: ZMQOptions) -> None:
    """Refuse an option that another one, or its absence, makes useless: whoever gave it expects something."""
    if options.topic is not None and options.model is not None:
        reason = "model= is a part of the topic that topic= replaces: leave one of them out"
        raise SinkURLError(str(url), reason)
    for name in ("ring", "pad"):
        if name in url.options and options.replay is None:
            raise SinkURLError(str(url), f"{name}= is about answers on the port replay=, which is not given")


def _quantity(url: SinkURL, options: ZMQOptions, name: str) -> float:
    parse = parse_bytes if name in ("max_batch", "ring") else parse_seconds
    try:
        return parse(getattr(options, name))
    except ValueError as error:
        raise SinkURLError(str(url), f"bad option: {name}={error}") from None


def _state_path(url: SinkURL, options: ZMQOptions, host: str, context: SinkContext) -> Path | None:
    if options.state is not None:
        return url.file_path(options.state) if options.state else None
    if context.state_dir is None or not url.port:
        return None
    plain = "".join(char if char.isalnum() or char in ".-" else "_" for char in host)
    return context.state_dir / f"feed-{plain}-{url.port}.numbers"


def _first_number(options: ZMQOptions) -> int:
    """Where numbers begin that no file knows. To pad from there, they must not be high."""
    if options.first is not None:
        return options.first
    return 0 if options.pad else clock_number()
