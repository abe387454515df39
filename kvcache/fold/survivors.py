"""The part of a state that survives its process: the blocks in secondary with bytes that are still right.

Sequences, pins, copies on their way and all of primary are gone. A block in secondary is left if its copy had landed,
and its bytes have the checksum that they had then. With full attention all blocks before it must be left, too: a cached
block's parent is cached. In a sliding window it stays whatever became of the blocks around it.

What lay in primary before such blocks, as a system prompt in use does, can be recomputed by an engine with the model.
Then it is cached in primary, and the blocks after it are not lost.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from events.types import PRIMARY, SECONDARY, Namespace, StateExported
from kvcache.fold.full_group import FullGroup
from kvcache.fold.prefix_tree import Root, Run, root_of, runs_below
from kvcache.fold.sliding_group import HOLE, AnyGroup, SlidingGroup
from kvcache.fold.state import CacheState

Checksums = Callable[[int, npt.NDArray[np.int32]], bytes]
"""Read the checksums of what lies in these slots of a group's secondary level now: 8 bytes each."""


@dataclass(frozen=True, slots=True)
class LostPrefix:
    """Blocks that lay in primary, with surviving blocks after them: their K/V has to be recomputed."""

    namespace: Namespace
    tokens: npt.NDArray[np.int32]
    """Tokens of the whole prefix, up to the end of these blocks."""
    first_token: int
    """First token to compute K/V for. An earlier call has computed the ones before."""
    slots: npt.NDArray[np.int32]
    """Primary slots of all blocks of the prefix: the K/V is written there, and read from there."""


Recompute = Callable[[LostPrefix], bool]
"""Write the K/V of lost blocks to their slots. Returns False if impossible; the blocks after them are then lost, too.
"""


@dataclass(slots=True)
class Survey:
    """Counts of surviving and lost blocks in secondary."""

    verified: int = 0
    """Surviving: their bytes are right."""
    in_flight: int = 0
    """Their copies had not landed, according to the events."""
    changed: int = 0
    """Their bytes differ from what was copied, or no checksum is known."""
    unreachable: int = 0
    """A block before them is gone, so no prompt would find them."""
    recomputed: int = 0
    """Blocks that lay in primary and were recomputed, so that those after them are reachable."""

    @property
    def found(self) -> int:
        """Blocks in secondary according to the events."""
        return self.verified + self.in_flight + self.changed + self.unreachable


def find_survivors(
    state: CacheState,
    checksums: Checksums,
    primary_blocks: Sequence[int],
    recompute: Recompute | None = None,
) -> tuple[StateExported, Survey]:
    """Reduce `state` to its surviving part, and return that. `checksums` is called at most once for each block.

    `primary_blocks` is the number of blocks of each group from now on: primary is empty, so it may differ from before.
    `recompute` is called, parents first, for blocks of plain tokens that at least as many surviving ones follow, in a
    cache with one window of full attention.
    """
    survey = Survey()
    recompute = recompute if len(state.groups) == 1 else None
    for group, primary in zip(state.groups, primary_blocks, strict=True):
        verifier = _Verifier(group, checksums, survey)
        again = _Recomputed(group.tokens_per_block, primary, recompute)
        for root in list(group.tree.roots.values()):
            root.users = 0
            group.tree.drop_unused(root)
        runs = [run for root in group.tree.roots.values() for run in runs_below(root)]
        if isinstance(group, SlidingGroup):
            _reduce_sliding(group, runs, verifier)
        else:
            _reduce_full(state, group, runs, verifier, again)
        group.levels[PRIMARY].blank = array("i", range(again.used, primary))[::-1]
        blank = np.flatnonzero(verifier.right == 0)[::-1].astype(np.int32)
        group.levels[SECONDARY].blank = array("i", blank.tobytes())
        group.shared.clear()
        if group.uses is not None:
            group.uses.remember(primary + len(verifier.right))
    for each in (state.sequences, state.transfers, state.refused, state.pins):
        each.clear()
    return state.export(), survey


def _reduce_full(
    state: CacheState, group: FullGroup, runs: list[Run], verifier: _Verifier, again: _Recomputed
) -> None:
    """Cut off the lost blocks; the holders of the rest ended with the process."""
    lengths, tree = _lengths_in_full(runs, verifier, again), group.tree
    again.compute(runs, lengths, verifier)
    for run in reversed(runs):
        if not lengths[run.id]:
            tree.unlink(run)
            continue
        if lengths[run.id] < len(run.slots):
            tree.cut(run, len(run.slots) - lengths[run.id])
        if run.refs:
            run.expiry = state.clock + run.duration if run.duration else 0
            run.refs, run.released_at = 0, state.releases
        run.transfer, run.slots = 0, again.slots.get(run.id, run.slots)
    for run in runs:
        while run.id in tree.runs and tree.may_join(run):
            tree.join(run)


def _reduce_sliding(group: SlidingGroup, runs: list[Run], verifier: _Verifier) -> None:
    """Remove the lost blocks."""
    first, gone = group.levels[PRIMARY].size, array("i")
    for run in runs:
        for place in run.slots:
            if place >= first and group.transfers[place]:
                verifier.survey.in_flight += 1
            elif place >= first and verifier.holds(place - first):
                continue
            if place != HOLE:
                gone.append(place)
    if gone:
        group.take_out(gone)


class _Verifier:
    """Comparison of the bytes of secondary slots with their checksums."""

    def __init__(self, group: AnyGroup, checksums: Checksums, survey: Survey) -> None:
        self._group, self._checksums, self.survey = group, checksums, survey
        self._known = group.levels[SECONDARY].checksums
        self.right = np.zeros(group.levels[SECONDARY].size, np.uint64)
        """Checksums of the surviving blocks by slot; 0: lost."""

    def leading(self, slots: array[int]) -> int:
        """Count the leading slots with the right bytes; those after them are unreachable."""
        for count, slot in enumerate(slots):
            if not self.holds(slot):
                self.survey.unreachable += len(slots) - count - 1
                return count
        return len(slots)

    def holds(self, slot: int) -> bool:
        """True if a slot has the right bytes."""
        known = 0 if self._known is None else self._known[slot]
        there = self._checksums(self._group.index, np.array([slot], np.int32)) if known else b""
        if not known or np.frombuffer(there, np.uint64)[0] != known:
            self.survey.changed += 1
            return False
        self.right[slot] = known
        self.survey.verified += 1
        return True

    def give_up(self, slots: array[int]) -> None:
        """Count these intact slots as unreachable."""
        self.right[np.frombuffer(slots, np.int32)] = 0
        self.survey.verified -= len(slots)
        self.survey.unreachable += len(slots)


class _Recomputed:
    """The primary blocks that are recomputed."""

    def __init__(self, tokens_per_block: int, primary: int, recompute: Recompute | None) -> None:
        self._tokens_per_block, self._recompute = tokens_per_block, recompute
        self.primary = primary
        """Slots."""
        self.slots: dict[int, array[int]] = {}
        """New primary slots by run."""
        self.used = 0
        """Number of primary slots used, from the first on."""

    def may_be(self, run: Run) -> bool:
        """True if a run of primary consists of plain tokens, which is all that recomputing needs."""
        if self._recompute is None or run.partial or _namespace_of(run).uses_extra_ids:
            return False
        return int(np.frombuffer(run.symbols, np.int32).min()) >= 0

    def compute(self, runs: list[Run], lengths: dict[int, int], verifier: _Verifier) -> None:
        """Recompute worthwhile blocks, and give up the blocks after the others."""
        below: Counter[int] = Counter()
        for run in reversed(runs):
            below[run.id] += lengths[run.id] * (run.level == SECONDARY)
            if isinstance(run.parent, Run):
                below[run.parent.id] += below[run.id]
        for run in runs:
            parent = run.parent
            reachable = not isinstance(parent, Run) or lengths[parent.id] == len(parent.slots)
            if run.level == PRIMARY:
                worth = reachable and lengths[run.id] and len(run.slots) <= below[run.id]
                lengths[run.id] = len(run.slots) if worth and self._written(run) else 0
                verifier.survey.recomputed += lengths[run.id]
            elif not reachable and lengths[run.id]:
                verifier.give_up(run.slots[: lengths[run.id]])
                lengths[run.id] = 0

    def _written(self, run: Run) -> bool:
        """Recompute a run; True if its K/V is in primary again."""
        if self._recompute is None or self.used + len(run.slots) > self.primary:
            return False
        path = [run]
        while isinstance(parent := path[-1].parent, Run):
            path.append(parent)
        path.reverse()
        own = array("i", range(self.used, self.used + len(run.slots)))
        above = b"".join([self.slots[each.id].tobytes() for each in path[:-1]])
        lost = LostPrefix(
            _namespace_of(run),
            np.frombuffer(b"".join([each.symbols for each in path]), np.int32),
            run.start * self._tokens_per_block,
            np.frombuffer(above + own.tobytes(), np.int32),
        )
        if not self._recompute(lost):
            return False
        self.slots[run.id] = own
        self.used += len(own)
        return True


def _namespace_of(run: Run) -> Namespace:
    root = root_of(run)
    assert isinstance(root, Root)
    return root.namespace


def _lengths_in_full(runs: list[Run], verifier: _Verifier, again: _Recomputed) -> dict[int, int]:
    """Number of leading blocks by run that survive, or may be recomputed; parents come before their children."""
    lengths = dict.fromkeys([run.id for run in runs], 0)
    for run in runs:
        parent = run.parent
        reachable = not isinstance(parent, Run) or lengths[parent.id] == len(parent.slots)
        if run.level != SECONDARY:
            lengths[run.id] = len(run.slots) if reachable and again.may_be(run) else 0
        elif run.transfer:
            verifier.survey.in_flight += len(run.slots)
        elif not reachable:
            verifier.survey.unreachable += len(run.slots)
        else:
            lengths[run.id] = verifier.leading(run.slots)
    return lengths
