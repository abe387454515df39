"""All windows of a cache: turns commands into events.

Pure: no clock, file, socket, thread or tensor. Every method first counts whether the whole call fits; a refusal emits
nothing. `emit` applies each event and passes it on.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence as Items

from events.types import (
    PRIMARY,
    AllocateReason,
    CacheCleared,
    Checkpoint,
    ContextComputed,
    Event,
    SequenceRemoved,
    TokensAppended,
    TransferFailed,
    TransferLanded,
)
from kvcache.admission import Plan, admit, fitting
from kvcache.config import KVCacheConfig
from kvcache.errors import OutOfBlocks
from kvcache.fingerprint import fingerprint
from kvcache.incoming import Incoming
from kvcache.sequence import Sequence
from kvcache.state import CacheState
from kvcache.window_manager import Swap, WindowBlockManager


class BlockManager:
    """Decides for the whole cache. One window so far, though the state and the events hold several."""

    def __init__(self, config: KVCacheConfig, state: CacheState, emit: Callable[[Event], None]) -> None:
        self._state = state
        self._emit = emit
        self._checkpoint_spacing = config.checkpoint_spacing
        self.window = WindowBlockManager(
            state,
            0,
            emit,
            reuse=config.enable_block_reuse,
            partial_reuse=config.enable_partial_reuse,
            offload_min_priority=config.secondary_offload_min_priority,
        )

    # -- admission

    def count_fitting(self, requests: list[Incoming]) -> int:
        """Length of the longest prefix of the batch that fits."""
        _, _, misfit = fitting(self.window, requests)
        return len(requests) if misfit is None else misfit

    def admit(self, requests: list[Incoming]) -> list[tuple[Sequence, Plan]]:
        """Admit a batch; raises `OutOfBlocks` if it does not fit as a whole."""
        plans, claims, misfit = fitting(self.window, requests)
        if misfit is not None:
            available = self.window.group.levels[PRIMARY].available - claims.unreferenced
            raise OutOfBlocks(misfit, (claims.needed,), (available,))
        return list(zip(admit(self._state, self.window, self._emit, plans, claims), plans, strict=True))

    # -- a running sequence

    def compute(self, sequence: Sequence, num_tokens: int) -> list[Swap]:
        """The engine has written K/V of the first `num_tokens` tokens: their full blocks become reusable."""
        if num_tokens > sequence.computed:
            self._emit(ContextComputed(sequence.handle, num_tokens))
        return self.window.store(sequence)

    def append(self, sequences: list[Sequence], tokens: array[int], counts: array[int] | None) -> list[list[Swap]]:
        """Append sampled tokens; blocks that their arrival completes become reusable.

        Returns the swaps per sequence, or nothing at all if there were none.
        """
        size = self._state.tokens_per_block
        if counts is None:
            growing = [(sequence, 1) for sequence in sequences if not len(sequence.tokens) % size]
        else:
            growing = self._growing(sequences, counts)
        if growing:
            self._grow(sequences, growing)
        handles = array("I", [sequence.handle for sequence in sequences])
        packed_counts = counts.tobytes() if counts is not None else b""
        self._emit(TokensAppended(handles.tobytes(), packed_counts, tokens.tobytes()))
        swaps = {sequence.handle: self.window.store(sequence) for sequence, _ in growing}
        if not any(swaps.values()):
            return []
        return [swaps.get(handle, []) for handle in handles]

    def _growing(self, sequences: list[Sequence], counts: array[int]) -> list[tuple[Sequence, int]]:
        """The sequences that need more blocks, and how many."""
        blocks_for = self.window.blocks_for
        more = [
            (sequence, blocks_for(sequence.num_tokens + count) - blocks_for(sequence.num_tokens))
            for sequence, count in zip(sequences, counts, strict=True)
        ]
        return [(sequence, blocks) for sequence, blocks in more if blocks]

    def _grow(self, sequences: list[Sequence], growing: list[tuple[Sequence, int]]) -> None:
        needed, available = sum(blocks for _, blocks in growing), self.window.group.levels[PRIMARY].available
        if needed > available:
            taken = 0
            for sequence, blocks in growing:
                taken += blocks
                if taken > available:
                    raise OutOfBlocks(sequences.index(sequence), (needed,), (available,))
        self.window.free_up(needed, growing[0][0].handle)
        for sequence, blocks in growing:
            self.window.allocate(sequence, blocks, AllocateReason.DECODE)

    def remove(self, sequence: Sequence, *, store: bool) -> None:
        """End a sequence; with `store`, all that it computed stays reusable, its partial last block too."""
        if store:
            self.window.store(sequence, partial=True)
        self._emit(
            SequenceRemoved(
                sequence.handle,
                sequence.stored,
                (self.window.freed_by(sequence),),
                sequence.num_tokens,
                sequence.computed,
            )
        )

    # -- the whole cache

    def clear(self) -> None:
        """Drop what no sequence holds, and the names of the rest."""
        group = self.window.group
        removed = (group.levels[0].unreferenced, group.levels[1].unreferenced)
        unnamed = sum(len(run.slots) for run in group.tree.runs.values() if run.refs)
        self._emit(CacheCleared(removed, unnamed))

    def land(self, transfers: Items[int]) -> None:
        """These copies are complete."""
        self._emit(TransferLanded(array("q", transfers).tobytes()))

    def fail(self, transfers: Items[int], reason: str) -> None:
        """These copies failed: what they should have brought is gone, and sequences must compute it again."""
        self._emit(TransferFailed(array("q", transfers).tobytes(), reason))
        self.window.remove_failed(set(transfers))

    def checkpoint_if_due(self) -> None:
        """Emit a checkpoint once enough blocks have changed since the last."""
        slots = sum(level.size for group in self._state.groups for level in group.levels)
        if self._state.changed_blocks >= self._checkpoint_spacing * slots:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Record the fingerprint."""
        levels = self.window.group.levels
        cached = [sum(len(r.slots) for r in self.window.group.tree.runs.values() if r.level == i.index) for i in levels]
        self._emit(Checkpoint(fingerprint(self._state), len(self._state.sequences), (cached[0], cached[1])))
