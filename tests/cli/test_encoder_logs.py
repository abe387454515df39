"""Logs of encoder-decoder models: what readers tell of their prompts is what they tell of a model without an encoder.

The same requests are played twice: with encoders' inputs, and in a cache without cross attention with a salt for each
input instead. Prompts are shared alike in both.
"""

from __future__ import annotations

import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from events.feed.changes import Removed, Stored
from events.feed.fold import Feed
from events.formats.vllm import encode_arrays, encode_batch, encode_sglang
from events.log import LogReader
from events.types import CROSS_WINDOW, SequenceAdded
from kvcache.config import LogConfig
from kvcache.errors import CapacityError
from kvcache.fold.state import resident_names
from kvcache.inputs import Request
from kvcache.manager import KVCacheManager, Substitutes
from kvcache.replay import replay
from sinks.render import StreamNames, render_event
from tests.support.commands import Kvcache
from tests.support.engines import strategies
from tests.support.engines.lives import NoBytes
from tests.support.engines.simulated import LateCopier
from tests.support.feeds.strict import resident_in


class Ticking:
    """A wall clock."""

    now = 10**18

    def __call__(self) -> int:
        self.now += 10**6
        return self.now


def play(directory: Path, seed: int, *, encoder: bool, record_tokens: bool = True) -> KVCacheManager:
    """Random requests, all of which find room for what their encoders read; returns the manager, closed."""
    rng = random.Random(seed)
    settings = strategies.config(
        primary_blocks=(12, 400) if encoder else 12,
        secondary_blocks=(6, 0) if encoder else 6,
        cross_kv_cache_fraction=0.5 if encoder else None,
        max_attention_window=rng.choice([None, 6]),
        max_pinned_share=1.0,
        event_buffer_max_size=4096,
        log=LogConfig(fsync="never", overflow="block", record_tokens=record_tokens),
    )
    copier = LateCopier(NoBytes(), 2)
    manager = KVCacheManager(
        settings, copier=copier, log=directory, substitutes=Substitutes(wall_ns=Ticking())
    )
    running: list[int] = []
    for number in range(60):
        command = rng.choice(["add", "add", "compute", "decode", "fork", "remove", "pin", "clear", "flush"])
        names = rng.sample(running, min(len(running), 2))
        prompt, read = [rng.randrange(2)] * rng.randint(1, 9), [rng.randrange(2)] * rng.randint(1, 5)
        last, share = rng.randint(0, 9), rng.random()
        with suppress(CapacityError):
            if command == "add":
                given: dict[str, Any] = {"encoder_tokens": read} if encoder else {"cache_salt": str(read)}
                manager.add_sequences([Request(number, [*prompt, 5], **given)])
                running.append(number)
            elif command == "fork" and names:
                manager.fork(names[0], number)
                running.append(number)
            elif command == "pin" and names:
                manager.pin(names[0])
            elif command == "clear" and share < 0.2:
                manager.clear()
            elif command == "decode" and names:
                manager.add_tokens(names, [1] * len(names))
            elif command == "remove" and names:
                running.remove(names[0])
                manager.remove_sequence(names[0])
            elif command == "flush":
                manager.poll()
                manager.flush()
            for name in names if command == "compute" else ():
                if encoder and share < 0.8:
                    manager.store_encoder_blocks(name)
                length = manager._blocks.running.sequence(name).num_tokens
                manager.store_context_blocks(name, min(last, length))
        manager.start_transfers()
        copier.tick()
    manager.close()
    return manager


@pytest.fixture(params=[1, 2, 3, 4])
def logs(request: Any, tmp_path: Path) -> tuple[Path, Path]:
    """With an encoder, and with salts instead."""
    play(tmp_path / "encoder", request.param, encoder=True)
    play(tmp_path / "salts", request.param, encoder=False)
    return tmp_path / "encoder", tmp_path / "salts"


def result(kvcache: Kvcache, *args: Any) -> Any:
    done = kvcache(*args, "--json")
    assert (done.code, done.err) == (0, "")
    return json.loads(done.out)


def without(reported: Any, *keys: str) -> Any:
    """JSON without what must differ: names of blocks and salts are others, and so are sizes."""
    if isinstance(reported, dict):
        return {key: without(value, *keys) for key, value in reported.items() if key not in keys}
    return [without(value, *keys) for value in reported] if isinstance(reported, list) else reported


def test_audits_report_the_same(kvcache: Kvcache, logs: tuple[Path, Path]) -> None:
    """Why prompt tokens were computed, and what was evicted, is the same to the last number."""
    reported = [
        without(result(kvcache, "audit", log), "log", "end", "name", "salt_digest", "event", "handle")
        for log in logs
    ]
    assert reported[0] == reported[1]


def test_curves_report_the_same(kvcache: Kvcache, logs: tuple[Path, Path]) -> None:
    """What prompts would reuse in other sizes is the same."""
    reported = [without(result(kvcache, "curve", log), "log", "log_id", "end") for log in logs]
    assert reported[0] == reported[1]


def test_explanations_report_the_same(kvcache: Kvcache, logs: tuple[Path, Path]) -> None:
    """Why each request reused what it did is the same."""
    admitted = {
        e.request_id for batch in LogReader(logs[0]) for e in batch.events if isinstance(e, SequenceAdded)
    }
    assert admitted
    for request_id in admitted:
        reported = [
            without(
                result(kvcache, "explain", log, "--request", request_id),
                "log",
                "end",
                "name",
                "salt_digest",
                "handle",
            )
            for log in logs
        ]
        assert reported[0] == reported[1]


def test_other_commands_read_such_logs(kvcache: Kvcache, logs: tuple[Path, Path], tmp_path: Path) -> None:
    """They show what there is, or say that they do not play encoders."""
    log, other = logs
    for args in (
        ("replay", log, "--verify"),
        ("events", log),
        ("diff", log, log),
        ("export", log, "--to", "sqlite", "-o", tmp_path / "tables.sqlite"),
        ("report", log, "-o", tmp_path / "report.html"),
    ):
        done = kvcache(*args)
        assert (done.code, "error" in done.err) == (0, False), args
    assert kvcache("diff", log, other).code == 1
    done = kvcache("whatif", log)
    assert (done.code, "its model has an encoder" in done.err) == (2, True)
    done = kvcache("run", "--set", "cross_kv_cache_fraction=0.5", "--log", tmp_path / "run")
    assert (done.code, "an encoder-decoder model is not supported" in done.err) == (2, True)


def test_match_needs_the_input(kvcache: Kvcache, logs: tuple[Path, Path], tmp_path: Path) -> None:
    """A request's prompt is looked up among those with its input; a prompt alone says nothing of any."""
    log, other = logs
    request_id = next(
        e.request_id for batch in LogReader(log) for e in batch.events if isinstance(e, SequenceAdded)
    )
    reported = [
        without(result(kvcache, "match", each, "--request", request_id), "log", "end", "name", "fingerprint")
        for each in (log, other)
    ]
    assert reported[0] == reported[1]
    (tmp_path / "tokens").write_text("1 1 1")
    done = kvcache("match", log, "--tokens", tmp_path / "tokens")
    assert (done.code, "depends on the encoder's input" in done.err) == (2, True)


@pytest.mark.parametrize("seed", range(4))
def test_feeds_report_both_kinds_of_blocks(seed: int, tmp_path: Path) -> None:
    """What routers know is what is cached in each group, from the start, and from a state in the middle on."""
    play(tmp_path / "log", seed, encoder=True)
    feed, late = Feed(), Feed()
    late.lost = True
    cross: set[tuple[bytes, bytes]] = set()
    for batch in LogReader(tmp_path / "log"):
        changes = feed.fold(batch)
        late.fold(batch)
        state = replay(tmp_path / "log", batch.seq).state
        assert state.created is not None
        last = len(state.groups) - 1
        cross |= {
            (change.names, change.tokens)
            for change in changes
            if isinstance(change, Stored) and change.group == last
        }
        for group in range(last + 1):
            for level in (0, 1):
                known = {int.from_bytes(name, "big") for name in resident_in(feed, group, level)}
                assert known == resident_names(state, level, group)
        reported = encode_batch(changes, 0.0, 0, feed.groups)
        assert (b"cross_attention" in reported) == any(
            isinstance(each, Stored) and each.group == last for each in changes
        )
        of_cross = [each for each in changes if isinstance(each, Stored | Removed) and each.group == last]
        assert b"BlockStored" not in encode_sglang(of_cross, 0.0, 0, feed.groups)
        assert b"BlockRemoved" not in encode_sglang(of_cross, 0.0, 0, feed.groups)
        arrays = encode_arrays(of_cross, 0.0, 0, feed.groups)
        assert (b"cross_attention" in arrays) == any(isinstance(each, Stored) for each in of_cross)
    assert cross


def test_dicts_report_cross_attention_as_window_0(tmp_path: Path) -> None:
    """TensorRT-LLM's dicts tell inputs' blocks apart from those of prompts by their window."""
    manager = play(tmp_path / "log", 1, encoder=True)
    dicts = manager.get_latest_events()
    reported = {each["window_size"] for each in dicts if each["data"]["type"] == "stored"}
    assert CROSS_WINDOW in reported
    assert len(reported) == 2


def test_lines_name_who_reads_an_input(tmp_path: Path) -> None:
    """An input has a handle in all lines, also for who begins with an exported state; one line says whose it is."""
    settings = strategies.config(primary_blocks=(8, 6), cross_kv_cache_fraction=0.5)
    with KVCacheManager(settings, log=tmp_path) as manager:
        manager.add_sequence("a", [1, 2], encoder_tokens=[1, 2, 3])
        manager.store_encoder_blocks("a")
        manager.flush()
        manager.remove_sequence("a")
    known, lines = StreamNames(), []
    for batch in LogReader(tmp_path):
        for event in batch.events:
            known.see(event)
            lines.append(render_event(event, known))
    assert any(line.startswith("EncoderAdded      #2 of request=a group=1 tokens=3") for line in lines)
    assert any(line.startswith("BlocksStored      #2 group=1") for line in lines)
    assert any(line.startswith("EncoderRemoved    #2 group=1 freed=0") for line in lines)


def test_one_request_has_the_events_of_its_input(kvcache: Kvcache, tmp_path: Path) -> None:
    """`kvcache events --request` shows what happens to the blocks of its input, and of no other."""
    settings = strategies.config(primary_blocks=(8, 8), cross_kv_cache_fraction=0.5)
    with KVCacheManager(settings, log=tmp_path) as manager:
        for name in "ab":
            manager.add_sequence(name, [1, 2], encoder_tokens=[ord(name), 2, 3])
            manager.store_encoder_blocks(name)
    done = kvcache("events", tmp_path, "--request", "b", "--json")
    events = [json.loads(line) for line in done.out.splitlines()]
    kinds = [event["type"] for each in events for event in each.get("events", [each])]
    assert kinds.count("EncoderAdded") == 1
    assert kinds.count("BlocksStored") == 1
