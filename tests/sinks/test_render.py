"""Lines for people: what they show, and what they never show."""

from __future__ import annotations

import msgspec
import pytest

from events.codec import without_tokens
from events.ids import BlockIndex, GroupIndex, Handle, LevelIndex
from events.types import (
    SECONDARY,
    AdmissionRefused,
    AllocateReason,
    AnyEvent,
    BlocksAllocated,
    BlocksDetached,
    BlocksFilled,
    BlocksRemoved,
    BlocksReused,
    BlocksStored,
    ContextComputed,
    EndReason,
    EventBatch,
    Namespace,
    RemoveReason,
    SequenceAdded,
    SequenceExported,
    SequenceRemoved,
    StateExported,
    TokensAppended,
)
from sinks.render import StreamNames, render_batch, render_event, text
from tests.support.columns import pack_i32, pack_i64, pack_u32
from tests.support.feeds.sinks import KEY_BYTES, KEYS, NAMES, PLANTED, SAMPLES, TWO

LINES = [
    (
        "CacheCreated      tokens_per_block=4 hash=v2_sha256_64 group0(window=64 layers=2 blocks=8+16)"
        " group1(window=1024 layers=1 blocks=32+0) engine='toy 1'"
    ),
    "EpochStarted      epoch=2 after=1 clean=no tokens_recorded=yes by kvcache 1",
    "StateExported     blocks=2 sequences=1 transfers=1",
    "Gap               missing=3..9 reason=overflow",
    "SequenceAdded     #7 request=chat-1 tokens=812 reused=500+76+3 lora=adapter salt=abababab",
    "BlocksAllocated   #7 group=0 blocks=2 why=decode",
    "BlocksReused      #7 group=1 primary blocks=2 first=2 1f2e3d4c..9a8b7c6d replaced=1",
    "BlocksCopied      #7 group=0 tokens=3 from secondary block=2 transfer=11",
    "BlocksStored      #7 group=0 primary blocks=2 first=35 1f2e3d4c..9a8b7c6d after 00112233 priority=36",
    "BlocksFilled      sequences=2 group=0 primary blocks=2 1f2e3d4c..9a8b7c6d priority=36",
    "BlocksUpdated     group=0 primary blocks=2 1f2e3d4c..9a8b7c6d priority=35->80 for #7",
    "BlocksMoved       group=0 primary->secondary blocks=2 1f2e3d4c..9a8b7c6d why=offload transfer=12 for #7",
    "BlocksRemoved     group=0 secondary blocks=2 1f2e3d4c..9a8b7c6d why=capacity for #7",
    "BlocksPinned      #7 pin=1 blocks=2/0",
    "BlocksUnpinned    pin=1 freed=0/1",
    "TokensAppended    sequences=2 tokens=3 draft",
    "ContextComputed   #7 tokens=40",
    "BlocksDetached    sequences=2 group=0 blocks=2 freed=1",
    "BlocksReturned    #7 group=0 blocks=2",
    "SequenceForked    #7 into #8 request=chat-2",
    "SequenceRewound   #7 tokens=812 freed=2/0",
    "SequenceRemoved   #7 tokens=815 computed=814 stored=2/1 freed=2/0",
    "EncoderAdded      #9 of #7 group=1 tokens=9 reused_blocks=1+2 lora=adapter salt=abababab",
    "EncoderRemoved    #9 group=1 freed=2",
    "TransferLanded    transfers=12..14,16 checksums=2",
    "TransferFailed    transfer=12 reason='lost device'",
    "CacheCleared      removed=3+4/5+0 unnamed=2/1",
    "Checkpoint        c0ffee00 sequences=2 cached=3+4/5+0",
    "SymbolsInterned   pages=2 items=1 cdcdcdcd",
    "SymbolsForgotten  pages=2",
    "AdmissionRefused  request=chat-2 needed=3/10 available=7/9",
    "LoadFailed        #7 tokens=17",
    "PoolShared        groups=2 sliding:4,state:8 named=2/0 held=1/0",
    "SlotsTaken        #7 group=2 blocks=2 at=1..3 reused",
    "SlotsLeft         #7 group=2 blocks=1 at=1",
    "SlotsNamed        #7 group=2 blocks=2 1f2e3d4c..9a8b7c6d at=8..16",
    "SlotsUnnamed      group=2 blocks=2 1f2e3d4c..9a8b7c6d why=capacity for #7",
    "HitDeferred       request=chat-2 group=2",
    "FeedStarted       endpoints=tcp://engine:5557,'tcp://*:5560'",
    "WorkerSeen        worker=3 topic=kv@10.0.0.5:8000@m rank=1 complete=no",
    "FeedReceived      worker=3 number=41 (replayed)",
    "FeedStored        worker=3 CPU group=1 blocks=2 1f2e3d4c..ffffffff after 00112233 tokens=3 lora=adapter",
    "FeedRemoved       worker=3 GPU group=0 blocks=1 1f2e3d4c",
    "FeedCleared       worker=3",
    "FeedGap           worker=3 lost=42..44 reason='not received'",
    "FeedRestarted     worker=3 number=0 after=44",
    "FeedUnknown       worker=3 type=BlockMoved",
]


@pytest.mark.parametrize(("event", "line"), list(zip(SAMPLES, LINES, strict=True)))
def test_each_event_type_has_its_line(event: AnyEvent, line: str) -> None:
    """Every type of event is one line with its counts, names and reasons."""
    assert render_event(event, StreamNames(KEY_BYTES)) == line


def test_no_line_has_token_ids() -> None:
    """A token id that is in the events is in no line."""
    lines = list(render_batch(EventBatch(3, 4, SAMPLES), StreamNames(KEY_BYTES)))
    assert len(lines) == len(SAMPLES)
    assert str(PLANTED) not in "\n".join(lines)


def test_a_line_starts_with_the_events_address() -> None:
    """Batch seq and index lead back to the event in the log."""
    lines = list(render_batch(EventBatch(12, 0, SAMPLES[:2]), StreamNames(KEY_BYTES)))
    assert [line.split()[0] for line in lines] == ["12.0", "12.1"]


def test_a_step_of_one_sequence_shows_its_handle() -> None:
    """A single sequence is named, with its epoch if that is not the first; several are counted."""
    line = render_event(TokensAppended(pack_i64([7]), b"", pack_i32([1])), StreamNames(KEY_BYTES))
    assert line.split() == ["TokensAppended", "#7", "tokens=1"]
    line = render_event(TokensAppended(pack_i64([2 * 2**40 + 7]), b"", pack_i32([1])), StreamNames(KEY_BYTES))
    assert line.split() == ["TokensAppended", "#2.7", "tokens=1"]
    line = render_event(
        BlocksAllocated(pack_i64([7, 8]), b"", GroupIndex(0), TWO, AllocateReason.DECODE),
        StreamNames(KEY_BYTES),
    )
    assert line.split() == ["BlocksAllocated", "sequences=2", "group=0", "blocks=2", "why=decode"]
    line = render_event(
        BlocksDetached(pack_i64([7]), b"", GroupIndex(1), TWO[:4], b""), StreamNames(KEY_BYTES)
    )
    assert line.split() == ["BlocksDetached", "#7", "group=1", "blocks=1", "freed=0"]


def test_a_sequence_is_named_by_its_request() -> None:
    """What is done by or for a sequence says whose it is, from its beginning to its last line, and not beyond."""
    added = SequenceAdded(Handle(7), "chat 1", Namespace(), 9, b"", 0, (0,), (0,), 0)
    removed = BlocksRemoved(GroupIndex(0), SECONDARY, TWO, NAMES, RemoveReason.CAPACITY, Handle(7))
    ended = SequenceRemoved(Handle(7), (0,), (b"",), 9, 8)
    story = (removed, added, removed, TokensAppended(pack_i64([7]), b"", pack_i32([1])), ended, removed)
    lines = list(render_batch(EventBatch(0, 0, story), StreamNames(KEY_BYTES)))
    assert [line.split(maxsplit=2)[2] for line in lines] == [
        "group=0 secondary blocks=2 1f2e3d4c..9a8b7c6d why=capacity for #7",
        "#7 request='chat 1' tokens=9 reused=0+0+0",
        "group=0 secondary blocks=2 1f2e3d4c..9a8b7c6d why=capacity for request='chat 1'",
        "request='chat 1' tokens=1",
        "request='chat 1' tokens=9 computed=8 stored=0 freed=0",
        "group=0 secondary blocks=2 1f2e3d4c..9a8b7c6d why=capacity for #7",
    ]


def test_requests_are_known_from_the_state() -> None:
    """Whoever begins behind a gap learns from the whole state which requests run, and that the others do not."""
    known = StreamNames(KEY_BYTES)
    known.see(SequenceAdded(Handle(6), "lost", Namespace(), 9, b"", 0, (0,), (0,), 0))
    running = SequenceExported(Handle(7), 1234, Namespace(), 3, b"", 3, 0, (0,), (b"",), b"")
    known.see(StateExported((), (running,), (), 8, 1, 0, 0))
    assert render_event(ContextComputed(Handle(7), 3), known).split() == [
        "ContextComputed",
        "request=1234",
        "tokens=3",
    ]
    assert known.requests.get(6) is None


def test_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ends of sequences are lost, the oldest requests are forgotten."""
    monkeypatch.setattr("sinks.render.MAX_REQUESTS", 2)
    known = StreamNames()
    for handle in (1, 2, 3):
        known.see(SequenceAdded(Handle(handle), f"r{handle}", Namespace(), 9, b"", 0, (0,), (0,), 0))
    assert [known.requests.get(handle) for handle in (1, 2, 3)] == [None, "r2", "r3"]


def test_a_block_filled_alone_shows_its_place() -> None:
    """Where decoding has filled one block, its sequence, index and parent are named, as for a stored one."""
    event = BlocksFilled(
        pack_i64([7]), GroupIndex(0), pack_u32([35]), NAMES[8:], KEYS[:KEY_BYTES], pack_i32([4]), 36
    )
    assert render_event(event, StreamNames(KEY_BYTES)).split(maxsplit=1)[1] == (
        "#7 group=0 primary blocks=1 first=35 1f2e3d4c after 9a8b7c6d priority=36"
    )


def test_tokens_are_counted_when_they_were_taken_out() -> None:
    """A log without tokens shows the same number of tokens."""
    event = TokensAppended(pack_i64([7, 8]), b"", pack_i32([PLANTED, PLANTED]))
    assert render_event(without_tokens(event), StreamNames(KEY_BYTES)) == render_event(
        event, StreamNames(KEY_BYTES)
    )


def test_blocks_without_names_are_counted() -> None:
    """A cache without block hashes still shows how many blocks were stored."""
    assert "blocks=2 first=0 priority=35" in render_event(
        BlocksStored(Handle(1), GroupIndex(0), BlockIndex(0), b"", b"", TWO, LevelIndex(0), 35, 4),
        StreamNames(),
    )


def test_names_of_blocks_before_are_not_shown() -> None:
    """A line has the names of its own blocks; what an event gives of those before is for those who need it."""
    reused = BlocksReused(Handle(1), GroupIndex(0), LevelIndex(0), BlockIndex(1), TWO[:4], NAMES)
    line = render_event(reused, StreamNames(KEY_BYTES))
    assert line.split(maxsplit=1)[1] == "#1 group=0 primary blocks=1 first=1 9a8b7c6d"
    before = NAMES[:8]
    alone = BlocksStored(Handle(1), GroupIndex(0), BlockIndex(1), before, KEYS, TWO[:4], LevelIndex(0), 35, 4)
    assert "blocks=1 first=1 9a8b7c6d after 1f2e3d4c" in render_event(alone, StreamNames(KEY_BYTES))


def test_what_is_reused_is_reported_as_all_windows_have_it() -> None:
    """Of tokens that one window has in primary and another one must bring back, the line says the latter."""
    event = SequenceAdded(Handle(7), "r", Namespace(), 100, b"", 67, (64, 16), (0, 8), 3)
    assert render_event(event, StreamNames(KEY_BYTES)).endswith("tokens=100 reused=56+8+3")
    again = msgspec.structs.replace(event, resumed=True)
    assert render_event(again, StreamNames(KEY_BYTES)).endswith("tokens=100 reused=56+8+3 resumed=yes")


def test_why_a_sequence_ended_is_reported_unless_it_is_over() -> None:
    """A preempted or aborted one says so; of the usual end nothing needs saying."""
    ended = SequenceRemoved(Handle(7), (0,), (b"",), 9, 8)
    assert "why" not in render_event(ended, StreamNames(KEY_BYTES))
    preempted = msgspec.structs.replace(ended, why=EndReason.PREEMPTED)
    assert render_event(preempted, StreamNames(KEY_BYTES)).endswith("freed=0 why=preempted")


@pytest.mark.parametrize(
    ("stop", "shown"), [("tool_calls", "tool_calls"), ("\x1b[31m", "'\\x1b[31m'"), ("", "''")]
)
def test_why_an_output_ended_is_reported_if_it_is_known(stop: str, shown: str) -> None:
    """In the engine's words, of which none reaches a terminal that would do something there."""
    ended = SequenceRemoved(Handle(7), (0,), (b"",), 9, 8, stop=stop)
    assert render_event(ended, StreamNames(KEY_BYTES)).endswith(f"freed=0 stop={shown}")


def test_a_single_name_is_shown_once() -> None:
    """No range is shown where there is one block."""
    line = render_event(
        BlocksStored(
            Handle(1), GroupIndex(0), BlockIndex(0), b"", KEYS[:KEY_BYTES], TWO[:4], LevelIndex(0), 35, 4
        ),
        StreamNames(KEY_BYTES),
    )
    assert "blocks=1 first=0 1f2e3d4c priority=35" in line


@pytest.mark.parametrize("hostile", ["a\nb", "\x1b[2J", "a b", "", "x" * 500, "\u202eabc", "#7 request=x"])
def test_texts_from_outside_cannot_forge_a_line(hostile: str) -> None:
    """Request ids and names are quoted and escaped unless plain, and cut short."""
    space = Namespace(None, hostile, None)
    for event in (
        AdmissionRefused(hostile, (1,), (0,)),
        SequenceAdded(Handle(1), hostile, space, 1, b"", 0, (0,), (0,), 0),
    ):
        line = render_event(event, StreamNames(KEY_BYTES))
        assert line.isprintable()
        assert line.isascii()
        assert len(line) < 250
        assert hostile == "" or f"={hostile}" not in line


def test_extra_ids_are_mentioned() -> None:
    """That a request uses extra ids is shown as part of its namespace."""
    event = SequenceAdded(Handle(1), "r", Namespace(uses_extra_ids=True), 1, b"", 0, (0,), (0,), 0)
    assert render_event(event, StreamNames(KEY_BYTES)).endswith("reused=0+0+0 extra_ids=yes")


def test_plain_texts_are_left_alone() -> None:
    """Usual request ids, and numbers, need no quotes."""
    assert text("req-1.a:b/c_D") == "req-1.a:b/c_D"
    assert text(12) == "12"
