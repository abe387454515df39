"""What of a state is left when the process that had it is gone: the blocks in secondary whose bytes are still right.

Sequences, pins, copies on their way and all of primary are gone. A block in secondary is left if its copy had landed,
and its bytes have the checksum that they had then. With full attention all blocks before it must be left, too: a cached
block's parent is cached. In a sliding window it stays whatever became of the blocks around it.

What lay in primary before such blocks, as a system prompt in use does, can be computed again by whoever has the model.
Then it is cached in primary, and what hangs behind it is not lost.
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
from kvcache.fold.groups import AnyGroup
from kvcache.fold.prefix_tree import Node, Root, Run, runs_below
from kvcache.fold.sliding_group import HOLE, SlidingGroup
from kvcache.fold.state import CacheState

Checksums = Callable[[int, npt.NDArray[np.int32]], bytes]
"""What lies in these slots of a group's secondary level now: 8 bytes each."""


@dataclass(frozen=True, slots=True)
class LostPrefix:
    """Blocks that lay in primary, behind which others are left: their K/V has to be computed again."""

    namespace: Namespace
    tokens: npt.NDArray[np.int32]
    """Of the whole prefix, up to the end of these blocks."""
    first_token: int
    """The first one whose K/V is to be computed. What is before was computed by an earlier call."""
    slots: npt.NDArray[np.int32]
    """In primary, of all blocks of the prefix: the K/V goes there, and is read from there."""


Recompute = Callable[[LostPrefix], bool]
"""Write the K/V of lost blocks to their slots. False: it cannot be done; then what is behind is lost, too."""


@dataclass(slots=True)
class Survey:
    """How many blocks in secondary are left, and what became of the others."""

    verified: int = 0
    """Left: their bytes are right."""
    in_flight: int = 0
    """Their copies were not known to have landed."""
    changed: int = 0
    """Other bytes are there than were copied, or nobody knows a checksum."""
    unreachable: int = 0
    """A block before them is gone, so no prompt would find them."""
    recomputed: int = 0
    """Blocks that lay in primary and were computed again, so that those behind them are reachable."""

    @property
    def found(self) -> int:
        """In secondary, as the events say."""
        return self.verified + self.in_flight + self.changed + self.unreachable


def surviving(
    state: CacheState,
    checksums: Checksums,
    primary_blocks: Sequence[int],
    recompute: Recompute | None = None,
) -> tuple[StateExported, Survey]:
    """The state to go on with, which is all that is left of `state`. `checksums` is asked once for each block at most.

    `primary_blocks` is how many each group has from now on: primary is empty, so it may be others than before.
    `recompute` is asked, parents first, for blocks of plain tokens behind which at least as many are left, in a cache
    with one window, which attends to everything.
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
    """Cut off what is not left; who held the rest has released it with the process."""
    lengths, tree = _lengths_in_full(runs, verifier, again), group.tree
    again.compute(runs, lengths, verifier)
    for run in reversed(runs):
        if not lengths[run.id]:
            tree.unlink(run)
            continue
        if lengths[run.id] < len(run.slots):
            group.cut(run, len(run.slots) - lengths[run.id])
        if run.refs:
            run.expiry = state.clock + run.duration if run.duration else 0
            run.refs, run.released_at = 0, state.releases
        run.transfer, run.slots = 0, again.slots.get(run.id, run.slots)
    for run in runs:
        while run.id in tree.runs and tree.may_join(run):
            tree.join(run)


def _reduce_sliding(group: SlidingGroup, runs: list[Run], verifier: _Verifier) -> None:
    """Take out what is not left."""
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
    """Compares the bytes of secondary slots with their checksums."""

    def __init__(self, group: AnyGroup, checksums: Checksums, survey: Survey) -> None:
        self._group, self._checksums, self.survey = group, checksums, survey
        self._known = group.levels[SECONDARY].checksums
        self.right = np.zeros(group.levels[SECONDARY].size, np.uint64)
        """By slot, the checksums of the blocks that are left; 0: none is."""

    def leading(self, slots: array[int]) -> int:
        """How many of these slots, from the first on, hold what they should; those behind are unreachable."""
        for count, slot in enumerate(slots):
            if not self.holds(slot):
                self.survey.unreachable += len(slots) - count - 1
                return count
        return len(slots)

    def holds(self, slot: int) -> bool:
        """Whether a slot holds what it should."""
        known = 0 if self._known is None else self._known[slot]
        there = self._checksums(self._group.index, np.array([slot], np.int32)) if known else b""
        if not known or np.frombuffer(there, np.uint64)[0] != known:
            self.survey.changed += 1
            return False
        self.right[slot] = known
        self.survey.verified += 1
        return True

    def give_up(self, slots: array[int]) -> None:
        """These hold what they should, and are not reachable all the same."""
        self.right[np.frombuffer(slots, np.int32)] = 0
        self.survey.verified -= len(slots)
        self.survey.unreachable += len(slots)


class _Recomputed:
    """The blocks of primary that are computed again."""

    def __init__(self, tokens_per_block: int, primary: int, recompute: Recompute | None) -> None:
        self._tokens_per_block, self._recompute = tokens_per_block, recompute
        self.primary = primary
        """Slots."""
        self.slots: dict[int, array[int]] = {}
        """By run, where they lie from now on."""
        self.used = 0
        """Of the primary slots, the first ones."""

    def may_be(self, run: Run) -> bool:
        """Whether a run of primary consists of plain tokens, which is all that computing it takes."""
        if self._recompute is None or run.partial or _root_of(run).namespace.uses_extra_ids:
            return False
        return int(np.frombuffer(run.symbols, np.int32).min()) >= 0

    def compute(self, runs: list[Run], lengths: dict[int, int], verifier: _Verifier) -> None:
        """Compute what is worth it, and give up what hangs behind the rest."""
        behind: Counter[int] = Counter()
        for run in reversed(runs):
            behind[run.id] += lengths[run.id] * (run.level == SECONDARY)
            if isinstance(run.parent, Run):
                behind[run.parent.id] += behind[run.id]
        for run in runs:
            parent = run.parent
            reachable = not isinstance(parent, Run) or lengths[parent.id] == len(parent.slots)
            if run.level == PRIMARY:
                worth = reachable and lengths[run.id] and len(run.slots) <= behind[run.id]
                lengths[run.id] = len(run.slots) if worth and self._written(run) else 0
                verifier.survey.recomputed += lengths[run.id]
            elif not reachable and lengths[run.id]:
                verifier.give_up(run.slots[: lengths[run.id]])
                lengths[run.id] = 0

    def _written(self, run: Run) -> bool:
        """Whether its K/V is in primary again."""
        if self._recompute is None or self.used + len(run.slots) > self.primary:
            return False
        path = [run]
        while isinstance(parent := path[-1].parent, Run):
            path.append(parent)
        path.reverse()
        own = array("i", range(self.used, self.used + len(run.slots)))
        above = b"".join([self.slots[each.id].tobytes() for each in path[:-1]])
        lost = LostPrefix(
            _root_of(run).namespace,
            np.frombuffer(b"".join([each.symbols for each in path]), np.int32),
            run.start * self._tokens_per_block,
            np.frombuffer(above + own.tobytes(), np.int32),
        )
        if not self._recompute(lost):
            return False
        self.slots[run.id] = own
        self.used += len(own)
        return True


def _root_of(run: Run) -> Root:
    node: Node = run
    while isinstance(node, Run):
        node = node.parent
    assert isinstance(node, Root)
    return node


def _lengths_in_full(runs: list[Run], verifier: _Verifier, again: _Recomputed) -> dict[int, int]:
    """By run, how many leading blocks are left, or may be computed again; parents come before their children."""
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
