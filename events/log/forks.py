"""What a forked child must let go of: logs are written by the process that opened them."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Owned(Protocol):
    """Something that belongs to one process."""

    def disown(self) -> None:
        """In a forked child: it is the parent's. No lock may be waited for, since the parent's threads are not here."""


_owned: weakref.WeakSet[Owned] = weakref.WeakSet()
own = _owned.add
release = _owned.discard


def _disown_all() -> None:
    for each in list(_owned):
        each.disown()


os.register_at_fork(after_in_child=_disown_all)
