"""The options of a ``zmq+pub:`` URL, which `sinks.router.zmq` explains."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from events.formats.native import Encoding
from sinks.router.forms import Style, WireFormat
from sinks.router.peers import MAX_CONNECTIONS

INT32 = 2**31 - 1
"""More than any socket, and any rank, can be given."""


class ZMQOptions(msgspec.Struct, frozen=True):
    """Options of the URL."""

    format: WireFormat = "vllm"
    style: Style = "map"
    encoding: Encoding = "msgpack"
    tokens: bool | None = None
    bind: bool = False
    connect: bool = False
    replay: str | None = None
    topic: str | None = None
    pod: str | None = None
    engine: str | None = None
    model: str | None = None
    rank: Annotated[int, msgspec.Meta(le=INT32)] = 0
    rank_ports: bool = False
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
    curve_key: str | None = None
    curve_clients: str | None = None
    curve_server: str | None = None
    insecure: bool = False
    keepalive: str = "60s"
    max_peers: Annotated[int, msgspec.Meta(le=INT32)] = MAX_CONNECTIONS
