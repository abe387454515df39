"""Cache salts as requests gave them, for sinks that have to tell them to others.

Events hold the SHA-256 of a salt only. Where a sink asks, the manager notes the salts themselves as well: in memory,
in nothing that is written or logged.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from events.tokens.names import salt_digest

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
