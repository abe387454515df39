"""Reading and writing traces."""

from __future__ import annotations

import pickle
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.workload import mooncake
from kvcache.workload.mooncake import TraceError, TraceRequest, read_trace
from tests.support.traces import write_trace

GOOD = '{"timestamp": 27, "input_length": 600, "output_length": 5, "hash_ids": [46, 47]}'


def trace(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def test_reads_the_published_form(tmp_path: Path) -> None:
    """A line becomes a request; blank lines and fields of other tools are passed over."""
    extra = '{"session": "x", "timestamp": 3, "input_length": 1, "output_length": 0, "hash_ids": [1]}'
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
            "hash_ids has 2 entries, but input_length 1025 needs 3, one per 512 tokens; a trace with blocks of another",
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
    monkeypatch.setattr(mooncake, "MAX_LINE_BYTES", len(GOOD) + 1)
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
