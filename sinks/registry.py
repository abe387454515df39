"""Finds the sink for a URL's scheme.

Sinks of this package are in a table, so that they work from a source tree that was never installed. Those
of others come from the entry-point group ``kvcache.sinks``: the entry's name is the scheme, its object is
called with the parsed URL and the context and returns the sink. Nothing is imported before it is asked for,
and an entry point cannot take a scheme of this package away from it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, cast

from sinks.base import LOGIN_IGNORED, Sink, SinkContext, SinkURL, SinkURLError

ENTRY_POINT_GROUP = "kvcache.sinks"

SinkFactory = Callable[[SinkURL, SinkContext], Sink]

_BUILT_IN = {
    "file": "sinks.file",
    "kafka": "sinks.brokers",
    "nats": "sinks.brokers",
    "otel": "sinks.otel",
    "prometheus": "sinks.prometheus",
    "redis": "sinks.brokers",
    "stdout": "sinks.stdout",
    "zmq+pub": "sinks.router.zmq",
}


def open_sink(url: str, context: SinkContext) -> Sink:
    """The sink that `url` names, not yet opened: its runner calls `open` on its own thread.

    Raises SinkURLError if the URL cannot be understood, its scheme is not known, what provides the scheme
    cannot be imported, or the URL has a login that what makes the sink does not look at.
    """
    parsed = SinkURL.parse(url)
    factory = _factory(parsed)
    if not parsed.has_login:
        return factory(parsed, context)
    watched = _WatchedURL(**vars(parsed))
    sink = factory(watched, context)
    if not watched.login_was_read:
        raise SinkURLError(str(parsed), LOGIN_IGNORED)
    return sink


class _WatchedURL(SinkURL):
    """A URL that notes whether anybody reads its login."""

    login_was_read = False

    def __getattribute__(self, name: str) -> Any:
        if name in ("user", "password"):
            object.__setattr__(self, "login_was_read", True)
        return super().__getattribute__(name)


def known_schemes() -> list[str]:
    """All schemes that `open_sink` can find, sorted."""
    return sorted({*_BUILT_IN, *entry_points(group=ENTRY_POINT_GROUP).names})


def _factory(url: SinkURL) -> SinkFactory:
    if url.scheme in _BUILT_IN:
        return cast("SinkFactory", importlib.import_module(_BUILT_IN[url.scheme]).create)
    found = tuple(entry_points(group=ENTRY_POINT_GROUP, name=url.scheme))
    if not found:
        known = ", ".join(known_schemes())
        raise SinkURLError(str(url), f"unknown scheme {url.scheme!r}; known schemes: {known}")
    try:
        return cast("SinkFactory", found[0].load())
    except (ImportError, AttributeError) as error:
        reason = f"{found[0].value} provides it but cannot be imported ({error}); install what it needs"
        raise SinkURLError(str(url), reason) from error
