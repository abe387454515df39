"""The interface of sinks, and the URLs that name them.

A sink's methods are all called by its runner on one thread, so a sink needs no locks, may block, and may raise.
Everything for the engine's safety (queues, drops, retries, deadlines) is in the runner, once.

Options are declared by each sink as a msgspec struct. So every option has a type and a default, and a misspelled option
is refused with a list of the known ones, instead of being ignored.

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
"""Maximum number of remembered salts; the least recently used ones are dropped."""
MAX_SALT_BYTES = 128
"""Maximum length of a remembered salt in UTF-8: the bound of a batch's size has no room for longer ones."""


class PlainSalts:
    """Salts by digest. Filled on the engine's thread, read on any."""

    def __init__(self) -> None:
        self.wanted = False
        """True if a sink needs salts; otherwise none are remembered."""
        self._known: OrderedDict[bytes, str] = OrderedDict()

    def ask(self) -> Callable[[bytes], str | None]:
        """Start keeping salts; return a function that finds one by its digest, or None."""
        self.wanted = True
        return self._known.get

    def remember(self, salts: Iterable[str | None]) -> None:
        """Remember salts, and drop the least recently used ones above the limit."""
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
"""Digits up to which a port that is too large is repeated in a message."""

_SIZES = ("max_batch", "max_bytes", "ring")
"""Options that are sizes; others with a unit are durations."""
_PLACE = re.compile(r"`\$\.(\w+)`$")
"""Pattern by which msgspec names the option that does not fit."""


class SinkError(FieldsError):
    """Base of the errors about sinks."""


class SinkUnavailable(SinkError):
    """A required service does not answer at the moment; a retry may succeed."""


@dataclass(eq=False, repr=False)
class SinkURLError(SinkError, ValueError):
    """A URL that names no sink; `url` is the URL without user, password and options."""

    url: str
    reason: str
    text = "sink {url!r}: {reason}"


@dataclass(eq=False, repr=False)
class SinkOpenError(SinkError):
    """The sink `name` could not be opened; `reason` is the cause."""

    name: str
    reason: str

    def __str__(self) -> str:
        # The runner's reason names the method and the kind of error; a SinkError's text is enough.
        return f"sink {self.name} could not be opened: {self.reason.removeprefix('open: ').removeprefix('SinkError: ')}"


class Sink:
    """Base class of all sinks, which take batches of events somewhere, with defaults for most attributes.

    A runner calls `open`, `write`, `tick`, `reopen` and `close` on one thread. Its attributes declare its needs, and
    may be set in the class or by its constructor.
    """

    needs_tokens: bool | None = None
    """True: token ids, which are the prompts, are its purpose. False: it must not receive them. None: it receives them
    unless `log.record_tokens` is false."""
    overflow: Overflow = "drop_oldest"
    """Which batches to drop when the queue of the sink is full, unless the runner has a setting."""
    folds = False
    """True if the sink needs all batches since an epoch began, which `kvcache publish` passes to it before `open`."""
    needs_cache = False
    """True if the sink accepts only logs of caches."""
    watches = False
    """True if the sink calls the probe passed to `watch` (in `kvcache publish` only if it also `folds`)."""

    def open(self) -> None:
        """Acquire what is needed. Called before anything else; raising means that it cannot work.

        Called again, after `close` or after raising, when a sink that failed too often is retried.
        """

    def write(self, batch: EventBatch) -> None:
        """Take one batch.

        Raising means that the batch is lost to this sink: it is not offered again, because half of it may have gone
        out. A `Gap` will take its place, and the next batch follows after a pause.
        """
        raise NotImplementedError

    def tick(self) -> None:
        """Do periodic work. Called after each batch and about every 10 ms while none comes.

        Counted, retried and quarantined like `write` when it raises.
        """

    def reopen(self) -> None:
        """Reopen files: the application requests it (`KVCacheManager.reopen_sinks`), as at SIGHUP."""

    def close(self) -> None:
        """Release everything. Called once for each `open` that succeeded, also after failures."""

    def resume(self, last_seq: int) -> int:
        """Return its last batch, if an earlier process gave it those up to `last_seq` of the same log.

        Called before `open`, by `kvcache publish`.
        """
        return last_seq

    def watch(self, probe: Probe) -> None:
        """Accept the probe of a sink that `watches`."""

    @property
    def waits_for(self) -> str | None:
        """Return the reason why a sink that folds cannot be opened yet; None: it can."""
        return None

    @property
    def refused_peers(self) -> int:
        """Connections to a feed that failed because of keys."""
        return 0


@dataclass(frozen=True)
class SinkStats:
    """Counters of a runner, at one moment. `put` calls so far = `batches` + `dropped_batches` + `lag_batches`."""

    name: str
    batches: int
    """Batches delivered: the sink's `write` returned. Gaps are not counted."""
    events: int
    dropped_batches: int
    """Batches not delivered: the queue was full, `write` raised, or the runner was closed or quarantined."""
    dropped_events: int
    errors: int
    """Number of times that the sink raised."""
    lag_batches: int
    """Batches waiting in the queue or being written."""
    state: State
    """`failing`: its last call failed, and is retried with the next batch."""
    last_error: str | None
    refused_peers: int = 0
    """Connections to a feed that failed because of keys."""


class Probe(Protocol):
    """Queries about a cache, from any thread: to a manager's monitor, or to a fold of its log, which has less."""

    step_times: Histogram | None
    """Durations of the manager's calls per engine step, once requested; None: unknown."""

    def stats(self) -> Any:
        """Return the counters and gauges of the last flush (`kvcache.stats.Stats`)."""

    def log_stats(self) -> Any:
        """Return the log's progress (`events.log.LogStats`); None without one, and for fields that are unknown."""

    def sink_stats(self) -> Any:
        """Return the sinks' progress (`sinks.SinkStats`)."""


class StateFold(Protocol):
    """A fold of a cache's batches into its state."""

    def fold(self, batch: EventBatch) -> None:
        """Fold the batch after the last one, or one that begins an epoch. Raises for any other."""

    def snapshot_events(self) -> tuple[CacheCreated | StateExported | PoolShared, ...]:
        """Return the state as events that another fold can begin with."""


@dataclass(frozen=True)
class SinkContext:
    """Facts that a sink may need about the cache that its events are from."""

    key_bytes: int
    """Size of a key in the events' key columns; 0 if blocks have no names."""
    tokens_per_block: int
    model: str = ""
    """Name of the model, for sinks that publish it."""
    state_dir: Path | None = None
    """Directory for files that must survive a restart; None: there is none."""
    salts: PlainSalts = field(default_factory=PlainSalts, compare=False)
    """Salts by digest, for a sink that publishes them in clear; it enables them while it is created."""
    kind: Literal["cache", "feed"] | None = "cache"
    """Kind of the events: of a cache, or published by engines (`kvcache tap`). None: not known yet."""
    fold: Callable[[], StateFold] | None = field(default=None, compare=False)
    """Makes a fold for a sink that sends the state itself; None: there is none."""


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
        """Parse a URL, or raise SinkURLError."""
        if any(letter in url for letter in "\t\r\n"):
            # urllib would drop them.
            raise SinkURLError(
                url.partition(":")[0], "it contains a tab or a line break; write them as %09 and %0A"
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
            raise SinkURLError(
                parsed.path, "not a URL; give one such as stdout: or file:///path/events.jsonl"
            )
        if len(pairs) != len(parsed.options):
            raise parsed.error("duplicate option")
        if "#" in url:
            raise parsed.error("it contains a #fragment; write a # in a path as %23")
        return parsed

    def __str__(self) -> str:
        """Return the URL without user, password and options, any of which may hold a secret.

        Of a path with an @ only the part after it: the part before may be a password with a / in it.
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

    def error(self, reason: str) -> SinkURLError:
        """Return the error that names no sink for this `reason`."""
        return SinkURLError(str(self), reason)

    def file_path(self, path: str) -> Path:
        """Return a path of the URL, if the system can have such a name; raises SinkURLError otherwise."""
        try:
            encoded = os.fsencode(path)
        except UnicodeEncodeError:
            raise self.error("the path is not valid Unicode text (lone surrogates)") from None
        if b"\0" in encoded:
            raise self.error("the path contains a NUL character (%00)")
        return Path(path)

    def read_options(self, declared: type[Options]) -> Options:
        """Return the options as `declared` (a msgspec struct) types them.

        Raises SinkURLError, naming the known options, for an unknown one and for a value that does not fit.
        """
        fields = msgspec.structs.fields(declared)
        known = ", ".join(field.encode_name for field in fields) or "none"
        unknown = sorted(set(self.options) - {field.encode_name for field in fields})
        if unknown:
            raise self.error(f"unknown option {option_name(unknown[0])}; known options: {known}")
        try:
            return msgspec.convert(dict(self.options), declared, strict=False)
        except msgspec.ValidationError as error:
            reason = f"bad option: {shortened(str(error))}{_choices(declared, str(error))}"
            raise self.error(f"{reason}; known options: {known}") from None

    def quantity(self, options: msgspec.Struct, name: str) -> float:
        """Return an option's size in bytes or duration in seconds, from its number and unit. Raises SinkURLError."""
        parse = parse_bytes if name in _SIZES else parse_seconds
        try:
            return parse(getattr(options, name))
        except ValueError as error:
            raise self.error(f"bad option: {name}={error}") from None


def _choices(declared: type[msgspec.Struct], problem: str) -> str:
    """Return the accepted values of an option that does not fit, if it is one of a few words."""
    place = _PLACE.search(problem)
    hint = get_type_hints(declared).get(place[1]) if place else None
    if place is None or get_origin(hint) is not Literal:
        return ""
    return f"; {place[1]} must be one of {', '.join(get_args(hint))}"


def _port(parts: SplitResult) -> int | None:
    """Return the port; raises SinkURLError, naming the rest of the URL without user, password, path and options."""
    try:
        return parts.port
    except ValueError:
        given = parts.netloc.rpartition(":")[2]
        # SECURITY: if an @ is missing, this may be a password.
        shown = f":{given}" if given.isascii() and given.isdigit() and len(given) <= _PORT_SHOWN else ""
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
        # The host may be a part of a password with a / and an @.
        address = f"{parts.scheme}:" if "@" in parts.path else f"{parts.scheme}://{host}{shown}"
        raise SinkURLError(address, "its port must be from 0 to 65535") from None
