"""What happens to a cache as a whole: it begins, is exported and cleared; copies end; symbols get a meaning."""

from __future__ import annotations

from events.packed import Checksums, Counts, Numbers
from events.structs import (
    Event,
    GroupCreated,
    GroupExported,
    JsonText,
    Pages,
    PinExported,
    RequestId,
    SequenceExported,
    TransferExported,
)

FORMAT_VERSION = 2
"""The newest that is understood. Raised when there is something that older readers cannot fold: they refuse it."""
FIRST_FORMAT = 1
"""Of a log that they can fold: this library's manager has decided, and blocks have a power of two of tokens."""


class CacheCreated(Event, frozen=True):
    """A manager, or an engine with one of its own, started with an empty cache."""

    config: JsonText
    """The effective configuration as JSON."""
    tokens_per_block: int
    groups: tuple[GroupCreated, ...]
    hash_algorithm: str
    key_bytes: int
    content_id: str
    """Digest of what a block's bytes mean (layers, heads, dims, dtype, layout)."""
    format_version: int = FIRST_FORMAT
    attention_dp_rank: int | None = None
    """Of the engine, where its attention is data-parallel: TensorRT-LLM's dicts tell it."""
    engine: str = ""
    """Whose decisions a recorder wrote down, as in "vllm 0.33.0"; empty: this library's manager decided."""
    drops_last_hit: bool = False
    """Whether the engine computes the last block of each hit again by design, as speculative decoding with EAGLE."""


class EpochStarted(Event, frozen=True):
    """A log was opened for writing. Always the first event of its batch, and of an epoch."""

    epoch: int
    log_id: bytes
    previous_epoch: int | None
    previous_last_seq: int | None
    clean: bool
    """Whether the previous epoch ended with a close (True for the first epoch)."""
    tokens_recorded: bool
    software: str


class StateExported(Event, frozen=True):
    """The whole state, so that folding can begin here."""

    groups: tuple[GroupExported, ...]
    sequences: tuple[SequenceExported, ...]
    transfers: tuple[TransferExported, ...]
    next_handle: int
    next_transfer: int
    releases: int
    """How often a sequence has let go of its blocks so far: the next one is released later than all others."""
    changed_blocks: int
    """Blocks changed since the last checkpoint."""
    symbols: Pages = ()
    """What symbols below 0 stand for; none if the log records no tokens."""
    forget_symbols_at: int = 0
    """Above so many pages those that nothing uses are forgotten; 0: the least there is."""
    refused: tuple[RequestId, ...] = ()
    """Requests whose refusal was noted, oldest first, that were not admitted since: it is not noted again."""
    clock: int = 0
    """The last time that an event has told."""
    pins: tuple[PinExported, ...] = ()
    next_pin: int = 1


class Gap(Event, frozen=True):
    """Batches are missing here."""

    first_seq: int
    last_seq: int
    reason: str


class CacheCleared(Event, frozen=True):
    """Everything was dropped that no sequence holds; what is held lost its name."""

    removed: tuple[tuple[int, int], ...]
    """Per group: blocks dropped per level."""
    unnamed: tuple[int, ...]
    """Per group: blocks that stay with running sequences."""


class Checkpoint(Event, frozen=True):
    """The fingerprint of the state before this event."""

    fingerprint: bytes
    num_sequences: int
    num_cached: tuple[tuple[int, int], ...]
    """Per group: blocks per level."""
    engine_counts: tuple[int, ...] = ()
    """What a recorded engine has itself counted since `CacheCreated`: tokens of prompts that it looked up, and those of
    them that it found. Empty: it counts none."""


class TransferLanded(Event, frozen=True):
    """Copies are complete."""

    transfers: Numbers
    checksums: Checksums = b""
    """Where secondary lies in a file, of the blocks that these copies brought there: one copy's slots after another's,
    over the bytes of all pools, as they lie there now; else empty."""


class TransferFailed(Event, frozen=True):
    """Copies failed, or were given up because another one did: every sequence begins again, and the cache is cleared.

    Names all that were outstanding. A `CacheCleared` follows in the same batch.
    """

    transfers: Numbers
    reason: str


class SymbolsInterned(Event, frozen=True):
    """Tokens of multimodal items, and tokens with an extra id, got symbols: numbers below 0, a page at a time."""

    pages: Pages
    """None in a log without tokens."""


class SymbolsForgotten(Event, frozen=True):
    """No cached block and no running sequence uses the symbols of these pages: they may stand for something else."""

    pages: Counts
    """Numbers of the pages."""
