"""The end of an engine's step: copies that have landed, upkeep that is due, and a batch of all that happened."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from events.diagnostics import get_logger
from events.types import SECONDARY, EventBatch, TokensAppended
from kvcache.decide.upkeep import Upkeep
from kvcache.device.checking import CheckingCopier
from kvcache.device.readiness import Readiness
from kvcache.device.transfers import TransferEngine
from kvcache.errors import ManagerBusy
from kvcache.fold.state import CacheState
from kvcache.guard import Guard
from kvcache.inputs.arguments import time_from
from kvcache.record.journal import Journal

if TYPE_CHECKING:
    from kvcache.device.secondary_file import SecondaryFile


_log = get_logger(__name__)
UNFLUSHED_STEPS = 100
"""How often one sequence gets tokens between two flushes before that is taken for a mistake."""


class Steps:
    """Records what no command decides. Whatever changes the state happens inside the guard."""

    def __init__(
        self,
        guard: Guard,
        journal: Journal,
        upkeep: Upkeep,
        transfers: TransferEngine | None,
        readiness: Readiness,
        wall_ns: Callable[[], int],
        secondary_file: SecondaryFile | None = None,
    ) -> None:
        self._guard, self._journal, self._upkeep = guard, journal, upkeep
        self._transfers, self._readiness, self._wall_ns = transfers, readiness, wall_ns
        self._state: CacheState = journal.state
        self._secondary_file = secondary_file
        copier = transfers.copier if transfers is not None else None
        self._checking = copier if isinstance(copier, CheckingCopier) else None
        if self._checking is not None:
            self._checking.begin(self._state)
        self._tell_time: Callable[[int], None] | None = None
        self._look_at = UNFLUSHED_STEPS
        """The number of unpublished events at which it is looked whether flushes are forgotten, doubled each time."""
        self._warned = False

    def warn_of_no_flush(self) -> None:
        """Warn once if steps follow each other without a flush: nothing is published then, and events pile up."""
        pending = self._journal.bus.pending
        if len(pending) < self._look_at or self._warned:
            return
        self._look_at = 2 * len(pending)
        steps = Counter[int]()
        for event in pending:
            if isinstance(event, TokensAppended):
                steps.update(array("q", event.handles))
        if max(steps.values(), default=0) >= UNFLUSHED_STEPS:
            self._warned = True
            reason = "call flush() at the end of each step: log, sinks and stats() get nothing before"
            _log.warning("flush_missing", events=len(pending), reason=reason)

    def measure(self, clock_ns: Callable[[], int], tell: Callable[[int], None]) -> None:
        """Tell from now on what the manager's calls take of each step, in ns; a flush's own time counts to the next."""
        self._guard.clock, self._tell_time = clock_ns, tell

    def record_copies(self) -> tuple[int, ...]:
        """Record ended copies; returns those that landed, and notes what was lost with those that failed."""
        if not self._state.transfers:
            return ()
        engine = self._transfers
        # Outside the guard: who is interrupted while tickets are asked has lost nothing, and may ask again.
        # Without an engine nothing moves, so there is nothing to wait for.
        landed, failed = engine.poll() if engine is not None else (list(self._state.transfers), [])
        if not landed and not failed:
            return ()
        checksums = self._checksums(landed)
        with self._guard:
            if landed:
                self._upkeep.land(landed, b"".join([each for _, _, each in checksums]))
            if self._checking is not None:
                for each in checksums:
                    self._checking.landed(*each)
            if failed:
                self._readiness.lose(failed, self._upkeep.fail(failed))
                if self._checking is not None:
                    self._checking.begin(self._state)
            if engine is not None:
                engine.recorded()
        return tuple(landed)

    def _checksums(self, landed: Items[int]) -> list[tuple[int, npt.NDArray[np.int32], bytes]]:
        """Of what these copies have brought to a secondary level that is a file, as it lies there now.

        Per copy: the group, the slots and their checksums.
        """
        file = self._secondary_file
        if file is None:
            return []
        copies = [self._state.transfers[transfer] for transfer in landed]
        written = [
            (copy.group, np.frombuffer(copy.slots, np.int32)) for copy in copies if copy.level == SECONDARY
        ]
        return [(group, slots, file.checksums(group, slots)) for group, slots in written]

    def end(self) -> EventBatch | None:
        """End a step. Raises `events.LogWriteFailed` while the disk refuses a log that the engine waits for."""
        if self._state.transfers:
            self.record_copies()
        if self._upkeep.due:
            with self._guard:
                self._upkeep.run()
        batch = self._flush()
        self._look_at = UNFLUSHED_STEPS
        if self._tell_time is not None and batch is not None:
            self._tell_time(self._guard.spent_ns)
            self._guard.spent_ns = 0
        self._journal.outputs.check_log()
        return batch

    def end_last(self) -> None:
        """Record what is still to be recorded before the manager closes, a checkpoint too."""
        try:
            if self._transfers is not None:
                if self._transfers.pending:
                    with self._guard:
                        self._transfers.start()
                self._transfers.wait()
            # A ticket that calls the manager says nothing about its copies, and closing asks no second time.
            with suppress(ManagerBusy):
                self.record_copies()
        finally:
            # Who does not want to wait for copies any longer still wants what has happened recorded.
            if self._guard.failure is None:
                with self._guard:
                    self._upkeep.checkpoint()
                self._journal.outputs.make_room()
                self._flush()

    def _flush(self) -> EventBatch | None:
        journal = self._journal
        if journal.outputs.may_lose:
            with self._guard:
                journal.make_good()
        if not journal.due:
            return None
        # Outside the guard: with a clock that fails, everything waits for the next flush.
        now = time_from(self._wall_ns)
        try:
            return journal.flush(now)
        except BaseException as error:
            self._guard.note(error)
            raise
