"""The engine that plays traces, over the real manager and real tensors."""

from __future__ import annotations

import ast
import threading
import time
from collections.abc import Callable, Container, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch

from cuda_ops.copier import Copier, Copy, FinishedTicket, Ticket
from kvcache.config import KVCacheConfig
from kvcache.errors import UsageError
from kvcache.layout import Layout
from kvcache.manager import KVCacheManager, Substitutes
from kvcache.pools import Pools
from kvcache.workload import summary
from kvcache.workload.clock import StepClock
from kvcache.workload.driver import DriveOptions, Engine
from kvcache.workload.pattern import PatternMismatch
from kvcache.workload.summary import RunResult, StepTimes
from kvcache.workload.traces import TraceRequest
from tests.support.engines.simulated import FailingCopier, LateCopier
from tests.support.workloads import CHATS, SMALL, TIERED, WINDOWS

TWO_AT_ONCE = DriveOptions(concurrency=2)


def request(
    hash_ids: Sequence[int], length: int, outputs: int = 3, at: int = 0, salt: str | None = None
) -> TraceRequest:
    return TraceRequest(at, length, outputs, tuple(hash_ids)[: -(-length // 512)], salt)


class Recorder:
    """Passes everything on to a manager and notes the calls."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self.calls: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._manager, name)
        if not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, repr([_plain(arg) for arg in args])))
            return value(*args, **kwargs)

        return call

    def named(self, *names: str) -> list[str]:
        return [name for name, _ in self.calls if name in names]


def _plain(arg: Any) -> Any:
    if isinstance(arg, list) and arg and hasattr(arg[0], "tokens"):
        return [(each.request_id, each.tokens.tobytes()) for each in arg]
    return arg


class Stage:
    """A manager, its pools if any, and the calls that a run makes."""

    def __init__(
        self,
        config: dict[str, Any],
        *,
        bytes_too: bool = True,
        copier: Callable[[Copier], Copier] | None = None,
    ):
        self.clock = StepClock()
        parsed = KVCacheConfig(**config)
        self.pools = None
        used: Copier | None = None
        if bytes_too:
            self.pools = Pools(Layout.of(parsed), "cpu")
            used = self.pools.copier() if copier is None else copier(self.pools.copier())
        self.manager = KVCacheManager(
            parsed, pools=self.pools, copier=used, substitutes=Substitutes(wall_ns=self.clock.wall_ns)
        )
        self.recorder = Recorder(self.manager)

    def play(self, trace: Any, options: DriveOptions | None = None, **changes: Any) -> RunResult:
        manager = cast("KVCacheManager", self.recorder)
        stop, progress = changes.pop("stop", None), changes.pop("progress", None)
        changes = {"clock": self.clock, "pools": self.pools, **changes}
        result = Engine(manager, trace, options, **changes).run(stop, progress)
        self.manager.check()
        assert self.manager.num_sequences == 0
        return result


class TestWholeRuns:
    """A trace from start to end."""

    @pytest.mark.parametrize(
        "config",
        [
            SMALL,
            TIERED,
            {**TIERED, "kv_layout": "HND", "tokens_per_block": 64},
            {**TIERED, "debug_fill_blank": True},
            WINDOWS,
            {**WINDOWS, "max_attention_window": (40, 300), "debug_fill_blank": True},
            {**TIERED, "kv_factor": 1, "debug_fill_blank": True},
        ],
    )
    def test_every_request_is_served_and_every_reused_byte_is_right(self, config: dict[str, Any]) -> None:
        """All requests run to their end, tokens are counted, reuse happens, and its bytes were compared."""
        stage = Stage(config)
        result = stage.play(CHATS, TWO_AT_ONCE)
        stats = stage.manager.stats()
        assert (result.requests, result.refused, result.interrupted) == (len(CHATS), 0, False)
        assert stats.prompt_tokens == sum(each.input_length for each in CHATS)
        assert result.output_tokens == sum(each.output_length for each in CHATS)
        parts = (stats.reused_tokens_primary, stats.reused_tokens_secondary, stats.reused_tokens_partial)
        assert sum(parts) == stats.reused_tokens == round(stats.hit_rate * stats.prompt_tokens) > 0
        if (
            "max_attention_window" not in config
        ):  # else what a window does not see is neither there nor compared
            assert result.checked_blocks >= (parts[0] + parts[1]) // config["tokens_per_block"]
        assert result.checked_blocks > 0
        assert result.checked_final_blocks > result.checked_blocks
        assert result.recomputed_tokens == 0

    def test_small_tiers_offload_onboard_and_evict(self) -> None:
        """The small workload over small tiers makes every kind of movement, so that its bytes are tested too."""
        stage = Stage(TIERED)
        stage.play(CHATS, TWO_AT_ONCE)
        stats = stage.manager.stats()
        assert (
            min(stats.blocks_offloaded, stats.blocks_onboarded, stats.blocks_removed, stats.blocks_copied) > 0
        )
        assert stats.reused_tokens_secondary == 32 * stats.blocks_onboarded

    def test_equal_inputs_make_equal_calls(self) -> None:
        """Two runs make the same calls with the same arguments, and leave the same state."""
        one, other = Stage(TIERED), Stage(TIERED)
        results = [stage.play(iter(CHATS), TWO_AT_ONCE) for stage in (one, other)]
        assert one.recorder.calls == other.recorder.calls
        assert one.manager.fingerprint() == other.manager.fingerprint()
        assert len(results[0].times) == len(results[1].times)

    def test_bytes_change_no_decision(self) -> None:
        """With pools or without, late copies or not, the manager is asked the same and ends in the same state."""
        stages = [
            Stage(TIERED),
            Stage(TIERED, bytes_too=False),
            Stage(TIERED, copier=lambda inner: LateCopier(inner, 3)),
        ]
        for stage in stages:
            stage.play(CHATS, TWO_AT_ONCE)
        assert len({stage.manager.fingerprint() for stage in stages}) == 1
        asked = [[call for call in stage.recorder.calls if call[0] != "block_table"] for stage in stages]
        assert asked[0] == asked[1] == asked[2]

    def test_seed_changes_tokens_and_nothing_else(self) -> None:
        """Another seed plays the same traffic with other token ids: the same full blocks are reused."""
        one, other = Stage(SMALL, bytes_too=False), Stage(SMALL, bytes_too=False)
        first = one.play(CHATS, DriveOptions(seed=1))
        second = other.play(CHATS, DriveOptions(seed=2))
        assert len(first.times) == len(second.times)
        reused = [stage.manager.stats().reused_tokens_primary for stage in (one, other)]
        assert reused[0] == reused[1] > 0
        for name in ("add_sequences", "add_tokens"):
            calls = [[call for call in stage.recorder.calls if call[0] == name] for stage in (one, other)]
            assert calls[0] != calls[1]

    def test_requests_with_other_salts_share_nothing(self) -> None:
        """Only requests with equal salts reuse each other's blocks, and their bytes are told apart."""
        trace = [request([1], 64, 2, salt=salt) for salt in ("a", "b", "a", None)]
        stage = Stage(SMALL)
        stage.play(trace, DriveOptions(concurrency=1))
        assert stage.manager.stats().reused_tokens == 63

    def test_empty_trace(self) -> None:
        """Nothing to do is no error."""
        result = Stage(SMALL, bytes_too=False).play([])
        assert (result.requests, len(result.times), result.times.percentile_us(99)) == (0, 0, 0.0)

    @pytest.mark.parametrize(("length", "outputs"), [(1, 1), (1, 0), (32, 0), (33, 1), (64, 64)])
    def test_smallest_requests(self, length: int, outputs: int) -> None:
        """Prompts of one token, prompts that fill blocks exactly, and requests without output end as they should."""
        stage = Stage(SMALL)
        result = stage.play([request([1], length, outputs)] * 3, DriveOptions(concurrency=1))
        assert (result.requests, result.output_tokens) == (3, 3 * outputs)
        assert stage.manager.stats().reused_tokens == 2 * (length - 1)


class TestSteps:
    """What happens inside a step."""

    def test_prompts_are_computed_in_chunks_in_the_order_of_admission(self) -> None:
        """A step computes at most its budget of prompt tokens, the first request first; reused ones cost nothing."""
        stage = Stage({**SMALL, "primary_blocks": 200}, bytes_too=False)
        trace = [request([1], 300, 1), request([2], 300, 1), request([3], 100, 1), request([1], 512, 1)]
        stage.play(trace, DriveOptions(concurrency=3, prefill_tokens=256))
        stored = [args for name, args in stage.recorder.calls if name == "store_context_blocks"]
        # In step 3 request 3 comes in; it finds the 9 full blocks, and the partial one, that request 0 has left.
        assert stored == ["[0, 256]", "[0, 300]", "[1, 212]", "[1, 300]", "[2, 100]", "[3, 368]", "[3, 512]"]

    def test_prompt_without_output_is_computed_to_its_end(self) -> None:
        """A request that generates nothing is ended after the last chunk of its prompt, not before."""
        stage = Stage(SMALL, bytes_too=False)
        stage.play([request([1], 300, 0)], DriveOptions(prefill_tokens=256))
        calls = [
            args for name, args in stage.recorder.calls if name in ("store_context_blocks", "remove_sequence")
        ]
        assert calls == ["[0, 256]", "[0, 300]", "[0]"]

    def test_one_call_appends_the_tokens_of_all_outputs(self) -> None:
        """However many requests run, a step makes one add_tokens call, after what it computed was stored."""
        stage = Stage(SMALL, bytes_too=False)
        result = stage.play([request([index], 40, 5) for index in range(4)])
        assert stage.recorder.named("add_tokens") == ["add_tokens"] * 5
        assert len(result.times) == 5
        appended = [args for name, args in stage.recorder.calls if name == "add_tokens"]
        assert all(args.startswith("[[0, 1, 2, 3], ") for args in appended)
        # All outputs begin differently.
        assert len(set(ast.literal_eval(appended[0])[1])) == 4

    def test_order_of_calls(self) -> None:
        """A step admits, starts the copies, reports what was computed and sampled, ends requests, and flushes."""
        stage = Stage(SMALL, bytes_too=False)
        stage.play([request([1], 40, 2)])
        named = stage.recorder.named(
            "add_sequences",
            "start_transfers",
            "poll",
            "store_context_blocks",
            "add_tokens",
            "remove_sequence",
            "flush",
        )
        first = ["add_sequences", "start_transfers", "poll", "store_context_blocks", "add_tokens", "flush"]
        second = ["start_transfers", "poll", "add_tokens", "remove_sequence", "flush"]
        assert named == [*first, *second, "start_transfers", "poll", "flush"]

    def test_progress_is_reported_after_each_step(self) -> None:
        """Progress counts steps and ended or refused requests."""
        reported: list[tuple[int, int]] = []
        trace = [request([1], 40, 1), request(range(20), 9999, 1), request([3], 40, 2)]
        Stage(SMALL, bytes_too=False).play(trace, progress=lambda *now: reported.append(now))
        assert reported == [(1, 2), (2, 3)]

    def test_only_the_managers_time_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Time between timed calls is left out, time of several calls of a step adds up."""
        now = iter([0, 5_000, 100_000, 110_000, 300_000, 301_000])
        monkeypatch.setattr(time, "perf_counter_ns", lambda: next(now))
        times = StepTimes()
        for _ in range(2):
            with times.timed():
                pass
        times.end_step()
        with times.timed():
            pass
        assert (len(times), times.seconds(), times.percentile_us(50)) == (1, 16e-6, 15.0)


class TestAdmission:
    """Who is let in, and when."""

    def test_requests_wait_until_all_can_be_completed(self) -> None:
        """A cache with room for one request at its end serves them one by one; none runs out of blocks."""
        stage = Stage({**SMALL, "primary_blocks": 20}, bytes_too=False)
        running: list[int] = []
        # Two prompts would fit (2 * 9 of 20 blocks), but not with their outputs (2 * 12).
        result = stage.play(
            [request([index], 280, 100) for index in range(3)],
            progress=lambda *_: running.append(stage.manager.num_sequences),
        )
        assert (result.requests, max(running)) == (3, 1)

    def test_cache_is_filled_to_the_last_block(self) -> None:
        """Requests whose blocks at their end add up to the cache exactly run together."""
        stage = Stage({**SMALL, "primary_blocks": 24}, bytes_too=False)
        running: list[int] = []
        stage.play(
            [request([index], 280, 104) for index in range(2)],
            progress=lambda *_: running.append(stage.manager.num_sequences),
        )
        assert max(running) == 2

    def test_concurrency_is_the_most_that_run(self) -> None:
        """However small requests are, no more run at once than allowed."""
        stage = Stage(SMALL, bytes_too=False)
        running: list[int] = []
        stage.play(
            [request([index], 10, 4) for index in range(7)],
            DriveOptions(concurrency=3),
            progress=lambda *_: running.append(stage.manager.num_sequences),
        )
        assert max(running) == 3

    def test_nobody_overtakes_the_first_in_line(self) -> None:
        """A small request waits behind a large one that does not fit yet."""
        stage = Stage({**SMALL, "primary_blocks": 20}, bytes_too=False)
        trace = [request([1], 320, 30), request([2], 512, 1), request([3], 10, 1)]
        stage.play(trace)
        admitted = [args for name, args in stage.recorder.calls if name == "add_sequences"]
        assert [args.count("b'") for args in admitted] == [1, 2]

    @pytest.mark.parametrize(
        ("impossible", "reason"),
        [
            (request(range(8), 4000, 97), "4097 tokens exceed max_sequence_length 4096"),
            (request([1], 1, 10**15), "1000000000000001 tokens exceed max_sequence_length 4096"),
            (request(range(8), 3170, 31), "3201 tokens need 101 blocks, primary has 100"),
        ],
    )
    def test_what_can_never_fit_is_refused_by_name(self, impossible: TraceRequest, reason: str) -> None:
        """A request beyond the cache's limits is counted and named, at once, and the others are served."""
        result = Stage(SMALL, bytes_too=False).play([request([1], 40), impossible, request([2], 40)])
        assert (result.requests, result.refused) == (2, 1)
        assert [(refusal.request_id, refusal.reason) for refusal in result.refusals] == [(1, reason)]

    def test_what_just_fits_is_served(self) -> None:
        """A request that takes the whole cache, or is as long as sequences may be, is served."""
        for config, length in ((SMALL, 3170), ({**SMALL, "primary_blocks": 200}, 4066)):
            result = Stage(config, bytes_too=False).play([request(range(8), length, 30)])
            assert (result.requests, result.refused) == (1, 0)

    def test_refusals_are_named_up_to_a_bound(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """All refusals are counted; only the first are kept by name, and the line goes on."""
        monkeypatch.setattr(summary, "MAX_NAMED_REFUSALS", 2)
        result = Stage(SMALL, bytes_too=False).play([request([1], 1, 5000)] * 50 + [request([1], 40)])
        assert (result.refused, len(result.refusals), result.requests) == (50, 2, 1)

    def test_manager_in_use_is_refused(self) -> None:
        """A manager that serves requests already is left alone."""
        stage = Stage(SMALL, bytes_too=False)
        stage.manager.add_sequence("mine", [1, 2, 3])
        with pytest.raises(UsageError, match="serving requests"):
            stage.play(CHATS)
        assert stage.manager.num_sequences == 1

    def test_options_must_make_sense(self) -> None:
        """An engine that computes nothing would never end."""
        for wrong in ({"concurrency": 0}, {"prefill_tokens": 0}):
            with pytest.raises(UsageError, match="at least 1"):
                DriveOptions(**wrong)


class TestStoppingAndPace:
    """Runs that end early, and runs that keep time."""

    def test_stop_ends_between_steps(self) -> None:
        """After the stop flag is set no further step is made: running requests end early, the rest never begins."""
        stage, stop = Stage(TIERED), threading.Event()

        def halt(step: int, done: int) -> None:
            if step == 5:
                stop.set()

        result = stage.play(CHATS, TWO_AT_ONCE, stop=stop, progress=halt)
        assert (len(result.times), result.interrupted) == (5, True)
        assert result.requests < 2 <= len(stage.recorder.named("remove_sequence"))
        assert result.output_tokens <= 10
        assert stage.manager.state.transfers == {}

    def test_stop_after_the_last_step_is_no_interruption(self) -> None:
        """A flag that is set when all is done changes nothing."""
        stop = threading.Event()
        result = Stage(SMALL, bytes_too=False).play(
            [request([1], 40, 1)], stop=stop, progress=lambda *_: stop.set()
        )
        assert (result.requests, result.interrupted) == (1, False)

    def test_paced_requests_come_when_they_arrive(self) -> None:
        """With a speed, a request is admitted in the first step at or after its time, and gaps are skipped."""
        stage = Stage(SMALL, bytes_too=False)
        ns = [0]
        clock = StepClock(1000.0, real_monotonic_ns=lambda: ns[0])
        stop = threading.Event()

        def wait(timeout: float | None = None) -> bool:
            ns[0] += round((timeout or 0) * 1e9)
            return False

        stop.wait = wait  # type: ignore[method-assign]
        seen: list[tuple[int, int]] = []
        stage.play(
            [request([1], 40, 3, at=0), request([2], 40, 1, at=30), request([3], 40, 1, at=5000)],
            clock=clock,
            stop=stop,
            progress=lambda _, done: seen.append((clock.now_ms, done)),
        )
        # Request 0 runs in the steps at 0, 20 and 40, request 1 in the one at 40, request 2 after a pause.
        assert seen == [(0, 0), (20, 0), (40, 2), (5000, 3)]
        assert ns[0] == (5000 + 20 - 20) * 1_000_000 // 1000


class Lost:
    """A copier that says it has moved the bytes, and sometimes has not."""

    def __init__(self, inner: Copier, lost: Callable[[Copy], bool]) -> None:
        self._inner = inner
        self._lost = lost

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        self._inner.submit([copy for copy in copies if not self._lost(copy)])
        return FinishedTicket()


def prompt_lengths(recorder: Recorder) -> dict[int, list[int]]:
    """By request, the tokens of its prompt whenever it was admitted."""
    found: dict[int, list[int]] = {}
    for name, args in recorder.calls:
        if name == "add_sequences":
            for request_id, tokens in ast.literal_eval(args)[0]:
                found.setdefault(request_id, []).append(len(tokens) // 4)
    return found


class Every(Container[int]):
    """Every n-th number."""

    def __init__(self, n: int) -> None:
        self._n = n

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and number % self._n == 0


class TestBytes:
    """What the comparison of bytes finds."""

    @pytest.mark.parametrize(
        "lost",
        [
            lambda copy: copy.target_level == 1,
            lambda copy: copy.source_level == 1,
            lambda copy: copy.num_tokens is not None,
        ],
        ids=["offload", "onboard", "partial"],
    )
    def test_lost_copies_are_found(self, lost: Callable[[Copy], bool]) -> None:
        """A copy that was reported and not made is found when its block is reused."""
        stage = Stage(TIERED, copier=lambda inner: Lost(inner, lost))
        with pytest.raises(PatternMismatch, match=r"request \d+: block \d+ \(primary slot \d+\)"):
            stage.play(CHATS, TWO_AT_ONCE)

    @pytest.mark.parametrize("group", [0, 1])
    def test_lost_copies_are_found_in_every_window(self, group: int) -> None:
        """It is enough that one window lacks the start of a block."""

        def lost(copy: Copy) -> bool:
            return copy.num_tokens is not None and copy.group == group

        stage = Stage(WINDOWS, copier=lambda inner: Lost(inner, lost))
        with pytest.raises(PatternMismatch, match=f"in layer {group}"):
            stage.play(CHATS, TWO_AT_ONCE)

    def test_block_given_to_two_requests_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A running request whose block another one overwrote is found at its end."""
        stage = Stage(SMALL)
        true_table = stage.manager.block_table

        def table(request_id: str | int, window: int | None = None) -> Any:
            found = true_table(request_id, window)
            if request_id == 1:
                found[0] = true_table(0)[0] if 0 in stage.manager.state.handles else found[0]
            return found

        monkeypatch.setattr(stage.manager, "block_table", table)
        with pytest.raises(PatternMismatch, match="request 0: block 0 "):
            stage.play([request([1], 40, 5), request([2], 40, 9)])

    @pytest.mark.parametrize("config", [TIERED, WINDOWS], ids=["one window", "two windows"])
    @pytest.mark.parametrize("every", [1, 2, 3])
    def test_failed_copies_are_computed_again(self, every: int, config: dict[str, Any]) -> None:
        """When copies fail, what they should have brought is computed after all, and nothing wrong is reused."""
        stage = Stage(config, copier=lambda inner: FailingCopier(inner, Every(every)))
        result = stage.play(CHATS, TWO_AT_ONCE)
        assert result.requests == len(CHATS)
        assert result.output_tokens == sum(each.output_length for each in CHATS)
        assert result.recomputed_tokens > 0

    def test_who_cannot_be_computed_again_is_added_again(self) -> None:
        """A request that has let go of blocks goes back to the line with its outputs, and loses none of them."""
        stage = Stage(
            {**WINDOWS, "max_attention_window": (40, 4096)},
            copier=lambda inner: FailingCopier(inner, Every(3)),
        )
        result = stage.play(CHATS, TWO_AT_ONCE)
        assert result.requests == len(CHATS)
        assert result.output_tokens == sum(each.output_length for each in CHATS)
        lengths = prompt_lengths(stage.recorder)
        again = {request_id: length for request_id, length in lengths.items() if len(length) > 1}
        assert any(length[-1] > length[0] for length in again.values())  # in the middle of its outputs
        for request_id, (first, *later) in again.items():
            assert first == CHATS[request_id].input_length <= min(later)

    def test_blocks_of_each_window_are_counted(self) -> None:
        """The result says how many blocks were held at most, and what is cached at the end."""
        stage = Stage(WINDOWS)
        windows = stage.play(CHATS, TWO_AT_ONCE).windows
        longest_held = WINDOWS["primary_blocks"] * 32
        assert list(windows) == [100, longest_held]  # the wider one is cut to what its blocks hold
        stats, primary = stage.manager.stats(), WINDOWS["primary_blocks"]
        for level in range(2):
            assert sum(each.cached[level] for each in windows.values()) == stats.blocks_unreferenced[level]
        assert 0 < windows[100].most_held < windows[longest_held].most_held <= primary
        longest = max(each.input_length + each.output_length for each in CHATS)
        assert windows[longest_held].most_held >= longest // 32

    def test_pattern_is_in_the_pools(self) -> None:
        """After a run the primary pool is full of pattern: the bytes that were compared are really there."""
        stage = Stage(TIERED)
        stage.play(CHATS, TWO_AT_ONCE)
        assert stage.pools is not None
        held = stage.pools.groups[0][0].primary.view(torch.int16).numpy()
        assert np.count_nonzero(held) > held.size / 2
