"""The sequences that an engine decodes together, step after step.

Which of them fills a block next depends only on how long each is, so it is worked out once, when the batch changes,
and not for every token: a step in which nothing fills costs a list comparison and one event.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from events.tokens.sequences import lengths
from events.types import RequestId
from kvcache.errors import invariant
from kvcache.fold.sequence import Sequence, go_on_evenly, not_decoding, packed_handles

PLAIN_IDS = frozenset((str, int))
"""Types of ids that are looked up as they are."""


class DecodeBatch:
    """A fixed set of sequences that get one token each per step. Holds nothing that the state does not say."""

    __slots__ = (
        "_beginning",
        "_due",
        "_period",
        "_steps",
        "_steps_left",
        "_windows",
        "even",
        "handles",
        "ids",
        "kinds",
        "sequences",
    )

    def __init__(
        self,
        ids: Items[RequestId],
        sequences: list[Sequence],
        tokens_per_block: int,
        limit: int,
        windows: Items[int] = (),
    ) -> None:
        self.ids = list(ids)
        kinds: list[type] = list(map(type, ids))
        self.kinds = kinds if PLAIN_IDS.issuperset(kinds) else None
        """Their types: what is no id may equal one (1.0, True), or do anything when it is compared."""
        self.sequences = sequences
        self.handles = packed_handles(sequences)
        """Packed int64."""
        self.even = go_on_evenly(sequences, tokens_per_block)
        """Whether the step is like all that follow; if not, its sequences are looked at one by one."""
        self._period = tokens_per_block
        self._steps = 0
        ends = lengths(sequences)
        self._steps_left = limit - max(ends, default=0)
        self._due: dict[int, list[Sequence]] = {}
        for end, sequence in zip(ends, sequences, strict=True):
            self._due.setdefault(-end % tokens_per_block, []).append(sequence)
        self._windows = windows
        self._beginning = not_decoding(sequences) if windows else []
        """Nobody may have said before how far their prompts are computed."""

    @property
    def at_limit(self) -> bool:
        """Whether some sequence cannot get another token."""
        return self._steps >= self._steps_left

    @property
    def due(self) -> list[Sequence] | None:
        """The sequences whose next token needs a new block; None: there is none."""
        return self._due.get(self._steps % self._period)

    def leaving(self, window: int) -> Items[Sequence]:
        """The sequences of which a sliding window, by its number, may leave a block behind in this step."""
        # Who fills a block in one step leaves one in another, as many steps later as the window is longer than blocks.
        leaving = self._due.get((self._steps - self._windows[window] + 1) % self._period, ())
        if self._steps or not self._beginning:
            return leaving
        chosen = {*leaving, *self._beginning}
        return [each for each in self.sequences if each in chosen]

    def check(self) -> None:
        """Raise `InvariantViolated` if the batch's own count has left what the sequences say."""
        for step, sequences in self._due.items():
            left = (step - self._steps) % self._period
            fits = all(-each.num_tokens % self._period == left for each in sequences)
            invariant(fits, "a block would be allocated in another step than the one that fills it")

    def advance(self) -> None:
        """Every sequence got its token."""
        self._steps += 1
