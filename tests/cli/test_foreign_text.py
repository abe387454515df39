"""Names that clients, engines and file systems give cannot drive the terminal of whoever reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcache import KVCacheConfig, KVCacheManager, Request
from kvcache.errors import OutOfBlocks
from kvcache.tap.tap import Endpoint, Tap
from tests.support.commands import Kvcache
from tests.support.feeds.publisher import Publisher, batch, removed, replaying, stored
from tests.support.feeds.tapped import work_until

BAD = "x\x1b[2J\x9b31m\x7f\u202egnp\u2066\u2028\U000e0041é"
"""Sequences of C0 and C1, marks of direction, a line separator, an invisible tag; and a harmless letter."""


def driving(text: str) -> str:
    """What of a text a terminal might obey."""
    return "".join(letter for letter in text if not letter.isprintable() and letter != "\n")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with all kinds of names in it, in a directory of such a name."""
    config = KVCacheConfig(
        max_sequence_length=32, tokens_per_block=4, primary_blocks=8, secondary_blocks=4, model_variant=BAD
    )
    path = tmp_path_factory.mktemp("logs") / f"log{BAD}"
    with KVCacheManager(config, log=path) as manager:
        for number in range(4):
            name = f"{number}{BAD}"
            tokens = [number] * 8 + [9]
            manager.add_sequences([Request(name, tokens, cache_salt=BAD, lora_name=BAD)])
            manager.store_context_blocks(name, 9)
            with pytest.raises(OutOfBlocks):
                manager.add_sequence(f"refused{BAD}", list(range(25)))
            manager.fork(name, f"child{name}")
            manager.remove_sequence(name)
            manager.remove_sequence(f"child{name}")
            manager.flush()
    return path


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "JSON"])
def test_logs(kvcache: Kvcache, log: Path, form: list[str], tmp_path: Path) -> None:
    """All that is said of a log's requests, adapters and settings, and of where it lies."""
    said = ""
    for command in (
        ("events", log),
        ("replay", log, "--verify"),
        ("match", log, "--request", f"3{BAD}"),
        ("explain", log, "--request", f"3{BAD}"),
        ("audit", log),
        ("audit", log.parent, "--jobs", 1),
        ("curve", log),
        ("whatif", log, "--set", "primary_blocks=5", "--jobs", 1),
        ("whatif", log, "--set", f"stop_retention.{BAD}=60:2min", "--jobs", 1),
        ("diff", log, log),
        ("log", "info", log),
        ("log", "verify", log),
        ("publish", log, "--once", "--sink", f"file:{tmp_path}/out.jsonl"),
    ):
        done = kvcache(*command, *form)
        assert done.code in (0, 1), (command[0], done.err)
        assert not driving(done.out + done.err), command[0]
        said += done.out
    assert "\\u202e" in said
    assert not driving((tmp_path / "out.jsonl").read_text())


@pytest.mark.parametrize("url", ["stdout:", "stdout:?format=jsonl", "stdout:?format=trtllm"])
def test_what_an_engine_prints(capfd: pytest.CaptureFixture[str], url: str) -> None:
    """The same as it happens; JSON stays what it was."""
    config = KVCacheConfig(max_sequence_length=32, tokens_per_block=4, primary_blocks=8)
    with KVCacheManager(config, sinks=[url]) as manager:
        manager.add_sequence(BAD, [1, 2, 3, 4, 5], lora_name=BAD)
        manager.store_context_blocks(BAD, 5)
        manager.remove_sequence(BAD)
    out = capfd.readouterr().out
    assert out
    assert not driving(out)
    if "jsonl" in url:
        events = [event for line in out.splitlines() for event in json.loads(line)["events"]]
        assert BAD in {event.get("request_id") for event in events}


def foreign() -> Iterator[bytes]:
    """What an engine may send."""
    yield batch(stored(1, 2, lora_name=BAD, medium=BAD), stored(3, extra_keys=[[BAD], [BAD]]))
    yield batch(removed(2, medium=BAD), {"type": f"Later{BAD}", BAD: BAD})


@pytest.mark.parametrize("form", [[], ["--json"], ["--table"], ["--table", "--json"]], ids=" ".join)
def test_live_streams(kvcache: Kvcache, form: list[str]) -> None:
    """What is heard of an engine."""
    with Publisher() as publisher, replaying(dict(enumerate(foreign()))) as server:
        done = kvcache("subscribe", publisher.endpoint, "--replay", server.endpoint, "--count", 2, *form)
    assert done.code == 0
    assert done.out
    assert not driving(done.out + done.err)


def test_recorded_streams(kvcache: Kvcache, tmp_path: Path) -> None:
    """What was recorded of one."""
    log = tmp_path / f"taps{BAD}"
    with Publisher() as publisher, Tap([Endpoint(publisher.endpoint)], log) as tap:
        publisher.wait_subscribed()
        for number, payload in enumerate(foreign()):
            publisher.send(number, payload, f"kv@{BAD}@{BAD}".encode())
        work_until(tap, lambda: tap.recorder.batches == 2)
    prompt = tmp_path / "prompt"
    prompt.write_text("1 2 2 3")
    for command in (("events", log), ("replay", log), ("audit", log), ("match", log, "--tokens", prompt)):
        for form in ([], ["--json"]):
            done: Any = kvcache(*command, *form)
            assert done.code == 0
            assert not driving(done.out + done.err), (command[0], form)


def test_tracebacks(kvcache: Kvcache) -> None:
    """Those of `-v` repeat what an error says."""
    done = kvcache("-v", "replay", f"/nowhere{BAD}")
    assert "Traceback" in done.err
    assert not driving(done.err)
