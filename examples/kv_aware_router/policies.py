"""Routing policies: the choice of the worker for a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from examples.kv_aware_router.member import Member


class Policy(Protocol):
    """Routing policy."""

    name: str

    def choose(self, members: Sequence[Member], overlap: Mapping[str, int]) -> Member:
        """Return one of the members (at least one). `overlap` is in tokens, by topic."""


class RoundRobin:
    """Workers in turn, regardless of cache and load."""

    name = "round robin"

    def __init__(self) -> None:
        self._next = 0

    def choose(self, members: Sequence[Member], overlap: Mapping[str, int]) -> Member:
        """Return the next member."""
        self._next += 1
        return members[(self._next - 1) % len(members)]


class KVAware:
    """Overlap minus load, both in prompt tokens: the worker with the least to compute before the first token.

    A `load_weight` above 1 spreads requests more evenly; below 1 it keeps common prefixes together.
    """

    name = "KV-aware"

    def __init__(self, load_weight: float = 1.0) -> None:
        self._load_weight = load_weight

    def choose(self, members: Sequence[Member], overlap: Mapping[str, int]) -> Member:
        """Return the member with the highest score; among equals the one with the fewest cached blocks."""

        def score(member: Member) -> tuple[float, float]:
            own = overlap.get(member.place.topic, 0)
            return own - self._load_weight * member.load, -member.stats.get("cached_blocks", 0)

        return max(members, key=score)
