"""Who has which prefix, the plain way: for each publisher a dictionary from names to contents, and sets of names.

A content is the adapter, the size of its blocks, and all blocks from the prompt's start on: tokens and what else the
hash covers. Nothing is shared, compressed or remembered beyond that, and every question is answered by trying.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

from events.formats.vllm import AllBlocksCleared, BlockRemoved, BlockStored, Unknown, VLLMBatch, VLLMEvent

FULL = ("full_attention", "mla_attention", "sink_full_attention")
MEDIA = {None: 0, "GPU": 0, "CPU": 1, "CPU_PINNED": 1, "CPU_TIER1": 1}
Path = tuple[Any, ...]
Name = Any


class Group:
    def __init__(self, index: int, kind: str | None, window: int | None, size: int) -> None:
        self.kind, self.window, self.size = kind, window, size
        self.levels: list[set[Name]] = [set(), set(), set()]
        if kind in FULL or (kind is None and index == 0):
            self.followed = window is None
        else:
            self.followed = (
                kind in ("sliding_window", "sliding_window_mla") and window is not None and window > 0
            )


class NaivePublisher:
    def __init__(self) -> None:
        self.groups: dict[int, Group] = {}
        self.paths: dict[int, dict[Name, Path]] = {}
        """By size of the blocks, then by name."""
        self.slots: dict[Path, list[Name]] = {}
        """The names of a content, the first one first; None where one has gone."""
        self.counts: Counter[str] = Counter()

    def take(self, event: VLLMEvent) -> None:
        self.counts["events"] += 1
        match event:
            case BlockStored():
                self._store(event)
            case BlockRemoved():
                self._remove(event)
            case AllBlocksCleared():
                for group in self.groups.values():
                    group.levels = [set(), set(), set()]
            case Unknown():
                self.counts["unknown_events"] += 1
        self._forget()

    # -- events

    def _store(self, event: BlockStored) -> None:
        group = self._group(event)
        if group is None or not group.followed or event.locality not in (None, "LOCAL"):
            self.counts["ignored_events"] += 1
            return
        level = group.levels[MEDIA.get(event.medium and event.medium.upper(), 2)]
        hashes, size, tokens = list(event.block_hashes), event.block_size, event.token_ids
        reported = 0
        if size > 0 and len(tokens) <= len(hashes) * size:
            whole = len(tokens) == len(hashes) * size
            reported = len(tokens) // size if whole or group.window is None else 0
        if reported and group.size not in (0, size):
            reported = 0
        elif reported:
            group.size = size
        contents = self._contents(event, reported)
        if contents is not None:
            self._store_reported(event, hashes[:reported], contents, group, level)
            hashes = hashes[reported:]
        if hashes:
            self.counts["stores_without_tokens"] += 1
            self._store_names(hashes, level)

    def _group(self, event: BlockStored) -> Group | None:
        index = event.group_idx or 0
        kind, window = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window
        group = self.groups.get(index)
        if group is not None and (kind is None or (kind, window) == (group.kind, group.window)):
            return group
        if not 0 <= index < 64:
            return None
        changed = self.groups[index] = Group(index, kind, window, group.size if group else 0)
        if group is not None and changed.followed:
            changed.levels = group.levels
        return changed

    def _contents(self, event: BlockStored, reported: int) -> list[Any] | None:
        """Of each block."""
        size = event.block_size
        extras = event.extra_keys
        if not reported or any(
            type(t) is not int or not -(2**31) <= t < 2**31 for t in event.token_ids[: reported * size]
        ):
            return None
        salt = event.cache_salt if event.parent_block_hash is None else None
        if not extras or not any(extras):
            extras = (None,) * reported
        if len(extras) < reported:
            return None
        found = []
        for block in range(reported):
            keys = [key for key in extras[block] or () if key != event.lora_name]
            if block == 0 and salt is not None and salt not in keys:
                keys.append(salt)
            found.append((tuple(event.token_ids[block * size : (block + 1) * size]), repr(keys)))
        return found

    def _store_reported(
        self, event: BlockStored, hashes: list[Name], contents: list[Any], group: Group, level: set[Name]
    ) -> None:
        names = self.paths.setdefault(group.size, {})
        parent = event.parent_block_hash
        if parent is None:
            adapter = event.lora_id if event.lora_name is None else event.lora_name
            path: Path = ((adapter, group.size),)
        elif parent in names:
            path = names[parent]
        else:
            self.counts["orphans"] += 1
            self._store_names(hashes, level)
            return
        if len(set(hashes)) < len(hashes):
            self.counts["contradictions"] += 1
            self._store_names(list(dict.fromkeys(hashes)), level)
            return
        for name, content in zip(hashes, contents, strict=True):
            path = (*path, content)
            self._name(names, name, path, group.size)
            self._add(level, name)

    def _name(self, names: dict[Name, Path], name: Name, path: Path, size: int) -> None:
        if names.get(name, path) != path:
            self.counts["contradictions"] += 1
            slots = self.slots[names.pop(name)]
            slots[slots.index(name)] = None
            for group in self.groups.values():
                if group.size == size:
                    for level in group.levels:
                        level.discard(name)
        if name not in names:
            names[name] = path
            slots = self.slots.setdefault(path, [None])
            if None in slots:
                slots[slots.index(None)] = name
            else:
                slots.append(name)
            self.counts["aliases"] += slots[0] != name

    def _store_names(self, hashes: Sequence[Name], level: set[Name]) -> None:
        for name in hashes:
            self._add(level, name)

    def _add(self, level: set[Name], name: Name) -> None:
        self.counts["repeated_stores"] += name in level
        level.add(name)

    def _remove(self, event: BlockRemoved) -> None:
        group = self.groups.get(event.group_idx or 0)
        if event.locality not in (None, "LOCAL") or (group is not None and not group.followed):
            self.counts["ignored_events"] += 1
            return
        level = set() if group is None else group.levels[MEDIA.get(event.medium and event.medium.upper(), 2)]
        for name in event.block_hashes:
            self.counts["unknown_removals"] += name not in level
            level.discard(name)

    def _forget(self) -> None:
        """Names of which nothing is left, and to which nothing leads back."""
        for size, names in self.paths.items():
            there = set().union(
                *(level for g in self.groups.values() if g.size == size for level in g.levels)
            )
            alive = {
                path[:end] for name, path in names.items() if name in there for end in range(2, len(path) + 1)
            }
            for name, path in list(names.items()):
                slots = self.slots[path]
                if path not in alive or (slots[0] != name and name not in there):
                    slots[slots.index(name)] = None
                    del names[name]
        self.slots = {
            path: slots for path, slots in self.slots.items() if any(each is not None for each in slots)
        }

    # -- questions

    def _longest(
        self, rows: dict[int, list[set[int]]], end: int, scales: dict[int, int]
    ) -> tuple[int, int, int]:
        if not any(level for row in rows.values() for level in row):
            return 0, 0, 0
        one, two, three = (self._servable(rows, level, end, scales) for level in range(3))
        return one, two, three

    def _servable(self, rows: dict[int, list[set[int]]], level: int, end: int, scales: dict[int, int]) -> int:
        """The largest prefix up to `end` that every group can serve; rows have the blocks by group and level."""
        followed = {index: group for index, group in self.groups.items() if group.followed}
        for length in range(end, 0, -1):
            if all(
                self._serves(group, set().union(*rows[index][: level + 1]), length, scales[index])
                for index, group in followed.items()
            ):
                return length if followed else 0
        return 0

    def _serves(self, group: Group, blocks: set[int], length: int, scale: int) -> bool:
        if not scale or length % scale:
            return False
        first, size = 0, group.size or 1
        if group.window is not None:
            first = max(0, (length // scale) * size - group.window + 1) // size
        return all(block in blocks for block in range(first, length // scale))

    def match(
        self, adapter: Any, tokens: Sequence[int], extras: Sequence[Sequence[Any]]
    ) -> tuple[int, int, int]:
        rows: dict[int, list[set[int]]] = {}
        for index, group in self.groups.items():
            row: list[set[int]] = [set(), set(), set()]
            path: Path = ((adapter, group.size),)
            for block in range(len(tokens) // group.size if group.size else 0):
                content = tuple(tokens[block * group.size : (block + 1) * group.size])
                path = (*path, (content, repr(list(extras[block]) if block < len(extras) else [])))
                for name in self.slots.get(path, ()):
                    for level, names in enumerate(group.levels):
                        if name in names:
                            row[level].add(block)
            rows[index] = row
        scales = {index: group.size for index, group in self.groups.items()}
        return self._longest(rows, len(tokens), scales)

    def match_hashes(self, hashes: Sequence[Name]) -> tuple[int, int, int]:
        rows = {
            index: [{at for at, name in enumerate(hashes) if name in names} for names in group.levels]
            for index, group in self.groups.items()
        }
        return self._longest(rows, len(hashes), dict.fromkeys(self.groups, 1))

    def resident(self) -> tuple[int, int, int]:
        one, two, three = (
            sum(len(group.levels[level]) for group in self.groups.values()) for level in range(3)
        )
        return one, two, three


class NaiveIndex:
    def __init__(self) -> None:
        self.publishers: dict[tuple[Hashable, int], NaivePublisher] = {}

    def apply(self, worker: Hashable, batch: VLLMBatch) -> None:
        publisher = self.publishers.setdefault((worker, batch.rank or 0), NaivePublisher())
        publisher.counts["batches"] += 1
        for event in batch.events:
            publisher.take(event)

    def match(self, tokens: Sequence[int], adapter: Any = None, extras: Sequence[Sequence[Any]] = ()) -> Any:
        found = {key: each.match(adapter, tokens, extras) for key, each in self.publishers.items()}
        return {key: overlap for key, overlap in found.items() if overlap[2]}

    def match_hashes(self, hashes: Sequence[Name]) -> Any:
        found = {key: each.match_hashes(hashes) for key, each in self.publishers.items()}
        return {key: overlap for key, overlap in found.items() if overlap[2]}
