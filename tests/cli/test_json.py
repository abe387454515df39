"""What all commands say in JSON: the same things in the same words, as docs/reference/json.md has them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from events.structs import LEVEL_NAMES
from kvcache.config import KVCacheConfig
from tests.support.answers import AGES, assert_documented
from tests.support.commands import TRACE, Done, Kvcache, run_log
from tests.support.feeds.publisher import CLEARED, Publisher, batch, removed, replaying, stored
from tests.support.places import ROOT

NOW = 1_790_000_000.25
NAME = re.compile("[0-9a-f]{16}")
TIME = re.compile(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z")
NUMBERS = ("seq", "first_seq", "last_seq", "index", "handle")
PER_LEVEL = ("num_blocks", "blank_slots")
PER_GROUP = ("removed", "num_cached")
"""For each group, one value for each level."""
NAMING = ("name", "names", "parent", "parents", "block_hashes", "parent_block_hash")


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """The object, and all inside it; not the settings, which have names of their own."""
    if isinstance(value, dict):
        yield value
        for key, inner in value.items():
            if key != "config":
                yield from objects(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from objects(inner)


def faults(value: Any) -> Iterator[str]:
    """What is said in other words than all JSON has for it."""
    for found in objects(value):
        for key, said in found.items():
            if not _as_documented(key, said):
                yield f"{key}: {said!r}"


def _as_documented(key: str, said: Any) -> bool:
    if said is None:
        return key not in ("level", "config")
    if key == "ts":
        return type(said) is int and 10**18 < said < 10**19
    if key == "time":
        return TIME.fullmatch(said) is not None
    if key == "level" or key.endswith("_level"):
        return said in LEVEL_NAMES
    if key in (*PER_LEVEL, *PER_GROUP):
        groups = said if key in PER_GROUP else [said]
        return bool(groups) and all(isinstance(each, dict) and tuple(each) == LEVEL_NAMES for each in groups)
    if key in NAMING:
        return all(NAME.fullmatch(name) for name in (said if isinstance(said, list) else [said]))
    if key in ("tokens", "counts", "pages"):
        return isinstance(said, list) and said != []
    if key == "config":
        return isinstance(said, dict) and set(said) == set(KVCacheConfig.model_fields)
    if key.endswith("fingerprint"):
        return re.fullmatch("[0-9a-f]{64}", said) is not None
    return type(said) is int if key in NUMBERS or key.startswith("num_") else True


def lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


def played(kvcache: Kvcache, place: Path, *options: Any) -> Any:
    """A run with all that it can say, and its log and file of events."""
    args = ("--no-pools", "--tokens-per-block", 16, "--primary-blocks", 60, "--secondary-blocks", 40)
    done = kvcache("run", TRACE, *args, "--check-feed", "--log", place / "log", "--json", *options)
    assert done.code == 0
    return json.loads(done.out)


def said_by_all(kvcache: Kvcache, place: Path) -> dict[str, list[Any]]:
    """What each command has to say of one log."""
    summary = played(kvcache, place, "--sink", f"file:{place}/e.jsonl")

    def answer(*args: Any) -> Done:
        done = kvcache(*args, "--json")
        assert done.code == 0
        return done

    with Publisher() as publisher, replaying({1: batch(stored(1, 2), removed(2), CLEARED, ts=NOW)}) as server:
        received = answer("subscribe", publisher.endpoint, "--replay", server.endpoint, "--count", 1)
    log = place / "log"
    return {
        "run": [summary],
        "file": lines((place / "e.jsonl").read_text()),
        "events": lines(answer("events", log).out),
        "events without tokens": lines(answer("events", log, "--no-tokens").out),
        "replay": [json.loads(answer("replay", log, "--verify").out)],
        "match": [json.loads(answer("match", log, "--request", 3, "--at", 40).out)],
        "who": [json.loads(answer("who", log, "--slot", 3, "--at", 40).out)],
        "explain": [json.loads(answer("explain", log, "--request", 9).out)],
        "audit": [json.loads(answer("audit", log).out)],
        "curve": [json.loads(answer("curve", log, "--bound", "30").out)],
        "diff": [json.loads(answer("diff", log, log).out)],
        "publish": lines(answer("publish", log, "--once", "--sink", f"file:{place}/p.jsonl").out),
        "subscribe": lines(received.out),
        "doctor": [json.loads(answer("doctor").out)],
    }


@pytest.mark.usefixtures("stand_in_for_torch")
def test_one_vocabulary(kvcache: Kvcache, tmp_path: Path) -> None:
    """All commands and sinks say levels, times, names, counts, settings and what is missing in one way."""
    said = said_by_all(kvcache, tmp_path)
    assert {source: list(faults(values))[:3] for source, values in said.items()} == {
        source: [] for source in said
    }
    keys = {key for values in said.values() for found in objects(values) for key in found}
    # Each was there to be looked at.
    asked = {
        *NUMBERS,
        *PER_LEVEL,
        *PER_GROUP,
        *NAMING,
        "ts",
        "time",
        "level",
        "to_level",
        "config",
        "tokens",
        "keys",
    }
    assert asked - keys == {"removed"}  # of CacheCleared, which no run has
    assert said["match"][0]["blocks"]
    stored_names = {
        name for line in said["events"] if line["type"] == "BlocksStored" for name in line["names"]
    }
    assert {block["name"] for block in said["match"][0]["blocks"]} <= stored_names
    config = next(line["config"] for line in said["events"] if line["type"] == "CacheCreated")
    assert KVCacheConfig(**config).tokens_per_block == 16
    assert all(line["tokens"] is None for line in said["events without tokens"] if "tokens" in line)


def test_blocks_without_names(kvcache: Kvcache, tmp_path: Path) -> None:
    """Where blocks have no names, null stands in their place."""
    played(kvcache, tmp_path, "--limit", 20, "--set", "block_hash=none")
    events = lines(kvcache("events", tmp_path / "log", "--json").out)
    found = [line for line in events if line["type"] == "BlocksStored"]
    assert found
    assert all(line[key] is None for line in found for key in ("names", "keys", "parent"))
    done = kvcache("match", tmp_path / "log", "--request", 3, "--at", 40, "--json")
    assert {block["name"] for block in json.loads(done.out)["blocks"]} == {None}


@pytest.mark.parametrize(
    "asked",
    [
        ("events", "--request", "nobody"),
        ("events", "--block", "0123456789abcdef"),
        ("events", "--type", "Gap"),
        ("events", "--since", 99999),
        ("events", "--since", "+99999"),
        ("events", "--until", "2020-01-01"),
        ("events", "--at", "2020-01-01"),
        ("events", "--handle", 99999),
        ("match", "--request", "nobody"),
        ("match", "--request", 3, "--at", 99999),
        ("match", "--request", 3, "--at", "+99999"),
        ("replay", "--at", 99999),
        ("explain", "--request", "nobody"),
        ("audit", "--since", 99999),
        ("audit", "--until", "2020-01-01"),
        ("replay", "--at", "+99999"),
    ],
)
def test_nothing_found(kvcache: Kvcache, log: Path, asked: tuple[Any, ...]) -> None:
    """Whoever asks for what is not in the log gets exit code 2, one error, and no result."""
    command, *conditions = asked
    for form in ((), ("--json",)):
        done = kvcache(command, log, *conditions, *form)
        assert (done.code, done.out, done.err.count("kvcache: error: ")) == (2, "", 1)


@pytest.fixture(scope="module")
def small_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of a run that moved blocks. Not to be changed."""
    sizes = ("--primary-blocks", 60, "--secondary-blocks", 40, "--set", "max_sequence_length=900")
    return run_log(tmp_path_factory.mktemp("small") / "log", *sizes)


@pytest.mark.parametrize(
    "command", ["replay", "match", "explain", "audit", "curve", "diff", "publish", "doctor"]
)
@pytest.mark.usefixtures("stand_in_for_torch")
def test_every_key_is_documented(kvcache: Kvcache, small_log: Path, tmp_path: Path, command: str) -> None:
    """Each command's table has each key that it says, and no other ones on top."""
    log = small_log
    of_log = [
        ("replay", log),
        ("match", log, "--request", 3),
        ("explain", log, "--request", 9),
        ("audit", log),
    ]
    args = {each[0]: each for each in [*of_log, ("curve", log)]}
    if command == "diff":
        hashed = ("--limit", 30, "--set", "block_hash=v2_sha256_64")
        args["diff"] = ("diff", log, run_log(tmp_path / "other", "--primary-blocks", 50, *hashed))
    state = ("--state", tmp_path, "--sink", f"file:{tmp_path}/p.jsonl")
    args["publish"] = ("publish", log, "--once", "--every", "60", *state)
    said = kvcache(*args.get(command, [command]), "--json")
    # Of reports one behind the other the last one has everything.
    result = said.out.splitlines()[-1] if command == "publish" else said.out
    assert_documented(command, json.loads(result))


def test_documented() -> None:
    """The page names what the tests look at."""
    page = (ROOT / "docs" / "reference" / "json.md").read_text(encoding="utf-8")
    words = (
        *AGES,
        *NUMBERS[:-1],
        "handle",
        *PER_LEVEL,
        *PER_GROUP,
        *NAMING,
        "ts",
        "time",
        "config",
        "tokens",
        "keys",
        "pages",
        "counts",
    )
    assert [word for word in words if f"`{word}`" not in page] == []
