"""``zmq+pub://127.0.0.1:5557?replay=5558`` feeds routers that speak vLLM's KV event protocol.

Each batch is one message of three frames (topic, number, payload) to whoever subscribes. Who connects, late or again,
is first told "cleared" and the whole state, alone, in one batch under the last number (`sinks.router.publisher`). A
subscriber that falls behind by more than `hwm` messages misses some; with ``replay=PORT`` it can ask for them there
(`sinks.router.replay_server`), whatever it missed.

Options:

- ``format``: what payloads look like, ``vllm`` or ``sglang``; with ``style=array`` as vLLM wrote them until 0.23. Or
  ``native``: all events of the cache, as ``encoding=msgpack`` or ``json`` (`sinks.router.native`).
- ``tokens``: ``0`` leaves the token ids out, for readers that know blocks by their hashes alone; ``format=native`` has
  them only with ``1``.
- ``bind``, ``connect``: whether HOST and PORT are this feed's, to which readers connect, or those of a router that is
  bound there and hears many feeds. By default ``*``, other wildcards and loopback are bound, and anything else is
  connected to.
- ``replay``: where missed batches are answered, ``PORT`` or ``HOST:PORT``; always bound. Without it nobody can ask.
- ``topic``: by default ``kv@POD@MODEL``, the form in which llm-d finds pod and model.
- ``pod``: for the topic; by default the HOST:PORT at which the feed is bound or, if it connects, its replay. Bound to
  all interfaces, HOST is this machine's address in its network.
- ``engine``: of a log of what engines told (`kvcache tap`), whose feed this is, if there are several. Topic and rank
  are those that the engine gives, unless the URL does.
- ``model``: for the topic; by default that of the cache, else ``unknown``.
- ``rank``: data-parallel rank, in each payload.
- ``rank_ports``: ``true`` adds the rank to each port but 0, as vLLM does.
- ``curve_key``, ``curve_clients``, ``curve_server``: files with keys (`sinks.router.keys`).
- ``insecure``: ``true`` lets prompts leave this machine unencrypted.
- ``keepalive``: silence after which TCP looks whether a peer is still there, as in ``60s``; ``0``: never.
- ``max_peers``: connections of each port.
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

Port 0 takes any free one. The payloads hold token ids, that is the users' prompts, unless they are left out: without a
host the sockets are bound to loopback, and what leaves the machine must be encrypted, or be allowed in clear by name.
"""

from __future__ import annotations

from pathlib import Path

from events.units import parse_bytes, parse_seconds
from sinks.base import SinkContext, SinkURL, SinkURLError
from sinks.router.addresses import feed_place, replay_place
from sinks.router.feed import RouterFeed
from sinks.router.forms import form_of, tells_tokens
from sinks.router.keys import curve_of
from sinks.router.native import NativeFeed
from sinks.router.numbers import FeedNumbers, clock_number
from sinks.router.options import ZMQOptions
from sinks.router.places import Place
from sinks.router.transport import ZMQSettings, ZMQTransport
from sinks.router.whose import feed_for

MAX_CHUNK_BYTES = 8 << 20


def create(url: SinkURL, context: SinkContext) -> RouterFeed:
    """The sink for a ``zmq+pub:`` URL; its only transport is a `ZMQTransport`."""
    options = url.read_options(ZMQOptions)
    settings = _settings(url, options, context)
    pace = {name: _quantity(url, options, name) for name in ("coalesce", "max_batch", "heartbeat")}
    _refuse_idle(url, options)
    transport = ZMQTransport(settings)
    numbers = FeedNumbers(_state_path(url, options, settings, context), first=_first_number(options))
    if options.format == "native":
        tokens, heartbeat = tells_tokens(options), pace["heartbeat"]
        return NativeFeed(transport, numbers, context, tokens=tokens, heartbeat_seconds=heartbeat)
    return RouterFeed(
        transport,
        numbers,
        coalesce_seconds=pace["coalesce"],
        max_batch_bytes=int(pace["max_batch"] / form_of(url, options, context).overhead),
        heartbeat_seconds=pace["heartbeat"],
        feed=feed_for(url, options.engine, context),
        opens_as=transport.speak_as,
    )


def _settings(url: SinkURL, options: ZMQOptions, context: SinkContext) -> ZMQSettings:
    url.refuse_login(
        "the feed asks nobody who he is, so a user and a password protect nothing: leave them out, "
        "and let only those reach the port who may read prompts, or encrypt it with curve_key="
    )
    if url.path not in ("", "/"):
        raise SinkURLError(str(url), "it takes no path; use zmq+pub://127.0.0.1:5557")
    _check_numbers(url, options)
    place, replay = feed_place(url, options), replay_place(url, options)
    form = form_of(url, options, context)
    _check_topic(url, options, place, replay, context)
    return ZMQSettings(
        host=place.host,
        port=place.port,
        replay_port=None if replay is None else replay.port,
        connects=place.connects,
        replay_host=None if replay is None else replay.host,
        topic=options.topic,
        pod=options.pod,
        model=options.model or context.model or "unknown",
        rank=options.rank,
        ring_bytes=int(_quantity(url, options, "ring")),
        chunk_bytes=min(int(_quantity(url, options, "max_batch")), MAX_CHUNK_BYTES),
        pad=options.pad,
        hwm=options.hwm,
        linger_seconds=_quantity(url, options, "linger"),
        encode=form.encode,
        join=form.join,
        tokens=tells_tokens(options),
        salts=context.salts.ask() if options.salts == "plain" else None,
        curve=curve_of(url, options, place, replay),
        keepalive_seconds=_quantity(url, options, "keepalive"),
        max_peers=options.max_peers,
    )


def _check_numbers(url: SinkURL, options: ZMQOptions) -> None:
    for name, low in (("rank", 0), ("hwm", 1), ("first", 0), ("max_peers", 1)):
        value = getattr(options, name)
        if value is not None and value < low:
            raise SinkURLError(str(url), f"bad option: {name} must be at least {low}")


def _check_topic(
    url: SinkURL, options: ZMQOptions, place: Place, replay: Place | None, context: SinkContext
) -> None:
    if options.topic is not None:
        return
    for name, part in (("pod", options.pod or ""), ("model", options.model or context.model)):
        if "@" in part:
            cut = "routers cut the topic kv@POD@MODEL at each @"
            reason = f"{cut}, so the {name} must have none: add {name}= or topic="
            raise SinkURLError(str(url), reason)
    if place.connects and not options.pod and replay is None:
        needs = "a router that hears many feeds tells them apart by their topics: add pod=, topic= or replay="
        raise SinkURLError(
            str(url), f"{needs}; if readers are to connect to this address of ours, add bind=1"
        )


def _refuse_idle(url: SinkURL, options: ZMQOptions) -> None:
    """Refuse an option that another one, or its absence, makes useless: whoever gave it expects something."""
    for name in ("model", "pod"):
        if options.topic is not None and getattr(options, name) is not None:
            reason = f"{name}= is a part of the topic that topic= replaces: leave one of them out"
            raise SinkURLError(str(url), reason)
    if options.format == "native" and "max_batch" in url.options:
        raise SinkURLError(str(url), "max_batch= is about other formats: with format=native no batch is cut")
    for name in ("ring", "pad"):
        if name in url.options and options.replay is None:
            raise SinkURLError(str(url), f"{name}= is about answers on the port replay=, which is not given")


def _quantity(url: SinkURL, options: ZMQOptions, name: str) -> float:
    parse = parse_bytes if name in ("max_batch", "ring") else parse_seconds
    try:
        return parse(getattr(options, name))
    except ValueError as error:
        raise SinkURLError(str(url), f"bad option: {name}={error}") from None


def _state_path(
    url: SinkURL, options: ZMQOptions, settings: ZMQSettings, context: SinkContext
) -> Path | None:
    if options.state is not None:
        return url.file_path(options.state) if options.state else None
    if context.state_dir is None or not settings.port:
        return None
    plain = "".join(char if char.isalnum() or char in ".-" else "_" for char in settings.host)
    return context.state_dir / f"feed-{plain}-{settings.port}.numbers"


def _first_number(options: ZMQOptions) -> int:
    """Where numbers begin that no file knows. To pad from there, they must not be high."""
    if options.first is not None:
        return options.first
    return 0 if options.pad else clock_number()
