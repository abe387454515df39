"""How encoders' inputs come and go. Only `CacheState.apply` calls what is here."""

from __future__ import annotations

from events import types as ev
from events.ids import MAX_NUMBER
from events.types import CROSS
from kvcache.errors import invariant
from kvcache.fold.fork_fold import ForkFold
from kvcache.fold.sequence import Sequence


class EncoderFold(ForkFold):
    """Folds encoders' inputs: sequences whose tokens are padded to whole blocks, and that never grow."""

    def _add_encoder(self, event: ev.EncoderAdded) -> None:
        assert self.created is not None
        reader, size = self.sequences[event.sequence], self.tokens_per_block
        invariant(
            self.next_handle <= event.handle <= MAX_NUMBER, "a handle was used twice, or no epoch has it"
        )
        invariant(
            self.created.groups[event.group].kind == CROSS, "an encoder's input is in no cross attention"
        )
        invariant(reader.encoder is None and not reader.holders, "a sequence reads two inputs, or one does")
        blocks = -(-event.num_tokens // size)
        tokens = self.tokens_of(blocks * size, event.tokens, self.longest_input)
        encoder = Sequence(
            event.handle, reader.request_id, event.namespace, tokens, self.roots(event.namespace)
        )
        reused = event.reused_primary + event.reused_secondary
        invariant(0 <= reused <= blocks, "more of an input is reused than there is")
        encoder.num_prompt_tokens, encoder.computed, encoder.holders = event.num_tokens, reused * size, 1
        reader.encoder = self.sequences[event.handle] = encoder
        self.next_handle = event.handle + 1
        for group in self.groups:
            group.tree.roots[event.namespace].users += 1

    def _remove_encoder(self, event: ev.EncoderRemoved) -> None:
        encoder = self.sequences.pop(event.handle)
        invariant(not encoder.holders, "an encoder's input ended that is still read")
        self.releases += 1
        self.tell_time(event.clock)
        freed = self.groups[event.group].end(encoder, self.releases, self.clock)
        invariant(freed.tobytes() == event.freed, "other slots were freed")
        for group in self.groups:
            root = group.tree.roots[encoder.namespace]
            root.users -= 1
            group.tree.drop_unused(root)
