"""The engine's interface: what calls return, and that a call which raises has changed nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from events.types import AdmissionRefused, SequenceRemoved, TokensAppended
from kvcache.calls.scheduling import Scheduling
from kvcache.calls.tables import BlockTables
from kvcache.errors import (
    CapacityError,
    DuplicateRequest,
    InvalidTokens,
    KVCacheError,
    ManagerClosed,
    OutOfBlocks,
    Poisoned,
    PromptTooLong,
    UnknownRequest,
    UsageError,
    WrongThread,
)
from kvcache.inputs import Request
from kvcache.manager import KVCacheManager, Substitutes
from kvcache.replay import replay
from tests.support.engines import strategies
from tests.support.engines.commands import COMMANDS, cache, call
from tests.support.engines.inside import sequence_of

Call = Callable[[Any], Any]
MISTAKES: list[tuple[str, type[KVCacheError], Call]] = [
    ("already running", DuplicateRequest, lambda m: m.add_sequence("a", [1])),
    ("twice in a batch", DuplicateRequest, lambda m: m.add_sequences([Request("c", [1]), Request("c", [2])])),
    ("no tokens", InvalidTokens, lambda m: m.add_sequence("c", [])),
    ("second prompt bad", InvalidTokens, lambda m: m.add_sequences([Request("c", [1]), Request("d", [-1])])),
    ("text", InvalidTokens, lambda m: m.add_sequence("c", "text")),
    ("no id", UsageError, lambda m: m.add_sequence(None, [1])),
    ("flag as id", UsageError, lambda m: m.add_sequence(True, [1])),
    ("huge id", UsageError, lambda m: m.add_sequence(2**64, [1])),
    ("surrogate in id", UsageError, lambda m: m.add_sequence("\ud800", [1])),
    ("LoRA id as text", UsageError, lambda m: m.add_sequence("c", [1], lora_id="1")),
    ("LoRA id as float", UsageError, lambda m: m.add_sequence("c", [1], lora_id=1.0)),
    ("huge LoRA id", UsageError, lambda m: m.add_sequence("c", [1], lora_id=2**64)),
    ("LoRA name as number", UsageError, lambda m: m.add_sequence("c", [1], lora_name=1)),
    ("surrogate in LoRA name", UsageError, lambda m: m.add_sequence("c", [1], lora_name="\ud800")),
    ("salt as bytes", UsageError, lambda m: m.add_sequence("c", [1], cache_salt=b"1")),
    ("surrogate in salt", UsageError, lambda m: m.match([1], cache_salt="\ud800")),
    ("can_add, running already", DuplicateRequest, lambda m: m.can_add([Request("a", [1])])),
    ("too long ever", PromptTooLong, lambda m: m.add_sequence("c", [1] * 17)),
    ("too long ever, can_add", PromptTooLong, lambda m: m.can_add([Request("c", [1] * 17)])),
    ("no room", OutOfBlocks, lambda m: m.add_sequence("c", [1] * 16)),
    ("no room for all", OutOfBlocks, lambda m: m.add_sequences([Request(n, [0, 0]) for n in range(4)])),
    ("store of unknown", UnknownRequest, lambda m: m.store_context_blocks("c", 1)),
    ("store beyond the end", UsageError, lambda m: m.store_context_blocks("a", 6)),
    ("store of less than nothing", UsageError, lambda m: m.store_context_blocks("a", -1)),
    ("store of a fraction", UsageError, lambda m: m.store_context_blocks("b", 2.5)),
    ("tokens for unknown", UnknownRequest, lambda m: m.add_tokens(["a", "c"], [1, 1])),
    ("tokens for unknown, counted", UnknownRequest, lambda m: m.add_tokens(["a", "c"], [1, 1], [1, 1])),
    ("too few tokens", InvalidTokens, lambda m: m.add_tokens(["a", "b"], [1])),
    ("too few counts", InvalidTokens, lambda m: m.add_tokens(["a", "b"], [1, 1], [2])),
    ("a count of nothing", InvalidTokens, lambda m: m.add_tokens(["a", "b"], [1, 1], [2, 0])),
    ("negative token", InvalidTokens, lambda m: m.add_tokens(["a"], [-1])),
    ("named twice", UsageError, lambda m: m.add_tokens(["a", "a"], [1, 1])),
    ("named twice, counted", UsageError, lambda m: m.add_tokens(["a", "a"], [1, 1], [1, 1])),
    ("grown too long", PromptTooLong, lambda m: m.add_tokens(["b", "a"], [1] * 13, [1, 12])),
    ("no room to grow", OutOfBlocks, lambda m: m.add_tokens(["a", "b"], [1] * 11, [6, 5])),
    ("priority of unknown", UnknownRequest, lambda m: m.set_priority("c", 50)),
    ("priority too low", UsageError, lambda m: m.set_priority("a", -1)),
    ("priority too high", UsageError, lambda m: m.set_priority("a", 101)),
    ("priority as flag", UsageError, lambda m: m.set_priority("a", True)),
    ("priority as fraction", UsageError, lambda m: m.set_priority("a", 50.0)),
    (
        "priority of a range that ends before it begins",
        UsageError,
        lambda m: m.set_priority("a", 50, start=2, stop=1),
    ),
    ("priority from less than nothing", UsageError, lambda m: m.set_priority("a", 50, start=-1)),
    ("priority up to the last but one", UsageError, lambda m: m.set_priority("a", 50, stop=-1)),
    ("priority up to a text", UsageError, lambda m: m.set_priority("a", 50, stop="2")),
    ("removal of unknown", UnknownRequest, lambda m: m.remove_sequence("c")),
    ("table of unknown", UnknownRequest, lambda m: m.block_table("c")),
    ("tables of unknown", UnknownRequest, lambda m: m.block_tables(["a", "c"])),
    ("table of no window", UsageError, lambda m: m.block_table("a", 7)),
    ("rest of unknown", UnknownRequest, lambda m: m.scheduling.remaining_blocks_to_completion("c", 1)),
    ("match of text", InvalidTokens, lambda m: m.match("text")),
]


@pytest.mark.parametrize(
    ("error", "call"), [case[1:] for case in MISTAKES], ids=[case[0] for case in MISTAKES]
)
def test_a_call_that_raises_leaves_no_trace(error: type[KVCacheError], call: Call) -> None:
    """After a refused call the state, the pending events and what the manager does next are as without it."""
    manager, untouched = cache(), cache()
    before = manager.fingerprint(), list(manager.bus.pending)
    with pytest.raises(error) as raised:
        call(manager)
    assert type(raised.value) is error
    pending = [event for event in manager.bus.pending if not isinstance(event, AdmissionRefused)]
    assert (manager.fingerprint(), pending) == before
    manager.check()
    for each in (manager, untouched):
        each.add_tokens(["a", "b"], [1, 1])
        each.add_sequence("c", [1, 2, 3], lora_id=1)
        each.remove_sequence("a")
    assert manager.fingerprint() == untouched.fingerprint()


BEFORE, RAISE = "pass only the entries before index 1", "or raise primary_blocks"
LONGER = "or raise max_sequence_length and, if the pool is smaller, primary_blocks"
REFUSALS: list[tuple[Call, str]] = [
    (
        lambda m: m.add_sequence("c", [1] * 16),
        f"too few primary blocks: 8 needed, 3 free or evictable; remove a sequence, {RAISE}",
    ),
    (
        lambda m: m.add_sequences([Request("c", [1]), Request("d", [1] * 16)]),
        f"too few primary blocks: 9 needed, 3 free or evictable; {BEFORE}, remove a sequence, {RAISE}",
    ),
    (
        lambda m: m.add_tokens(["a"], [1] * 9, [9]),
        f"too few primary blocks: 4 needed, 3 free or evictable; remove a sequence, {RAISE}",
    ),
    (
        lambda m: m.add_tokens(["a", "b"], [1] * 11, [6, 5]),
        f"too few primary blocks: 6 needed, 3 free or evictable; {BEFORE}, remove a sequence, {RAISE}",
    ),
    (
        lambda m: m.add_sequence("c", [1] * 17),
        "17 tokens exceed the limit of 16: pass fewer, end the sequence, or raise primary_blocks",
    ),
    (
        lambda m: m.add_tokens(["a"], [1] * 12, [12]),
        "17 tokens exceed the limit of 16: pass fewer, end the sequence, or raise primary_blocks",
    ),
    (
        lambda m: m.add_tokens(["a", "b"], range(33)),
        f"33 tokens exceed the limit of 32: pass fewer, end the sequence, {LONGER}",
    ),
]


@pytest.mark.parametrize(("call", "text"), REFUSALS, ids=[case[1][:40] for case in REFUSALS])
def test_refusals_say_what_was_asked_what_there_is_and_what_to_do(call: Call, text: str) -> None:
    """One text serves a request alone, a batch, and a step of decoding: it is true of each."""
    with pytest.raises(CapacityError) as raised:
        call(cache())
    assert str(raised.value) == text


def test_what_comes_before_the_entry_fits() -> None:
    """The way out that the text of a refused step names is one."""
    manager = cache()
    with pytest.raises(OutOfBlocks) as raised:
        manager.add_tokens(["a", "b"], [1] * 11, [6, 5])
    first = raised.value.index
    manager.add_tokens(["a", "b"][:first], [1] * 6, [6, 5][:first])


def test_decoding_that_runs_out_leaves_no_trace() -> None:
    """Steps of one token each are refused as a whole, and go on once there is room."""
    manager = KVCacheManager(strategies.config(primary_blocks=3))
    manager.add_sequences([Request("a", [1]), Request("b", [2, 3])])
    manager.add_tokens(["a", "b"], [4, 4])
    manager.add_tokens(["b"], [5])
    before = manager.fingerprint(), len(manager.bus.pending)
    for _ in range(2):
        with pytest.raises(OutOfBlocks) as raised:
            manager.add_tokens(["b", "a"], [6, 6])
        assert (raised.value.index, raised.value.needed, raised.value.available) == (0, (2,), (0,))
        assert (manager.fingerprint(), len(manager.bus.pending)) == before
    manager.remove_sequence("b", store=False)
    manager.add_tokens(["a"], [6])
    manager.check()
    assert sequence_of(manager, "a").tokens.tolist() == [1, 4, 6]


def test_refusals_are_noted_once_until_admitted() -> None:
    """A request that does not fit leaves one note however often it is tried, and another after it ran."""
    manager = cache()
    blocked = [Request("c", [0] * 8)]
    for _ in range(3):
        with pytest.raises(OutOfBlocks):
            manager.add_sequences(blocked)
    notes = [event for event in manager.bus.pending if isinstance(event, AdmissionRefused)]
    assert notes == [AdmissionRefused("c", (4,), (3,))]
    manager.remove_sequence("a")
    manager.add_sequences(blocked)
    manager.remove_sequence("c")
    manager.add_sequence("a", [0] * 11, lora_id=5)
    with pytest.raises(OutOfBlocks):
        manager.add_sequences(blocked)
    assert sum(isinstance(event, AdmissionRefused) for event in manager.bus.pending) == 2


def test_integers_of_other_kinds_are_logged_as_plain_ones(tmp_path: object) -> None:
    """Numpy's integers and subclasses of str and int, as engines pass them, reach the log as what they stand for."""

    class Name(str):
        __slots__ = ()

    with KVCacheManager(strategies.config(), log=f"{tmp_path}/log") as manager:
        manager.add_sequence(Name("a"), [1, 2, 3], lora_id=np.int64(3))  # type: ignore[arg-type]
        manager.store_context_blocks("a", np.int64(2))  # type: ignore[arg-type]
        manager.add_tokens(["a"], np.array([4, 5]), np.array([2]))  # type: ignore[arg-type]
    replayed = replay(f"{tmp_path}/log", verify=True)
    assert list(replayed.state.handles) == ["a"]
    assert not replayed.checkpoints_failed


ANY_THREAD = {
    "feeds",
    "get_latest_events",
    "log_stats",
    "reopen_sinks",
    "sink_stats",
    "stats",
    "take_request_stats",
    "wait_durable",
    "wait_subscribers",
}
MADE_FROM_OTHERS = {"close", "open", "resume", "tables.of_admission", "tables.one", "tables.several"}
FIXED = {"max_encoder_tokens", "max_tokens", "max_prompt_tokens"}


def test_the_list_of_commands_is_complete() -> None:
    """Whatever a manager offers is among the commands, or may be called at any time."""
    parts = {"": KVCacheManager, "tables.": BlockTables, "scheduling.": Scheduling}
    public = {part + name for part, kind in parts.items() for name in dir(kind) if not name.startswith("_")}
    assert public == {name for name, _ in COMMANDS} | ANY_THREAD | FIXED | MADE_FROM_OTHERS


@pytest.mark.parametrize(("name", "arguments"), [*COMMANDS, ("close", ())])
def test_other_threads_are_refused(name: str, arguments: tuple[Any, ...] | None) -> None:
    """A manager belongs to the thread that made it; another one's call raises, names both and changes nothing."""
    manager = cache()
    before = manager.fingerprint(), list(manager.bus.pending)
    caught: list[WrongThread] = []

    def work() -> None:
        with pytest.raises(WrongThread) as raised:
            call(manager, name, arguments)
        caught.append(raised.value)

    thread = threading.Thread(target=work, name="other")
    thread.start()
    thread.join()
    assert [(error.owner, error.caller) for error in caught] == [(threading.current_thread().name, "other")]
    assert (manager.fingerprint(), list(manager.bus.pending)) == before


def test_other_threads_may_watch() -> None:
    """Counters can be read from any thread, as of the last flush."""
    manager = cache()
    seen: list[int] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: seen.append(manager.stats().sequences))
        thread.start()
        thread.join()
        manager.flush()
    assert seen == [0, 2]


@pytest.mark.parametrize(("name", "arguments"), COMMANDS)
def test_closed_managers_refuse_commands(name: str, arguments: tuple[Any, ...] | None) -> None:
    """After close every command raises ManagerClosed, and closing again is harmless."""
    manager = cache()
    manager.close()
    manager.close()
    with pytest.raises(ManagerClosed):
        call(manager, name, arguments)


@pytest.mark.parametrize(("name", "arguments"), COMMANDS)
def test_failed_managers_refuse_commands(
    name: str, arguments: tuple[Any, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception in the middle of a command stops the manager: every later call raises the same, and close works."""
    manager = cache()

    def fail(event: object) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patched:
        patched.setitem(manager.state.handlers, TokensAppended, fail)
        with pytest.raises(RuntimeError, match="broken"):
            manager.add_tokens(["a"], [1])
    with pytest.raises(Poisoned, match=r"RuntimeError at test_manager.py:\d+"):
        call(manager, name, arguments)
    manager.close()


def test_duplicates_are_distinguished() -> None:
    """An id that is twice in one call is not said to be running."""
    for requests, says in (
        ([Request("a", [1])], "is already running"),
        ([Request("c", [1]), Request("c", [2])], "duplicate request"),
    ):
        with pytest.raises(DuplicateRequest, match=says):
            cache().add_sequences(requests)


def test_failure_is_repeated_without_tokens() -> None:
    """What a manager says of the failure that stopped it quotes our own texts only: a dict's key is a prompt."""
    manager = KVCacheManager(strategies.config())
    manager.add_sequence("past", [1234, 5678, 1, 2, 3])
    manager.store_context_blocks("past", 5)
    manager.remove_sequence("past")
    for root in manager.state.groups[0].tree.roots.values():
        root.children.clear()  # as a bug would
    with pytest.raises(KeyError):
        manager.add_sequence("next", [7] * 16)
    with pytest.raises(Poisoned, match=r"KeyError at prefix_tree.py:\d+") as reported:
        manager.flush()
    assert "\\x" not in str(reported.value)
    manager.close()


def test_tables_of_several_windows() -> None:
    """Each window has tables and slots of its own; where there are several, a caller says which is meant."""
    settings = {"num_layers": 2, "max_attention_window": [4, 12], "primary_blocks": 6}
    manager = KVCacheManager(strategies.config(**settings))
    admission = manager.add_sequence("a", [1] * 5)
    assert [table.tolist() for table in admission.block_tables] == [[0, 1, 2], [0, 1, 2]]
    assert manager.block_table("a", 4).tolist() == manager.block_tables(["a"], 12)[0].tolist() == [0, 1, 2]
    assert manager.num_free_blocks_per_window() == {4: 3, 12: 3}
    assert manager.num_free_blocks == 3
    assert manager.stats().blocks_total == (12, 0)
    for ask in (manager.block_table, lambda _: manager.block_tables(["a"])):
        with pytest.raises(UsageError, match=r"one of \[4, 12\]"):
            ask("a")
    with pytest.raises(UsageError, match="no window of 5 tokens"):
        manager.block_table("a", 5)
    with pytest.raises(OutOfBlocks) as refused:
        manager.add_sequence("b", [2] * 8)
    assert (refused.value.needed, refused.value.available) == ((4, 4), (3, 3))


def test_block_tables_are_padded_copies() -> None:
    """Tables of several sequences form one array padded with -1, and writing to it changes nothing."""
    manager = cache()
    tables = manager.block_tables(["a", "b"])
    assert isinstance(tables, np.ndarray)
    assert tables.dtype == np.int32
    assert tables.tolist() == [[*manager.block_table("a")], [*manager.block_table("b"), -1]]
    before = manager.fingerprint()
    tables[:] = 99
    manager.block_table("a", manager.layout.groups[0].window)[:] = 99
    assert manager.fingerprint() == before
    assert manager.block_tables([]).shape == (0, 0)


def test_remaining_blocks_count_from_what_is_held() -> None:
    """What a sequence still needs is counted in whole blocks beyond its table."""
    manager = cache()
    assert [manager.scheduling.remaining_blocks_to_completion("a", more) for more in (0, 1, 2, 3)] == [
        0,
        0,
        1,
        1,
    ]
    assert [manager.scheduling.remaining_blocks_to_completion("b", more) for more in (0, 1, 2, 3)] == [
        0,
        1,
        1,
        2,
    ]


def test_request_ids_return() -> None:
    """An id may be used again after its sequence ended, 0 and "0" are two, and handles are never used twice."""
    manager = KVCacheManager(strategies.config())
    handles = []
    for _ in range(3):
        handles += [manager.add_sequence(0, [1]).handle, manager.add_sequence("0", [1]).handle]
        assert manager.num_sequences == 2
        manager.remove_sequence(0)
        manager.remove_sequence("0")
    assert handles == [1, 2, 3, 4, 5, 6]


def test_empty_calls_make_no_events() -> None:
    """Calls about nothing return nothing and make no batch."""
    manager = cache()
    manager.flush()
    assert manager.add_sequences([]) == []
    assert manager.can_add([]) == 0
    assert manager.add_tokens([], []) == {}
    assert manager.add_tokens([], [], []) == {}
    assert manager.flush() is None


def test_flush_numbers_batches_without_holes() -> None:
    """Each flush with something in it makes the next batch, stamped by the given clock."""
    times = iter(range(100, 200))
    manager = KVCacheManager(strategies.config(), substitutes=Substitutes(wall_ns=lambda: next(times)))
    seen = []
    for number in range(3):
        manager.add_sequence(number, [1, 2])
        seen.append(manager.flush())
        assert manager.flush() is None
    assert [(batch.seq, batch.ts) for batch in seen if batch is not None] == [(1, 101), (2, 102), (3, 103)]


def test_a_forgotten_flush_is_reported_once() -> None:
    """After 100 steps of a sequence the next admission says so; a step of many calls for many sequences does not."""
    manager = KVCacheManager(strategies.config(max_sequence_length=512, primary_blocks=900))
    with capture_logs() as logs:
        many = [str(number) for number in range(150)]
        for name in many:
            manager.add_sequence(name, [1])
            manager.add_tokens([name], [2])
        manager.flush()
        for _ in range(120):
            manager.add_tokens(["0"], [3])
            manager.flush()
        manager.add_sequence("a", [1])
        assert logs == []
        for _ in range(100):
            manager.add_tokens(many[:2], [3, 4])
        for name in ("b", "c"):
            manager.add_sequence(name, [1])
            manager.remove_sequence(name)
        for _ in range(100):
            manager.add_tokens(["1"], [3])
        manager.add_sequence("d", [1])
    assert [(each["event"], each["log_level"]) for each in logs] == [("flush_missing", "warning")]


def test_with_statement_closes() -> None:
    """Leaving the `with` block closes the manager, also on an error."""
    with pytest.raises(KeyError), KVCacheManager(strategies.config()) as manager:
        raise KeyError
    with pytest.raises(ManagerClosed):
        manager.flush()


def test_stats_count_what_happened() -> None:
    """Counters and gauges as of the last flush add up to what the commands did."""
    manager = cache()
    assert manager.stats().requests == 0
    manager.add_sequence("c", [1, 2, 9])
    manager.remove_sequence("a")
    manager.flush()
    stats = manager.stats()
    assert (stats.requests, stats.prompt_tokens, stats.reused_tokens, stats.sequences) == (3, 12, 2, 2)
    assert stats.blocks_allocated == 3 + 2 + 1
    assert stats.blocks_stored == 4  # [1, 2], [3, 4] and [5] of a; [6, 7] of b
    assert stats.blocks_total == (8, 0)
    assert (
        stats.blocks_blank[0] + stats.blocks_unreferenced[0] == stats.blocks_free == manager.num_free_blocks
    )
    assert stats.hit_rate == pytest.approx(2 / 12)


def test_removal_frees_what_is_not_stored() -> None:
    """Ending a sequence gives back its own blocks at once and names them in the event, deepest first."""
    manager = cache()
    table = manager.block_table("b").tolist()
    manager.remove_sequence("b", store=False)
    (event,) = [event for event in manager.bus.pending if isinstance(event, SequenceRemoved)]
    assert np.frombuffer(event.freed[0], np.int32).tolist() == [table[1]]
    assert event.stored == (1,)
    assert manager.num_free_blocks == 5
