"""The plugin for vLLM: when it records and where, what it refuses, and that nothing of it reaches the engine.

Beside something in the shape of vLLM; the real one is in tests/vllm.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from events.log import LogReader, LogWriter
from events.types import CacheCreated, EndReason, SequenceAdded, SequenceRemoved
from kvcache import Recorder
from kvcache.audit.reasons import Reason
from kvcache.audit.totals import Audit, audit_batches
from kvcache.errors import ConfigError
from kvcache.fold.prefix_tree import runs_below
from kvcache.integrations.settings import recorder_settings
from kvcache.integrations.vllm import plugin
from kvcache.integrations.vllm.recording import Recording
from kvcache.replay import replay
from tests.support.engines import toy_vllm
from tests.support.engines.toy_vllm import Request, Scheduler, SlidingWindowManager, Status
from tests.support.places import ROOT

Make = Callable[..., Scheduler]
PROMPT = list(range(10))


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What the plugin has said so far."""
    caplog.set_level(logging.INFO, "vllm.kvcache")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "vllm.kvcache"]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Make a scheduler after vLLM has loaded its plugins."""
    made = toy_vllm.install(monkeypatch)
    plugin.register()
    plugin.register()  # vLLM may load plugins more than once
    return made


def attached(scheduler: Scheduler) -> Any:
    return getattr(scheduler, "_kvcache_attached", None)


def methods(scheduler: Scheduler) -> set[str]:
    """What is wrapped in the engine's objects."""
    manager = scheduler.kv_cache_manager
    return {
        name
        for each in (manager, manager.block_pool)
        for name, value in vars(each).items()
        if callable(value)
    }


def created(log: Path) -> CacheCreated:
    return next(each for batch in LogReader(log) for each in batch.events if isinstance(each, CacheCreated))


def test_a_variable_makes_a_log(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The directory of KVCACHE_LOG: who decided, what the cache is, and what its request was given."""
    monkeypatch.setenv("KVCACHE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("KVCACHE_MAX_TOKENS", "8")  # of some other cache
    monkeypatch.setenv("KVCACHE_LOG__SEGMENT_BYTES", "1MiB")
    scheduler = make()
    tables = scheduler.serve(Request("a", PROMPT))
    assert tables == [[1, 2, 3]] * 3
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    scheduler.shutdown()
    assert scheduler.ended
    assert not methods(scheduler)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    reported = created(tmp_path / "log")
    assert (
        reported.engine,
        reported.tokens_per_block,
        reported.groups[0].num_blocks,
        reported.key_bytes,
    ) == (
        "vllm 0.33.0",
        4,
        (19, 0),
        32,
    )
    assert '"model":"toy/model"' in reported.config
    assert '"segment_bytes":1048576' in reported.config
    replayed = replay(tmp_path / "log", verify=True)
    assert replayed.end is not None
    assert (replayed.end.kind, replayed.end.next_seq) == ("clean", (replayed.end.last_seq or 0) + 1)
    audit = audit_batches((batch, True) for batch in LogReader(tmp_path / "log"))
    assert (audit.requests, audit.prompt_tokens, audit.stored) == (1, 10, 3)


def test_a_scheduler_of_ones_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that is derived from vLLM's is recorded as that is, and closes its log when it ends."""
    stock = toy_vllm.install(monkeypatch)
    plugin.register()

    class Mine(stock):  # type: ignore[misc,valid-type]
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.served = 0

        def shutdown(self) -> None:
            super().shutdown()
            self.served = -1

    scheduler = Mine(additional={"kvcache": {"log": str(tmp_path / "log")}})
    scheduler.serve(Request("a", PROMPT))
    scheduler.shutdown()
    assert (scheduler.served, scheduler.ended) == (-1, True)
    end = replay(tmp_path / "log", verify=True).end
    assert end is not None
    assert end.kind == "clean"


def test_without_a_setting_nothing_is_touched(make: Make, warnings: Callable[[], list[str]]) -> None:
    """Also where other plugins are configured."""
    for additional in (None, {}, {"other": 1}, SimpleNamespace(), {"kvcache": False}):
        scheduler = make(additional=additional)
        assert attached(scheduler) is None
        assert not methods(scheduler)
    assert warnings() == []


def test_the_variable_is_overruled(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By --additional-config: false, or another directory; settings and sinks are taken from there."""
    monkeypatch.setenv("KVCACHE_LOG", str(tmp_path / "log"))
    assert attached(make(additional={"kvcache": False})) is None
    given = {
        "log": str(tmp_path / "other"),
        "sinks": [f"file:{tmp_path}/sink.jsonl"],
        "settings": {"model": "m"},
    }
    scheduler = make(additional={"kvcache": given})
    scheduler.serve(Request("a", PROMPT))
    scheduler.shutdown()
    assert not (tmp_path / "log").exists()
    assert '"model":"m"' in created(tmp_path / "other").config
    assert "SequenceAdded" in (tmp_path / "sink.jsonl").read_text()


def test_requests_have_vllms_sessions(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A very long one, as clients may choose it, is told by its beginning and a digest; an empty one is none."""
    monkeypatch.setenv("KVCACHE_LOG", str(tmp_path / "log"))
    scheduler = make()
    for name, session in [("a", "chat 1"), ("b", "x" * 300), ("c", "x" * 301), ("d", "")]:
        scheduler.serve(Request(name, PROMPT, session_id=session))
    scheduler.shutdown()
    events = [each for batch in LogReader(tmp_path / "log") for each in batch.events]
    first, *long, none = [each.session for each in events if isinstance(each, SequenceAdded)]
    assert (first, none) == ("chat 1", None)
    assert len({each[:191] for each in long if each}) == 1
    assert len(set(long)) == 2


def test_sinks_need_no_log(make: Make, tmp_path: Path) -> None:
    """A feed or metrics can be had alone."""
    scheduler = make(additional={"kvcache": {"sinks": f"file:{tmp_path}/sink.jsonl"}})
    scheduler.serve(Request("a", PROMPT))
    scheduler.shutdown()
    assert "SequenceRemoved" in (tmp_path / "sink.jsonl").read_text()


def test_a_log_is_continued(make: Make, tmp_path: Path) -> None:
    """An engine that starts again begins an epoch with an empty cache."""
    for _ in range(2):
        scheduler = make(additional={"kvcache": {"log": str(tmp_path / "log")}})
        scheduler.serve(Request("a", PROMPT))
        scheduler.shutdown()
    replayed = replay(tmp_path / "log", verify=True)
    assert replayed.state.epoch == 1
    assert (
        sum(isinstance(each, CacheCreated) for batch in LogReader(tmp_path / "log") for each in batch.events)
        == 2
    )


@pytest.mark.parametrize(
    ("parallel", "directory"),
    [
        ({}, "log"),
        ({"data_parallel_size": 2}, "log/rank0"),
        ({"data_parallel_size": 2, "data_parallel_index": 1}, "log/rank1"),
        ({"data_parallel_index": 3}, "log/rank3"),
    ],
)
def test_each_rank_has_a_directory(
    make: Make, tmp_path: Path, parallel: dict[str, int], directory: str
) -> None:
    """Where there are several; vLLM tells some of them that they are alone."""
    scheduler = make(additional={"kvcache": {"log": str(tmp_path / "log")}}, **parallel)
    scheduler.shutdown()
    assert created(tmp_path / directory).engine == "vllm 0.33.0"


WRONG_SETTINGS: dict[str, tuple[object, str]] = {
    "no object": (["log"], "must be an object"),
    "an unknown key": ({"log": "x", "sink": "y"}, "'sink' is not a setting"),
    "nothing to write to": ({}, '"log" or "sinks" is required'),
    "no directory": ({"log": 7}, '"log" must be a directory'),
    "no URLs": ({"sinks": [7]}, '"sinks" must be a list of URLs'),
    "no settings": ({"log": "x", "settings": 7}, '"settings" must be an object'),
    "what vLLM decides": (
        {"log": "x", "settings": {"primary_blocks": 7}},
        "'primary_blocks' is determined by vLLM",
    ),
    "a wrong setting": ({"log": "x", "settings": {"log": {"fsync": "perhaps"}}}, "log.fsync"),
    "an unknown mode": (
        {"log": "x", "mode": "manages"},
        "mode: given 'manages'; accepted: record, or manager",
    ),
    "an unknown sink": ({"log": "x", "sinks": ["pigeon://roof"]}, "pigeon"),
}


@pytest.mark.parametrize("name", WRONG_SETTINGS)
def test_wrong_settings_are_a_warning(
    make: Make, name: str, warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The engine serves as always, and one line says what is wrong."""
    monkeypatch.chdir(tmp_path)
    given, text = WRONG_SETTINGS[name]
    scheduler = make(additional={"kvcache": given})
    assert attached(scheduler) is None
    assert not methods(scheduler)
    (said,) = warnings()
    assert said.startswith("The KV cache is not recorded: ")
    assert text in said
    assert scheduler.serve(Request("a", PROMPT)) == [[1, 2, 3]] * 3


def test_a_managers_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are the engine's; how to decide may be said by variables and settings, and by default is as vLLM does."""
    variables = {
        "MODE": "manager",
        "ENABLE_PARTIAL_REUSE": "true",
        "PRIMARY_BLOCKS": "5",
        "LOG__FSYNC": "never",
    }
    for name, value in variables.items():
        monkeypatch.setenv(f"KVCACHE_{name}", value)
    asked = recorder_settings({"settings": {"eviction_policy": "levels"}}, None, None, manages=True)
    config = asked.config(tokens_per_block=16, primary_blocks=10, max_sequence_length=64)
    assert (asked.log, config.primary_blocks, config.log.fsync) == (None, 10, "never")
    assert (config.evict_ahead, config.enable_partial_reuse, config.eviction_policy) == (1, True, "levels")
    with pytest.raises(ConfigError, match="'secondary_blocks' is determined by vLLM"):
        recorder_settings({"settings": {"secondary_blocks": 5}}, None, None, manages=True)


def _partial(scheduler: Any) -> None:
    scheduler.kv_cache_manager.coordinator.enable_partial_hash_hits = True


def _uncached(scheduler: Any) -> None:
    scheduler.kv_cache_manager.enable_caching = False


def _hashes_of_larger_blocks(scheduler: Any) -> None:
    scheduler.kv_cache_manager.block_pool.hash_block_size = 8


def _renamed(scheduler: Any) -> None:
    del scheduler.kv_cache_manager.coordinator.single_type_managers[0].num_cached_block


REFUSED: dict[str, tuple[dict[str, Any], Callable[[Any], None], str]] = {
    "partial hits": ({}, _partial, "end inside a block"),
    "no caching": ({}, _uncached, "without prefix caching"),
    "hashes of larger blocks": ({}, _hashes_of_larger_blocks, "blocks of 4 tokens"),
    "no full attention": (
        {"kinds": (SlidingWindowManager,)},
        lambda _: None,
        "without full-attention layers",
    ),
    "an unknown inside": ({}, _renamed, "AttributeError"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_recorded_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, warnings: Callable[[], list[str]]
) -> None:
    """By one warning, and the engine serves as always."""
    settings, change, text = REFUSED[name]
    made = toy_vllm.install(monkeypatch)
    original = made.__init__

    def changed(self: Any, **given: Any) -> None:
        original(self, **given)
        change(self)

    monkeypatch.setattr(made, "__init__", changed)
    plugin.register()
    given = {"log": str(tmp_path / "log"), "sinks": [f"file:{tmp_path}/sink.jsonl"]}
    threads = set(threading.enumerate())
    scheduler = made(additional={"kvcache": given}, **settings)
    assert set(threading.enumerate()) <= threads
    assert not methods(scheduler)
    (said,) = warnings()
    assert text in said
    assert name == "an unknown inside" or len(scheduler.serve(Request("a", PROMPT))) == 3
    with LogWriter(tmp_path / "log", resume=True):
        """Nobody holds the directory."""


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0", "1.0.0", "dev"])
def test_unknown_releases_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, warnings: Callable[[], list[str]]
) -> None:
    """Older and newer ones, and what says no release."""
    made = toy_vllm.install(monkeypatch, version)
    plugin.register()
    monkeypatch.setenv("KVCACHE_LOG", str(tmp_path / "log"))
    assert attached(made()) is None
    assert f"vLLM {version}" in warnings()[0]
    assert "0.32, 0.33" in warnings()[0]


def test_a_vllm_without_a_scheduler_is_reported(
    monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    """If it should be recorded; else nobody is bothered."""
    toy_vllm.install(monkeypatch)
    del sys.modules[toy_vllm.SCHEDULER].Scheduler
    plugin.register()
    assert warnings() == []
    monkeypatch.setenv("KVCACHE_LOG", "somewhere")
    plugin.register()
    assert "has no vllm.v1.core.sched.scheduler.Scheduler" in warnings()[0]


def test_a_directory_in_use_is_refused(make: Make, tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    """Two engines do not write one log."""
    first, second = (make(additional={"kvcache": {"log": str(tmp_path / "log")}}) for _ in range(2))
    assert attached(first) is not None
    assert attached(second) is None
    assert str(tmp_path / "log") in warnings()[-1]
    first.shutdown()


def test_engines_with_other_layers(make: Make, tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    """Have these recorded, too."""
    kinds = (toy_vllm.FullAttentionManager, SlidingWindowManager)
    scheduler = make(additional={"kvcache": {"log": str(tmp_path / "log")}}, kinds=kinds)
    scheduler.serve(Request("a", PROMPT))
    assert attached(scheduler).attached
    scheduler.shutdown()
    assert len(warnings()) == 1, "that it is recorded"
    replayed = replay(tmp_path / "log", verify=True)
    assert replayed.events > 5
    [group] = replayed.state.positional
    assert (group.created.kind, group.created.window, group.created.layers) == (
        "sliding",
        2 * toy_vllm.SIZE,
        2,
    )


@pytest.mark.parametrize("case", ["unknown layers", "another pool", "odd hashes"])
def test_other_layers_that_cannot_be_recorded(
    make: Make, tmp_path: Path, warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Are a warning, and nothing is recorded."""
    other = toy_vllm.OddManager if case == "unknown layers" else SlidingWindowManager
    if case == "unknown layers":
        kinds = sys.modules["vllm.v1.core.single_type_kv_cache_manager"]
        monkeypatch.setattr(kinds, "SlidingWindowManager", toy_vllm.MambaManager)
    elif case == "another pool":
        monkeypatch.setattr(other, "block_pool", property(lambda _: None, lambda *_: None), raising=False)
    hashing = "odd" if case == "odd hashes" else "sha256"
    given = {"kvcache": {"log": str(tmp_path / "log")}}
    scheduler = make(additional=given, kinds=(toy_vllm.FullAttentionManager, other), hashing=hashing)
    [warning] = warnings()
    assert "layers" in warning
    assert not hasattr(scheduler, "_kvcache_attached")
    assert scheduler.serve(Request("a", PROMPT))
    assert not (tmp_path / "log").exists()


NAMES = [("sha256", "engine_256"), ("xxhash", "engine_128"), ("odd", "v2_sha256_64")]


@pytest.mark.parametrize(("hashing", "algorithm"), NAMES)
def test_names_are_vllms_own(make: Make, tmp_path: Path, hashing: str, algorithm: str) -> None:
    """Where a log can have them; else they are made."""
    scheduler = make(additional={"kvcache": {"log": str(tmp_path / "log")}}, hashing=hashing)
    scheduler.serve(Request("a", PROMPT, hash_bytes={"xxhash": 16}.get(hashing, 32)))
    assert attached(scheduler).attached
    scheduler.shutdown()
    assert created(tmp_path / "log").hash_algorithm == algorithm


UNSUITED: dict[str, dict[str, Any]] = {
    "embeddings that are no tensor": {"prompt_embeds": [0.5] * len(PROMPT)},
    "a token below 0": {"all_token_ids": [1, -1, 2]},
}


@pytest.mark.parametrize("name", UNSUITED)
def test_unsuited_requests_end_the_recording(
    make: Make, tmp_path: Path, name: str, warnings: Callable[[], list[str]]
) -> None:
    """Requests before are in the log, which says that more was to come; the engine goes on."""
    scheduler = make(additional={"kvcache": {"log": str(tmp_path / "log")}})
    scheduler.serve(Request("a", PROMPT))
    assert len(scheduler.serve(Request("b", PROMPT, **UNSUITED[name]))) == 3
    assert len(scheduler.serve(Request("c", PROMPT))) == 3
    assert not methods(scheduler)
    scheduler.shutdown()
    (said,) = warnings()[1:]
    assert "no longer recorded" in said
    end = replay(tmp_path / "log", verify=True).end
    assert end is not None
    assert (end.kind, end.next_seq) == ("clean", (end.last_seq or 0) + 2)


@pytest.mark.parametrize("update", [[7, 8, 9], [7]])
def test_a_session_goes_on(make: Make, tmp_path: Path, update: list[int]) -> None:
    """Its further input is a request of its own, which reuses the blocks that the session has kept."""
    scheduler = make(additional={"kvcache": {"log": str(tmp_path / "log")}})
    session = Request("a", PROMPT, resumable=True)
    (*_, table) = scheduler.serve(session)
    scheduler._update_request_as_session(session, update)
    session.resumable = False
    (*_, later) = scheduler.serve(session)
    assert later[: len(table)] == table
    audit = audited(attached(scheduler), tmp_path)
    kept = (len(PROMPT) + 2) // toy_vllm.SIZE * toy_vllm.SIZE
    assert (audit.requests, audit.reused) == (2, kept)
    assert audit.prompt_tokens == len(PROMPT) + len(PROMPT) + 2 + len(update)


def test_a_scheduler_that_is_none_of_vllms_is_reported(
    monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]], tmp_path: Path
) -> None:
    """One that is not derived from vLLM's own cannot be recorded; without a setting nobody minds."""
    stock = toy_vllm.install(monkeypatch)
    core = toy_vllm.core(monkeypatch)
    plugin.register()
    plugin.register()
    given = {"kvcache": {"log": str(tmp_path / "log")}}
    recorded = core(SimpleNamespace(additional_config=given, scheduler_cls=lambda: stock(additional=given)))
    recorded.scheduler.shutdown()
    core(SimpleNamespace(additional_config=None, scheduler_cls=SimpleNamespace))
    assert len(warnings()) == 1
    core(SimpleNamespace(additional_config=given, scheduler_cls=SimpleNamespace))
    assert "is not derived from vllm.v1.core.sched.scheduler.Scheduler" in warnings()[1]


def begun(make: Make, tmp_path: Path) -> tuple[Any, Any]:
    """A scheduler's manager, and what listens to it."""
    scheduler = make(additional={"kvcache": {"log": str(tmp_path / "log")}})
    return scheduler.kv_cache_manager, attached(scheduler)


def audited(subscribed: Any, tmp_path: Path) -> Audit:
    """The log's audit, when the recorder has closed it in good order."""
    assert subscribed.attached
    subscribed.close()
    replay(tmp_path / "log", verify=True)
    return audit_batches((batch, True) for batch in LogReader(tmp_path / "log"))


def test_blocks_that_lose_their_names(make: Make, tmp_path: Path) -> None:
    """As after a failed load: nobody finds them, the reason is told, and the request names no more."""
    manager, subscribed = begun(make, tmp_path)
    request = Request("a", PROMPT)
    manager.allocate_slots(request, 9)
    manager.evict_blocks({2, 3})  # 3 has no name yet
    assert [run.slots.tolist() for run in subscribed.recorder.state.groups[0].tree.runs.values()] == [[0]]
    manager.allocate_slots(request, 1)
    request.append(7)
    manager.take_events()
    manager.allocate_slots(request, 1)
    manager.take_events()
    manager.allocate_slots(Request("b", [*PROMPT, 1, 2]), 12)
    audit = audited(subscribed, tmp_path)
    assert audit.reasons[Reason.INVALIDATED] == 4
    assert audit.reasons[Reason.COMPUTING_INVALIDATED] == 0


def test_loads_from_outside(make: Make, tmp_path: Path) -> None:
    """At once, or awaited: counted as such, and computed when they are there."""
    manager, subscribed = begun(make, tmp_path)
    state = subscribed.recorder.state
    manager.allocate_slots(Request("a", PROMPT), 3, num_external_computed_tokens=7)
    awaited = Request("b", [5] * 10, status=Status.WAITING_FOR_REMOTE_KVS)
    manager.allocate_slots(awaited, 0, num_external_computed_tokens=10, delay_cache_blocks=True)
    manager.take_events()
    computed = {each.request_id: each.computed for each in state.sequences.values()}
    assert computed == {"a": 10, "b": 0}
    manager.cache_blocks(awaited, 10)
    awaited.num_computed_tokens, awaited.status = 9, Status.RUNNING
    manager.allocate_slots(awaited, 1)
    manager.take_events()
    assert [each.computed for each in state.sequences.values()] == [10, 10]
    assert sum(len(run.slots) for run in state.groups[0].tree.runs.values()) == 4
    audit = audited(subscribed, tmp_path)
    assert (audit.loaded, audit.not_loaded, audit.reasons[Reason.EXTERNAL]) == (16, 0, 16)


LOST: dict[str, tuple[int, bool, Status, int]] = {
    "a part of an awaited load": (4, True, Status.RUNNING, 3),
    "all of an awaited load": (0, True, Status.WAITING_FOR_REMOTE_KVS, 7),
    "a part of a load in a step": (4, False, Status.RUNNING, 3),
    "nothing, as it was aborted": (7, True, Status.FINISHED_ABORTED, 0),
}


@pytest.mark.parametrize("name", LOST)
def test_loads_that_fail(make: Make, tmp_path: Path, name: str) -> None:
    """What did not come is told, whatever becomes of the request."""
    there, awaited, status, missing = LOST[name]
    manager, subscribed = begun(make, tmp_path)
    request = Request("a", PROMPT, status=Status.WAITING_FOR_REMOTE_KVS)
    manager.allocate_slots(request, 0, num_external_computed_tokens=7, delay_cache_blocks=awaited)
    manager.take_events()
    request.num_computed_tokens, request.status = there, status
    manager.take_events()
    if status != Status.RUNNING:
        manager.free(request)
    audit = audited(subscribed, tmp_path)
    assert (audit.reasons[Reason.EXTERNAL], audit.not_loaded) == (7, missing)
    assert subscribed.recorder.state.sequences.keys() == ({1} if status == Status.RUNNING else set())


@pytest.mark.parametrize("more", [0, 3])
def test_vllms_own_count(make: Make, tmp_path: Path, more: int) -> None:
    """An audit says whether it is that of the log; what vLLM looks up for nobody is none."""
    manager, subscribed = begun(make, tmp_path)
    counts = SimpleNamespace(queries=6, preempted_queries=4, hits=0, preempted_hits=0)
    manager.prefix_cache_stats = counts
    manager.allocate_slots(Request("a", PROMPT), 10)
    manager.allocate_slots(Request("b", PROMPT, skip_reading_prefix_cache=True), 10)
    manager.take_events()
    assert manager.make_prefix_cache_stats() is counts
    manager.prefix_cache_stats = SimpleNamespace(queries=10, preempted_queries=0, hits=more, preempted_hits=0)
    manager.allocate_slots(Request("c", PROMPT), 10)
    manager.take_events()
    audit = audited(subscribed, tmp_path)
    assert audit.counts == ((30, 0), (30, more))
    assert audit.reasons[Reason.NOT_LOOKED_UP] == 9


def test_eagle_is_reported(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of such an engine a log says that it drops the last block of a hit."""
    original = toy_vllm.Manager.__init__

    def with_eagle(self: Any, *args: Any) -> None:
        original(self, *args)
        self.coordinator.eagle_group_ids = {0}

    monkeypatch.setattr(toy_vllm.Manager, "__init__", with_eagle)
    _, subscribed = begun(make, tmp_path)
    subscribed.close()
    assert created(tmp_path / "log").drops_last_hit


def test_who_has_wrapped_it_since_keeps_its_own(make: Make, tmp_path: Path) -> None:
    """What others put over our wrapper stays in place, and calls vLLM's method."""
    scheduler = make(additional={"kvcache": {"log": str(tmp_path / "log")}})
    manager: Any = scheduler.kv_cache_manager
    ours, calls = manager.take_events, count()

    def take_events() -> Any:
        next(calls)
        return ours()

    manager.take_events = take_events
    scheduler.serve(Request("a", PROMPT))
    scheduler.shutdown()
    assert methods(scheduler) == {"take_events"}
    assert manager.take_events() == []
    assert next(calls) == 5


def test_aborted_and_preempted_requests(make: Make, tmp_path: Path) -> None:
    """How a request has ended is what its status says, and one that runs still is preempted."""
    scheduler = make(additional={"kvcache": {"log": str(tmp_path / "log")}})
    manager = scheduler.kv_cache_manager
    for name, status in (
        ("a", Status.RUNNING),
        ("b", Status.FINISHED_ABORTED),
        ("c", Status.FINISHED_STOPPED),
    ):
        request = Request(name, PROMPT)
        manager.allocate_slots(request, 10)
        request.status = status
        before = attached(scheduler).recorder.stats().batches
        manager.pop_blocks_for_free(request)
        # Nobody knows when the next step will be.
        assert attached(scheduler).recorder.stats().batches == before + 1
    scheduler.shutdown()
    events = [each for batch in LogReader(tmp_path / "log") for each in batch.events]
    ends = [(each.why, each.stop) for each in events if isinstance(each, SequenceRemoved)]
    assert ends == [(EndReason.PREEMPTED, None), (EndReason.ABORTED, "abort"), (EndReason.FINISHED, "stop")]


def test_images_are_distinguished(make: Make, tmp_path: Path) -> None:
    """Equal placeholders that stand for different images are different contents."""
    scheduler = make(additional={"kvcache": {"log": str(tmp_path / "log")}})
    for number, image in enumerate(("cat", "dog", "cat")):
        place = SimpleNamespace(offset=2, length=6)
        features = [SimpleNamespace(identifier=image, mm_position=place)]
        scheduler.serve(Request(f"r{number}", PROMPT, mm_features=features))
    assert attached(scheduler).attached
    scheduler.shutdown()
    tree: Any = replay(tmp_path / "log", verify=True).state.groups[0]
    assert sum(len(run.slots) for root in tree.tree.roots.values() for run in runs_below(root)) == 6


def test_items_that_overlap(make: Make, tmp_path: Path) -> None:
    """As a video and its sound do: they are recorded, and other sound is another content."""
    scheduler = make(additional={"kvcache": {"log": str(tmp_path / "log")}})
    video = SimpleNamespace(identifier="video", mm_position=SimpleNamespace(offset=1, length=6))
    for number, sound in enumerate(("rain", "wind", "rain")):
        features = [SimpleNamespace(identifier=sound, mm_position=SimpleNamespace(offset=2, length=6)), video]
        scheduler.serve(Request(f"r{number}", PROMPT, mm_features=features))
    assert attached(scheduler).attached
    scheduler.shutdown()
    tree: Any = replay(tmp_path / "log", verify=True).state.groups[0]
    assert sum(len(run.slots) for root in tree.tree.roots.values() for run in runs_below(root)) == 6


STRANGE: dict[str, dict[str, Any]] = {
    "a long id": {"request_id": "x" * 100_000},
    "an id that is no Unicode text": {"request_id": "\ud800"},
    "a salt that is no Unicode text": {"cache_salt": "\ud800"},
    "an adapter that is no Unicode text": {
        "lora_request": SimpleNamespace(lora_name="\ud800", lora_path="/\ud801")
    },
    "an item that is no Unicode text": {
        "mm_features": [SimpleNamespace(identifier="\ud800", mm_position=SimpleNamespace(offset=1, length=2))]
    },
}


@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.parametrize("blocks", [2, 20])
def test_clients_cannot_end_the_recording(make: Make, tmp_path: Path, name: str, blocks: int) -> None:
    """Whatever they name themselves: requests are recorded, or refused where there is no room."""
    scheduler = make(additional={"kvcache": {"log": str(tmp_path / "log")}}, blocks=blocks)
    scheduler.serve(Request("a", PROMPT))
    given: dict[str, Any] = {"request_id": "b", "tokens": PROMPT, **STRANGE[name]}
    scheduler.serve(Request(**given))
    audit = audited(attached(scheduler), tmp_path)
    assert (audit.requests, audit.refusals) == ((2, 0) if blocks > 2 else (0, 2))


def test_refusals(make: Make, tmp_path: Path) -> None:
    """A request for which there is no room."""
    scheduler = make(additional={"kvcache": {"log": str(tmp_path / "log")}}, blocks=3)
    assert scheduler.serve(Request("a", PROMPT)) == []
    scheduler.shutdown()
    audit = audit_batches((batch, True) for batch in LogReader(tmp_path / "log"))
    assert (audit.requests, audit.refusals) == (0, 1)


def test_an_error_is_reported_without_its_text(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    """It may quote tokens. The recorder's end may fail as well."""

    def fail(*_: Any) -> None:
        raise KeyError("12345")

    monkeypatch.setattr(Recording, "stepped", fail)
    monkeypatch.setattr(Recorder, "close", fail)
    scheduler = make(additional={"kvcache": {"log": str(tmp_path / "log")}})
    assert len(scheduler.serve(Request("a", PROMPT))) == 3
    assert "KeyError at test_vllm_plugin.py" in warnings()[1]
    assert "is incomplete" in warnings()[2]
    assert "12345" not in " ".join(warnings())
    with LogWriter(tmp_path / "log", resume=True):
        """It is closed all the same."""


def test_a_last_step_that_cannot_be_recorded_is_reported(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    """The log does not end as if it had all."""
    scheduler = make(additional={"kvcache": {"log": str(tmp_path / "log")}})
    scheduler.kv_cache_manager.allocate_slots(Request("a", PROMPT), len(PROMPT))

    def fail(*_: Any) -> None:
        raise KeyError("12345")

    monkeypatch.setattr(Recording, "stepped", fail)
    scheduler.shutdown()
    assert scheduler.ended
    assert "KeyError at test_vllm_plugin.py" in warnings()[1]
    end = replay(tmp_path / "log", verify=True).end
    assert end is not None
    assert (end.kind, end.next_seq) == ("clean", (end.last_seq or 0) + 2)


CHILD = """
import os, signal, sys
from pathlib import Path
import pytest
from tests.support.engines import toy_vllm
from kvcache.fold.prefix_tree import runs_below
from kvcache.integrations.vllm import plugin

patch = pytest.MonkeyPatch()
made = toy_vllm.install(patch)
plugin.register()
scheduler = made()
scheduler.serve(toy_vllm.Request("a", list(range(10))))
if sys.argv[1] == "fork":
    child = os.fork()
    if child == 0:
        scheduler.shutdown()
        sys.exit(0)
    os.waitpid(child, 0)
    scheduler.serve(toy_vllm.Request("b", list(range(10))))
elif sys.argv[1] == "signal":
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
"""


@pytest.mark.parametrize(
    ("how", "code", "requests"), [("exit", 0, 1), ("signal", -signal.SIGTERM, 1), ("fork", 0, 2)]
)
def test_a_log_is_closed_when_the_process_ends(tmp_path: Path, how: str, code: int, requests: int) -> None:
    """At the interpreter's end and by a signal, and not by a forked child."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "KVCACHE_LOG": str(tmp_path / "log")}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, how], env=env, check=False, capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    replayed = replay(tmp_path / "log", verify=True)
    assert replayed.end is not None
    assert replayed.end.kind == "clean"
    assert audit_batches((batch, True) for batch in LogReader(tmp_path / "log")).requests == requests


@pytest.mark.parametrize(
    ("given", "drains", "grace", "waits"),
    [
        ({"kvcache": True}, 0, 0, None),
        ({}, 0, 0, 0),
        ({"kvcache": False}, 0, 0, 0),
        ({"kvcache": True}, 30, 0, 0),
        ({"kvcache": True}, 0, 15, 0),
    ],
    ids=["recorded", "not asked for", "forbidden", "drained until then", "vLLM waits itself"],
)
def test_a_server_waits_for_a_recorded_engine(
    given: dict[str, bool], drains: int, grace: int, waits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it would kill an engine at once that it has asked to end, and only there."""
    made = toy_vllm.engines(monkeypatch, grace)
    plugin.register()
    plugin.register()
    config = SimpleNamespace(additional_config=given, shutdown_timeout=drains)
    engines = made(vllm_config=config)
    for timeout in (0, 7, None):
        engines.shutdown(timeout)
    engines.shutdown(timeout=0)
    assert engines.waited == [waits, 7, None, waits]
