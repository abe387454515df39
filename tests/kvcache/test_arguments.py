"""Whatever is passed to a manager, it answers with a `UsageError` and is as before."""

from __future__ import annotations

import threading
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from events.log import LogReader
from events.types import SequenceAdded
from kvcache import errors
from kvcache.device import memory
from kvcache.errors import NotEnoughMemory, Unsupported, UsageError, WrongThread
from kvcache.inputs import Request
from kvcache.manager import KVCacheManager, Substitutes
from tests.support.engines import strategies


class Odd:
    """Says at every conversion and comparison what it was told to say."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def __index__(self) -> int:
        return int(self.act())

    def __eq__(self, other: object) -> bool:
        return bool(self.act())

    def __hash__(self) -> int:
        return hash("a")


def fail() -> int:
    """Quote a token."""
    raise RuntimeError("1234567")


def cache(**options: Any) -> KVCacheManager:
    """Runs "a" and 1."""
    manager = KVCacheManager(strategies.config(event_buffer_max_size=4), **options)
    manager.add_sequences([Request("a", [1, 2, 3]), Request(1, [4, 5])])
    manager.flush()
    manager.get_latest_events()
    return manager


NO_IDS: list[Any] = [None, True, 1.0, b"a", [1], {}, Odd(fail), np.array([1, 2]), "\ud800", 2**64, 10**5000]
NO_IDS.append("a" * 1025)
BY_ID: dict[str, Callable[[KVCacheManager, Any], Any]] = {
    "add_sequence": lambda m, each: m.add_sequence(each, [1]),
    "can_add": lambda m, each: m.can_add([Request(each, [1])]),
    "store_context_blocks": lambda m, each: m.store_context_blocks(each, 1),
    "remove_sequence": lambda m, each: m.remove_sequence(each),
    "remaining_blocks": lambda m, each: m.scheduling.remaining_blocks_to_completion(each, 1),
    "fork": lambda m, each: m.fork(each, "new"),
    "fork into": lambda m, each: m.fork("a", each),
    "rewind": lambda m, each: m.rewind(each, 1),
    "pin": lambda m, each: m.pin(each),
    "set_priority": lambda m, each: m.set_priority(each, 50),
    "block_table": lambda m, each: m.block_table(each),
    "block_tables": lambda m, each: m.block_tables([each]),
}


def refused(manager: KVCacheManager, call: Callable[[], Any]) -> None:
    """Check that a call raises a `UsageError` without quoting anything, and leaves no trace."""
    before = manager.fingerprint(), len(manager.bus.pending)
    with pytest.raises(UsageError) as raised:
        call()
    assert "1234567" not in str(raised.value)
    assert (manager.fingerprint(), len(manager.bus.pending)) == before
    manager.check()
    manager.flush()


@pytest.mark.parametrize("method", BY_ID)
@pytest.mark.parametrize("request_id", NO_IDS, ids=lambda value: type(value).__name__)
def test_what_is_no_request_id_names_no_request(method: str, request_id: Any) -> None:
    """Neither what cannot be hashed or compared nor what equals an id (True, 1.0) stands for a request."""
    manager = cache()
    refused(manager, lambda: BY_ID[method](manager, request_id))


NO_LABELS: list[Any] = [
    "tenant", ["tenant"], {"tenant": 1}, {1: "t"}, {"": "t"}, {"tenant": ""}, {"x" * 65: "t"}, {"tenant": "t" * 257},
    {f"name {number}": "t" for number in range(9)}, {"tenant": "\ud800"},
]  # fmt: skip


@pytest.mark.parametrize("session", [7, b"s", "", "s" * 257, "\ud800"], ids=repr)
def test_what_is_no_session_is_refused(session: Any) -> None:
    """As one of a request alone and in a batch."""
    manager = cache()
    refused(manager, lambda: manager.add_sequence("b", [1], session=session))
    refused(manager, lambda: manager.add_sequences([Request("b", [1], session=session)]))


@pytest.mark.parametrize("labels", NO_LABELS, ids=lambda value: repr(value)[:20])
def test_what_are_no_labels_is_refused(labels: Any) -> None:
    """Their number, names and values are bounded."""
    manager = cache()
    refused(manager, lambda: manager.add_sequence("b", [1], labels=labels))
    refused(manager, lambda: manager.add_sequences([Request("b", [1], labels=labels)]))


def test_session_and_labels_are_recorded_and_decide_nothing() -> None:
    """They are in the event that admits the request, by name; the state is that of a cache without them."""
    manager, other = cache(), cache()
    manager.add_sequence(
        "b", [1, 2, 3], session="s" * 256, labels=MappingProxyType({"tenant": "t", "agent": "a"})
    )
    manager.add_sequence("c", [1, 2, 3], labels={})
    other.add_sequence("b", [1, 2, 3])
    other.add_sequence("c", [1, 2, 3])
    added = [each for each in manager.bus.pending if isinstance(each, SequenceAdded)]
    assert [(each.session, each.labels) for each in added] == [
        ("s" * 256, {"agent": "a", "tenant": "t"}),
        (None, None),
    ]
    assert list(added[0].labels or {}) == ["agent", "tenant"]
    assert manager.fingerprint() == other.fingerprint()


@pytest.mark.parametrize("counts", [None, [1]])
@pytest.mark.parametrize("request_id", NO_IDS, ids=lambda value: type(value).__name__)
def test_tokens_for_what_is_no_request_are_refused(request_id: Any, counts: list[int] | None) -> None:
    """In a batch too an id that cannot be looked up is a mistake of the caller, also after a step that went well."""
    manager = cache()
    manager.add_tokens(["a"], [1])
    refused(manager, lambda: manager.add_tokens([request_id], [1], counts))


@pytest.mark.parametrize("ids", [[1], [1, "a"], [0, 1]], ids=str)
def test_what_equals_an_id_is_no_request_of_the_step_before(ids: list[Any]) -> None:
    """True, 1.0 and others equal 1, and yet do not continue the steps of request 1."""
    manager = cache()
    manager.add_sequence(0, [1])
    for _ in range(2):  # the first step, after which all decode, is not like those that follow
        manager.add_tokens(ids, [3] * len(ids))
    for kind in (bool, float, complex, Fraction):
        like: list[Any] = [kind(each) if type(each) is int else each for each in ids]
        refused(manager, partial(manager.add_tokens, like, [3] * len(like)))
    manager.add_tokens(ids, [3] * len(ids))


class Alike(str):
    """Equals all others of its kind."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return super().__hash__()


def test_an_id_that_equals_others_names_its_own_request() -> None:
    """A string of another type stands for what it says, at each step anew."""
    manager = cache()
    manager.add_sequence("b", [1])
    for _ in range(3):
        manager.add_tokens([Alike("a")], [3])
    manager.add_tokens([Alike("b")], [3])
    assert manager.tables.sequence_lengths(["a", "b"]).tolist() == [6, 2]


def test_integers_of_numpy_are_ids() -> None:
    """An integer taken out of an array names the request of that number."""
    manager = cache()
    manager.remove_sequence(np.int64(1))  # type: ignore[arg-type]
    manager.add_sequence(np.int32(1), [1])  # type: ignore[arg-type]
    manager.remove_sequence(1)
    assert manager.num_sequences == 1


CALLS: list[tuple[str, Callable[[KVCacheManager], Any]]] = [
    ("no requests", lambda m: m.add_sequences(None)),  # type: ignore[arg-type]
    ("requests as text", lambda m: m.add_sequences("ab")),  # type: ignore[arg-type]
    ("no request", lambda m: m.add_sequences([None])),  # type: ignore[list-item]
    ("can_add of a number", lambda m: m.can_add(5)),  # type: ignore[arg-type]
    ("ids as text", lambda m: m.add_tokens("a", [1])),
    ("ids as a number", lambda m: m.add_tokens(1, [1])),  # type: ignore[arg-type]
    ("tables of a text", lambda m: m.block_tables("a")),
    ("tables of a number", lambda m: m.block_tables(1)),  # type: ignore[arg-type]
    ("counts as a number", lambda m: m.add_tokens(["a"], [1], 1)),  # type: ignore[arg-type]
    ("counts as bytes", lambda m: m.add_tokens(["a"], [1], b"\1")),
    ("a fraction as count", lambda m: m.add_tokens(["a"], [1], [1.0])),  # type: ignore[list-item]
    ("rest of a fraction", lambda m: m.scheduling.remaining_blocks_to_completion("a", float("nan"))),  # type: ignore[arg-type]
    ("rest of nothing", lambda m: m.scheduling.remaining_blocks_to_completion("a", None)),  # type: ignore[arg-type]
    ("rest of less than nothing", lambda m: m.scheduling.remaining_blocks_to_completion("a", -(2**70))),
    ("rest of minus one", lambda m: m.scheduling.remaining_blocks_to_completion("a", -1)),
    ("store of an array", lambda m: m.store_context_blocks("a", np.array([3]))),  # type: ignore[arg-type]
    ("store of a failure", lambda m: m.store_context_blocks("a", Odd(fail))),  # type: ignore[arg-type]
    ("window of arrays", lambda m: m.block_table("a", np.array([1, 2]))),  # type: ignore[arg-type]
    ("flag as an array", lambda m: m.remove_sequence("a", np.array([1, 2]))),  # type: ignore[arg-type]
    ("why as a number", lambda m: m.remove_sequence("a", why=1)),  # type: ignore[arg-type]
    ("stop as a number", lambda m: m.remove_sequence("a", stop=1234567)),  # type: ignore[arg-type]
    ("stop with surrogates", lambda m: m.remove_sequence("a", stop="\ud800")),
    ("stop too long", lambda m: m.remove_sequence("a", stop="1234567" * 10)),
    ("why as another word", lambda m: m.remove_sequence("a", why="1234567")),
    ("resumed as a number", lambda m: m.add_sequence("b", [1], resumed=1)),  # type: ignore[arg-type]
    ("flag as a number", lambda m: m.remove_sequence("a", 1)),  # type: ignore[arg-type]
    ("token that fails", lambda m: m.add_tokens(["a"], [Odd(fail)])),
    ("wait for text", lambda m: m.wait_subscribers("x")),  # type: ignore[arg-type]
    ("wait for 10**400", lambda m: m.wait_subscribers(10**400)),
    ("wait for readers of text", lambda m: m.wait_subscribers(1, "x")),  # type: ignore[arg-type]
    ("wait for readers of None", lambda m: m.wait_subscribers(1, None)),  # type: ignore[arg-type]
    ("wait for readers of NaN", lambda m: m.wait_subscribers(1, float("nan"))),
    ("wait for readers of an array", lambda m: m.wait_subscribers(1, np.array([1, 2]))),  # type: ignore[arg-type]
    ("wait until a number", lambda m: m.wait_subscribers(1, 0, 5)),  # type: ignore[arg-type]
    ("wait of text", lambda m: m.get_latest_events("x")),  # type: ignore[arg-type]
    ("wait of no number", lambda m: m.get_latest_events(float("nan"))),
]


@pytest.mark.parametrize("call", [case[1] for case in CALLS], ids=[case[0] for case in CALLS])
def test_wrong_kinds_are_refused_without_a_trace(call: Callable[[KVCacheManager], Any]) -> None:
    """Values of a wrong kind raise a UsageError, never what Python makes of them, and the manager works on."""
    manager = cache()
    refused(manager, lambda: call(manager))


@pytest.mark.parametrize("timeout_ms", [1e308, float("inf"), 2**70, 10**400])
def test_any_long_wait_is_a_wait(timeout_ms: float) -> None:
    """A wait longer than the system knows ends as soon as there is something."""
    manager = cache()
    manager.clear()
    manager.add_sequence("c", [7, 8, 9])
    manager.store_context_blocks("c", 3)
    manager.flush()
    assert [event["data"]["type"] for event in manager.get_latest_events(timeout_ms)] == ["stored"]


@pytest.mark.parametrize(
    "timeout",
    [1e308, float("inf"), 10**400, -(10**400), Fraction(1, 3), np.float32(1)],
    ids=lambda value: type(value).__name__,
)
def test_any_timeout_for_readers_is_one(timeout: Any) -> None:
    """Without feeds there is nobody to wait for, however long that may take."""
    assert cache().wait_subscribers(1, timeout)


def test_polling_without_a_buffer_is_refused() -> None:
    """Who polls for events that nobody keeps is told which setting keeps them, and does not wait for ever."""
    with (
        KVCacheManager(strategies.config(event_buffer_max_size=0)) as manager,
        pytest.raises(Unsupported, match="set event_buffer_max_size,"),
    ):
        manager.get_latest_events(None)


def test_numbers_are_converted_before_anything_is_looked_up() -> None:
    """A number that would end the request while it is converted is refused, and the call with it."""
    manager = cache()

    def remove() -> int:
        manager.remove_sequence("a")
        return 2

    with pytest.raises(errors.ManagerBusy):
        manager.store_context_blocks("a", Odd(remove))  # type: ignore[arg-type]
    manager.check()
    assert manager.num_sequences == 2


@pytest.mark.parametrize(
    "options",
    [
        {"copier": 5},
        {"pools": 5},
        {"log": 5},
        {"log": b"log"},
        {"log": "a\0b"},
        {"log": "\ud800"},
        {"sinks": None},
        {"sinks": 5},
        {"sinks": "stdout:"},
        {"sinks": [None]},
        {"sinks": [5]},
        {"sinks": [b"stdout:"]},
        {"substitutes": 5},
        {"substitutes": Substitutes(wall_ns=5)},  # type: ignore[arg-type]
        {"substitutes": Substitutes(wall_ns=lambda: 1 // 0)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_wrong_parts_are_refused_before_anything_is_opened(options: dict[str, Any], tmp_path: Path) -> None:
    """A manager is not made of what cannot do its part, and leaves no log behind."""
    with pytest.raises(UsageError):
        KVCacheManager(strategies.config(), **{"log": tmp_path / "log", **options})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("config", [None, {}, 5])
def test_settings_must_be_settings(config: Any) -> None:
    """A manager is configured by a KVCacheConfig only."""
    with pytest.raises(UsageError, match="must be a KVCacheConfig"):
        KVCacheManager(config)


@pytest.mark.parametrize("wrong", [1.5, None, "x", True, 2**63, 2**70, ZeroDivisionError()], ids=repr)
def test_a_clock_that_fails_delays_the_batch(tmp_path: Path, wrong: Any) -> None:
    """What a clock must not say is refused at the flush, whose events come with the next one that works."""
    times = iter([1, wrong, 3, 4])

    def clock() -> Any:
        now = next(times)
        if isinstance(now, Exception):
            raise now
        return now

    manager = KVCacheManager(
        strategies.config(), log=tmp_path / "log", substitutes=Substitutes(wall_ns=clock)
    )
    manager.add_sequence("a", [1, 2, 3])
    refused(manager, manager.flush)
    manager.close()
    batches = list(LogReader(tmp_path / "log"))
    assert [batch.ts for batch in batches] == [1, 3, 4]
    assert "SequenceAdded" in [type(event).__name__ for event in batches[1].events]


def test_closing_from_another_thread_closes_nothing() -> None:
    """Who may not call the manager may not close it either, and its owner goes on."""
    manager = cache()
    caught: list[BaseException] = []

    def close() -> None:
        try:
            manager.close()
        except WrongThread as error:
            caught.append(error)

    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    assert len(caught) == 1
    manager.add_sequence("c", [1])
    manager.close()


def test_more_blocks_than_can_be_counted_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache whose bookkeeping exceeds the free memory is refused with what is needed, before any is taken."""
    settings = strategies.config(primary_blocks=100, secondary_blocks=10)
    monkeypatch.setattr(memory, "free_bytes", lambda: 110 * memory.BOOKKEEPING_BYTES_PER_SLOT)
    KVCacheManager(settings)
    monkeypatch.setattr(memory, "free_bytes", lambda: 110 * memory.BOOKKEEPING_BYTES_PER_SLOT - 1)
    with pytest.raises(NotEnoughMemory) as caught:
        KVCacheManager(settings)
    assert caught.value.needed == 110 * memory.BOOKKEEPING_BYTES_PER_SLOT
