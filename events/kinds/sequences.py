"""What happens to the sequences of requests."""

from __future__ import annotations

from events.ids import GroupIndex, Handle
from events.packed import Counts, Handles, Slots, Tokens
from events.reasons import EndReason
from events.structs import Event, Namespace, RequestId, Retention


class SequenceAdded(Event, frozen=True):
    """A request was admitted."""

    handle: Handle
    request_id: RequestId
    namespace: Namespace
    num_tokens: int
    tokens: Tokens
    reused: int
    """Leading tokens that need not be computed, as all groups have them: full blocks, then `reused_partial`."""
    reused_primary: tuple[int, ...]
    """Per window: tokens in full blocks that the sequence takes from primary: in a sliding one only what it sees."""
    reused_secondary: tuple[int, ...]
    """Per window: tokens in full blocks that it takes from secondary."""
    reused_partial: int
    """Tokens copied from a block of which only the start matches."""
    resumed: bool = False
    """The request had run before, and goes on: what it computed then and finds again is no hit."""
    retention: Retention | None = None
    """None: priority 35, for good."""
    clock: int = 0
    """Nanoseconds since the cache was created, while it has run; 0 as long as no request has stated a duration. Events
    tell it which let go of blocks."""
    reused_external: int = 0
    """Tokens after `reused` that are to be loaded from outside of this cache, as by a connector: they count as computed
    when `ContextComputed` says so."""


class EncoderAdded(Event, frozen=True):
    """The input of an encoder came with the request that was admitted last: the model reads its K/V by cross attention.

    It has a handle of its own, which events about its blocks name. It ends when the last sequence does that reads it: a
    branch reads that of its parent.
    """

    handle: Handle
    sequence: Handle
    """The request's."""
    group: GroupIndex
    """That of cross attention."""
    namespace: Namespace
    num_tokens: int
    tokens: Tokens
    """Zeros behind them fill the last block."""
    reused_primary: int
    """Leading blocks that it takes from primary."""
    reused_secondary: int
    """Blocks behind these that it takes from secondary."""


class EncoderRemoved(Event, frozen=True):
    """The last sequence has ended that reads an encoder's input: its references are released."""

    handle: Handle
    group: GroupIndex
    freed: Slots
    """Slots that become blank, deepest first."""
    clock: int = 0


class TokensAppended(Event, frozen=True):
    """One `add_tokens` call."""

    handles: Handles
    counts: Counts
    """Tokens per sequence; empty: one each."""
    tokens: Tokens
    draft: bool = False
    """They may be taken back: of the sequences no more counts as computed than before."""


class ContextComputed(Event, frozen=True):
    """The engine has written K/V of the first `num_tokens` tokens of a sequence."""

    handle: Handle
    num_tokens: int


class SequenceRemoved(Event, frozen=True):
    """A sequence ended: its references are released, its own slots become blank."""

    handle: Handle
    stored: tuple[int, ...]
    """Per group: its leading blocks that have been stored. Of a sliding window those that it had left behind are
    among them, which may have been evicted since; with full attention all of them stay cached."""
    freed: tuple[Slots, ...]
    """Per group: slots that become blank, in the order in which they do."""
    num_tokens: int
    computed: int
    why: EndReason = EndReason.FINISHED
    clock: int = 0


class SequenceForked(Event, frozen=True):
    """A sequence branched: another one has the same tokens, and holds the same blocks as far as they are computed."""

    handle: Handle
    child: Handle
    """The new one."""
    request_id: RequestId
    """The new one's."""


class SequenceRewound(Event, frozen=True):
    """The last tokens of a sequence were taken back.

    It lets go of the blocks behind the one in which its last token is, and of that one if it is cached: what is cached
    stays so. Events that follow give it a block of its own instead.
    """

    handle: Handle
    num_tokens: int
    """That are left."""
    freed: tuple[Slots, ...]
    """Per group: slots that become blank, deepest first."""
    clock: int = 0


class LoadFailed(Event, frozen=True):
    """A note: of what a sequence was to get from outside of the cache, so many tokens do not come, and are computed."""

    handle: Handle
    num_tokens: int


class AdmissionRefused(Event, frozen=True):
    """A note: a request did not fit. Not repeated until it is admitted, or 4,096 others were refused."""

    request_id: RequestId
    needed: tuple[int, ...]
    """Per group: blocks."""
    available: tuple[int, ...]
    """Per group: blocks that could be had."""
