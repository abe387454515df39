"""Several workers' logs together, in a case worked out by hand, and against every life looked at one by one."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.log.frames import SEGMENT_HEADER_BYTES
from kvcache import KVCacheConfig, KVCacheManager
from kvcache.audit.fleet import (
    Computed,
    LeftOut,
    WorkerAudit,
    audit_worker,
    in_processes,
    on_ray,
    spread,
    together,
)
from kvcache.audit.totals import Audit
from kvcache.errors import Unsupported
from kvcache.manager import Substitutes
from kvcache.replay import replay
from tests.support.commands import Kvcache

SECOND = 10**9
A, B = list(range(100, 113)), list(range(200, 213))
"""Two prompts of three blocks of four tokens, and one token more."""


def worker(directory: Path, steps: Sequence[tuple[int, str, list[int]]], **settings: object) -> None:
    """A worker that serves a prompt at each of these seconds, and has room for four blocks."""
    config = KVCacheConfig.model_validate(
        {"max_sequence_length": 16, "tokens_per_block": 4, "primary_blocks": 4, "enable_partial_reuse": False}
        | settings
    )
    now = [0]
    with KVCacheManager(
        config,
        log=directory,
        substitutes=Substitutes(wall_ns=lambda: 1_790_000_000 * SECOND + now[0] * SECOND),
    ) as manager:
        for second, name, prompt in steps:
            now[0] = second
            manager.add_sequence(name, prompt)
            manager.store_context_blocks(name, len(prompt))
            manager.remove_sequence(name)
            manager.flush()


def read(found: Iterable[WorkerAudit | LeftOut]) -> list[WorkerAudit]:
    """Audits of logs of which none is left out."""
    workers = []
    for each in found:
        assert isinstance(each, WorkerAudit)
        workers.append(each)
    return workers


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    """East has A from second 0 until B takes its place at 4; west asks for A at 2 and at 6, and lost it between."""
    worker(tmp_path / "east", [(0, "a", A), (4, "b", B)])
    worker(tmp_path / "west", [(2, "a", A), (3, "c", [7] * 13), (6, "again", A)])
    return tmp_path


def test_what_another_worker_had(fleet: Path) -> None:
    """Of three misses of A in west and east, one came while the other had it."""
    found = together(read(in_processes([fleet / "east", fleet / "west"], 1)))
    assert [each.name for each in found.workers] == ["east", "west"]
    assert found.elsewhere == [0, 12]
    assert found.computed_on == {1: 6, 2: 3}
    assert int(found.reasons.sum()) == 5 * 13


def test_of_a_block_that_was_copied_in_part_the_rest_counts(tmp_path: Path) -> None:
    """West has two blocks of A, and the first half of the third: it computes the other half, which east has."""
    worker(tmp_path / "east", [(0, "a", A)])
    worker(
        tmp_path / "west",
        [(1, "other", [*A[:10], 7, 7, 7]), (2, "a", A)],
        enable_partial_reuse=True,
        primary_blocks=8,
    )
    found = together(audit_worker(tmp_path / name) for name in ("east", "west"))
    assert found.elsewhere == [0, 8 + 2]


def test_what_a_log_begins_with_was_not_there_before(tmp_path: Path) -> None:
    """East goes on with A in a log of its own that begins at second 5: for what west computes at 4 nobody had it."""
    worker(tmp_path / "before", [(0, "a", A)])
    state, now = replay(tmp_path / "before").state, 1_790_000_005 * SECOND
    (tmp_path / "fleet").mkdir()
    KVCacheManager.resume(
        state, log=tmp_path / "fleet" / "east", substitutes=Substitutes(wall_ns=lambda: now)
    ).close()
    worker(tmp_path / "fleet" / "west", [(4, "a", A), (6, "b", B), (7, "again", A)])
    found = together(audit_worker(tmp_path / "fleet" / name) for name in ("east", "west"))
    assert found.elsewhere == [0, 12]


def test_prefixes_that_several_computed(fleet: Path, kvcache: Kvcache) -> None:
    """Both workers computed A: three blocks, once more than needed; nothing else was computed by both."""
    [prefix] = json.loads(kvcache("audit", fleet, "--jobs", 1, "--json").out)["prefixes"]
    assert (prefix["first"], prefix["stop"], prefix["duplicated_tokens"]) == (0, 12, 12)
    assert prefix["workers"] == ["east", "west"]
    [row] = [line for line in kvcache("audit", fleet, "--jobs", 1).out.splitlines() if prefix["name"] in line]
    assert row.split() == ["0–11", prefix["name"], "12", "east,", "west"]
    # The name is that of the prefix's last block, which both logs know.
    for name in prefix["workers"]:
        assert kvcache("events", fleet / name, "--block", prefix["name"], "--type", "BlocksStored").code == 0


@given(st.lists(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), max_size=4), max_size=4))
def test_every_block_that_several_computed_is_reported_once(fleet: list[list[list[int]]]) -> None:
    """Prefixes are made of all blocks that several workers computed, each with those of the same workers."""
    by: dict[tuple[int, ...], set[str]] = {}
    for number, prompts in enumerate(fleet):
        for prompt in prompts:
            for length in range(1, len(prompt) + 1):
                by.setdefault(tuple(prompt[:length]), set()).add(str(number))
    numbers = {block: number for number, block in enumerate(sorted(by), 1)}
    workers = []
    for number in range(len(fleet)):
        own = [block for block, names in by.items() if str(number) in names]
        workers.append(
            (
                str(number),
                Computed(
                    np.array([numbers[block] for block in own], np.uint64),
                    np.array([numbers.get(block[:-1], 0) for block in own], np.uint64),
                    np.array([len(block) - 1 for block in own], np.int64),
                ),
            )
        )
    reported = []
    named = {np.uint64(number).tobytes().hex(): block for block, number in numbers.items()}
    for each in spread(workers, 2, 1000):
        last = named[each.name]
        blocks = [last[: length + 1] for length in range(each.first // 2, each.stop // 2)]
        assert blocks[-1] == last
        assert all(by[block] == set(each.workers) for block in blocks)
        assert each.duplicated_tokens == 2 * len(blocks) * (len(each.workers) - 1)
        reported += blocks
    assert sorted(reported) == sorted(block for block, names in by.items() if len(names) > 1)


@pytest.mark.parametrize(
    "args",
    [
        ("explain", "--request", "a"),
        ("report",),
        ("curve",),
        ("export", "--to", "csv", "-o", "t"),
        ("whatif",),
        ("audit", "--since", "3"),
    ],
)
def test_a_directory_of_logs_is_no_log(
    fleet: Path, kvcache: Kvcache, args: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands that take one log name those that are inside."""
    monkeypatch.chdir(tmp_path)
    command, *options = args
    done = kvcache(command, fleet, *options)
    assert (done.code, done.out) == (2, "")
    assert "one" in done.err
    assert "(east, west)" in done.err


@pytest.mark.parametrize("jobs", [1, 2])
def test_processes_agree(fleet: Path, jobs: int, kvcache: Kvcache) -> None:
    """However many read."""
    found = json.loads(kvcache("audit", fleet, "--jobs", jobs, "--json").out)
    assert found["elsewhere_tokens"] == 12
    assert [each["name"] for each in found["workers"]] == ["east", "west"]
    assert found["prompt_tokens"] == sum(each["audit"]["prompt_tokens"] for each in found["workers"])
    text = kvcache("audit", fleet, "--jobs", 1).out
    assert "12 were computed although another worker had them cached: 18.5 %" in text


def test_ray_agrees(fleet: Path) -> None:
    """On a cluster of this machine alone."""
    pytest.importorskip("ray", reason="Ray is not installed")
    found = together(read(on_ray([fleet / "east", fleet / "west"])))
    assert found.elsewhere == [0, 12]


def test_without_ray_it_says_what_to_do(
    fleet: Path, kvcache: Kvcache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that names the extra, and no traceback."""
    monkeypatch.setitem(sys.modules, "ray", None)
    done = kvcache("audit", fleet, "--engine", "ray")
    assert done.code == 2
    assert "kvcache[ray]" in done.err


def test_a_single_log_is_read_here(fleet: Path, kvcache: Kvcache) -> None:
    """--engine is for several logs, and is not ignored for one."""
    done = kvcache("audit", fleet / "east", "--engine", "ray")
    assert (done.code, done.out) == (2, "")
    assert "--engine ray requires a directory of logs" in done.err


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_cannot_be_read_is_left_out(
    fleet: Path, jobs: int, kvcache: Kvcache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that cannot be looked into, and a log that cannot be read, are told; the others are audited."""
    alone = json.loads(kvcache("audit", fleet, "--jobs", 1, "--json").out)
    assert alone.pop("left_out") == []
    (fleet / "closed").mkdir()
    (fleet / "odd").mkdir()
    [segment] = (fleet / "east").glob("*.kvlog")
    (fleet / "odd" / segment.name).symlink_to(segment.name)  # to itself: even the superuser cannot read it
    names = os.listdir

    def refused(path: Any) -> list[str]:
        if Path(path).name == "closed":  # the superuser may read everything
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return names(path)

    monkeypatch.setattr(os, "listdir", refused)
    done = kvcache("audit", fleet, "--jobs", jobs, "--json")
    assert done.code == 0
    assert f"kvcache: warning: skipped {fleet / 'closed'}: Permission denied\n" in done.err
    link = f"{segment.name} is a symbolic link, which is not followed: replace it by the file itself"
    assert f"skipped {fleet / 'odd'}: {link}\n" in done.err
    found = json.loads(done.out)
    assert found.pop("left_out") == [
        {"name": "closed", "reason": "Permission denied"},
        {"name": "odd", "reason": link},
    ]
    assert found == alone
    for name in ("east", "west"):
        shutil.rmtree(fleet / name)
    done = kvcache("audit", fleet, "--jobs", jobs)
    assert (done.code, done.out) == (2, "")
    assert (
        f"none of the logs can be read: {fleet / 'closed'}: Permission denied; {fleet / 'odd'}: {link}"
        in done.err
    )


def test_blocks_that_cannot_be_compared_are_refused(fleet: Path) -> None:
    """Other sizes, no names, no tokens."""
    worker(fleet / "north", [(0, "a", A)], tokens_per_block=2, primary_blocks=8)
    with pytest.raises(Unsupported, match="named differently"):
        together(audit_worker(path) for path in fleet.iterdir())
    for name, settings in (("nameless", {"block_hash": "none"}), ("mute", {"log": {"record_tokens": False}})):
        worker(fleet / name, [(0, "a", A)], **settings)
        with pytest.raises(Unsupported, match=name):
            audit_worker(fleet / name)


def test_a_worker_that_has_just_begun_holds_nobody_up(fleet: Path) -> None:
    """Its log has no batch yet."""
    (fleet / "new").mkdir()
    [segment] = (fleet / "east").glob("*.kvlog")
    (fleet / "new" / segment.name).write_bytes(segment.read_bytes()[:SEGMENT_HEADER_BYTES])
    found = together(audit_worker(path) for path in fleet.iterdir())
    assert found.elsewhere == [0, 0, 12]


def made(name: str, lives: list[tuple[int, int, int]], misses: list[tuple[int, int, int]]) -> WorkerAudit:
    """A worker with these lives (name, begin, end) and misses (name, time, tokens)."""
    columns = np.array(lives, np.int64).reshape(-1, 3)
    asked = np.array(misses, np.int64).reshape(-1, 3)
    return WorkerAudit(
        name,
        Audit(),
        1,
        "same",
        (columns[:, 0].astype(np.uint64), columns[:, 1], columns[:, 2]),
        (asked[:, 0].astype(np.uint64), asked[:, 1], asked[:, 2]),
    )


times = st.integers(0, 12)
some_lives = st.lists(
    st.tuples(st.integers(1, 3), times, times).map(lambda it: (it[0], *sorted(it[1:]))), max_size=8
)
some_misses = st.lists(st.tuples(st.integers(1, 4), times, st.integers(1, 3)), max_size=6)


@given(st.lists(st.tuples(some_lives, some_misses), min_size=1, max_size=3))
def test_every_life_is_looked_at(
    workers: list[tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]],
) -> None:
    """A miss counts if any life of any other worker covers it: begun by then, and not over."""
    found = together(made(str(number), *each) for number, each in enumerate(workers))
    for number, (_, misses) in enumerate(workers):
        others = [life for other, (lives, _) in enumerate(workers) if other != number for life in lives]
        covered = sum(
            tokens * any(name == own and begin <= at < end for own, begin, end in others)
            for name, at, tokens in misses
        )
        assert found.elsewhere[number] == covered
