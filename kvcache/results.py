"""What the manager's calls give back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt

from events.types import RequestId


class Replacement(NamedTuple):
    """A place in a block table that points at another slot than before."""

    block: int
    """Index in the table."""
    old_slot: int
    new_slot: int
    window: int
    """Of the table, in tokens."""


class BlockTable(Protocol):
    """Primary slots of blocks, int32: with pools a torch tensor on the host, without them a numpy array.

    The engine may change it, and move it by ``.to(device, non_blocking=True)``. What both kinds can do is declared
    here; type checkers learn the rest from ``isinstance(table, torch.Tensor)``.
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
    """Block tables in rows behind each other, all int32: `indices` from ``indptr[i]`` up to ``indptr[i + 1]`` are the
    slots of sequence ``i``, whose last block holds ``last_page_len[i]`` tokens.
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
    """Leading ones of these whose K/V is there, or is being copied from secondary. Where all are, the encoder need not
    run; else it has to, and what is written begins with the first block behind these."""

    @property
    def reused_tokens(self) -> int:
        """Leading prompt tokens that need no computing; always fewer than the prompt has."""
        return self.reused_primary + self.reused_secondary + self.reused_partial

    @property
    def block_tables(self) -> tuple[BlockTable, ...]:
        """The block table per window, as it is now; where there is cross attention, the last one is its.

        Raises `TransfersPending` before `start_transfers`, and `UnknownRequest` once this sequence was removed, also
        if another one has its id by then.
        """
        return self._tables()


@dataclass(frozen=True, slots=True)
class StoreResult:
    """What a call that stores blocks has changed."""

    stored_blocks: int
    """Leading blocks of the sequence that have been stored, in the window with the fewest. Those that a sliding window
    has left behind count, too, which may have been evicted since."""
    replaced: list[Replacement] = field(default_factory=list)
    """Another sequence had stored these blocks first, so the table points at its copy."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """What one pin holds."""

    request_id: RequestId
    """Whose blocks they were when they were pinned."""
    blocks: dict[int, int]
    """How many, by the window in tokens."""
    named: bool
    """Whether they are cached; False since the cache was cleared."""


@dataclass(frozen=True, slots=True)
class PollResult:
    """Copies whose end was seen."""

    landed: tuple[int, ...] = ()
    failed: tuple[tuple[int, str], ...] = ()
    """(transfer, reason). Copies that were given up because one of these failed are not listed."""
    cut: tuple[tuple[RequestId, int], ...] = ()
    """Sequences that were running when a copy failed, and how many leading tokens are still computed, which is 0:
    the engine must compute them again."""


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
    """Whose block it is, in tokens."""


@dataclass(frozen=True, slots=True)
class Match:
    """What a prompt would reuse now."""

    num_tokens: int
    blocks: tuple[MatchedBlock, ...] = ()
    """Full ones that would be held, window by window, ascending. A prefix is reused as far as all windows have it, so
    they end at the same one; those of a sliding window begin with the first that it still sees from there."""
    partials: tuple[MatchedBlock, ...] = ()
    """In each window a block of which only the first `num_tokens` match; none if one has none."""
    tokens_by_level: tuple[int, int] = (0, 0)
    """Tokens in full blocks that lie in primary in all windows; those that some window has in secondary."""

    encoder_blocks: tuple[MatchedBlock, ...] = ()
    """Those of the encoder's input, which are not among `blocks`; the last one may be filled with padding."""
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
    """What admitting a prompt would take now: blocks of each window, by its tokens."""

    reused_tokens: int
    """That need no computing, those of a copied block too."""
    reusable: dict[int, int]
    """Full cached blocks that it would hold; of a window that slides those that it still sees."""
    held: dict[int, int]
    """Of these, the ones that running sequences hold: sharing them takes nothing."""
    needed: dict[int, int]
    """By how much the free blocks would become fewer: new blocks, and reusable ones that nobody holds."""
    to_completion: dict[int, int]
    """The same at most, up to the last of the new tokens that were asked about."""
    reused_encoder_tokens: int = 0
    """Of the encoder's input, whose blocks are those of window 0 (`CROSS_WINDOW`)."""


class Computing(NamedTuple):
    """A running sequence that is about to compute what a prompt could reuse."""

    request_id: RequestId
    num_tokens: int
    """Leading tokens of the prompt, in full blocks, that can be reused once it has stored all that it will."""
