"""Sequences looked up by request id, and the batch that decodes together, step after step.

The next one to fill a block depends only on the lengths, so it is worked out once, when the batch changes, and not for
every token: a step in which nothing fills costs a list comparison and one event.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from events.tokens.sequences import lengths
from events.types import RequestId
from kvcache.errors import InvalidTokens, UnknownRequest, UsageError, invariant
from kvcache.fold.sequence import Sequence, is_steady, not_decoding, packed_handles
from kvcache.fold.state import CacheState
from kvcache.inputs import checked_request_id
from kvcache.layout import Bound

PLAIN_IDS = frozenset((str, int))
"""Types of ids that are looked up as they are."""


class DecodeBatch:
    """Fixed set of sequences that get one token each per step. Holds nothing that cannot be derived from the state."""

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
        """Types of the ids: a value that is no id may equal one (1.0, True), or do anything when it is compared."""
        self.sequences = sequences
        self.handles = packed_handles(sequences)
        """Packed int64."""
        self.is_steady = is_steady(sequences, tokens_per_block)
        """True if the step is like all that follow; if not, its sequences are checked one by one."""
        self._period = tokens_per_block
        self._steps = 0
        ends = lengths(sequences)
        self._steps_left = limit - max(ends, default=0)
        self._due: dict[int, list[Sequence]] = {}
        for end, sequence in zip(ends, sequences, strict=True):
            self._due.setdefault(-end % tokens_per_block, []).append(sequence)
        self._windows = windows
        self._beginning = not_decoding(sequences) if windows else []
        """Their prompts may not have been recorded as computed."""

    @property
    def at_limit(self) -> bool:
        """True if some sequence cannot get another token."""
        return self._steps >= self._steps_left

    @property
    def due(self) -> list[Sequence] | None:
        """Sequences that need a new block for their next token; None: there is none."""
        return self._due.get(self._steps % self._period)

    @property
    def begun(self) -> Items[Sequence]:
        """Sequences with a last token that is the first of a block; before the first step all of them."""
        return self._due.get((self._steps - 1) % self._period, ()) if self._steps else self.sequences

    def sliding_out(self, window: int) -> Items[Sequence]:
        """Sequences of which a sliding window, given by its number, may leave a block in this step."""
        # A sequence that fills a block in one step leaves one later, by as many steps as the window is longer than
        # blocks.
        sliding_out = self._due.get((self._steps - self._windows[window] + 1) % self._period, ())
        if self._steps or not self._beginning:
            return sliding_out
        chosen = {*sliding_out, *self._beginning}
        return [each for each in self.sequences if each in chosen]

    def check(self) -> None:
        """Raise `InvariantViolated` if the batch's own count has diverged from the sequences."""
        for step, sequences in self._due.items():
            left = (step - self._steps) % self._period
            fits = all(-each.num_tokens % self._period == left for each in sequences)
            invariant(fits, "a block would be allocated in another step than the one that fills it")

    def advance(self) -> None:
        """Advance by one token per sequence."""
        self._steps += 1


class RunningRequests:
    """Lookup of the sequences of running requests, with the last decode batch cached."""

    def __init__(self, state: CacheState, windows: Items[int] = ()) -> None:
        self._state, self._windows = state, windows
        self.batch: DecodeBatch | None = None
        """Batch of the last step, while the next one may be like it."""

    def sequence(self, request_id: RequestId) -> Sequence:
        """Return the sequence of a request; raises `UnknownRequest`, or `UsageError` for an invalid id."""
        if type(request_id) is not str and type(request_id) is not int:
            request_id = checked_request_id(request_id)
        handle = self._state.handles.get(request_id)
        if handle is None:
            raise UnknownRequest(checked_request_id(request_id))
        return self._state.sequences[handle]

    def sequences(self, request_ids: list[RequestId]) -> list[Sequence]:
        """Return the sequences of these requests; raises as `sequence` does, and `UsageError` for one named twice."""
        handles, sequences = self._state.handles, self._state.sequences
        if not PLAIN_IDS.issuperset(map(type, request_ids)):
            request_ids = [checked_request_id(request_id) for request_id in request_ids]
        try:
            running = list(map(sequences.__getitem__, map(handles.__getitem__, request_ids)))
        except Exception:  # noqa: BLE001  unknown, or no id at all: find out which one, and why
            running = [self.sequence(request_id) for request_id in request_ids]
        if len(set(running)) != len(running):
            raise UsageError("duplicate request id in request_ids; use counts to append several tokens")
        return running

    def decode_batch(self, request_ids: list[RequestId], num_tokens: int, limit: Bound) -> DecodeBatch:
        """Return the sequences that get one token each: the batch of the last step, if they are the same."""
        batch = self.batch
        # The fold's row of sequences is the batch's while nothing else has happened to them. Types before ids, for a
        # value that is no id may equal one.
        if (
            batch is None
            or self._state.running.handles != batch.handles
            or batch.kinds != list(map(type, request_ids))
            or batch.ids != request_ids
        ):
            size, running = self._state.tokens_per_block, self.sequences(request_ids)
            batch = DecodeBatch(request_ids, running, size, limit.tokens, self._windows)
        if num_tokens != len(batch.ids):
            raise InvalidTokens(
                f"{num_tokens} tokens were given for {len(batch.ids)} requests: pass one each, or counts"
            )
        if batch.at_limit:
            raise limit.exceeded_by(limit.tokens + 1)
        self.batch = batch
        return batch

    def check(self) -> None:
        """Raise `InvariantViolated` if the batch has diverged from the state."""
        if self.batch is not None and self._state.running.handles == self.batch.handles:
            self.batch.check()
