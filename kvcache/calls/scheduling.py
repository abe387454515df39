"""Queries of a scheduler before it decides who runs next: the cost of an admission, and the gain of ending a sequence.

Nothing here changes anything. All counts are per window, by its tokens, as in `num_free_blocks_per_window`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from events.packed import TOKEN_BYTES
from events.types import PRIMARY, RequestId
from kvcache.calls.guard import Guard, exclusive
from kvcache.decide.block_manager import BlockManager
from kvcache.errors import UsageError
from kvcache.fold.full_group import FullGroup
from kvcache.fold.group import Group
from kvcache.fold.prefix_tree import common_bytes
from kvcache.fold.sequence import Sequence
from kvcache.fold.sliding_group import SlidingGroup
from kvcache.fold.state import CacheState
from kvcache.inputs import CheckedRequest, Request, RequestChecker, checked_integer, checked_natural
from kvcache.results import Demand, InFlightPrefix


class Scheduling:
    """Queries for schedulers. Bound to the manager's thread, since it reads the live state."""

    def __init__(
        self, guard: Guard, state: CacheState, blocks: BlockManager, checker: RequestChecker, *, reuse: bool
    ) -> None:
        self._guard, self._state = guard, state
        self._blocks, self._checker, self._reuse = blocks, checker, reuse

    @exclusive
    def estimate_demand(self, request: Request, max_new_tokens: int = 0) -> Demand:
        """Return the cost of admitting a prompt now, and of growing by `max_new_tokens` tokens.

        It fits if `Demand.needed` is free in each window. Blocks common to several prompts are counted for each of
        them: `can_add` counts how many fit together. Raises what admitting it would, except `OutOfBlocks`. A prompt
        with `reserve_tokens` is assumed to get the rest of its slots by chunks of as many.
        """
        more_tokens = checked_natural(max_new_tokens, "max_new_tokens")
        checked, size = self._checked(request), self._state.tokens_per_block
        total = checked.num_tokens + more_tokens
        claims = self._blocks.claims()
        planned = self._blocks.plan(checked, claims)
        reusable, held, needed, completion = {}, {}, {}, {}
        windows, plans = (*self._blocks.windows, *self._blocks.cross), planned.windows + planned.cross
        for window, each, claim in zip(windows, plans, claims, strict=True):
            idle = window.primary.available - claim.available
            # Blocks in secondary have no holder: a sequence that reuses one onboards it.
            primary, secondary = each.primary // size, each.secondary // size
            reusable[window.window], held[window.window] = primary + secondary, primary - idle
            needed[window.window] = completion[window.window] = claim.needed + idle
        for window in self._blocks.windows:
            completion[window.window] += window.blocks_to_complete(planned, total)
        return Demand(planned.reused_tokens, reusable, held, needed, completion, planned.reused_input[1])

    @exclusive
    def next_step_blocks_per_window(self, request_id: RequestId, draft_tokens: int = 0) -> dict[int, int]:
        """Blocks that a running sequence takes with its next token and `draft_tokens` draft tokens, by window.

        A prompt has its blocks from its admission on, so this is about decoding. For a prompt with `reserve_tokens` it
        is the need of a chunk of `draft_tokens` tokens after the computed ones.
        """
        more = 1 + checked_natural(draft_tokens, "draft_tokens")
        sequence = self._blocks.running.sequence(request_id)
        if self._blocks.slots_of(sequence) < sequence.num_tokens:
            chunk = min(sequence.num_tokens, sequence.computed + more - 1)
            more = chunk - sequence.num_tokens
        return {
            window.window: max(0, window.blocks_for(sequence.num_tokens + more) - len(table))
            for window, table in zip(self._blocks.windows, sequence.tables, strict=False)
        }

    def remaining_blocks_to_completion(
        self, request_id: RequestId, max_new_tokens: int, chunk_tokens: int | None = None
    ) -> int:
        """Upper bound of blocks that a sequence needs, in addition to its own, to grow by `max_new_tokens` tokens, one
        by one.

        In the window that needs the most, which may not be the one with the fewest free blocks: compare
        `remaining_blocks_per_window` with `num_free_blocks_per_window`. A prompt that has not got all its slots
        (`reserve_tokens`) gets the others in chunks of at most `chunk_tokens` tokens; None: at once.
        """
        return max(self.remaining_blocks_per_window(request_id, max_new_tokens, chunk_tokens).values())

    @exclusive
    def remaining_blocks_per_window(
        self, request_id: RequestId, max_new_tokens: int, chunk_tokens: int | None = None
    ) -> dict[int, int]:
        """Return `remaining_blocks_to_completion` for each window, by its tokens."""
        max_new_tokens = checked_natural(max_new_tokens, "max_new_tokens")
        if chunk_tokens is not None and checked_integer(chunk_tokens, "chunk_tokens") < 1:
            raise UsageError("chunk_tokens must be at least 1")
        sequence = self._blocks.running.sequence(request_id)
        return {
            each.window: each.blocks_to_grow(sequence, max_new_tokens, chunk_tokens)
            for each in self._blocks.windows
        }

    @exclusive
    def simulate(self) -> Simulation:
        """Return the free blocks as if some sequences ended: for schedulers that admit as much as fits and preempt."""
        return Simulation(self._guard, self._state, self._blocks)

    @exclusive
    def find_in_flight(self, request: Request) -> InFlightPrefix | None:
        """Find the running sequence that is about to compute the first block that a prompt cannot reuse yet.

        An engine that waits until it has stored that block (`store_context_blocks`) computes it once instead of twice.
        Of several the one that will get furthest. None: waiting is of no use. Raises as `demand`.
        """
        checked = self._checked(request)
        if not (self._reuse and checked.lookup):
            return None
        planned = self._blocks.plan(checked, self._blocks.claims())
        size = self._state.tokens_per_block
        reused = (planned.reused_tokens - planned.reused_partial) // size
        last = (checked.num_tokens - 1) // size
        best: InFlightPrefix | None = None
        for sequence in self._state.sequences.values() if reused < last else ():
            blocks = self._promised(sequence, checked, reused, last)
            if blocks > reused and (best is None or blocks * size > best.num_tokens):
                best = InFlightPrefix(sequence.request_id, blocks * size)
        return best

    def _promised(self, sequence: Sequence, request: CheckedRequest, reused: int, last: int) -> int:
        """Return the number of blocks that a prompt can reuse when a sequence has stored all blocks of its known
        tokens.

        0 if it stores nothing that is of use. `reused` blocks can be reused now, `last` ones ever.
        """
        size = self._state.tokens_per_block
        block = slice(reused * size * TOKEN_BYTES, (reused + 1) * size * TOKEN_BYTES)
        if sequence.namespace != request.namespace:
            return 0
        if sequence.packed(reused * size, (reused + 1) * size) != request.symbols[block]:
            return 0
        symbols = request.symbols
        alike = common_bytes(sequence.packed(0, last * size), symbols, 0, len(symbols)) // (
            size * TOKEN_BYTES
        )
        groups = [self._state.groups[window.index] for window in self._blocks.windows]
        blocks = min([alike, *[_storable(group, sequence, size) for group in groups]])
        for group in groups:
            left = sequence.detached[group.index]
            # Blocks that a window has left are not stored again.
            if isinstance(group, SlidingGroup) and group.first_seen(blocks * size) < left > reused:
                return 0
        return blocks

    def _checked(self, request: Request) -> CheckedRequest:
        (checked,) = self._checker.check([request])
        return checked


def _storable(group: Group, sequence: Sequence, size: int) -> int:
    """Number of leading blocks of a sequence that will have been stored when all its tokens are computed."""
    full, table = sequence.num_tokens // size, sequence.tables[group.index]
    if not group.shared:
        return full
    # Blocks that lost their names while several sequences held them stay without.
    first = max(sequence.path_ends[group.index].end, sequence.detached[group.index])
    return next(
        (index for index in range(first, min(full, len(table))) if table[index] in group.shared), full
    )


class Simulation:
    """Free blocks of a manager as if some of its sequences had ended.

    Valid until the manager's next command; after that it raises `UsageError`, and another one must be made.
    """

    def __init__(self, guard: Guard, state: CacheState, blocks: BlockManager) -> None:
        self._guard, self._state, self._blocks = guard, state, blocks
        self._windows = [group.window for group in state.groups]
        self._free = [group.levels[PRIMARY].available for group in state.groups]
        self._gone: list[Counter[int]] = [Counter() for _ in state.groups]
        """Number of removed holders per window, by shared slot or run."""
        self._removed: set[int] = set()
        self._begun = self._moment()

    def _moment(self) -> tuple[int, ...]:
        state = self._state
        return (
            state.next_handle,
            state.releases,
            *[group.levels[PRIMARY].available for group in state.groups],
        )

    def _refuse_past(self) -> None:
        if self._moment() != self._begun:
            raise UsageError(
                "this simulation is outdated: the manager has executed a command since; create another one"
            )

    @property
    def free_blocks_per_window(self) -> dict[int, int]:
        """Return the free blocks per window. Raises `UsageError` after the manager's next command."""
        self._refuse_past()
        return dict(zip(self._windows, self._free, strict=True))

    def has_free(self, needed: int | Mapping[int, int]) -> bool:
        """True if `needed` blocks would be free: in every window, or in each as given, by its tokens.

        Raises `UsageError` after the manager's next command.
        """
        free = self.free_blocks_per_window
        if not isinstance(needed, Mapping):
            return checked_natural(needed, "needed") <= min(self._free)
        if not needed.keys() <= free.keys():
            raise UsageError(f"needed must be a mapping by window; the windows are {self._windows}")
        return all(checked_natural(blocks, "needed") <= free[window] for window, blocks in needed.items())

    @exclusive
    def remove(self, request_id: RequestId) -> dict[int, int]:
        """Count a running sequence as ended, or preempted; returns the blocks that this frees.

        Shared blocks come free with their last holder. Raises `UsageError` for one that was removed here before, and
        after the manager's next command.
        """
        sequence = self._blocks.running.sequence(request_id)
        if sequence.handle in self._removed:
            raise UsageError(f"request {request_id!r} has already been removed from this simulation")
        self._refuse_past()
        self._removed.add(sequence.handle)
        given = {}
        for index, group in enumerate(self._state.groups):
            part = sequence.part_in(index)
            # An encoder's input is freed with its last reader.
            readers = [each for each in self._state.sequences.values() if each.encoder is part]
            last = all(each.handle in self._removed for each in readers)
            blocks = self._given_back(group, part) if part is sequence or last else 0
            self._free[index] += blocks
            given[self._windows[index]] = blocks
        return given

    def _given_back(self, group: FullGroup | SlidingGroup, sequence: Sequence) -> int:
        gone, freed = self._gone[group.index], 0
        for what, holders, blocks in _held(group, sequence):
            if holders > 1:
                gone[what] += 1
            if holders in (1, gone[what]):
                freed += blocks
        return freed


def _held(group: FullGroup | SlidingGroup, sequence: Sequence) -> Iterator[tuple[int, int, int]]:
    """Yield the blocks of a sequence in a window: a slot, or a run as a number below 0; number of holders; number of
    blocks.
    """
    table, first = sequence.tables[group.index], sequence.detached[group.index]
    end = sequence.path_ends[group.index]
    cached = max(end.end, first)
    if isinstance(group, SlidingGroup):
        for slot in table[first:cached]:
            yield slot, group.refs[slot], 1
    else:
        for run in group.path(end):
            yield ~run.id, run.refs, len(run.slots)
    for slot in table[cached:]:
        yield slot, group.shared.get(slot, 1), 1
    for slot in sequence.retention_in(group.index):
        yield slot, 1, 1
