"""Numbers for the contents of blocks: equal numbers, equal tokens, equal tokens before them, equal namespace."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from events.structs import SymbolPage
from events.types import Namespace


class ContentIds:
    """Numbers contents in the order in which they are first seen.

    Contents are told apart by a chain of 64-bit hashes, seeded anew in every process: that two of a billion blocks are
    taken for one has a chance of some percent. Good enough to explain a log; nothing is served by it.
    """

    def __init__(self) -> None:
        self._ids: dict[int, int] = {}
        self._salts: dict[Namespace, int] = {}
        self._chains = array("q")
        """Per content: its chain without the namespace."""
        self._parents = array("q")
        """Per content: that of the block before it, -1 at the start of a prompt."""
        self._pages: dict[int, int] = {}
        """Per page of symbols, by its number now: a hash of what its symbols stand for."""
        self._alike: dict[int, list[int]] | None = None
        """Contents by their chain; only where there are several namespaces."""

    def __len__(self) -> int:
        return len(self._chains)

    def extend(
        self,
        ids: array[int],
        chain: int,
        namespace: Namespace,
        symbols: bytes,
        block_bytes: int,
        parent: int = -1,
    ) -> int:
        """Append the numbers of the next full blocks of a sequence; returns the chain up to there.

        The first of them continues the last of `ids`, or `parent` where there is none.
        """
        number = len(self._salts)
        salt = self._salts.setdefault(namespace, hash(("namespace", number)))
        if len(self._salts) > 1 and self._alike is None:
            self._alike = {}
            for content, other in enumerate(self._chains):
                self._alike.setdefault(other, []).append(content)
        contents, chains, parents, alike = self._ids, self._chains, self._parents, self._alike
        get, append, translated = contents.get, ids.append, bool(self._pages)
        parent = ids[-1] if ids else parent
        for begin in range(0, len(symbols) - block_bytes + 1, block_bytes):
            block = symbols[begin : begin + block_bytes]
            chain = hash((chain, self._meant(block) if translated else block))
            known = get(chain ^ salt)
            if known is None:
                # What `_new` does, without a call for each block of a log.
                known = contents[chain ^ salt] = len(chains)
                chains.append(chain)
                parents.append(parent)
                if alike is not None:
                    alike.setdefault(chain, []).append(known)
            parent = known
            append(known)
        return chain

    def _meant(self, block: bytes) -> bytes | tuple[object, ...]:
        """What a block's symbols stand for: numbers below 0 stand for something else once they were forgotten."""
        symbols = array("i", block)
        if min(symbols) >= 0:
            return block
        return tuple(
            each if each >= 0 else (self._pages[(-1 - each) >> 8], (-1 - each) & 255) for each in symbols
        )

    def learn(self, pages: Iterable[SymbolPage], *, anew: bool = False) -> None:
        """What symbols stand for from now on; `anew`: no others do."""
        if anew:
            self._pages.clear()
        for page in pages:
            meaning = (page.token, page.extra_id, page.digest, page.offset)
            self._pages[page.number] = hash(meaning)

    def named(self, names: bytes) -> array[int]:
        """The numbers of blocks of which only the names are known: of a log without tokens."""
        return array("q", [self._named(name) for name in array("q", names)])

    def _named(self, name: int) -> int:
        known = self._ids.get(name)
        return self._new(name, 0, -1) if known is None else known

    def _new(self, chain: int, salt: int, parent: int) -> int:
        content = self._ids[chain ^ salt] = len(self._chains)
        self._chains.append(chain)
        self._parents.append(parent)
        if self._alike is not None:
            self._alike.setdefault(chain, []).append(content)
        return content

    def parents(self) -> npt.NDArray[np.int64]:
        """Per content that of the block before it; -1 at the start of a prompt."""
        return np.array(self._parents, np.int64)

    @property
    def has_several_namespaces(self) -> bool:
        """Whether the same tokens may be cached twice."""
        return self._alike is not None

    def elsewhere(self, content: int) -> list[int]:
        """The same tokens in other namespaces."""
        if self._alike is None:
            return []
        return [other for other in self._alike.get(self._chains[content], ()) if other != content]
