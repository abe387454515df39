"""Pages of layers with sliding windows: group 1 of the log, with a pool of its own.

SGLang keeps such a page under the page of the layers with full attention that holds the same tokens. A page in the tree
has a name in the log. A request holds its own pages and, of those in the tree, the last window, which SGLang locks for
it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from kvcache import LayerGroup, Recorder

SLIDING = 1
"""Number of SGLang's component for sliding windows, and of the group in the log."""


def window_group(cache: Any, layers: int) -> LayerGroup:
    """Return the group for a cache with sliding windows."""
    blocks = cache.token_to_kv_pool_allocator.size_swa // cache.page_size
    # SGLang wants all of the window to be cached; with the next token that is one more.
    return LayerGroup("sliding", cache.page_size, cache.sliding_window_size + 1, layers, blocks)


class WindowPages:
    """Recording of the pages of layers with sliding windows."""

    def __init__(self, recorder: Recorder, cache: Any) -> None:
        self._recorder, self._size = recorder, cache.page_size
        self._allocator = cache.token_to_kv_pool_allocator
        self._locked = -(-cache.sliding_window_size // self._size)
        """Number of pages at the end of a prefix in the tree that its holder locks."""
        self._tables: dict[str, dict[int, int]] = {}
        """Recorded pages of running requests, by name and index."""
        self._freed: list[int] = []
        """Pages that have left the tree, not yet recorded."""

    def freed(self, values: Iterable[Any]) -> None:
        """Note that the pages under these indices are about to leave the tree."""
        for indices in values:
            pages = indices[:: self._size]
            self._freed += [
                index // self._size
                for index in self._allocator.full_to_swa_index_mapping[pages].tolist()
                if index > 0
            ]

    def reset(self) -> None:
        """Forget what has left the tree, as all of it is gone."""
        self._freed.clear()

    def settle(self, requests: Iterable[tuple[str, Any]], needed_by: str | None) -> None:
        """Record pages that requests, and the tree, have no longer."""
        for name, req in requests:
            self._leave(name, req)
        if self._freed:
            self._recorder.unnamed(self._freed, None, needed_by, group=SLIDING)
            self._freed.clear()

    def admit(self, name: str, hit: list[int]) -> None:
        """Record the pages that an admitted request has found, under these pages of full attention."""
        self._tables[name] = {}
        first = max(0, len(hit) - self._locked)
        self._take(name, dict(enumerate(self._under(hit[first:]), first)), reused=True)

    def allocate(self, new: list[tuple[str, int, list[int]]]) -> None:
        """Record new pages of requests: their name, the index of the first page, and the pages that they are under."""
        there = iter(self._under([page for _, _, pages in new for page in pages]))
        for name, first, pages in new:
            self._take(name, dict(enumerate(islice(there, len(pages)), first)), reused=False)

    def store(self, name: str, req: Any, first: int, pages: list[int]) -> None:
        """Record that the tree has the beginning of a request, under these pages; it had it before `first`."""
        last, table = len(pages), self._tables[name]
        locked = max(0, last - self._locked, self._passed(req))
        begin = min(first, locked)
        there = dict(enumerate(self._under(pages[begin:]), begin))
        own = {index: page for index, page in there.items() if index >= first and table.get(index) == page}
        ends = [(index + 1) * self._size for index in own]
        self._recorder.named(name, list(own.values()), None, ends, group=SLIDING)
        self._leave(name, req)
        self._left(
            name,
            [at for at, page in table.items() if at < last and (at < locked or there[at] != page)],
        )
        held = {index: page for index, page in there.items() if index >= locked and index not in table}
        self._take(name, held, reused=True)

    def end(self, name: str) -> None:
        """Forget an ended request."""
        self._tables.pop(name, None)

    def _leave(self, name: str, req: Any) -> None:
        passed = self._passed(req)
        self._left(name, [index for index in self._tables[name] if index < passed])

    def _passed(self, req: Any) -> int:
        """Return the number of leading pages that the window of a request has passed."""
        passed = int(req.kv.get_evicted_seqlen(SLIDING))
        if req.lock is not None and req.lock.swa_released:
            passed = max(passed, int(req.kv.cache_protected_len))
        size: int = self._size
        return passed // size

    def _left(self, name: str, indices: list[int]) -> None:
        if indices:
            self._recorder.left(name, indices, group=SLIDING)
            for index in indices:
                del self._tables[name][index]

    def _take(self, name: str, there: dict[int, int], *, reused: bool) -> None:
        new = {index: page for index, page in there.items() if page}
        if new:
            self._recorder.taken(name, list(new), list(new.values()), group=SLIDING, reused=reused)
            self._tables[name] |= new

    def _under(self, pages: list[int]) -> list[int]:
        """Return the pages under pages of full attention, 0 for none."""
        size = self._size
        return (
            [
                index // size
                for index in self._allocator.full_to_swa_index_mapping[
                    [page * size for page in pages]
                ].tolist()
            ]
            if pages
            else []
        )
