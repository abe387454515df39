"""Observed steps of a played engine, for callbacks that time them or answer their requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvcache.results import Admission


@dataclass(slots=True)
class ObservedStep:
    """One step; requests by id."""

    admitted: dict[int, Admission]
    """Lookup result of each admitted request."""
    prefill_tokens: int = 0
    """Prompt tokens computed."""
    decoding: int = 0
    """Sequences with their last output computed."""
    context_tokens: int = 0
    """Tokens before the computed ones, over all sequences: their K and V were read."""
    sampled: list[int] = field(default_factory=list)
    """Requests that got a token."""
    ended: list[int] = field(default_factory=list)
    """Requests that have reached their end."""

    def note(self, begin: int, end: int, *, decoding: bool) -> None:
        """Count the tokens from `begin` to `end` of a sequence."""
        self.context_tokens += begin
        self.decoding += decoding
        self.prefill_tokens += 0 if decoding else end - begin


StepCallback = Callable[[ObservedStep], None]
