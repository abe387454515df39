"""`kvcache match`: what a prompt would reuse in a recorded state."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from events.log import LogReader, LogWriter
from events.packed import unpack_i32
from events.types import CacheCreated, SequenceAdded
from kvcache import KVCacheConfig, KVCacheManager
from tests.support.commands import Kvcache, run_log


def admissions(log: Path) -> dict[int, tuple[int, SequenceAdded]]:
    return {
        int(event.request_id): (batch.seq, event)
        for batch in LogReader(log)
        for event in batch.events
        if isinstance(event, SequenceAdded)
    }


def found(done: Any) -> dict[str, Any]:
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.fixture
def salted(tmp_path: Path) -> Path:
    """A log with one prompt of 10 tokens, cached in a namespace of its own; blocks have 4 tokens."""
    config = KVCacheConfig(max_sequence_length=64, tokens_per_block=4, primary_blocks=8)
    with KVCacheManager(config, log=tmp_path / "salted") as manager:
        manager.add_sequence("r", range_of(10), lora_id=7, lora_name="law", cache_salt="pepper")
        manager.store_context_blocks("r", 10)
        manager.remove_sequence("r")
        manager.flush()
    return tmp_path / "salted"


def range_of(count: int) -> list[int]:
    return list(range(100, 100 + count))


class TestRequest:
    """Prompts that the log holds."""

    def test_before_its_admission(self, kvcache: Kvcache, log: Path) -> None:
        """In the state just before its admission, a prompt matches what it then reused, level by level."""
        added = admissions(log)
        batches = [seq for seq, _ in added.values()]
        checked = 0
        for request_id, (seq, event) in added.items():
            if batches.count(seq) > 1:
                continue  # admitted together: one may have evicted what the other would have found
            done = found(kvcache("match", log, "--request", request_id, "--at", seq - 1, "--json"))
            assert done["prompt_tokens"] == event.num_tokens
            assert done["reused_tokens_primary"] == event.reused_primary[0]
            assert done["reused_tokens_secondary"] == event.reused_secondary[0]
            assert done["reused_tokens_partial"] == event.reused_partial
            checked += done["reused_tokens"] > 0
        assert checked > 5

    def test_at_the_end(self, kvcache: Kvcache, log: Path) -> None:
        """Without --at the last state counts; the last admission's prompt is cached there but for its last token."""
        request_id, (_, event) = max(admissions(log).items(), key=lambda item: item[1][0])
        done = found(kvcache("match", log, "--request", request_id, "--json"))
        assert done["reused_tokens"] == event.num_tokens - 1

    def test_blocks(self, kvcache: Kvcache, log: Path) -> None:
        """Every matching block is listed with its place and name, in order."""
        done = found(kvcache("match", log, "--request", 12, "--json"))
        blocks = done["blocks"]
        assert [block["block"] for block in blocks] == list(range(len(blocks)))
        assert (
            sum(block["num_tokens"] for block in blocks) + done["reused_tokens_partial"]
            == done["reused_tokens"]
        )
        assert all(
            len(block["name"]) == 16 and block["level"] in ("primary", "secondary") for block in blocks
        )

    def test_people(self, kvcache: Kvcache, log: Path) -> None:
        """People get a summary and a table with a row per block."""
        done = kvcache("match", log, "--request", 12)
        numbers = found(kvcache("match", log, "--request", 12, "--json"))
        assert done.out.startswith(
            f"request 12: {numbers['prompt_tokens']:,} prompt tokens, looked up after batch "
        )
        assert f"would reuse    {numbers['reused_tokens']:,} tokens" in done.out
        rows = done.out.split("name\n")[1].splitlines()
        assert len(rows) == len(numbers["blocks"]) + len(numbers["partials"])
        assert rows[1].split()[:3] == ["1", "16–31", numbers["blocks"][1]["level"]]

    def test_window_that_slides(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """Of each window the blocks that it still sees, the partial one behind them, and why they are not all."""
        settings = KVCacheConfig(
            max_sequence_length=64, tokens_per_block=4, primary_blocks=16, max_attention_window=(8, 64)
        )
        with KVCacheManager(settings, log=tmp_path / "windows") as manager:
            manager.add_sequence("r", range_of(22))
            manager.store_context_blocks("r", 22)
            manager.remove_sequence("r")
        done = kvcache("match", tmp_path / "windows", "--request", "r")
        rows = [line.split()[:3] for line in done.out.split("name\n")[1].splitlines()]
        narrow = [["3", "12–15", "8"], ["4", "16–19", "8"], ["5", "20–20", "8"]]
        assert rows[:3] == narrow
        assert [row[0] for row in rows[3:]] == ["0", "1", "2", "3", "4", "5"]
        assert {row[2] for row in rows[3:]} == {"64"}
        assert "  window 8       does not need blocks before 3 from there on\n" in done.out
        assert "window 64" not in done.out
        blocks = found(kvcache("match", tmp_path / "windows", "--request", "r", "--json"))["blocks"]
        assert [each["block"] for each in blocks if each["window"] == 8] == [3, 4]

    def test_unknown(self, kvcache: Kvcache, log: Path) -> None:
        """A request that never came is a wrong request."""
        done = kvcache("match", log, "--request", "nobody")
        assert done.code == 2
        assert "request 'nobody' was never admitted in the log" in done.err

    def test_beyond_the_end(self, kvcache: Kvcache, log: Path) -> None:
        """So is a batch that the log does not reach."""
        assert kvcache("match", log, "--request", 1, "--at", 10**6).code == 2

    def test_log_without_tokens(self, kvcache: Kvcache, tmp_path: Path, log: Path) -> None:
        """A log without tokens says that it has no prompts, and matches given ones on full blocks."""
        bare = run_log(
            tmp_path / "bare", "--set", "log.record_tokens=false",
            "--primary-blocks", 120, "--secondary-blocks", 100, "--concurrency", 3,
        )  # fmt: skip
        done = kvcache("match", bare, "--request", 12)
        assert done.code == 2
        assert "the log does not record tokens" in done.err
        assert "--tokens" in done.err
        prompt = unpack_i32(admissions(log)[12][1].tokens)
        file = tmp_path / "prompt.json"
        file.write_text(json.dumps(prompt.tolist()))
        by_key = found(kvcache("match", bare, "--tokens", file, "--json"))
        by_token = found(kvcache("match", log, "--tokens", file, "--json"))
        assert by_key["blocks"] == by_token["blocks"]
        assert len(by_key["blocks"]) > 10

    def test_items(self, kvcache: Kvcache, images: Path) -> None:
        """A prompt with an image is looked up by what it stood for, though its symbols mean another image there."""
        tokens = {name: event.tokens for name, (_, event) in admissions(images).items()}
        assert tokens[0] == tokens[2]
        seqs = {name: seq for name, (seq, _) in admissions(images).items()}
        for request_id, at, reused in ((0, seqs[0], 8), (0, seqs[2], 0), (2, seqs[0], 0), (2, seqs[2], 8)):
            done = found(kvcache("match", images, "--request", request_id, "--at", at + 1, "--json"))
            assert done["reused_tokens"] == reused, (request_id, at)

    def test_namespace_is_the_requests_own(self, kvcache: Kvcache, salted: Path) -> None:
        """A request is looked up in its namespace; giving another one is refused."""
        assert found(kvcache("match", salted, "--request", "r", "--json"))["reused_tokens"] == 9
        refused = kvcache("match", salted, "--request", "r", "--lora-id", 1)
        assert refused.code == 2
        assert "require --tokens" in refused.err


class TestTokens:
    """Prompts from a file."""

    @pytest.mark.parametrize(
        "text", ["[100, 101, 102, 103, 104]", "100 101\n102\t103 104\n", "100,101, 102,103,104"]
    )
    def test_forms(self, kvcache: Kvcache, salted: Path, tmp_path: Path, text: str) -> None:
        """A JSON list and plain numbers are the same prompt; its namespace decides what it finds."""
        (tmp_path / "p").write_text(text)
        ours = ("--lora-id", 7, "--lora-name", "law", "--cache-salt", "pepper")
        args = ("match", salted, "--tokens", tmp_path / "p", "--json")
        assert found(kvcache(*args, *ours))["reused_tokens"] == 4
        assert found(kvcache(*args))["reused_tokens"] == 0
        assert found(kvcache(*args, *ours[:4]))["reused_tokens"] == 0

    def test_in_place_of_a_file(self, kvcache: Kvcache, salted: Path) -> None:
        """The ids themselves are the prompt, too, and are not repeated."""
        done = kvcache("match", salted, "--tokens", "4711,4712,4713")
        assert (done.code, done.err) == (0, "")
        assert done.out.startswith("the given prompt: 3 prompt tokens, looked up after batch ")
        assert "4711" not in done.out

    def test_stdin(self, kvcache: Kvcache, salted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """`-` reads the prompt from stdin."""
        monkeypatch.setattr("sys.stdin", io.StringIO(" ".join(map(str, range_of(6)))))
        assert found(kvcache("match", salted, "--tokens", "-", "--json"))["prompt_tokens"] == 6

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("4711 x", "does not contain token ids"),
            ("[4711, ", "does not contain token ids"),
            ('{"a": 4711}', "does not contain token ids"),
            ("", "contains no token ids"),
            ("[]", "contains no token ids"),
            ("[4711, -1]", "tokens at position 1: a token id must not be negative"),
            ("[4711, 1.5]", "tokens at position 1: a token id must be an integer"),
            (f"4711 {2**31}", "tokens at position 1: a token id must be below 2**31"),
        ],
    )
    def test_wrong_prompts(
        self, kvcache: Kvcache, salted: Path, tmp_path: Path, text: str, says: str
    ) -> None:
        """What is no prompt is refused without repeating any of it."""
        (tmp_path / "p").write_text(text)
        done = kvcache("match", salted, "--tokens", tmp_path / "p")
        assert done.code == 2
        assert says in done.err
        assert "4711" not in done.err.replace(str(tmp_path), "")

    def test_binary_file(self, kvcache: Kvcache, salted: Path, tmp_path: Path) -> None:
        """A file that is no text is refused."""
        (tmp_path / "p").write_bytes(np.arange(100, dtype=np.int32).tobytes() + b"\xff")
        assert "does not contain token ids" in kvcache("match", salted, "--tokens", tmp_path / "p").err

    def test_no_end(self, kvcache: Kvcache, salted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What goes on and on is not read for ever, and refused."""

        class Endless(io.StringIO):
            def read(self, size: int | None = -1, /) -> str:
                assert size is not None
                assert size > 0
                return "0 " * (size // 2 + 1)

        monkeypatch.setattr("sys.stdin", Endless())
        done = kvcache("match", salted, "--tokens", "-")
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert "stdin has more than 67,108,864 characters" in done.err
        monkeypatch.setattr("kvcache.cli.options.LONGEST_TEXT", 1000)
        assert "/dev/zero has more than 1,000" in kvcache("match", salted, "--tokens", "/dev/zero").err

    def test_missing_file(self, kvcache: Kvcache, salted: Path) -> None:
        """A file that is not there is named."""
        done = kvcache("match", salted, "--tokens", "/nowhere/p")
        says = "/nowhere/p is neither a file nor token ids, such as 5,6,7"
        assert (done.code, done.err) == (2, f"kvcache: error: {says}\n")

    def test_one_prompt_is_needed(self, kvcache: Kvcache, salted: Path) -> None:
        """Neither both ways of giving a prompt, nor none."""
        assert kvcache("match", salted).code == 2
        assert kvcache("match", salted, "--request", "r", "--tokens", "p").code == 2


@pytest.mark.parametrize(
    ("settings", "reused"),
    [({}, 10), ({"enable_partial_reuse": False}, 8), ({"enable_block_reuse": False}, 0)],
)
def test_settings_of_the_cache_count(
    kvcache: Kvcache, tmp_path: Path, settings: dict[str, Any], reused: int
) -> None:
    """A cache that reuses nothing, or no parts of blocks, would not reuse them here either."""
    config = KVCacheConfig(max_sequence_length=64, tokens_per_block=4, primary_blocks=8, **settings)
    with KVCacheManager(config, log=tmp_path / "log") as manager:
        manager.add_sequence("r", range_of(13))
        manager.store_context_blocks("r", 13)
        manager.flush()
    (tmp_path / "p").write_text(json.dumps(range_of(11)))
    done = kvcache("match", tmp_path / "log", "--tokens", tmp_path / "p", "--json")
    assert found(done)["reused_tokens"] == reused


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"config": "{"}, "settings of a cache are not a JSON object"),
        ({"config": "[]"}, "settings of a cache are not a JSON object"),
        ({"groups": ()}, "a cache has no group"),
        ({"key_bytes": 2**40}, f"keys cannot have {2**40} bytes"),
    ],
)
def test_lying_logs(
    kvcache: Kvcache, salted: Path, tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    """A log of a cache that cannot have been is wrong data, for every command that folds it."""
    with LogWriter(tmp_path / "lie", fsync="never") as lie:
        for batch in LogReader(salted):
            events = [
                replace(event, **change) if isinstance(event, CacheCreated) else event
                for event in batch.events
            ]
            lie.append(replace(batch, events=tuple(events)))
    for command in (("match", tmp_path / "lie", "--request", "r"), ("replay", tmp_path / "lie")):
        done = kvcache(*command)
        assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
        assert says in done.err


def test_lookup_that_fails_is_wrong_data(
    kvcache: Kvcache, salted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a state is such that a prompt cannot be looked up in it, that is one line, too."""

    def fail(*_: object, **__: object) -> None:
        raise IndexError

    monkeypatch.setattr("kvcache.cli.match.lookup", fail)
    done = kvcache("match", salted, "--request", "r")
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert "IndexError" in done.err
