"""What a sink is, and the URL that names one.

A sink has three methods and no say in when they are called: its runner calls all of them on one thread,
so a sink needs no locks, may block, and may raise. Everything that concerns the engine's safety (queues,
drops, retries, deadlines) is the runner's business and is written once.

Options are declared by each sink as a msgspec struct. So every option has a type and a default, and an
option that is misspelled is refused with the known ones named, instead of being ignored.

Errors::

    SinkError                 base; its text may be logged, so it repeats nothing that was published
    ├── SinkURLError          the URL names no sink, or not so that it understands (also a ValueError)
    └── SinkOpenError         the sink could not be opened
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import msgspec

from events.errors import FieldsError, option_name, shortened, without_login
from events.tokens.names import salt_digest
from events.types import CacheCreated, EventBatch, PoolShared, StateExported
from events.units import parse_bytes, parse_seconds
from sinks.histogram import Histogram

MAX_SALTS = 1 << 16
"""The salts used last are known, no more."""
MAX_SALT_BYTES = 128
"""Longer ones, in UTF-8, are not kept: what a batch's size is bounded by has no room for them."""


class PlainSalts:
    """Salts by their digests. Filled on the engine's thread, read on any."""

    def __init__(self) -> None:
        self.wanted = False
        """Whether a sink has asked for them; else none are kept."""
        self._known: OrderedDict[bytes, str] = OrderedDict()

    def ask(self) -> Callable[[bytes], str | None]:
        """Have salts kept from now on; returns what finds one by its digest, None if it is not known."""
        self.wanted = True
        return self._known.get

    def remember(self, salts: Iterable[str | None]) -> None:
        """Keep these, and forget those used longest ago if they are too many."""
        known = self._known
        for salt in salts:
            if salt is None or len(salt.encode()) > MAX_SALT_BYTES:
                continue
            digest = salt_digest(salt)
            known[digest] = salt
            known.move_to_end(digest)  # without taking it out, because others look for it meanwhile
            if len(known) > MAX_SALTS:
                known.popitem(last=False)


Options = TypeVar("Options", bound=msgspec.Struct)
Overflow = Literal["drop_oldest", "drop_newest"]
State = Literal["running", "failing", "quarantined", "closed"]
_PORT_SHOWN = 6
"""A port that is too large is repeated if it has no more digits."""

_SIZES = ("max_batch", "max_bytes", "ring")
"""Options that are sizes; others with a unit are durations."""
_PLACE = re.compile(r"`\$\.(\w+)`$")
"""Where msgspec says which option does not fit."""


class SinkError(FieldsError):
    """Base of the errors about sinks."""


class SinkUnavailable(SinkError):
    """What the sink needs does not answer at the moment: the same may succeed later."""


@dataclass(eq=False, repr=False)
class SinkURLError(SinkError, ValueError):
    """A URL that names no sink; `url` is the URL without user, password and options."""

    url: str
    reason: str
    text = "sink {url!r}: {reason}"


@dataclass(eq=False, repr=False)
class SinkOpenError(SinkError):
    """The sink `name` could not be opened; `reason` says why."""

    name: str
    reason: str

    def __str__(self) -> str:
        # The runner's reason names the method and the kind of error, of which a SinkError's text says enough.
        return f"sink {self.name} could not be opened: {self.reason.removeprefix('open: ').removeprefix('SinkError: ')}"


class Sink:
    """Takes batches of events somewhere; the base class of all sinks, with the defaults of what most do not need.

    A runner calls `open`, `write`, `tick`, `reopen` and `close` on one thread. What a sink is capable of stands in its
    attributes, which may be set in the class or when it is made.
    """

    needs_tokens: bool | None = None
    """True: token ids, which are the prompts, are what it is for. False: it must not get them. None: it gets them
    unless `log.record_tokens` is false."""
    overflow: Overflow = "drop_oldest"
    """What gives way when its queue is full, where the runner is not told."""
    folds = False
    """Whether it needs all batches since an epoch began, which `kvcache publish` gives it before `open`."""
    needs_cache = False
    """Whether logs that are not of a cache mean nothing to it."""
    watches = False
    """Whether it calls the probe that it is given (in `kvcache publish` only if it folds)."""

    def open(self) -> None:
        """Acquire what is needed. Called before anything else; raising means that it cannot work.

        Called again, after `close` or where it has raised, when the sink has failed too often and is tried again.
        """

    def write(self, batch: EventBatch) -> None:
        """Take one batch.

        Raising means that the batch is lost to this sink: it is not offered again, because half of it may
        have gone out. A `Gap` will stand in its place, and the next batch follows after a pause.
        """
        raise NotImplementedError

    def tick(self) -> None:
        """Do what is due. Called after each batch and about every 10 ms while none comes.

        Counted, retried and quarantined like `write` when it raises.
        """

    def reopen(self) -> None:
        """Open files again: the application says so (`KVCacheManager.reopen_sinks`), as at SIGHUP."""

    def close(self) -> None:
        """Release everything. Called once for each `open` that succeeded, also after failures."""

    def resume(self, last_seq: int) -> int:
        """Return the last batch that it has, where an earlier process gave it those up to `last_seq` of the same log.

        Called before `open`, by `kvcache publish`.
        """
        return last_seq

    def watch(self, probe: Probe) -> None:
        """Take what can be asked by a sink that `watches`."""

    @property
    def waits_for(self) -> str | None:
        """Why a sink that folds cannot be opened yet, in words; None: it can."""
        return None

    @property
    def refused_peers(self) -> int:
        """Connections to a feed that came to nothing because of keys."""
        return 0


@dataclass(frozen=True)
class SinkStats:
    """One moment of a runner. `put` calls so far = `batches` + `dropped_batches` + `lag_batches`."""

    name: str
    batches: int
    """Delivered: the sink's `write` returned. Gaps are not counted."""
    events: int
    dropped_batches: int
    """Not delivered: the queue was full, `write` raised, or the runner was closed or quarantined at the time."""
    dropped_events: int
    errors: int
    """Times that the sink raised."""
    lag_batches: int
    """Waiting in the queue or being written."""
    state: State
    """`failing`: its last call has failed, and it is tried again with the next batch."""
    last_error: str | None
    refused_peers: int = 0
    """Connections to a feed that came to nothing because of keys."""


class Probe(Protocol):
    """What any thread may ask of who knows a cache: a manager's monitor, or a fold of its log, which knows less."""

    step_times: Histogram | None
    """What the manager's calls take of each engine step, once somebody has asked for it; None: unknown."""

    def stats(self) -> Any:
        """Counters and gauges of the last flush (`kvcache.stats.Stats`)."""

    def log_stats(self) -> Any:
        """Progress of the log (`events.log.LogStats`); None without one, and in place of fields that are unknown."""

    def sink_stats(self) -> Any:
        """Progress of the sinks (`sinks.SinkStats`)."""


class StateFold(Protocol):
    """A fold of a cache's batches into its state."""

    def fold(self, batch: EventBatch) -> None:
        """Take in the batch after the last one, or one that begins an epoch. Raises where it does not fit."""

    def told(self) -> tuple[CacheCreated | StateExported | PoolShared, ...]:
        """The state, as events with which another fold can begin."""


@dataclass(frozen=True)
class SinkContext:
    """What a sink has to know about the cache whose events it gets."""

    key_bytes: int
    """Bytes of one key in the events' key columns; 0 if blocks have no names."""
    tokens_per_block: int
    model: str = ""
    """Name of the model, for those who publish it."""
    state_dir: Path | None = None
    """Where a sink may keep what must survive a restart; None: nowhere."""
    salts: PlainSalts = field(default_factory=PlainSalts, compare=False)
    """To be asked, while the sink is made, by one that needs salts as requests gave them."""
    kind: Literal["cache", "feed"] | None = "cache"
    """What the events tell of: a cache, or what engines told of theirs (`kvcache tap`). None: not known yet."""
    fold: Callable[[], StateFold] | None = field(default=None, compare=False)
    """Makes a fold for a sink that tells the state itself; None: there is nothing that folds."""


@dataclass(frozen=True)
class SinkURL:
    """A parsed sink URL, ``scheme://user:password@host:port/path?option=value``.

    All but the scheme is optional.
    """

    scheme: str
    host: str | None
    port: int | None
    path: str
    options: Mapping[str, str]
    user: str | None = None
    password: str | None = None

    @classmethod
    def parse(cls, url: str) -> SinkURL:
        """Parse, or raise SinkURLError."""
        if any(letter in url for letter in "\t\r\n"):
            # urllib would leave them out.
            raise SinkURLError(
                url.partition(":")[0], "it has a tab or a line break; write them as %09 and %0A"
            )
        try:
            parts = urlsplit(url)
            query = parts.query.removesuffix("&")
            pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
            parsed = cls(
                scheme=parts.scheme,
                host=parts.hostname,
                port=_port(parts),
                path=unquote(parts.path),
                options=MappingProxyType(dict(pairs)),
                user=unquote(parts.username) if parts.username else None,
                password=unquote(parts.password) if parts.password else None,
            )
        except SinkURLError:
            raise
        except ValueError:
            # urllib's message may quote the URL, and the URL may hold a password.
            raise SinkURLError(url.partition(":")[0], "not a valid URL") from None
        if not parsed.scheme:
            raise SinkURLError(parsed.path, "a URL is needed, such as stdout: or file:///path/events.jsonl")
        if len(pairs) != len(parsed.options):
            raise SinkURLError(str(parsed), "an option is given twice")
        if "#" in url:
            raise SinkURLError(str(parsed), "it has a #fragment; write a # in a path as %23")
        return parsed

    def __str__(self) -> str:
        """The URL without user, password and options, any of which may hold a secret.

        Of a path with an @ only what follows that: before it may stand a password with a / in it.
        """
        if "@" in self.path:
            return without_login(f"{self.scheme}:{self.path}")
        if self.host is None:
            slashes = "//" if self.path.startswith("/") else ""
            return f"{self.scheme}:{slashes}{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port is None else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.path}"

    def __repr__(self) -> str:
        return f"SinkURL({str(self)!r})"

    def file_path(self, path: str) -> Path:
        """A path that stands in the URL, if the system can have such a name; raises SinkURLError otherwise."""
        try:
            encoded = os.fsencode(path)
        except UnicodeEncodeError:
            raise SinkURLError(str(self), "a file's path must be Unicode text, not lone surrogates") from None
        if b"\0" in encoded:
            raise SinkURLError(str(self), "a file's path has no NUL character (%00)")
        return Path(path)

    def read_options(self, declared: type[Options]) -> Options:
        """The options as `declared` (a msgspec struct) types them.

        Raises SinkURLError, naming the known options, for an unknown one and for a value that does not fit.
        """
        fields = msgspec.structs.fields(declared)
        known = ", ".join(field.encode_name for field in fields) or "none"
        unknown = sorted(set(self.options) - {field.encode_name for field in fields})
        if unknown:
            raise SinkURLError(str(self), f"unknown option {option_name(unknown[0])}; known options: {known}")
        try:
            return msgspec.convert(dict(self.options), declared, strict=False)
        except msgspec.ValidationError as error:
            reason = f"bad option: {shortened(str(error))}{_choices(declared, str(error))}"
            raise SinkURLError(str(self), f"{reason}; known options: {known}") from None

    def quantity(self, options: msgspec.Struct, name: str) -> float:
        """Return a size in bytes or a duration in seconds that an option names with its unit. Raises SinkURLError."""
        parse = parse_bytes if name in _SIZES else parse_seconds
        try:
            return parse(getattr(options, name))
        except ValueError as error:
            raise SinkURLError(str(self), f"bad option: {name}={error}") from None


def _choices(declared: type[msgspec.Struct], problem: str) -> str:
    """What the option that does not fit accepts, if that is one of a few words."""
    place = _PLACE.search(problem)
    hint = get_type_hints(declared).get(place[1]) if place else None
    return (
        f"; {place[1]} is one of {', '.join(get_args(hint))}" if place and get_origin(hint) is Literal else ""
    )


def _port(parts: SplitResult) -> int | None:
    """The port; raises SinkURLError, which names the rest of the URL without user, password, path and options."""
    try:
        return parts.port
    except ValueError:
        given = parts.netloc.rpartition(":")[2]
        # SECURITY: where an @ is missing, what stands here is a password.
        shown = f":{given}" if given.isascii() and given.isdigit() and len(given) <= _PORT_SHOWN else ""
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
        # Of a password with a / and an @ the host may be a piece.
        address = f"{parts.scheme}:" if "@" in parts.path else f"{parts.scheme}://{host}{shown}"
        raise SinkURLError(address, "its port is no number from 0 to 65535") from None
