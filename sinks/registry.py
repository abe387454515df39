"""Lookup of the sink for a URL's scheme.

Sinks of this package are in a table, so that they work from a source tree that was never installed. Those of others
come from the entry-point group ``kvcache.sinks``: the entry's name is the scheme, its object is called with the parsed
URL and the context and returns the sink. Nothing is imported before it is needed, and an entry point cannot replace a
scheme of this package.

A user and a password in a URL are refused unless the entry's object has an attribute `takes_login` that is true: users
would rely on them.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import cast

from sinks.base import Sink, SinkContext, SinkURL

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
_LOGIN_IN_PATH = re.compile("[^/@]*:[^/@]*@")
"""Pattern of a login at the start of a path, whose // was forgotten. Everything up to the last @ may be a password."""


def open_sink(url: str, context: SinkContext) -> Sink:
    """Make the sink named by `url`, not yet opened: its runner calls `open` on its own thread.

    Raises SinkURLError if the URL cannot be understood, its scheme is not known, its provider cannot be imported, or
    the URL has a login and the provider takes none.
    """
    parsed = SinkURL.parse(url)
    factory = _factory(parsed)
    if not getattr(factory, "takes_login", False):
        _refuse_login(parsed)
    return factory(parsed, context)


def _refuse_login(url: SinkURL) -> None:
    if url.user is not None or url.password is not None:
        raise url.error("this sink has no authentication; remove the user and password from the URL")
    if url.host is None and _LOGIN_IN_PATH.match(url.path):
        raise url.error("a user and password follow //; prefix a path that contains a colon and an @ with ./")


def known_schemes() -> list[str]:
    """Return all schemes that `open_sink` can find, sorted."""
    return sorted({*_BUILT_IN, *entry_points(group=ENTRY_POINT_GROUP).names})


def _factory(url: SinkURL) -> SinkFactory:
    if url.scheme in _BUILT_IN:
        return cast("SinkFactory", importlib.import_module(_BUILT_IN[url.scheme]).create)
    found = tuple(entry_points(group=ENTRY_POINT_GROUP, name=url.scheme))
    if not found:
        known = ", ".join(known_schemes())
        raise url.error(f"unknown scheme {url.scheme!r}; known schemes: {known}")
    try:
        return cast("SinkFactory", found[0].load())
    except (ImportError, AttributeError) as error:
        raise url.error(
            f"it is provided by {found[0].value}, which cannot be imported ({error}); install its "
            "dependencies"
        ) from error
