"""What became of each prompt token of one admission, also in groups that share a pool."""

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


@dataclass(frozen=True, slots=True)
class Lacking:
    """Leading blocks of a prompt that full attention has, and that another group cannot go on behind."""

    group: int
    kind: str
    window: int
    """In tokens; 0 where the kind has none."""
    first_block: int
    """The first that is lost by that, of full attention's."""
    stop_block: int
    gone_batch: int = -1
    """When the last of what is missing went; -1: it never had a name."""
    gone_at: int = -1
    gone_by: int = -1
    """The number of the request that needed the room."""


class SharedGroup:
    """The names of one group, as numbers."""

    def __init__(self, number: int, made: ev.SharingGroup, key_bytes: int) -> None:
        self.number, self.made, self._key_bytes = number, made, key_bytes
        self._named = Counter[int]()
        self.gone: dict[int, tuple[int, int, int]] = {}
        """By name: the batch, the time and the number of the request for which it went last."""
        self._named.update(self._numbers(made.keys))

    def _numbers(self, keys: bytes) -> Iterator[int]:
        for at in range(0, len(keys), self._key_bytes):
            yield int.from_bytes(keys[at : at + NAME_BYTES], "little")

    def name(self, keys: bytes) -> None:
        """Blocks have got these names."""
        self._named.update(self._numbers(keys))

    def unname(self, keys: bytes, batch: int, at: int, by: int) -> None:
        """Blocks have lost these names."""
        for name in self._numbers(keys):
            self._named[name] -= 1
            if not self._named[name]:
                del self._named[name]
                self.gone[name] = batch, at, by

    def clear(self, batch: int, at: int) -> None:
        """Nothing has a name any more."""
        self.gone.update(dict.fromkeys(self._named, (batch, at, -1)))
        self._named.clear()

    def serves(self, names: list[int], size: int) -> list[bool]:
        """Whether the group can go on behind so many leading blocks of `size` tokens, from none to all of them.

        `names` are those of the blocks. What ends between two of them is taken for present.
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
        """The same where the block behind these is looked up, too, and computed again."""
        if self.made.kind in (STATE, UNCACHED):
            return served[:-1]
        behind = [*served[max(1, self.made.tokens_per_block // size) :], *[False] * len(served)]
        return [at == 0 or (served[at] and behind[at]) for at in range(len(served) - 1)]

    def missing(self, names: list[int], size: int) -> Iterator[int]:
        """The names that would be needed to go on behind all of these blocks, and that nothing has."""
        own, position = self.made.tokens_per_block, len(names) * size
        for at in range(position, position - self._needed(position) * own, -own):
            if not self._has(names, at, size):
                yield names[at // size - 1]

    def _has(self, names: list[int], position: int, size: int) -> bool:
        name = 0 if position % size else names[position // size - 1]
        return not name or name in self._named

    def _needed(self, position: int) -> int:
        """How many blocks that end with the last of so many tokens must have names."""
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
        """Begin with these, which are numbered from `first` on; what had gone before is known still."""
        self.groups = [SharedGroup(first + at, made, key_bytes) for at, made in enumerate(event.groups)]
        for old, new in zip(self._before, self.groups, strict=False):
            new.gone = old.gone

    def end(self, batch: int, at: int) -> None:
        """What follows tells the state anew."""
        self.clear(batch, at)
        if self.groups:
            self._before, self.groups = self.groups, []

    def clear(self, batch: int, at: int) -> None:
        """Nothing has a name any more."""
        for group in self.groups:
            group.clear(batch, at)

    def lacking(self, names: Names, reused: int, size: int, *, drops_last: bool = False) -> Lacking | None:
        """Which group lost blocks of a prompt that full attention had, of which `reused` were taken; None: none did.

        `names` are those of the leading blocks that it had. Of several groups it is the one that can go on behind the
        fewest of them. `drops_last`: the engine computes the last of them again, and groups other than states must
        be able to go on behind that one, too.
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
        kind, window, first = guilty.made.kind, guilty.made.window, max(reused, common)
        return Lacking(guilty.number, kind, window, first, blocks, *max(gone, default=(-1, -1, -1)))


class RequestOrigin(NamedTuple):
    """Where a request comes from, as its engine says; nothing of a request that ran before the log's beginning."""

    session: str | None = None
    labels: dict[str, str] | None = None


NO_ORIGIN = RequestOrigin()


@dataclass(eq=False, slots=True)
class ExplainedAdmission:
    """One request, as it was admitted; `counts` is known when its batch is over."""

    number: int
    """Admissions of the log before this one."""
    request_id: RequestId
    namespace: Namespace
    batch: int
    at: int
    """Wall-clock ns."""
    num_tokens: int
    reused: int
    partial: int
    """Of the reused tokens, those of a copied block."""
    external: int
    """Tokens after the reused ones that were to be loaded from outside."""
    tokens_per_block: int
    handle: int
    resumed: bool
    """It had run before, and was preempted."""
    ids: Ids
    """The contents of the blocks that end before the last token; empty for a log without tokens."""
    reasons: npt.NDArray[np.int8]
    """`Reason` per block, of its `tokens`."""
    windows: npt.NDArray[np.int8]
    """Per block the window (as an index) that the reason is about; -1: none in particular."""
    lacking: Lacking | None = None
    """What a further group lost of it."""
    facts: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    """For who asked for details: what was known of each block."""
    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(Reason), np.int64))
    """Prompt tokens by reason."""
    origin: RequestOrigin = NO_ORIGIN

    def spans(self) -> list[tuple[int, int, Reason, int]]:
        """The prompt in parts of one reason: first token, the one behind the last, reason, window."""
        size, last = self.tokens_per_block, self.num_tokens - 1
        spans: list[tuple[int, int, Reason, int]] = []
        for block, (reason, window) in enumerate(
            zip(self.reasons.tolist(), self.windows.tolist(), strict=True)
        ):
            begin, end = block * size, min((block + 1) * size, last)
            middle = min(max(self.reused, begin), end)
            if begin < middle and reason not in (Reason.PRIMARY, Reason.SECONDARY):
                spans.append((begin, middle, Reason.PARTIAL, -1))
                begin = middle
            middle = min(max(self.reused + self.external, begin), end)
            if begin < middle and reason > Reason.EXTERNAL:
                spans.append((begin, middle, Reason.EXTERNAL, -1))
                begin = middle
            if begin < end:
                spans.append((begin, end, Reason(reason), window))
        return [*spans, (last, last + 1, Reason.LAST_TOKEN, -1)]

    def tokens(self) -> npt.NDArray[np.int64]:
        """Per block the tokens in it that the reason is about: neither reused nor loaded in part, nor the last one."""
        size, last = self.tokens_per_block, self.num_tokens - 1
        begins = np.arange(len(self.reasons)) * size
        tokens = np.minimum(begins + size, last) - begins
        if self.partial:
            tokens[(self.reused - self.partial) // size] -= self.partial
        if self._begun:
            tokens[(self.reused + self.external) // size] -= self._begun
        return tokens

    @property
    def _begun(self) -> int:
        """Tokens that were to be loaded in a block that was to be loaded only in part."""
        end = self.reused + self.external
        return end % self.tokens_per_block if self.external and end < self.num_tokens - 1 else 0

    def count(self) -> None:
        """Fill `counts`."""
        self.counts += np.bincount(self.reasons, self.tokens(), len(Reason)).astype(np.int64)
        self.counts[Reason.PARTIAL] += self.partial
        self.counts[Reason.EXTERNAL] += self._begun
        self.counts[Reason.LAST_TOKEN] += 1
