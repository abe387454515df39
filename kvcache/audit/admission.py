"""Origin of each prompt token of one admission, also in groups that share a pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from events import types as ev
from events.packed import NAME_BYTES
from events.types import CHUNKED, FULL, SLIDING, STATE, UNCACHED, Namespace, RequestId
from kvcache.audit.contents import Ids
from kvcache.audit.reasons import Reason

Names = npt.NDArray[np.uint64]
Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Lacking:
    """Leading blocks of a prompt that full attention has, and after which another group cannot continue."""

    group: int
    kind: str
    first_block: int
    """First of full attention's blocks that is lost for that reason."""
    stop_block: int
    gone_batch: int = -1
    """Batch in which the last missing block was removed; -1: it never had a name."""
    gone_at: int = -1
    gone_by: int = -1
    """Number of the request that needed the room."""


class SharedGroup:
    """Names of one group's blocks, as numbers."""

    def __init__(self, number: int, made: ev.SharingGroup, key_bytes: int) -> None:
        self.number, self.made, self._key_bytes = number, made, key_bytes
        self._named = Counter(self._numbers(made.keys))
        self.gone: dict[int, tuple[int, int, int]] = {}
        """By name: batch, time and request number of its last removal."""

    def _numbers(self, keys: bytes) -> Iterator[int]:
        for at in range(0, len(keys), self._key_bytes):
            yield int.from_bytes(keys[at : at + NAME_BYTES], "little")

    def name(self, keys: bytes) -> None:
        """Add names given to blocks."""
        self._named.update(self._numbers(keys))

    def unname(self, keys: bytes, batch: int, at: int, by: int) -> None:
        """Remove names that blocks have lost."""
        for name in self._numbers(keys):
            self._named[name] -= 1
            if not self._named[name]:
                del self._named[name]
                self.gone[name] = batch, at, by

    def clear(self, batch: int, at: int) -> None:
        """Remove all names."""
        self.gone.update(dict.fromkeys(self._named, (batch, at, -1)))
        self._named.clear()

    def serves(self, names: list[int], size: int) -> list[bool]:
        """Return if the group can continue after each number of leading blocks of `size` tokens, from none to all.

        `names` are those of the blocks. Blocks that end between two of them count as present.
        """
        own, run, served = self.made.tokens_per_block, 0, [True]
        for position in range(own, len(names) * size + 1, own):
            run = run + 1 if self._has(names, position, size) else 0
            while len(served) * size < position:
                served.append(False)
            if position % size == 0:
                served.append(run >= self._needed(position))
        return served + [False] * (len(names) + 1 - len(served))

    def serves_before(self, served: list[bool], size: int) -> list[bool]:
        """Return `serves` for lookups that include the next block and compute it again."""
        if self.made.kind in (STATE, UNCACHED):
            return served[:-1]
        next_served = [*served[max(1, self.made.tokens_per_block // size) :], *[False] * len(served)]
        return [at == 0 or (served[at] and next_served[at]) for at in range(len(served) - 1)]

    def missing(self, names: list[int], size: int) -> Iterator[int]:
        """Yield the names that are needed to continue after all of these blocks, and that no block has."""
        own, position = self.made.tokens_per_block, len(names) * size
        for at in range(position, position - self._needed(position) * own, -own):
            if not self._has(names, at, size):
                yield names[at // size - 1]

    def _has(self, names: list[int], position: int, size: int) -> bool:
        name = 0 if position % size else names[position // size - 1]
        return not name or name in self._named

    def _needed(self, position: int) -> int:
        """Return how many blocks up to that position in tokens must have names."""
        own, window = self.made.tokens_per_block, self.made.window
        return {
            FULL: position // own,
            SLIDING: min(position // own, -(-(window - 1) // own)),
            CHUNKED: -(-(position % window if window else 0) // own),
            STATE: 1,
        }.get(self.made.kind, 0)


class SharedGroups:
    """All groups that share the pool of a log's first one."""

    def __init__(self) -> None:
        self.groups: list[SharedGroup] = []
        self._before: list[SharedGroup] = []

    def begin(self, event: ev.PoolShared, first: int, key_bytes: int) -> None:
        """Start with these groups, numbered from `first` on; earlier removals stay known."""
        self.groups = [SharedGroup(first + at, made, key_bytes) for at, made in enumerate(event.groups)]
        for old, new in zip(self._before, self.groups, strict=False):
            new.gone = old.gone

    def end(self, batch: int, at: int) -> None:
        """Drop the state, which the following events report anew."""
        self.clear(batch, at)
        if self.groups:
            self._before, self.groups = self.groups, []

    def clear(self, batch: int, at: int) -> None:
        """Remove all names."""
        for group in self.groups:
            group.clear(batch, at)

    def lacking(self, names: Names, reused: int, size: int, *, drops_last: bool = False) -> Lacking | None:
        """Return the group that lost blocks of a prompt that full attention had, `reused` of which were reused; None if
        none did.

        `names` are those of the leading blocks that it had. Of several groups, the one that can continue after the
        fewest is returned. If `drops_last`, the engine computes the last of them again, and groups other than states
        must also be able to continue after that one.
        """
        known, blocks = names.tolist(), len(names) - drops_last
        served = [group.serves(known, size) for group in self.groups]
        if drops_last:
            served = [
                group.serves_before(each, size) for group, each in zip(self.groups, served, strict=True)
            ]
        common = max(at for at in range(blocks + 1) if all(each[at] for each in served))
        if common == blocks:
            return None
        hits = [max(at for at in range(blocks + 1) if each[at]) for each in served]
        guilty = self.groups[hits.index(min(hits))]
        missing = set(guilty.missing(known[:blocks], size))
        if guilty.made.kind != STATE:
            missing.update(guilty.missing(known, size))
        gone = [guilty.gone[name] for name in missing if name in guilty.gone]
        last_gone = max(gone, default=(-1, -1, -1))
        return Lacking(guilty.number, guilty.made.kind, max(reused, common), blocks, *last_gone)


class RequestOrigin(NamedTuple):
    """Origin of a request, as reported by its engine; empty for a request that ran before the log's beginning."""

    session: str | None = None
    labels: dict[str, str] | None = None


NO_ORIGIN = RequestOrigin()


@dataclass(eq=False, slots=True)
class ExplainedAdmission:
    """One admitted request; `counts` is filled at the end of its batch."""

    number: int
    """Number of admissions in the log before this one."""
    request_id: RequestId
    namespace: Namespace
    batch: int
    at: int
    """Wall-clock ns."""
    num_tokens: int
    reused: int
    partial: int
    """Reused tokens from a block that was copied in part."""
    external: int
    """Tokens after the reused ones that were to be loaded from outside."""
    tokens_per_block: int
    handle: int
    resumed: bool
    """True if the request had run before and was preempted."""
    ids: Ids
    """Contents of the blocks that end before the last token; empty for a log without tokens."""
    reasons: npt.NDArray[np.int8]
    """`Reason` per block, which applies to its `tokens`."""
    windows: npt.NDArray[np.int8]
    """Window (as an index) per block that the reason concerns; -1: none in particular."""
    lacking: Lacking | None = None
    """Blocks that a further group lacked."""
    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(Reason), np.int64))
    """Prompt tokens by reason."""
    origin: RequestOrigin = NO_ORIGIN

    def pieces(self) -> tuple[Tokens, Tokens, Tokens, Tokens]:
        """Return columns of the prompt's pieces, which have one reason each: first token, token after the last, reason,
        window.

        A piece is a block, a part of a block that was copied or loaded only in part, or the last token.
        """
        size, last = self.tokens_per_block, self.num_tokens - 1
        cuts = [cut for cut in {self.reused, self.reused + self.external} if cut % size and cut <= last]
        begins = np.append(np.arange(len(self.reasons)) * size, [*{*cuts, last}])
        begins.sort()
        blocks = begins[:-1] // size
        reasons = np.append(self.reasons[blocks], Reason.LAST_TOKEN)
        windows = np.append(self.windows[blocks], -1)
        for cut in cuts:
            before = int(np.searchsorted(begins, cut)) - 1
            reason = Reason.PARTIAL if cut == self.reused else Reason.EXTERNAL
            if reasons[before] > reason:
                reasons[before], windows[before] = reason, -1
        return begins, np.append(begins[1:], last + 1), reasons, windows

    def spans(self) -> list[tuple[int, int, Reason, int]]:
        """Return the same pieces one by one."""
        columns = (column.tolist() for column in self.pieces())
        return [
            (first, stop, Reason(reason), window)
            for first, stop, reason, window in zip(*columns, strict=True)
        ]

    def tokens(self) -> Tokens:
        """Return the tokens per block that the reason concerns: neither reused nor loaded in part, nor the last one."""
        begins, stops, reasons, _ = (column[:-1] for column in self.pieces())
        blocks = begins // self.tokens_per_block
        lengths = np.where(reasons == self.reasons[blocks], stops - begins, 0)
        return np.bincount(blocks, lengths, len(self.reasons)).astype(np.int64)

    def count(self) -> None:
        """Fill `counts`."""
        begins, stops, reasons, _ = self.pieces()
        self.counts += np.bincount(reasons, stops - begins, len(Reason)).astype(np.int64)
