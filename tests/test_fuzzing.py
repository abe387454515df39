"""Whatever is read from a wire, a file or a broker: anything may stand there, and one typed error says so.

Samples that are valid are changed at random places, cut, spliced and stretched. What comes of it is read, or refused
with the error that is documented; nothing else is raised, and nothing takes long.
"""

from __future__ import annotations

import io
import json
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from events import codec
from events.brokers.records import parse_record
from events.errors import EventDecodeError, LogError, LogOutdated
from events.formats import trtllm, vllm
from events.log import LogReader, LogWriter
from events.log.segments import segment_paths
from events.log.snapshots import snapshot_paths
from events.subscribe.index import Index
from events.subscribe.sockets import KeyFileError, read_pair
from kvcache import KVCacheConfig, PrefixIndex
from kvcache.cli.options import read_tokens
from kvcache.errors import ConfigError, SnapshotError, UsageError
from kvcache.maintenance.compress import compress
from kvcache.maintenance.verify import verify
from kvcache.publish.start import Position, position_file
from kvcache.replay import replay
from kvcache.report.imported import ImportedCurve, UnreadableInput, WhatIf, understood
from kvcache.tap.lines import LineListener
from kvcache.workload.traces import TraceError, read_trace
from sinks.base import SinkError
from sinks.file import HEADER, Frames, JSONLines
from sinks.router.numbers import FeedNumbers
from tests.oracles.log_files import read_snapshot
from tests.support.logs.damaging import log_with_snapshots
from tests.support.logs.sample_events import EVENTS
from tests.support.places import ROOT

SECONDS = 20.0
"""Of CPU time for one input, which takes milliseconds: what is lied about is not waited for, nor made room for."""
INTERESTING = (0x00, 0x01, 0x7F, 0x80, 0xC1, 0xDC, 0xDD, 0xDE, 0xDF, 0xC4, 0xC6, 0xD9, 0xDB, 0xCF, 0xFE, 0xFF)
"""The ends of ranges, and msgpack's headers of what is long."""


class Reader(NamedTuple):
    """Reads bytes in one of our forms."""

    read: Callable[[bytes, Path], Any]
    samples: Callable[[Path], Sequence[bytes]]
    refuses: tuple[type[Exception], ...]
    quick: int = 300
    """How many inputs the quick run has; the long one has a hundred times as many."""


def changed(chance: random.Random, samples: Sequence[bytes]) -> bytes:
    """One of the samples, changed in one to four places."""
    data = bytearray(chance.choice(samples))
    for _ in range(chance.randint(1, 4)):
        begin = chance.randrange(len(data) + 1)
        end = min(len(data), begin + chance.choice((0, 1, 1, 2, 4, 8, 64)))
        match chance.randrange(7):
            case 0:
                data[begin:end] = bytes(chance.choice(INTERESTING) for _ in range(end - begin))
            case 1:
                data[begin:end] = chance.randbytes(end - begin)
            case 2:
                del data[begin:end]
            case 3:
                data[begin:begin] = data[begin:end] * chance.choice((1, 2, 50))
            case 4:
                del data[begin:]
            case 5:
                other = chance.choice(samples)
                data[begin:] = other[chance.randrange(len(other) + 1) :]
            case _:
                data[begin:end] = chance.choice(INTERESTING).to_bytes(1, "big") + chance.randbytes(4)
    return bytes(data)


# -- what reads


def reported(data: bytes, _: Path) -> None:
    """What an engine publishes; two indexes then take whatever it says."""
    batch = vllm.decode_batch(data)
    index = PrefixIndex()
    for worker in ("a", "b"):
        index.apply(worker, batch)
    index.check()
    Index().apply(batch)


def line(data: bytes, path: Path) -> None:
    """A file of TensorRT-LLM's dicts."""
    trtllm.decode_line(data)
    path.write_bytes(data)
    listener = LineListener(f"file://{path}?block_size=4")
    listener.poll(0)
    listener.close()


def frames(data: bytes, _: Path) -> None:
    """What sockets receive, cut anywhere."""
    parts = data.split(b"|")
    with suppress(EventDecodeError):
        vllm.parse_message(parts)
    vllm.parse_answer(parts)


def log(data: bytes, path: Path, *, name: str) -> None:
    """A log with one file like this: to be read, verified and gone on with."""
    file = path.parent / "log" / name
    before = file.read_bytes()
    file.write_bytes(data)
    try:
        verify(file.parent)
        with suppress(LogError):
            replay(file.parent)
        for _ in LogReader(file.parent):
            pass
    finally:
        file.write_bytes(before)


def recovered(data: bytes, path: Path) -> None:
    """A log that consists of this; who refuses it has not changed it."""
    directory = path.parent / "short"
    directory.mkdir(exist_ok=True)
    segment = directory / f"{0:020}.kvlog"
    segment.write_bytes(data)
    try:
        LogWriter(directory, resume=True).close()
    except LogError:
        assert segment.read_bytes() == data
        raise
    finally:
        for file in sorted(directory.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()


def snapshot(data: bytes, path: Path) -> None:
    path.write_bytes(data)
    read_snapshot(path)


def in_file(reader: Callable[[Path], Any], data: bytes, path: Path) -> None:
    """For readers of files."""
    path.write_bytes(data)
    reader(path)


def frame_files(data: bytes, path: Path) -> None:
    """A file of a sink that is to go on."""
    for encoding in (Frames(tokens=True), JSONLines(32, tokens=True)):
        encoding.last_seq(io.BytesIO(data))
        if data:
            encoding.end(path, io.BytesIO(data))


def numbers(path: Path) -> None:
    opened = FeedNumbers(path)
    opened.open()
    opened.close()


def position(data: bytes, path: Path) -> None:
    file = position_file(path.parent, "x:a")
    file.path.write_bytes(data)
    try:
        file.open()
    finally:
        file.close()


# -- what is valid


def golden(_: Path) -> list[bytes]:
    return [bytes.fromhex(event["msgpack"]) for event in EVENTS.values()]


def recorded(_: Path) -> list[bytes]:
    files = [ROOT / "tests" / "data" / f"told_{engine}.json" for engine in ("vllm", "sglang")]
    return [bytes.fromhex(frames[2]) for file in files for frames in json.loads(file.read_text())["live"]]


def dicts(_: Path) -> list[bytes]:
    stored = {
        "type": "stored",
        "parent_hash": None,
        "blocks": [
            {
                "type": "stored_block",
                "block_hash": 2**63,
                "tokens": [
                    {"type": "unique_token", "token_id": 1, "token_extra_id": 0},
                    {"type": "unique_token", "token_id": 70_000, "token_extra_id": 0},
                ],
                "lora_id": None,
                "cache_level": 0,
                "priority": 35,
            }
        ],
    }
    datas: list[dict[str, Any]] = [
        {"type": "created", "num_blocks_per_cache_level": [10, 4]},
        stored,
        {"type": "removed", "block_hashes": [2**63]},
        {
            "type": "updated",
            "block_hash": 2**63,
            "cache_level": {"type": "event_diff", "new_value": 1, "old_value": 0},
        },
    ]
    return [
        json.dumps({"event_id": at, "data": data, "window_size": 512}).encode() + b"\n"
        for at, data in enumerate(datas)
    ]


def whole_log(path: Path) -> Path:
    directory = path.parent / "log"
    return directory if directory.exists() else log_with_snapshots(5, directory)


def compressed(directory: Path) -> Path:
    """A segment of a log whose segments are compressed."""
    compress(directory)
    return segment_paths(directory)[3]


def convert(data: bytes, path: Path) -> None:
    """Convert a log of which an earlier version has compressed a segment to this."""
    directory = path.parent / "outdated"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(ROOT / "tests" / "golden" / "log_1z", directory)
    sorted(directory.glob("*.kvlogz"))[3].write_bytes(data)
    if compress(directory).left:
        raise LogOutdated(directory)
    list(LogReader(directory))


def index_file(path: Path) -> list[bytes]:
    index = PrefixIndex()
    for payload in recorded(path)[:20]:
        index.apply(("w", 1), vllm.decode_batch(payload))
    index.save(path)
    return [path.read_bytes()]


def numbers_file(path: Path) -> list[bytes]:
    opened = FeedNumbers(path)
    opened.open()
    opened.take()
    opened.close()
    return [path.read_bytes()]


def saved_position(path: Path) -> list[bytes]:
    file = position_file(path.parent, "x:a")
    file.open()
    file.save(Position("ab" * 16, 3, 99))
    file.close()
    return [file.path.read_bytes()]


def key_file(path: Path) -> list[bytes]:
    from zmq.auth import create_certificates

    _, secret = create_certificates(path.parent, "key")
    return [Path(secret).read_bytes()]


READERS: dict[str, Reader] = {
    "events": Reader(lambda data, _: codec.decode_batch(data), golden, (EventDecodeError,)),
    "what engines publish": Reader(reported, recorded, (EventDecodeError,)),
    "TensorRT-LLM's lines": Reader(line, dicts, (EventDecodeError,)),
    "frames": Reader(
        frames,
        lambda _: [b"topic|\0\0\0\0\0\0\0\1|\x93", b"|t|\0\0\0\0\0\0\0\1|\x93", b"||\xff"],
        (EventDecodeError,),
    ),
    "tags of records": Reader(
        lambda data, _: parse_record(data, b"x"),
        lambda _: [b"17", b"17/2/0", b"17/2/5/last"],
        (EventDecodeError,),
    ),
    "a segment": Reader(
        lambda data, path: log(data, path, name=segment_paths(path.parent / "log")[3].name),
        lambda path: [segment_paths(whole_log(path))[3].read_bytes()],
        (LogError,),
        quick=10,
    ),
    "a compressed segment": Reader(
        lambda data, path: log(data, path, name=compressed(path.parent / "log").name),
        lambda path: [compressed(whole_log(path)).read_bytes()],
        (LogError,),
        quick=10,
    ),
    "a segment that an earlier version has compressed": Reader(
        convert,
        lambda _: [sorted((ROOT / "tests" / "golden" / "log_1z").glob("*.kvlogz"))[3].read_bytes()],
        (LogError,),
        quick=10,
    ),
    "a snapshot in a log": Reader(
        lambda data, path: log(data, path, name=snapshot_paths(path.parent / "log")[1].name),
        lambda path: [snapshot_paths(whole_log(path))[1].read_bytes()],
        (),  # it is passed over
        quick=10,
    ),
    "a segment to go on with": Reader(
        recovered, lambda path: [segment_paths(whole_log(path))[0].read_bytes()], (LogError,), quick=150
    ),
    "a snapshot": Reader(
        snapshot, lambda path: [each.read_bytes() for each in snapshot_paths(whole_log(path))], (LogError,)
    ),
    "an index": Reader(partial(in_file, PrefixIndex.load), index_file, (SnapshotError,)),
    "files of sinks": Reader(
        frame_files,
        lambda path: (
            [HEADER + len(each).to_bytes(4, "big") + each for each in golden(path)]
            + [b'{"seq":1,"events":[]}\n{"seq":2,"events":[]}\n']
        ),
        (SinkError,),
    ),
    "numbers of feeds": Reader(partial(in_file, numbers), numbers_file, (SinkError,), quick=100),
    "positions of sinks": Reader(position, saved_position, (SinkError,), quick=100),
    "keys": Reader(partial(in_file, read_pair), key_file, (KeyFileError,), quick=100),
    "traces": Reader(
        partial(in_file, lambda path: list(read_trace(path))),
        lambda _: [(ROOT / "tests" / "data" / "chats_small.jsonl").read_bytes()[:600]],
        (TraceError,),
    ),
    "tokens": Reader(
        partial(in_file, lambda path: read_tokens(str(path))),
        lambda _: [b"[1, 2, 30]", b"1 2 3\n4"],
        (UsageError,),
    ),
    "settings": Reader(
        lambda data, path: in_file(KVCacheConfig.load, data, path.with_suffix(".toml")),
        lambda _: [b"max_sequence_length = 64\nprimary_blocks = 8\n[log]\nfsync = 'never'\n"],
        (ConfigError,),
    ),
    "settings in YAML": Reader(
        lambda data, path: in_file(KVCacheConfig.load, data, path.with_suffix(".yaml")),
        lambda _: [b"max_sequence_length: 64\nprimary_blocks: 8\nlog: {fsync: never}\n"],
        (ConfigError,),
    ),
    "curves": Reader(
        lambda data, path: understood(data, ImportedCurve, str(path)),
        lambda _: [b"{}", b"[]"],
        (UnreadableInput,),
    ),
    "what-ifs": Reader(
        lambda data, path: understood(data, WhatIf, str(path)), lambda _: [b"{}"], (UnreadableInput,)
    ),
}


def tried(name: str, path: Path, inputs: Iterator[bytes]) -> dict[str, int]:
    """How often what was read, and how often it was refused; anything else is raised."""
    reader, counts = READERS[name], {"read": 0, "refused": 0}
    for data in inputs:
        begun = time.thread_time()
        try:
            reader.read(data, path)
        except reader.refuses:
            counts["refused"] += 1
        except Exception as error:
            error.add_note(f"{name}: {data.hex()}")
            raise
        else:
            counts["read"] += 1
        assert time.thread_time() - begun < SECONDS, data.hex()
    return counts


def inputs(name: str, path: Path, seed: int, count: int) -> Iterator[bytes]:
    chance, samples = random.Random(f"{name} {seed}"), READERS[name].samples(path)
    yield from samples[:50]
    for _ in range(count):
        yield changed(chance, samples)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.filterwarnings("ignore")
def test_anything_may_stand_there(name: str, tmp_path: Path) -> None:
    """It is read, or refused with the documented error, at once."""
    counts = tried(name, tmp_path / "file", inputs(name, tmp_path / "file", 1, READERS[name].quick))
    assert counts["refused"] >= 3 or not READERS[name].refuses, counts


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", READERS)
@pytest.mark.filterwarnings("ignore")
def test_anything_may_stand_there_for_long(name: str, tmp_path: Path) -> None:
    """The same with other seeds, a hundred times as often."""
    tried(name, tmp_path / "file", inputs(name, tmp_path / "file", 2, 100 * READERS[name].quick))
