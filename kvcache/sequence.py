"""A running request: its tokens, its block tables, and how far they are computed and cached."""

from __future__ import annotations

from array import array

from events.types import Namespace, RequestId
from kvcache.prefix_tree import Node


class Sequence:
    """State of one sequence; changed only while an event is applied."""

    __slots__ = ("computed", "handle", "namespace", "num_prompt_tokens", "request_id", "tables", "tails", "tokens")

    def __init__(
        self, handle: int, request_id: RequestId, namespace: Namespace, tokens: array[int], roots: list[Node]
    ) -> None:
        self.handle = handle
        self.request_id = request_id
        self.namespace = namespace
        self.tokens = tokens
        """Prompt and output as symbols; zeros where a log records no tokens."""
        self.num_prompt_tokens = len(tokens)
        self.computed = 0
        """Leading tokens whose K/V is written."""
        self.tables = [array("i") for _ in roots]
        """Per group: the primary slot of each block."""
        self.tails = roots
        """Per group: the end of the cached path that the sequence holds; its blocks up to there are cached."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.tokens)

    @property
    def stored(self) -> tuple[int, ...]:
        """Per group: leading blocks that are cached."""
        return tuple(tail.end for tail in self.tails)
