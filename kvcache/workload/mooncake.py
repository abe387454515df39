"""Traces in the Mooncake form: one JSON object a line.

A line says when a request arrived (`timestamp`, ms), how long its prompt and its output are, and names
the prompt's blocks of 512 tokens by `hash_ids`: equal numbers, equal tokens. No text and no token ids are in
such a file, which is why real services can publish them. The last block is cut to `input_length`. A line with more or
fewer numbers is refused: with blocks of another size it would be played as other prompts.

Reading streams: a trace of any length takes the memory of one line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec

from kvcache.errors import UsageError
from kvcache.workload.tokens import TRACE_BLOCK_TOKENS

MAX_LINE_BYTES = 16 * 2**20
"""A longer line is no trace; the bound keeps a wrong file from being read into memory whole."""

_MAX_LENGTH = 2**31 - 1
"""Tokens are counted by int32 in many places; no sequence is that long."""
HashId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


@dataclass(eq=False, repr=False)
class TraceError(UsageError):
    """A line of a trace cannot be used; `path`, `line` (from 1) and `reason` say which and why."""

    path: str
    line: int
    reason: str
    text = "{path}:{line}: {reason}"


class TraceRequest(msgspec.Struct, frozen=True):
    """One request of a trace. Fields of the file that are not named here are ignored."""

    timestamp: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    """Arrival in milliseconds after the start of the trace."""
    input_length: Annotated[int, msgspec.Meta(ge=1, le=_MAX_LENGTH)]
    """Tokens of the prompt."""
    output_length: Annotated[int, msgspec.Meta(ge=0, le=_MAX_LENGTH)]
    """Tokens to generate."""
    hash_ids: tuple[HashId, ...]
    """One number per 512 prompt tokens, rounded up: the last may stand for fewer."""
    cache_salt: str | None = None
    """Requests share blocks only if their salts are equal. Published traces have none."""

    def __post_init__(self) -> None:
        needed = -(-self.input_length // TRACE_BLOCK_TOKENS)
        if len(self.hash_ids) != needed:
            raise ValueError(
                f"hash_ids has {len(self.hash_ids)} entries, but input_length {self.input_length} needs {needed}, "
                f"one per {TRACE_BLOCK_TOKENS} tokens; a trace with blocks of another size has to be converted"
            )


def read_trace(path: str | Path, limit: int | None = None) -> Iterator[TraceRequest]:
    """Yield the requests of a trace in file order, at most `limit`. Blank lines are skipped.

    Raises TraceError at the first line that is no request, OSError if the file cannot be read.
    """
    decoder = msgspec.json.Decoder(TraceRequest)
    with Path(path).open("rb") as file:
        lines = ((number, line) for number, line in _lines(file, str(path)) if line.strip())
        for number, line in islice(lines, limit):
            try:
                yield decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise TraceError(str(path), number, str(error)) from None


def _lines(file: BinaryIO, path: str) -> Iterator[tuple[int, bytes]]:
    """The lines and their numbers, from 1."""
    for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
        if len(line) > MAX_LINE_BYTES:
            raise TraceError(path, number, f"longer than {MAX_LINE_BYTES} bytes; is this a trace?")
        yield number, line
