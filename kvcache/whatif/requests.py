"""Requests that are played again: those that are on time, those that are late, and those that wait."""

from __future__ import annotations

from bisect import insort
from collections import deque

from kvcache.whatif.commands import OfOne, OfSeveral, Prompt

Step = OfOne | OfSeveral
"""A command about one sequence."""


class Played:
    """One request, its recorded steps that are still to be done, and how far it is behind."""

    __slots__ = ("delay", "prompt", "steps", "stopped_at")

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        """Of one that was removed to be admitted again, with the tokens that it had then."""
        self.steps: deque[tuple[int, Step]] = deque()
        """With the batch in which each was recorded."""
        self.delay = 0
        """Batches by which its steps come later than recorded."""
        self.stopped_at = 0
        """The batch in which it began to wait last."""

    @property
    def handle(self) -> int:
        """Its number in the log, and its id in the manager."""
        return self.prompt.handle

    def is_due(self, now: int) -> bool:
        """Whether its next step is to be done in this batch."""
        return bool(self.steps) and self.steps[0][0] + self.delay <= now


class Line:
    """Who waits for admission, in the order in which the log has them admitted."""

    def __init__(self) -> None:
        self._waiting: list[Played] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, request: Played, now: int) -> None:
        """Begin to wait."""
        request.stopped_at = now
        insort(self._waiting, request, key=lambda each: each.handle)

    def give_up(self, request: Played) -> None:
        """Wait no longer."""
        self._waiting.remove(request)

    @property
    def first(self) -> Played:
        """Who is to be admitted next."""
        return self._waiting[0]

    def leave(self, now: int) -> Played:
        """The first one was admitted at the end of a batch: it goes on in the next one."""
        request = self._waiting.pop(0)
        request.delay += now + 1 - request.stopped_at
        return request
