"""`kvcache whatif`: the table beside what happened, its choices, and its processes."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from events.log import LogReader
from events.types import SequenceAdded
from kvcache import KVCacheConfig, Recorder
from kvcache.cli.whatif import alternatives, combinations
from kvcache.errors import UsageError
from tests.support.commands import Kvcache, Start, run_log
from tests.support.waiting import wait_until

COUNTED = (
    "requests",
    "prompt_tokens",
    "reused_tokens",
    "computed_tokens",
    "blocks_offloaded",
    "blocks_onboarded",
)


def found(done: Any) -> dict[str, Any]:
    assert done.code == 0, done.err
    return json.loads(done.out)


class TestResult:
    """What comes out."""

    def test_nothing_changed_is_what_happened(self, kvcache: Kvcache, log: Path) -> None:
        """Without options the recorded numbers come out again, and they are those of the log's own events."""
        done = found(kvcache("whatif", log, "--jobs", 1, "--json"))
        then, [again] = done["recorded"], done["trials"]
        assert (then.pop("policy"), again.pop("policy")) == (None, "lru")
        assert again == then
        added = [
            event for batch in LogReader(log) for event in batch.events if isinstance(event, SequenceAdded)
        ]
        assert then["requests"] == len(added)
        assert then["reused_tokens"] == sum(event.reused for event in added)
        assert 0 < then["of_bound"] <= 1

    def test_the_policy_is_that_of_the_log(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """A log with another order of eviction happens again too, and either way to say a policy gives the same."""
        small = ("--limit", 40, "--primary-blocks", 90, "--secondary-blocks", 40)
        log = run_log(tmp_path / "log", *small, "--set", "eviction_policy=levels")
        [again] = found(kvcache("whatif", log, "--jobs", 1, "--json"))["trials"]
        done = found(kvcache("whatif", log, "--jobs", 1, "--json", "--set", "eviction_policy=levels,lru"))
        asked = found(kvcache("whatif", log, "--jobs", 1, "--json", "--policy", "levels,lru"))
        assert done == asked
        then, [levels, lru] = done["recorded"], done["trials"]
        assert [each.pop("policy") for each in (then, again, levels, lru)] == [
            None,
            "levels",
            "levels",
            "lru",
        ]
        assert then == levels
        assert {**again, "of_gap": levels["of_gap"]} == levels  # without lru beside it there is no gap
        assert lru["blocks_offloaded"] != levels["blocks_offloaded"]
        assert lru["of_bound"] < levels["of_bound"]

    def test_more_room_reuses_more(self, kvcache: Kvcache, log: Path) -> None:
        """Each combination is there, in order, with its settings; the largest cache reuses all that comes again."""
        sizes = ("--set", "primary_blocks=70,120,2000", "--set", "secondary_blocks=0, 50")
        done = found(
            kvcache("whatif", log, *sizes, "--policy", "lru,levels", "--no-bound", "--jobs", 1, "--json")
        )
        trials = done["trials"]
        chosen = [
            (each["config"]["primary_blocks"], each["config"]["secondary_blocks"]) for each in trials[::2]
        ]
        assert chosen == [(70, 0), (70, 50), (120, 0), (120, 50), (2000, 0), (2000, 50)]
        assert [each["policy"] for each in trials] == ["lru", "levels"] * 6
        reused = [each["reused_tokens"] for each in trials[::2]]
        assert reused[0] < reused[1] < reused[3] < reused[4] == reused[5]
        assert {each["of_bound"] for each in trials} == {each["of_gap"] for each in trials} == {None}

    def test_table(self, kvcache: Kvcache, log: Path) -> None:
        """A row for what was recorded, then one for each combination, with what was set."""
        done = kvcache("whatif", log, "--set", "primary_blocks=120,80", "--policy", "lru,belady", "--jobs", 1)
        lines = [line.split() for line in done.out.splitlines()]
        assert lines[1][:5] == ["primary_blocks", "reused", "token", "hit", "rate"]
        assert [line[:2] for line in lines[2:7]] == [
            ["recorded", "120"],
            ["lru", "120"],
            ["belady", "120"],
            ["lru", "80"],
            ["belady", "80"],
        ]
        assert lines[2][2:] == lines[3][2:]
        assert lines[4][5:7] == ["100.0", "%"]

    def test_what_cannot_be_served_is_not_reused(self, kvcache: Kvcache, log: Path) -> None:
        """A cache that is too small for most prompts does not look better for it; what became of them is told."""
        args = ("whatif", log, "--set", "primary_blocks=24", "--no-bound", "--jobs", 1)
        done = found(kvcache(*args, "--json"))
        then, [small] = done["recorded"], done["trials"]
        assert small["too_long"] > 0
        assert small["prompt_tokens"] + small["unserved_tokens"] == then["prompt_tokens"]
        assert small["hit_rate"] == small["reused_tokens"] / then["prompt_tokens"] < then["hit_rate"]
        lines = kvcache(*args).out.splitlines()
        assert "too long" in lines[1]
        assert "unserved" not in lines[1]
        assert lines[-1].endswith(
            "tokens of requests that are too long for the cache, or unserved, count as not reused"
        )

    def test_another_engine_decided(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """The table says who decided what was recorded, and how much of what was cached it did not take."""
        config = KVCacheConfig(tokens_per_block=2, primary_blocks=20, max_sequence_length=20)
        log = tmp_path / "log"
        with Recorder(config, engine="mine 1", log=log) as recorder:
            for name, blocks in (("a", [0, 1]), ("b", [2, 3])):
                recorder.admitted(name, [1, 2, 3, 4, 5])
                recorder.allocated(name, blocks)
                recorder.stored(name, 2)
                recorder.allocated(name, [blocks[-1] + 10])
                recorder.flush()
        done = found(kvcache("whatif", log, "--jobs", 1, "--json"))
        assert (done["engine"], done["passed_over_tokens"]) == ("mine 1", 4)
        assert (done["recorded"]["reused_tokens"], done["trials"][0]["reused_tokens"]) == (0, 4)
        last = kvcache("whatif", log, "--jobs", 1).out.splitlines()[-2:]
        assert last[0].startswith("recorded: decisions of mine 1; ")
        assert last[1].startswith(
            "4 tokens of prompts were cached but not reused because of a rule of the engine"
        )

    def test_worth_of_hints(self, kvcache: Kvcache, log: Path) -> None:
        """What knowing only which blocks return is worth, of the way from lru to belady, worked out from the counts."""
        args = ("whatif", log, "--set", "primary_blocks=80,120", "--jobs", 1)
        trials = found(kvcache(*args, "--policy", "lru,returns,belady", "--json"))["trials"]
        parts = []
        for lru, returns, belady in (trials[:3], trials[3:]):
            base, hinted, best = (each["reused_tokens"] for each in (lru, returns, belady))
            assert (lru["of_gap"], belady["of_gap"]) == (0, 1)
            assert returns["of_gap"] == (hinted - base) / (best - base)
            parts.append(f"{100 * returns['of_gap']:.1f} %")
        assert len(set(parts)) == 2
        low, high = sorted(parts, key=lambda part: float(part.split()[0]))
        # lru is played for it where it was not asked for.
        lines = kvcache(*args, "--policy", "returns").out.splitlines()
        assert lines[-1] == (
            f"knowing only which blocks return (returns) closes {low} to {high} of the gap between lru and belady: "
            "about the maximum that hints of an application can gain"
        )
        assert [line.split()[0] for line in lines[2:5]] == ["recorded", "returns", "returns"]
        assert all(part in line for part, line in zip(parts, lines[3:5], strict=True))
        one = kvcache(*args[:2], "--policy", "returns", "--set", "primary_blocks=80", "--jobs", 1).out
        assert f"closes {parts[0]} of the gap" in one

    @pytest.mark.parametrize(
        "options",
        [
            ("--policy", "lru,arc"),
            ("--policy", "lru,returns", "--no-bound"),
            ("--policy", "lru,returns", "--set", "primary_blocks=2000"),
        ],
    )
    def test_no_gap_no_worth(self, kvcache: Kvcache, log: Path, options: tuple[str, ...]) -> None:
        """Nothing is said of hints where one of the three was not played, or where all is kept anyway."""
        out = kvcache("whatif", log, *options, "--jobs", 1).out
        assert out.splitlines()[-1].startswith("token hit rate: reused fraction")
        assert "of gap" not in out

    def test_processes_find_the_same(self, kvcache: Kvcache, log: Path) -> None:
        """Trials divided over processes come out in the order in which they were asked for."""
        args = ("whatif", log, "--set", "tokens_per_block=16,32", "--policy", "lfu,returns", "--json")
        assert found(kvcache(*args, "--jobs", 2)) == found(kvcache(*args, "--jobs", 1))


def agents_trace(path: Path, tool_ms: int) -> Path:
    """A session that waits for a tool for so long, while others that are over fill a cache of 12 blocks."""
    first = {
        "timestamp": 0,
        "input_length": 2058,
        "output_length": 2,
        "hash_ids": [0, 1, 2, 3, 4],
        "stop": "tool_use",
    }
    others = [
        first | {"timestamp": at, "input_length": 1034, "hash_ids": [n, n + 1, n + 2], "stop": "end_turn"}
        for begin, at in ((10, 100), (200, tool_ms - 500))
        for n in range(begin, begin + 90, 10)
    ]
    again = first | {"timestamp": tool_ms, "hash_ids": [0, 1, 2, 3, 5], "stop": "end_turn"}
    path.write_text("".join(json.dumps(each) + "\n" for each in (first, *others, again)))
    return path


@pytest.mark.parametrize(
    ("tool_ms", "reused"), [(3_000, [0, 2048, 2048, 2048, 2048]), (70_000, [0, 0, 2048, 2048, 0])]
)
def test_rules_for_stop_reasons(kvcache: Kvcache, tmp_path: Path, tool_ms: int, reused: list[int]) -> None:
    """A run records the trace's reasons; each rule says what it would have done, with times of the trace."""
    trace = agents_trace(tmp_path / "trace.jsonl", tool_ms)
    size = ("--tokens-per-block", 512, "--primary-blocks", 12, "--secondary-blocks", 0)
    run = ("run", trace, "--no-pools", *size, "--concurrency", 1, "-q", "--log")
    assert kvcache(*run, tmp_path / "log").code == 0
    rules = ("--set", "stop_retention.tool_use=none,60:1min,60", "--no-bound", "--jobs", 1)
    done = found(kvcache("whatif", tmp_path / "log", *rules, "--json"))
    whole = ("--set", 'stop_retention={"tool_use": 36, "end_turn": 20},{"*": "60:60s", "end_turn": 35}')
    other = found(kvcache("whatif", tmp_path / "log", *whole, *rules[2:], "--json"))
    assert [each["reused_tokens"] for each in (*done["trials"], *other["trials"])] == reused
    assert done["recorded"]["reused_tokens"] == 0
    lines = [line.split() for line in kvcache("whatif", tmp_path / "log", *rules).out.splitlines()]
    assert lines[1][0] == "stop_retention.tool_use"
    assert [line[1] for line in lines[2:6]] == ["-", "-", "60:60s", "60"]
    # With rules the bound is none.
    bounded = ("whatif", tmp_path / "log", "--set", "stop_retention.tool_use=none,60", "--jobs", 1)
    parts = [each["of_bound"] for each in found(kvcache(*bounded, "--json"))["trials"]]
    assert parts == [0.0, None]
    lines_of_trials = kvcache(*bounded).out.splitlines()[3:5]
    assert [line.split("%")[1].split()[0] for line in lines_of_trials] == ["0.0", "-"]
    # A reason that nothing ended with has a rule in vain.
    misspelled = kvcache("whatif", trace, *size, "--set", "stop_retention.tooluse=none,60,36", *rules[2:])
    assert misspelled.code == 0
    warnings = [line for line in misspelled.err.splitlines() if "ended with" in line]
    assert [line.partition("no request")[2] for line in warnings] == [
        " ended with `tooluse`; there are: end_turn (19), tool_use (1)"
    ]
    assert "ended with" not in kvcache("whatif", tmp_path / "log", *whole, *rules[2:]).err
    # And a run with the rule does it.
    ruled = ("--set", "stop_retention.tool_use=60:1min")
    assert kvcache(*run, tmp_path / "ruled", *ruled).code == 0
    [again] = found(kvcache("whatif", tmp_path / "ruled", "--jobs", 1, "--json"))["trials"]
    assert again["reused_tokens"] == reused[1]
    shown = kvcache("events", tmp_path / "log", "--type", "SequenceRemoved").out.splitlines()
    assert [line.split()[-1] for line in shown] == ["stop=tool_use"] + ["stop=end_turn"] * 19


@pytest.mark.parametrize("size", [pytest.param("8", marks=pytest.mark.long), "16"])
def test_every_policy_plays_chats(kvcache: Kvcache, log: Path, size: str) -> None:
    """Prefixes that branch, with a secondary level that is too small: nothing comes out above the bound."""
    sets = (
        "--set",
        f"tokens_per_block={size}",
        "--set",
        "primary_blocks=140",
        "--set",
        "secondary_blocks=0,40",
    )
    policies = "lru,levels,lfu,arc,returns,belady"
    done = found(kvcache("whatif", log, *sets, "--policy", policies, "--jobs", 1, "--json"))
    assert len(done["trials"]) == 12
    assert all(0.5 < each["of_bound"] < 1.02 for each in done["trials"])


class TestChoice:
    """What is to be played."""

    def test_commas_inside_brackets(self) -> None:
        """A number per window stands in brackets."""
        assert alternatives("primary_blocks=[5,6], 7") == [
            ("primary_blocks", "[5,6]"),
            ("primary_blocks", "7"),
        ]
        assert alternatives('stop_retention={"a": 5, "b": 6},{}') == [
            ("stop_retention", '{"a": 5, "b": 6}'),
            ("stop_retention", "{}"),
        ]

    def test_every_combination(self) -> None:
        """The last axis changes first, and policies before it."""
        trials = combinations([alternatives("a=1,2"), alternatives("log.b=x,y")], ["p", "q"])
        assert len(trials) == 8
        assert [(trial.sets["a"], trial.sets["log"]["b"], trial.policy) for trial in trials[:3]] == [
            ("1", "x", "p"),
            ("1", "x", "q"),
            ("1", "y", "p"),
        ]

    def test_too_many(self) -> None:
        """A slip that would take days is refused."""
        axis = alternatives("primary_blocks=" + ",".join(map(str, range(1, 258))))
        with pytest.raises(UsageError, match="257 combinations are too many: the maximum is 256"):
            combinations([axis], ["lru"])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--set", "primary_blocks"], "--set primary_blocks: write FIELD=VALUE,VALUE"),
            (
                ["--set", "primary_blocks=1", "--set", "primary_blocks=2"],
                "--set primary_blocks is given twice",
            ),
            (["--set", "primary_blocks=100,x"], "primary_blocks: given 'x'; accepted: an integer from 1"),
            (["--set", "primary_block=100"], "primary_block: no such field; did you mean primary_blocks?"),
            (
                ["--policy", "lru", "--set", "eviction_policy=lru,levels"],
                "--policy and --set eviction_policy exclude each other: give one of them",
            ),
            (["--policy", "lru,mru"], "policy 'mru': there are lru, levels, lfu, arc, returns, belady"),
        ],
    )
    def test_what_is_wrong_is_reported_first(
        self, kvcache: Kvcache, log: Path, options: list[str], message: str
    ) -> None:
        """A wrong value among right ones is refused before anything is played."""
        done = kvcache("whatif", log, *options)
        assert (done.code, done.out) == (2, "")
        assert message in done.err

    def test_a_log_without_tokens(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """It is refused with what would help."""
        log = run_log(tmp_path / "log", "--set", "log.record_tokens=false", "--limit", 3)
        done = kvcache("whatif", log)
        assert (done.code, done.out) == (2, "")
        assert (
            "cannot be replayed: it does not record tokens; write it with log.record_tokens=true" in done.err
        )


ORDER = """
from kvcache.decide.eviction_order import LeastRecentlyUsed

class Mine(LeastRecentlyUsed):
    def key(self, run):
        return (run.priority, -run.released_at, -run.end)
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Install a module `mine` with these entry points, for this process and those that it starts."""

    def installed(source: str, entries: str) -> None:
        site = tmp_path / "site"
        info = site / "mine-1.0.dist-info"
        info.mkdir(parents=True)
        (site / "mine.py").write_text(source)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[kvcache.eviction_orders]\n{entries}\n")
        monkeypatch.syspath_prepend(site)
        monkeypatch.delitem(sys.modules, "mine", raising=False)

    return installed


Install = Callable[[str, str], None]


def test_an_order_of_ones_own(kvcache: Kvcache, log: Path, install: Install) -> None:
    """An order of another package is found by its entry point, also in the processes beside this one."""
    install(ORDER, "mru = mine:Mine\nnone = mine:ORDER")
    lru, mru = found(kvcache("whatif", log, "--policy", "lru,mru", "--no-bound", "--jobs", 2, "--json"))[
        "trials"
    ]
    assert (lru["policy"], mru["policy"]) == ("lru", "mru")
    assert mru["reused_tokens"] < lru["reused_tokens"]
    done = kvcache("whatif", log, "--policy", "none")
    assert "policy 'none': mine:ORDER provides it but cannot be imported" in done.err


FAILURES = [
    ("raise RuntimeError([7] * 3)", "RuntimeError at mine.py:6"),
    ("raise OSError(28, 'full', 'x')", "OSError at mine.py:6"),
    ("return run.nothing", "AttributeError at mine.py:6"),
    ("return (object(),)", "TypeError at "),
]


@pytest.mark.parametrize(
    ("jobs", "body", "failure"),
    [
        *((1, *each) for each in FAILURES),
        (2, *FAILURES[0]),
        *(pytest.param(2, *each, marks=pytest.mark.long) for each in FAILURES[1:]),
    ],
)
def test_an_order_that_fails(
    kvcache: Kvcache, log: Path, install: Install, body: str, failure: str, jobs: int
) -> None:
    """It is one line that names the policy and what was raised, without what that quotes; wherever it is played."""
    install(ORDER.partition("        return")[0] + f"        {body}\n", "broken = mine:Mine")
    done = kvcache("whatif", log, "--policy", "lru,broken", "--no-bound", "--jobs", jobs, "-q")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"kvcache: error: policy 'broken' failed: {failure}")
    assert "; it is provided by mine:Mine, not by kvcache" in done.err
    assert done.err.count("\n") == 1
    assert "7, 7" not in done.err


def test_an_order_that_cannot_be_loaded(kvcache: Kvcache, log: Path, install: Install) -> None:
    """Whatever its module raises."""
    install("1 / 0", "broken = mine:Mine")
    done = kvcache("whatif", log, "--policy", "broken")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert (
        "policy 'broken': mine:Mine provides it but fails when it is imported (ZeroDivisionError" in done.err
    )


def test_an_order_with_a_name_of_ours(kvcache: Kvcache, log: Path, install: Install) -> None:
    """Nobody is to take the figures of ours for those of the package."""
    install(ORDER, "lru = mine:Mine")
    done = kvcache("whatif", log, "--policy", "lru")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "policy 'lru': mine:Mine has the name of a built-in policy: rename its entry point" in done.err


def is_running(group: int) -> bool:
    """Whether a group has processes."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_ctrl_c_ends_all_processes(start: Start, tmp_path: Path) -> None:
    """Ctrl-C in the middle leaves no result, no traceback and no process."""
    log = run_log(tmp_path / "log", "--primary-blocks", 120)
    sizes = ",".join(map(str, range(60, 180)))
    process = start("whatif", log, "--set", f"primary_blocks={sizes}", "--jobs", 2, start_new_session=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until(lambda: len(children.read_text().split()) >= 2, "the processes beside it do not start")
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "")
    wait_until(lambda: not is_running(process.pid), "a process is left")
