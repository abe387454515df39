"""Contents of blocks as numbers, and their history in one attention window.

Equal numbers mean equal tokens, equal tokens before them, and an equal namespace.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from events.feed.cache_fold import exported_runs
from events.packed import NAME_BYTES, TOKEN_BYTES
from events.structs import SymbolPage
from events.types import PRIMARY, BlocksMoved, GroupCreated, GroupExported, MoveReason, Namespace
from kvcache.audit.reasons import Reason

Ids = npt.NDArray[np.intp]
_FIRST = 1024


def leading_alike(one: npt.NDArray[np.integer], other: npt.NDArray[np.integer]) -> int:
    """Return the number of leading items that are equal."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


class Columns:
    """Named numpy columns of equal length, with a default for new rows."""

    def __init__(self, **defaults: tuple[type[np.generic], Any]) -> None:
        self._defaults = defaults
        self._of: dict[str, npt.NDArray[Any]] = {
            name: np.full(_FIRST, value, kind) for name, (kind, value) in defaults.items()
        }

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._of[name]

    def reach(self, rows: int) -> None:
        """Extend the columns to at least `rows` rows."""
        size = len(next(iter(self._of.values())))
        if rows <= size:
            return
        for name, (kind, value) in self._defaults.items():
            grown = np.full(max(rows, 2 * size), value, kind)
            grown[:size] = self._of[name]
            self._of[name] = grown


class ContentIds:
    """Numbering of contents in order of first appearance.

    Contents are identified by a chain of 64-bit hashes, with a new seed in every process: the probability that two of a
    billion blocks are confused is a few percent. That suffices to explain a log; no block is served by it.
    """

    def __init__(self) -> None:
        self._ids: dict[int, int] = {}
        self._salts: dict[Namespace, int] = {}
        self._chains = array("q")
        """Per content: its chain without the namespace."""
        self._parents = array("q")
        """Per content: the block before it, -1 at the start of a prompt."""
        self._pages: dict[int, int] = {}
        """Per page of symbols, by its current number: a hash of what its symbols stand for."""
        self._alike: dict[int, list[int]] | None = None
        """Contents by chain; only if there are several namespaces."""

    def __len__(self) -> int:
        return len(self._chains)

    def extend(
        self, ids: array[int], namespace: Namespace, symbols: bytes, block_bytes: int, parent: int = -1
    ) -> None:
        """Append the numbers of the next full blocks of a sequence.

        The first of them continues the last of `ids`, or `parent` where there is none.
        """
        number = len(self._salts)
        salt = self._salts.setdefault(namespace, hash(("namespace", number)))
        if len(self._salts) > 1 and self._alike is None:
            self._alike = {}
            for content, other in enumerate(self._chains):
                self._alike.setdefault(other, []).append(content)
        contents, chains, parents, alike = self._ids, self._chains, self._parents, self._alike
        get, append, translated = contents.get, ids.append, bool(self._pages)
        parent = ids[-1] if ids else parent
        chain = chains[parent] if parent >= 0 else 0
        for begin in range(0, len(symbols) - block_bytes + 1, block_bytes):
            block = symbols[begin : begin + block_bytes]
            chain = hash((chain, self._meant(block) if translated else block))
            known = get(chain ^ salt)
            if known is None:
                known = contents[chain ^ salt] = len(chains)
                chains.append(chain)
                parents.append(parent)
                if alike is not None:
                    alike.setdefault(chain, []).append(known)
            parent = known
            append(known)

    def _meant(self, block: bytes) -> bytes | tuple[object, ...]:
        """Return what a block's symbols stand for: negative numbers are reused once their meanings are forgotten."""
        symbols = array("i", block)
        if min(symbols) >= 0:
            return block
        return tuple(
            each if each >= 0 else (self._pages[(-1 - each) >> 8], (-1 - each) & 255) for each in symbols
        )

    def learn(self, pages: Iterable[SymbolPage], *, again: bool = False) -> None:
        """Set the meaning of symbols from now on; `anew` forgets all others."""
        if again:
            self._pages.clear()
        for page in pages:
            meaning = (page.token, page.extra_id, page.digest, page.offset)
            self._pages[page.number] = hash(meaning)

    def named(self, names: bytes) -> array[int]:
        """Return the numbers of blocks that are known by name only: those of a log without tokens."""
        ids = array("q")
        for name in array("q", names):
            known = self._ids.get(name)
            if known is None:
                known = self._ids[name] = len(self._chains)
                self._chains.append(name)
                self._parents.append(-1)
                if self._alike is not None:
                    self._alike.setdefault(name, []).append(known)
            ids.append(known)
        return ids

    def parents(self) -> npt.NDArray[np.int64]:
        """Return, per content, the block before it; -1 at the start of a prompt."""
        return np.array(self._parents, np.int64)

    @property
    def has_several_namespaces(self) -> bool:
        """True if the same tokens may be cached twice."""
        return self._alike is not None

    def elsewhere(self, content: int) -> list[int]:
        """Return the contents with the same tokens in other namespaces."""
        if self._alike is None:
            return []
        return [other for other in self._alike.get(self._chains[content], ()) if other != content]


_COPIES = {
    MoveReason.OFFLOAD: ("offloads", "offloaded_at"),
    MoveReason.ONBOARD: ("onboards", "onboarded_at"),
}
NOWHERE = -1
"""Marker: as a level, not cached; as a content, an empty slot."""


class Window:
    """One group of the log. Rows are contents (`ContentIds`), times are wall-clock ns."""

    def __init__(self, created: GroupCreated) -> None:
        self.created = created
        self.slots: tuple[npt.NDArray[np.int64], ...] = tuple(
            np.full(size, NOWHERE, np.int64) for size in created.num_blocks
        )
        """Per level: the content of each slot."""
        self.of = Columns(
            level=(np.int8, NOWHERE),
            seen=(np.int8, 0),
            why=(np.int8, 0),
            stored_by=(np.int32, -1),
            stored_batch=(np.int64, -1),
            stored_at=(np.int64, 0),
            used_at=(np.int64, 0),
            uses=(np.int32, 0),
            served=(np.int32, 0),
            holders=(np.int32, 0),
            priority=(np.int8, 0),
            offloads=(np.int32, 0),
            offloaded_at=(np.int64, 0),
            onboards=(np.int32, 0),
            onboarded_at=(np.int64, 0),
            gone_batch=(np.int64, -1),
            gone_at=(np.int64, 0),
            gone_by=(np.int32, -1),
        )
        """Per content: level in which it is cached; if it ever was; `Reason`, time and beneficiary of its removal;
        storing request and time; last use; reuses since it was stored, and in all; number of sequences and pins that
        hold it; priority; copies to each level since it was stored, and time of the last one. Requests are numbered as
        they come (`RunningRequest.number`)."""

    def contents(self, level: int, slots: bytes | array[int]) -> Ids:
        """Return the contents of these slots; NOWHERE for blocks that are not full, or not cached."""
        return self.slots[level][np.frombuffer(slots, np.int32)].astype(np.intp)

    def store(
        self,
        ids: Ids,
        slots: npt.NDArray[np.int32],
        level: int,
        priority: int,
        by: int,
        batch: int,
        now: int,
        *,
        new: npt.NDArray[np.bool_] | slice = slice(None),
    ) -> None:
        """Mark contents as cached from now on; `new` selects those whose life begins now."""
        of = self.of
        self.slots[level][slots] = ids
        of["level"][ids], of["seen"][ids], of["priority"][ids], of["holders"][ids] = level, 1, priority, 0
        begun = ids[new]
        of["stored_by"][begun], of["stored_batch"][begun] = by, batch
        of["stored_at"][begun] = of["used_at"][begun] = now
        for name in ("uses", "offloads", "onboards"):
            of[name][begun] = 0

    def restore(
        self, ids: Ids, slots: npt.NDArray[np.int32], level: int, priority: int, batch: int, now: int
    ) -> None:
        """Cache contents listed by an exported state of this batch. Those cached before live on; others have no
        history.
        """
        lost_now = (self.of["gone_batch"][ids] == batch) & (self.of["why"][ids] == Reason.RESTARTED)
        self.store(ids, slots, level, priority, -1, batch, now, new=~lost_now)

    def move(self, event: BlocksMoved, now: int) -> Ids:
        """Move contents to other slots; return them."""
        ids = self.contents(event.from_level, event.from_slots)
        self.slots[event.from_level][np.frombuffer(event.from_slots, np.int32)] = NOWHERE
        self.slots[event.to_level][np.frombuffer(event.to_slots, np.int32)] = ids
        ids = ids[ids >= 0]
        self.of["level"][ids] = event.to_level
        if (copies := _COPIES.get(event.why)) is not None:
            self.of[copies[0]][ids] += 1
            self.of[copies[1]][ids] = now
        return ids

    def remove(
        self, level: int, slots: bytes, by: int, batch: int, now: int, *, invalid: bool = False
    ) -> Ids:
        """Remove contents; return them."""
        ids = self.contents(level, slots)
        self.slots[level][np.frombuffer(slots, np.int32)] = NOWHERE
        ids = ids[ids >= 0]
        why = Reason.INVALIDATED if invalid else Reason.EVICTED if level == PRIMARY else Reason.DROPPED
        self._lose(ids, why, by, batch, now)
        return ids

    def remove_all(self, why: Reason, batch: int, now: int) -> Ids:
        """Remove everything cached; return it."""
        ids = np.flatnonzero(self.of["level"] != NOWHERE)
        self._lose(ids, why, NOWHERE, batch, now)
        for slots in self.slots:
            slots.fill(NOWHERE)
        return ids

    def _lose(self, ids: Ids, why: Reason, by: int, batch: int, now: int) -> None:
        of = self.of
        of["level"][ids], of["why"][ids] = NOWHERE, why
        of["gone_by"][ids], of["gone_batch"][ids], of["gone_at"][ids] = by, batch, now

    def hold(self, ids: Ids) -> None:
        """Add a holder to contents."""
        self.of["holders"][ids] += 1

    def release(self, ids: Ids, now: int) -> None:
        """Remove a holder from contents."""
        self.of["holders"][ids] -= 1
        self.of["used_at"][ids] = now

    def reuse(self, ids: Ids, now: int) -> None:
        """Count a request's reuse of contents."""
        for name in ("uses", "served"):
            self.of[name][ids] += 1
        self.of["used_at"][ids] = now


CachedPiece = tuple[Ids, npt.NDArray[np.int32], int, int, bytes]
"""Contents, their slots, level and priority, and names (empty if the log has none)."""


def cached_in(
    exported: GroupExported, known: ContentIds, tokens_per_block: int, key_bytes: int, *, with_tokens: bool
) -> Iterator[CachedPiece]:
    """Yield the full blocks of one group that an exported state has cached, run by run."""
    ends: list[int] = []
    for run in exported_runs(exported, tokens_per_block, key_bytes):
        names = run.names[: run.full * NAME_BYTES]
        if with_tokens:
            ids, size = array("q"), tokens_per_block * TOKEN_BYTES
            above = ends[run.parent] if run.parent >= 0 else -1
            known.extend(ids, run.namespace, run.symbols[: run.full * size], size, above)
            ends.append(ids[-1] if ids else above)
        else:
            ids = known.named(names)
        contents, slots = np.array(ids, np.intp), np.frombuffer(run.slots, np.int32)
        for (level, priority, _), begin, end in run.pieces():
            own = names[begin * NAME_BYTES : end * NAME_BYTES]
            yield contents[begin:end], slots[begin:end], level, priority, own
