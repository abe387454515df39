"""Running requests: their tokens, the contents of their blocks, and how far they are computed."""

from __future__ import annotations

from array import array

import numpy as np

from events.packed import TOKEN_BYTES
from events.tokens.sequences import NamedTokens
from events.types import Namespace, RequestId
from kvcache.audit.columns import Ids
from kvcache.audit.contents import ContentIds


class Running(NamedTokens):
    """One admitted sequence. Without tokens its contents are known by name only, as far as events have given names."""

    __slots__ = ("_chain", "_ids", "computed", "held", "left", "num_prompt_tokens", "number", "request_id")

    def __init__(
        self, number: int, request_id: RequestId, tokens: array[int], namespace: Namespace, num_groups: int
    ) -> None:
        super().__init__(tokens, namespace)
        self.number = number
        """Admissions of the log before this one."""
        self.request_id = request_id
        self.num_prompt_tokens = len(tokens)
        self.computed = 0
        """Of the prompt."""
        self.held: list[Ids] = [np.empty(0, np.intp)] * num_groups
        """Per window, by block: contents that it holds; -1 where it holds none."""
        self.left = [0] * num_groups
        """Per window: leading blocks that it has left behind."""
        self._ids, self._chain = array("q"), 0

    def rewind(self, num_tokens: int, tokens_per_block: int) -> None:
        """Take back all but the first tokens."""
        super().rewind(num_tokens, tokens_per_block)
        self.num_prompt_tokens = min(self.num_prompt_tokens, num_tokens)
        self._ids, self._chain = array("q"), 0

    def branch_as(self, number: int, request_id: RequestId) -> Running:
        """Another sequence with the same tokens, which holds what this one holds."""
        child = Running(number, request_id, self.copy_tokens(), self.namespace, len(self.held))
        child.num_prompt_tokens, child.computed = self.num_prompt_tokens, self.computed
        child.names[:] = self.names
        child.held, child.left = [held.copy() for held in self.held], self.left[:]
        child._ids, child._chain = self._ids[:], self._chain
        return child

    def contents(self, known: ContentIds, stop: int, tokens_per_block: int) -> Ids:
        """The contents of its first `stop` full blocks."""
        have = len(self._ids)
        if have < stop:
            symbols = self.packed(have * tokens_per_block, stop * tokens_per_block)
            size = tokens_per_block * TOKEN_BYTES
            self._chain = known.extend(self._ids, self._chain, self.namespace, symbols, size)
        return np.frombuffer(self._ids, np.int64)[:stop].astype(np.intp)

    def take(self, group: int, first: int, ids: Ids) -> None:
        """Note contents that it holds, from its block `first` on."""
        held = self.held[group]
        if len(held) < first + len(ids):
            longer = np.full(max(first + len(ids), len(held) + len(held) // 4), -1, np.intp)
            longer[: len(held)] = held
            self.held[group] = held = longer
        held[first : first + len(ids)] = ids

    def forget(self, group: int, ids: Ids) -> None:
        """These contents are nowhere any more: it holds blocks without a name instead."""
        held = self.held[group]
        held[np.isin(held, ids)] = -1

    def let_go(self, group: int, first: int, stop: int | None = None) -> Ids:
        """Let go of blocks; returns the contents that were held there."""
        held = self.held[group][first:stop]
        ids = held[held >= 0]
        held[:] = -1
        return ids

    def leave(self, group: int, count: int) -> Ids:
        """Leave the next `count` blocks behind; returns the contents that were held there."""
        first = self.left[group]
        self.left[group] = first + count
        return self.let_go(group, first, first + count)
