"""A model of what a power cut leaves of files: what was not synced may be there, in part, or not.

Programs work on real files while `Recording` notes what they ask of the system. `Disk` is what is on the disk then:
files in sectors of 512 bytes, each of which is as it is now, as it was at the last sync, zeros or garbage where
something was written since; lengths from the old to the new one; and of names that were made, changed or removed since
their directory was synced, any. Bytes that nobody has written stay, though their sector is written. After a sync that
has failed, the system takes what it should have written for written: another sync does not write it.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

SECTOR = 512
FATES = ("now", "old", "zero", "noise")
State = dict[str, bytes | None]
"""Contents by path below the root; None: a directory."""


@dataclass
class File:
    """One file, whatever its names are."""

    durable: bytes = b""
    now: bytes = b""
    unsynced: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Where in each sector something was written that no sync has confirmed, from and up to."""
    dirty: set[int] = field(default_factory=set)
    """The sectors of it that the next sync writes."""

    def write(self, offset: int, data: bytes) -> None:
        self.now = self.now[:offset].ljust(offset, b"\0") + data + self.now[offset + len(data) :]
        self._touch(offset, offset + len(data))

    def truncate(self, size: int) -> None:
        self._touch(min(size, len(self.now)), max(size, len(self.now)))
        self.now = self.now[:size].ljust(size, b"\0")

    def _touch(self, begin: int, end: int) -> None:
        for sector in range(begin // SECTOR, (end + SECTOR - 1) // SECTOR):
            low, high = self.unsynced.get(sector, (SECTOR, 0))
            start = sector * SECTOR
            self.unsynced[sector] = (
                min(low, max(begin - start, 0)),
                max(high, min(end - start, SECTOR)),
            )
            self.dirty.add(sector)

    def sync(self) -> None:
        written = bytearray(self.durable[: len(self.now)].ljust(len(self.now), b"\0"))
        for sector in self.dirty:
            place = slice(sector * SECTOR, (sector + 1) * SECTOR)
            written[place] = self.now[place]
            del self.unsynced[sector]
        # What an earlier sync has failed to write, and nobody has written since, is still not on disk.
        self.durable, self.dirty = bytes(written), set()

    def fail_to_sync(self) -> None:
        self.dirty.clear()

    def left(self, size: int, fates: dict[int, str], noise: random.Random) -> bytes:
        """What a power cut leaves, with this fate of each unsynced sector."""
        longest = max(size, len(self.now), len(self.durable))
        old, now = self.durable.ljust(longest, b"\0"), self.now.ljust(longest, b"\0")
        found = bytearray(old)
        for sector, fate in fates.items():
            low, high = (sector * SECTOR + each for each in self.unsynced[sector])
            high = min(high, longest)
            if fate != "old" and low < high:
                kinds = {"now": now[low:high], "zero": bytes(high - low)}
                found[low:high] = kinds[fate] if fate in kinds else noise.randbytes(high - low)
        return bytes(found[:size])

    def sizes(self) -> list[int]:
        """The lengths that it may have."""
        ends = sorted({len(self.durable), len(self.now)})
        between = [sector * SECTOR for sector in self.unsynced]
        return sorted({*ends, *(each for each in between if ends[0] < each < ends[-1])})


Names = tuple[tuple[str, ...], dict[str, Any]]


@dataclass
class Directory:
    """Names, and changes of them that no sync has made durable."""

    durable: dict[str, File | Directory] = field(default_factory=dict)
    changes: list[Names] = field(default_factory=list)
    """Names that go, and names that come."""

    def change(self, gone: tuple[str, ...], come: dict[str, File | Directory]) -> None:
        self.changes.append((gone, come))

    def names(self, kept: tuple[bool, ...] | None = None) -> dict[str, File | Directory]:
        """What is in it, if these changes are kept (None: all)."""
        found = dict(self.durable)
        for index, (gone, come) in enumerate(self.changes):
            if kept is None or kept[index]:
                for name in gone:
                    found.pop(name, None)
                found.update(come)
        return found

    def sync(self) -> None:
        self.durable, self.changes = self.names(), []


class Disk:
    """A tree of files, as far as it is on disk."""

    def __init__(self, root: Path | None = None) -> None:
        self.moves: list[tuple[Directory, Names, Directory, Names]] = []
        """Where a name comes, and where it goes only then: file systems do not lose what is renamed."""
        self.root = Directory()
        """What is below the path `root` is durable to begin with."""
        for path in sorted(root.rglob("*")) if root is not None else ():
            assert root is not None
            content = path.read_bytes() if path.is_file() else b""
            made = Directory() if path.is_dir() else File(content, content)
            self.directory(path.relative_to(root).parent).durable[path.name] = made

    def find(self, path: Path) -> File | Directory:
        found: File | Directory = self.root
        for part in path.parts:
            assert isinstance(found, Directory)
            found = found.names()[part]
        return found

    def directory(self, path: Path) -> Directory:
        found = self.find(path)
        assert isinstance(found, Directory)
        return found

    def states(self, most: int, rng: random.Random) -> Iterator[State]:
        """All that a power cut may leave now, or `most` of it at random, if there is more."""
        unsynced = list(self._unsynced(self.root))
        ways = [_ways(each) for each in unsynced]
        count = 1
        for each in ways:
            count *= len(each)
        chosen: Iterator[tuple[Any, ...]] = itertools.product(*ways)
        if count > most:
            chosen = (tuple(rng.choice(each) for each in ways) for _ in range(most))
        for choice in chosen:
            fates = {id(each): fate for each, fate in zip(unsynced, choice, strict=True)}
            if any(_has(fates, *move[2:]) and not _has(fates, *move[:2]) for move in self.moves):
                continue
            state: State = {}
            _leave(self.root, "", fates, random.Random(len(fates)), state)
            yield state

    def _unsynced(self, directory: Directory) -> Iterator[File | Directory]:
        if directory.changes:
            yield directory
        every = [*directory.durable.values()]
        for _, come in directory.changes:
            every += come.values()
        for each in {id(each): each for each in every}.values():
            if isinstance(each, Directory):
                yield from self._unsynced(each)
            elif each.unsynced:
                yield each


def _has(fates: dict[int, Any], directory: Directory, change: Names) -> bool:
    """Whether a change of names is kept."""
    for index, each in enumerate(directory.changes):
        if each is change:
            return bool(fates[id(directory)][index])
    return True


def _ways(unsynced: File | Directory) -> list[Any]:
    if isinstance(unsynced, Directory):
        return list(itertools.product((True, False), repeat=len(unsynced.changes)))
    sectors, chance = list(unsynced.unsynced), random.Random(len(unsynced.now))
    fates = itertools.product(FATES, repeat=len(sectors))
    if len(sectors) > 5:
        # All now or all old, and some of the others.
        some = [("now",) * len(sectors), ("old",) * len(sectors)]
        fates = iter([*some, *(tuple(chance.choices(FATES, k=len(sectors))) for _ in range(4**5))])  # type: ignore[assignment]
    each = [dict(zip(sectors, fate, strict=True)) for fate in fates]
    return list(itertools.product(unsynced.sizes(), each))


def _leave(
    directory: Directory, path: str, fates: dict[int, Any], noise: random.Random, state: State
) -> None:
    for name, each in directory.names(fates.get(id(directory))).items():
        if isinstance(each, Directory):
            state[path + name] = None
            _leave(each, f"{path}{name}/", fates, noise, state)
        else:
            size, sectors = fates.get(id(each), (len(each.now), {}))
            state[path + name] = each.left(size, sectors, noise) if id(each) in fates else each.durable


def put(state: State, root: Path) -> None:
    """Let the directory `root` hold this."""
    root.mkdir()
    for name, content in sorted(state.items()):
        if content is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(content)


Change = Callable[[Disk], None]


class Recording:
    """What a program asks of the system below `root`, step by step; `told` is asked before each what was promised."""

    def __init__(self, root: Path, reported: Callable[[], int] = lambda: -1) -> None:
        self.root, self.reported = root, reported
        self.steps: list[tuple[Change, int]] = []
        self._lock = threading.RLock()
        self._seen = Disk(root)
        """As the steps have left it, to notice what was written in other ways."""
        self._began = Disk(root)

    def disks(self) -> Iterator[tuple[Disk, int]]:
        """The disk after each step, with what had been told by the time of the next. One disk, to be used at once."""
        disk = self._began
        for (change, _), reported in zip(
            self.steps, [*(reported for _, reported in self.steps[1:]), self.reported()], strict=True
        ):
            change(disk)
            yield disk, reported

    def _note(self, change: Change) -> None:
        self.steps.append((change, self.reported()))
        change(self._seen)

    def _below(self, path: Any) -> Path | None:
        """The path below the root, if it is one that counts."""
        if isinstance(path, int):
            path = Path(f"/proc/self/fd/{path}").readlink()
        found = Path(os.fsdecode(path))
        ours = found.is_relative_to(self.root) and found.name not in ("LOCK", "KEEPER")
        return found.relative_to(self.root) if ours else None

    def _catch_up(self, path: Path) -> None:
        """Note what was written in ways that are not watched."""
        seen, now = self._seen.find(path), (self.root / path).read_bytes()
        assert isinstance(seen, File)
        if seen.now != now:
            same = len(os.path.commonprefix([seen.now, now]))  # noqa: RUF071 - of bytes

            def change(disk: Disk) -> None:
                file = disk.find(path)
                assert isinstance(file, File)
                file.truncate(same)
                file.write(same, now[same:])

            self._note(change)

    def _sync(self, call: Callable[[int], None]) -> Callable[[int], None]:
        def sync(descriptor: int) -> None:
            with self._lock:
                path = self._below(descriptor)
                if path is not None and not (self.root / path).is_dir():
                    self._catch_up(path)
                try:
                    call(descriptor)
                except OSError:
                    if path is not None:
                        self._note(lambda disk: disk.find(path).fail_to_sync())  # type: ignore[union-attr]
                    raise
                if path is not None:
                    self._note(lambda disk: disk.find(path).sync())

        return sync

    def _open(self, call: Any) -> Any:
        def opened(path: Any, flags: int, *args: Any, **named: Any) -> int:
            with self._lock:
                below = self._below(path)
                is_new = below is not None and not os.path.lexists(path)
                descriptor = call(path, flags, *args, **named)
                if below is not None and is_new:
                    self._name(below.parent, (), {below.name: File})
                return int(descriptor)

        return opened

    def _name(self, directory: Path, gone: tuple[str, ...], come: dict[str, Callable[[], Any]]) -> None:
        self._note(lambda disk: disk.directory(directory).change(gone, {n: f() for n, f in come.items()}))

    def _writing(self, call: Any) -> Any:
        """What changes a file's bytes is seen by looking at them afterwards."""

        def written(descriptor: int, *args: Any) -> Any:
            with self._lock:
                result = call(descriptor, *args)
                path = self._below(descriptor)
                if path is not None and (self.root / path).is_file():
                    self._catch_up(path)
                return result

        return written

    def _renaming(self, call: Any) -> Any:
        def renamed(source: Any, target: Any, **named: Any) -> None:
            with self._lock:
                old, new = self._below(source), self._below(target)
                if old is not None and new is not None:
                    if (self.root / old).is_file():
                        self._catch_up(old)
                    self._note(lambda disk: _move(disk, old, new))
                call(source, target, **named)

        return renamed

    def _removing(self, call: Any) -> Any:
        def removed(path: Any, **named: Any) -> None:
            with self._lock:
                call(path, **named)
                below = self._below(path)
                if below is not None:
                    self._name(below.parent, (below.name,), {})

        return removed

    def _making(self, call: Any) -> Any:
        def made(path: Any, mode: int = 0o777, **named: Any) -> None:
            with self._lock:
                call(path, mode, **named)
                below = self._below(path)
                if below is not None:
                    self._name(below.parent, (), {below.name: Directory})

        return made

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch."""
        with ExitStack() as stack:
            for name, wrap in (
                ("open", self._open),
                ("write", self._writing),
                ("writev", self._writing),
                ("pwrite", self._writing),
                ("ftruncate", self._writing),
                ("fsync", self._sync),
                ("fdatasync", self._sync),
                ("rename", self._renaming),
                ("replace", self._renaming),
                ("unlink", self._removing),
                ("mkdir", self._making),
            ):
                stack.enter_context(patch.object(os, name, wrap(getattr(os, name))))
            yield


def _move(disk: Disk, old: Path, new: Path) -> None:
    """A rename: in one directory, one change; else two, of which the second is not kept without the first."""
    moved, source, target = disk.find(old), disk.directory(old.parent), disk.directory(new.parent)
    if source is target:
        source.change((old.name,), {new.name: moved})
    else:
        target.change((), {new.name: moved})
        source.change((old.name,), {})
        disk.moves.append((target, target.changes[-1], source, source.changes[-1]))
