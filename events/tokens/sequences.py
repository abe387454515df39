"""The tokens of running sequences: a fold over `SequenceAdded` and `TokensAppended`.

An engine appends a token to each of the same sequences step after step. So the sampled tokens of those that were
decoded last are kept in a row of lists, and a step is one call of `list.append` for each, made from C.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from events.packed import NAME_BYTES, TOKEN_BYTES
from events.types import Namespace, TokensAppended

_FEW = 256
"""Number of tokens up to which slicing is faster than a view."""


class SequenceTokens:
    """Prompt and output of one sequence."""

    __slots__ = ("_tokens", "sampled")

    def __init__(self, tokens: array[int]) -> None:
        self._tokens = tokens
        self.sampled: list[int] = []
        """The last tokens, not yet in the array: appending to a list takes a third of the time."""

    @property
    def num_tokens(self) -> int:
        """Number of prompt and output tokens so far."""
        return len(self._tokens) + len(self.sampled)

    @property
    def tokens(self) -> array[int]:
        """Prompt and output as symbols; zeros if a log records no tokens."""
        sampled = self.sampled
        if sampled:
            self._tokens.fromlist(sampled)
            sampled.clear()
        return self._tokens

    def packed(self, first: int, stop: int) -> bytes:
        """Return the symbols from one token up to another, int32 LE."""
        if self.sampled:
            self._tokens.fromlist(self.sampled)
            self.sampled.clear()
        if stop - first > _FEW:
            # Copied once, and not twice: a prompt is too long for the processor's caches.
            return memoryview(self._tokens)[first:stop].tobytes()
        return self._tokens[first:stop].tobytes()

    def copied(self, first: int, stop: int) -> bytearray:
        """Return a copy of the same that can be appended to."""
        return bytearray(memoryview(self.tokens)[first:stop])

    def truncate(self, num_tokens: int) -> None:
        """Take back all tokens after the first `num_tokens`."""
        del self.tokens[num_tokens:]

    def copy_tokens(self) -> array[int]:
        """Copy the tokens, for another sequence."""
        return self.tokens[:]


def lengths(sequences: Sequence[SequenceTokens]) -> list[int]:
    """Return `num_tokens` of each, without the overhead of the property."""
    return [len(each._tokens) + len(each.sampled) for each in sequences]


class NamedTokens(SequenceTokens):
    """A running sequence with the namespace in which its blocks are cached, and their names."""

    __slots__ = ("names", "namespace")

    def __init__(self, tokens: array[int], namespace: Namespace, names: bytes = b"") -> None:
        super().__init__(tokens)
        self.namespace = namespace
        self.names = bytearray(names)
        """Names of its leading blocks, 8 bytes each; zeros if no event has given them."""

    def rewind(self, num_tokens: int, tokens_per_block: int) -> None:
        """Take back all tokens after the first ones, and names of blocks that these do not fill."""
        self.truncate(num_tokens)
        del self.names[(num_tokens - 1) // tokens_per_block * NAME_BYTES :]

    def branch(self) -> NamedTokens:
        """Return another sequence with the same tokens."""
        return NamedTokens(self.copy_tokens(), self.namespace, bytes(self.names))

    def name(self, first: int, names: bytes) -> None:
        """Write the names of its blocks from `first` on."""
        self.name_up_to(first + len(names) // NAME_BYTES, names)

    def name_up_to(self, stop: int, names: bytes) -> None:
        """Write the names of its last blocks before `stop`: an event omits names that earlier ones have given."""
        noted, end = self.names, stop * NAME_BYTES
        begin = end - len(names)
        if begin > len(noted):
            noted += bytes(begin - len(noted))
        noted[begin:end] = names


class RunningTokens:
    """Appends tokens to the sequences of a fold, which adds and removes them itself."""

    __slots__ = ("_began", "_sampled", "_sequences", "handles")

    def __init__(
        self, sequences: Mapping[int, Any], began: Callable[[list[Any]], None] = lambda sequences: None
    ) -> None:
        """`sequences` are `SequenceTokens` by handle; `began` is called with those that are decoded together next."""
        self._sequences = sequences
        self._began = began
        self.handles: bytes | None = None
        """Packed int64: the sequences decoded last; None once something else happened to one of them."""
        self._sampled: list[list[int]] = []
        """The last tokens of each."""

    def append(self, event: TokensAppended) -> None:
        """Apply the event. Without token ids (a log may leave them out) zeros are appended."""
        if event.counts:
            self._append_many(event)
            return
        if event.handles != self.handles:
            self._begin(event.handles)
        # `append` returns None, so `any` goes on to the end.
        any(map(list.append, self._sampled, array("i", event.tokens)))

    def appends_to(self, sequences: Sequence[SequenceTokens]) -> bool:
        """Return True if these are the sequences decoded last, if that is known."""
        if self.handles is None:
            return not sequences
        return [id(sampled) for sampled in self._sampled] == [id(each.sampled) for each in sequences]

    def forget_row(self) -> None:
        """Forget the row: the sequences changed, or one of them is no longer decoding."""
        self.handles = None

    def _begin(self, handles: bytes) -> None:
        """Begin a row of sequences that are decoded together."""
        sequences = list(map(self._sequences.__getitem__, array("q", handles)))
        self._began(sequences)
        self.handles, self._sampled = handles, [each.sampled for each in sequences]

    def _append_many(self, event: TokensAppended) -> None:
        self.forget_row()
        start = 0
        for handle, count in zip(array("q", event.handles), array("I", event.counts), strict=True):
            size = count * TOKEN_BYTES
            tokens = event.tokens[start : start + size] if event.tokens else bytes(size)
            self._sequences[handle].tokens.frombytes(tokens)
            start += size
