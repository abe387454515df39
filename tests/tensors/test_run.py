"""`kvcache run`: what it plays, what it says, and what it refuses."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from cuda_ops.copier import Copy, FinishedTicket, Ticket
from events.log import LogReader
from events.subscribe.subscriber import Subscriber
from events.types import EpochStarted
from kvcache.cli import main
from kvcache.cli import run as run_module
from kvcache.replay import replay
from kvcache.workload.traces import TraceRequest
from tests.oracles.json_reader import from_json
from tests.support.commands import TRACE, Kvcache, Start, segments
from tests.support.logs.logs import frames_of
from tests.support.traces import write_trace

SMALL = (TRACE, "--no-pools", "--tokens-per-block", 16)
KEYS = {
    "requests", "prompt_tokens", "reused_tokens", "reused_tokens_primary", "reused_tokens_secondary", "hit_rate",
    "blocks_allocated", "blocks_stored", "blocks_removed", "blocks_offloaded", "blocks_onboarded", "events",
    "batches", "log_bytes", "seconds", "requests_per_second", "fingerprint", "replay_fingerprint", "refused",
    "checked_blocks", "copies", "step_us_p50", "step_us_p99", "sinks", "interrupted", "log",
}  # fmt: skip


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary logs go."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


def trace_of(path: Path, *requests: tuple[int, int]) -> Path:
    """A trace of requests with (prompt, output) tokens that share nothing."""
    write_trace(
        path,
        [
            TraceRequest(index, prompt, output, tuple(range(index * 1000, index * 1000 + -(-prompt // 512))))
            for index, (prompt, output) in enumerate(requests)
        ],
    )
    return path


@cache
def played(*args: str) -> str:
    """Return what `kvcache run` prints, with one run for all tests that only look at it."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["run", *args]) == 0
    return out.getvalue()


@pytest.fixture
def summary() -> dict[str, Any]:
    """The summary of `kvcache run` without anything."""
    return json.loads(played("--json"))


FEW_BLOCKS = (str(TRACE), "--tokens-per-block", "16", "--primary-blocks", "120", "--concurrency", "3")
"""A run with pools that offloads and onboards."""


class TestDefault:
    """`kvcache run` without anything: real pools, generated chats."""

    def test_everything_happens(self, summary: dict[str, Any]) -> None:
        """The generated chats make the cache reuse from both levels, offload, onboard and evict."""
        assert summary["requests"] > 400
        reused = ("reused_tokens_primary", "reused_tokens_secondary", "reused_tokens_partial")
        for key in (*reused, "blocks_offloaded", "blocks_onboarded", "blocks_removed"):
            assert summary[key] > 50, key
        assert 0.5 < summary["hit_rate"] < 1

    def test_bytes_were_checked(self, summary: dict[str, Any]) -> None:
        """Real pools are used, and reused blocks are compared."""
        assert summary["checked_blocks"] > 1000

    def test_replay_agrees(self, summary: dict[str, Any]) -> None:
        """The live fingerprint at the end equals the replayed one."""
        assert summary["fingerprint"] == summary["replay_fingerprint"]
        assert len(bytes.fromhex(summary["fingerprint"])) == 32
        assert summary["checkpoints_verified"] >= 1

    def test_keys(self, summary: dict[str, Any]) -> None:
        """The summary has all keys that programs rely on."""
        assert set(summary) >= KEYS
        assert summary["requests_per_second"] == pytest.approx(summary["requests"] / summary["seconds"])
        assert summary["interrupted"] is False


class TestOutput:
    """What people see, and what programs get."""

    def test_last_events_and_summary(self, kvcache: Kvcache) -> None:
        """Without a trace the last events are shown, then the summary."""
        done = kvcache("run", "--no-pools", "--limit", 20)
        assert done.code == 0
        assert "kvcache run: generated chats (seed 0)" in done.out
        events = done.out.split("last events")[1].split("summary")[0].splitlines()[1:-1]
        assert len(events) == 12
        assert "Checkpoint" in events[-1]
        assert not any("#" in line for line in events if "SequenceAdded" not in line)
        assert "requests         20 served in " in done.out
        assert "agrees: same fingerprint" in done.out
        assert done.err == ""

    def test_json_owns_stdout(self, kvcache: Kvcache) -> None:
        """With --json stdout is one JSON object, and a sink must not write there."""
        assert set(json.loads(kvcache("run", *SMALL, "--json").out)) >= KEYS
        for url in ("stdout:", "STDOUT:"):
            refused = kvcache("run", *SMALL, "--json", "--sink", url)
            assert refused.code == 2
            assert "--json cannot share stdout with a sink" in refused.err

    def test_nothing_reused(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """Where no block was reused the summary does not boast of having compared any."""
        done = kvcache("run", trace_of(tmp_path / "t.jsonl", (100, 4)))
        assert "bytes            nothing to compare: no block was reused\n" in done.out

    def test_quiet_leaves_the_summary(self, kvcache: Kvcache) -> None:
        """-q prints the summary and nothing before it."""
        assert kvcache("run", *SMALL, "-q").out.startswith("summary\n")

    @pytest.mark.parametrize("url", ["stdout:", "STDOUT:?format=jsonl"])
    def test_quiet_events_are_alone(self, start: Start, url: str) -> None:
        """With -q and the sink stdout: each line on stdout is of an event, also without a trace; stderr is empty."""
        out, err = start("run", "--no-pools", "--limit", 5, "-q", "--sink", url).communicate()
        shown = out.splitlines()
        assert err == ""
        assert len(shown) > 5
        if url == "stdout:":
            assert [line for line in shown if not re.match(r" +\d+\.\d+  [A-Z][A-Za-z]+\b", line)] == []
        else:
            assert [from_json(line).seq for line in shown] == list(range(len(shown)))

    def test_equal_runs_are_equal(self, kvcache: Kvcache) -> None:
        """Seed and options decide everything but the times; another seed makes another run."""
        first, again, other = (
            json.loads(kvcache("run", "--no-pools", "--limit", 30, "--seed", seed, "--json").out)[
                "fingerprint"
            ]
            for seed in (1, 1, 2)
        )
        assert first == again != other

    @pytest.mark.parametrize("options", [("--no-pools",), pytest.param((), marks=pytest.mark.long)])
    def test_equal_runs_write_equal_logs(
        self,
        kvcache: Kvcache,
        start: Start,
        tmp_path: Path,
        options: tuple[str, ...],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Two processes write the same frames from the same inputs, and others from another seed."""
        given = ("run", "--limit", 30, *options)
        monkeypatch.setenv("PYTHONHASHSEED", "1")
        again = start(*given, "--seed", 1, "--log", tmp_path / "again")
        for name, seed in (("one", 1), ("other", 2)):
            assert kvcache(*given, "--seed", seed, "--log", tmp_path / name).code == 0
        again.communicate()
        assert again.returncode == 0
        logs = [frames_of(tmp_path / name) for name in ("one", "again", "other")]
        assert logs[0] == logs[1] != logs[2]

    def test_paced_runs_have_ids_of_their_own(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """With real times no two runs are equal, so that their logs have different ids."""
        for name in ("one", "other"):
            paced = ("--speed", 1e6, "--log", tmp_path / name)
            assert kvcache("run", "--no-pools", "--limit", 3, *paced).code == 0
        one, other = (next(iter(LogReader(tmp_path / name))).events[0] for name in ("one", "other"))
        assert isinstance(one, EpochStarted)
        assert isinstance(other, EpochStarted)
        assert one.log_id != other.log_id

    def test_bytes_are_reported_before_they_are_taken(
        self, kvcache: Kvcache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What the tensors take is on the terminal before the first one is made."""

        def fail(*_: object) -> None:
            raise MemoryError("no tensor")

        monkeypatch.setattr("kvcache.pools.KVCacheBlockPool", fail)
        done = kvcache("run", "--limit", 3)
        assert done.code == 2
        assert re.search(
            r"tensors +[\d.]+ [KM]iB primary on cpu, [\d.]+ [KM]iB secondary on the host", done.out
        )

    @pytest.mark.parametrize(
        ("setting", "says"),
        [
            ("num_layers=65536", "host memory"),
        ],
    )
    def test_what_cannot_be_served_is_refused_first(
        self, kvcache: Kvcache, tmp_path: Path, setting: str, says: str
    ) -> None:
        """A cache that cannot be is an error line alone, and leaves no log."""
        done = kvcache("run", "--limit", 3, "--set", setting, "--log", tmp_path / "log")
        assert (done.code, done.out) == (2, "")
        assert says in done.err
        assert not (tmp_path / "log").exists()

    def test_several_windows(self, kvcache: Kvcache) -> None:
        """Two windows, with layers of different numbers of heads in one: bytes of all, a router, and replay agree."""
        options = {"num_layers": 4, "num_kv_heads": "1,2,2,4", "max_attention_window": "256,1048576"}
        sets = [part for name, value in options.items() for part in ("--set", f"{name}={value}")]
        done = kvcache("run", "--limit", 130, "--check-feed", "--json", *sets)
        assert done.code == 0, done.err
        both = json.loads(done.out)
        assert both["reused_tokens"] > 0
        assert both["checked_blocks"] > 0
        assert both["blocks_offloaded"] > 0
        assert both["feed"]["agrees"]
        assert both["replay_fingerprint"] == both["fingerprint"]
        small, large = both["windows"]
        assert small["window"] == 256 < large["window"] <= 1048576
        assert 0 < small["most_held"] <= large["most_held"]
        for level in ("primary", "secondary"):
            assert small["cached"][level] > 0
            assert large["cached"][level] > 0

    def test_windows_are_reported_apart_where_there_are_several(self) -> None:
        """The summary says for each window what was held and what is cached; one window needs no such line."""
        several = (*FEW_BLOCKS, "--set", "max_attention_window=64,1048576")
        shown = played(*several)
        for each in json.loads(played(*several, "--json"))["windows"]:
            cached = f"{each['cached']['primary']:,} cached in primary, {each['cached']['secondary']:,} in secondary"
            assert f"  {each['window']:,}: {each['most_held']:,} held, {cached}\n" in shown
        assert len(json.loads(played(*FEW_BLOCKS, "--json"))["windows"]) == 1
        assert "  windows  " not in played(*FEW_BLOCKS)

    def test_bytes_for_the_windows(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """Bytes on device and host, divided over two windows, K only: the log says how many blocks each of them got."""
        options = {
            "num_layers": 2,
            "max_attention_window": "256,1048576",
            "window_shares": "1,3",
            "kv_factor": 1,
            "primary_bytes": 8 << 20,
            "host_cache_size": 1 << 20,
        }
        sets = [part for name, value in options.items() for part in ("--set", f"{name}={value}")]
        done = kvcache("run", "--limit", 50, "--check-feed", "--json", "--log", tmp_path / "log", *sets)
        assert done.code == 0, done.err
        created = replay(tmp_path / "log").state.created
        assert created is not None
        # A block of a layer has 64 tokens × 2 heads × 8 dims × 2 bytes.
        assert [group.num_blocks for group in created.groups] == [(1024, 128), (3072, 384)]
        found = json.loads(done.out)
        assert found["checked_blocks"] > 0
        assert found["replay_fingerprint"] == found["fingerprint"]

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to be measured")
    @pytest.mark.parametrize("options", [(), ("--no-pools",)])
    def test_a_fraction_without_a_gpu(self, kvcache: Kvcache, options: tuple[str, ...]) -> None:
        """Without a GPU, and without pools, a fraction of its memory is refused with what to give instead."""
        done = kvcache("run", "--limit", 3, "--set", "free_gpu_memory_fraction=0.5", *options)
        assert (done.code, done.out) == (2, "")
        assert "primary_blocks, max_tokens or primary_bytes instead" in done.err

    def test_replay_names_the_windows(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """The state of a log with several windows says whose numbers are whose."""
        sets = ("--set", "num_layers=2", "--set", "max_attention_window=256,1048576")
        assert kvcache("run", "--limit", 20, "--no-pools", "--log", tmp_path / "log", *sets).code == 0
        groups = json.loads(kvcache("replay", tmp_path / "log", "--json").out)["groups"]
        assert groups[0]["window"] == 256 < groups[1]["window"]
        shown = kvcache("replay", tmp_path / "log").out
        assert shown.count("of window") == 2
        assert "window" in shown.splitlines()[1]

    def test_pools_do_not_change_the_decisions(self) -> None:
        """With and without bytes a run ends in the same state."""
        with_pools, without = (
            json.loads(played(*FEW_BLOCKS, *more, "--json")) for more in ([], ["--no-pools"])
        )
        assert with_pools["fingerprint"] == without["fingerprint"]
        assert with_pools["checked_blocks"] > 0 == without["checked_blocks"]

    def test_copies_have_a_line_of_their_own(self) -> None:
        """What the tensors' copies took is told apart from manager and log, with bytes and speed."""
        copies = json.loads(played(*FEW_BLOCKS, "--json"))["copies"]
        ways = ("bytes_offloaded", "bytes_onboarded", "bytes_within_primary")
        assert copies["bytes"] == sum(copies[way] for way in ways) > copies["bytes_onboarded"] > 0
        assert copies["bytes_per_second"] == pytest.approx(copies["bytes"] / copies["seconds"])
        shown = played(*FEW_BLOCKS)
        assert re.search(r"copies  +[0-9.]+ m?s, [0-9.]+ MiB at [0-9.]+ GB/s\n", shown)
        assert re.search(r" offloaded, .* onboarded, .* within primary\n", shown)
        assert json.loads(played(*FEW_BLOCKS, "--no-pools", "--json"))["copies"] is None
        assert "  copies  " not in played(*FEW_BLOCKS, "--no-pools")


class TestShape:
    """How the cache follows from requests, options and settings."""

    def config(self, kvcache: Kvcache, tmp_path: Path, *args: Any) -> dict[str, Any]:
        assert kvcache("run", *args, "--no-pools", "--log", tmp_path / "log").code == 0
        created = replay(tmp_path / "log").state.created
        assert created is not None
        return json.loads(created.config)

    def test_follows_from_the_trace(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """The longest request sets the limit; primary holds as many average requests as may run, and the longest."""
        trace = trace_of(tmp_path / "t.jsonl", (100, 28), (60, 4), (1000, 0))
        config = self.config(kvcache, tmp_path, trace, "--concurrency", 2)
        assert config["max_sequence_length"] == 1000
        assert config["tokens_per_block"] == 64
        # 1,192 tokens: 398 on average, 7 blocks each; the longest one takes 16.
        assert (config["primary_blocks"], config["secondary_blocks"]) == (16, 16)
        assert config["log"]["overflow"] == "block"

    def test_many_at_a_time(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """With more requests at once there are more blocks."""
        trace = trace_of(tmp_path / "t.jsonl", (100, 28), (60, 4), (1000, 0))
        assert self.config(kvcache, tmp_path, trace, "--concurrency", 10)["primary_blocks"] == 70

    def test_settings_win(self, kvcache: Kvcache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A file is overruled by the environment, that by --set, and what is given anywhere is not derived."""
        file = tmp_path / "c.toml"
        file.write_text(
            "head_dim = 4\nnum_layers = 4\nmax_tokens = 4096\nmax_sequence_length = 4000\n[log]\nfsync = 'never'\n"
        )
        monkeypatch.setenv("KVCACHE_NUM_LAYERS", "6")
        monkeypatch.setenv("KVCACHE_TOKENS_PER_BLOCK", "16")
        config = self.config(
            kvcache,
            tmp_path,
            TRACE,
            "--config",
            file,
            "--set",
            "tokens_per_block=32",
            "--set",
            "host_cache_size=none",
        )
        assert (config["head_dim"], config["num_layers"], config["tokens_per_block"]) == (4, 6, 32)
        assert (config["max_tokens"], config["primary_blocks"]) == (4096, None)
        assert config["max_sequence_length"] == 4000
        assert config["log"]["fsync"] == "never"
        assert config["log"]["overflow"] == "block"

    def test_log_may_be_reported_to_drop(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """The log blocks unless a setting says otherwise."""
        config = self.config(kvcache, tmp_path, TRACE, "--set", "log.overflow=drop")
        assert config["log"]["overflow"] == "drop"

    def test_limit(self, kvcache: Kvcache) -> None:
        """--limit plays the first requests only, of which the sizes follow."""
        assert json.loads(kvcache("run", *SMALL, "--limit", 3, "--json").out)["requests"] == 3


class TestTraces:
    """What is wrong with a trace."""

    def test_empty(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """A trace without requests is refused."""
        (tmp_path / "t.jsonl").write_text("\n\n")
        done = kvcache("run", tmp_path / "t.jsonl", "--no-pools")
        assert (done.code, done.err) == (2, f"kvcache: error: {tmp_path}/t.jsonl contains no requests\n")

    def test_bad_line(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """A line that is no request is named with its number."""
        (tmp_path / "t.jsonl").write_text(TRACE.read_text().splitlines()[0] + '\n{"timestamp": 1}\n')
        done = kvcache("run", tmp_path / "t.jsonl", "--no-pools")
        assert done.code == 2
        assert done.err.startswith(f"kvcache: error: {tmp_path}/t.jsonl:2: ")

    def test_directory(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """A directory, such as a log, is no trace."""
        done = kvcache("run", tmp_path, "--no-pools")
        assert done.code == 2
        assert f"{tmp_path} is a directory: a trace is a file" in done.err

    def test_pipe(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """What cannot be read twice is copied first."""
        os.mkfifo(tmp_path / "pipe")
        content = trace_of(tmp_path / "t.jsonl", (100, 4), (90, 4)).read_bytes()
        writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(content,), daemon=True)
        writer.start()
        done = kvcache("run", tmp_path / "pipe", "--no-pools")
        writer.join()
        assert (done.code, "2 served in" in done.out) == (0, True)

    def test_prompt_larger_than_the_cache(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """A request that never fits is refused and named; the others are served."""
        trace = trace_of(tmp_path / "t.jsonl", (100, 4), (2000, 4), (90, 4))
        done = kvcache("run", trace, "--no-pools", "--primary-blocks", 4)
        assert done.code == 0
        assert "2 served in" in done.out
        assert "1 refused" in done.out
        assert "number 1: 2004 tokens need 32 blocks, primary has 4" in done.err

    def test_nothing_fits(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """If not even the shortest request fits, nothing but that is said."""
        trace = trace_of(tmp_path / "t.jsonl", (3000, 4), (2000, 4), (2500, 4))
        done = kvcache("run", trace, "--no-pools", "--primary-blocks", 4)
        assert done.code == 2
        assert (done.out, done.err) == (
            "",
            "kvcache: error: none of the requests fits: 2004 tokens need 32 blocks, primary has 4\n",
        )
        done = kvcache("run", trace, "--no-pools", "--primary-blocks", 4, "--json")
        assert done.code == 2
        assert "none of the requests fits: 3004 tokens need 47 blocks, primary has 4\n" in done.err
        summary = json.loads(done.out)
        assert (summary["requests"], summary["refused"], len(summary["refusals"])) == (0, 3, 3)


class TestLog:
    """Where the log goes."""

    def test_temporary_log_is_removed(self, kvcache: Kvcache, temporary: Path) -> None:
        """Without --log nothing is left."""
        assert json.loads(kvcache("run", *SMALL, "--json").out)["log"] is None
        assert list(temporary.iterdir()) == []

    def test_keep(self, kvcache: Kvcache, temporary: Path) -> None:
        """--keep leaves the temporary log, and says where."""
        kept = json.loads(kvcache("run", *SMALL, "--keep", "--json").out)
        assert replay(kept["log"]).fingerprint.hex() == kept["fingerprint"]
        assert [str(path) for path in temporary.iterdir()] == [kept["log"]]

    def test_existing_log_is_refused(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """A log is never overwritten; --continue appends an epoch to it, in which the same ids may come again."""
        log = tmp_path / "log"
        first = json.loads(kvcache("run", *SMALL, "--log", log, "--json").out)
        before = [path.read_bytes() for path in segments(log)]
        refused = kvcache("run", *SMALL, "--log", log)
        assert refused.code == 2
        assert f"{log} already contains a log: choose another directory, or add --continue" in refused.err
        assert [path.read_bytes() for path in segments(log)] == before
        again = json.loads(kvcache("run", *SMALL, "--log", log, "--continue", "--json").out)
        assert again["replay_fingerprint"] == again["fingerprint"]
        replayed = replay(log, verify=True)
        assert replayed.state.epoch == 1
        assert replayed.batches == first["batches"] + again["batches"]
        assert replayed.checkpoints_verified == 2

    @pytest.mark.parametrize("more", [[], ["--continue"]])
    def test_other_files_are_not_mixed_with_a_log(
        self, kvcache: Kvcache, tmp_path: Path, more: list[str]
    ) -> None:
        """A directory with anything else in it is refused, also for continuing."""
        (tmp_path / "thesis.tex").write_text("")
        done = kvcache("run", *SMALL, "--log", tmp_path, *more)
        assert done.code == 2
        assert "holds something other than a log: give an empty" in done.err

    def test_file_instead_of_a_directory(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """A file cannot be a log; the error says what is needed."""
        (tmp_path / "log").write_text("")
        err = kvcache("run", *SMALL, "--log", tmp_path / "log").err
        assert err == f"kvcache: error: {tmp_path}/log is a file; --log takes a directory\n"

    def test_place_that_cannot_be_used(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """Where the system lets nobody have a log, one line says why and what to do."""
        done = kvcache("run", *SMALL, "--log", tmp_path / ("x" * 300))
        assert done.code == 2
        assert done.err.endswith("File name too long; choose a directory that this user may write to\n")
        assert done.err.count("\n") == 1

    def test_continuing_nothing(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """--continue with a new log is allowed, and said: the name may be mistyped."""
        note = f"kvcache: {tmp_path}/log is new: nothing to continue\n"
        args = ("run", *SMALL, "--log", tmp_path / "log", "--continue")
        assert kvcache(*args)[::2] == (0, note)
        assert kvcache(*args)[::2] == (0, "")

    def test_continue_needs_a_log(self, kvcache: Kvcache) -> None:
        """--continue alone does not say what is to be continued."""
        assert "--continue requires --log" in kvcache("run", *SMALL, "--continue").err

    def test_failed_start_leaves_nothing(self, kvcache: Kvcache, tmp_path: Path, temporary: Path) -> None:
        """If a sink cannot be opened, the log's directory can be used by the next attempt."""
        done = kvcache("run", *SMALL, "--log", tmp_path / "log", "--sink", "file:/nowhere/e.jsonl")
        assert done.code == 2
        assert "could not be opened: directory /nowhere does not exist\n" in done.err
        assert kvcache("run", *SMALL, "--log", tmp_path / "log").code == 0
        assert kvcache("run", *SMALL, "--sink", "gopher:x").code == 2
        assert list(temporary.iterdir()) == []


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """Let no file of this process grow beyond 40 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("overflow", ["block", "drop"])
def test_log_that_cannot_be_written(kvcache: Kvcache, tmp_path: Path, overflow: str) -> None:
    """A disk that takes no more ends the run, or with "drop" the log alone; both give a summary, and code 1."""
    log = tmp_path / "log"
    args = ["run", *SMALL, "--log", log, "--set", f"log.overflow={overflow}", "--set", "log.compression=none"]
    if overflow == "block":
        args += ["--set", "log.max_queued_batches=1"]  # or it may end before it hears of the trouble
    with small_files():
        done = kvcache(*args, "--json")
    found = json.loads(done.out)
    assert found["log_error"] == "File too large"
    assert found["dropped_batches"] == found["batches"] - replay(log).batches > 0
    assert (found["interrupted"], found["requests"] == 57) == (overflow == "block", overflow == "drop")
    assert found["hit_rate"] == found["reused_tokens"] / found["prompt_tokens"]
    assert found["replay_fingerprint"] is None
    assert done.err.splitlines() == [
        f"kvcache: warning: log_suspended: File too large (log={log})",
        f"kvcache: error: the end of {log} could not be written: File too large; everything before it can be read",
    ]
    shutil.rmtree(log)
    with small_files():
        code, out, _ = kvcache(*args)
    assert code == 1
    lost = rf"incomplete: {found['dropped_batches']} batches lost\n +could not be written: File too large\n"
    assert re.search(lost, out)
    assert "not verified: the log ends before the run did" in out
    assert ("ended early: the log could not be written" in out) == (overflow == "block")


class TestSinks:
    """Events on their way out."""

    def test_file(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """A sink gets every batch, and the summary says so."""
        done = kvcache("run", *SMALL, "--sink", f"file://{tmp_path}/e.jsonl", "--json")
        summary = json.loads(done.out)
        lines = (tmp_path / "e.jsonl").read_text().splitlines()
        [sink] = summary["sinks"]
        assert len(lines) == sink["batches"] == summary["batches"]
        assert (sink["dropped_batches"], sink["lag_batches"], sink["state"]) == (0, 0, "closed")

    def test_stdout(self, start: Start) -> None:
        """In a pipe, too, the events of a sink on stdout stand between the start and the summary."""
        out, err = start("run", *SMALL, "--limit", 2, "--sink", "stdout:").communicate()
        assert err == ""
        assert out.startswith("kvcache run: chats_small.jsonl\n")
        first, last = out.index("0.0  EpochStarted"), out.index("Checkpoint")
        assert out.index("  log  ") < first < last < out.index("summary")

    def test_used_file(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """A file that holds events already is refused with what to do, and nothing about how that was noticed."""
        (tmp_path / "e.jsonl").write_text("{}\n")
        url = f"file://{tmp_path}/e.jsonl"
        err = kvcache("run", *SMALL, "--sink", url).err
        says = f"{tmp_path}/e.jsonl is not empty: remove it, choose another path, or add ?append=1"
        assert err.splitlines()[-1] == f"kvcache: error: sink {url} could not be opened: {says}"

    def test_unknown_scheme(self, kvcache: Kvcache) -> None:
        """A URL of no sink is refused with the schemes that there are."""
        done = kvcache("run", *SMALL, "--sink", "gopher:x")
        assert done.code == 2
        assert "known schemes: file, kafka, nats, otel, prometheus, redis, stdout" in done.err


class TestDisagreement:
    """A run that finds something wrong exits with 1 and keeps the log as evidence."""

    def test_other_fingerprint(
        self, kvcache: Kvcache, monkeypatch: pytest.MonkeyPatch, temporary: Path
    ) -> None:
        """If the replay ends in another state than the cache, both are named."""
        monkeypatch.setattr(run_module, "fingerprint", lambda state: bytes(32))
        done = kvcache("run", *SMALL)
        assert done.code == 1
        assert "but 0000000000000000 in the cache" in done.err
        assert "agrees" not in done.out.replace("disagrees", "")
        [kept] = temporary.iterdir()
        assert f"the log was kept in {kept}" in done.err
        assert replay(kept).batches > 0

    def test_wrong_bytes(self, kvcache: Kvcache, monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
        """If copies get lost, the block is found whose bytes are wrong."""

        class LosingCopier:
            def submit(self, copies: Sequence[Copy]) -> Ticket:
                return FinishedTicket()

        from kvcache.pools import Pools

        monkeypatch.setattr(Pools, "copier", lambda self: LosingCopier())
        done = kvcache("run", TRACE, "--tokens-per-block", 16, "--primary-blocks", 120)
        assert done.code == 1
        assert "holds wrong bytes" in done.err
        [kept] = temporary.iterdir()
        assert f"the log was kept in {kept}" in done.err


def test_missing_torch(run_python: Any) -> None:
    """Where torch is not installed, the error says what to install and how to do without."""
    done = run_python(
        "import sys; sys.modules['torch'] = None\n"
        f"from kvcache.cli import main; print(main(['run', {str(TRACE)!r}]))"
    )
    assert done.stdout == "2\n"
    assert "pools need torch: install kvcache[torch], or run without tensors (--no-pools)" in done.stderr


def test_a_feed_alongside_the_runs_own(kvcache: Kvcache) -> None:
    """Without a trace a router of the run's own is attached, also beside a feed that was asked for, and agrees."""
    done = kvcache("run", "--json", "--no-pools", "--limit", "40", "--sink", "zmq+pub://127.0.0.1:0?replay=0")
    feed = json.loads(done.out)["feed"]
    assert feed["agrees"]
    assert feed["faults"] == 0
    assert feed["batches"] > 0
    assert set(feed["blocks"]) == {"primary", "secondary"}
    assert sum(feed["blocks"].values()) > 0


class TestKVEventsConfig:
    """vLLM's configuration of its publisher, instead of a URL."""

    def test_it_publishes_as_the_url_does(self, kvcache: Kvcache) -> None:
        """A run with it has that feed beside its own, which agrees."""
        config = json.dumps({"enable_kv_cache_events": True, "endpoint": "tcp://*:0", "topic": "kv@a@m"})
        given = ("--kv-events-config", config, "--kv-events-options", "insecure=1", "--kv-events-rank", 1)
        done = kvcache("run", "--json", "--no-pools", "--limit", "5", *given)
        assert done.code == 0
        assert json.loads(done.out)["feed"]["agrees"]
        assert "feed_leaves_machine" in done.err

    def test_a_file_may_hold_it(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """Named by an @; what it says is taken."""
        file = tmp_path / "events.json"
        file.write_text('{"hwm": 0}')
        done = kvcache("run", "--no-pools", "--limit", "5", "--kv-events-config", f"@{file}")
        assert (done.code, done.out) == (2, "")
        assert "Expected `int` >= 1 - at `$.hwm`" in done.err

    @pytest.mark.parametrize("config", ["{}", '{"enable_kv_cache_events": true, "publisher": "null"}'])
    def test_that_nothing_is_published_is_said(self, kvcache: Kvcache, config: str) -> None:
        """The run goes on."""
        done = kvcache("run", "--no-pools", "--limit", "5", "--kv-events-config", config)
        assert done.code == 0
        assert "enables no sink" in done.err

    @pytest.mark.parametrize(
        ("given", "reason"),
        [
            (["--kv-events-config", '{"format": 1}'], "unknown field `format`; known fields: enable"),
            (["--kv-events-config", '{"enable_kv_cache_events": true}'], "--kv-events-options insecure=1"),
            (["--kv-events-config", "events.json"], "to read a file on the command line, write @FILE"),
            (["--kv-events-config", "@/no/events.json"], "/no/events.json cannot be read: No such file"),
            (["--kv-events-rank", "1"], "require --kv-events-config JSON"),
            (["--kv-events-options", "insecure=1"], "require --kv-events-config JSON"),
        ],
    )
    def test_what_is_refused(self, kvcache: Kvcache, given: list[str], reason: str) -> None:
        """Before anything is played, with what to write instead."""
        done = kvcache("run", "--no-pools", "--limit", "5", *given)
        assert (done.code, done.out) == (2, "")
        assert reason in done.err


class TestWaitingForSubscribers:
    """`--wait-subscribers`: readers of the feeds that were asked for."""

    @pytest.mark.parametrize("sinks", [[], ["--sink", "stdout:"]])
    def test_no_feed(self, kvcache: Kvcache, sinks: list[str]) -> None:
        """Without a sink that anybody could read there is nothing to wait for, and the run says so."""
        done = kvcache("run", "--no-pools", "--limit", 2, "--wait-subscribers", 1, *sinks)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith(
            "kvcache: error: --wait-subscribers needs a sink that feeds routers: add --sink"
        )

    @pytest.mark.parametrize(
        ("readers", "said"), [pytest.param(1, "1 subscriber ", marks=pytest.mark.long), (2, "2 subscribers ")]
    )
    def test_run_begins_with_the_readers(self, start: Start, readers: int, said: str) -> None:
        """It waits for readers of each such sink, and for none of the feed that the run checks itself."""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        url = f"zmq+pub://127.0.0.1:{port}"
        process = start(
            *("run", "--no-pools", "--limit", 2, "--check-feed", "--json"),
            *("--wait-subscribers", readers, "--sink", url),
        )
        assert process.stderr is not None
        assert f"waiting for {said}of each zmq+pub: sink" in process.stderr.readline()
        with contextlib.ExitStack() as stack:
            for _ in range(readers):
                stack.enter_context(Subscriber(f"tcp://127.0.0.1:{port}"))
            process.communicate()
        assert process.returncode == 0
