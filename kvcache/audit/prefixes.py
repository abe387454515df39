"""Which prefixes served most: a tree of the contents that were reused."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from events.types import RequestId
from kvcache.audit.history import History


@dataclass(frozen=True, slots=True)
class Prefix:
    """Consecutive blocks that were reused equally often, with no other reused ones beside them."""

    number: int
    parent: int | None
    """The number of the prefix that it continues."""
    first: int
    stop: int
    """Tokens of the prompt, from `first` up to `stop`."""
    times: int
    """How often it was reused."""
    tokens_served: int
    last_used: int
    """Wall-clock ns."""
    name: str | None
    """Of its last block, 16 hex digits; None if the log has no names."""
    stored_by: RequestId | None
    cached: bool
    """Whether it is cached at the end of the log, in any window."""


def hot_prefixes(history: History, top: int) -> list[Prefix]:
    """The `top` prefixes that served the most tokens, the most first; then those that they continue beside these.

    The times of a block are those of the window in which it was reused most often.
    """
    if not history.windows or not len(history.contents):
        return []
    history.reach()
    rows = len(history.contents)
    times = np.max([window.of["served"][:rows] for window in history.windows], axis=0)
    parents = history.contents.parents()
    served = np.flatnonzero(times > 0)
    children: defaultdict[int, list[int]] = defaultdict(list)
    for content, parent in zip(served.tolist(), parents[served].tolist(), strict=True):
        children[parent].append(content)
    chains = _chains(times.tolist(), children)
    tokens = [len(chain) * int(times[chain[0]]) for _, _, chain in chains]
    wanted = dict.fromkeys(sorted(range(len(chains)), key=lambda number: -tokens[number])[:top])
    for best in list(wanted):
        number = chains[best][0]
        while number >= 0 and number not in wanted:
            wanted[number] = None
            number = chains[number][0]
    return [_prefix(history, number, *chains[number], int(times[chains[number][2][0]])) for number in wanted]


def _chains(times: list[int], children: dict[int, list[int]]) -> list[tuple[int, int, list[int]]]:
    """(chain that it continues or -1, blocks before it, its contents), parents before children."""
    chains: list[tuple[int, int, list[int]]] = []
    stack = [(-1, 0, content) for content in children.get(-1, ())]
    while stack:
        above, depth, content = stack.pop()
        chain = [content]
        while len(after := children.get(chain[-1], [])) == 1 and times[after[0]] == times[content]:
            chain += after
        chains.append((above, depth, chain))
        stack += [(len(chains) - 1, depth + len(chain), child) for child in children.get(chain[-1], ())]
    return chains


def _prefix(history: History, number: int, above: int, depth: int, chain: list[int], times: int) -> Prefix:
    size, first = history.tokens_per_block, chain[0]
    stored_by = next(
        (int(by) for window in history.windows if (by := window.of["stored_by"][first]) >= 0), None
    )
    return Prefix(
        number,
        above if above >= 0 else None,
        depth * size,
        (depth + len(chain)) * size,
        times,
        times * len(chain) * size,
        max(int(window.of["used_at"][chain].max()) for window in history.windows),
        _name_of(history, chain[-1]),
        history.requests[stored_by] if stored_by is not None else None,
        any(bool((window.of["level"][chain] >= 0).all()) for window in history.windows),
    )


def _name_of(history: History, content: int) -> str | None:
    names = history.served_names
    names.reach(content + 1)
    name = names["name"][content : content + 1]
    return bytes(name.tobytes()).hex() if name[0] else None
