"""One call at a time: calls in the middle of others, interruptions, and failures halfway."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from cuda_ops.copier import Copy, CopyFailed, FinishedTicket, Ticket
from events.log import LogReader
from events.types import (
    FEED_EVENTS,
    AnyEvent,
    CacheCreated,
    EpochStarted,
    EventBatch,
    Gap,
    HitDeferred,
    LoadFailed,
    PoolShared,
    SlotsLeft,
    SlotsNamed,
    SlotsTaken,
    SlotsUnnamed,
)
from kvcache.errors import CapacityError, ManagerBusy, ManagerClosed, Poisoned, UsageError
from kvcache.fold.state import CacheState
from kvcache.inputs import MultimodalItem, Request
from kvcache.manager import KVCacheManager, Substitutes
from kvcache.replay import replay
from tests.support.engines import strategies
from tests.support.engines.commands import COMMANDS, cache, call
from tests.support.engines.inside import blocks_of, journal_of

PROMPT = [1, 2, 3, 4, 5]


# -- calls in the middle of others


@pytest.mark.parametrize(("name", "arguments"), COMMANDS)
def test_a_call_in_the_middle_of_another_is_refused(name: str, arguments: tuple[Any, ...] | None) -> None:
    """Whatever a subscriber of the bus calls raises, and the call that it is in the middle of does all it should."""
    manager, untouched = cache(), cache()
    refused = []

    def meddle(event: object) -> None:
        with pytest.raises(ManagerBusy):
            call(manager, name, arguments)
        refused.append(event)

    manager.bus.subscribe(meddle)
    for each in (manager, untouched):
        each.add_tokens(["a", "b"], [1, 1])
        each.remove_sequence("a")
    assert refused
    assert manager.fingerprint() == untouched.fingerprint()
    assert manager.bus.pending == untouched.bus.pending


def test_a_clock_may_not_flush() -> None:
    """A clock that calls the manager fails the flush that asked it; everything waits for the next one."""
    meddles = False

    def clock() -> int:
        if meddles:
            manager.flush()
        return 7

    manager = KVCacheManager(strategies.config(), substitutes=Substitutes(wall_ns=clock))
    manager.add_sequence("a", PROMPT)
    meddles = True
    with pytest.raises(UsageError, match="raised ManagerBusy"):
        manager.flush()
    meddles = False
    batch = manager.flush()
    assert batch is not None
    assert batch.events


def test_an_iterable_may_not_call() -> None:
    """Requests that are made while the manager takes them cannot ask it for what there is; nothing is admitted."""
    manager = cache()
    before = manager.fingerprint()

    def requests() -> Iterator[Request]:
        manager.can_add([])
        yield Request("c", [1])

    with pytest.raises(ManagerBusy):
        manager.add_sequences(requests())  # type: ignore[arg-type]
    assert manager.fingerprint() == before
    manager.add_sequence("c", [1])


def test_closing_in_the_middle_of_a_call_waits_for_its_end() -> None:
    """The call is done whole and recorded; the manager is closed when it has returned."""
    manager = cache()
    batches: list[EventBatch] = []
    journal_of(manager).outputs.publish = batches.append  # type: ignore[method-assign,assignment]
    manager.bus.subscribe(lambda event: manager.close())
    admission = manager.add_sequence("c", [1, 2])
    assert admission.num_tokens == 2
    assert [event.request_id for event in batches[-1].events if hasattr(event, "request_id")][-1] == "c"
    with pytest.raises(ManagerClosed):
        manager.flush()


def test_closing_in_the_middle_of_a_call_that_raises() -> None:
    """The manager is closed after a refused call as well, and the refusal is told."""
    manager = cache()
    manager.bus.subscribe(lambda event: manager.close())
    with pytest.raises(CapacityError):
        manager.add_sequence("c", [1] * 16)
    with pytest.raises(ManagerClosed):
        manager.num_free_blocks  # noqa: B018


def test_closing_in_the_middle_of_closing() -> None:
    """The second one changes nothing."""
    manager = cache()
    manager.bus.subscribe(lambda event: manager.close())
    manager.close()
    with pytest.raises(ManagerClosed):
        manager.flush()


def running(directory: Path) -> KVCacheManager:
    """A cache whose next admission offloads and brings back."""
    manager = KVCacheManager(strategies.config(primary_blocks=6, secondary_blocks=6), log=directory)
    for number, prompt in enumerate(([1, 2, 3, 4, 5], [9] * 12)):
        manager.add_sequence(number, prompt)
        manager.store_context_blocks(number, len(prompt))
        manager.remove_sequence(number)
    manager.flush()
    return manager


class At:
    """Calls something in the middle of the manager's code: at one of its lines."""

    def __init__(self, line: int, act: Callable[[], object]) -> None:
        self.left = line
        self.act = act
        self.outcome = ""

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename.replace("\\", "/")
        # Between the lines of the guard itself no handler runs: nothing is called there.
        if "/kvcache/" not in name or name.endswith("/guard.py"):
            return None
        if event == "line":
            self.left -= 1
            if not self.left:
                sys.settrace(None)
                try:
                    self.act()
                    self.outcome = "done"
                except ManagerBusy:
                    self.outcome = "refused"
        return self if self.left > 0 else None


@pytest.mark.parametrize("act", ["flush", "close", "add_sequence"])
def test_a_handler_that_calls_at_any_line(act: str, tmp_path: Path) -> None:
    """Wherever a handler hits an admission it is told so or closes after it, and the log holds whole commands only."""
    line, left, outcomes = 0, 0, set()
    while not left:
        line += 41
        directory = tmp_path / str(line)
        manager = running(directory)
        at = At(line, partial(getattr(manager, act), *(("nested", [7]) if act == "add_sequence" else ())))
        before = sys.gettrace()
        sys.settrace(at)
        try:
            manager.add_sequence("x", [1, 2, 3, 4, 6, 6])
        finally:
            sys.settrace(before)
        left = at.left
        outcomes.add(at.outcome)
        manager.close()
        replayed = replay(directory, verify=True)
        assert not replayed.checkpoints_failed
        assert list(replayed.state.handles) == ["x"]
        state = CacheState()
        for batch in LogReader(directory):
            for event in batch.events:
                state.apply(event)
            state.check()
    assert outcomes == {"done" if act == "close" else "refused", ""}


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this platform has no timers that signal")
def test_a_timer_that_flushes(tmp_path: Path) -> None:
    """Signals at any time: each is refused or happens between two calls, and the log replays to the same state."""
    outcomes = {"done": 0, "refused": 0}

    def handle(number: int, frame: FrameType | None) -> None:
        try:
            manager.flush()
            outcomes["done"] += 1
        except ManagerBusy:
            outcomes["refused"] += 1

    with KVCacheManager(strategies.config(), log=tmp_path / "log") as manager:
        previous = signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0007)
        try:
            number = 0
            while min(outcomes.values()) < 20:
                number += 1
                manager.add_sequence(number, [number % 7, 2, 3])
                manager.add_tokens([number], [4])
                manager.num_free_blocks  # noqa: B018
                manager.remove_sequence(number)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        manager.check()
        fingerprint = manager.fingerprint()
    assert replay(tmp_path / "log", verify=True).fingerprint == fingerprint


# -- interruptions while copies are asked


class Interrupted:
    """A device whose tickets tell each thing once: a failure, an interruption, and then that all is well."""

    def __init__(self, *speaks: list[BaseException]) -> None:
        self.speaks = list(speaks)

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        return SpeaksOnce(self.speaks.pop(0)) if self.speaks else FinishedTicket()


class SpeaksOnce:
    def __init__(self, speaks: list[BaseException]) -> None:
        self.speaks = speaks

    def done(self) -> bool:
        if self.speaks:
            raise self.speaks.pop(0)
        return True

    def wait(self) -> None:
        self.done()

    def wait_on(self, stream: object = None) -> None:
        pass


class CallsBack:
    """A device that is its own ticket, and calls the manager that asks, once it knows which."""

    def __init__(self, waits: bool) -> None:
        self.manager: KVCacheManager | None = None
        self.waits = waits

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        return self

    def done(self) -> bool:
        return self.manager is not None and bool(self.manager.poll())

    def wait(self) -> None:
        if self.waits and self.manager is not None:
            self.manager.poll()

    def wait_on(self, stream: object = None) -> None:
        pass


def two_copies(*speaks: list[BaseException], **options: Any) -> KVCacheManager:
    """Two sequences, each of which copies the start of a block; the copies' tickets tell what is given."""
    manager = KVCacheManager(strategies.config(), **{"copier": Interrupted(*speaks), **options})
    manager.add_sequence("old", PROMPT)
    manager.store_context_blocks("old", 5)
    manager.remove_sequence("old")
    for name, last in (("s", 6), ("t", 7)):
        manager.add_sequence(name, [1, 2, 3, last, last])
        manager.start_transfers()
    manager.store_context_blocks("s", 5)
    return manager


@pytest.mark.parametrize("name", ["poll", "flush", "clear"])
def test_an_interruption_while_copies_are_asked_loses_nothing(name: str) -> None:
    """What one ticket has told is not forgotten when the next one is interrupted, and the manager goes on."""
    manager = two_copies([CopyFailed("gone")], [KeyboardInterrupt()])
    before = manager.fingerprint()
    with pytest.raises(KeyboardInterrupt):
        getattr(manager, name)()
    assert name == "clear" or manager.fingerprint() == before
    assert manager.state.transfers
    polled = manager.poll()
    assert [reason for _, reason in polled.failed] == ["gone"]
    assert dict(polled.invalidated) == {"s": 0, "t": 0}
    assert not manager.state.transfers
    assert manager.count_reusable([1, 2, 3, 6, 6, 6]) == 0
    manager.check()


def test_an_interruption_of_a_landing_loses_nothing() -> None:
    """A copy that was seen to have landed is told by the next poll."""
    manager = two_copies([], [KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        manager.poll()
    assert len(manager.poll().landed) == 2


def test_a_ticket_that_calls_the_manager_has_not_failed() -> None:
    """The call from inside is refused, which says nothing about the copies: they are asked again."""
    manager = two_copies([ManagerBusy()])
    with pytest.raises(ManagerBusy):
        manager.poll()
    assert len(manager.poll().landed) == 2


@pytest.mark.parametrize("waits", [False, True])
def test_closing_with_a_ticket_that_calls_the_manager(waits: bool, tmp_path: Path) -> None:
    """Its copies stay open in the log, which has everything else and replays."""
    device = CallsBack(waits)
    manager = device.manager = two_copies(log=tmp_path / "log", copier=device)
    fingerprint = manager.fingerprint()
    manager.close()
    with pytest.raises(ManagerClosed):
        manager.flush()
    replayed = replay(tmp_path / "log", verify=True)
    assert replayed.fingerprint == fingerprint
    assert not replayed.checkpoints_failed


def test_closing_that_is_interrupted_records_what_happened(tmp_path: Path) -> None:
    """Who does not wait for copies any longer still has a log of everything, which replays."""
    manager = two_copies([KeyboardInterrupt()], log=tmp_path / "log")
    fingerprint = manager.fingerprint()
    with pytest.raises(KeyboardInterrupt):
        manager.close()
    with pytest.raises(ManagerClosed):
        manager.flush()
    replayed = replay(tmp_path / "log", verify=True)
    assert replayed.fingerprint == fingerprint
    assert not replayed.checkpoints_failed


# -- failures halfway


class Fails:
    """A device that fails every batch, or none."""

    def __init__(self, on: bool) -> None:
        self.on = on

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        return FinishedTicket("gone" if self.on else None)


def small(**settings: Any) -> KVCacheManager:
    return KVCacheManager(strategies.config(primary_blocks=6, secondary_blocks=2, **settings))


def serve(manager: KVCacheManager, name: str, prompt: list[int], **options: Any) -> None:
    manager.add_sequence(name, prompt, **options)
    manager.store_context_blocks(name, len(prompt))
    manager.remove_sequence(name)


def full(**settings: Any) -> KVCacheManager:
    """Blocks in both levels; what comes next moves or removes some of them."""
    manager = small(**settings)
    serve(manager, "one", PROMPT)
    serve(manager, "two", [9] * 12)
    manager.poll()
    manager.bus.take_events()
    return manager


def decoding() -> KVCacheManager:
    """A sequence that fills a block with the next token but one."""
    manager = small()
    manager.add_sequence("a", PROMPT)
    manager.store_context_blocks("a", 5)
    manager.add_tokens(["a"], [6])
    return manager


def side_by_side() -> KVCacheManager:
    """Two sequences with one prompt, which the first has stored; blocks of a third, in secondary, begin a fourth's."""
    manager = small()
    manager.add_sequences([Request("a", [1, 2, 3]), Request("b", [1, 2, 3])])
    manager.store_context_blocks("a", 3)
    return manager


def recomputing() -> KVCacheManager:
    """A sequence that computes what lies in secondary."""
    manager = small()
    manager.add_sequence("b", [1, 2, 1])
    serve(manager, "a", [1, 2, 1])
    serve(manager, "filler", [9] * 8)
    manager.poll()
    return manager


def reading() -> KVCacheManager:
    """A sequence for which an encoder has read something."""
    manager = small(cross_kv_cache_fraction=0.5)
    manager.add_sequence("a", [1, 2], encoder_tokens=[1, 2, 3])
    return manager


def failing() -> KVCacheManager:
    """The first of two copies has landed, the second fails."""
    device = Fails(False)
    manager = KVCacheManager(strategies.config(), copier=device)
    serve(manager, "old", PROMPT)
    for name, last in (("s", 6), ("t", 7)):
        manager.add_sequence(name, [1, 2, 3, last, last])
        manager.start_transfers()
        device.on = True
    return manager


def with_images() -> KVCacheManager:
    """Symbols of many images, none of which is used any more."""
    manager = full()
    manager.state.symbols.forget_at = 0
    for number in range(3):
        image = MultimodalItem(bytes([number]) * 32, 1, 2)
        serve(manager, f"image {number}", [1, 2, 3, 4], multimodal=[image])
    blocks_of(manager).housekeeping.clear()
    return manager


def after_a_loss() -> KVCacheManager:
    """The log has lost batches, so the next one says so and holds the whole state."""
    manager = full()
    outputs = journal_of(manager).outputs
    outputs.may_lose = True
    outputs.pop_gap = lambda: Gap(1, 2, "overflow")  # type: ignore[method-assign]
    return manager


SITUATIONS: dict[str, tuple[Callable[[], KVCacheManager], Callable[[KVCacheManager], object]]] = {
    "admit": (full, lambda m: m.add_sequence("a", [1, 2, 3, 4, 6, 7, 8])),
    "admit a copy": (full, lambda m: m.add_sequence("a", [9, 9, 9, 8])),
    "admit an image": (
        small,
        lambda m: m.add_sequence("a", [1, 2, 3], multimodal=[MultimodalItem(bytes(32), 1, 2)]),
    ),
    "admit a batch": (full, lambda m: m.add_sequences([Request("a", PROMPT), Request("b", [7])])),
    "refuse": (decoding, lambda m: m.add_sequence("b", [1] * 10)),
    "store": (decoding, lambda m: m.store_context_blocks("a", 6)),
    "store what another has": (side_by_side, lambda m: m.store_context_blocks("b", 3)),
    "store what lies in secondary": (recomputing, lambda m: m.store_context_blocks("b", 3)),
    "decode": (decoding, lambda m: m.add_tokens(["a"], [7])),
    "decode beyond a window": (
        lambda: small(max_attention_window=3),
        lambda m: (
            m.add_sequence("w", [1, 2, 3, 4]),
            m.store_context_blocks("w", 4),
            m.add_tokens(["w"], [5]),
        ),
    ),
    "append": (decoding, lambda m: m.add_tokens(["a"], [7, 8, 9], [3])),
    "reserve": (decoding, lambda m: (m.reserve(["a"], [4]), m.reserve(["a"], [0]))),
    "draft": (decoding, lambda m: m.add_tokens(["a"], [7, 8], [2], draft=True)),
    "admit an input": (
        lambda: small(cross_kv_cache_fraction=0.5),
        lambda m: m.add_sequence("a", [1], encoder_tokens=[1, 2, 3]),
    ),
    "store an input": (reading, lambda m: m.store_encoder_blocks("a")),
    "end an input": (reading, lambda m: m.remove_sequence("a")),
    "prioritise": (decoding, lambda m: m.set_priority("a", 50)),
    "fork": (decoding, lambda m: m.fork("a", "b")),
    "rewind": (decoding, lambda m: m.rewind("a", 4)),
    "pin": (decoding, lambda m: m.unpin(m.pin("a"))),
    "remove": (decoding, lambda m: m.remove_sequence("a")),
    "clear": (full, lambda m: m.clear()),
    "clear on the way": (recomputing, lambda m: (m.add_sequence("c", [4] * 4), m.clear())),
    "poll": (lambda: moving(full()), lambda m: m.poll()),
    "poll a failure": (failing, lambda m: m.poll()),
    "flush a failure": (failing, lambda m: m.flush()),
    "flush": (lambda: moving(checkpoint_due(full())), lambda m: m.flush()),
    "flush images": (with_images, lambda m: m.flush()),
    "flush after a loss": (after_a_loss, lambda m: m.flush()),
    "close": (lambda: moving(full()), lambda m: m.close()),
}
"""What may happen in every command: a state, and the call."""
AT_THE_START = {CacheCreated, EpochStarted}
RECORDED = {LoadFailed, PoolShared, SlotsTaken, SlotsLeft, SlotsNamed, SlotsUnnamed, HitDeferred}
"""Of other engines alone: a manager has no groups that share a pool, and loads nothing from outside."""


def checkpoint_due(manager: KVCacheManager) -> KVCacheManager:
    blocks_of(manager).housekeeping.checkpoint_due = 1
    return manager


def moving(manager: KVCacheManager) -> KVCacheManager:
    manager.add_sequence("moves", [1, 2, 3, 4, 6])
    assert manager.state.transfers
    return manager


def events_of(name: str) -> list[object]:
    """The events that reach the bus during the call."""
    make, act = SITUATIONS[name]
    manager = make()
    events: list[object] = []
    manager.bus.subscribe(events.append)
    try:
        act(manager)
    except CapacityError:
        assert name == "refuse"
    return events


def test_situations_reach_every_event() -> None:
    """The calls below lead to every type of event that there is, but for those with which a manager begins."""
    kinds = {type(event) for name in SITUATIONS for event in events_of(name)}
    assert kinds == set(AnyEvent.__args__) - AT_THE_START - RECORDED - set(FEED_EVENTS)


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_failure_at_any_event_stops_the_manager(name: str) -> None:
    """A subscriber that raises leaves no manager that goes on with half a change, whichever event it was."""
    make, act = SITUATIONS[name]
    count = len(events_of(name))
    assert count
    for failing_one in range(count):
        manager = make()
        received: list[object] = []

        def fail(event: object, received: list[object] = received, at: int = failing_one) -> None:
            received.append(event)
            if len(received) == at + 1:
                raise RuntimeError("broken")

        manager.bus.subscribe(fail)
        with pytest.raises(RuntimeError, match="broken"):
            act(manager)
        with pytest.raises(Poisoned, match="RuntimeError"):
            manager.flush()
        manager.close()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interruption_halfway_is_reported_as_one(kind: type[BaseException]) -> None:
    """Ctrl-C in the middle of a command needs a new manager, and nobody is asked to report it as a bug."""
    manager = cache()

    def interrupt(event: object) -> None:
        raise kind

    manager.bus.subscribe(interrupt)
    with pytest.raises(kind):
        manager.remove_sequence("a")
    with pytest.raises(
        Poisoned, match=rf"interrupted halfway \({kind.__name__}.*create a new manager"
    ) as reported:
        manager.flush()
    assert "report" not in str(reported.value)
    assert reported.value.interrupted
    manager.close()
