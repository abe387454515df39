"""Which blocks a state holds, by name: what routers should know of it."""

from __future__ import annotations

from events.packed import names_of_keys, unpack_names
from kvcache.fold.contents import Contents


def resident_names(state: Contents, level: int, group: int = 0) -> set[int]:
    """Names of the full blocks whose bytes are in this level; empty if blocks have no names."""
    key_bytes = state.hashing.key_bytes
    names: set[int] = set()
    if not key_bytes:
        return names
    for keys in state.groups[group].resident_keys(level):
        names.update(unpack_names(names_of_keys(keys, key_bytes)).tolist())
    return names
