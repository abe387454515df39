"""`kvcache events`: which events are shown, and how."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from events.codec import to_dict
from events.ids import BlockIndex, GroupIndex, Handle, LevelIndex
from events.log import LogReader, LogWriter
from events.packed import unpack_i32, unpack_i64
from events.structs import SequenceExported, TransferExported
from events.types import (
    AdmissionRefused,
    AllocateReason,
    AnyEvent,
    BlocksAllocated,
    BlocksDetached,
    BlocksFilled,
    BlocksMoved,
    BlocksStored,
    BlocksUpdated,
    CacheCreated,
    EventBatch,
    MoveReason,
    Namespace,
    SequenceAdded,
    SequenceRemoved,
    StateExported,
    TokensAppended,
    TransferFailed,
    TransferLanded,
)
from kvcache.inputs import Request
from kvcache.manager import KVCacheManager
from sinks.render import StreamNames, render_batch
from tests.support.columns import pack_i32, pack_i64, pack_u32
from tests.support.commands import Kvcache, Start, run_log
from tests.support.engines import strategies

REQUEST = 20
NAMES = ("names", "parents", "keys")
"""Fields that name blocks."""


def all_events(log: Path) -> Iterator[tuple[int, int, AnyEvent]]:
    for batch in LogReader(log):
        for index, event in enumerate(batch.events):
            yield batch.seq, index, event


def addresses(done: Any) -> list[tuple[int, int]]:
    assert done.code == 0
    lines = [json.loads(line) for line in done.out.splitlines()]
    return [(line["seq"], line["index"]) for line in lines]


class TestForms:
    """Lines for people and for programs."""

    def test_lines(self, kvcache: Kvcache, log: Path) -> None:
        """People get one line per event, with its time, without colors in a pipe, and without any token id."""
        done = kvcache("events", log)
        known, expected = StreamNames(), []
        batches = list(LogReader(log))
        for batch in batches:
            time = f"+{(batch.ts - batches[0].ts) / 1e9:.3f}s"  # of whole milliseconds
            expected += [line[:11] + f"{time:>9}  " + line[11:] for line in render_batch(batch, known)]
        assert done.out.splitlines() == expected
        assert " for request=" in done.out
        assert "for #" not in done.out

    def test_json(self, kvcache: Kvcache, log: Path) -> None:
        """Programs get one object per event and line, with its address and all of its fields."""
        lines = [json.loads(line) for line in kvcache("events", log, "--json").out.splitlines()]
        expected = [
            {"seq": seq, "index": index, **to_dict(event, 32)} for seq, index, event in all_events(log)
        ]
        for line in lines:
            ts, time = line.pop("ts"), line.pop("time")
            assert isinstance(ts, int)
            assert time.endswith("000Z")
            assert round(datetime.fromisoformat(time[:-4] + "Z").timestamp() * 1000) * 10**6 == ts
        assert lines == expected

    def test_no_tokens(self, kvcache: Kvcache, log: Path) -> None:
        """--no-tokens takes the token ids out of the JSON, and the counts stay."""
        done = kvcache("events", log, "--json", "--no-tokens", "--type", "SequenceAdded")
        for line in map(json.loads, done.out.splitlines()):
            assert line["tokens"] is None
            assert line["num_tokens"] > 0

    def test_items(self, kvcache: Kvcache, images: Path) -> None:
        """Symbols have lines of their own; JSON says what they stand for, without tokens nothing of it."""
        done = kvcache("events", images, "--type", "symbolsinterned", "--type", "SymbolsForgotten")
        assert [line.split(maxsplit=2)[2] for line in done.out.splitlines()[:3]] == [
            "SymbolsInterned   pages=1 items=1 00000000",
            "SymbolsInterned   pages=1 items=1 01010101",
            "SymbolsForgotten  pages=1",
        ]
        reported = [kvcache("events", images, "--json", *option).out for option in ((), ("--no-tokens",))]
        assert ['"digest":"' + "01" * 32 in text for text in reported] == [True, False]
        assert all('"type":"SymbolsInterned"' in text for text in reported)
        assert kvcache("events", images, "--request", 2).code == 0


class TestConditions:
    """Which events."""

    def test_types(self, kvcache: Kvcache, log: Path) -> None:
        """--type may be given several times, in any case of letters."""
        done = kvcache("events", log, "--json", "--type", "SequenceAdded", "--type", "sequenceremoved")
        assert addresses(done) == [
            (seq, index)
            for seq, index, event in all_events(log)
            if isinstance(event, SequenceAdded | SequenceRemoved)
        ]

    def test_unknown_type(self, kvcache: Kvcache, log: Path) -> None:
        """A type that there is not is refused with those that there are."""
        done = kvcache("events", log, "--type", "BlockStored")
        assert done.code == 2
        assert "invalid choice: 'BlockStored'" in done.err
        for name in ("BlocksStored", "TransferLanded", "AdmissionRefused"):
            assert name in done.err

    def test_since(self, kvcache: Kvcache, log: Path) -> None:
        """--since begins at a batch."""
        assert addresses(kvcache("events", log, "--json", "--since", 100)) == [
            (seq, index) for seq, index, _ in all_events(log) if seq >= 100
        ]

    def test_since_beyond_the_end(self, kvcache: Kvcache, log: Path) -> None:
        """A batch that the log does not have is said, since nothing at all is shown."""
        last = max(batch.seq for batch in LogReader(log))
        assert kvcache("events", log, "--since", last).err == ""
        assert kvcache("events", log, "--since", last + 1) == (
            2,
            "",
            f"kvcache: error: batch {last + 1} is after the end of the log, whose last batch is {last}\n",
        )

    def test_request(self, kvcache: Kvcache, log: Path) -> None:
        """--request finds everything that carries the request's handle, and the landing of its copies."""
        [handle] = [
            event.handle
            for _, _, event in all_events(log)
            if isinstance(event, SequenceAdded) and event.request_id == REQUEST
        ]
        found = addresses(kvcache("events", log, "--json", "--request", REQUEST))
        transfers: set[int] = set()
        expected = []
        for seq, index, event in all_events(log):
            fields = to_dict(event, 32)
            ours = fields.get("handle") == handle or handle in fields.get("handles", [])
            if ours and fields.get("transfer"):
                transfers.add(fields["transfer"])
            if ours or transfers & set(fields.get("transfers", [])):
                expected.append((seq, index))
        assert transfers
        assert found == expected

    def test_request_since(self, kvcache: Kvcache, log: Path) -> None:
        """A request is known by its handle although its admission lies before --since."""
        everything = addresses(kvcache("events", log, "--json", "--request", REQUEST))
        since = everything[len(everything) // 2][0]
        late = addresses(kvcache("events", log, "--json", "--request", REQUEST, "--since", since))
        assert late == [address for address in everything if address[0] >= since]

    def test_id_that_comes_again(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """An id used in two epochs belongs to both requests."""
        log = run_log(tmp_path / "log", "--limit", 2)
        run_log(log, "--limit", 2, "--continue")
        done = kvcache("events", log, "--json", "--request", 1, "--type", "SequenceAdded")
        handles = [json.loads(line)["handle"] for line in done.out.splitlines()]
        assert len(handles) == len(set(handles)) == 2

    def test_packed_handles(self, kvcache: Kvcache, log: Path) -> None:
        """Steps of several sequences are found for each of them, and show its own token only."""
        [handle] = [
            event.handle
            for _, _, event in all_events(log)
            if isinstance(event, SequenceAdded) and event.request_id == REQUEST
        ]
        tokens = [
            int(token)
            for _, _, event in all_events(log)
            if isinstance(event, TokensAppended)
            for of, token in zip(unpack_i64(event.handles), unpack_i32(event.tokens), strict=True)
            if of == handle
        ]
        done = kvcache("events", log, "--json", "--request", REQUEST, "--type", "TokensAppended")
        shown = [json.loads(line) for line in done.out.splitlines()]
        assert tokens
        assert [line["tokens"] for line in shown] == [[token] for token in tokens]
        assert {tuple(line["handles"]) for line in shown} == {(handle,)}

    def test_unknown_request(self, kvcache: Kvcache, log: Path) -> None:
        """A request that never came is not found, here as by `kvcache match`."""
        done = kvcache("events", log, "--request", "nobody")
        assert done == (2, "", "kvcache: error: no matching event for request 'nobody'\n")
        assert kvcache("match", log, "--request", "nobody").code == 2

    @pytest.mark.parametrize("condition", [("--block", "0123456789abcdef"), ("--type", "Gap")])
    def test_nothing_found(self, kvcache: Kvcache, log: Path, condition: tuple[str, str]) -> None:
        """A condition that nothing meets is said not to be met, in any form."""
        for form in ((), ("--json",)):
            assert kvcache("events", log, *condition, *form) == (
                2,
                "",
                "kvcache: error: no matching event\n",
            )

    def test_block(self, kvcache: Kvcache, log: Path) -> None:
        """--block finds every event that carries the block's name or key, by its first digits."""
        stored = next(event for _, _, event in all_events(log) if isinstance(event, BlocksStored))
        name = stored.keys[32:40].hex()
        expected = []
        for seq, index, event in all_events(log):
            fields = to_dict(event, 32)
            names = [each for column in NAMES for each in fields.get(column) or []]
            names.append(fields.get("parent") or "")
            if any(each.startswith(name) for each in names):
                expected.append((seq, index))
        assert len(expected) > 1
        for given in (name, name[:8], name.upper(), f"0x{name}"):
            assert addresses(kvcache("events", log, "--json", "--block", given)) == expected
        inside = stored.keys[32:40].hex()[1:]
        assert kvcache("events", log, "--block", inside) == (
            2,
            "",
            "kvcache: error: no matching event\n",
        )

    @pytest.mark.parametrize("name", ["xyz", "abc", "12 34"])
    def test_block_that_is_no_name(self, kvcache: Kvcache, log: Path, name: str) -> None:
        """What is no hexadecimal name is refused."""
        done = kvcache("events", log, "--block", name)
        assert done.code == 2
        assert "hex digits" in done.err

    def test_filled_blocks(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """A block that decoding filled is found among others: by its name, its parent's, and its request."""
        handles, names = pack_i64([7, 8]), bytes(range(16))
        keys = bytes(range(100, 164))
        filled = BlocksFilled(handles, GroupIndex(0), pack_u32([1, 2]), names, keys, pack_i32([3, 4]), 35)
        added = SequenceAdded(Handle(8), "mine", Namespace(), 0, b"", 0, (0,), (0,), 0)
        created = CacheCreated("{}", 4, (), "v2_sha256_64", 32, "c")
        log = lying(tmp_path / "log", created, added, filled)
        for name in (keys[32:40], keys[:4], names[8:]):
            assert addresses(kvcache("events", log, "--json", "--block", name.hex())) == [(0, 2)]
        assert kvcache("events", log, "--json", "--block", keys[8:16].hex()).code == 2
        assert addresses(kvcache("events", log, "--json", "--request", "mine")) == [(0, 1), (0, 2)]
        assert kvcache("events", log, "--json", "--request", "9").code == 2

    def test_filled_blocks_show_what_was_asked_for(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """Of an event of several sequences only the rows are shown that meet the conditions, in both forms."""
        names, keys = bytes(range(24)), bytes(range(100, 196))
        filled = BlocksFilled(
            pack_i64([7, 8, 9]), GroupIndex(0), pack_u32([1, 2, 3]), names, keys, pack_i32([3, 4, 5]), 35
        )
        added = [
            SequenceAdded(Handle(handle), name, Namespace(), 0, b"", 0, (0,), (0,), 0)
            for handle, name in ((7, "other"), (8, "mine"), (9, "mine"))
        ]
        created = CacheCreated("{}", 4, (), "v2_sha256_64", 32, "c")
        log = lying(tmp_path / "log", created, *added, filled)
        kind, block = ("--type", "BlocksFilled"), ("--block", keys[32:40].hex())
        line = "request=mine group=0 primary blocks=1 first=2 84858687 after 08090a0b priority=35"
        for asked in (block, (*block, "--request", "mine"), ("--block", names[8:16].hex())):
            done = kvcache("events", log, *kind, *asked)
            assert [each.split(maxsplit=3)[3] for each in done.out.splitlines()] == [line]
        assert kvcache("events", log, *kind, *block, "--request", "other").out == ""
        [spelled] = kvcache("events", log, *kind, "--request", "mine", "--json").out.splitlines()
        assert {name: json.loads(spelled)[name] for name in ("handles", "blocks", "slots")} == {
            "handles": [8, 9],
            "blocks": [2, 3],
            "slots": [4, 5],
        }
        assert json.loads(spelled)["keys"] == [keys[32:64].hex(), keys[64:].hex()]
        assert json.loads(spelled)["parents"] == [names[8:16].hex(), names[16:].hex()]
        assert "sequences=3" in kvcache("events", log, *kind).out

    def test_a_requests_part(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """Of events of several sequences and copies --request shows its own slots, tokens and copies, in both forms."""
        handles, counts = pack_i64([7, 8, 9, 8]), pack_u32([2, 1, 3, 2])
        slots, four = pack_i32(range(10, 18)), pack_i32([1, 2, 3, 4])
        moved = BlocksMoved(
            GroupIndex(0),
            b"",
            LevelIndex(1),
            four[:4],
            LevelIndex(0),
            four[4:8],
            MoveReason.ONBOARD,
            5,
            Handle(8),
        )
        events: list[AnyEvent] = [
            CacheCreated("{}", 4, (), "v2_sha256_64", 32, "c"),
            *[
                SequenceAdded(Handle(handle), name, Namespace(), 0, b"", 0, (0,), (0,), 0)
                for handle, name in ((7, "other"), (8, "mine"), (9, "other"))
            ],
            BlocksAllocated(handles, counts, GroupIndex(0), slots, AllocateReason.PROMPT),
            BlocksAllocated(handles, b"", GroupIndex(0), four, AllocateReason.DECODE),
            TokensAppended(handles, counts, slots),
            TokensAppended(handles, b"", four),
            TokensAppended(handles, counts, b""),
            moved,
            TransferLanded(pack_i64([4, 5, 6])),
            TransferFailed(pack_i64([6, 5, 7]), "why"),
            AdmissionRefused("mine", (1,), (0,)),
            BlocksDetached(handles, counts, GroupIndex(0), slots, pack_i32([11, 12, 17])),
            BlocksDetached(handles, b"", GroupIndex(0), four, b""),
            BlocksDetached(handles[:8], b"", GroupIndex(0), four[:4], b""),
        ]
        log = lying(tmp_path / "log", *events)
        lines = kvcache("events", log, "--request", "mine", "--json").out.splitlines()
        shown = [json.loads(line) for line in lines]
        assert [line["index"] for line in shown] == [2, *range(4, 15)]
        columns = ("handles", "counts", "slots", "freed", "tokens", "transfers")
        assert [[line[name] for name in columns if name in line] for line in shown] == [
            [None],
            [[8, 8], [1, 2], [12, 16, 17]],
            [[8, 8], None, [2, 4]],
            [[8, 8], [1, 2], [12, 16, 17]],
            [[8, 8], None, [2, 4]],
            [[8, 8], [1, 2], None],
            [],
            [[5]],
            [[5]],
            [],
            [[8, 8], [1, 2], [12, 16, 17], [12, 17]],
            [[8, 8], None, [2, 4], []],
        ]
        done = kvcache(
            "events", log, "--request", "mine", "--type", "BlocksAllocated", "--type", "TransferLanded"
        )
        assert [line.split(maxsplit=3)[3] for line in done.out.splitlines()] == [
            "sequences=2 group=0 blocks=3 why=prompt",
            "sequences=2 group=0 blocks=2 why=decode",
            "transfer=5",
        ]
        for nobody in ("None", "0", "8"):
            assert kvcache("events", log, "--request", nobody).out == ""

    def test_a_requests_part_of_a_state(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """Of an exported state only the request's own sequence and copies are shown; the latter's landing is found."""
        tokens = pack_i32([1, 2, 3])
        sequences = tuple(
            SequenceExported(Handle(handle), name, Namespace(), 3, tokens, 3, 0, (0,), (b"",), b"")
            for handle, name in ((7, "other"), (8, "mine"))
        )
        transfers = tuple(
            TransferExported(number, GroupIndex(0), LevelIndex(0), pack_i32([number]), handle)
            for number, handle in ((4, Handle(7)), (5, Handle(8)), (6, None))
        )
        exported = StateExported((), sequences, transfers, 9, 7, 0, 0)
        created = CacheCreated("{}", 4, (), "v2_sha256_64", 32, "c")
        landed = TransferLanded(pack_i64([4, 5]))
        log = lying(tmp_path / "log", created, exported, landed, TransferLanded(pack_i64([4])))
        lines = kvcache("events", log, "--request", "mine", "--json").out.splitlines()
        state, landing = map(json.loads, lines)
        assert [each["handle"] for each in state["sequences"]] == [8]
        assert [each["transfer"] for each in state["transfers"]] == [5]
        assert (landing["index"], landing["transfers"]) == (2, [5])

    def test_handle(self, kvcache: Kvcache, log: Path) -> None:
        """--handle shows what --request does of a request with one sequence, in each way to write it."""
        [handle] = [
            event.handle
            for _, _, event in all_events(log)
            if isinstance(event, SequenceAdded) and event.request_id == REQUEST
        ]
        assert handle != REQUEST
        for form in ((), ("--json",)):
            expected = kvcache("events", log, "--request", REQUEST, *form).out
            for spelled in (handle, f"#{handle}", f"0.{handle}"):
                assert kvcache("events", log, "--handle", spelled, *form) == (0, expected, "")

    def test_handle_of_an_epoch(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """Of two requests with one id --handle shows one: in a later epoch as lines show it, or by its whole number."""
        log = run_log(tmp_path / "log", "--limit", 2)
        run_log(log, "--limit", 2, "--resume")
        first, second = (
            (seq, index)
            for seq, index, event in all_events(log)
            if isinstance(event, SequenceAdded) and event.request_id == 1
        )
        kind = ("--json", "--type", "SequenceAdded")
        for spelled, expected in ((2, first), ("1.2", second), ("#1.2", second), (2**40 + 2, second)):
            assert addresses(kvcache("events", log, *kind, "--handle", spelled)) == [expected]

    def test_handle_that_is_not_there(self, kvcache: Kvcache, log: Path) -> None:
        """A sequence that never was is not found; what is no handle is refused."""
        done = kvcache("events", log, "--handle", 99999)
        assert done == (2, "", "kvcache: error: no matching event for sequence 99999\n")
        for wrong in ("0", "x", "1.0", "9999999.1", 2**63, f"1.{2**40}"):
            assert "is not a handle" in kvcache("events", log, "--handle", wrong).err

    def test_conditions_together(self, kvcache: Kvcache, log: Path) -> None:
        """Several conditions must all hold."""
        done = kvcache("events", log, "--request", REQUEST, "--type", "SequenceRemoved")
        assert done.out.count("\n") == 1


def test_changed_priorities(kvcache: Kvcache, tmp_path: Path) -> None:
    """A change of priority is found by its type, its request and its block."""
    with KVCacheManager(strategies.config(), log=tmp_path) as manager:
        manager.add_sequences([Request("one", [1, 1, 1]), Request("two", [2, 2, 2])])
        for request_id in ("one", "two"):
            manager.store_context_blocks(request_id, 3)
            manager.set_priority(request_id, 80)
    events = [event for _, _, event in all_events(tmp_path) if isinstance(event, BlocksUpdated)]
    name = events[1].names.hex()
    only = ("--type", "BlocksUpdated")
    assert kvcache("events", tmp_path, *only).out.count("\n") == 2
    for condition in (("--request", "two"), ("--block", name[:8])):
        [line] = kvcache("events", tmp_path, *only, *condition).out.splitlines()
        assert line.endswith(
            f"BlocksUpdated     group=0 primary blocks=1 {name[:8]} priority=35->80 for request=two"
        )


def test_blocks_without_names(kvcache: Kvcache, tmp_path: Path) -> None:
    """In a log whose blocks have no names, none is found."""
    log = run_log(tmp_path / "log", "--limit", 2, "--set", "block_hash=none")
    assert kvcache("events", log, "--block", "abcd") == (2, "", "kvcache: error: no matching event\n")


def test_follow(start: Start, log: Path, tmp_path: Path) -> None:
    """--follow shows what a writer appends while it waits, at once."""
    batches = list(LogReader(log))
    with LogWriter(tmp_path / "log") as writer:
        writer.append(batches[0])
        writer.flush()
        process = start("events", tmp_path / "log", "--follow", "--type", "SequenceAdded")
        assert process.stdout is not None
        for batch in batches[1:]:
            writer.append(EventBatch(batch.seq, batch.ts, batch.events))
        writer.flush()
        for batch in batches:
            for event in batch.events:
                if isinstance(event, SequenceAdded):
                    assert f" request={event.request_id} " in process.stdout.readline()


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_followed_lines_come_whole_and_at_once(start: Start, log: Path, form: list[str]) -> None:
    """In a pipe each batch is there when it was read; SIGTERM ends the command without a word."""
    process = start("events", log, "--follow", *form)
    assert process.stdout is not None
    expected = sum(len(batch.events) for batch in LogReader(log))
    lines = [process.stdout.readline() for _ in range(expected)]
    assert all(line.endswith("\n") for line in lines)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (-signal.SIGTERM, "", "")


def test_follow_ends_with_its_reader(start: Start, log: Path) -> None:
    """Behind `head` it ends when head does, also if the log goes on with nothing that would have to be shown."""
    process = start("events", log, "--follow", "--type", "EpochStarted")
    assert process.stdout is not None
    assert process.stderr is not None
    assert "EpochStarted" in process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 128 + signal.SIGPIPE
    assert process.stderr.read() == ""


def test_handles_are_numbers(log: Path) -> None:
    """The log used here has steps of two sequences, which the tests above rely on."""
    assert any(
        len(unpack_i64(event.handles)) == 2 for _, _, event in all_events(log) if hasattr(event, "handles")
    )


class TestLyingLogs:
    """Logs whose bytes are whole and make no sense."""

    STORED = BlocksStored(
        Handle(1), GroupIndex(0), BlockIndex(0), b"", bytes(32), bytes(4), LevelIndex(0), 35, 4
    )

    def test_blocks_of_no_cache(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """Blocks whose keys have no known size are not found by a name, and cannot be spelled out."""
        log = lying(tmp_path / "log", self.STORED)
        assert kvcache("events", log, "--block", "0000") == (
            2,
            "",
            "kvcache: error: no matching event\n",
        )
        spelled = kvcache("events", log, "--json")
        assert spelled.code == 1
        assert spelled.err == "kvcache: error: the column keys of BlocksStored does not hold whole entries\n"

    @pytest.mark.parametrize("options", [[], ["--json"], ["--request", "1"]])
    def test_half_a_handle(self, kvcache: Kvcache, tmp_path: Path, options: list[str]) -> None:
        """A column that ends inside an entry is damage, whatever is asked for."""
        log = lying(tmp_path / "log", TokensAppended(bytes(3), b"", b""))
        done = kvcache("events", log, *options)
        assert (done.code, done.out) == (1, "")
        assert "the column handles of TokensAppended does not hold whole entries" in done.err


def lying(directory: Path, *events: AnyEvent) -> Path:
    """A log of these events only."""
    with LogWriter(directory, fsync="never") as log:
        log.append(EventBatch(0, 0, events))
    return directory
