"""The whole state as one event: what installs it equals what exported it, and goes on alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from events.types import StateExported
from kvcache.errors import CapacityError, InvariantViolated
from kvcache.fold.fingerprint import fingerprint
from kvcache.fold.state import CacheState
from kvcache.inputs import Request
from kvcache.manager import KVCacheManager
from tests.support.engines import strategies
from tests.support.engines.traffic import Traffic, config

Setup = Callable[[KVCacheManager], None]


def nothing(manager: KVCacheManager) -> None:
    """Only created."""


def decoding(manager: KVCacheManager) -> None:
    """Two sequences in the middle of decoding together, one of which has shared its blocks."""
    manager.add_sequences([Request("a", [1, 2, 3, 4, 5]), Request(7, [1, 2, 3], cache_salt="salt")])
    manager.store_context_blocks("a", 5)
    manager.add_sequence("b", [1, 2, 3, 4, 6])
    for token in range(3):
        manager.add_tokens(["a", 7], [token, token])


def nameless(manager: KVCacheManager) -> None:
    """Blocks without a name that two sequences hold."""
    decoding(manager)
    manager.clear()
    manager.add_tokens(["b"], [1])


def under_way(manager: KVCacheManager) -> None:
    """Blocks in both levels, some on their way, a copy outstanding into a block that is stored already."""
    manager.add_sequence("old", [1, 2, 3, 4, 5])
    manager.store_context_blocks("old", 5)
    manager.remove_sequence("old")
    manager.add_sequence("filler", [9] * 14)
    manager.remove_sequence("filler")
    manager.add_sequence("a", [1, 2, 3, 4, 5, 5])
    manager.add_sequence("b", [1, 7, 7])
    manager.store_context_blocks("b", 3)
    assert manager.state.transfers


SETUPS = [nothing, decoding, nameless, under_way]


def installed(manager: KVCacheManager) -> CacheState:
    state = CacheState()
    for event in strategies.through_the_codec(manager.state.created, manager.state.export()):
        state.apply(event)
    return state


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.__name__)
def test_installed_state_equals_the_exported_one(setup: Setup) -> None:
    """Through the codec and back the state has the same fingerprint, keeps all laws, and exports itself alike."""
    manager = KVCacheManager(config())
    setup(manager)
    state = installed(manager)
    assert fingerprint(state) == manager.fingerprint()
    state.check()
    assert state.export() == manager.state.export()
    assert list(state.transfers) == list(manager.state.transfers)


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.__name__)
def test_installed_state_goes_on_alike(setup: Setup) -> None:
    """A manager on the installed state emits the same events for the same further commands."""
    manager = KVCacheManager(config())
    setup(manager)
    manager.flush()
    twin = strategies.continue_from(manager.config, manager.state.created, manager.state.export())
    ids = list(manager.state.handles)
    traffics = [Traffic(each, 11) for each in (manager, twin)]
    for traffic in traffics:
        traffic.next_id = 1000
        traffic.running = list(ids)
    for _ in range(80):
        for traffic in traffics:
            traffic.step()
        assert twin.bus.pending == manager.bus.pending
        assert twin.fingerprint() == manager.fingerprint()
        twin.check()


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.__name__)
def test_exporting_changes_nothing(setup: Setup) -> None:
    """An export leaves the state as it was, and is the same when taken twice."""
    manager = KVCacheManager(config())
    setup(manager)
    before = manager.fingerprint()
    assert manager.state.export() == manager.state.export()
    assert manager.fingerprint() == before
    manager.check()


def test_install_replaces_what_was_there() -> None:
    """Nothing of the state before remains, not even what sequences were about to append."""
    manager, other = KVCacheManager(config()), KVCacheManager(config())
    decoding(manager)
    under_way(other)
    event = manager.state.export()
    other.state.apply(event)
    assert fingerprint(other.state) == manager.fingerprint()
    other.state.check()
    for state in (manager.state, other.state):
        rows = manager.bus.pending[-1]
        state.apply(rows)
    assert fingerprint(other.state) == manager.fingerprint()


def test_export_needs_a_cache_to_install_it_in() -> None:
    """A state cannot be installed before its cache was created, nor in a cache with other groups."""
    manager = KVCacheManager(config())
    event = manager.state.export()
    with pytest.raises(InvariantViolated, match="before the cache was created"):
        CacheState().apply(event)
    other = StateExported((), (), (), 1, 1, 0, 0)
    with pytest.raises(InvariantViolated, match="different groups"):
        manager.state.apply(other)


def test_traffic_is_refused_at_times() -> None:
    """The traffic of these tests reaches the limits of the cache."""
    manager = KVCacheManager(config())
    refused = 0
    add = manager.add_sequences

    def counting(requests: list[Request]) -> object:
        nonlocal refused
        try:
            return add(requests)
        except CapacityError:
            refused += 1
            raise

    manager.add_sequences = counting  # type: ignore[method-assign, assignment]
    Traffic(manager, 11).record(200)
    manager.flush()
    assert refused
    stats = manager.stats()
    assert (
        min(stats.blocks_offloaded, stats.blocks_onboarded, stats.blocks_copied, stats.blocks_deduplicated)
        > 0
    )
