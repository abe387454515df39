"""Decisions for one attention window: what to store, and what becomes blank. Reads state, emits events.

`emit` applies an event at once, so each decision sees the effect of the one before. Whether everything will fit
is counted before the first event of a call; after that no step can fail.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Items

from events import types as ev
from events.ids import BlockIndex
from events.packed import NAME_BYTES, TOKEN_BYTES
from events.types import PRIMARY, SECONDARY
from kvcache.decide.claims import BlockNames
from kvcache.decide.decoding import packed_handles
from kvcache.decide.window_admission import WindowAdmission
from kvcache.fold.matching import covered, covered_child, match
from kvcache.fold.retention import DEFAULT, Kept, kept, rows
from kvcache.fold.sequence import Sequence
from kvcache.fold.slots import DEFAULT_PRIORITY
from kvcache.results import Replacement


class WindowBlockManager(WindowAdmission):
    """Decides for the blocks of one window."""

    # -- storing

    def store(self, sequence: Sequence, *, partial: bool = False) -> list[Replacement]:
        """Make the sequence's computed full blocks reusable (and, at its end, the partial one behind them)."""
        swaps: list[Replacement] = []
        if not self._reuse:
            return swaps
        size, computed = self.tokens_per_block, sequence.computed
        full = computed // size
        stop = computed if partial and self._partial_reuse else full * size
        tail = sequence.path_ends[self.index]
        first = tail.end
        if self.group.shared:
            own = self._own_blocks(sequence.tables[self.index], first)
            full, stop = min(full, own), min(stop, own * size)
        if first < full and tail.children:
            first += self._adopt(sequence, first, full, swaps)
        if first * size < stop:
            self._store_new(sequence, first, stop)
        return swaps

    def store_filled(
        self, sequences: list[Sequence], handles: bytes, same: ev.BlocksFilled | None = None
    ) -> tuple[list[Sequence], ev.BlocksFilled | None]:
        """The usual case of `store`, many at a time: decoding has filled one block behind what a sequence had cached.

        `handles` are those of the sequences. Returns those for which this is not the case, for whom nothing was done;
        and what was emitted if that was one event for all: the next window takes it as `same`, for it stores blocks of
        the same sequences and names.
        """
        if not self._reuse or self._group.shared:
            return list(sequences), None
        if self._state.all_kept_alike:
            event = self._fill_alike(sequences, same) if same is not None else None
            return ([], event) if event is not None else self._fill(sequences, handles)
        alike: dict[tuple[int, int], list[Sequence]] = {}
        index, size = self.index, self.tokens_per_block
        how: tuple[int, int]
        for sequence in sequences:
            retention, block = sequence.retention, sequence.path_ends[index].end
            if retention is None and not sequence.inherited:
                how = DEFAULT
            elif retention is not None and block * size >= sequence.num_prompt_tokens:
                how = (retention.priority, retention.duration)
            else:
                how = kept(sequence, index, block, size)
            if how in alike:
                alike[how].append(sequence)
            else:
                alike[how] = [sequence]
        others = [
            other
            for how, several in alike.items()
            for other in self._fill(several, packed_handles(several), *how)[0]
        ]
        if len(alike) > 1 and others:
            # Who comes first stores, and the next one finds it.
            left = set(others)
            others = [sequence for sequence in sequences if sequence in left]
        return others, None

    def _fill_alike(self, sequences: Items[Sequence], same: ev.BlocksFilled) -> ev.BlocksFilled | None:
        """Store what an earlier window has stored; None: not all of these sequences go on here as they do there."""
        index, slots, grows = self.index, array("i"), self._growing() if self._slides else None
        for sequence, block in zip(sequences, array("I", same.blocks), strict=True):
            tail, table = sequence.path_ends[index], sequence.tables[index]
            if tail.end != block:
                return None
            if not (tail.grows(DEFAULT_PRIORITY, 0) if grows is None else grows(table, block)):
                return None
            slots.append(table[block])
        event = ev.BlocksFilled(
            handles=same.handles,
            group=index,
            blocks=same.blocks,
            parents=same.parents,
            keys=b"",
            slots=slots.tobytes(),
            priority=same.priority,
            duration=same.duration,
        )
        self._emit(event)
        return event

    def _growing(self) -> Callable[[array[int], int], bool]:
        """Whether a sequence with this table may extend what is cached by this block, asked once of each sequence that
        fills one. Where no window slides, that with which its path ends knows.
        """
        raise NotImplementedError("of sliding windows only")

    def _fill(
        self, sequences: list[Sequence], handles: bytes, priority: int = DEFAULT_PRIORITY, duration: int = 0
    ) -> tuple[list[Sequence], ev.BlocksFilled | None]:
        """`store_filled` of blocks that are to be kept alike."""
        index, key_bytes, rich = self.index, self.key_bytes, self._rich
        size, chain, known, before = self.tokens_per_block, self._chain, self._known_keys, self._key_before
        grows = self._growing() if self._slides else None
        blocks, slots = array("I"), array("i")
        parents, keys, others = [], [], []
        for sequence in sequences:
            tail, table = sequence.path_ends[index], sequence.tables[index]
            block = tail.end
            if (
                block != len(table) - 2
                or not (tail.grows(priority, duration) if grows is None else grows(table, block))
                or (rich and sequence.handle in rich)
                or (key_bytes and len(sequence.keys) != block * key_bytes + known)
            ):
                others.append(sequence)
                continue
            blocks.append(block)
            slots.append(table[block])
            if key_bytes:
                parent = bytes(sequence.keys[before])
                parents.append(parent[:NAME_BYTES])
                if not known:
                    symbols = sequence.packed(block * size, block * size + size)
                    keys.append(chain(sequence.namespace, parent, symbols, len(symbols)))
        if not slots:
            return others, None
        if others:
            left = set(others)
            handles = packed_handles([each for each in sequences if each not in left])
        event = ev.BlocksFilled(
            handles=handles,
            group=index,
            blocks=blocks.tobytes(),
            parents=b"".join(parents),
            keys=b"".join(keys),
            slots=slots.tobytes(),
            priority=priority,
            duration=duration,
        )
        self._emit(event)
        return others, None if others else event

    def _own_blocks(self, table: array[int], first: int) -> int:
        """Blocks before the first one that another sequence holds without a name: it must stay without."""
        shared = self._group.shared
        for index in range(first, len(table)):
            if table[index] in shared:
                return index
        return len(table)

    def _adopt(self, sequence: Sequence, first: int, full: int, swaps: list[Replacement]) -> int:
        """Where another sequence has stored the next blocks meanwhile, hold its copies instead; returns how many."""
        size, tail = self.tokens_per_block, sequence.path_ends[self.index]
        if sequence.packed(first * size, (first + 1) * size) not in tail.children:
            return 0
        symbols = sequence.packed(first * size, full * size)
        found = match(self.group.tree, tail, symbols, len(symbols), partial=False)
        for blocks in self.claimed(found, 0):
            self._take_stored(sequence, blocks, swaps)
        return found.blocks

    def _take_stored(self, sequence: Sequence, blocks: BlockNames, swaps: list[Replacement]) -> None:
        """Hold another sequence's blocks instead of own ones; what lies in secondary moves to these."""
        self.adopted = True
        first, last = blocks.first, blocks.first + len(blocks.slots)
        own = sequence.tables[self.index][first:last]
        if blocks.level == SECONDARY:
            self._move_up(sequence, blocks, own.tobytes(), ev.MoveReason.RECOMPUTED)
            return
        places = zip(range(first, last), own, blocks.slots, strict=True)
        swaps += [Replacement(*place, self.window) for place in places]
        self._emit(
            ev.BlocksReused(
                handle=sequence.handle,
                group=self.index,
                level=PRIMARY,
                first_block=BlockIndex(first),
                slots=blocks.slots.tobytes(),
                names=self._names_before(sequence, blocks) + blocks.names,
                replaced=own[::-1].tobytes(),
            )
        )

    def _store_new(self, sequence: Sequence, first: int, stop: int) -> None:
        """Store the blocks from `first` up to the token `stop`, behind the path that the sequence holds."""
        size = self.tokens_per_block
        if sequence.path_ends[self.index].children:
            head = sequence.packed(first * size, min(stop, (first + 1) * size))
            if not self._make_way(sequence, head):
                return
        self._emit_stored(sequence, first, stop)

    def _emit_stored(self, sequence: Sequence, first: int, stop: int) -> None:
        """Store the blocks from `first` up to the token `stop`: by an event for each row that is to be kept alike."""
        if sequence.retention is None and not sequence.inherited:
            self._emit_row(sequence, first, stop, DEFAULT)  # nearly always
            return
        size = self.tokens_per_block
        for begin, end, how in rows(sequence, self.index, first, -(-stop // size), size):
            self._emit_row(sequence, begin, min(end * size, stop), how)

    def _emit_row(self, sequence: Sequence, first: int, stop: int, how: Kept) -> None:
        """Names are made that no other window has needed yet."""
        size, key_bytes = self.tokens_per_block, self.key_bytes
        last, known = -(-stop // size), sequence.keys
        named = len(known) // key_bytes if key_bytes else last
        keys = b""
        if named < last:
            symbols = sequence.packed(named * size, stop)
            parent = bytes(known[-key_bytes:]) if named else self._state.root_key(sequence.namespace)
            chain = self._chain_rich if sequence.handle in self._rich else self._chain
            keys = chain(sequence.namespace, parent, symbols, size * TOKEN_BYTES)
        above = bytes(known[(first - 1) * key_bytes :][:NAME_BYTES]) if first and key_bytes else b""
        if first > named:  # the name of the block before is among those that were just made
            above = keys[(first - 1 - named) * key_bytes :][:NAME_BYTES]
        self._emit(
            ev.BlocksStored(
                handle=sequence.handle,
                group=self.index,
                first_block=BlockIndex(first),
                parent=above,
                keys=keys,
                slots=sequence.tables[self.index][first:last].tobytes(),
                level=PRIMARY,
                priority=how.priority,
                last_tokens=stop - (last - 1) * size,
                duration=how.duration,
            )
        )

    def _make_way(self, sequence: Sequence, head: bytes) -> bool:
        """Whether a new block is to be stored beside its siblings; a shorter one that it covers is removed."""
        tail = sequence.path_ends[self.index]
        if covered(tail, head):
            return False  # a block that begins with these tokens serves as well
        shorter = covered_child(tail, head)
        if shorter is not None:
            self.evictor.remove_tail(shorter, 1, ev.RemoveReason.SUPERSEDED, sequence.handle)
        return True

    def freed_by(self, sequence: Sequence, first: int = 0) -> bytes:
        """The slots from the block `first` on that become blank when the sequence lets go of them, deepest first."""
        cached = max(sequence.path_ends[self.index].end, sequence.detached[self.index], first)
        own = sequence.tables[self.index][cached:][::-1]
        shared = self._group.shared
        if shared:
            own = array("i", [slot for slot in own if slot not in shared])
        return own.tobytes()

    def released_by(self, sequence: Sequence, first: int) -> int:
        """Cached blocks from the block `first` on that can be had when the sequence releases them."""
        path = self.group.path(sequence.path_ends[self.index])
        return sum(max(0, run.end - max(run.start, first)) for run in path if run.refs == 1)
