"""What schedulers ask: each answer is compared with what then really happens, in random programs and in small cases."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from events.tokens import symbols
from events.types import BlocksReused, Event
from kvcache.errors import DuplicateRequest, OutOfBlocks, PromptTooLong, UnknownRequest, UsageError
from kvcache.inputs import Request
from kvcache.manager import KVCacheManager
from tests.support.engines import strategies
from tests.support.engines.inside import sequence_of
from tests.support.logs import random_logs
from tests.support.seeds import seeds

PerWindow = dict[int, int]


class Watched:
    """A manager: what it answers is compared with what it does, whoever calls it."""

    def __init__(self, manager: KVCacheManager, rng: random.Random, seen: Counter[str]) -> None:
        self._manager, self._rng, self._seen = manager, rng, seen
        self._events: list[Event] = []
        manager.bus.subscribe(self._events.append, BlocksReused)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    @property
    def free(self) -> PerWindow:
        return self._manager.num_free_blocks_per_window()

    def unchanged(self, ask: Callable[[], Any]) -> Any:
        """What a question is answered with, which must change nothing."""
        before = self._manager.fingerprint()
        answer = ask()
        assert self._manager.fingerprint() == before
        return answer

    # -- admission

    def add_sequences(self, requests: list[Request]) -> Any:
        for request in requests:
            self.look_who_computes(request)
        if len(requests) > 1:
            return self._manager.add_sequences(requests)
        manager, (request,) = self._manager, requests
        demand = self.unchanged(lambda: manager.scheduling.estimate_demand(request, 3))
        before, self._events[:] = self.free, []
        held = [
            {name for name, block in strategies.cached_blocks(manager.state, index).items() if block[1]}
            for index in range(len(before))
        ]
        fits = all(blocks <= before[window] for window, blocks in demand.needed.items())
        assert (
            fits == (manager.can_add(requests) == 1) == manager.scheduling.simulate().has_free(demand.needed)
        )
        if not fits:
            self._seen["refused"] += 1
            with pytest.raises(OutOfBlocks):
                manager.add_sequences(requests)
            raise OutOfBlocks(0, (1,), (0,), (1,), "")
        admitted = manager.add_sequences(requests)
        assert {window: before[window] - blocks for window, blocks in self.free.items()} == demand.needed
        assert admitted[0].reused_tokens == demand.reused_tokens
        self.check_reused(demand, held)
        left = manager.scheduling.remaining_blocks_per_window(request.request_id, 3, request.reserve_tokens)
        assert demand.to_completion == {w: demand.needed[w] + left[w] for w in left}
        return admitted

    def check_reused(self, demand: Any, held: list[set[bytes]]) -> None:
        reusable, shared = dict.fromkeys(demand.reusable, 0), dict.fromkeys(demand.reusable, 0)
        windows = list(reusable)
        for event in self._events:
            assert isinstance(event, BlocksReused)
            count = len(array("i", event.slots))
            names = strategies.split_names(event.names)[-count:]
            reusable[windows[event.group]] += count
            shared[windows[event.group]] += sum(name in held[event.group] for name in names)
        assert (reusable, shared) == (demand.reusable, demand.held)
        self._seen["reused"] += sum(reusable.values())
        self._seen["shared"] += sum(shared.values())

    # -- who computes

    def look_who_computes(self, request: Request) -> None:
        """In copies of the manager each running sequence computes all it can: what can the prompt reuse then?"""
        manager = self._manager
        if self._rng.random() < 0.6 or not manager.config.enable_block_reuse:
            return
        said = self.unchanged(lambda: manager.scheduling.find_in_flight(request))
        now, reach = self.reusable(manager, request), {}
        for request_id in manager.state.handles:
            twin = strategies.continue_from(manager.config, manager.state.created, manager.state.export())
            twin.store_context_blocks(
                request_id, twin.state.sequences[twin.state.handles[request_id]].num_tokens
            )
            reach[request_id] = self.reusable(twin, request)
        if said is None:
            assert self.unnamed or all(tokens <= now for tokens in reach.values())
            self._seen["nobody"] += len(reach) > 0
        else:
            assert now < said.num_tokens <= reach[said.request_id]
            # In windows that slide a block may close a hole, behind which more is cached already.
            assert self.slides or self.unnamed or said.num_tokens == max(reach.values())
            self._seen["somebody"] += 1

    @property
    def slides(self) -> bool:
        return any(group.kind == "sliding" for group in self._manager.layout.groups)

    @property
    def unnamed(self) -> bool:
        """Whether some sequence has computed what was un-named since, and may yet store it once more."""
        state = self._manager.state
        return any(
            sequence.computed // state.tokens_per_block > min(sequence.stored)
            for sequence in state.sequences.values()
        )

    @staticmethod
    def reusable(manager: KVCacheManager, request: Request) -> int:
        options = {
            name: getattr(request, name)
            for name in ("lora_id", "lora_name", "cache_salt", "multimodal", "extra_ids")
        }
        return manager.count_reusable(request.tokens, **options) * manager.config.tokens_per_block

    # -- running

    def add_tokens(self, ids: list[int], tokens: list[int], counts: list[int] | None = None) -> Any:
        manager = self._manager
        needs = {
            request_id: self.unchanged(
                partial(manager.scheduling.next_step_blocks_per_window, request_id, count - 1)
            )
            for request_id, count in zip(ids, counts or [1] * len(ids), strict=True)
        }
        total = {w: sum(each[w] for each in needs.values()) for w in manager.num_free_blocks_per_window()}
        fits = manager.scheduling.simulate().has_free(total)
        before = {request_id: self.lengths(request_id) for request_id in ids}
        try:
            done = manager.add_tokens(ids, tokens, counts)
        except OutOfBlocks:
            assert not fits
            raise
        assert fits
        for request_id in ids:
            more = [
                now - then for now, then in zip(self.lengths(request_id), before[request_id], strict=True)
            ]
            assert more == list(needs[request_id].values())
            self._seen["grown"] += sum(more)
        return done

    def lengths(self, request_id: int) -> list[int]:
        state = self._manager.state
        return [len(table) for table in state.sequences[state.handles[request_id]].tables]


class Program(random_logs.Program):
    """Random commands to a manager that is watched."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.seen: Counter[str] = Counter()
        super().__init__(seed, directory)

    def begin(self, state: Any) -> None:
        super().begin(state)
        self.manager = Watched(self.manager, self.rng, self.seen)  # type: ignore[assignment]

    def end(self) -> None:
        """Several at a time: as they are removed one by one, so much is free as the simulation has said."""
        simulation, ids = self.manager.scheduling.simulate(), self.some()
        fingerprint = self.manager.fingerprint()
        expected = [(simulation.remove(each), dict(simulation.free_blocks_per_window)) for each in ids]
        assert self.manager.fingerprint() == fingerprint
        for request_id, (given, free) in zip(ids, expected, strict=True):
            before, held = self.manager.num_free_blocks_per_window(), self.held(request_id)
            self.manager.remove_sequence(request_id, self.rng.random() < 0.8)
            assert self.manager.num_free_blocks_per_window() == free
            assert {window: free[window] - before[window] for window in free} == given
            self.seen["kept for others"] += sum(given.values()) < held
            del self.lengths[request_id], self.computed[request_id]

    def set_priority(self) -> None:
        """Or else a branch, or blocks that are pinned for a while."""
        choice = self.rng.choice(["branch", "branch", "pin", "unpin", "priority"])
        if choice == "priority" or not self.lengths:
            super().set_priority()
        elif choice == "unpin":
            for pin in list(self.manager.pins()):
                self.manager.unpin(pin)
        elif choice == "pin":
            self.manager.pin(self.some()[0])
        else:
            parent, child = self.some()[0], self.admitted
            self.admitted += 1
            self.manager.fork(parent, child)
            self.lengths[child], self.computed[child] = self.lengths[parent], self.computed[parent]
            self.seen["branches"] += 1

    def held(self, request_id: int) -> int:
        """Blocks of all windows that a sequence holds."""
        sequence = sequence_of(self.manager, request_id)
        return sum(map(len, sequence.tables)) - sum(sequence.detached)


@pytest.mark.parametrize("seed", seeds(range(30), quick=3))
def test_answers_are_what_happens_then(seed: int, tmp_path: Path) -> None:
    """Of admissions, steps and removals, with windows, images, adapters, late copies, clears and restarts."""
    with patch.object(symbols, "FORGET_ABOVE", 1):
        Program(seed, tmp_path / "log").run(150)


def test_random_programs_meet_all_that_is_asked_about(tmp_path: Path) -> None:
    """Otherwise the comparison above would prove nothing."""
    seen: Counter[str] = Counter()
    for seed in (100, 104, 105):
        program = Program(seed, tmp_path / str(seed))
        program.run(200)
        seen += program.seen
    kinds = ("refused", "reused", "shared", "grown", "somebody", "nobody", "kept for others", "branches")
    assert all(seen[kind] > 2 for kind in kinds), seen


# -- small cases


def cache(**settings: Any) -> KVCacheManager:
    """Room for 8 blocks of 2 tokens."""
    return KVCacheManager(strategies.config(**settings))


def run(manager: KVCacheManager, name: str, tokens: list[int]) -> None:
    """Admit a request and compute its prompt."""
    manager.add_sequence(name, tokens)
    manager.store_context_blocks(name, len(tokens))


def grown(manager: KVCacheManager, name: str, new: int, had: dict[int, int]) -> dict[int, int]:
    """By how much the free blocks of each window became fewer at most than it had, while a sequence grew."""
    taken = dict.fromkeys(had, 0)
    for token in range(new + 1):
        free = manager.num_free_blocks_per_window()
        taken = {window: max(blocks, had[window] - free[window]) for window, blocks in taken.items()}
        if token < new:
            manager.add_tokens([name], [100 + token])
    return taken


@pytest.mark.parametrize("windows", [(2,), (3,), (5, 24), (1, 8)])
@pytest.mark.parametrize("computed", [0, 5, 9])
@pytest.mark.parametrize("new", [1, 5, 12])
def test_a_branch_takes_no_more_than_remains_to_its_completion(
    windows: tuple[int, ...], computed: int, new: int
) -> None:
    """What it shares with its parent does not come free when a window leaves it behind, nor does what is pinned."""
    manager = cache(primary_blocks=40, max_attention_window=windows, num_layers=2)
    manager.add_sequence("parent", [1] * 9)
    manager.store_context_blocks("parent", computed)
    manager.fork("parent", "child")
    manager.pin("child")
    manager.remove_sequence("parent", store=False)
    manager.fork("child", "other")
    manager.store_context_blocks("child", 9)
    had, most = (
        manager.num_free_blocks_per_window(),
        manager.scheduling.remaining_blocks_per_window("child", new),
    )
    assert all(blocks <= most[window] for window, blocks in grown(manager, "child", new, had).items())


@pytest.mark.parametrize("windows", [None, (3,), (4,), (5, 24), (1, 8, 24)])
@pytest.mark.parametrize("reused", [0, 5, 9])
@pytest.mark.parametrize("before", ["ended", "pinned", "running"])
def test_nothing_takes_more_than_its_demand_up_to_completion(
    windows: tuple[int, ...] | None, reused: int, before: str
) -> None:
    """Token by token, with and without reuse: in windows that do not slide exactly so much. What is reused comes free
    when a window leaves it behind, or not, as others hold it.
    """
    manager = cache(primary_blocks=20, max_attention_window=windows, num_layers=3, max_pinned_share=1.0)
    run(manager, "before", [1] * reused + [2])
    if before == "pinned":
        manager.pin("before")
    if before != "running":
        manager.remove_sequence("before")
    prompt, new = [1] * 9, 8
    demand = manager.scheduling.estimate_demand(Request("a", prompt), new)
    had = manager.num_free_blocks_per_window()
    run(manager, "a", prompt)
    taken = grown(manager, "a", new, had)
    for group in manager.layout.groups:
        most = demand.to_completion[group.window]
        assert taken[group.window] == most if group.kind == "full" else taken[group.window] <= most


@pytest.mark.parametrize(("window", "shared", "decoded", "new"), [(4, 4, 1, 2), (4, 5, 0, 2), (6, 4, 4, 4)])
def test_demand_counts_blocks_of_others_only_once_a_window_has_left_them(
    window: int, shared: int, decoded: int, new: int
) -> None:
    """A reused block that a running sequence holds as well takes room in addition after the window has left it. Up to
    completion the window still sees one here, so the bound is exactly what the request takes.
    """
    manager = cache(primary_blocks=20, max_attention_window=window)
    run(manager, "other", [1] * shared + [2])
    for token in range(decoded):
        manager.add_tokens(["other"], [3 + token])
    prompt = [1] * 5
    demand = manager.scheduling.estimate_demand(Request("a", prompt), new)
    had = manager.num_free_blocks_per_window()
    run(manager, "a", prompt)
    assert demand.reused_tokens == 4
    assert grown(manager, "a", new, had) == demand.to_completion


class Promised:
    """A small cache in which others hold some blocks, and one request that has as many as it was promised."""

    def __init__(self, seed: int) -> None:
        self.random = r = random.Random(seed)
        windows = r.choice([(1,), (2,), (3,), (5,), (8,), (13,), (48,), (3, 48), (1, 6), (5, 11)])
        self.size = r.choice([1, 2, 4, 8])
        self.manager = cache(
            max_sequence_length=48,
            tokens_per_block=self.size,
            primary_blocks=r.randint(max(3, 40 // self.size), 64 // self.size + 6),
            max_attention_window=windows,
            num_layers=len(windows),
            max_pinned_share=1.0,
            enable_block_reuse=r.random() < 0.9,
        )
        self.others = 0

    def others_come(self) -> None:
        """Some of them share what the request begins with, and end, run on or have branched or pinned it."""
        r, manager = self.random, self.manager
        for _ in range(r.randint(0, 2)):
            self.others += 1
            tokens = [1] * r.randint(1, 12) + [2] * r.randint(0, 4)
            try:
                run(manager, f"other {self.others}", tokens)
                if r.random() < 0.3:
                    manager.fork(f"other {self.others}", f"branch {self.others}")
            except OutOfBlocks:
                return
            if r.random() < 0.3:
                manager.pin(f"other {self.others}")
            if r.random() < 0.6:
                manager.remove_sequence(f"other {self.others}")

    def leave(self, promised: dict[int, int]) -> bool:
        """Take what is free beyond what was promised; whether so much was free."""
        manager = self.manager
        while True:
            free = manager.num_free_blocks_per_window()
            spare = min(free[window] - blocks for window, blocks in promised.items())
            if spare <= 0:
                return spare == 0
            self.others += 1
            blocks = min(spare, manager.max_prompt_tokens // self.size)
            manager.add_sequence(f"other {self.others}", [100 + self.others] * (blocks * self.size))

    def run(self) -> str:
        """Admit the request with exactly what it was promised; at some point leave it what remains to be taken."""
        r, manager = self.random, self.manager
        self.others_come()
        prompt, new = [1] * r.randint(1, 28), r.randint(1, 12)
        request = Request("asked", prompt, reserve_tokens=r.choice([None, None, 1, 3, 7, 14]))
        try:
            promised = manager.scheduling.estimate_demand(request, new).to_completion
        except PromptTooLong:
            return "too long"
        if (
            not self.leave(promised)
            or manager.scheduling.estimate_demand(request, new).to_completion != promised
        ):
            return "no room"
        manager.add_sequences([request])
        chunk = request.reserve_tokens or len(prompt)
        done = sequence_of(manager, "asked").computed
        while (slots := len(manager.block_table("asked", manager.layout.groups[0].window)) * self.size) < len(
            prompt
        ):
            self.ask_again(new, chunk)
            done = r.randint(min(done + 1, slots), slots)
            manager.store_context_blocks("asked", done)
            manager.reserve(["asked"], [r.randint(1, chunk)])
        if r.random() < 0.5:
            manager.store_context_blocks("asked", r.randint(done, len(prompt)))
        for token in range(new):
            self.ask_again(new - token, None)
            manager.add_tokens(["asked"], [token])
        return "chunks" if chunk < len(prompt) else "at once"

    def ask_again(self, new: int, chunk: int | None) -> None:
        """What remains is promised as well."""
        left = self.manager.scheduling.remaining_blocks_per_window("asked", new, chunk)
        free = self.manager.num_free_blocks_per_window()
        assert all(blocks <= free[window] for window, blocks in left.items())
        if self.random.random() < 0.2:
            self.leave(left)


def test_what_was_promised_is_enough() -> None:
    """Where nobody has another block than was said to be taken at most, a request comes to its end: with windows,
    chunks, prompts that are never stored, and blocks that others hold.
    """
    seen = Counter(Promised(seed).run() for seed in range(200))
    assert min(seen["chunks"], seen["at once"]) > 40, seen


def test_who_computes_a_prefix_is_reported_until_it_is_stored() -> None:
    """An engine waits, and then reuses what it would have computed a second time; the last token stays its own."""
    manager = cache(primary_blocks=24)
    manager.add_sequence("first", [1, 2, 3, 4, 5, 6, 7])
    manager.add_sequence("short", [1, 2, 3])
    manager.add_sequence("other", [1, 2, 3, 4, 5, 6], cache_salt="tenant")
    second = Request("second", [1, 2, 3, 4, 5, 6])
    assert manager.scheduling.find_in_flight(second) == ("first", 4)
    assert manager.scheduling.find_in_flight(Request("salted", second.tokens, cache_salt="tenant")) == (
        "other",
        4,
    )
    assert manager.scheduling.find_in_flight(Request("else", [2, 2, 3])) is None
    manager.store_context_blocks("first", 2)
    assert manager.scheduling.find_in_flight(second) == ("first", 4)
    manager.store_context_blocks("first", 4)
    assert manager.scheduling.find_in_flight(second) is None
    assert manager.add_sequence("second", second.tokens).reused_tokens == 4
    manager.add_tokens(["short"], [9])  # sampled, and computed in the next step
    assert manager.scheduling.find_in_flight(Request("third", [1, 2, 3, 9, 5])) == ("short", 4)


def test_nobody_computes_anything_for_others_without_reuse() -> None:
    """Nothing is stored, so waiting is of no use; and a prompt takes all of its blocks."""
    manager = cache(enable_block_reuse=False)
    manager.add_sequence("a", [1, 2, 3, 4, 5])
    assert manager.scheduling.find_in_flight(Request("b", [1, 2, 3, 4, 5])) is None
    assert manager.scheduling.estimate_demand(Request("b", [1, 2, 3, 4, 5])).needed == {16: 3}


def test_simulation_gives_shared_blocks_back_with_the_last_holder() -> None:
    """Two requests share two blocks, which are free when both are gone; nothing has changed then."""
    manager = cache()
    run(manager, "a", [1, 2, 3, 4, 5])
    run(manager, "b", [1, 2, 3, 4, 6])
    simulation = manager.scheduling.simulate()
    assert simulation.free_blocks_per_window == {16: 4}
    assert simulation.has_free(4)
    assert not simulation.has_free({16: 5})
    assert simulation.remove("a") == {16: 1}
    assert simulation.has_free({16: 5})
    assert simulation.remove("b") == {16: 3}
    assert simulation.free_blocks_per_window == {16: 8}
    assert manager.num_free_blocks == 4
    manager.check()


def test_questions_that_make_no_sense_are_refused() -> None:
    """By what is wrong with them; and a simulation ends with the manager's next command."""
    manager = cache()
    run(manager, "a", [1, 2, 3])
    for call in (
        lambda: manager.scheduling.estimate_demand(Request("b", [1]), -1),
        lambda: manager.scheduling.estimate_demand("b"),  # type: ignore[arg-type]
        lambda: manager.scheduling.next_step_blocks_per_window("a", -1),
        lambda: manager.scheduling.next_step_blocks_per_window("a", True),
        lambda: manager.scheduling.simulate().has_free(-1),
        lambda: manager.scheduling.simulate().has_free({17: 1}),
    ):
        with pytest.raises(UsageError):
            call()
    with pytest.raises(UnknownRequest):
        manager.scheduling.next_step_blocks_per_window("b")
    with pytest.raises(DuplicateRequest):
        manager.scheduling.estimate_demand(Request("a", [1]))
    with pytest.raises(PromptTooLong):
        manager.scheduling.find_in_flight(Request("b", [1] * 17))
    simulation = manager.scheduling.simulate()
    simulation.remove("a")
    with pytest.raises(UsageError, match="already been removed from this simulation"):
        simulation.remove("a")
    later = manager.scheduling.simulate()
    manager.add_sequence("b", [1, 2])
    for ask in (
        lambda: later.remove("a"),
        lambda: later.has_free(1),
        lambda: later.has_free({16: 1}),
        lambda: later.free_blocks_per_window,
    ):
        with pytest.raises(UsageError, match="create another one"):
            ask()
