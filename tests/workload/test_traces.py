"""Reading and writing traces."""

from __future__ import annotations

import gzip
import json
import pickle
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.log.zstd import zstd_module
from kvcache.errors import UsageError
from kvcache.workload import traces
from kvcache.workload.traces import TraceError, TraceRequest, read_trace
from tests.support.traces import write_trace

GOOD = '{"timestamp": 27, "input_length": 600, "output_length": 5, "hash_ids": [46, 47]}'


def trace(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def test_reads_the_published_form(tmp_path: Path) -> None:
    """A line becomes a request; blank lines and fields of other tools are passed over."""
    extra = '{"other": "x", "timestamp": 3, "input_length": 1, "output_length": 0, "hash_ids": [1]}'
    assert list(read_trace(trace(tmp_path, GOOD, "", "  ", extra))) == [
        TraceRequest(27, 600, 5, (46, 47)),
        TraceRequest(3, 1, 0, (1,)),
    ]


def test_last_line_needs_no_newline(tmp_path: Path) -> None:
    """A file that ends without a newline is read to its end, an empty one has no requests."""
    path = tmp_path / "trace.jsonl"
    path.write_text(GOOD + "\n" + GOOD)
    assert len(list(read_trace(path))) == 2
    path.write_text("")
    assert list(read_trace(path)) == []


def test_limit_stops_reading(tmp_path: Path) -> None:
    """With a limit nothing beyond it is looked at, not even a bad line."""
    path = trace(tmp_path, GOOD, GOOD, "no JSON")
    assert len(list(read_trace(path, limit=2))) == 2
    assert list(read_trace(path, limit=0)) == []


def test_reading_streams(tmp_path: Path) -> None:
    """Requests come out before a bad line further on is reached."""
    requests = read_trace(trace(tmp_path, GOOD, GOOD, "no JSON"))
    assert len(list(islice(requests, 2))) == 2
    with pytest.raises(TraceError):
        next(requests)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("no JSON", "JSON is malformed"),
        (GOOD[:-5], "truncated"),
        ("[1, 2, 3, 4]", "Expected `object`, got `array`"),
        (GOOD.replace('"hash_ids": [46, 47]', '"x": 1'), "missing required field `hash_ids`"),
        (GOOD.replace("600", "-600"), "Expected `int` >= 1 - at `$.input_length`"),
        (GOOD.replace("600", "0"), "Expected `int` >= 1 - at `$.input_length`"),
        (GOOD.replace(": 5", ": -5"), "Expected `int` >= 0 - at `$.output_length`"),
        (GOOD.replace("27", "-27"), "Expected `int` >= 0 - at `$.timestamp`"),
        (GOOD.replace("27", '"27"'), "Expected `int`, got `str` - at `$.timestamp`"),
        (GOOD.replace("46", "-46"), "Expected `int` >= 0 - at `$.hash_ids[0]`"),
        (GOOD.replace("46", str(2**63)), "at `$.hash_ids[0]`"),
        (
            GOOD.replace("600", "1025"),
            "hash_ids has 2 entries, but input_length 1025 needs 3, one per 512 tokens; give --trace-block-size",
        ),
        (GOOD.replace("600", "512"), "hash_ids has 2 entries, but input_length 512 needs 1"),
        (GOOD.replace("[46, 47]", "[46, 47, 48]"), "hash_ids has 3 entries, but input_length 600 needs 2"),
        (GOOD.replace("600", "1" + "0" * 30), "Expected `int` <= 2147483647 - at `$.input_length`"),
        (GOOD.replace(": 5", ": 3000000000"), "Expected `int` <= 2147483647 - at `$.output_length`"),
        (GOOD.replace("27", "9" * 400), "at `$.timestamp`"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    """The error names file and line, and says what is wrong in the terms of the file."""
    path = trace(tmp_path, GOOD, "", line)
    with pytest.raises(TraceError) as caught:
        list(read_trace(path))
    assert str(caught.value).startswith(f"{path}:3: ")
    assert reason in caught.value.reason
    assert (caught.value.path, caught.value.line) == (str(path), 3)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("line", [b'{"\xff": 1}', b"[" * 100_000, b"\x00\x01\x02"])
def test_wrong_file_is_named(tmp_path: Path, line: bytes) -> None:
    """What is no text, or nested without end, is a bad line like any other."""
    path = tmp_path / "trace.jsonl"
    path.write_bytes(line)
    with pytest.raises(TraceError, match=r"trace\.jsonl:1: "):
        list(read_trace(path))


def test_endless_line_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line beyond the bound is refused before it is read whole; one at the bound is not."""
    monkeypatch.setattr(traces, "MAX_LINE_BYTES", len(GOOD) + 1)
    assert len(list(read_trace(trace(tmp_path, GOOD)))) == 1
    with pytest.raises(TraceError, match=r":2: longer than \d+ bytes; is this a trace\?"):
        list(read_trace(trace(tmp_path, GOOD, GOOD + " ")))


def test_missing_file_is_the_systems_error(tmp_path: Path) -> None:
    """A file that is not there is a FileNotFoundError, which names it."""
    with pytest.raises(FileNotFoundError, match="absent"):
        list(read_trace(tmp_path / "absent.jsonl"))


@st.composite
def requests(draw: st.DrawFn) -> TraceRequest:
    ids = draw(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=5))
    length = draw(st.integers(512 * len(ids) - 511, 512 * len(ids)))
    salt = draw(st.none() | st.text(max_size=5))
    return TraceRequest(
        draw(st.integers(0, 2**40)), length, draw(st.integers(0, 2**31 - 1)), tuple(ids), salt
    )


@given(st.lists(requests(), max_size=5))
def test_written_traces_read_back(
    tmp_path_factory: pytest.TempPathFactory, wanted: list[TraceRequest]
) -> None:
    """Whatever is written is read back equal."""
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    write_trace(path, wanted)
    assert list(read_trace(path)) == wanted


BLOCK_SIZES = (16, 64, 128, 512, 1024)


@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_the_size_of_blocks_is_found(tmp_path: Path, size: int) -> None:
    """From lines with more than one number; prompts of one block, which say nothing, may come first."""
    lengths = [1, size, size + 1, 3 * size - 1]
    line = '{{"timestamp": 0, "input_length": {}, "output_length": 1, "hash_ids": {}}}'
    lines = [line.format(length, list(range(-(-length // size)))) for length in lengths]
    found = list(read_trace(trace(tmp_path, *lines)))
    assert [(each.input_length, each.block_tokens) for each in found] == [
        (length, size) for length in lengths
    ]
    one, other = found[2].prompt(), found[3].prompt()
    assert np.array_equal(one, other[: len(one)])
    assert len(set(one[:size].tolist()) & set(one[size:].tolist())) == 0


def test_the_size_of_blocks_is_given(tmp_path: Path) -> None:
    """One that is no power of two, as of hybrid models, has to be; the lines must have it."""
    path = trace(tmp_path, '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}')
    assert next(read_trace(path, block_tokens=528)).block_tokens == 528
    with pytest.raises(TraceError, match=r"needs 3, one per 256 tokens; give --trace-block-size"):
        list(read_trace(path, block_tokens=256))


def test_other_fields_are_ignored(tmp_path: Path) -> None:
    """Whatever agents' traces, or names that this library uses itself, have in them; the model counts."""
    path = trace(
        tmp_path,
        '{"timestamp":0,"input_length":600,"output_length":250,"hash_ids":[0,1],"session_id":5,"agent":"main",'
        '"turn":"3","model":"m","stop":null,"tokens":512,"block_tokens":"x","reported":-1}',
    )
    expected = TraceRequest(
        0, 600, 250, (0, 1), model="m", session="5", labels={"agent": "main", "model": "m"}
    )
    assert list(read_trace(path)) == [expected]


@pytest.mark.parametrize(
    ("stop", "expected"),
    [('"tool_use"', "tool_use"), ('"end_turn"', "end_turn"), ('""', None), ("null", None), ('["\\n"]', None)],
)
def test_the_stop_reason_of_a_request(tmp_path: Path, stop: str, expected: str | None) -> None:
    """What is no text, as a list of stop sequences, is not a reason."""
    path = tmp_path / "trace.jsonl"
    path.write_text(f'{{"timestamp":0,"input_length":600,"output_length":2,"hash_ids":[0,1],"stop":{stop}}}')
    assert list(read_trace(path)) == [TraceRequest(0, 600, 2, (0, 1), stop=expected)]


def test_models_share_nothing() -> None:
    """Requests have a scope in common if they have model and salt in common."""
    scopes = {
        TraceRequest(0, 1, 1, (1,), salt, model).scope
        for salt in (None, "s", "m")
        for model in (None, "m", "s")
    }
    assert len(scopes) == 9


def test_bailians_traces(tmp_path: Path) -> None:
    """Seconds, and blocks of 16 tokens."""
    line = (
        '{"chat_id": 1, "parent_chat_id": null, "timestamp": 61.114, "input_length": 32, "output_length": 5, '
        '"type": "text", "turn": 1, "hash_ids": [7, 8]}'
    )
    expected = TraceRequest(61114, 32, 5, (7, 8), block_tokens=16, session="1")
    assert list(read_trace(trace(tmp_path, line))) == [expected]


def test_a_chat_of_bailians_is_a_session(tmp_path: Path) -> None:
    """Named by its first turn; of one that is not in the trace by the earliest turn that is named."""
    line = (
        '{{"chat_id": {}, "parent_chat_id": {}, "timestamp": 0, "input_length": 1, "output_length": 1, '
        '"hash_ids": [1]}}'
    )
    turns = [(5, -1), (6, 5), (7, -1), (8, 6), (9, 3), (10, 9), (11, 7), (12, "null")]
    found = read_trace(trace(tmp_path, *(line.format(*turn) for turn in turns)))
    assert [each.session for each in found] == ["5", "5", "7", "5", "3", "3", "7", "12"]


@pytest.mark.parametrize(
    ("fields", "session", "labels"),
    [
        ({}, None, None),
        ({"prompt_cache_key": "k", "user": "u"}, "k", {"user": "u"}),
        ({"metadata": {"session_id": 7, "agent": "a"}, "prompt_cache_key": "k"}, "7", {"agent": "a"}),
        ({"metadata": {"session_id": "", "tenant": "t", "agent": {}}}, None, {"tenant": "t"}),
        ({"metadata": "m", "prompt_cache_key": 1.5, "user": "x" * 300}, None, {"user": "x" * 256}),
    ],
)
def test_sessions_and_labels_of_calls(
    tmp_path: Path, fields: dict[str, object], session: str | None, labels: dict[str, str] | None
) -> None:
    """What is neither text nor a number is no name, and whatever else is there is passed over."""
    call = {"prompt_token_ids": [1], **fields}
    for line in ({"timestamp": 1, **call}, {"timestamp": 1, "request": call}):
        (found,) = read_trace(trace(tmp_path, json.dumps(line)))
        assert (found.session, found.labels) == (session, labels)


def test_azures_traces(tmp_path: Path) -> None:
    """Arrivals and lengths; no two prompts begin alike."""
    path = trace(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:17:03.9799600,4808,10",
        "2023-11-16 18:17:04.0319600,3180,8",
    )
    with pytest.raises(UsageError, match="arrivals and lengths only"):
        list(read_trace(path, named=True))
    one, other = read_trace(path)
    assert (one.timestamp, one.input_length, one.output_length) == (0, 4808, 10)
    assert (other.timestamp, other.input_length) == (52, 3180)
    assert not set(one.hash_ids) & set(other.hash_ids)
    with pytest.raises(
        TraceError, match=r":2: 1 columns instead of TIMESTAMP, ContextTokens, GeneratedTokens"
    ):
        list(read_trace(trace(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens", "x")))
    with pytest.raises(TraceError, match="ContextTokens"):
        list(
            read_trace(
                trace(tmp_path, "\ufeffTIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:03,x,8")
            )
        )
    for row in ("2023-11-16 18:17:03.97,1\r2,8", f"{'x' * 10**6},1,2", "2023-11-16 18:17:03.97,-1,8"):
        with pytest.raises(TraceError, match=r":2: .{,100}$"):
            list(read_trace(trace(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens", row)))


LOGGED = (
    '{"timestamp": "2026-05-01T10:00:00Z", "request": {"model": "m", "prompt_token_ids": [1, 2, 3]}, "response": '
    '{"created": 5, "usage": {"completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2}}, '
    '"choices": [{"finish_reason": "stop"}]}}'
)


def test_logged_calls(tmp_path: Path) -> None:
    """Requests and responses as a proxy logs them, in one object or two, with seconds or milliseconds."""
    (request,) = read_trace(trace(tmp_path, LOGGED))
    assert (request.timestamp, request.tokens, request.input_length, request.output_length) == (
        0,
        (1, 2, 3),
        3,
        7,
    )
    assert request.model == "m"
    assert request.stop == "stop"
    assert request.prompt().tolist() == [1, 2, 3]
    flat = '{{"created": {}, "prompt_token_ids": [5], "usage": {{"completion_tokens": 1}}}}'
    times = (1_777_777_777, 1_777_777_778.5, 1_777_777_780_000)
    found = list(read_trace(trace(tmp_path, *(flat.format(time) for time in times))))
    assert [each.timestamp for each in found] == [0, 1500, 3000]
    choices = (
        '[{"index": 0, "finish_reason": "tool_calls"}, {"finish_reason": "stop"}]',
        "[]",
        "7",
        '[{"a": 1}]',
    )
    chosen = ('{"timestamp": 1, "prompt_token_ids": [5], "choices": ' + each + "}" for each in choices)
    assert [each.stop for each in read_trace(trace(tmp_path, *chosen))] == ["tool_calls", None, None, None]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"timestamp": 1, "messages": [{"role": "user", "content": "x"}]}', "give --tokenizer"),
        ('{"timestamp": 1, "request": {}}', "neither prompt_token_ids nor messages"),
        ('{"prompt_token_ids": [1]}', "neither timestamp nor created"),
        ('{"timestamp": 1, "prompt_token_ids": [-1]}', "at `$.prompt_token_ids[0]`"),
        ('{"timestamp": "noon", "prompt_token_ids": [1]}', "neither a number nor an ISO 8601 time"),
        ('{"timestamp": 1, "prompt_token_ids": []}', "the prompt is empty"),
        ('{"timestamp": 1e308, "prompt_token_ids": [1]}', "at `$.timestamp`"),
        ('{"timestamp": "' + "x" * 10**6 + '", "prompt_token_ids": [1]}', "neither a number nor"),
        ('{"chat_id": 1, "timestamp": 1}', "missing required field `input_length`"),
        ('{"a": 1}', "missing required field `timestamp`"),
    ],
)
def test_calls_that_are_no_requests(tmp_path: Path, line: str, reason: str) -> None:
    """The line, and what it lacks."""
    with pytest.raises(TraceError) as caught:
        list(read_trace(trace(tmp_path, line)))
    assert caught.value.line == 1
    assert reason in caught.value.reason
    assert len(caught.value.reason) < 200


@pytest.mark.parametrize(
    "packed", [gzip.compress, lambda data: zstd_module().compress(data)], ids=["gz", "zst"]
)
def test_compressed_traces(tmp_path: Path, packed: Callable[[bytes], bytes]) -> None:
    """Whatever the file is called."""
    path = tmp_path / "trace"
    whole = packed(f"{GOOD}\n{GOOD}\n".encode())
    path.write_bytes(whole)
    assert len(list(read_trace(path))) == 2
    path.write_bytes(whole[:-9])
    with pytest.raises(TraceError, match="decompression failed"):
        list(read_trace(path))


def test_first_lines_are_not_kept(tmp_path: Path) -> None:
    """Of long lines only so many are looked at before the first request comes."""
    line = b'{"timestamp": 1, "x": "' + b"x" * 2**22 + b'", "prompt_token_ids": [1]}\n'
    path = tmp_path / "trace.gz"
    path.write_bytes(gzip.compress(line * 40))
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_trace(path)) == 40
        assert tracemalloc.get_traced_memory()[1] < 10 * len(line)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("many", "few", "times"), [("hash_ids", "event", 16), ("event", "hash_ids", 6), ("schema", "hash_ids", 6)]
)
def test_memory_of_a_long_line(tmp_path: Path, many: str, few: str, times: int) -> None:
    """Numbers are not expanded more than they have to be to be counted, and what is passed over not at all."""
    items = ",".join(["0" if many == "hash_ids" else "[]"] * 2**19)
    line = f'{{"timestamp": 0, "input_length": 9, "output_length": 1, "{many}": [{items}], "{few}": [0]}}'
    path = trace(tmp_path, line)
    tracemalloc.start()
    try:
        with suppress(TraceError):
            assert len(list(read_trace(path))) == 1
        assert tracemalloc.get_traced_memory()[1] < times * len(line)
    finally:
        tracemalloc.stop()


BAILIAN = '{"chat_id": 1, "timestamp": %s, "input_length": 9, "output_length": 5, "hash_ids": [7]}'
CALL = '{"%s": %s, "prompt_token_ids": [1]}'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (
            [GOOD.replace("27", "1777312800000000000")],
            "timestamp is 56,319,644 years after the start, and 139 are",
        ),
        ([GOOD, GOOD.replace("27", str(2**53))], "timestamp is 285,"),
        ([GOOD, GOOD.replace("27", str(2**42 + 1))], "timestamp is 139 years"),
        ([BAILIAN % 1, BAILIAN % 2**50], "timestamp is 35,677,615 years"),
        ([CALL % ("timestamp", 1), CALL % ("timestamp", 1e15)], "timestamp is 31,6"),
        ([CALL % ("created", 1), CALL % ("created", 1e11)], "created is 3,169 years after the first one"),
        (
            [CALL % ("timestamp", f'"{year}-01-01T00:00:00Z"') for year in ("0001", "2026")],
            "timestamp is 2,025 years after the first one",
        ),
        ([AZURE, "0001-01-01 00:00:00,1,1", "2026-01-01 00:00:00,1,1"], "TIMESTAMP is 2,025 years"),
    ],
)
def test_times_that_no_service_has_seen(tmp_path: Path, lines: list[str], reason: str) -> None:
    """Are refused at their line, with the field, in whatever command."""
    with pytest.raises(TraceError) as caught:
        list(read_trace(trace(tmp_path, *lines)))
    assert caught.value.line == len(lines)
    assert caught.value.reason.startswith(reason)


def test_the_latest_times(tmp_path: Path) -> None:
    """Milliseconds since 1970 are read as they are, and so is the bound."""
    times = (1_777_312_800_000, 2**42)
    found = read_trace(trace(tmp_path, *(GOOD.replace("27", str(time)) for time in times)))
    assert [each.timestamp for each in found] == [*times]


def dynamo(received: int | None = 1000, hashes: list[int] | None = None, **more: object) -> dict[str, object]:
    """A record as the documentation of Dynamo's request traces has it; without hashes as it can be of an agent."""
    request: dict[str, object] = {"request_id": "r", "output_tokens": 4, **more}
    if received is not None:
        request["request_received_ms"] = received
    if hashes is not None:
        request = {"replay": replay(64, len(hashes) * 64 - 10) | {"input_sequence_hashes": hashes}} | request
    record = {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": 5000}
    return record | {"request": request}


def replay(size: int, length: int) -> dict[str, object]:
    return {"trace_block_size": size, "input_length": length, "input_sequence_hashes": [1]}


TOOL = {
    "schema": "dynamo.request.trace.v1",
    "event_type": "tool_end",
    "event_time_unix_ms": 7,
    "event_source": "harness",
    "agent_context": {"session_id": "s"},
    "tool": {"tool_call_id": "c", "tool_class": "web_search"},
}


@pytest.mark.parametrize("in_envelopes", [True, False])
def test_dynamo(tmp_path: Path, in_envelopes: bool) -> None:
    """Records of requests by arrival, from the first one on, in envelopes as files have them or without; others are
    passed over.
    """
    first = dynamo(1_777_000_000_000, [2**64 - 1, 7])
    second = dynamo(1_777_000_000_250, [2**64 - 1, 8, 9], model="m", input_tokens=182, cached_tokens=64)
    second |= {"agent_context": {"session_id": "s", "parent_session_id": "p"}, "event_source": "dynamo"}
    second["request"] |= {"finish_reason_metadata": {"finish_reason": "tool_calls"}, "kv_hit_rate": 0.5}  # type: ignore[operator]
    records = [TOOL, second, first]
    lines = [{"timestamp": at, "event": each} if in_envelopes else each for at, each in enumerate(records)]
    path = trace(tmp_path, *map(json.dumps, lines))
    mask = 2**63 - 1
    assert list(read_trace(path)) == [
        TraceRequest(0, 118, 4, (mask, 7), block_tokens=64, begin_ms=1_777_000_000_000),
        TraceRequest(
            250,
            182,
            4,
            (mask, 8, 9),
            model="m",
            block_tokens=64,
            stop="tool_calls",
            session="s",
            labels={"model": "m"},
            reported_length=182,
            reported_cached=64,
            begin_ms=1_777_000_000_000,
        ),
    ]
    assert [request.timestamp for request in read_trace(path, limit=1)] == [0]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (dynamo(), "request.replay is missing"),
        (dynamo(None, [1]), "request.request_received_ms is missing"),
        (
            dynamo(1, [1]) | {"schema": "dynamo.request.trace.v2"},
            "Invalid enum value 'dynamo.request.trace.v2'",
        ),
        (dynamo(1, [1, -2]), "Expected `int` >= 0 - at `$.request.replay.input_sequence_hashes[1]`"),
        (dynamo(1, [1], replay=replay(16, 9)), "request.replay.trace_block_size is 16, and 64 before"),
        (
            dynamo(1, [1], replay=replay(64, 65)),
            "has 1 entries, but input_length 65 needs 2, one per 64 tokens",
        ),
        (dynamo(1, [1], replay=replay(0, 9)), "`$.request.replay.trace_block_size`"),
        (dynamo(1, []), "`$.request.replay.input_length`"),
        (dynamo(10**18, [1]), "request.request_received_ms is 31,688,088 years after 1970"),
    ],
)
def test_dynamo_refuses(tmp_path: Path, record: dict[str, object], reason: str) -> None:
    """What does not say how a prompt begins or when it came, and another version, with the line and the field."""
    with pytest.raises(TraceError) as caught:
        list(read_trace(trace(tmp_path, json.dumps(dynamo(1, [1])), json.dumps(record))))
    assert caught.value.line == 2
    assert reason in caught.value.reason
