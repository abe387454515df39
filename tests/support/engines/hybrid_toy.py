"""A toy engine with layers of several kinds in two pools, and a recorder beside it: dictionaries, no tree, no events.

It names what it likes and evicts what it likes, so that everything that may be told is told.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter

from events.tokens.names import NAMED_BY_ENGINE
from kvcache import KVCacheConfig, LayerGroup, Recorder
from kvcache.record.outputs import LogTarget

NAME_BYTES = 16
assert NAME_BYTES in NAMED_BY_ENGINE
FIRST = 1
SIZE = 4
GROUPS = (
    LayerGroup("sliding", 4, 8, 2),
    LayerGroup("chunked", 8, 16, 1),
    LayerGroup("state", 8, 0, 9),
    LayerGroup("sliding", 4, 8, 1, blocks=10),
)
OWN = 4
"""The group with a pool of its own."""


def key_of(tokens: list[int]) -> bytes:
    """The name of a prefix."""
    return hashlib.sha256(repr(tokens).encode()).digest()[:NAME_BYTES]


class HybridToy:
    """Blocks by id: who holds them in which group, and their names there."""

    def __init__(self, seed: int, log: LogTarget, blocks: int = 24) -> None:
        self.rng, self.blocks = random.Random(seed), blocks
        config = KVCacheConfig(
            tokens_per_block=SIZE, primary_blocks=blocks, max_sequence_length=64, checkpoint_spacing=8
        )
        self.recorder = Recorder(
            config,
            engine="toy",
            log=log,
            first_block_id=FIRST,
            name_bytes=NAME_BYTES,
            groups=GROUPS,
            wall_ns=iter(range(10**18, 10**19)).__next__,
        )
        self.tokens: dict[str, list[int]] = {}
        self.full: dict[str, list[int]] = {}
        """The blocks of group 0, none of which is cached."""
        self.tables: dict[str, dict[tuple[int, int], int]] = {}
        """By request, and by group and index."""
        self.names: dict[tuple[int, int], dict[bytes, int]] = {}
        """By group and block."""
        self.seen = Counter[str]()
        self._number = 0

    def held(self, group: int = 0) -> set[int]:
        """Blocks of the pool of a group that somebody has."""
        own = {
            block
            for table in self.tables.values()
            for (at, _), block in table.items()
            if (at == OWN) == (group == OWN)
        }
        return own if group == OWN else own | {block for blocks in self.full.values() for block in blocks}

    def named(self, group: int = 0) -> set[int]:
        """Blocks of the pool of a group that have names."""
        return {block for at, block in self.names if (at == OWN) == (group == OWN)}

    def free(self, group: int = 0) -> list[int]:
        """Blocks of the pool of a group that nobody has, and that have no name."""
        used = self.held(group) | self.named(group)
        blocks = GROUPS[group - 1].blocks if group == OWN else self.blocks
        return [block for block in range(FIRST, FIRST + blocks) if block not in used]

    def act(self) -> None:
        """Do something, if it can be done."""
        what = self.rng.choice(
            ("add", "take", "take", "reuse", "leave", "name", "name", "unname", "end", "flush")
        )
        if getattr(self, f"_{what}")():
            self.seen[what] += 1

    def _some(self) -> str | None:
        return self.rng.choice(sorted(self.tokens)) if self.tokens else None

    def _add(self) -> bool:
        self._number += 1
        name, tokens = f"r{self._number}", [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 40))]
        self.recorder.admitted(name, tokens)
        self.tokens[name], self.full[name], self.tables[name] = tokens, [], {}
        free = self.free()
        self.full[name] = free[: self.rng.randrange(3)]
        self.recorder.allocated(name, self.full[name])
        return True

    def _indices(self, name: str, group: int) -> list[int]:
        size = GROUPS[group - 1].tokens_per_block
        return [i for i in range(-(-len(self.tokens[name]) // size)) if (group, i) not in self.tables[name]]

    def _take(self) -> bool:
        name, group = self._some(), self.rng.randrange(1, len(GROUPS) + 1)
        free = self.free(group)
        if name is None or not free or not (indices := self._indices(name, group)):
            return False
        chosen = self.rng.sample(indices, min(len(free), len(indices), self.rng.randrange(1, 3)))
        blocks = self.rng.sample(free, len(chosen))
        self.recorder.taken(name, chosen, blocks, group=group)
        self.tables[name] |= dict(zip([(group, index) for index in chosen], blocks, strict=True))
        return True

    def _reuse(self) -> bool:
        name = self._some()
        for (group, block), names in sorted(self.names.items()) if name is not None else ():
            size = GROUPS[group - 1].tokens_per_block
            index = -(-min(names.values()) // size) - 1
            if index in self._indices(name or "", group):
                self.recorder.taken(name or "", [index], [block], group=group, reused=True)
                self.tables[name or ""][group, index] = block
                return True
        return False

    def _leave(self) -> bool:
        name = self._some()
        if name is None or not self.tables[name]:
            return False
        group, index = self.rng.choice(sorted(self.tables[name]))
        self.recorder.left(name, [index], group=group)
        del self.tables[name][group, index]
        return True

    def _name(self) -> bool:
        name = self._some()
        if name is None or not self.tables[name]:
            return False
        (group, index), block = self.rng.choice(sorted(self.tables[name].items()))
        size = GROUPS[group - 1].tokens_per_block
        position = min(len(self.tokens[name]), index * size + self.rng.randrange(1, size + 1))
        key = key_of(self.tokens[name][:position])
        known = self.names.get((group, block), {})
        if position <= index * size or key in known:
            return False
        self.recorder.named(name, [block], key, [position], group=group)
        self.names.setdefault((group, block), {})[key] = position
        return True

    def _unname(self) -> bool:
        if not self.names:
            return False
        group, block = self.rng.choice(sorted(self.names))
        names = self.names.pop((group, block))
        why = self.rng.choice(("capacity", "superseded"))
        self.recorder.unnamed([block] * len(names), list(names), self._some(), group=group, why=why)  # type: ignore[arg-type]
        return True

    def _end(self) -> bool:
        name = self._some()
        if name is None:
            return False
        self.recorder.ended(name)
        del self.tokens[name], self.full[name], self.tables[name]
        return True

    def _flush(self) -> bool:
        if self.rng.random() < 0.2:
            self.recorder.cleared()
            self.names.clear()
            self.seen["cleared"] += 1
        self.recorder.deferred("later", group=3)
        return self.recorder.flush() is not None

    def compare(self) -> None:
        """The recorder's state has what is here, and nothing else."""
        self.recorder.check()
        state = self.recorder.state
        names = {
            (group.index, slot + FIRST - group.pool.start): known
            for group in state.positional
            for slot, known in group.names.items()
        }
        assert names == self.names
        tables: dict[str, dict[tuple[int, int], int]] = {name: {} for name in self.tables}
        for group in state.positional:
            for handle, table in group.tables.items():
                of = tables[str(state.sequences[handle].request_id)]
                first = FIRST - group.pool.start
                of |= {(group.index, index): slot + first for index, slot in table.items()}
        assert tables == self.tables
