"""`eviction_policy="levels"`: what was used again goes later, even if it was evicted in between; logs tell it all."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from events.types import StateExported
from kvcache.config import KVCacheConfig
from kvcache.errors import ConfigError, InvariantViolated
from kvcache.fold.fingerprint import fingerprint
from kvcache.fold.group import MOST_USES, REMEMBERED, UseCounts
from kvcache.fold.state import CacheState
from kvcache.manager import KVCacheManager
from kvcache.replay import replay
from kvcache.whatif.trial import Trial, play
from tests.oracles import agreement
from tests.oracles.cache_model import Model, Refused
from tests.oracles.window_model import Path as BlockPath
from tests.oracles.window_model import Window
from tests.support.engines import strategies
from tests.support.seeds import seeds

PLAIN = strategies.NAMESPACES[0]


def levels(**sets: Any) -> KVCacheConfig:
    return strategies.config(eviction_policy="levels", **sets)


def serve(manager: KVCacheManager, *prompts: int) -> None:
    """One request after the other, each of two blocks that are its own."""
    for prompt in prompts:
        manager.add_sequence("served", [prompt] * 4)
        manager.store_context_blocks("served", 4)
        manager.remove_sequence("served")


def kept(manager: KVCacheManager, *prompts: int) -> list[int]:
    """The prompts of which everything is cached."""
    return [prompt for prompt in prompts if manager.count_reusable([prompt] * 5) == 2]


def uses_of(state: CacheState) -> UseCounts:
    uses = state.groups[0].uses
    assert uses is not None
    return uses


# -- what it does


@pytest.mark.parametrize(("policy", "left"), [("lru", [3, 4, 5, 6]), ("levels", [1, 4, 5, 6])])
def test_what_was_used_again_goes_later(policy: str, left: list[int]) -> None:
    """With room for four prompts, one that was used twice outlives one that was used after it."""
    manager = KVCacheManager(strategies.config(primary_blocks=8, eviction_policy=policy))
    serve(manager, 7, 8, 9, 11, 12, 1, 2, 1, 3, 4, 5, 6)
    assert kept(manager, *range(1, 13)) == left
    manager.check()


def test_old_use_passes() -> None:
    """What was used often, but not lately, goes like anything else in the end."""
    manager = KVCacheManager(levels(primary_blocks=6))
    serve(manager, 7, 8, 9, 1, 1, 1, 1, 1)
    assert kept(manager, 1) == [1]
    serve(manager, *range(20, 40))
    assert kept(manager, 1) == []


def test_uses_are_remembered_of_what_was_evicted() -> None:
    """A prompt that comes back after its eviction was used twice; when it was forgotten, once again."""
    manager = KVCacheManager(levels(primary_blocks=4))
    serve(manager, 1, 2, 3, 1)
    assert manager.state.groups[0].levels[0].unreferenced == 4
    counted = uses_of(manager.state).by_name
    assert sorted(counted.values()) == [1, 1, 1, 1, 2, 2]
    serve(manager, *range(10, 10 + REMEMBERED * 2))
    assert len(counted) == REMEMBERED * 4
    assert set(counted.values()) == {1}


def test_sequences_at_a_time_use_a_block_once() -> None:
    """It counts when the last of them lets go, and more than four times is four times."""
    manager = KVCacheManager(levels(primary_blocks=12))
    for round_ in range(MOST_USES + 2):
        for name in ("a", "b", "c"):
            manager.add_sequence(name, [1, 1, 1])
            manager.store_context_blocks(name, 2)
        for name in ("a", "b", "c"):
            manager.remove_sequence(name, store=False)
        counts = list(uses_of(manager.state).by_name.values())
        assert counts == [min(round_ + 1, MOST_USES)]


def test_secondary_keeps_what_was_used_again() -> None:
    """Both levels have one order: what is offloaded keeps its turn there."""
    manager = KVCacheManager(levels(primary_blocks=4, secondary_blocks=8))
    serve(manager, 7, 8, 9, 11, 12, 13, 14, 1, 1, 3, 4, 5, 6, 15, 16)
    assert kept(manager, *range(1, 17)) == [1, 4, 5, 6, 15, 16]
    group = manager.state.groups[0]
    assert {run.level for run in group.tree.runs.values() if run.credit} == {1}


def test_names_are_made_where_nobody_listens() -> None:
    """Use counts need them, so "auto" makes them, and "none" is refused."""
    created = KVCacheManager(levels(block_hash="auto")).state.created
    assert created is not None
    assert created.key_bytes
    with pytest.raises(ConfigError, match=r"block_hash: given 'none'.*eviction_policy=levels"):
        levels(block_hash="none")


def test_sliding_windows_count_nothing() -> None:
    """They go by release alone, beside a window with full attention that counts."""
    manager = KVCacheManager(levels(num_layers=2, max_attention_window=(4, 24), primary_blocks=12))
    sliding, full = manager.state.groups
    assert sliding.uses is None
    assert full.uses is not None
    assert KVCacheManager(strategies.config()).state.groups[0].uses is None


# -- beside the model


@dataclass
class Watched(Window):
    """Notes how often another block goes than the one that was released first."""

    otherwise: int = 0

    def victim(self, level: int, exempt: Collection[BlockPath] = ()) -> BlockPath | None:
        """As ever."""
        found = super().victim(level, exempt)
        credits_ = {path: block.credit for path, block in self.cached.items()}
        for block in self.cached.values():
            block.credit = 0
        self.otherwise += super().victim(level, exempt) != found
        for path, credit in credits_.items():
            self.cached[path].credit = credit
        return found


class Alongside:
    """Random requests, some of which return, for a manager, the model, and from some point on a second manager."""

    def __init__(self, seed: int, log: Path) -> None:
        self.rng = rng = random.Random(seed)
        secondary = rng.choice([0, 0, 6, 12])
        self.config = config = levels(
            primary_blocks=rng.randint(12, 16),
            secondary_blocks=secondary,
            # In secondary the block that is copied from must stay, which the model is not told.
            enable_partial_reuse=not secondary and rng.random() < 0.5,
        )
        self.managers = [KVCacheManager(config, log=log)]
        blocks = (config.primary_blocks, config.secondary_blocks)
        assert isinstance(blocks[0], int)
        assert isinstance(blocks[1], int)
        partial = config.enable_partial_reuse
        self.model = Model(2, (blocks[0], blocks[1]), [24], 24, partial=partial, levels=True)
        (window,) = self.model.windows
        values = {field.name: getattr(window, field.name) for field in fields(window)}
        self.window = self.model.windows[0] = Watched(**values)
        self.talks = [[rng.randrange(2) for _ in range(rng.randint(3, 9))] for _ in range(12)]
        self.next = 0

    def step(self) -> None:
        """Admit a request, or end one."""
        running: list[Any] = list(self.model.running)
        rng = self.rng
        if len(running) < 3 and rng.random() < 0.6:
            talk = rng.choice(self.talks[: rng.choice([3, 12])])
            prompt = [*talk[: rng.randint(1, len(talk))], rng.randrange(9)]
            self.next += 1
            try:
                self.model.add([(self.next, PLAIN, prompt, None, None, None)], [[self.source_of(prompt)]])
            except Refused:
                return
            self.model.compute(self.next, len(prompt))
            for manager in self.managers:
                manager.add_sequence(self.next, prompt)
                manager.store_context_blocks(self.next, len(prompt))
        elif running:
            chosen = rng.choice(running)
            if rng.random() < 0.1:
                self.model.set_priority(chosen, 20, 0, 24)
                for manager in self.managers:
                    manager.set_priority(chosen, 20)
            self.model.end(chosen, store=True)
            for manager in self.managers:
                manager.remove_sequence(chosen)

    def source_of(self, prompt: list[int]) -> BlockPath | None:
        """Which block the manager would copy from."""
        partial = self.managers[0].match(prompt).partial
        sources = self.model.match(PLAIN, prompt).sources[0]
        return (
            None
            if partial is None
            else {strategies.name_of(path).hex(): path for path in sources}[partial.name]
        )

    def compare(self) -> None:
        """All of them hold the same, and gave up the same in the same order."""
        first = self.managers[0]
        agreement.blocks_agree(first.state, 0, self.window)
        agreement.uses_agree(first.state, 0, self.window)
        agreement.removals_agree(first.bus.pending, self.window)
        self.window.removed.clear()
        self.window.offloaded.clear()
        for manager in self.managers:
            manager.check()
            assert manager.fingerprint() == first.fingerprint()
            assert manager.bus.pending == first.bus.pending
        for manager in self.managers:
            manager.flush()


@pytest.mark.parametrize("first", seeds(range(0, 30, 3), quick=1))
def test_random_requests_alongside_the_model(first: int, tmp_path: Path) -> None:
    """The manager does what the model does, one that goes on from an export does alike, and logs replay to both."""
    otherwise = 0
    for seed in range(first, first + 3):
        alongside = Alongside(seed, tmp_path / str(seed))
        for step in range(160):
            if step == 60:
                state = alongside.managers[0].state
                alongside.managers.append(
                    strategies.continue_from(alongside.config, state.created, state.export())
                )
            alongside.step()
            alongside.compare()
        otherwise += alongside.window.otherwise
        alongside.managers[0].close()
        replayed = replay(tmp_path / str(seed), verify=True)
        assert replayed.fingerprint == fingerprint(alongside.managers[0].state)
        alongside.managers = [KVCacheManager.resume(replayed.state), alongside.managers[1]]
        for _ in range(40):
            alongside.step()
            alongside.compare()
    assert otherwise > 3  # else nothing would have been shown of the order


def test_whatif_plays_the_policy_of_the_log(tmp_path: Path) -> None:
    """Without a policy what was recorded happens again; with one what would have happened."""
    with KVCacheManager(levels(primary_blocks=8), log=tmp_path / "log") as manager:
        for prompt in (7, 8, 9, 11, 12, 1, 2, 1, 3, 4, 5, 6, 1):
            serve(manager, prompt)
            manager.flush()
    trials = [Trial(), Trial(policy="levels"), Trial(policy="lru"), Trial({"eviction_policy": "lru"})]
    played = play(tmp_path / "log", trials)
    assert [outcome.config.eviction_policy for outcome in played] == ["levels"] * 3 + ["lru"] * 2
    assert [outcome.tally.reused_tokens for outcome in played] == [6, 6, 6, 3, 3]


# -- what a log may say


def _set_credit(state: CacheState) -> None:
    next(iter(state.groups[0].tree.runs.values())).credit = 5


def _use_last(state: CacheState) -> None:
    counts = uses_of(state).by_name
    counts.move_to_end(next(iter(counts)))


CHANGES: dict[str, Callable[[CacheState], object]] = {
    "credit": _set_credit,
    "uses": lambda state: uses_of(state).by_name.update({next(iter(uses_of(state).by_name)): 3}),
    "a block that was evicted": lambda state: uses_of(state).by_name.update({b"12345678": 1}),
    "which was used last": _use_last,
    "turn of the last victim": lambda state: setattr(uses_of(state), "last_turn", 7),
}


@pytest.mark.parametrize("change", CHANGES)
def test_fingerprint_depends_on(change: str) -> None:
    """Two states that differ in this alone have two fingerprints."""
    manager = KVCacheManager(levels(primary_blocks=4))
    serve(manager, 1, 2, 3, 2)
    before = manager.fingerprint()
    CHANGES[change](manager.state)
    assert manager.fingerprint() != before


def lie(exported: StateExported, change: Callable[[list[int]], None]) -> StateExported:
    """The state with other numbers of credits and uses: two runs, then the turn, then names and uses."""
    numbers = np.frombuffer(exported.groups[0].uses, np.int64).tolist()
    change(numbers)
    group = msgspec.structs.replace(exported.groups[0], uses=np.array(numbers, np.int64).tobytes())
    return msgspec.structs.replace(exported, groups=(group,))


def _same_name(numbers: list[int]) -> None:
    numbers[5] = numbers[3]


LIES: dict[str, tuple[Callable[[list[int]], None], str]] = {
    "no credits": (list.clear, "credits are incomplete"),
    "credit below 0": (lambda numbers: numbers.__setitem__(0, -1), "impossible credit"),
    "credit that no release has": (lambda numbers: numbers.__setitem__(0, 2**62), "impossible credit"),
    "turn below 0": (
        lambda numbers: numbers.__setitem__(2, -1),
        "the turn of the last evicted block is impossible",
    ),
    "half a block": (lambda numbers: numbers.append(1), "use counts are incomplete"),
    "no uses": (lambda numbers: numbers.__setitem__(4, 0), "the use count of a block is impossible"),
    "too many uses": (lambda numbers: numbers.__setitem__(4, 5), "the use count of a block is impossible"),
    "one block twice": (_same_name, "duplicate use count"),
    "more than can be": (
        lambda numbers: numbers.extend(n for i in range(40) for n in (i, 1)),
        "too many evicted",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_impossible_uses_are_refused(name: str) -> None:
    """An exported state that no cache can have."""
    manager = KVCacheManager(levels(primary_blocks=4))
    serve(manager, 1, 2)
    change, message = LIES[name]
    state = CacheState()
    assert manager.state.created is not None
    state.apply(manager.state.created)
    with pytest.raises(InvariantViolated, match=message):
        state.apply(lie(manager.state.export(), change))
    state.apply(lie(manager.state.export(), lambda numbers: None))
    assert fingerprint(state) == manager.fingerprint()


@pytest.mark.parametrize(
    ("policy", "key_bytes", "message"),
    [
        ("fifo", 32, "unknown eviction policy"),
        (3, 32, "unknown eviction policy"),
        ("levels", 0, "have no names"),
    ],
)
def test_impossible_policies_are_refused(policy: Any, key_bytes: int, message: str) -> None:
    """A recorded cache with an order that nobody knows, or one that cannot be."""
    created = KVCacheManager(levels()).state.created
    assert created is not None
    settings = {**msgspec.json.decode(created.config), "eviction_policy": policy}
    algorithm = created.hash_algorithm if key_bytes else "none"
    lying = msgspec.structs.replace(
        created, config=msgspec.json.encode(settings).decode(), key_bytes=key_bytes, hash_algorithm=algorithm
    )
    with pytest.raises(InvariantViolated, match=message):
        CacheState().apply(lying)


def test_logs_from_before_the_setting_are_least_recently_used() -> None:
    """They do not name it."""
    created = KVCacheManager(strategies.config()).state.created
    assert created is not None
    settings = msgspec.json.decode(created.config)
    del settings["eviction_policy"]
    state = CacheState()
    state.apply(msgspec.structs.replace(created, config=msgspec.json.encode(settings).decode()))
    assert state.groups[0].uses is None
    assert KVCacheManager.resume(state).config.eviction_policy == "lru"
