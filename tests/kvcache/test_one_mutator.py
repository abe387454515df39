"""Nothing changes the state but `CacheState.apply`: not a command between its events, not a question, not a flush."""

from __future__ import annotations

import typing
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase
from hypothesis.stateful import invariant

from events.tokens.sequences import RunningTokens, SequenceTokens
from events.types import AnyEvent, Event
from kvcache.decide.block_manager import BlockManager
from kvcache.errors import KVCacheError
from kvcache.fold.state import CacheState
from kvcache.manager import KVCacheManager
from tests.oracles.machine import ManagerAgainstModel, explore
from tests.support.engines import strategies

NO_STATE = {"watcher", "handlers"}
"""Whom to tell, and what to call."""


def contents(value: Any, seen: dict[int, int] | None = None) -> Any:
    """All that can be reached from an object, as plain values; an object that was met before is its number."""
    seen = {} if seen is None else seen
    if value is None or isinstance(value, bool | int | str | bytes | float):
        return value
    if isinstance(value, array | bytearray | np.ndarray):
        return bytes(value)
    if isinstance(value, tuple | list | set | frozenset):
        return [contents(item, seen) for item in value]
    if isinstance(value, dict):
        return [(contents(key, seen), contents(item, seen)) for key, item in value.items()]
    if id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = len(seen)
    return [(name, contents(item, seen)) for name, item in attributes(value).items()]


def attributes(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        found |= {
            name: getattr(value, name) for name in getattr(kind, "__slots__", ()) if hasattr(value, name)
        }
    if isinstance(value, SequenceTokens):
        # Whoever asks for the tokens moves the sampled ones from a list to the array beside it: no change of content.
        found["_tokens"] = found["_tokens"].tolist() + found.pop("sampled")
    if isinstance(value, RunningTokens):
        del found["_sampled"]  # the same lists
    return {name: item for name, item in found.items() if name not in NO_STATE and not callable(item)}


class Watched(ManagerAgainstModel):
    """Compares the whole state before each event with what it was after the event before."""

    def create_watched(self) -> None:
        state, apply = self.manager.state, self.manager.state.apply
        self.known = contents(state)

        def watched(event: Event) -> None:
            assert contents(state) == self.known, "the state was changed outside of apply"
            apply(event)
            self.known = contents(state)

        state.apply = watched  # type: ignore[method-assign]

    @invariant()
    def nothing_else_changes_it(self) -> None:
        if not hasattr(self, "manager"):
            return
        if not hasattr(self, "known"):
            self.create_watched()
        ask(self.manager)
        assert contents(self.manager.state) == self.known, "the state was changed outside of apply"


def ask(manager: KVCacheManager) -> None:
    """Every question an engine can ask, whether or not it is answered."""
    questions: list[Callable[[], Any]] = [
        lambda: manager.match([0, 1, 0, 1]),
        lambda: manager.count_reusable([0, 1, 0, 1]),
        lambda: manager.can_add([strategies.request("asked", strategies.NAMESPACES[0], [0, 1, 0, 1])]),
        manager.fingerprint,
        manager.stats,
        manager.check,
    ]
    for request_id in list(manager.state.handles):
        questions.append(partial(manager.scheduling.remaining_blocks_to_completion, request_id, 3))
        questions.append(partial(manager.block_tables, [request_id]))
    for question in questions:
        with suppress(KVCacheError):
            question()


def watch(examples: int) -> None:
    # Without shrinking: what was changed is plain from any program.
    explore(examples, 30, Watched, database=None, phases=[Phase.generate])


def test_only_apply_changes_the_state() -> None:
    """After any commands the state is what the last event has left, all of it."""
    watch(10)


def take_a_slot(blocks: BlockManager, state: CacheState) -> None:
    state.groups[0].levels[0].unreferenced += 1


def remember(blocks: BlockManager, state: CacheState) -> None:
    state.groups[0].shared[0] = 2


def all_of(error: BaseException | None) -> Iterator[BaseException]:
    """An error, those in it, and those while which it came up: after the first one the log does not replay either."""
    while error is not None:
        yield error
        for part in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
            yield from all_of(part)
        error = error.__context__


@pytest.mark.parametrize("meddle", [take_a_slot, remember])
def test_meddling_is_seen(
    meddle: Callable[[BlockManager, CacheState], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decision that changes a number of the state by itself is found out."""
    upkeep = BlockManager.count_fitting

    def count_fitting(self: BlockManager, requests: Any) -> int:
        meddle(self, self._state)
        return upkeep(self, requests)

    monkeypatch.setattr(BlockManager, "count_fitting", count_fitting)
    with pytest.raises(BaseException) as failure:
        watch(5)
    assert any("outside of apply" in repr(error) for error in all_of(failure.value))


def test_every_event_says_what_it_does_to_the_state() -> None:
    """A type of event that the state does not know is noticed here, and not in somebody's replay."""
    assert set(CacheState().handlers) == set(typing.get_args(AnyEvent))
