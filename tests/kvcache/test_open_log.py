"""`open_log`: what it tells as rows is what the raw events say, counted here without it."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from events.errors import NotALog
from events.log import LogReader, LogWriter
from events.structs import LEVEL_NAMES
from events.types import EventBatch
from kvcache.audit import Log, open_log
from kvcache.audit.reasons import Reason
from kvcache.audit.tables import BlockLife, tables_of
from kvcache.errors import CapacityError
from kvcache.fold.sliding_group import SlidingGroup
from kvcache.manager import KVCacheManager, Substitutes
from kvcache.replay import Unreplayable, replay
from tests.oracles.raw_log import Life, RawLog
from tests.support.commands import RunPython, run_log
from tests.support.engines import strategies
from tests.support.engines.traffic import Traffic, config, lossy
from tests.support.logs.random_logs import random_log, whole_part
from tests.support.seeds import seeds

LEVELS = ("--primary-blocks", 120, "--secondary-blocks", 100, "--concurrency", 3)
TWO = ("--set", "max_attention_window=64,1048576", "--set", "num_layers=2")
RUNS: dict[str, tuple[Any, ...]] = {
    "one level": ("--primary-blocks", 120, "--concurrency", 3),
    "offload": LEVELS,
    "no tokens": (*LEVELS, "--set", "log.record_tokens=false"),
    "two windows": (*LEVELS, *TWO),
    "two windows, no tokens": (*LEVELS, *TWO, "--set", "log.record_tokens=false"),
}


def cleared_now_and_then(directory: Path) -> Path:
    """Random requests in two namespaces, some refused, and a cache that is cleared twice."""
    with KVCacheManager(config(max_attention_window=(6, 24), num_layers=2), log=directory) as manager:
        traffic = Traffic(manager, 5)
        for _ in range(3):
            traffic.record(150)
            manager.clear()
            manager.flush()
        traffic.record(60)
    return directory


SELDOM = ("one level", "no tokens", "two windows")
"""Those of which the others have it all."""


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(name, marks=pytest.mark.long) if name in SELDOM else name for name in RUNS),
        "cleared",
    ],
)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log."""
    directory = tmp_path_factory.mktemp("logs") / "log"
    if request.param == "cleared":
        return cleared_now_and_then(directory)
    return run_log(directory, *RUNS[request.param])


@pytest.fixture(scope="module")
def raw(path: Path) -> RawLog:
    """The same log, followed by its slots."""
    return RawLog(LogReader(path))


@pytest.fixture(scope="module")
def log(path: Path) -> Log:
    """The same log, opened."""
    return open_log(path)


def reported(life: Life) -> tuple[Any, ...]:
    level = life["level"]
    return (
        life["window"],
        str(life["by"]),
        life["stored"],
        life["priority"],
        life["reused"],
        life["offloads"],
        life["onboards"],
        None if level is None else LEVEL_NAMES[level],
        life["gone"],
        life["why"],
    )


def announced_by(row: BlockLife) -> tuple[Any, ...]:
    life = (
        row.window,
        str(row.stored_by),
        row.stored_seq,
        row.priority,
        row.reused,
        row.offloads,
        row.onboards,
    )
    return (*life, row.level, row.gone_seq, row.gone_why)


def test_batches(log: Log, path: Path) -> None:
    """Iterating gives the batches as the log has them, as often as one likes."""
    assert list(log) == list(LogReader(path))
    assert next(iter(log)).seq == 0


def test_requests_add_up(log: Log, raw: RawLog) -> None:
    """Each admission is there once, with what the events say of it, and its tokens by reason add up to its prompt."""
    rows = [row for row in log.requests() if row.admission is not None]
    expected = Counter(
        (str(one["id"]), one["admitted"], one["ended"], one["out"]) for one in raw.requests.values()
    )
    found = Counter((str(row.request_id), row.admitted_seq, row.ended_seq, row.output_tokens) for row in rows)
    assert found == expected
    assert sorted(row.admission or 0 for row in rows) == list(range(len(rows)))
    assert sum(row.prompt_tokens or 0 for row in rows) == raw.totals["prompt"]
    assert sum(row.reused_tokens or 0 for row in rows) == raw.totals["reused"] > 0
    reasons: Counter[str] = Counter()
    for row in rows:
        assert sum(row.tokens_by_reason.values()) == row.prompt_tokens
        assert list(row.tokens_by_reason) == [reason.label for reason in Reason]
        reasons.update(row.tokens_by_reason)
    assert reasons["partial"] == raw.totals["partial"]
    assert reasons["primary"] + reasons["secondary"] + reasons["partial"] == raw.totals["reused"]
    assert reasons["last_token"] == len(rows)
    if len(raw.windows) == 1:
        assert reasons["secondary"] == raw.totals["secondary"]


def test_block_lives_are_those_of_slots(log: Log, raw: RawLog) -> None:
    """Each full block lives as what follows its slot says: stored, reused, moved, gone."""
    rows = list(log.block_lives())
    assert Counter(map(announced_by, rows)) == Counter(map(reported, raw.full()))
    assert len({row.gone_why for row in rows}) > 1
    for row in rows:
        assert row.stored_ts <= row.last_used_ts <= (row.gone_ts or row.last_used_ts)
        assert (row.level is None) == (row.gone_seq is not None)
        assert (row.last_offloaded_ts is None) == (row.offloads == 0)
        assert (row.eviction is not None) == (row.gone_why in ("evicted", "dropped"))


@pytest.mark.parametrize("seed", seeds(range(16), quick=3))
def test_rows_of_random_logs(tmp_path: Path, seed: int) -> None:
    """Up to three windows, images, late and failing copies, caches that are cleared: lives and blank slots agree."""
    batches = list(whole_part(LogReader(random_log(seed, tmp_path / "log"))))
    raw = RawLog(batches)
    tables: dict[str, list[Any]] = {"requests": [], "blocks": [], "steps": []}
    for name, rows in tables_of(batches, "requests", "blocks", "steps"):
        tables[name] += rows
    assert Counter(map(announced_by, tables["blocks"])) == Counter(map(reported, raw.full()))
    for row in tables["steps"]:
        blank = [level.blank for level in row.occupancy]
        assert blank == [count for levels in raw.blank_after[row.seq] for count in levels]
    admitted = [row for row in tables["requests"] if row.admission is not None]
    assert sum(row.output_tokens for row in admitted) == raw.totals["output"]
    assert sum(row.reused_tokens for row in admitted) == raw.totals["reused"]


@pytest.mark.parametrize("seed", seeds(range(16), quick=3))
def test_what_lives_at_the_end_of_random_logs(tmp_path: Path, seed: int) -> None:
    """Behind lost batches and restarts, too, the lives that are not over are the full blocks of the replayed state."""
    log = random_log(seed, tmp_path / "log")
    found = Counter((row.window, row.level) for row in open_log(log).block_lives() if row.level is not None)
    state = replay(log).state
    assert state.created is not None
    expected: Counter[tuple[int, str]] = Counter()
    for created, group in zip(state.created.groups, state.groups, strict=True):
        for level, slots, _, _ in group.cached():
            expected[created.window, LEVEL_NAMES[level]] += len(slots)
        for run in group.tree.runs.values():
            if run.partial:  # in its last block
                last = group.slot_of(run.slots[-1])[0] if isinstance(group, SlidingGroup) else run.level
                expected[created.window, LEVEL_NAMES[last]] -= 1
    assert found == +expected
    rows = list(open_log(log).requests())
    assert sum(row.outcome == "running" for row in rows) == len(state.sequences)
    assert all(
        sum(row.tokens_by_reason.values()) == row.prompt_tokens for row in rows if row.tokens_by_reason
    )


def test_equal_contents_have_equal_numbers(log: Log, raw: RawLog) -> None:
    """In one window a content has one life at a time."""
    ends: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for row in log.block_lives():
        end = float("inf") if row.gone_seq is None else row.gone_seq
        ends.setdefault((row.window, row.content), []).append((row.stored_seq, end))
    for lives in ends.values():
        ordered = sorted(lives)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(ordered))


def test_evictions_are_the_removals(log: Log, raw: RawLog) -> None:
    """Each `BlocksRemoved` is a row in order, and the lives that it ends are its full blocks."""
    rows = list(log.evictions())
    found = [(row.seq, row.window, LEVEL_NAMES.index(row.level), row.why, row.blocks) for row in rows]
    assert found == raw.removed
    lives = [row for row in log.block_lives() if row.eviction is not None]
    assert Counter(row.eviction for row in lives) == Counter({row.eviction: row.full_blocks for row in rows})
    for row in rows:
        mine = [life for life in lives if life.eviction == row.eviction]
        assert row.never_reused == sum(life.reused == 0 for life in mine)
        assert {(life.gone_for, life.gone_for_admission) for life in mine} <= {
            (row.for_request, row.for_admission)
        }


def test_steps_add_up(log: Log, raw: RawLog) -> None:
    """The sums over all steps are those over all events, and a step is there for each batch."""
    rows = list(log.steps())
    assert [row.seq for row in rows] == [batch.seq for batch in log]
    names = {
        "admitted": "SequenceAdded",
        "refused": "AdmissionRefused",
        "ended": "SequenceRemoved",
        "prompt_tokens": "prompt",
        "reused_tokens": "reused",
        "output_tokens": "output",
        "stored_blocks": "stored",
        "removed_blocks": "removed",
        "cleared_blocks": "cleared",
        "offloaded_blocks": "offload",
        "onboarded_blocks": "onboard",
    }
    for name, total in names.items():
        assert sum(getattr(row, name) for row in rows) == raw.totals[total], name
    assert all(row.computed_tokens == row.prompt_tokens - row.reused_tokens for row in rows)


def test_occupancy(log: Log, raw: RawLog, path: Path) -> None:
    """Blank slots are those that events take and give back; at some batches all is as in the replayed state."""
    rows = list(log.steps())
    for row in rows:
        blank = [level.blank for level in row.occupancy]
        assert blank == [count for levels in raw.blank_after[row.seq] for count in levels]
        assert all(each.blocks == each.held + each.unreferenced + each.blank for each in row.occupancy)
    for row in rows[:: max(1, len(rows) // 6)]:
        state = replay(path, row.seq).state
        levels = [level for group in state.groups for level in group.levels]
        assert [each.unreferenced for each in row.occupancy] == [level.unreferenced for level in levels]
        assert [each.blocks for each in row.occupancy] == [level.size for level in levels]
        assert row.running == len(state.sequences)
        held = [
            len({slot for each in state.sequences.values() for slot in each.tables[group] if slot >= 0})
            for group in range(len(state.groups))
        ]
        assert [each.held for each in row.occupancy if each.level == "primary"] == held


def test_refused_running_and_ended(tmp_path: Path) -> None:
    """What was refused before its admission, what never was admitted, and what runs still at the log's end."""
    with KVCacheManager(strategies.config(primary_blocks=4), log=tmp_path / "log") as manager:
        manager.add_sequence("long", [1] * 7, lora_name="law", cache_salt="pepper")
        manager.flush()
        for name in ("late", "never"):
            with pytest.raises(CapacityError):
                manager.add_sequence(name, [2] * 6)
            manager.flush()
        manager.remove_sequence("long")
        manager.add_sequence("late", [2] * 6)
        manager.add_tokens(["late"], [3])
    first, late, never = open_log(tmp_path / "log").requests()
    assert (first.request_id, first.outcome, first.admission, first.refusals) == ("long", "ended", 0, 0)
    assert (first.lora_name, len(first.salt_digest or ""), first.output_tokens) == ("law", 64, 0)
    assert (late.request_id, late.outcome, late.refusals, late.output_tokens) == ("late", "running", 1, 1)
    assert late.ended_seq is None
    assert late.first_refused_ts is not None
    assert late.first_refused_ts <= (late.admitted_ts or 0)
    assert (never.request_id, never.outcome, never.admission, never.refusals) == ("never", "refused", None, 1)
    assert never.tokens_by_reason == {}


def test_a_request_that_outlives_its_process(tmp_path: Path) -> None:
    """Where a manager goes on from its log, what runs and what is cached goes on, too: one row each."""
    with KVCacheManager(strategies.config(), log=tmp_path / "log") as manager:
        manager.add_sequence("a", [1] * 5)
        manager.store_context_blocks("a", 5)
    writer = LogWriter(tmp_path / "log", resume=True, fsync="never")
    with KVCacheManager.resume(replay(tmp_path / "log").state, log=writer) as manager:
        manager.remove_sequence("a")
        manager.add_sequence("b", [1] * 5)
    first, second = open_log(tmp_path / "log").requests()
    assert (first.admission, first.request_id, first.outcome) == (0, "a", "ended")
    assert (second.admission, second.reused_tokens) == (1, 4)
    lives = list(open_log(tmp_path / "log").block_lives())
    assert [(life.stored_by, life.reused, life.gone_why) for life in lives] == [("a", 1, None)] * 2


def test_a_new_process_has_lost_it_all(tmp_path: Path) -> None:
    """Where one begins anew with an empty cache in the same log, requests are lost and blocks gone."""
    with KVCacheManager(strategies.config(), log=tmp_path / "log") as manager:
        manager.add_sequence("a", [1] * 5)
        manager.store_context_blocks("a", 5)
    writer = LogWriter(tmp_path / "log", resume=True, fsync="never")
    with KVCacheManager(strategies.config(), log=writer) as manager:
        manager.add_sequence("a", [1] * 5)
        manager.store_context_blocks("a", 5)
    rows = list(open_log(tmp_path / "log").requests())
    assert [(row.admission, row.outcome, row.output_tokens) for row in rows] == [
        (0, "lost", None),
        (1, "running", 0),
    ]
    assert rows[1].tokens_by_reason["restarted"] == 4
    lives = list(open_log(tmp_path / "log").block_lives())
    assert [life.gone_why for life in lives] == ["restarted"] * 2 + [None] * 2
    assert [life.content for life in lives] == [0, 1, 0, 1]


def test_after_lost_batches() -> None:
    """Where batches are missing rows go on with the state behind the gap; what began meanwhile has no admission."""
    manager = KVCacheManager(config())
    traffic = Traffic(manager, 3)
    assert manager.state.created is not None
    batches = [EventBatch(0, 0, (manager.state.created,))]
    traffic.record(40)  # lost
    traffic.step()
    manager.add_tokens(traffic.running, [0] * len(traffic.running))
    met = set(traffic.running)
    batches += lossy(manager, 1, 9)
    for _ in range(60):
        traffic.step()
        batch = manager.flush()
        batches += [] if batch is None else [batch]
    tables: dict[str, list[Any]] = {"requests": [], "blocks": [], "steps": []}
    for name, rows in tables_of(batches, "requests", "blocks", "steps"):
        tables[name] += rows
    unknown = {
        row.request_id for row in tables["requests"] if row.admission is None and row.outcome != "refused"
    }
    assert unknown == met != set()
    assert any(row.stored_by is None for row in tables["blocks"])
    # What stands before the gap continues what is missing.
    assert [(row.output_tokens, row.running) for row in tables["steps"][:2]] == [(0, 0), (0, len(met))]
    last = tables["steps"][-1]
    cached = [level.unreferenced for level in last.occupancy]
    assert cached == [level.unreferenced for level in manager.state.groups[0].levels]
    alive = Counter(row.level for row in tables["blocks"] if row.level is not None)
    slots = [(level, part) for level, part, _, _ in manager.state.groups[0].cached()]
    assert alive.total() <= sum(len(part) for _, part in slots)
    manager.close()


def test_a_block_that_came_back_unseen() -> None:
    """What was gone, and is cached again behind lost batches, begins a life there, whose storing nobody has seen."""
    manager = KVCacheManager(
        strategies.config(), substitutes=Substitutes(wall_ns=iter(range(100, 1000, 100)).__next__)
    )
    assert manager.state.created is not None
    batches: list[EventBatch | None] = [EventBatch(0, 0, (manager.state.created,))]
    for _ in range(2):
        manager.add_sequence("a", [1] * 5)
        manager.store_context_blocks("a", 5)
        manager.remove_sequence("a")
        batches.append(manager.flush())
        manager.add_sequence("all", [2] * 16)  # evicts it
        batches.append(manager.flush())
        manager.remove_sequence("all")
    del batches[-2:]
    manager.add_sequence("a", [1] * 5)
    manager.store_context_blocks("a", 5)
    batches += lossy(manager, 3, 4)
    rows = [row for _, rows in tables_of(filter(None, batches), "blocks") for row in rows]
    assert [(row.stored_by, row.gone_why) for row in rows] == [("a", "evicted")] * 2 + [(None, None)] * 2
    assert [row.content for row in rows] == [1, 0, 0, 1]
    assert {(row.stored_ts, row.last_used_ts) for row in rows[2:]} == {(600, 600)}
    manager.close()


def test_columns_are_plain(log: Log) -> None:
    """No value of a row is a numpy scalar: every program can take them."""
    plain = (int, str, bool, dict, tuple, type(None))
    for rows in (log.requests(), log.block_lives(), log.evictions(), log.steps()):
        for row in rows:
            assert {type(value) for value in row} <= set(plain)


def test_rows_come_while_the_log_is_read(path: Path) -> None:
    """The first row is there long before the log's end."""
    seen = []

    def watched() -> Any:
        for batch in LogReader(path):
            seen.append(batch.seq)
            yield batch

    next(iter(tables_of(watched(), "requests")))
    assert seen[-1] < list(LogReader(path))[-1].seq // 2


def test_what_cannot_be_read(path: Path, tmp_path: Path) -> None:
    """A directory that is no log is refused at once, one that lies where it does."""
    with pytest.raises(NotALog):
        open_log(tmp_path)
    with pytest.raises(Unreplayable, match="batch 3 does not fit"):
        list(tables_of([batch for batch in LogReader(path) if batch.seq not in (0, 1, 2)], "requests"))
    with pytest.raises(Unreplayable, match="its time exceeds 64 bits"):
        list(tables_of([EventBatch(0, 1 << 63, ())], "steps"))


def test_needs_no_heavy_library(tmp_path: Path, run_python: RunPython) -> None:
    """Reading rows loads neither torch nor pyarrow nor pandas, and importing the package hardly anything."""
    path = cleared_now_and_then(tmp_path / "log")
    heavy = "('torch', 'pyarrow', 'pandas', 'duckdb', 'sinks.base')"
    done = run_python(
        "import sys\nimport kvcache.audit\nassert 'numpy' not in sys.modules\n"
        f"from kvcache.audit import open_log\nlist(open_log({str(path)!r}).block_lives())\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
