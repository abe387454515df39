"""What is decided about a cache as a whole: clearing it, copies that ended, what expires, and checkpoints."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Items

from events import types as ev
from events.types import Event, RequestId
from kvcache.decide.expiry import Expiry
from kvcache.decide.interning import forget_unused
from kvcache.errors import OutOfBlocks
from kvcache.fold.fingerprint import fingerprint
from kvcache.fold.sequence import Sequence
from kvcache.fold.state import CacheState

GIVEN_UP = "given up, since another copy failed"
"""Why a `TransferFailed` names a copy of which nothing is known."""


class WholeCache:
    """Decides what concerns no sequence alone."""

    def __init__(
        self, state: CacheState, emit: Callable[[Event], None], expiry: Expiry, checkpoint_spacing: float
    ) -> None:
        self._state, self._emit, self._expiry = state, emit, expiry
        slots = sum(level.size for group in state.groups for level in group.levels)
        self.checkpoint_due = checkpoint_spacing * slots
        """Blocks changed since the last checkpoint after which there should be another."""
        self.engine_counts: tuple[int, ...] = ()
        """As in `Checkpoint`."""

    def note_refusal(self, request_id: RequestId, refusal: OutOfBlocks) -> None:
        """Record that a request did not fit: once until it is admitted, however often it is tried."""
        if request_id not in self._state.refused:
            self._emit(
                ev.AdmissionRefused(request_id=request_id, needed=refusal.needed, available=refusal.available)
            )

    def clear(self) -> None:
        """Drop what no sequence holds, and the names of the rest."""
        groups = self._state.groups
        removed = tuple((group.levels[0].unreferenced, group.levels[1].unreferenced) for group in groups)
        unnamed = tuple(sum(len(slots) for _, slots, held, _ in group.cached() if held) for group in groups)
        self._emit(ev.CacheCleared(removed=removed, unnamed=unnamed))

    def land(self, transfers: Items[int], checksums: bytes = b"") -> None:
        """These copies are complete. `checksums` are as in `TransferLanded`."""
        self._emit(ev.TransferLanded(transfers=array("q", transfers).tobytes(), checksums=checksums))

    def fail(self, failed: Items[tuple[int, str]]) -> list[Sequence]:
        """These copies, given as (transfer, reason), failed: everything begins again, and nothing cached is kept.

        What rests on a failed copy could be told only by an account of all that was copied and computed since. So
        nothing is told apart: all outstanding copies are given up. Returns the sequences that begin again.
        """
        told, reasons = dict(failed), dict[str, list[int]]()
        for transfer in self._state.transfers:
            reasons.setdefault(told.get(transfer, GIVEN_UP), []).append(transfer)
        for reason, transfers in reasons.items():
            self._emit(ev.TransferFailed(transfers=array("q", transfers).tobytes(), reason=reason))
        self.clear()
        return [sequence for sequence in self._state.sequences.values() if not sequence.holders]

    @property
    def upkeep_due(self) -> bool:
        """Whether `upkeep` would do anything; this is asked at every step."""
        state, expiry = self._state, self._expiry
        if state.changed_blocks >= self.checkpoint_due or (expiry.waiting and expiry.due):
            return True
        return bool(state.symbols.pages) and state.symbols.crowded

    def upkeep(self) -> None:
        """What is over expires; a checkpoint once enough blocks have changed; drop symbols that nothing uses."""
        if self._expiry.due:
            self._expiry.expire()
        if self._state.changed_blocks >= self.checkpoint_due:
            self.checkpoint()
        if self._state.symbols.crowded:
            forget_unused(self._state, self._emit)

    def checkpoint(self) -> None:
        """Record the fingerprint."""
        cached = [[0, 0] for _ in self._state.groups]
        for counts, group in zip(cached, self._state.groups, strict=True):
            for level, slots, _, _ in group.cached():
                counts[level] += len(slots)
        self._emit(
            ev.Checkpoint(
                fingerprint=fingerprint(self._state),
                num_sequences=len(self._state.handles),
                num_cached=tuple((primary, secondary) for primary, secondary in cached),
                engine_counts=self.engine_counts,
            )
        )
