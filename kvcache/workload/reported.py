"""Reported values of a service's prompts, compared with expectations from its trace: lengths, and cached tokens."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcache.workload.traces import TraceRequest

if TYPE_CHECKING:
    from kvcache.workload.driver import ObservedStep

HOUR_MS = 3_600_000


@dataclass(slots=True)
class ReportedHour:
    """Requests of one hour of a trace with reported cached tokens; counts are in tokens."""

    hour: int
    """Hour from the trace's beginning, from 0."""
    requests: int = 0
    prompt_tokens: int = 0
    reported: int = 0
    """Cached tokens reported by the service."""
    unlimited: int = 0
    """Tokens in whole blocks that an unlimited cache would reuse."""
    played: int = 0
    """Tokens in whole blocks that were reused by the cache through which the trace was played."""


class ReportedReuse:
    """Comparison of a trace's reported values with expected ones.

    Call `see` with each request, in the trace's order, and `watch` with each step of an engine that plays it.
    """

    def __init__(self) -> None:
        self.lengths = self.other_lengths = 0
        """Prompts with a reported length, and those among them with another length here."""
        self.tokens = (0, 0)
        """Tokens of all these prompts: in the trace, and as reported."""
        self._by_hour: dict[int, ReportedHour] = {}
        self._hour_of = array("q")
        """Hour by the request's index in the trace; -1: nothing is reported."""

    def see(self, request: TraceRequest, unlimited: int) -> int:
        """Count a request of which an unlimited cache would reuse `unlimited` tokens; return the number of requests."""
        if request.reported_length is not None:
            self.lengths += 1
            self.other_lengths += request.reported_length != request.input_length
            self.tokens = (self.tokens[0] + request.input_length, self.tokens[1] + request.reported_length)
        number = -1 if request.reported_cached is None else request.timestamp // HOUR_MS
        self._hour_of.append(number)
        if request.reported_cached is not None:
            hour = self._by_hour.setdefault(number, ReportedHour(number))
            hour.requests += 1
            hour.prompt_tokens += request.input_length
            hour.reported += request.reported_cached
            hour.unlimited += unlimited
        return len(self._hour_of)

    def watch(self, step: ObservedStep) -> None:
        """Count the reused tokens of the requests of a step."""
        for place, admission in step.admitted.items():
            if (number := self._hour_of[place]) >= 0:
                self._by_hour[number].played += admission.reused_primary + admission.reused_secondary

    @property
    def hours(self) -> list[ReportedHour]:
        """Hours with reported cached tokens, in order."""
        return sorted(self._by_hour.values(), key=lambda each: each.hour)

    @property
    def doubt(self) -> str | None:
        """Reason to doubt that the prompts are the service's own, in words; None if there is none."""
        if not self.other_lengths:
            return None
        ours, theirs = self.tokens
        return (
            f"{self.other_lengths:,} of {self.lengths:,} prompts differ in length from usage.prompt_tokens "
            f"({ours:,} tokens in all, and {theirs:,} reported): the tokenizer or its chat template is not the "
            "service's, so shared prefixes may differ as well"
        )
