"""A cache whose process has died goes on with what lay in its secondary file, as far as that is right."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvcache.errors import Unsupported, UsageError
from kvcache.fold.fingerprint import fingerprint
from kvcache.fold.state import CacheState
from kvcache.fold.survivors import find_survivors
from kvcache.inputs import Request, Retention, RetentionRange
from kvcache.layout import Layout
from kvcache.manager import KVCacheManager
from kvcache.pools import Pools
from kvcache.record.restart import LogOfOtherCache
from kvcache.replay import replay
from tests.oracles.survivors import flip, held_by, survivors
from tests.support.engines import strategies
from tests.support.engines.byte_engine import Driver, Wrap, at_once, failing, late, late_and_failing
from tests.support.engines.fake_engine import FakeEngine
from tests.support.engines.inside import journal_of
from tests.support.engines.simulated import LateCopier
from tests.support.seeds import seeds


def place(directory: Path) -> dict[str, Any]:
    """The settings of a cache that outlives its process."""
    return {"log": directory / "log", "secondary_path": str(directory / "secondary"), "model": "m"}


class Life:
    """An engine with random commands, and images of what lies on the disk."""

    def __init__(self, directory: Path, seed: int, wrap: Wrap) -> None:
        self.directory, self.wrap = directory, wrap
        self.lives = 0
        self.home = directory / "0"
        self.home.mkdir()
        self.driver = Driver(seed, wrap, trusted=False, **place(self.home))

    @property
    def engine(self) -> FakeEngine:
        return self.driver.engine

    def image(self) -> Path:
        """The log as it is on the disk now."""
        log = journal_of(self.engine.manager).outputs.log
        assert log is not None
        log.flush()
        return Path(shutil.copytree(self.home / "log", self.directory / f"log of {self.lives}"))

    def die(self, log: Path, *, recompute: bool) -> None:
        """Begin a new life with this log and with the file as it is now, maybe much later."""
        self.lives += 1
        new = self.directory / str(self.lives)
        new.mkdir()
        shutil.move(log, new / "log")
        shutil.copy(self.home / "secondary", new / "secondary")
        old, self.home = self.engine, new
        expected = survivors(new / "log", new / "secondary", old.manager.layout)
        before = old if recompute else None
        self.driver.engine = FakeEngine(wrap=self.wrap, before=before, **(self.driver.settings | place(new)))
        self.driver.preempted.clear()
        self.engine.meanings = old.meanings
        state, restored = self.engine.manager.state, self.engine.manager.restored
        again = restored.survey.recomputed if restored is not None else 0
        held = held_by(state, again)
        assert held == expected if not again else held >= expected
        self.engine.verify()
        journal_of(old.manager).outputs.close()

    def end(self) -> None:
        self.engine.settle()
        self.engine.manager.close()
        replayed = replay(self.home / "log", verify=True)
        assert replayed.fingerprint == fingerprint(self.engine.manager.state)
        assert not replayed.checkpoints_failed


WRAPS = (lambda seed: at_once, lambda seed: late, failing, late_and_failing)


def live(directory: Path, seed: int) -> Counter[str]:
    """A few lives of one cache; returns what became of the blocks in secondary."""
    r, life = random.Random(f"lives {seed}"), Life(directory, seed, WRAPS[seed % 4](seed))
    counts: Counter[str] = Counter()
    for _ in range(3):
        for _ in range(r.randrange(20, 120)):
            life.driver.step()
        if r.random() < 0.8:
            life.engine.settle()
        if r.random() < 0.7:
            life.engine.manager.flush()
        image = life.image()
        for _ in range(r.choice([0, 0, 5, 15, 30])):  # of which the log says nothing any more
            life.driver.step()
        life.die(image, recompute=r.random() < 0.5)
        restored = life.engine.manager.restored
        if restored is not None:
            survey = restored.survey
            for kind in ("verified", "changed", "in_flight", "unreachable", "recomputed"):
                counts[kind] += getattr(survey, kind)
    for _ in range(20):
        life.driver.step()
    life.end()
    return counts


@pytest.mark.parametrize("first", seeds(range(0, 60, 20), quick=1))
def test_whatever_is_found_again_is_right_and_all_that_can_be_is_found(tmp_path: Path, first: int) -> None:
    """After any commands, with copies late and failing and a log that may be older than the file: the next life begins
    with just the blocks that a count by hand finds, all have the K/V of their prefix, and the log replays.
    """
    counts: Counter[str] = Counter()
    for seed in range(first, first + 20):
        (tmp_path / str(seed)).mkdir()
        try:
            counts += live(tmp_path / str(seed), seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert set(counts) >= {"verified", "changed", "in_flight", "unreachable"}, counts


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(100, 1100))
def test_whatever_is_found_again_is_right_for_long(tmp_path: Path, seed: int) -> None:
    """The same for many more lives."""
    live(tmp_path, seed)


# -- single cases

PROMPT = [0, 1, 2, 3, 4, 5, 6, 7]


def filled(directory: Path, **settings: Any) -> FakeEngine:
    """A cache with PROMPT's four blocks in secondary, and another prompt in primary."""
    directory.mkdir(exist_ok=True)
    engine = FakeEngine(**(place(directory) | {"primary_blocks": 4, "secondary_blocks": 8} | settings))
    for request_id, tokens in (("a", PROMPT), ("b", [9] * 8)):
        engine.admit(Request(request_id, tokens))
        engine.forward(request_id)
        engine.end(request_id)
    engine.settle()
    return engine


def dead(directory: Path, **settings: Any) -> Path:
    """Where such a cache has died: what its process had not given up is gone with it."""
    engine = filled(directory / "before", **settings)
    engine.manager.flush()
    log = journal_of(engine.manager).outputs.log
    assert log is not None
    log.flush()
    shutil.copytree(directory / "before" / "log", directory / "log")
    shutil.copy(directory / "before" / "secondary", directory / "secondary")
    engine.manager.close()
    return directory


def opened(directory: Path, **settings: Any) -> FakeEngine:
    return FakeEngine(**(place(directory) | {"primary_blocks": 4, "secondary_blocks": 8} | settings))


def slots_of(engine: FakeEngine) -> list[int]:
    """Where PROMPT's blocks lie, shallowest first."""
    return [found.slot for found in sorted(held_by(engine.manager.state), key=lambda found: len(found.path))]


def test_a_prompt_is_reused_after_the_process_died(tmp_path: Path) -> None:
    """Blocks that lay in secondary are matched and onboarded with their bytes by the first request of the next life."""
    engine = opened(dead(tmp_path))
    restored = engine.manager.restored
    assert restored is not None
    assert (restored.survey.found, restored.survey.verified) == (4, 4)
    assert restored.verified_bytes == 4 * engine.manager.layout.groups[0].bytes_per_block
    assert engine.manager.count_reusable([*PROMPT, 1]) == 4
    admission = engine.admit(Request("c", PROMPT))[0]
    assert admission.reused_tokens == 7
    engine.forward("c")
    engine.verify()
    engine.verify_running()


SYSTEM = [8] * 4
CHATS = [SYSTEM + [number] * 4 for number in range(3)]


def with_system_prompt(directory: Path, retention: Retention | None = None) -> FakeEngine:
    """Where a cache has died whose chats lay in secondary, behind a prompt in primary that one of them held."""
    (directory / "before").mkdir()
    before = FakeEngine(**(place(directory / "before") | SIZES))
    for number, chat in enumerate(CHATS):
        before.admit(Request(number, chat, retention=retention))
        before.forward(number)
        if number:
            before.end(number)
    before.admit(Request("other", [7] * 6))
    before.settle()
    before.manager.flush()
    log = journal_of(before.manager).outputs.log
    assert log is not None
    log.flush()
    shutil.copytree(directory / "before" / "log", directory / "log")
    shutil.copy(directory / "before" / "secondary", directory / "secondary")
    return before


SIZES = {"primary_blocks": 7, "secondary_blocks": 8}


def test_a_system_prompt_is_computed_again_for_what_hangs_after_it(tmp_path: Path) -> None:
    """Without it the chats in secondary are lost; with it they are reused, and the right bytes are before them."""
    before = with_system_prompt(tmp_path)
    shutil.copytree(tmp_path / "log", tmp_path / "cold" / "log")
    shutil.copy(tmp_path / "secondary", tmp_path / "cold" / "secondary")
    cold = FakeEngine(**(place(tmp_path / "cold") | SIZES)).manager.restored
    assert cold is not None
    assert (cold.survey.found, cold.survey.verified, cold.survey.unreachable) == (4, 0, 4)
    engine = FakeEngine(before=before, **(place(tmp_path) | SIZES))
    restored = engine.manager.restored
    assert restored is not None
    assert (restored.survey.verified, restored.survey.recomputed) == (4, 2)
    engine.verify()
    for number, reusable in enumerate((2, 4, 4)):
        assert engine.manager.count_reusable([*CHATS[number], 1]) == reusable
    engine.admit(Request("again", CHATS[1]))
    engine.forward("again")
    engine.settle()
    engine.verify()
    engine.verify_running()


def test_what_is_computed_again_expires_as_if_it_were_let_go_of_now(tmp_path: Path) -> None:
    """Who held it is gone, so its time begins."""
    retention = Retention([RetentionRange(0, priority=80, duration_ms=10_000)])
    before = with_system_prompt(tmp_path, retention)
    engine = FakeEngine(before=before, **(place(tmp_path) | SIZES))
    engine.manager.check()
    runs = engine.manager.state.groups[0].tree.runs.values()
    assert {(run.level, run.priority, run.expiry > 0) for run in runs} == {(0, 80, True), (1, 80, True)}


def test_a_slot_whose_next_block_had_not_arrived_serves_neither(tmp_path: Path) -> None:
    """The bytes in the slot have the checksum that is known of it, but they are those of the block before."""
    (tmp_path / "before").mkdir()
    sizes = {"primary_blocks": 2, "secondary_blocks": 1}
    before = FakeEngine(wrap=lambda copier: LateCopier(copier, 2), **(place(tmp_path / "before") | sizes))
    for number in range(3):
        before.admit(Request(number, [number] * 4))
        before.forward(number)
        before.end(number)
        if number < 2:
            before.settle()
    assert before.manager.state.transfers
    before.manager.flush()
    log = journal_of(before.manager).outputs.log
    assert log is not None
    log.flush()
    held = [run for run in before.manager.state.groups[0].tree.runs.values() if run.level == 1]
    assert [bool(run.transfer) for run in held] == [True]
    shutil.copytree(tmp_path / "before" / "log", tmp_path / "log")
    # All bytes are as they were before the copy, as far as the checksums can tell.
    state = replay(tmp_path / "log").state
    noted = state.groups[0].levels[1].checksums
    assert noted is not None
    exported, survey = find_survivors(state, lambda group, slots: noted[slots].tobytes(), [2])
    assert (survey.in_flight, survey.verified) == (1, 0)
    assert exported.groups[0].slots == b""


def test_what_cannot_be_computed_again_is_lost_with_what_hangs_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine may decline, as for an adapter that it has not loaded yet."""
    before = with_system_prompt(tmp_path)
    monkeypatch.setattr(FakeEngine, "recompute", lambda self, lost: False)
    engine = FakeEngine(before=before, **(place(tmp_path) | SIZES))
    restored = engine.manager.restored
    assert restored is not None
    assert (restored.survey.verified, restored.survey.unreachable, restored.survey.recomputed) == (0, 4, 0)
    engine.manager.check()
    assert held_by(engine.manager.state) == set()


def test_a_new_log_and_a_new_file_are_begun(tmp_path: Path) -> None:
    """`open` is the call for the first start, too: then nothing was there to be found."""
    engine = opened(tmp_path)
    assert engine.manager.restored is None
    assert held_by(engine.manager.state) == set()
    assert (tmp_path / "secondary").stat().st_mode & 0o777 == 0o600


def test_a_lost_file_loses_its_blocks(tmp_path: Path) -> None:
    """Where the file is gone, a new one is made, and no block is found in it."""
    (dead(tmp_path) / "secondary").unlink()
    engine = opened(tmp_path)
    assert engine.manager.restored is not None
    assert engine.manager.restored.survey.verified == 0
    assert held_by(engine.manager.state) == set()


@pytest.mark.parametrize("block", range(4))
def test_a_flipped_bit_drops_its_block_and_all_after_it(tmp_path: Path, block: int) -> None:
    """A bit that is not what was copied costs the blocks from there on, and no other."""
    dead(tmp_path)
    shutil.copytree(tmp_path, tmp_path / "copy", ignore=shutil.ignore_patterns("before", "copy"))
    slot = slots_of(opened(tmp_path / "copy"))[block]
    size = Layout.of(strategies.config(**_plain(tmp_path))).groups[0].bytes_per_block
    flip(tmp_path / "secondary", 4096 + slot * size + random.Random(block).randrange(size))
    engine = opened(tmp_path)
    assert engine.manager.restored is not None
    survey = engine.manager.restored.survey
    assert (survey.verified, survey.changed, survey.unreachable) == (block, 1, 3 - block)
    assert engine.manager.count_reusable([*PROMPT, 1]) == block


def _plain(directory: Path) -> dict[str, Any]:
    settings = place(directory) | {"primary_blocks": 4, "secondary_blocks": 8}
    del settings["log"]
    return {"dtype": "float32", "num_kv_heads": 1, "head_dim": 1} | settings


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"model": "n"}, "model"),
    "variant": ({"model_variant": "int4"}, "model"),
    "dtype": ({"dtype": "float16"}, "model"),
    "layout": ({"kv_layout": "HND"}, "model"),
    "secondary": ({"secondary_blocks": 9}, "secondary blocks"),
    "names": ({"block_hash": "v1_block_key"}, "block_hash is v2_sha256_64"),
    "policy": ({"eviction_policy": "levels"}, "eviction_policy is lru"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_the_log_of_another_cache_is_refused(tmp_path: Path, other: str) -> None:
    """With a new file and the log of a cache that means something else by its blocks, nothing is opened or changed."""
    dead(tmp_path)
    (tmp_path / "secondary").unlink()
    before = {path.name: path.read_bytes() for path in (tmp_path / "log").glob("*.kvlog")}
    settings, says = OTHERS[other]
    with pytest.raises(LogOfOtherCache, match=says):
        opened(tmp_path, **settings)
    assert {path.name: path.read_bytes() for path in (tmp_path / "log").glob("*.kvlog")} == before


def test_more_primary_blocks_are_no_other_cache(tmp_path: Path) -> None:
    """What is only in primary may change between two lives: none of it is found again anyway."""
    engine = opened(dead(tmp_path), primary_blocks=6)
    assert engine.manager.count_reusable([*PROMPT, 1]) == 4
    engine.manager.check()


def test_a_log_without_tokens_is_refused(tmp_path: Path) -> None:
    """Blocks could not be told apart by their contents; who asks for that is refused before anything is opened."""
    dead(tmp_path)
    config = strategies.config(**_plain(tmp_path))
    silent = config.model_copy(update={"log": config.log.model_copy(update={"record_tokens": False})})
    pools = Pools(Layout.of(silent), "cpu", silent.secondary_path)
    with pytest.raises(Unsupported, match="without tokens"):
        KVCacheManager.open(silent, tmp_path / "log", pools=pools)
    with pytest.raises(UsageError, match="pools are required"):
        KVCacheManager.open(config, tmp_path / "log")
    with pytest.raises(UsageError, match="a log is required"):
        KVCacheManager.open(config, None, pools=pools)


def test_pools_elsewhere_than_the_settings_say_are_refused(tmp_path: Path) -> None:
    """A file that the settings do not name is not served, and one that they name is not left out."""
    config = strategies.config(**_plain(tmp_path))
    with pytest.raises(UsageError, match="disagree about the secondary level"):
        KVCacheManager.open(config, tmp_path / "log", pools=Pools(Layout.of(config), "cpu"))
    other = Pools(Layout.of(config), "cpu", tmp_path / "other")
    with pytest.raises(UsageError, match="disagree about the secondary level"):
        KVCacheManager(config, pools=other)


def test_without_a_file_nothing_is_found_again(tmp_path: Path) -> None:
    """`open` then only continues the log."""
    for epoch in (1, 2):
        config = strategies.config(secondary_blocks=8)
        manager = KVCacheManager.open(config, tmp_path / "log")
        assert manager.restored is None
        assert manager.state.epoch == 0
        manager.close()
        assert replay(tmp_path / "log").state.epoch == epoch - 1


def test_an_exported_state_has_the_checksums_of_what_has_landed(tmp_path: Path) -> None:
    """So a fold that begins there, as with a snapshot, finds the same again, and has the same fingerprint."""
    engine = filled(tmp_path / "before")
    state = engine.manager.state
    assert state.created is not None
    again = CacheState()
    again.apply(state.created)
    again.apply(state.export())
    assert fingerprint(again) == fingerprint(state)
    assert again.export().groups[0].checksums == state.export().groups[0].checksums != b""
    assert engine.pools.secondary_file is not None
    _, survey = find_survivors(again, engine.pools.secondary_file.checksums, [4])
    assert survey.verified == 4


def test_checksums_are_in_the_log_only_with_a_file(tmp_path: Path) -> None:
    """A secondary level in memory dies with its process, so nobody pays for checksums."""
    engine = FakeEngine(primary_blocks=4, secondary_blocks=8)
    engine.admit(Request("a", PROMPT))
    engine.forward("a")
    engine.end("a")
    engine.admit(Request("b", [9] * 8))
    engine.settle()
    assert engine.manager.state.groups[0].levels[1].checksums is None
    assert filled(tmp_path / "with").manager.state.groups[0].levels[1].checksums is not None
