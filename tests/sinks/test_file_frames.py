"""Files of msgpack frames: read by the documented rules alone, cut where a writer was killed, never mixed up."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from events.codec import decode_batch, encode_batch
from events.log import LogReader
from kvcache import KVCacheManager
from kvcache.publish.publisher import Publisher
from sinks import SinkContext, SinkOpenError, SinkURLError, open_sink
from sinks.file import FileSink
from tests.support.engines import strategies
from tests.support.feeds.feed_source import Source
from tests.support.feeds.strict import Engine


def frames(data: bytes) -> list[Any]:
    """As docs/reference/events.md says: 8 bytes, then each time 4 bytes of length and so many of msgpack."""
    assert data[:8] == b"kvevent\x01"
    found, at = [], 8
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        assert at + 4 + length <= len(data), "a frame that is not whole"
        found.append(msgspec.msgpack.decode(data[at + 4 : at + 4 + length]))
        at += 4 + length
    return found


def run(directory: Path, url: str, seed: int = 0) -> None:
    """A random run with a log and a sink."""
    settings = strategies.config(secondary_blocks=4)
    with KVCacheManager(settings, log=directory / "log", sinks=[url]) as manager:
        engine = Engine(manager, random.Random(seed))
        for _ in range(80):
            engine.step()
            manager.flush()


def sink(path: Path, options: str = "tokens=1") -> FileSink:
    made = open_sink(f"file:{path}?format=msgpack&{options}", SinkContext(8, 4))
    assert isinstance(made, FileSink)
    return made


def fill(path: Path, batches: int, options: str = "tokens=1") -> list[bytes]:
    """A file of so many batches."""
    source, given = Source(), []
    writer = sink(path, options)
    writer.open()
    for number in range(batches):
        batch = source.store(number, 2)
        given.append(encode_batch(batch))
        writer.write(batch)
    writer.close()
    return given


def test_frames_are_the_batches_of_the_log(tmp_path: Path) -> None:
    """All of them, with tokens where they were asked for."""
    run(tmp_path, f"file:{tmp_path}/e.msgpack?format=msgpack&tokens=1")
    read = frames((tmp_path / "e.msgpack").read_bytes())
    assert read == [msgspec.msgpack.decode(encode_batch(batch)) for batch in LogReader(tmp_path / "log")]
    assert len(read) > 30


def test_prompts_are_left_out(tmp_path: Path) -> None:
    """Unless `tokens=1` asks for them, no event has any."""
    run(tmp_path, f"file:{tmp_path}/e.msgpack?format=msgpack")
    batches = [
        decode_batch(msgspec.msgpack.encode(each)) for each in frames((tmp_path / "e.msgpack").read_bytes())
    ]
    tokens = [getattr(event, "tokens", b"") for batch in batches for event in batch.events]
    assert any(type(event).__name__ == "SequenceAdded" for batch in batches for event in batch.events)
    assert set(tokens) == {b""}


def test_torn_frames_are_cut_off(tmp_path: Path) -> None:
    """Wherever a writer was killed, the next one goes on behind the last whole frame."""
    path = tmp_path / "e"
    given = fill(path, 3)
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        writer = sink(path, "append=1&tokens=1")
        writer.open()
        kept = (
            [msgspec.msgpack.encode(each) for each in frames(path.read_bytes())]
            if path.stat().st_size
            else []
        )
        assert kept == given[: len(kept)]
        assert len(kept) == sum(len(b"".join(given[: n + 1])) + 4 * (n + 1) + 8 <= cut for n in range(3))
        writer.write(decode_batch(given[0]))
        writer.close()
        assert len(frames(path.read_bytes())) == len(kept) + 1


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    """One that holds something else is refused, not cut."""
    path = tmp_path / "e"
    path.write_bytes(b'{"seq": 0}\n')
    writer = sink(path, "append=1")
    with pytest.raises(Exception, match="does not consist of msgpack frames"):
        writer.open()
    assert path.read_bytes() == b'{"seq": 0}\n'
    with pytest.raises(SinkOpenError, match="does not consist of"):
        KVCacheManager(strategies.config(), sinks=[f"file:{path}?format=msgpack&append=1"])


def test_each_rotated_file_is_whole(tmp_path: Path) -> None:
    """All begin alike, and together they have everything."""
    given = fill(tmp_path / "e", 60, "tokens=1&max_bytes=1KiB&keep=100")
    files = [*sorted(tmp_path.glob("e.*"), key=lambda file: -int(file.suffix[1:])), tmp_path / "e"]
    assert len(files) > 4
    assert [msgspec.msgpack.encode(each) for file in files for each in frames(file.read_bytes())] == given


def test_a_pipe_has_one_beginning(tmp_path: Path) -> None:
    """A reader of a FIFO gets the same bytes."""
    path, got = tmp_path / "fifo", bytearray()
    os.mkfifo(path, 0o600)

    def read() -> None:
        got.extend(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    given = fill(path, 5)
    reader.join()
    assert [msgspec.msgpack.encode(each) for each in frames(bytes(got))] == given


def test_sidecar_goes_on_after_its_last_frame(tmp_path: Path) -> None:
    """Killed before it noted how far it was, it writes nothing twice."""
    run(tmp_path, "stdout:")
    log, path = tmp_path / "log", tmp_path / "e"
    url = f"file:{path}?format=msgpack"
    Publisher(log, [url], until="closed").run()
    read = frames(path.read_bytes())
    (state,) = log.glob("publish-*.json")
    text = state.read_text()
    (before, after) = text.split(f'"seq":{read[-1][0]}')
    state.write_text(f'{before}"seq":3{after}')
    Publisher(log, [url], until="closed").run()
    assert frames(path.read_bytes()) == read


def test_a_format_that_is_not_known_is_refused() -> None:
    """With those that are."""
    with pytest.raises(SinkURLError, match="format must be one of jsonl, msgpack, trtllm"):
        open_sink("file:/x?format=xml", SinkContext(8, 4))
