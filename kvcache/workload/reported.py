"""What a service reported of its prompts, beside what its trace lets one expect: their lengths, and what was cached."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from kvcache.workload.traces import TraceRequest
from kvcache.workload.watching import WatchedStep

HOUR_MS = 3_600_000


@dataclass(slots=True)
class ReportedHour:
    """The requests that came in one hour of a trace, as far as the service said what it had cached; in tokens."""

    hour: int
    """From the trace's beginning, from 0."""
    requests: int = 0
    prompt_tokens: int = 0
    reported: int = 0
    """Cached, as the service says."""
    unlimited: int = 0
    """In whole blocks that a prompt before began with."""
    played: int = 0
    """In whole blocks that the cache had through which the trace was played."""


class ReportedReuse:
    """Compares what a trace reports of its requests with what is expected of them.

    `see` is called with each request, in the trace's order, and `watch` with each step of an engine that plays it.
    """

    def __init__(self) -> None:
        self.lengths = self.other_lengths = 0
        """Prompts of which the service reported the length; those that are longer or shorter than it says."""
        self.tokens = (0, 0)
        """Of all these prompts: as the trace has them, and as it was reported."""
        self._by_hour: dict[int, ReportedHour] = {}
        self._hour_of = array("q")
        """By the request's place in the trace; -1: nothing is reported."""

    def see(self, request: TraceRequest, unlimited: int) -> int:
        """Count a request, of which an unlimited cache would have had so many tokens; returns how many there were."""
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

    def watch(self, step: WatchedStep) -> None:
        """Count what the requests of a step found in the cache."""
        for place, admission in step.admitted.items():
            if (number := self._hour_of[place]) >= 0:
                self._by_hour[number].played += admission.reused_primary + admission.reused_secondary

    @property
    def hours(self) -> list[ReportedHour]:
        """Those with requests of which is reported what was cached, in order."""
        return sorted(self._by_hour.values(), key=lambda each: each.hour)

    @property
    def doubt(self) -> str | None:
        """Why the prompts may not be those that the service had, in words; None: nothing speaks against it."""
        if not self.other_lengths:
            return None
        ours, theirs = self.tokens
        return (
            f"{self.other_lengths:,} of {self.lengths:,} prompts have another length than usage.prompt_tokens says "
            f"({ours:,} tokens in all, and {theirs:,} reported): the tokenizer or its chat template is not the "
            "service's, so that what prompts share may differ, too"
        )
