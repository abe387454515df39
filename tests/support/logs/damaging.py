"""Logs to damage, and damage of all kinds, done to their files at places that a seed chooses."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest

from events.log import zstd
from events.log.retention import Limits
from events.log.segments import first_seq, segment_paths
from kvcache.maintenance.compress import compress
from kvcache.maintenance.prune import make_snapshot, prune
from tests.support.logs.kept import random_log
from tests.support.logs.logs import segments

Change = Callable[[random.Random, Path], None]


def log_with_snapshots(seed: int, log: Path) -> Path:
    """A log of many segments and some snapshots."""
    random_log(seed, log)
    for path in segment_paths(log)[2::3]:
        make_snapshot(log, first_seq(path))
    return log


def compressed_copy(plain: Path, log: Path) -> Path:
    """A copy of which all segments but the last are compressed, in many small frames."""
    shutil.copytree(plain, log)
    with patch.object(zstd, "BLOCK_BYTES", 300):
        assert compress(log).segments == len(segment_paths(log)) - 1 > 5
    return log


def without_beginning(whole: Path, log: Path, *, segments: int) -> Path:
    """A copy of which so many segments are left, behind a snapshot."""
    shutil.copytree(whole, log)
    prune(log, Limits(segments=segments))
    return log


class Pair(NamedTuple):
    """A whole log, and the same without its beginning. Not to be changed."""

    whole: Path
    kept: Path


@pytest.fixture(
    scope="session", params=[pytest.param("seed 1", marks=pytest.mark.long), "seed 3", "seed 3, compressed"]
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Logs of many segments and some snapshots, plain and compressed."""
    directory = tmp_path_factory.mktemp("pair")
    seed, _, form = request.param.removeprefix("seed ").partition(", ")
    whole = log_with_snapshots(int(seed), directory / "plain")
    if form:
        whole = compressed_copy(whole, directory / form)
    return Pair(whole, without_beginning(whole, directory / "kept", segments=5))


@contextmanager
def unreadable(path: Path, begin: int = 0) -> Iterator[None]:
    """A file that the disk does not give back, from this byte on."""
    pread, bad = os.pread, path.stat().st_ino

    def refuse(descriptor: int, count: int, offset: int) -> bytes:
        if os.fstat(descriptor).st_ino == bad and offset + count > begin:
            if offset >= begin:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return pread(descriptor, begin - offset, offset)
        return pread(descriptor, count, offset)

    with patch.object(os, "pread", refuse):
        yield


def _file(rng: random.Random, log: Path) -> tuple[Path, bytearray]:
    path = rng.choice(segments(log))
    return path, bytearray(path.read_bytes() or b"\0")


def flip(rng: random.Random, log: Path) -> None:
    """One bit."""
    path, data = _file(rng, log)
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut(rng: random.Random, log: Path) -> None:
    """The end of a file."""
    path, data = _file(rng, log)
    path.write_bytes(data[: rng.choice((0, rng.randrange(64), rng.randrange(len(data))))])


def zero(rng: random.Random, log: Path) -> None:
    """A part of a file, as a sector that was never written."""
    path, data = _file(rng, log)
    begin = rng.randrange(len(data))
    end = min(begin + rng.choice((1, 40, 512)), len(data))
    path.write_bytes(bytes(data[:begin]) + bytes(end - begin) + bytes(data[end:]))


def drop(rng: random.Random, log: Path) -> None:
    """Bytes in the middle, so that what follows moves."""
    path, data = _file(rng, log)
    begin = rng.randrange(len(data))
    path.write_bytes(data[:begin] + data[begin + rng.choice((1, 36, 300)) :])


def repeat(rng: random.Random, log: Path) -> None:
    """Bytes that are there twice; whole frames, too."""
    path, data = _file(rng, log)
    offsets = [64]
    while offsets[-1] < len(data):
        offsets.append(offsets[-1] + 36 + int.from_bytes(data[offsets[-1] + 4 : offsets[-1] + 8], "little"))
    begin, end = sorted(rng.choices(offsets if rng.random() < 0.5 else range(len(data)), k=2))
    path.write_bytes(data[:end] + data[begin:end] + data[end:])


def remove(rng: random.Random, log: Path) -> None:
    """A whole file."""
    rng.choice(segments(log)).unlink()


def swap(rng: random.Random, log: Path) -> None:
    """Two files."""
    one, other = rng.choices(segments(log), k=2)
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


def copy(rng: random.Random, log: Path) -> None:
    """A file, with another one's name or with the next number."""
    one, other = rng.choices(segments(log), k=2)
    target = other if rng.random() < 0.5 else other.with_name(f"{int(other.stem) + 1:020d}{one.suffix}")
    if target != one:
        shutil.copy(one, target)


CHANGES: tuple[Change, ...] = (flip, cut, zero, drop, repeat, remove, swap, copy)
