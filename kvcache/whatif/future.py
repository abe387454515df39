"""Which blocks come again, and when: what the prompts of a log say about blocks of one size."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from events.packed import NAME_BYTES, names_of_keys
from events.tokens.names import ALGORITHMS, DEFAULT_ALGORITHM
from kvcache.whatif.commands import Prompt
from kvcache.whatif.playback import Foresight

_NONE = -1


class Future:
    """All uses of all blocks, in the order of the prompts."""

    def __init__(self) -> None:
        self.ids: dict[bytes, int] = {}
        """Blocks by name."""
        self.first = array("q")
        """By block, its first use."""
        self.following = array("q")
        """By use, the next one of the same block."""
        self.prompt_of = array("q")
        """By use, the number of the prompt."""
        self.numbers: dict[int, int] = {}
        """By handle, the number of its prompt."""
        self._last = array("q")

    @classmethod
    def of(cls, prompts: Iterable[tuple[int, Prompt]]) -> Future:
        """What prompts say, each with the tokens of a block of the cache that it comes to."""
        future = cls()
        for tokens_per_block, prompt in prompts:
            future._add(tokens_per_block, prompt)
        return future

    def _add(self, tokens_per_block: int, prompt: Prompt) -> None:
        number = self.numbers[prompt.handle] = len(self.numbers)
        names = names_in(prompt, tokens_per_block)
        for begin in range(0, len(names), NAME_BYTES):
            block = self.ids.setdefault(names[begin : begin + NAME_BYTES], len(self.ids))
            use = len(self.prompt_of)
            self.prompt_of.append(number)
            self.following.append(_NONE)
            if block < len(self.first):
                self.following[self._last[block]] = use
                self._last[block] = use
            else:
                self.first.append(use)
                self._last.append(use)


def names_in(prompt: Prompt, tokens_per_block: int) -> bytes:
    """The names of the blocks that a prompt can reuse whole."""
    hashing, namespace = ALGORITHMS[DEFAULT_ALGORITHM], prompt.played_namespace
    count, content = (prompt.num_tokens - 1) // tokens_per_block, prompt.content
    size, root = tokens_per_block * 4, hashing.root_key(namespace)
    if not count:
        return b""
    if content.extra_ids is None and not content.items:
        keys = hashing.chain(namespace, root, content.tokens[: count * size], size)
    else:
        keys = hashing.chain_rich(namespace, root, content, size)[: count * hashing.key_bytes]
    return names_of_keys(keys, hashing.key_bytes)


class Outlook(Foresight):
    """What is still to come while requests are played."""

    def __init__(self, future: Future) -> None:
        self._future = future
        self._next = array("q", future.first)
        self._admitted = bytearray(len(future.numbers))

    def admitting(self, handle: int) -> None:
        """Its uses are no longer to come."""
        self._note(handle, admitted=True)

    def refused(self, handle: int) -> None:
        """They are."""
        self._note(handle, admitted=False)

    def _note(self, handle: int, *, admitted: bool) -> None:
        """A branch that is played as a request has no prompt of its own in the log: its uses are not foreseen."""
        number = self._future.numbers.get(handle)
        if number is not None:
            self._admitted[number] = admitted

    def next_use(self, name: bytes) -> int | None:
        """The number of the next prompt that has the block; None: there is none."""
        future = self._future
        block = future.ids.get(name)
        if block is None:
            return None
        use = self._next[block]
        while use != _NONE and self._admitted[future.prompt_of[use]]:
            use = future.following[use]
        self._next[block] = use
        return None if use == _NONE else future.prompt_of[use]
