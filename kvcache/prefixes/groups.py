"""The attention groups of a publisher, and which prefix all of them can serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from events.subscribe.index import GPU, STORAGE
from kvcache.prefixes.holder import Holder
from kvcache.prefixes.runs import Plane

LEVELS = STORAGE + 1
_FULL = ("full_attention", "mla_attention", "sink_full_attention")
_SLIDING = ("sliding_window", "sliding_window_mla")


class Group:
    """The blocks that one kind of layers shares."""

    __slots__ = ("block_size", "followed", "holder", "index", "kind", "window")

    def __init__(self, index: int, kind: str | None, window: int | None, holder: Holder) -> None:
        self.index = index
        self.kind = kind
        self.window = window
        """Tokens that it attends to; None: all."""
        full = kind in _FULL or (kind is None and not index)
        self.followed = window is None if full else kind in _SLIDING and window is not None and window > 0
        """Whether its blocks are known here. What others need in order to serve a prefix is not."""
        self.block_size = 0
        """Tokens of a block; 0 before any event told."""
        self.holder = holder

    @property
    def planes(self) -> range:
        """Those of its levels."""
        return range(self.index * LEVELS, self.index * LEVELS + LEVELS)

    def is_like(self, kind: str, window: int | None) -> bool:
        """Whether it is of that kind."""
        return self.kind == kind and self.window == window

    def servable(self, mask: int, blocks: int) -> int:
        """The most blocks up to so many that it can serve where its blocks are those in `mask`.

        All of them with full attention; else those that the window sees from behind the last one.
        """
        if self.window is None:
            return min(blocks, leading(mask))
        size = self.block_size or 1
        while blocks:
            first = max(0, blocks * size - self.window + 1) // size
            missing = ~mask & ((1 << blocks) - (1 << first)) if first < blocks else 0
            if not missing:
                break
            # Whatever ends behind the last block that is missing needs it, too.
            blocks = missing.bit_length() - 1
        return blocks


def leading(mask: int) -> int:
    """How many of the lowest bits are set without a break."""
    return (mask ^ (mask + 1)).bit_length() - 1


def servable(groups: Sequence[Group], rows: Mapping[Plane, int], stop: int, *, in_tokens: bool) -> list[int]:
    """The longest prefix that all groups can serve from level 0, from levels 0 and 1, and from all.

    `rows` are the blocks of the prompt in each plane. The prompt and the result are in tokens, or in blocks of which
    all groups have the same.
    """
    return [_servable(groups, rows, level, stop, in_tokens) for level in range(GPU, LEVELS)]


def _servable(
    groups: Sequence[Group], rows: Mapping[Plane, int], level: int, stop: int, in_tokens: bool
) -> int:
    masks = []
    for group in groups:
        mask = 0
        for plane in group.planes[: level + 1]:
            mask |= rows.get(plane, 0)
        masks.append(mask)
    best, shorter = -1, stop
    while shorter != best:
        best = shorter
        for group, mask in zip(groups, masks, strict=True):
            size = group.block_size if in_tokens else 1
            shorter = group.servable(mask, shorter // size) * size if size else 0
    return best
