"""Finds orders of eviction by name: those in this package, and others by their entry points."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import entry_points

from kvcache.decide.eviction_order import EvictionOrder, LeastRecentlyUsed, refuse_no_order
from kvcache.errors import UsageError
from kvcache.whatif.policies.adaptive import AdaptiveReplacement
from kvcache.whatif.policies.clairvoyant import Belady, Returns
from kvcache.whatif.policies.counting import LeastFrequentlyUsed, Levels

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
    BASE: LeastRecentlyUsed,
    "levels": Levels,
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


def known_policies() -> list[str]:
    """The names of all that `policy` finds: ours, then others, sorted."""
    others = entry_points(group=ENTRY_POINT_GROUP).names
    return [*_BUILT_IN, *sorted(set(others) - set(_BUILT_IN))]


def policy(name: str) -> type[EvictionOrder]:
    """The order of this name. Raises `UnknownPolicy`, and `UsageError` for an entry that is no order."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    found = tuple(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if not found:
        raise UnknownPolicy(name, f"there are {', '.join(known_policies())}")
    try:
        order: type[EvictionOrder] = found[0].load()
    except (ImportError, AttributeError) as error:
        reason = f"{found[0].value} provides it but cannot be imported ({error}); install what it needs"
        raise UnknownPolicy(name, reason) from error
    refuse_no_order(order)
    return order
