"""The tokens of running sequences: a fold over `SequenceAdded` and `TokensAppended`.

An engine appends a token to each of the same sequences step after step. Noting the whole row costs one append; a
sequence collects its column when somebody looks at its tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from events.packed import TOKEN_BYTES
from events.types import TokensAppended


class TokenRows:
    """Tokens of sequences that are decoded together: one row per step, one column per sequence."""

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


class SequenceTokens:
    """Prompt and output of one sequence."""

    __slots__ = ("_column", "_row", "_tokens", "rows")

    def __init__(self, tokens: array[int]) -> None:
        self._tokens = tokens
        self.rows: TokenRows | None = None
        """Where the tokens sampled last are, besides those that were collected."""
        self._column = self._row = 0

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

    def join_rows(self, rows: TokenRows, column: int) -> None:
        """From the next row on, the tokens come from a column."""
        self.leave_rows()
        self.rows, self._column, self._row = rows, column, rows.num_rows

    def leave_rows(self) -> None:
        """Collect what the rows hold and take no more from them."""
        if self.rows is not None:
            self._tokens = self.tokens
            self.rows = None


class RunningTokens:
    """Appends tokens to the sequences of a fold, which adds and removes them itself."""

    __slots__ = ("_rows", "_sequences")

    def __init__(self, sequences: Mapping[int, SequenceTokens]) -> None:
        self._sequences = sequences
        self._rows: TokenRows | None = None
        """Of the sequences that were decoded last."""

    def append(self, event: TokensAppended) -> None:
        """Apply the event. Without token ids (a log may leave them out) zeros are appended."""
        if event.counts:
            self._append_many(event)
            return
        rows = self._rows
        if rows is None or rows.handles != event.handles:
            rows = self._begin_rows(event.handles)
        rows.append(event.tokens)

    def forget(self) -> None:
        """Begin anew: the sequences are others now."""
        self._rows = None

    def leave(self, sequence: SequenceTokens) -> None:
        """Let a sequence collect its tokens; the rows end, since one of their columns does."""
        if sequence.rows is self._rows:
            self._rows = None
        sequence.leave_rows()

    def _begin_rows(self, handles: bytes) -> TokenRows:
        """Other sequences than before are decoded together from now on."""
        unpacked = array("I", handles)
        rows = self._rows = TokenRows(handles, len(unpacked))
        for column, handle in enumerate(unpacked):
            self._sequences[handle].join_rows(rows, column)
        return rows

    def _append_many(self, event: TokensAppended) -> None:
        self._rows = None
        start = 0
        for handle, count in zip(array("I", event.handles), array("I", event.counts), strict=True):
            sequence = self._sequences[handle]
            sequence.leave_rows()
            size = count * TOKEN_BYTES
            sequence.tokens.frombytes(event.tokens[start : start + size] if event.tokens else bytes(size))
            start += size
