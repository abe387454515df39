"""vLLM's ``--kv-events-config`` as the URL of a sink, so that a deployment of vLLM works for this as well."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlencode

import msgspec

from sinks.base import SinkError

_MAX_PORT = (1 << 16) - 1
_ENDPOINT = re.compile(r"tcp://(\[[^\]@/]+\]|[^:@/\[\]]+):([0-9]{1,5})")


@dataclass(eq=False, repr=False)
class KVEventsConfigError(SinkError, ValueError):
    """The configuration is invalid; of its values only endpoints are repeated."""

    reason: str
    text = "--kv-events-config: {reason}"


class KVEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields, with vLLM's defaults."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    """``zmq`` or ``null``; None: zmq if events are enabled."""
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: Annotated[int, msgspec.Meta(ge=0)] = 10_000
    """Has no counterpart: older batches are answered from the state."""
    hwm: Annotated[int, msgspec.Meta(ge=1)] = 100_000
    max_queue_size: Annotated[int, msgspec.Meta(ge=0)] = 100_000
    """Has no counterpart: a sink's queue is bounded, and never makes the engine wait."""
    topic: str = ""


def kv_events_sink(config: str | Mapping[str, Any], *, rank: int = 0, options: str = "") -> str | None:
    """Return the sink URL equivalent to vLLM with this configuration; None if it publishes nothing.

    - `config`: JSON text, or its content.
    - `rank`: the data-parallel rank, which is added to both ports.
    - `options`: settings without a field in vLLM, as options of the URL: ``"curve_key=...&curve_clients=..."``.

    As in vLLM an endpoint with ``*`` or ``::`` is bound and any other, loopback too, is connected to; the replay is
    bound always. Raises KVEventsConfigError.
    """
    read = _read(config)
    if read.publisher not in (None, "zmq", "null"):
        raise KVEventsConfigError("publisher must be zmq or null")
    if not read.enable_kv_cache_events or read.publisher == "null":
        return None
    host, port = _parts("endpoint", read.endpoint, rank)
    binds = "*" in read.endpoint or "::" in read.endpoint
    fields = {"connect": str(int(not binds)), "topic": read.topic, "hwm": str(read.hwm), "rank": str(rank)}
    if read.replay_endpoint is not None:
        fields["replay"] = ":".join(_parts("replay_endpoint", read.replay_endpoint, rank))
    more = f"&{options}" if options else ""
    return f"zmq+pub://{host}:{port}?{urlencode(fields)}{more}"


def _read(config: str | Mapping[str, Any]) -> KVEventsConfig:
    try:
        if isinstance(config, str):
            return msgspec.json.decode(config, type=KVEventsConfig)
        return msgspec.convert(config, KVEventsConfig)
    except msgspec.ValidationError as error:
        known = ", ".join(KVEventsConfig.__struct_fields__)
        raise KVEventsConfigError(f"{error}; known fields: {known}") from None
    except (msgspec.DecodeError, UnicodeError):
        raise KVEventsConfigError(
            "not JSON, as in '{\"enable_kv_cache_events\": true}'; to read a file on the command line, write "
            "@FILE"
        ) from None


def _parts(field: str, endpoint: str, rank: int) -> tuple[str, str]:
    """Return host and port; the rank is added to each port except 0, which is any free one."""
    found = _ENDPOINT.fullmatch(endpoint)
    if found is None:
        transport = endpoint.partition("://")[0]
        known = transport in ("ipc", "inproc")
        problem = f"{transport}:// is not supported" if known else "host and port are missing"
        raise KVEventsConfigError(f"{field}: {problem}; write tcp://HOST:PORT, as in tcp://*:5557")
    port = int(found[2]) and int(found[2]) + rank
    if port > _MAX_PORT:
        raise KVEventsConfigError(f"{field}: port {found[2]} plus rank {rank} is {port}, which exceeds 65535")
    return found[1], str(port)
