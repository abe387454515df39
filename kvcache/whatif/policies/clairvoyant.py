"""Orders that know the prompts to come: what no cache can do, to compare what caches do with.

A block *returns* with the next prompt in which it lies whole, and not with its last token: a prompt's last token is
always computed. Prompts come in the order in which the log has them admitted; whoever waits is still to come.
"""

from __future__ import annotations

from events.packed import NAME_BYTES
from kvcache.fold.group_state import GroupState
from kvcache.fold.prefix_tree import Run
from kvcache.whatif.future import Future, Outlook
from kvcache.whatif.policies.by_block import ByBlock

_NEVER = -(1 << 62)


class Clairvoyant(ByBlock):
    """Knows the outlook that its class was made for."""

    outlook: Outlook

    def __init__(self, group: GroupState) -> None:
        self._next_use = self.outlook.next_use
        super().__init__(group)


class Belady(Clairvoyant):
    """The block that returns last goes first: the fewest are missed."""

    def rank(self, run: Run, at: int) -> int:
        """How far away the next use is, below 0."""
        begin = at * self._key_bytes
        use = self._next_use(bytes(run.keys[begin : begin + NAME_BYTES]))
        return _NEVER if use is None else -use


class Returns(Clairvoyant):
    """What never returns goes first; what does, as least recently used."""

    def rank(self, run: Run, at: int) -> int:
        """1 if the block returns."""
        return int(self._next_use(self.name(run, at)) is not None)


def with_outlook(order: type[Clairvoyant], future: Future) -> tuple[type[Clairvoyant], Outlook]:
    """The order for one play of the requests, and what has to be told who is admitted."""
    outlook = Outlook(future)
    return type(order.__name__, (order,), {"outlook": outlook}), outlook
