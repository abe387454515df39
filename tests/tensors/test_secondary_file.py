"""The file of the secondary level: whose it is, that it is refused to all others, and that refusing changes nothing."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import pickle
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
import xxhash

from events.errors import UnsafeFile
from kvcache.config import KVCacheConfig
from kvcache.device.secondary_file import SecondaryFileError
from kvcache.errors import ConfigError, NotEnoughMemory, UsageError
from kvcache.layout import Layout
from kvcache.pools import Pools
from tests.support.commands import RunPython
from tests.support.engines import strategies

TWO_POOLS = {"num_layers": 2, "num_kv_heads": (1, 2)}


def config(**settings: Any) -> KVCacheConfig:
    return strategies.config(**({"model": "m", "secondary_blocks": 4} | settings))


def pools(path: Path, **settings: Any) -> Pools:
    return Pools(Layout.of(config(**settings)), "cpu", path)


def made(path: Path, **settings: Any) -> bytes:
    """A file with something in each block; returns what is in it."""
    first = pools(path, **settings)
    for group in first.groups:
        for pool in group:
            pool.secondary.view(torch.uint8).copy_(
                torch.arange(pool.secondary.numel() * 2).view(pool.secondary.view(torch.uint8).shape) % 251
            )
    first.close()
    del first
    gc.collect()
    return path.read_bytes()


def test_bytes_outlive_the_pools(tmp_path: Path) -> None:
    """What was written to secondary is there for the next pools of the same cache, in every pool of every window."""
    path, settings = tmp_path / "s", TWO_POOLS | {"max_attention_window": (4, strategies.LIMIT)}
    before = made(path, **settings)
    again = pools(path, **settings)
    assert [pool.secondary.shape[0] for group in again.groups for pool in group] == [4, 4]
    for group in again.groups:
        for pool in group:
            flat = pool.secondary.view(torch.uint8).flatten()
            assert torch.equal(flat, (torch.arange(len(flat)) % 251).to(torch.uint8))
    assert path.read_bytes() == before
    assert path.stat().st_mode & 0o777 == 0o600


def test_checksums_are_those_of_the_bytes_in_all_pools(tmp_path: Path) -> None:
    """One per slot, XXH3 over the block's bytes, one pool after the other."""
    for number, settings in enumerate(({}, TWO_POOLS)):
        made(tmp_path / str(number), **settings)
        again = pools(tmp_path / str(number), **settings)
        assert again.secondary_file is not None
        slots = torch.tensor([2, 0, 3], dtype=torch.int32).numpy()
        expected = [
            xxhash.xxh3_64_digest(
                b"".join(p.secondary[slot].view(torch.uint8).numpy().tobytes() for p in again.groups[0])
            )
            for slot in (2, 0, 3)
        ]
        assert again.secondary_file.checksums(0, slots) == b"".join(expected)


def foreign(data: bytes) -> bytes:
    return b"somebody's" + data[10:]


def with_json(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Another header, with a checksum that fits it."""
    length = int.from_bytes(data[12:16], "little")
    text = change(data[20 : 20 + length])
    prefix = data[:12] + len(text).to_bytes(4, "little") + crc32(text).to_bytes(4, "little")
    return (prefix + text).ljust(4096, b"\0") + data[4096:]


WRONG: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "foreign": (foreign, "foreign"),
    "empty": (lambda data: b"", "foreign"),
    "zeros": (lambda data: bytes(len(data)), "foreign"),
    "newer": (lambda data: data[:8] + b"\x02" + data[9:], "newer"),
    "version 0": (lambda data: data[:8] + b"\0" + data[9:], "damaged"),
    "flipped header": (lambda data: data[:30] + bytes([data[30] ^ 1]) + data[31:], "damaged"),
    "no JSON": (lambda data: with_json(data, lambda text: b"{" + text), "damaged"),
    "no object": (lambda data: with_json(data, lambda text: b"[]"), "damaged"),
    "header cut": (lambda data: data[:25], "damaged"),
    "shorter": (lambda data: data[:-1], "damaged"),
    "only a header": (lambda data: data[:4096], "damaged"),
    "longer": (lambda data: data + b"\0", "damaged"),
    "other blocks": (
        lambda data: with_json(data, lambda text: text.replace(b'"blocks":[4]', b'"blocks":[5]')),
        "of another cache",
    ),
    "other model": (
        lambda data: with_json(data, lambda text: text.replace(b'"content_id":"', b'"content_id":"0')),
        "of another cache",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_file_of_this_cache_is_refused_and_stays(tmp_path: Path, wrong: str) -> None:
    """Each way in which a file is not ours has an error that says what to do, and no byte of it changes."""
    path = tmp_path / "s"
    change, problem = WRONG[wrong]
    data = change(made(path))
    path.write_bytes(data)
    with pytest.raises(SecondaryFileError, match=r"remove|choose|upgrade") as refused:
        pools(path)
    assert path.read_bytes() == data
    assert (refused.value.path, refused.value.problem) == (path, problem)
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)
    assert isinstance(refused.value, UsageError)


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "n"},
        {"model_variant": "rope scaled"},
        {"secondary_blocks": 5},
        {"tokens_per_block": 4},
        {"dtype": "float16"},
        {"kv_layout": "HND"},
        {"head_dim": 4},
        {"num_kv_heads": 4},
        {"kv_factor": 1},
        {"max_attention_window": 4},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_another_cache_is_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Whatever changes what bytes mean, or where they lie, makes it another cache."""
    data = made(tmp_path / "s")
    with pytest.raises(SecondaryFileError, match="another cache"):
        pools(tmp_path / "s", **settings)
    assert (tmp_path / "s").read_bytes() == data


def test_primary_blocks_do_not_matter(tmp_path: Path) -> None:
    """Only what lies in the file must be alike."""
    made(tmp_path / "s")
    pools(tmp_path / "s", primary_blocks=12)


def test_a_file_in_use_is_refused_until_it_is_given_back(tmp_path: Path, run_python: RunPython) -> None:
    """One cache at a time, in one process or in two; closing and forgetting the pools give it back."""
    first = pools(tmp_path / "s")
    with pytest.raises(SecondaryFileError, match=f"in use by .*{os.getpid()}"):
        pools(tmp_path / "s")
    done = run_python(
        "import pathlib, pickle\n"
        "from kvcache.device.secondary_file import SecondaryFile, SecondaryFileError\n"
        f"layout = pickle.loads({pickle.dumps(Layout.of(config()))!r})\n"
        f"try: SecondaryFile(pathlib.Path({str(tmp_path / 's')!r}), layout)\n"
        "except SecondaryFileError as error: print(error.problem)"
    )
    assert done.stdout == "locked\n"
    first.close()
    second = pools(tmp_path / "s")
    del second
    gc.collect()
    pools(tmp_path / "s")


def test_what_is_left_of_a_file_that_was_being_made_is_no_obstacle(tmp_path: Path) -> None:
    """A file gets its name when it is whole, so whoever dies before leaves only another name behind."""
    (tmp_path / "s.new").write_bytes(b"half")
    pools(tmp_path / "s")
    assert not (tmp_path / "s.new").exists()


def test_what_the_system_refuses_is_said(tmp_path: Path) -> None:
    """A directory, a missing one, a link and a pipe are no place for it."""
    with pytest.raises(SecondaryFileError, match="is not a file of a secondary level"):
        pools(tmp_path)
    with pytest.raises(SecondaryFileError, match="No such file"):
        pools(tmp_path / "missing" / "s")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeFile, match="symbolic link; give the path of the file itself"):
        pools(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SecondaryFileError, match="is not a file of a secondary level"):
        pools(tmp_path / "pipe")


def test_a_full_disk_is_known_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All room is taken at once: a file with holes would end the process in the middle of a copy."""

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(NotEnoughMemory, match="secondary_blocks"):
            pools(tmp_path / "s")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.lock"]
    pools(tmp_path / "s")
    status = (tmp_path / "s").stat()
    assert status.st_blocks * 512 >= status.st_size


@pytest.mark.parametrize("answer", [None, errno.EINVAL, errno.ENOSPC])
def test_room_is_taken_where_there_is_no_posix_fallocate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: int | None
) -> None:
    """As on macOS: what is missing is asked for by another command, once; a full disk is known at the start, too."""
    asked: list[tuple[Any, ...]] = []
    really = fcntl.fcntl

    def preallocate(descriptor: int, command: int, argument: Any = 0) -> Any:
        if command != 42:
            return really(descriptor, command, argument)
        asked.append(struct.unpack("=Iiqqq", argument))
        if answer is not None:
            raise OSError(answer, os.strerror(answer))
        os.ftruncate(descriptor, asked[-1][3])
        os.pwrite(descriptor, bytes(asked[-1][3]), 0)
        return argument

    monkeypatch.delattr(os, "posix_fallocate")
    monkeypatch.setattr(fcntl, "fcntl", preallocate)
    if answer == errno.ENOSPC:
        with pytest.raises(NotEnoughMemory, match="secondary_blocks"):
            pools(tmp_path / "s")
        return
    first = made(tmp_path / "s")
    assert made(tmp_path / "s") == first
    flags, place, offset, missing, taken = asked[0]
    assert (flags, place, offset, missing, taken) == (4, 3, 0, len(first), 0)
    assert len(asked) == 1 or answer


def test_a_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    """They would read and write K/V in it, and so would those who have another name for it; no byte of it changes."""
    path = tmp_path / "s"
    data = made(path)
    path.chmod(0o666)
    with pytest.raises(UnsafeFile, match="others can write it; chmod o-w it"):
        pools(path)
    path.chmod(0o600)
    (tmp_path / "other name").hardlink_to(path)
    with pytest.raises(UnsafeFile, match="hard links"):
        pools(path)
    (tmp_path / "other name").unlink()
    assert path.read_bytes() == data
    path.chmod(0o644)
    pools(path).close()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("name", ["s", "s.lock", "s.new"])
def test_what_another_user_has_planted_is_not_used(tmp_path: Path, name: str) -> None:
    """Neither the file, which anybody can make who knows the settings, nor its lock; the unfinished one is replaced."""
    path, planted = tmp_path / "s", tmp_path / name
    data = made(path)
    if name != "s":
        path.unlink()
        planted.write_bytes(b"")
    os.chown(planted, 65534, 65534)
    if name == "s.new":
        pools(path).close()
        assert path.stat().st_uid == 0
        return
    with pytest.raises(UnsafeFile, match=r"another user \(uid 65534\); run this as that user"):
        pools(path)
    assert planted.read_bytes() == (data if name == "s" else b"")


def test_without_xxhash_the_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksums need it, so that is said before there is a file."""
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(UsageError, match=r"kvcache\[hash\]"):
        pools(tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_settings_name_the_model_and_have_blocks(tmp_path: Path) -> None:
    """A file without a model could serve one model's blocks to another, and one without blocks serves nobody."""
    with pytest.raises(ConfigError, match="model: given ''"):
        config(model="", secondary_path="s")
    with pytest.raises(ConfigError, match="with secondary_blocks or host_cache_size"):
        config(secondary_blocks=0, secondary_path="s")
    with pytest.raises(ConfigError, match="secondary_path"):
        config(secondary_path="")
    with pytest.raises(UsageError, match="must be the path"):
        Pools(Layout.of(config()), "cpu", 7)  # type: ignore[arg-type]
