"""Finds orders of eviction by name: those in this package, and others by their entry points."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points

from events.errors import type_and_place
from kvcache.decide.eviction_order import EvictionOrder, refuse_no_order
from kvcache.decide.reuse_levels import ORDERS
from kvcache.errors import CapacityError, ConfigError, UsageError
from kvcache.whatif.policies.adaptive import AdaptiveReplacement
from kvcache.whatif.policies.clairvoyant import Belady, Returns
from kvcache.whatif.policies.counting import LeastFrequentlyUsed

ENTRY_POINT_GROUP = "kvcache.eviction_orders"
"""The entry's name is the policy's; its object is a class derived from `EvictionOrder`. Its attribute `needs_names`, if
true, asks for runs that have keys."""
BOUND = "belady"
"""What others are compared with."""
BASE = "lru"
"""From where the gap to the bound is measured."""
HINTED = "returns"
"""Knows what hints of an application can tell."""
_BUILT_IN: dict[str, type[EvictionOrder]] = {
    **ORDERS,
    "lfu": LeastFrequentlyUsed,
    "arc": AdaptiveReplacement,
    HINTED: Returns,
    BOUND: Belady,
}


@dataclass(eq=False, repr=False)
class UnknownPolicy(UsageError):
    """There is no order of eviction of this name, or it cannot be had; `reason` says which."""

    name: str
    reason: str
    text = "policy {name!r}: {reason}"


@dataclass(eq=False, repr=False)
class PolicyFailed(UsageError):
    """An order of eviction of another package raised an exception; `failure` is its type and place."""

    name: str
    provider: str
    failure: str
    text = (
        "policy {name!r} failed: {failure}; it is {provider}, no part of kvcache, and "
        "kvcache.decide.eviction_order says what it must do"
    )


@contextmanager
def blaming(name: str | None) -> Iterator[None]:
    """What fails inside while an order of another package is at work is its fault. Raises `PolicyFailed`.

    But for what settings and the machine are to blame for. None is the order of the settings, which is ours.
    """
    try:
        yield
    except (ConfigError, CapacityError, MemoryError):
        raise
    except Exception as error:
        if name is None or name in _BUILT_IN:
            raise
        [provider, *_] = [entry.value for entry in entry_points(group=ENTRY_POINT_GROUP, name=name)]
        # SECURITY: without its text, which may quote a run's tokens.
        raise PolicyFailed(name, provider, type_and_place(error)) from error


def known_policies() -> list[str]:
    """The names of all that `policy` finds: ours, then others, sorted."""
    others = entry_points(group=ENTRY_POINT_GROUP).names
    return [*_BUILT_IN, *sorted(set(others) - set(_BUILT_IN))]


def policy(name: str) -> type[EvictionOrder]:
    """The order of this name. Raises `UnknownPolicy`, also where another package has an entry of a name of ours.

    Raises `UsageError` for an entry that is no order.
    """
    found = tuple(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if name in _BUILT_IN:
        if found:
            raise UnknownPolicy(
                name, f"{found[0].value} has a name of ours, too: give its entry point another one"
            )
        return _BUILT_IN[name]
    if not found:
        raise UnknownPolicy(name, f"there are {', '.join(known_policies())}")
    try:
        order: type[EvictionOrder] = found[0].load()
    except (ImportError, AttributeError) as error:
        reason = f"{found[0].value} provides it but cannot be imported ({error}); install what it needs"
        raise UnknownPolicy(name, reason) from error
    except Exception as error:
        reason = (
            f"{found[0].value} provides it but fails when it is imported ({type_and_place(error)}: {error})"
        )
        raise UnknownPolicy(name, reason) from error
    refuse_no_order(order)
    return order
