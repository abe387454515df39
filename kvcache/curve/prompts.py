"""The prompts that a log records, as block requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from events.log import LogReader
from events.packed import TOKEN_BYTES, names_of_keys, unpack_names
from events.structs import GroupCreated
from events.tokens.names import ALGORITHMS, DEFAULT_ALGORITHM, chain_symbols
from events.tokens.symbols import SymbolTable, has_symbols
from events.types import CROSS, FULL, CacheCreated, EventBatch, Gap, PoolShared, SequenceAdded
from kvcache.errors import Unsupported, UsageError
from kvcache.fold.state import CacheState
from kvcache.replay import Replayed, fitting

_HASHING = ALGORITHMS[DEFAULT_ALGORITHM]
"""Names blocks here, whatever names the log gives them."""


@dataclass(frozen=True, slots=True)
class CacheSize:
    """What a log's cache had for the window with full attention."""

    primary: int
    """Blocks."""
    secondary: int
    bytes_per_block: int
    """In all its pools."""


class LoggedPrompts:
    """Iterates once over a log: for each admission the numbers of the full blocks that end before its last token.

    A block's number is the name that `v2_sha256_64` gives it, which stands for its tokens, all before them, and the
    namespace. What else is to be had here holds when the iteration has ended. It raises `Unsupported` for a log without
    full attention, `UsageError` for one without a cache or tokens, `Unreplayable`, and what `LogReader` raises.
    """

    def __init__(self, log: str | Path, progress: Callable[[int], None] = lambda _: None) -> None:
        self.reader = LogReader(log)
        """Knows how the log ends."""
        self._log = Path(log)
        self._replayed = Replayed(CacheState())
        self._progress = progress
        self._symbols = SymbolTable()
        self._created: CacheCreated | None = None
        self.tokens_per_block = 0
        """Of the log's first cache: all prompts are cut into such blocks."""
        self.last_seq = -1
        self.admissions = 0
        self.skipped = 0
        """Admissions whose tokens cannot be known, because batches before them are missing."""
        self.gaps = 0
        self.windows = 0
        """How many the last cache has."""
        self.shared = False
        """Whether layers of other kinds take blocks of the same pool."""
        self.reused_primary = 0
        """Tokens in full blocks that the log's own cache served from primary."""
        self.reused_secondary = 0
        self._group = 0

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.reader:
            self._replayed.fold(batch, verify=False)
            with fitting(batch.seq):
                prompts = self._read(batch)
            yield from prompts
            self.last_seq = batch.seq
            self._progress(batch.seq)
        if self._created is None:
            raise UsageError(f"{self._log} holds no cache yet: its first batch is missing")

    @property
    def window(self) -> int:
        """The one with full attention, in tokens."""
        assert self._created is not None, "before the iteration has ended"
        return self._created.groups[self._group].window

    @property
    def config(self) -> dict[str, Any]:
        """The settings of the last cache."""
        assert self._created is not None, "before the iteration has ended"
        settings: dict[str, Any] = json.loads(self._created.config)
        return settings

    @property
    def size(self) -> CacheSize:
        """Of the last cache, in blocks of `tokens_per_block` tokens."""
        assert self._created is not None, "before the iteration has ended"
        group, tokens = self._created.groups[self._group], self._created.tokens_per_block
        primary, secondary = (blocks * tokens // self.tokens_per_block for blocks in group.num_blocks)
        in_block = sum(pool.bytes_per_block for pool in group.pools) * self.tokens_per_block // tokens
        return CacheSize(primary, secondary, in_block)

    def _read(self, batch: EventBatch) -> list[list[int]]:
        prompts = []
        # What a batch says before a gap continues what is missing: symbols begin with the whole state behind it.
        known = max((index for index, event in enumerate(batch.events) if isinstance(event, Gap)), default=-1)
        for index, event in enumerate(batch.events):
            if index > known:
                self._symbols.fold(event)
            if isinstance(event, CacheCreated):
                self._create(event)
            elif isinstance(event, Gap):
                self.gaps += 1
            elif isinstance(event, PoolShared):
                self.shared = True
            elif isinstance(event, SequenceAdded):
                if event.num_tokens and not event.tokens:
                    raise UsageError(
                        f"the log records no tokens (batch {batch.seq}), so that nobody can say which prompts begin "
                        "alike: take a log that was written with log.record_tokens=true"
                    )
                if index > known or not has_symbols(event.tokens):
                    prompts.append(self._blocks(event))
                else:
                    self.skipped += 1
        return prompts

    def _create(self, created: CacheCreated) -> None:
        self._created = created
        self.tokens_per_block = self.tokens_per_block or created.tokens_per_block
        self.windows = sum(group.kind != CROSS for group in created.groups)
        self._group = _full_group(created.groups)

    def _blocks(self, event: SequenceAdded) -> list[int]:
        self.admissions += 1
        self.reused_primary += event.reused_primary[self._group]
        self.reused_secondary += event.reused_secondary[self._group]
        size = self.tokens_per_block * TOKEN_BYTES
        # The last token is computed in any case, so a block that it ends is never reused whole.
        whole = (len(event.tokens) - TOKEN_BYTES) // size * size
        if whole <= 0:
            return []
        namespace, tokens = event.namespace, event.tokens[:whole]
        root = _HASHING.root_key(namespace)
        keys = chain_symbols(_HASHING, self._symbols, namespace, root, tokens, size)
        numbers: list[int] = unpack_names(names_of_keys(keys, _HASHING.key_bytes)).tolist()
        return numbers


def _full_group(groups: tuple[GroupCreated, ...]) -> int:
    for index, group in enumerate(groups):
        if group.kind == FULL:
            return index
    raise Unsupported(
        "a curve of a cache whose windows all slide",
        "which blocks it needs of a prompt depends on the window; take a log of one with full attention",
    )
