"""Reading logs: whole, cut, damaged, foreign, newer, and while they are being written."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from events import (
    AllocateReason,
    AnyEvent,
    BlocksAllocated,
    BlocksDetached,
    BlocksFilled,
    BlocksStored,
    CacheCreated,
    EventBatch,
    LogDamaged,
    LogTooNew,
    Namespace,
    NotALog,
    SequenceRemoved,
    StateExported,
    TransferLanded,
)
from events.codec import encode_batch
from events.ids import BlockIndex, GroupIndex, Handle, LevelIndex
from events.log import LogReader, LogWriter
from events.log.frames import Chain
from events.log.segments import Broken, Segment
from events.types import GroupExported, SequenceExported
from tests.oracles.packer import frame, segment_header
from tests.support.logs.logs import (
    LOG_ID,
    TIME,
    batch,
    batches,
    frame_offsets,
    read_log,
    segments,
    write_log,
    write_synced,
)
from tests.support.seeds import seeds
from tests.support.waiting import WAIT

NAME = f"{0:020d}.kvlog"


@pytest.fixture(scope="module")
def closed_log(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A segment of three batches and an orderly end."""
    directory = write_synced(tmp_path_factory.mktemp("log"), batches(3))
    return segments(directory)[0].read_bytes()


@pytest.fixture(scope="module")
def open_log(closed_log: bytes) -> bytes:
    """A segment of three batches, without an end."""
    return closed_log[: frame_offsets(closed_log)[-2]]


def put(directory: Path, data: bytes, name: str = NAME) -> Path:
    """A log directory with this one segment."""
    directory.mkdir(exist_ok=True)
    (directory / name).write_bytes(data)
    return directory


def two_segments(directory: Path) -> list[Path]:
    """A log of four batches in two segments."""
    write_log(directory, batches(4), segment_bytes=600)
    assert len(segments(directory)) == 2
    return segments(directory)


def test_batches_come_back_in_order(tmp_path: Path) -> None:
    """What was appended is what is read, and every iteration starts anew."""
    reader = LogReader(write_log(tmp_path, batches(50)))
    assert list(reader) == batches(50)
    assert list(reader) == batches(50)
    assert (reader.end.kind, reader.end.last_seq, reader.end.next_seq) == ("clean", 49, 50)


def test_end_is_not_known_before_the_end(tmp_path: Path) -> None:
    """Asking how the log ends while still reading it is an error, not a guess."""
    reader = LogReader(write_log(tmp_path, batches(2)))
    next(iter(reader))
    with pytest.raises(RuntimeError, match="not been read"):
        _ = reader.end


@pytest.mark.parametrize("part", seeds(range(5), quick=1))
def test_cut_anywhere_gives_whole_frames_and_says_torn(tmp_path: Path, closed_log: bytes, part: int) -> None:
    """At every length that a file can be cut to, exactly the whole frames before the cut are read."""
    offsets = frame_offsets(closed_log)
    for size in range(part, len(closed_log), 5):
        content, end = read_log(put(tmp_path, closed_log[:size]))
        whole = sum(offset <= size for offset in offsets[1:])
        assert content == batches(whole)
        assert end.kind == ("open" if size in offsets else "torn")
        assert end.offset == (offsets[whole] if size >= 64 else 0)
        assert end.last_seq == (whole - 1 if whole else None)


def test_garbage_in_the_place_of_the_last_frame_is_torn(tmp_path: Path, open_log: bytes) -> None:
    """Zeros or noise where an interrupted write was going to be do not hide the batches before."""
    for tail in (bytes(200), b"\xa5" * 200, b"\xc1KVF" * 50):
        content, end = read_log(put(tmp_path, open_log + tail))
        assert content == batches(3)
        assert (end.kind, end.offset) == ("torn", len(open_log))


@pytest.mark.parametrize("part", seeds(range(5), quick=1))
@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
@pytest.mark.parametrize("kind", ["open", "closed"])
def test_every_changed_byte_is_noticed(
    tmp_path: Path, open_log: bytes, closed_log: bytes, kind: str, flip: int, part: int
) -> None:
    """A changed byte is damage at its frame's offset; in the last frame, a torn tail; never another event."""
    data = {"open": open_log, "closed": closed_log}[kind]
    offsets = frame_offsets(data)
    for position in range(part, len(data), 5):
        changed = bytearray(data)
        changed[position] ^= flip
        directory = put(tmp_path, bytes(changed))
        if position >= offsets[-2]:
            content, end = read_log(directory)
            assert content == batches(len(offsets) - 2)
            assert (end.kind, end.offset) == ("torn", offsets[-2])
            continue
        seen: list[EventBatch] = []
        with pytest.raises(LogDamaged) as raised:
            seen.extend(LogReader(directory))
        index = sum(offset <= position for offset in offsets)
        assert raised.value.path == directory / NAME
        assert raised.value.offset == (offsets[index - 1] if index else 0)
        assert raised.value.seq == (index - 1 if index else None)


def test_batches_before_damage_are_shown(tmp_path: Path, closed_log: bytes) -> None:
    """The reader yields what is intact before it raises."""
    changed = bytearray(closed_log)
    changed[frame_offsets(closed_log)[2] + 50] ^= 1
    content = iter(LogReader(put(tmp_path, bytes(changed))))
    assert [next(content), next(content)] == batches(2)
    with pytest.raises(LogDamaged):
        next(content)


@pytest.mark.parametrize("part", seeds(range(5), quick=1))
def test_every_change_in_an_earlier_segment_is_damage(tmp_path: Path, part: int) -> None:
    """A segment with a successor was finished, so a cut or a changed byte anywhere in it is damage."""
    first, _ = two_segments(tmp_path)
    data = first.read_bytes()
    for position in range(part, len(data), 5):
        for changed in (
            data[:position],
            data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :],
        ):
            first.write_bytes(changed)
            with pytest.raises(LogDamaged):
                list(LogReader(tmp_path))
    first.write_bytes(data)
    assert read_log(tmp_path)[0] == batches(4)


def test_missing_exchanged_and_foreign_segments_are_damage(tmp_path: Path) -> None:
    """Segments are chained: one that is gone, moved, repeated or from another log is found out."""
    directory = write_log(tmp_path / "log", batches(12), segment_bytes=600)
    other = write_log(tmp_path / "other", batches(12), segment_bytes=600, log_id=bytes(16))
    names = [path.name for path in segments(directory)]
    assert len(names) > 3

    def broken(name: str, change: Callable[[Path], object]) -> LogDamaged:
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(directory, copy)
        change(copy)
        with pytest.raises(LogDamaged) as raised:
            list(LogReader(copy))
        assert raised.value.path.name == name
        return raised.value

    assert "segment 0 is missing" in str(broken(names[1], lambda copy: (copy / names[0]).unlink()))
    assert "segment 1 is missing" in str(broken(names[2], lambda copy: (copy / names[1]).unlink()))
    assert "name" in str(broken(names[2], lambda copy: shutil.copy(copy / names[1], copy / names[2])))
    assert "another log" in str(broken(names[1], lambda copy: shutil.copy(other / names[1], copy)))


def test_frames_from_elsewhere_do_not_pass(tmp_path: Path) -> None:
    """A frame with right checksums is refused after another log's, another epoch's, or its own kind."""
    payloads = [encode_batch(batch(seq)) for seq in range(2)]
    start = segment_header(LOG_ID, 0, 0, 0) + frame(LOG_ID, 0, 0, payloads[0], 3)

    def end_of(second: bytes) -> str:
        return read_log(put(tmp_path, start + second))[1].kind

    crc = crc32(payloads[0])
    assert end_of(frame(LOG_ID, 0, 1, payloads[1], 3, crc)) == "open"
    assert end_of(frame(bytes(16), 0, 1, payloads[1], 3, crc)) == "torn"
    assert end_of(frame(LOG_ID, 1, 1, payloads[1], 3, crc)) == "torn"
    for bad, reason in (
        (frame(LOG_ID, 0, 1, payloads[1], 3, crc + 1), "does not continue"),
        (frame(LOG_ID, 0, 2, payloads[1], 3, crc), "is of batch 2"),
        (frame(LOG_ID, 0, 0, payloads[0], 3, crc, flags=2), "is of batch 0"),
        (frame(LOG_ID, 0, 1, payloads[0], 3, crc), "disagree"),
        (frame(LOG_ID, 0, 1, payloads[1], 4, crc), "disagree"),
        (frame(LOG_ID, 0, 1, b"\x93no batch", 1, crc), "not an event batch"),
        (frame(LOG_ID, 0, 1, b"", 0, crc, 1) + frame(LOG_ID, 0, 1, payloads[1], 3), "follows the end"),
    ):
        with pytest.raises(LogDamaged, match=reason):
            end_of(bad)


def test_more_epochs_than_have_numbers_are_damage(tmp_path: Path) -> None:
    """An epoch beyond the last one whose handles fit is none that a writer began."""
    assert read_log(put(tmp_path / "last", segment_header(LOG_ID, 2**23 - 2, 0, 0)))[1].kind == "open"
    for epoch in (2**23 - 1, 2**64 - 1):
        with pytest.raises(LogDamaged, match="epoch number is out of range"):
            read_log(put(tmp_path / str(epoch), segment_header(LOG_ID, epoch, 0, 0)))


def test_newer_formats_are_refused_as_such(tmp_path: Path) -> None:
    """A newer segment version, event format or CacheCreated says "upgrade", not "damaged"."""
    for header, version in (
        (segment_header(LOG_ID, 0, 0, 0, version=3), 3),
        (segment_header(LOG_ID, 0, 0, 0, event_format=9), 9),
    ):
        with pytest.raises(LogTooNew) as raised:
            read_log(put(tmp_path, header))
        assert (raised.value.path, raised.value.version) == (tmp_path / NAME, version)
    created = EventBatch(0, TIME, (CacheCreated("{}", 4, (), "none", 0, "", format_version=7),))
    put(tmp_path, segment_header(LOG_ID, 0, 0, 0) + frame(LOG_ID, 0, 0, encode_batch(created), 1))
    with pytest.raises(LogTooNew, match="version 7"):
        read_log(tmp_path)


def test_directories_without_a_log_are_refused(tmp_path: Path) -> None:
    """A missing, empty or other directory is NotALog; one where a writer has recorded nothing yet is an empty log."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").touch()
    (tmp_path / "empty").mkdir()
    for name in ("missing", "photos", "empty"):
        with pytest.raises(NotALog) as raised:
            read_log(tmp_path / name)
        assert raised.value.path == tmp_path / name
    content, end = read_log(write_log(tmp_path / "new", []))
    assert (content, end.kind, end.last_seq, end.next_seq) == ([], "open", None, 0)


def test_links_are_not_followed(tmp_path: Path, closed_log: bytes) -> None:
    """A symbolic link in the place of a segment is not opened."""
    put(tmp_path, closed_log, "elsewhere")
    (tmp_path / NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        read_log(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "directory"])
def test_what_is_no_file_is_damage(tmp_path: Path, kind: str) -> None:
    """Something else by the name of a segment is named as such, at once, by readers and by writers."""
    if kind == "pipe":
        os.mkfifo(tmp_path / NAME)
    else:
        (tmp_path / NAME).mkdir()
    for use in (read_log, lambda path: LogWriter(path, resume=True)):
        with pytest.raises(LogDamaged, match="not a regular file") as raised:
            use(tmp_path)
        assert raised.value.path == tmp_path / NAME


def test_lock_that_is_no_file_is_refused(tmp_path: Path) -> None:
    """A pipe in the place of the lock belongs to no log."""
    os.mkfifo(tmp_path / "LOCK")
    with pytest.raises(NotALog):
        LogWriter(tmp_path)


CREATED = CacheCreated("{}", 4, (), "v2_sha256_64", 32, "")
EXPORTED = SequenceExported(Handle(1), 1, Namespace(), 1, b"", 1, 1, (), (), b"")
GROUP = GroupExported((), b"", b"", b"", b"", (b"", b""), b"")


@pytest.mark.parametrize(
    ("event", "column"),
    [
        (BlocksAllocated(bytes(3), b"", GroupIndex(0), b"", AllocateReason.PROMPT), "handles"),
        (BlocksAllocated(b"", b"", GroupIndex(0), bytes(6), AllocateReason.PROMPT), "slots"),
        (
            BlocksStored(Handle(1), GroupIndex(0), BlockIndex(0), bytes(9), b"", b"", LevelIndex(0), 35, 4),
            "parent",
        ),
        (BlocksFilled(b"", GroupIndex(0), bytes(5), b"", b"", b"", 35), "blocks"),
        (
            BlocksStored(Handle(1), GroupIndex(0), BlockIndex(0), b"", bytes(40), b"", LevelIndex(0), 35, 4),
            "keys",
        ),
        (TransferLanded(bytes(12)), "transfers"),
        (SequenceRemoved(Handle(1), (0,), (bytes(4), bytes(5)), 1, 1), "freed"),
        (StateExported((), (replace(EXPORTED, tokens=bytes(5)),), (), 1, 1, 0, 0), "sequences"),
        (StateExported((), (replace(EXPORTED, slots=(bytes(5),)),), (), 1, 1, 0, 0), "sequences"),
        (StateExported((), (replace(EXPORTED, keys=bytes(40)),), (), 1, 1, 0, 0), "sequences"),
        (StateExported((replace(GROUP, blank_slots=(b"", bytes(7))),), (), (), 1, 1, 0, 0), "groups"),
        (StateExported((replace(GROUP, runs=bytes(7)),), (), (), 1, 1, 0, 0), "groups"),
        (StateExported((replace(GROUP, blocks=bytes(12)),), (), (), 1, 1, 0, 0), "groups"),
        (BlocksDetached(bytes(8), bytes(3), GroupIndex(0), b"", b""), "counts"),
        (BlocksDetached(bytes(8), bytes(4), GroupIndex(0), bytes(7), b""), "slots"),
        (BlocksDetached(bytes(8), b"", GroupIndex(0), bytes(4), bytes(2)), "freed"),
    ],
)
def test_half_entries_are_damage(tmp_path: Path, event: AnyEvent, column: str) -> None:
    """A column that ends inside an entry is found by the reader, also inside of tuples, and named."""
    whole = [EventBatch(0, TIME, (CREATED,)), EventBatch(1, TIME, (event,))]
    reader = LogReader(write_log(tmp_path, whole))
    with pytest.raises(LogDamaged, match=f"column {column} of {type(event).__name__}") as raised:
        list(reader)
    assert raised.value.seq == 1


def test_keys_have_the_size_that_the_cache_chose(tmp_path: Path) -> None:
    """Whole keys pass, none pass where blocks have no names, and sizes that no key has are refused."""
    stored = BlocksStored(
        Handle(1), GroupIndex(0), BlockIndex(0), bytes(8), bytes(64), bytes(8), LevelIndex(0), 35, 4
    )
    for key_bytes, fits in (
        (32, True),
        (64, True),
        (8, True),
        (0, False),
        (3, False),
        (-8, False),
        (2**40, False),
    ):
        created = replace(CREATED, key_bytes=key_bytes)
        directory = write_log(tmp_path / str(key_bytes), [EventBatch(0, TIME, (created, stored))])
        if fits:
            assert len(read_log(directory)[0]) == 1
        else:
            with pytest.raises(LogDamaged, match="keys"):
                read_log(directory)


@given(data=st.data())
def test_any_change_gives_a_beginning_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, closed_log: bytes, data: st.DataObject
) -> None:
    """Whatever is replaced, inserted or cut in a log, only the batches before the change are ever read."""
    start = data.draw(st.integers(0, len(closed_log)))
    stop = data.draw(st.integers(start, len(closed_log)))
    copied = data.draw(st.integers(0, len(closed_log)))
    inserted = data.draw(st.binary(max_size=40) | st.just(closed_log[copied : copied + 300]))
    directory = put(
        tmp_path_factory.getbasetemp() / "changed", closed_log[:start] + inserted + closed_log[stop:]
    )
    seen: list[EventBatch] = []
    with contextlib.suppress(LogDamaged, LogTooNew):
        seen.extend(LogReader(directory))
    assert seen == batches(len(seen))


@given(st.binary(max_size=300), st.booleans())
def test_any_file_is_a_log_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, with_header: bool
) -> None:
    """Random bytes, alone or behind a right header, hold no batch and raise nothing unexpected."""
    header = segment_header(LOG_ID, 0, 0, 0) if with_header else b""
    try:
        content, _ = read_log(put(tmp_path_factory.getbasetemp() / "random", header + data))
    except LogDamaged:
        content = []
    assert content == []


class Follower:
    """A reader that follows a log on its own thread."""

    def __init__(self, directory: Path) -> None:
        self.seen: queue.Queue[EventBatch] = queue.Queue()
        self.stopped = threading.Event()
        self.reader = LogReader(directory, follow=True, stop=self.stopped.is_set)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            for item in self.reader:
                self.seen.put(item)
        except BaseException as error:
            self.error = error

    def take(self, count: int) -> list[EventBatch]:
        return [self.seen.get(timeout=WAIT) for _ in range(count)]

    def stop(self) -> None:
        self.stopped.set()
        self.thread.join()


class TestFollowing:
    """Reading a log that is being written."""

    def test_follows_from_before_the_first_batch_over_segments_and_epochs(self, tmp_path: Path) -> None:
        """A follower sees each batch when it is there, through rotation, close and resume, until stopped."""
        with LogWriter(tmp_path, segment_bytes=600) as log:
            follower = Follower(tmp_path)
            for item in batches(10):
                log.append(item)
            assert follower.take(10) == batches(10)
            log.append(batch(10))
            assert follower.take(1) == [batch(10)]
        with LogWriter(tmp_path, resume=True) as log:
            log.append(batch(11))
            assert follower.take(1) == [batch(11)]
        follower.stop()
        assert follower.error is None
        assert follower.reader.end.last_seq == 11

    def test_half_a_frame_is_waited_for(self, tmp_path: Path, open_log: bytes) -> None:
        """A frame that is being written is neither an end nor an error, byte by byte, and is then read."""
        last = frame_offsets(open_log)[-2]
        put(tmp_path, open_log[:last])
        follower = Follower(tmp_path)
        assert follower.take(2) == batches(2)
        with (tmp_path / NAME).open("ab", buffering=0) as file:
            for position in range(last, len(open_log)):
                file.write(open_log[position : position + 1])
        assert follower.take(1) == [batch(2)]
        follower.stop()
        assert follower.error is None

    def test_segment_put_aside_by_recovery_is_left_for_its_successor(self, tmp_path: Path) -> None:
        """Where a segment without a whole frame is replaced by one of the same name, the follower goes there."""
        put(tmp_path, segment_header(LOG_ID, 0, 0, 0) + b"\xc1KVF half a frame")
        follower = Follower(tmp_path)
        with LogWriter(tmp_path, resume=True) as log:
            log.append(batch(0))
            assert follower.take(1) == [batch(0)]
        follower.stop()
        assert follower.error is None

    def test_tail_cut_by_recovery_is_forgotten(self, tmp_path: Path, open_log: bytes) -> None:
        """A follower that has seen a torn tail goes on behind the cut, not by what it remembers."""
        follower = Follower(put(tmp_path, open_log + bytes(200)))
        assert follower.take(3) == batches(3)
        with LogWriter(tmp_path, resume=True) as log:
            log.append(batch(3))
            assert follower.take(1) == [batch(3)]
        follower.stop()
        assert follower.error is None

    def test_damage_is_raised(self, tmp_path: Path, closed_log: bytes) -> None:
        """A follower does not wait for damage to heal."""
        changed = bytearray(closed_log)
        changed[100] ^= 1
        follower = Follower(put(tmp_path, bytes(changed)))
        follower.thread.join()
        assert isinstance(follower.error, LogDamaged)

    def test_frames_completed_between_two_looks_are_no_damage(
        self, tmp_path: Path, closed_log: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A frame found half, with a whole one behind it a moment later, is looked at again, not called damaged."""
        cut = frame_offsets(closed_log)[1] + 50
        put(tmp_path, closed_log[:cut])
        look = Segment.is_damaged

        def write_then_look(segment: Segment, found: Broken, chain: Chain, *, is_last: bool) -> bool:
            put(tmp_path, closed_log)
            return look(segment, found, chain, is_last=is_last)

        monkeypatch.setattr(Segment, "is_damaged", write_then_look)
        assert read_log(tmp_path)[0] == batches(3)

    def test_reader_of_a_live_log_never_sees_damage(self, tmp_path: Path) -> None:
        """However often a log is read while it is written, each reading is a beginning of it."""
        count = 3000
        with LogWriter(tmp_path, segment_bytes=20_000, fsync="never") as log:
            writing = threading.Thread(target=lambda: [log.append(item) for item in batches(count)])
            writing.start()
            seen = 0
            while seen < count:
                content, end = read_log(tmp_path)
                assert [item.seq for item in content] == list(range(len(content)))
                assert len(content) >= seen
                assert end.kind != "clean"
                seen = len(content)
                if not writing.is_alive():
                    log.flush()
            writing.join()


def test_a_name_that_no_system_has_is_no_log(tmp_path: Path) -> None:
    """A name that is too long, a link to itself, and a NUL are told as any other place without a log."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path / ("x" * 300), tmp_path / "loop", tmp_path / "a\0b"):
        with pytest.raises(NotALog):
            list(LogReader(path))
