"""A running request: its tokens, its block tables, and how far they are computed and cached."""

from __future__ import annotations

from array import array

from events.types import Namespace, RequestId
from kvcache.prefix_tree import Node


class TokenRows:
    """Tokens of sequences that are decoded together: one row per step, one column per sequence.

    An engine appends a token to each of the same sequences step after step. Noting the whole row costs one append;
    a sequence collects its column when somebody looks at its tokens.
    """

    __slots__ = ("handles", "num_rows", "rows", "width")

    def __init__(self, handles: bytes, width: int) -> None:
        self.handles = handles
        """Packed uint32: whose the columns are."""
        self.width = width
        self.rows = array("i")
        self.num_rows = 0

    def append(self, tokens: bytes) -> None:
        """Add one row."""
        self.rows.frombytes(tokens)
        self.num_rows += 1

    def column(self, column: int, first_row: int) -> array[int]:
        """The tokens of one sequence from a row on."""
        return self.rows[first_row * self.width + column :: self.width]


class Sequence:
    """State of one sequence; changed only while an event is applied."""

    __slots__ = (
        "_column",
        "_computed",
        "_row",
        "_tokens",
        "handle",
        "namespace",
        "num_prompt_tokens",
        "request_id",
        "rows",
        "tables",
        "tails",
    )

    def __init__(
        self, handle: int, request_id: RequestId, namespace: Namespace, tokens: array[int], roots: list[Node]
    ) -> None:
        self.handle = handle
        self.request_id = request_id
        self.namespace = namespace
        self._tokens = tokens
        self.rows: TokenRows | None = None
        """Where the tokens sampled last are, besides `tokens`."""
        self._column = self._row = 0
        self._computed = 0
        self.num_prompt_tokens = len(tokens)
        self.tables = [array("i") for _ in roots]
        """Per group: the primary slot of each block."""
        self.tails = roots
        """Per group: the end of the cached path that the sequence holds; its blocks up to there are cached."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        rows = self.rows
        return len(self._tokens) + (rows.num_rows - self._row if rows is not None else 0)

    @property
    def tokens(self) -> array[int]:
        """Prompt and output as symbols; zeros where a log records no tokens."""
        rows = self.rows
        if rows is not None and self._row < rows.num_rows:
            self._tokens += rows.column(self._column, self._row)
            self._row = rows.num_rows
        return self._tokens

    @property
    def computed(self) -> int:
        """Leading tokens whose K/V is written: while it decodes, all but the one sampled last."""
        rows = self.rows
        if rows is not None and rows.num_rows:
            return len(self._tokens) + rows.num_rows - self._row - 1
        return self._computed

    @computed.setter
    def computed(self, num_tokens: int) -> None:
        self.leave_rows()
        self._computed = num_tokens

    @property
    def stored(self) -> tuple[int, ...]:
        """Per group: leading blocks that are cached."""
        return tuple(tail.end for tail in self.tails)

    def join_rows(self, rows: TokenRows, column: int) -> None:
        """From the next row on, the tokens come from a column."""
        self.leave_rows()
        self.rows, self._column, self._row = rows, column, rows.num_rows

    def leave_rows(self) -> None:
        """Collect what the rows hold and take no more from them."""
        if self.rows is not None:
            self._computed = len(self.tokens) - 1
            self.rows = None
