"""Prompts and salts stay where they are: planted in everything that a cache is asked, they are found nowhere."""

from __future__ import annotations

import contextlib
import os
import random
import stat
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from events.log import LogWriter
from events.log.segments import first_seq, segment_paths
from kvcache import KVCacheConfig, KVCacheManager
from kvcache.cli import main
from kvcache.errors import KVCacheError
from kvcache.maintenance.prune import make_snapshot
from sinks.prometheus import PrometheusSink
from tests.support.logs.logs import frames_in
from tests.support.secrets import SALT, TOKENS, betrayed

WAIT_MS = 5000


def config(log: bool = False) -> KVCacheConfig:
    return KVCacheConfig.load(
        max_sequence_length=64,
        tokens_per_block=4,
        primary_blocks=20,
        secondary_blocks=10,
        model="m",
        log={"record_tokens": log, "overflow": "block"},
    )


def prompt(chance: random.Random) -> list[int]:
    begin = chance.randrange(3)
    return list(TOKENS[begin : begin + chance.randint(5, 36)])


def work(manager: KVCacheManager) -> None:
    """Reuse, eviction, offload, copies, branches, tokens taken back."""
    chance = random.Random(4)
    for number in range(120):
        tokens = prompt(chance)
        manager.add_sequence(number, tokens, cache_salt=chance.choice((None, SALT)))
        manager.flush()
        manager.store_context_blocks(number, len(tokens))
        manager.fork(number, -number - 1)
        manager.add_tokens([number, -number - 1], list(chance.choices(TOKENS, k=2)))
        manager.rewind(number, len(tokens))
        for each in (number, -number - 1):
            manager.remove_sequence(each)
        manager.flush()


def refusals(manager: KVCacheManager) -> Iterator[str]:
    """What a programmer sees of calls that are refused, with tracebacks."""
    token = TOKENS[0]
    manager.add_sequence("r", list(TOKENS[:9]), cache_salt=SALT)
    calls: list[Callable[[], Any]] = [
        lambda: manager.add_sequence("r", list(TOKENS[:9])),
        lambda: manager.add_sequence("long", [token] * 1000),
        lambda: manager.add_sequence("huge", [token, 2**40]),
        lambda: manager.add_sequence("text", [token, str(token)]),
        lambda: manager.add_sequence("float", [token, token + 0.5]),
        lambda: manager.add_sequence("salt", [token], cache_salt=[SALT]),  # type: ignore[arg-type]
        lambda: manager.add_tokens(["r"], [token, token]),
        lambda: manager.add_tokens(["r"], [2**33 + token]),
        lambda: manager.add_tokens(["r"], [str(token)]),
        lambda: manager.add_tokens(["r"] * 2, [token, token]),
        lambda: manager.match([token, None]),
        lambda: manager.match([token], cache_salt=5),  # type: ignore[arg-type]
        lambda: manager.fork("r", "r"),
        lambda: manager.rewind("r", 99),
        lambda: manager.store_context_blocks("r", 99),
    ]
    for call in calls:
        with pytest.raises((KVCacheError, TypeError, ValueError)) as refused:
            call()
        yield "".join(traceback.format_exception(refused.value))


def received_by_zmq(transport: Any) -> Iterator[bytes]:
    """All that a router gets which comes late, and all that it can ask for."""
    with zmq.Context() as context, context.socket(zmq.SUB) as late, context.socket(zmq.DEALER) as asking:
        late.connect(transport.endpoint)
        late.subscribe("")
        assert late.poll(WAIT_MS)
        yield from late.recv_multipart()
        asking.connect(transport.replay_endpoint)
        asking.send_multipart([b"", bytes(8)])
        while asking.poll(WAIT_MS):
            frames = asking.recv_multipart()
            yield from frames
            if not frames[-1]:
                return


def outputs(log: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[str]:
    """What commands say of a log, and of tokens that they cannot read."""
    bad = tmp_path / "tokens"
    bad.write_text(f"[{TOKENS[0]}, {TOKENS[1]}x]")
    commands = [
        ["events", log],
        ["events", "--json", log],
        ["replay", log, "--json"],
        ["audit", log],
        ["explain", log, "7"],
        ["curve", log],
        ["export", log, "--to", "csv", "-o", tmp_path / "tables"],
        ["report", log, "-o", tmp_path / "page.html"],
        ["log", "info", log],
        ["log", "verify", log],
        ["log", "salvage", log, "--to", tmp_path / "salvaged"],
        ["log", "compress", log],
        ["log", "compact", tmp_path / "salvaged"],
        ["-v", "match", log, "--tokens", bad, "--cache-salt", SALT],
        ["-v", "whatif", log],
    ]
    for command in commands:
        capsys.readouterr()
        with contextlib.suppress(SystemExit):
            main([str(word) for word in command])
        captured = capsys.readouterr()
        yield captured.out + captured.err
    bad.unlink()


def contents(directory: Path) -> Iterator[tuple[str, bytes]]:
    """What is in all files; of segments, in their frames, too, which are compressed."""
    for path in directory.rglob("*"):
        if path.is_file():
            payloads = [payload for _, payload in frames_in(path)] if path.suffix == ".kvlog" else []
            yield str(path.relative_to(directory)), b"".join([path.read_bytes(), *payloads])


def urls(tmp_path: Path, tokens: int) -> list[str]:
    return [
        f"zmq+pub://127.0.0.1:0?replay=0&coalesce=0&heartbeat=50ms&first=0&tokens={tokens}",
        f"stdout:?format=jsonl&tokens={tokens}",
        f"file://{tmp_path}/sinks/events.jsonl?tokens={tokens}",
        f"file://{tmp_path}/sinks/events.kvevents?format=msgpack&tokens={tokens}",
        "prometheus://127.0.0.1:0",
    ]


def play(tmp_path: Path, *, tokens: bool) -> tuple[list[bytes], str]:
    """A cache with a log and all kinds of sinks; what came out of its sockets, and the tracebacks."""
    (tmp_path / "sinks").mkdir()
    writer = LogWriter(tmp_path / "log", record_tokens=tokens, segment_bytes=2000)
    with KVCacheManager(config(tokens), log=writer, sinks=urls(tmp_path, int(tokens))) as manager:
        work(manager)
        writer.flush()
        for path in segment_paths(writer.directory)[2::20]:
            make_snapshot(writer.directory, first_seq(path))
        tracebacks = "".join(refusals(manager))
        manager.flush()
        sent = list(received_by_zmq(manager.feeds[0].transport))
        [scraped] = [
            each.sink for each in manager._journal.outputs._runners if isinstance(each.sink, PrometheusSink)
        ]
        with urllib.request.urlopen(f"http://127.0.0.1:{scraped.port}/metrics", timeout=5) as answer:
            sent.append(answer.read())
    return sent, tracebacks


@pytest.mark.usefixtures("umask_of_nobody")
def test_without_tokens_nothing_reports_them(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Not the log, its snapshots and what is made of them, sockets, files, pages, metrics, messages, tracebacks."""
    sent, tracebacks = play(tmp_path, tokens=False)
    printed = capfd.readouterr()
    said = list(outputs(tmp_path / "log", capfd, tmp_path))
    texts = [printed.out, printed.err, tracebacks, *said]
    found = {f"text {number}": betrayed(text.encode()) for number, text in enumerate(texts)}
    found |= {f"message {number}": betrayed(message) for number, message in enumerate(sent)}
    files = dict(contents(tmp_path))
    found |= {name: betrayed(content) for name, content in files.items()}
    assert {place: what for place, what in found.items() if what} == {}
    assert len(sent) > 20
    assert "SequenceAdded" in printed.out
    assert tracebacks.count("Traceback") >= 15
    assert {Path(name).suffix for name in files} >= {
        ".kvlog",
        ".kvsnap",
        ".jsonl",
        ".csv",
        ".html",
    }
    made = [tmp_path / name for name in ("log", "salvaged", "tables", "page.html", "sinks/events.jsonl")]
    for path in tmp_path.rglob("*"):
        if any(path.is_relative_to(each) for each in made):
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_with_tokens_they_are_found(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """So the test above would see them; salts are told as digests always, and no message has either."""
    sent, tracebacks = play(tmp_path, tokens=True)
    printed = capfd.readouterr().out
    for content in (printed.encode(), b"".join(sent), *(dict(contents(tmp_path / "log")).values())):
        assert "salt" not in betrayed(content)
    assert betrayed(printed.encode()) & {"decimal", "hex"}
    assert betrayed(b"".join(sent)) == {"packed"}
    kinds = {Path(name).suffix: betrayed(content) for name, content in contents(tmp_path / "log") if content}
    assert kinds[".kvlog"] == kinds[".kvsnap"] == {"packed"}
    assert {name for name, content in contents(tmp_path / "sinks") if not betrayed(content)} == set()
    assert betrayed(tracebacks.encode()) == set()


@pytest.fixture
def umask_of_nobody() -> Iterator[None]:
    """A umask that forbids nothing."""
    before = os.umask(0)
    yield
    os.umask(before)
