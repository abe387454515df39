"""Results of the manager's calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt

from events.types import RequestId


class Replacement(NamedTuple):
    """An entry of a block table that has changed its slot."""

    block: int
    """Index in the table."""
    old_slot: int
    new_slot: int
    window: int
    """Window of the table, in tokens."""


class BlockTable(Protocol):
    """Primary slots of blocks, int32: with pools a torch tensor on the host, without them a numpy array.

    The engine may change it, and move it by ``.to(device, non_blocking=True)``. The common interface of both kinds is
    declared here; type checkers infer the rest from ``isinstance(table, torch.Tensor)``.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """(blocks,) of one sequence, (sequences, most blocks) of several."""

    def tolist(self) -> Any:
        """The slots as lists of ints."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...

    def __getitem__(self, index: Any, /) -> Any: ...

    def __setitem__(self, index: Any, value: Any, /) -> None: ...

    def __array__(self) -> npt.NDArray[Any]: ...


class PagedTables(NamedTuple):
    """Block tables in rows one after the other, all int32: `indices` from ``indptr[i]`` up to ``indptr[i + 1]`` are the
    slots of sequence ``i``, and its last block holds ``last_page_len[i]`` tokens.
    """

    indptr: BlockTable
    """[sequences + 1]"""
    indices: BlockTable
    """[blocks]"""
    last_page_len: BlockTable
    """[sequences]"""


@dataclass(frozen=True, slots=True)
class Admission:
    """An admitted request."""

    request_id: RequestId
    handle: int
    """Identifies the sequence in events; never used twice in a log."""
    num_tokens: int
    """Tokens of the prompt."""
    reused_primary: int
    """Tokens in full blocks that were found in primary."""
    reused_secondary: int
    """Tokens in full blocks that are being copied from secondary."""
    reused_partial: int
    """Tokens at the start of a block that are being copied into a new one."""
    _tables: Callable[[], tuple[BlockTable, ...]] = field(repr=False, compare=False)
    encoder_tokens: int = 0
    """Tokens of the encoder's input."""
    reused_encoder_tokens: int = 0
    """Leading encoder tokens with K/V that is there, or is being copied from secondary. If all are, the encoder need
    not run; else it has to, and writing begins with the first block after these."""

    @property
    def reused_tokens(self) -> int:
        """Leading prompt tokens that need no computing; always fewer than the prompt has."""
        return self.reused_primary + self.reused_secondary + self.reused_partial

    @property
    def block_tables(self) -> tuple[BlockTable, ...]:
        """The block table per window, as it is now; with cross attention, the last one is for that.

        Raises `TransfersPending` before `start_transfers`, and `UnknownRequest` once this sequence was removed, also
        if another one has its id by then.
        """
        return self._tables()


@dataclass(frozen=True, slots=True)
class StoreResult:
    """Changes made by a call that stores blocks."""

    stored_blocks: int
    """Leading blocks of the sequence that have been stored, in the window with the fewest. Includes those that a
    sliding window has left, which may have been evicted since."""
    replaced: list[Replacement] = field(default_factory=list)
    """Entries that refer to another sequence's blocks, because it had stored them first."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """Blocks held by one pin."""

    request_id: RequestId
    """Request that held the blocks when they were pinned."""
    blocks: dict[int, int]
    """Number of blocks, by the window in tokens."""
    named: bool
    """True while they are cached; False since the cache was cleared."""


@dataclass(frozen=True, slots=True)
class PollResult:
    """Copies with a known end."""

    landed: tuple[int, ...] = ()
    failed: tuple[tuple[int, str], ...] = ()
    """(transfer, reason). Copies that were given up because one of these failed are not listed."""
    invalidated: tuple[tuple[RequestId, int], ...] = ()
    """Sequences that were running when a copy failed, and the number of leading tokens that are still computed, which
    is 0: the engine must compute them again."""


@dataclass(frozen=True, slots=True)
class MatchedBlock:
    """One cached block of a prompt."""

    index: int
    level: int
    slot: int
    name: str
    """16 hex digits; empty where blocks have no names."""
    num_tokens: int
    landed: bool
    window: int
    """Window of the block, in tokens."""


@dataclass(frozen=True, slots=True)
class Match:
    """Blocks that a prompt would reuse now."""

    num_tokens: int
    blocks: tuple[MatchedBlock, ...] = ()
    """Full blocks that would be held, window by window, ascending. A prefix is reused only up to where all windows have
    it, so they end at the same one; those of a sliding window begin with the first inside the window there."""
    partials: tuple[MatchedBlock, ...] = ()
    """Partially matching block of each window, of which only the first `num_tokens` tokens match; empty if any window
    has none."""
    tokens_by_level: tuple[int, int] = (0, 0)
    """Tokens in full blocks that are in primary in all windows, and that are in secondary in some."""

    encoder_blocks: tuple[MatchedBlock, ...] = ()
    """Blocks of the encoder's input, which are not among `blocks`; the last one may be filled with padding."""
    reused_encoder_tokens: int = 0
    """Leading tokens of the encoder's input that would be reused."""

    @property
    def partial(self) -> MatchedBlock | None:
        """The partial block of the first window; None if there is none in some window."""
        return self.partials[0] if self.partials else None

    @property
    def reused_tokens(self) -> int:
        """Tokens that would be reused."""
        return sum(self.tokens_by_level) + (self.partials[0].num_tokens if self.partials else 0)


@dataclass(frozen=True, slots=True)
class Demand:
    """Cost of admitting a prompt now: blocks of each window, by its tokens."""

    reused_tokens: int
    """Tokens that need no computing, those of a copied block included."""
    reusable: dict[int, int]
    """Full cached blocks that it would hold; in a sliding window only those inside it."""
    held: dict[int, int]
    """Blocks of `reusable` that running sequences hold: sharing them costs nothing."""
    needed: dict[int, int]
    """Decrease of the free blocks: new blocks, and reusable ones without a holder."""
    to_completion: dict[int, int]
    """Upper bound of that decrease, up to the last of the requested new tokens."""
    reused_encoder_tokens: int = 0
    """Reused tokens of the encoder's input; its blocks are those of window 0 (`CROSS_WINDOW`)."""


class InFlightPrefix(NamedTuple):
    """A running sequence that is about to compute what a prompt could reuse."""

    request_id: RequestId
    num_tokens: int
    """Leading tokens of the prompt, in full blocks, that can be reused once the sequence has stored all its blocks."""
