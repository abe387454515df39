"""The whole visible state, told anew to a router that knows nothing.

A block on its way between two levels is in none for routers, though what hangs behind it may stay visible: they were
told of it in time, and hang it below a block that is nowhere just then. Who comes late must be able to do the same. So
such a block is told as if it had arrived, and taken back at the end; when it lands, it is announced to all.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from events.feed_changes import Removed, Stored
from events.feed_columns import Columns
from events.types import PRIMARY, SECONDARY

Places = dict[bytes, tuple[Columns, int]]
"""Name to level and slot."""


def visible_blocks(group: int, levels: tuple[Columns, Columns]) -> Iterator[Stored | Removed]:
    """Chains from the roots on, each as long as one level goes; at the end what is on its way, taken back."""
    places: Places = {name: (level, slot) for level in levels for name, slot in level.announced()}
    bridges = _bridges(places, levels)
    places |= bridges
    children: dict[bytes, list[bytes]] = {}
    for name, (columns, slot) in places.items():
        children.setdefault(columns.parent_of(slot), []).append(name)
    crossed: list[bytes] = []
    heads = children.get(b"", [])[::-1]
    while heads:
        columns, _ = places[heads[-1]]
        names = [heads.pop()]
        below = children.get(names[-1], [])
        while len(below) == 1 and places[below[0]][0] is columns:
            names.append(below[0])
            below = children.get(names[-1], [])
        chain = array("i", [places[name][1] for name in names])
        yield columns.read(chain, group, PRIMARY if columns is levels[PRIMARY] else SECONDARY)
        crossed += [name for name in names if name in bridges]
        heads.extend(reversed(below))
    for level in (PRIMARY, SECONDARY):
        gone = [name for name in reversed(crossed) if bridges[name][0] is levels[level]]
        if gone:
            yield Removed(group, level, b"".join(gone))


def _bridges(known: Places, levels: tuple[Columns, Columns]) -> Places:
    """The blocks that are not visible and have something visible behind them."""
    parents = {columns.parent_of(slot) for columns, slot in known.values()}
    missing = parents - known.keys() - {b""}
    if not missing:
        return {}
    hidden: Places = {name: (level, slot) for level in levels for name, slot in level.hidden()}
    bridges: Places = {}
    while missing:
        name = missing.pop()
        if name in hidden:
            bridges[name] = columns, slot = hidden[name]
            missing |= {columns.parent_of(slot)} - known.keys() - bridges.keys() - {b""}
    return bridges
