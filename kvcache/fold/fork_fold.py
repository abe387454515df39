"""How a sequence branches, and how tokens are taken back. Only `CacheState.apply` calls what is here."""

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
        if child.encoder is not None:
            child.encoder.holders += 1
        self.sequences[event.child] = child
        self.handles[event.request_id] = event.child
        if parent.handle in self.rich:
            self.rich[event.child] = self.rich[parent.handle]
        self.running.forget_row()
        self.refused.pop(event.request_id, None)
        self.next_handle = event.child + 1

    def _rewind(self, event: ev.SequenceRewound) -> None:
        sequence, num_tokens = self.sequences[event.handle], event.num_tokens
        invariant(0 < num_tokens < sequence.num_tokens, "no tokens are taken back, or all")
        # The last token that is left is computed anew, in a block that nobody else reads.
        computed = min(sequence.computed, num_tokens - 1)
        blocks = computed // self.tokens_per_block
        needed = min(-(-num_tokens // self.tokens_per_block), len(sequence.tables[0]))
        self.tell_time(event.clock)
        self.releases += 1
        for group, freed in zip(self.groups, event.freed, strict=True):
            if not sequence.tables[group.index]:
                continue  # cross attention, of which nothing is taken back
            blank = group.rewind(sequence, blocks, needed, self.releases, self.clock)
            invariant(blank.tobytes() == freed, "other slots were freed")
        self.running.forget_row()
        sequence.cut(num_tokens)
        sequence.computed = computed
        sequence.num_prompt_tokens = min(sequence.num_prompt_tokens, num_tokens)
        sequence.inherited = tuple(each for each in sequence.inherited if each.block <= blocks)
        key_bytes = self.hashing.key_bytes
        del sequence.keys[blocks * key_bytes :]
        self.rich.pop(event.handle, None)
        self.note_rich(event.handle, sequence.tokens.tobytes())
