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
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from events.types import PRIMARY, SECONDARY, GroupExported, Namespace, StateExported
from kvcache.fold.group import REMEMBERED, Group, UseCounts
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


_State = tuple[int, ...]
"""Level, priority, duration, expiry and release of a run from now on, and its credit."""


@dataclass(slots=True)
class _Piece:
    """Runs, or their beginnings, that follow each other and are one from now on."""

    parent: int
    """Number of a piece, or -1 - number of a namespace."""
    runs: list[Run] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """How many blocks of each run are left."""
    state: _State = ()


def surviving(
    state: CacheState,
    checksums: Checksums,
    primary_blocks: Sequence[int],
    recompute: Recompute | None = None,
) -> tuple[StateExported, Survey]:
    """The state to go on with; `state` itself stays as it is. `checksums` is asked once for each block at most.

    `primary_blocks` is how many each group has from now on: primary is empty, so it may be others than before.
    `recompute` is asked, parents first, for blocks of plain tokens behind which at least as many are left, in a cache
    with one window, which attends to everything.
    """
    survey = Survey()
    groups = tuple(
        _surviving_group(
            state, group, checksums, primary, survey, recompute if len(state.groups) == 1 else None
        )
        for group, primary in zip(state.groups, primary_blocks, strict=True)
    )
    exported = StateExported(
        groups=groups,
        sequences=(),
        transfers=(),
        next_handle=state.next_handle,
        next_transfer=state.next_transfer,
        releases=state.releases,
        changed_blocks=state.changed_blocks,
        symbols=tuple(page for _, page in sorted(state.symbols.pages.items())),
        forget_symbols_at=state.symbols.forget_at,
        clock=state.clock,
        next_pin=state.next_pin,
    )
    return exported, survey


def _surviving_group(
    state: CacheState,
    group: Group,
    checksums: Checksums,
    primary: int,
    survey: Survey,
    recompute: Recompute | None,
) -> GroupExported:
    runs = [run for root in group.tree.roots.values() for run in runs_below(root)]
    verifier, again = (
        _Verifier(group, checksums, survey),
        _Recomputed(group.tokens_per_block, primary, recompute),
    )
    if isinstance(group, SlidingGroup):
        lengths = _lengths_in_sliding(group, runs, verifier)
    else:
        lengths = _lengths_in_full(runs, verifier, again)
        again.compute(runs, lengths, verifier)
    left = [run for run in runs if lengths[run.id]]
    namespaces, pieces = _pieces(left, lengths, {run.id: _state_of(run, state) for run in left})
    return _exported(group, namespaces, pieces, verifier.right, again)


def _state_of(run: Run, state: CacheState) -> _State:
    """That of a run which nobody holds any more: who held it let go of it with the process."""
    if not run.refs:
        return run.level, run.priority, run.duration, run.expiry, run.released_at, run.credit
    expiry = state.clock + run.duration if run.duration else 0
    return run.level, run.priority, run.duration, expiry, state.releases, run.credit


class _Verifier:
    """Compares the bytes of secondary slots with their checksums."""

    def __init__(self, group: Group, checksums: Checksums, survey: Survey) -> None:
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

    @property
    def blank(self) -> bytes:
        """The other primary slots, as a new cache has them."""
        return np.arange(self.used, self.primary, dtype=np.int32)[::-1].tobytes()

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


def _lengths_in_sliding(group: SlidingGroup, runs: list[Run], verifier: _Verifier) -> dict[int, int]:
    """By run, how many blocks there are up to the last one that is left; all, if any is left in its children."""
    first, lengths = group.levels[PRIMARY].size, dict.fromkeys([run.id for run in runs], 0)
    for run in reversed(runs):
        for index, place in enumerate(run.slots):
            if place < first:
                continue
            if group.transfers[place]:
                verifier.survey.in_flight += 1
            elif verifier.holds(place - first):
                lengths[run.id] = max(lengths[run.id], index + 1)
        if any(lengths[child.id] for child in run.children.values()):
            lengths[run.id] = len(run.slots)
    return lengths


def _pieces(
    runs: list[Run], lengths: dict[int, int], states: dict[int, _State]
) -> tuple[list[Namespace], list[_Piece]]:
    """These runs as far as they are left, each with its only child if both have one state, as the tree wants it."""
    children = Counter(run.parent.id for run in runs if isinstance(run.parent, Run))
    namespaces: list[Namespace] = []
    pieces: list[_Piece] = []
    piece_of: dict[int, int] = {}
    for run in runs:
        parent = run.parent
        if isinstance(parent, Run) and children[parent.id] == 1 and states[run.id] == states[parent.id]:
            number = piece_of[parent.id]
        else:
            number = len(pieces)
            if isinstance(parent, Root) and parent.namespace not in namespaces[-1:]:
                namespaces.append(parent.namespace)  # the runs of one come one after the other
            above = piece_of[parent.id] if isinstance(parent, Run) else -len(namespaces)
            pieces.append(_Piece(above, state=states[run.id]))
        pieces[number].runs.append(run)
        pieces[number].lengths.append(lengths[run.id])
        piece_of[run.id] = number
    return namespaces, pieces


def _exported(
    group: Group,
    namespaces: list[Namespace],
    pieces: list[_Piece],
    right: npt.NDArray[np.uint64],
    again: _Recomputed,
) -> GroupExported:
    numbers: list[int] = []
    symbols, keys, slots, put_off = bytearray(), bytearray(), array("i"), array("q")
    key_bytes, block_bytes, size = group.tree.key_bytes, group.tree.block_bytes, group.tokens_per_block
    for piece in pieces:
        last, cut = piece.runs[-1], piece.lengths[-1] < len(piece.runs[-1].slots)
        numbers += [piece.parent, sum(piece.lengths), (not cut and last.partial) or size]
        *columns, credit = piece.state
        numbers += [*columns, 0, 0]  # nobody holds it, and all has landed
        put_off.append(credit)
        for run, length in zip(piece.runs, piece.lengths, strict=True):
            symbols += run.symbols[: length * block_bytes]
            keys += run.keys[: length * key_bytes]
            slots += again.slots.get(run.id, run.slots)[:length]
    blocks = uses = b""
    if isinstance(group, SlidingGroup):
        first = group.levels[PRIMARY].size
        kept = [place >= first and bool(right[place - first]) for place in slots]
        places = array("i", [place if here else HOLE for place, here in zip(slots, kept, strict=True)])
        slots, blocks = group.exported(places)
    elif group.uses is not None:
        uses = (put_off + _uses(group.uses, again.primary + len(right))).tobytes()
    blank = np.flatnonzero(right == 0)[::-1].astype(np.int32)
    return GroupExported(
        namespaces=tuple(namespaces),
        runs=array("q", numbers).tobytes(),
        symbols=bytes(symbols),
        slots=slots.tobytes(),
        keys=bytes(keys),
        blank_slots=(again.blank, blank.tobytes()),
        shared=b"",
        blocks=blocks,
        uses=uses,
        checksums=right.tobytes() if right.any() else b"",
    )


def _uses(uses: UseCounts, slots: int) -> array[int]:
    """What is known of uses, as far as a window with so many slots remembers it."""
    turn, known = uses.numbers()[:1], uses.numbers()[1:]
    return turn + known[max(0, len(known) - 2 * REMEMBERED * slots) :]
