"""Which worker a request goes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from examples.kv_aware_router.member import Member


class Policy(Protocol):
    """A way to choose."""

    name: str

    def choose(self, members: Sequence[Member], overlap: Mapping[str, int]) -> Member:
        """One of the members, of which there is at least one. `overlap` is in tokens, by topic."""


class RoundRobin:
    """One behind the other, whatever they have and do."""

    name = "round robin"

    def __init__(self) -> None:
        self._next = 0

    def choose(self, members: Sequence[Member], overlap: Mapping[str, int]) -> Member:
        """The next one."""
        self._next += 1
        return members[(self._next - 1) % len(members)]


class KVAware:
    """Overlap minus load, both in prompt tokens: where the least must be computed until the first token comes.

    A `load_weight` above 1 spreads requests more evenly, below 1 it keeps those together that begin alike.
    """

    name = "KV-aware"

    def __init__(self, load_weight: float = 1.0) -> None:
        self._load_weight = load_weight

    def choose(self, members: Sequence[Member], overlap: Mapping[str, int]) -> Member:
        """The highest score; among equals the one of which the least is known to be cached."""

        def score(member: Member) -> tuple[float, float]:
            own = overlap.get(member.place.topic, 0)
            return own - self._load_weight * member.load, -member.stats.get("cached_blocks", 0)

        return max(members, key=score)
