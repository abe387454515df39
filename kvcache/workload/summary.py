"""What a played trace amounted to: the counts that a run collects and the result that it returns."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from events.errors import LogWriteFailed
from kvcache.results import Admission
from kvcache.workload.copies import TimedCopier

MAX_NAMED_REFUSALS = 100
"""All refusals are counted, so many are named."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that could not be served even by an idle cache."""

    request_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class RunResult:
    """Counts of a run. Equal inputs give equal results but for the times."""

    requests: int
    """Requests that ran to their end."""
    refused: int
    refusals: tuple[Refusal, ...]
    """The first of them by name."""
    prompt_tokens: int
    """Of all admitted requests."""
    output_tokens: int
    reused_tokens: int
    """Prompt tokens that were found in the cache; the sum of the following three."""
    reused_tokens_primary: int
    reused_tokens_secondary: int
    reused_tokens_partial: int
    recomputed_tokens: int
    """Reused tokens whose copy failed, so that they were computed after all."""
    steps: int
    manager_seconds: float
    """Time inside the manager's calls, without that of the copies, if these are measured."""
    step_us_p50: float
    """Median over the steps of the time inside the manager, in microseconds."""
    step_us_p99: float
    checked_blocks: int
    """Reused blocks whose bytes were compared, over all groups."""
    checked_final_blocks: int
    """Blocks that were compared once more when their request ended, over all groups."""
    interrupted: bool
    """Whether the run ended before the trace did: by the stop flag, or by its log."""
    log_failure: LogWriteFailed | None = None
    """Why the log ended the run (`overflow` "block"); None: it did not."""

    @property
    def hit_rate(self) -> float:
        """Reused part of the prompt tokens, 0 to 1."""
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class RunCounts:
    """What a run counts while it lasts."""

    def __init__(self) -> None:
        self.requests = 0
        self.refused = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.reused = [0, 0, 0]
        """From primary, from secondary, partial."""
        self.recomputed_tokens = 0
        self.checked_blocks = 0
        self.checked_final_blocks = 0
        self._refusals: list[Refusal] = []

    def refuse(self, refusals: deque[Refusal]) -> None:
        """Count refusals, taking them out of the deque."""
        while refusals:
            self.refused += 1
            refusal = refusals.popleft()
            if len(self._refusals) < MAX_NAMED_REFUSALS:
                self._refusals.append(refusal)

    def admit(self, admission: Admission) -> None:
        """Count an admitted prompt and what it found."""
        self.prompt_tokens += admission.num_tokens
        self.reused[0] += admission.reused_primary
        self.reused[1] += admission.reused_secondary
        self.reused[2] += admission.reused_partial

    def end(self, num_outputs: int, *, finished: bool) -> None:
        """Count a request that ended, finished or not."""
        self.requests += finished
        self.output_tokens += num_outputs

    def result(
        self, times: StepTimes, *, interrupted: bool, log_failure: LogWriteFailed | None = None
    ) -> RunResult:
        """Return the counts as they are now."""
        primary, secondary, partial = self.reused
        return RunResult(
            requests=self.requests,
            refused=self.refused,
            refusals=tuple(self._refusals),
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            reused_tokens=primary + secondary + partial,
            reused_tokens_primary=primary,
            reused_tokens_secondary=secondary,
            reused_tokens_partial=partial,
            recomputed_tokens=self.recomputed_tokens,
            steps=len(times),
            manager_seconds=times.seconds(),
            step_us_p50=times.percentile_us(50),
            step_us_p99=times.percentile_us(99),
            checked_blocks=self.checked_blocks,
            checked_final_blocks=self.checked_final_blocks,
            interrupted=interrupted,
            log_failure=log_failure,
        )


class StepTimes:
    """Adds up the time inside the manager, per step; what happens between two timed calls does not count.

    Nor does the time of `copies` inside them.
    """

    def __init__(self, copies: TimedCopier | None = None) -> None:
        self._copies = copies
        self._steps = array("q")
        self._current = 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time of the body to the current step."""
        copying, started = self._copying(), time.perf_counter_ns()
        try:
            yield
        finally:
            self._current += time.perf_counter_ns() - started - (self._copying() - copying)

    def _copying(self) -> int:
        return 0 if self._copies is None else self._copies.nanoseconds

    def end_step(self) -> None:
        """Close the current step."""
        self._steps.append(self._current)
        self._current = 0

    def __len__(self) -> int:
        return len(self._steps)

    def seconds(self) -> float:
        """Return the sum, including a step that has not ended."""
        return (sum(self._steps) + self._current) / 1e9

    def percentile_us(self, percent: float) -> float:
        """Return a percentile over the ended steps in microseconds; 0 if there is none."""
        if not self._steps:
            return 0.0
        return float(np.percentile(np.frombuffer(self._steps, dtype=np.int64), percent)) / 1e3
