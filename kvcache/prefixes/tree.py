"""Contents of blocks as one tree for all publishers, and the publishers that hold each of them.

As in `kvcache.fold.prefix_tree`, a *run* is consecutive blocks of one prefix. Here it is the content of the blocks
alone, for all publishers; the part that a publisher has is a *holding*. Runs are split where prefixes diverge, and grow
at the end. Children are found by the content of their whole first block, so a match is exact.

The inputs of a block's hash other than tokens (images, a salt) are its *extra*, empty for nearly all. Only the first
block of a run can have one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from events.formats.vllm import Hash
from kvcache.errors import invariant
from kvcache.prefixes.publisher import WorkerRank

Adapter = str | int | None
"""A LoRA adapter by its name, or by its number where events give no name; None is the base model."""

Plane = int
"""A group's level: three times the group's index, plus the level."""


class Owner(Protocol):
    """Owner of blocks."""

    publisher: WorkerRank

    def split(self, holding: Holding, at: int, upper: ContentRun) -> None:
        """Assign the first `at` blocks of a run to `upper`; `holding` is this owner's part of the run."""


class ContentNode:
    """Parent of runs: a root, or a run."""

    __slots__ = ("children", "size")

    def __init__(self, size: int) -> None:
        self.children: dict[bytes, ContentRun] = {}
        """Children by tokens and extra of their first block."""
        self.size = size
        """Blocks of its own; 0 for a root, and for a run that is not in the tree any more."""


class ContentRoot(ContentNode):
    """The start of all prompts for one adapter, in blocks of one size."""

    def __init__(self, adapter: Adapter, block_bytes: int) -> None:
        super().__init__(0)
        self.adapter = adapter
        self.block_bytes = block_bytes


class ContentRun(ContentNode):
    """Consecutive blocks of one prefix, of which someone holds at least one, or a block after them."""

    __slots__ = ("extra", "holders", "key", "parent", "tokens")

    def __init__(self, parent: ContentNode, key: bytes, extra: bytes, tokens: bytearray, size: int) -> None:
        super().__init__(size)
        self.parent = parent
        self.key = key
        self.extra = extra
        self.tokens = tokens
        """int32 each."""
        self.holders: dict[Owner, Holding] = {}
        """Holdings of the run, or of blocks after it, by owner."""


class Holding:
    """Names that one publisher has given to blocks of a run, with the levels and groups of these.

    A publisher may have several names for one content (hashes may cover inputs that no event contains). The first name
    of each block is here, the others are in `more`.
    """

    __slots__ = ("children", "masks", "more", "names", "run")

    def __init__(self, run: ContentRun) -> None:
        self.run = run
        self.names: list[Hash | None] = []
        """Names by place in the run; None has none. They end with the last known block."""
        self.masks: dict[Plane, int] = {}
        """Bit i of a plane's mask: the block named `names[i]` is present. None is 0."""
        self.children = 0
        """Number of child runs of which the same publisher holds something."""
        self.more: Aliases | None = None

    def place(self, name: Hash) -> int:
        """Return the place of a name in the run."""
        names = self.names
        # Mostly the last one: removal starts at leaves, and stores continue.
        return len(names) - 1 if names[-1] == name else names.index(name)

    def there(self) -> dict[Plane, int]:
        """Masks by plane of the blocks present under any name."""
        if self.more is None:
            return self.masks
        union = dict(self.more.masks)
        for plane, mask in self.masks.items():
            union[plane] = union.get(plane, 0) | mask
        return union

    def end(self) -> int:
        """Blocks of the run up to the last one that is at any level."""
        masks = self.there()
        return max([mask.bit_length() for mask in masks.values()], default=0)

    def in_plane(self, plane: Plane) -> list[Hash]:
        """Return the names of blocks present in a plane."""
        mask = self.masks.get(plane, 0)
        return [name for at, name in enumerate(self.names) if name is not None and mask >> at & 1]

    def mark_name(self, name: Hash, plane: Plane) -> int:
        """Mark one block as present; returns 1 if it was not."""
        return self.mark(plane, self.place(name), 1)

    def mark(self, plane: Plane, at: int, count: int) -> int:
        """Mark `count` blocks as present; returns how many of them were not."""
        before = self.masks.get(plane, 0)
        bits = ((1 << count) - 1) << at
        self.masks[plane] = before | bits
        return count - (before & bits).bit_count()

    def unmark(self, plane: Plane, at: int, count: int) -> int:
        """Mark `count` blocks as absent; returns how many of them were present."""
        before = self.masks.get(plane, 0)
        bits = before & (((1 << count) - 1) << at)
        if bits == before:
            self.masks.pop(plane, None)
        else:
            self.masks[plane] = before ^ bits
        return bits.bit_count()

    def cut(self, at: int, upper: ContentRun) -> Holding:
        """Split off the part before `at` as a holding of another run; returns that one."""
        above = Holding(upper)
        above.names = self.names[:at]
        del self.names[:at]
        low = (1 << at) - 1
        above.masks = {plane: mask & low for plane, mask in self.masks.items() if mask & low}
        self.masks = {plane: mask >> at for plane, mask in self.masks.items() if mask >> at}
        aliases, self.more = self.more, None
        for name, (place, planes) in {} if aliases is None else aliases.names.items():
            first, its_place = (above, place) if place < at else (self, place - at)
            first.add_alias(name, its_place, planes)
        return above

    def add_alias(self, name: Hash, place: int, planes: int = 0) -> Aliases:
        """Add another name of a block, which is in these planes; returns what keeps it."""
        if self.more is None:
            self.more = Aliases(self)
        self.more.names[name] = place, 0
        for plane in planes_of(planes):
            self.more.mark_name(name, plane)
        return self.more


class Aliases:
    """Further names that a publisher has given to blocks of a run; there is any number of them for each block.

    Each is kept only while its block is in some plane under that name.
    """

    __slots__ = ("_counts", "first", "masks", "names")

    def __init__(self, first: Holding) -> None:
        self.first = first
        self.names: dict[Hash, tuple[int, int]] = {}
        """Place in the run of each name, and its planes as bits."""
        self.masks: dict[Plane, int] = {}
        """Bit i of a plane's mask: some alias of block i is present. None is 0."""
        self._counts: dict[tuple[Plane, int], int] = {}
        """Number of aliases of a block in a plane."""

    @property
    def run(self) -> ContentRun:
        """Run of the named blocks."""
        return self.first.run

    def place(self, name: Hash) -> int:
        """Return the place of a name in the run."""
        return self.names[name][0]

    def in_plane(self, plane: Plane) -> list[Hash]:
        """Return the names of blocks present in a plane."""
        return [name for name, (_, planes) in self.names.items() if planes >> plane & 1]

    def mark_name(self, name: Hash, plane: Plane) -> int:
        """Mark one block as present; returns 1 if it was not."""
        place, planes = self.names[name]
        if planes >> plane & 1:
            return 0
        self.names[name] = place, planes | 1 << plane
        self._counts[plane, place] = self._counts.get((plane, place), 0) + 1
        self.masks[plane] = self.masks.get(plane, 0) | 1 << place
        return 1

    def unmark_name(self, name: Hash, plane: Plane) -> int:
        """Mark one block as absent; returns 1 if it was present. A name without any plane is dropped."""
        place, planes = self.names[name]
        if not planes >> plane & 1:
            return 0
        planes ^= 1 << plane
        if planes:
            self.names[name] = place, planes
        else:
            del self.names[name]
        left = self._counts.pop((plane, place)) - 1
        if left:
            self._counts[plane, place] = left
        elif mask := self.masks[plane] ^ 1 << place:
            self.masks[plane] = mask
        else:
            del self.masks[plane]
        if not self.names:
            self.first.more = None
        return 1


def planes_of(bits: int) -> Iterator[Plane]:
    """Yield the planes in a set of bits."""
    while bits:
        plane = bits.bit_length() - 1
        yield plane
        bits ^= 1 << plane


RUN_BLOCKS_MAX = 512
"""Most blocks of a run, which bounds the cost of operations on one."""


class ContentTree:
    """Roots and runs, and the operations that change their shape but not who holds which block."""

    def __init__(self) -> None:
        self.roots: dict[Adapter, dict[int, ContentRoot]] = {}
        """Roots by adapter, then by bytes per block."""

    def root(self, adapter: Adapter, block_bytes: int) -> ContentRoot:
        """Return the root for an adapter and a block size, made on first use."""
        sizes = self.roots.setdefault(adapter, {})
        root = sizes.get(block_bytes)
        if root is None:
            root = sizes[block_bytes] = ContentRoot(adapter, block_bytes)
        return root

    def drop_unused(self, root: ContentRoot) -> None:
        """Forget a root without children."""
        sizes = self.roots.get(root.adapter, {})
        if not root.children and sizes.get(root.block_bytes) is root:
            del sizes[root.block_bytes]
            if not sizes:
                del self.roots[root.adapter]

    def add(self, parent: ContentNode, extra: bytes, tokens: bytes, block_bytes: int) -> ContentRun:
        """Add a run below a node, with at most `RUN_BLOCKS_MAX` of these blocks."""
        content = bytearray(tokens[: RUN_BLOCKS_MAX * block_bytes])
        key = tokens[:block_bytes] + extra
        invariant(key not in parent.children, "a sibling with the same first block exists")
        run = parent.children[key] = ContentRun(parent, key, extra, content, len(content) // block_bytes)
        return run

    def split(self, run: ContentRun, at: int) -> ContentRun:
        """Make the first `at` blocks a run of their own, above the rest; returns it."""
        block_bytes = len(run.tokens) // run.size
        parent, cut = run.parent, at * block_bytes
        upper = ContentRun(parent, run.key, run.extra, run.tokens[:cut], at)
        parent.children[upper.key] = upper
        del run.tokens[:cut]
        run.size -= at
        run.parent, run.extra, run.key = upper, b"", bytes(run.tokens[:block_bytes])
        upper.children[run.key] = run
        for holder, holding in list(run.holders.items()):
            holder.split(holding, at, upper)
        return upper

    def shrink(self, run: ContentRun) -> None:
        """Drop the content at the end of a run that has no holder any more; the run, too, if that is all of it.

        Continues with the parent of a dropped run.
        """
        node: ContentNode = run
        while isinstance(node, ContentRun):
            if node.children:
                return
            kept = max([len(holding.names) for holding in node.holders.values()], default=0)
            if kept == node.size:
                return
            if kept:
                del node.tokens[kept * len(node.tokens) // node.size :]
                node.size = kept
                return
            del node.parent.children[node.key]
            node.size = 0
            node = node.parent
        assert isinstance(node, ContentRoot)
        self.drop_unused(node)

    def runs(self) -> Iterator[tuple[ContentRoot, ContentRun]]:
        """Yield all runs, parents before children, with their roots."""
        for sizes in self.roots.values():
            for root in sizes.values():
                stack = list(root.children.values())
                while stack:
                    run = stack.pop()
                    yield root, run
                    stack.extend(run.children.values())


def common_blocks(run: ContentRun, at: int, tokens: bytes, begin: int, stop: int) -> int:
    """Count the blocks of a run, from `at` on, with the same tokens as the blocks from `begin` up to `stop`."""
    block_bytes = len(run.tokens) // run.size
    most = min(run.size - at, stop - begin)
    start = begin * block_bytes
    own = run.tokens
    if not at and most == run.size and tokens.startswith(own, start):
        return most
    ours, base = 0, at * block_bytes
    # Up to `ours` they agree, from `most` on it is unknown.
    while ours < most:
        middle = (ours + most + 1) // 2
        first, last = ours * block_bytes, middle * block_bytes
        if tokens.startswith(own[base + first : base + last], start + first):
            ours = middle
        else:
            most = middle - 1
    return ours


def next_extra(extras: Sequence[bytes] | None, begin: int, blocks: int) -> int:
    """Return the first block from `begin` on that has an extra, or the number of blocks."""
    if extras is None:
        return blocks
    return next((at for at in range(begin, blocks) if extras[at]), blocks)


Rows = dict[Plane, int]
"""Bit masks of a prompt's blocks, by plane."""
Step = tuple[ContentRun, int, int]
"""A run along a prompt, the blocks of the prompt before it, and the number of blocks of the run that match."""


def path(root: ContentRoot, tokens: bytes, extras: Sequence[bytes] | None) -> Iterator[Step]:
    """Yield the runs along a prompt."""
    size = root.block_bytes
    blocks, at = len(tokens) // size, 0
    node: ContentNode = root
    while at < blocks:
        key = tokens[at * size : (at + 1) * size]
        run = node.children.get(key + extras[at] if extras else key)
        if run is None:
            return
        take = common_blocks(run, 0, tokens, at, next_extra(extras, at + 1, blocks))
        yield run, at, take
        if take < run.size:
            return
        node, at = run, at + take


def rows_of(holder: Owner, runs: Sequence[Step]) -> Rows:
    """Return the blocks of a prompt that a holder has, in each plane."""
    rows: Rows = {}
    for run, start, take in runs:
        holding = run.holders.get(holder)
        if holding is None:
            break
        ones = (1 << take) - 1
        for plane, mask in holding.there().items():
            rows[plane] = rows.get(plane, 0) | (mask & ones) << start
    return rows


def leading_blocks(holder: Owner, runs: Sequence[Step], plane: Plane) -> int:
    """Count the leading blocks of a prompt that a holder has in a plane."""
    found = 0
    for run, _, take in runs:
        holding = run.holders.get(holder)
        if holding is None:
            break
        mask = (holding.masks if holding.more is None else holding.there()).get(plane, 0)
        # Inlined `leading`: routers spend their time here.
        count = (mask ^ (mask + 1)).bit_length() - 1
        if count < take:
            return found + count
        found += take
    return found
