"""How a sequence branches. Only `CacheState.apply` calls what is here."""

from __future__ import annotations

from events import types as ev
from events.ids import MAX_NUMBER
from kvcache.errors import invariant
from kvcache.fold.pin_fold import PinFold


class ForkFold(PinFold):
    """Folds forks."""

    def _fork(self, event: ev.SequenceForked) -> None:
        invariant(
            self.next_handle <= event.child <= MAX_NUMBER, "a handle was used twice, or no epoch has it"
        )
        invariant(event.request_id not in self.handles, "a request was admitted twice")
        parent = self.sequences[event.handle]
        # What is not computed to its end, each goes on with by itself.
        blocks = parent.computed // self.tokens_per_block
        child = parent.branch(event.child, event.request_id, blocks)
        for group in self.groups:
            group.share(parent, child, blocks)
            group.tree.roots[parent.namespace].users += 1
        self.sequences[event.child] = child
        self.handles[event.request_id] = event.child
        if parent.handle in self.rich:
            self.rich[event.child] = self.rich[parent.handle]
        self.running.forget_row()
        self.refused.pop(event.request_id, None)
        self.next_handle = event.child + 1
