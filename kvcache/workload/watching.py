"""What a step of a played engine did, for whoever gives it a duration or answers its requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvcache.results import Admission


@dataclass(slots=True)
class WatchedStep:
    """One step; requests by their ids."""

    admitted: dict[int, Admission]
    """What each admitted request found in the cache."""
    prefill_tokens: int = 0
    """Prompt tokens that were computed."""
    decoding: int = 0
    """Sequences of which the last output was computed."""
    context_tokens: int = 0
    """Tokens before the computed ones, over all sequences: their K and V were read."""
    sampled: list[int] = field(default_factory=list)
    """Requests that got a token."""
    ended: list[int] = field(default_factory=list)
    """Requests that have all they asked for."""

    def note(self, begin: int, end: int, *, decoding: bool) -> None:
        """Count the tokens from `begin` to `end` of a sequence."""
        self.context_tokens += begin
        self.decoding += decoding
        self.prefill_tokens += 0 if decoding else end - begin


Watch = Callable[[WatchedStep], None]
