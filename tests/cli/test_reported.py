"""What a service reported of its prompts, in `audit TRACE` and `curve TRACE`, beside what a plain count expects."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import TRACE, Kvcache

BLOCK = 4
HOUR = 3600


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    """Calls over three hours, minutes apart, that begin alike in part; some without what was cached, and some without
    usage.
    """
    dice, path = random.Random(1), tmp_path / "calls.jsonl"
    lines: list[dict[str, Any]] = []
    now = 1_700_000_000
    while len(lines) < 60:
        tokens = [dice.randrange(2) for _ in range(dice.randint(1, 7))] + [5] * dice.randint(1, 12)
        usage: dict[str, Any] = {"prompt_tokens": len(tokens), "completion_tokens": 2}
        if len(lines) % 5:
            usage["prompt_tokens_details"] = {"cached_tokens": dice.randrange(len(tokens))}
        line = {"timestamp": now, "prompt_token_ids": tokens, "response": {"usage": usage}}
        if len(lines) % 7 == 3:
            del line["response"]
        lines.append(line)
        now += dice.randint(100, 400)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def expected(path: Path) -> list[dict[str, int]]:
    """The hours, with what an unlimited cache has in whole blocks, by comparing each prompt with all before it."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    hours: dict[int, dict[str, int]] = {}
    for at, line in enumerate(lines):
        tokens = line["prompt_token_ids"]
        blocks = max(
            (
                size
                for before in lines[:at]
                for size in range((len(tokens) - 1) // BLOCK + 1)
                if size * BLOCK <= len(before["prompt_token_ids"])
                and tokens[: size * BLOCK] == before["prompt_token_ids"][: size * BLOCK]
            ),
            default=0,
        )
        details = line.get("response", {}).get("usage", {}).get("prompt_tokens_details")
        if details is not None:
            number = (line["timestamp"] - lines[0]["timestamp"]) // HOUR
            names = ("hour", "requests", "prompt_tokens", "reported_tokens", "unlimited_tokens")
            hour = hours.setdefault(number, dict.fromkeys(names, 0) | {"hour": number})
            hour["requests"] += 1
            hour["prompt_tokens"] += len(tokens)
            hour["reported_tokens"] += details["cached_tokens"]
            hour["unlimited_tokens"] += blocks * BLOCK
    return list(hours.values())


def found(kvcache: Kvcache, *args: Any) -> dict[str, Any]:
    done = kvcache(*args, "--tokens-per-block", BLOCK, "--json")
    assert (done.code, "warning" in done.err) == (0, False)
    reported: dict[str, Any] = json.loads(done.out)["reported"]
    return reported


def test_what_is_expected(kvcache: Kvcache, calls: Path) -> None:
    """By the hour: what an unlimited cache has, what this one has, which is as much if it is large enough and one comes
    after the other.
    """
    hours = expected(calls)
    assert len(hours) >= 3
    assert sum(hour["unlimited_tokens"] for hour in hours) > 100
    curve = found(kvcache, "curve", calls)
    assert curve["hours"] == hours
    usages = [line for line in map(json.loads, calls.read_text().splitlines()) if "response" in line]
    tokens = sum(len(line["prompt_token_ids"]) for line in usages)
    lengths = {"requests": len(usages), "differing": 0, "prompt_tokens": tokens, "reported_tokens": tokens}
    assert curve["lengths"] == lengths
    large = found(kvcache, "audit", calls, "--primary-blocks", 1000)
    assert large["lengths"] == lengths
    assert large["hours"] == [hour | {"cached_tokens": hour["unlimited_tokens"]} for hour in hours]
    small = found(kvcache, "audit", calls, "--primary-blocks", 7, "--secondary-blocks", 0)
    assert [{**hour, "cached_tokens": 0} for hour in small["hours"]] == [
        hour | {"cached_tokens": 0} for hour in hours
    ]
    cached = [hour["cached_tokens"] for hour in small["hours"]]
    assert 0 < sum(cached) < sum(hour["unlimited_tokens"] for hour in hours)


def test_what_is_printed(kvcache: Kvcache, tmp_path: Path) -> None:
    """A table, and for a curve a line; nothing of a trace that reports nothing."""
    trace = tmp_path / "calls.jsonl"
    usage = '{"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": %d}}'
    line = '{"timestamp": %d, "prompt_token_ids": [1,2,3,4,5,6,7,8,9], "usage": %s}\n'
    trace.write_text("".join(line % (1000 + 4000 * at, usage % (3 * at)) for at in range(2)))
    done = kvcache("audit", trace, "--tokens-per-block", BLOCK)
    assert done.out.endswith(TABLE)
    done = kvcache("curve", trace, "--tokens-per-block", BLOCK)
    assert done.out.endswith(
        "\nthe trace reports 16.7 % of the tokens of 2 prompts as cached; an unlimited cache would reuse 44.4 %, in "
        "full blocks\n"
    )
    assert "reported" not in kvcache("audit", TRACE).out + kvcache("curve", TRACE).out
    assert json.loads(kvcache("audit", TRACE, "--json").out)["reported"]["hours"] == []


TABLE = """
  hour  requests  prompt tokens  reported cached  this cache  unlimited  reported - this cache  of the prompts
  +0 h         1              9                0           0          0                     +0          +0.0 %
  +1 h         1              9                3           8          8                     -5         -55.6 %
this cache, unlimited: tokens in full blocks that the cache above would reuse, and an unlimited one
"""


@pytest.mark.parametrize("command", ["audit", "curve"])
def test_prompts_of_another_length(kvcache: Kvcache, calls: Path, command: str) -> None:
    """A warning says that the tokens may not be the service's."""
    lines = [json.loads(line) for line in calls.read_text().splitlines()]
    for line in lines[10:13]:
        if "response" in line:
            line["response"]["usage"]["prompt_tokens"] += 2
    calls.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = kvcache(command, calls, "--tokens-per-block", BLOCK)
    said = [line["response"]["usage"]["prompt_tokens"] for line in lines if "response" in line]
    ours = [len(line["prompt_token_ids"]) for line in lines if "response" in line]
    differing = sum(map(int.__ne__, said, ours))
    assert differing in (2, 3)
    assert (
        f"kvcache: warning: {differing} of {len(said)} prompts differ in length from usage.prompt_tokens "
        f"({sum(ours):,} tokens in all, and {sum(said):,} reported): the tokenizer or its chat template is not"
    ) in done.err
