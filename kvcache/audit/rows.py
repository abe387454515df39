"""What a log is read as from Python: rows of plain values. docs/export.md says what each column means.

Times are the writer's wall clock in nanoseconds since 1970 (UTC), `seq` and `..._seq` numbers of batches, windows
in tokens, levels by name. A request is named twice: by its id as the engine gave it, which may come again, and by the
number of its admission in the log, which does not.
"""

from __future__ import annotations

from typing import NamedTuple

from events.types import RequestId


class RequestRow(NamedTuple):
    """One admission of a request, with what became of it; or a request that was refused and never admitted."""

    admission: int | None
    """Counts from 0. None where the admission is not in the log."""
    request_id: RequestId
    outcome: str
    """``ended``, ``running`` at the end of the log, ``lost`` with a restart or lost batches, or ``refused``."""
    lora_id: int | None
    lora_name: str | None
    salt_digest: str | None
    """Hex digits; the salt itself is in no log."""
    uses_extra_ids: bool
    refusals: int
    """Noted before the admission, since the one before."""
    first_refused_ts: int | None
    admitted_seq: int | None
    admitted_ts: int | None
    ended_seq: int | None
    ended_ts: int | None
    prompt_tokens: int | None
    output_tokens: int | None
    """So far, where it has not ended."""
    reused_tokens: int | None
    tokens_by_reason: dict[str, int]
    """Prompt tokens by reason (docs/audit.md), all of them; empty where the admission is not in the log."""


class BlockLife(NamedTuple):
    """A full block in one window, from the event that caches it until its content is gone."""

    window: int
    content: int
    """Equal numbers: equal tokens, equal tokens before them, equal namespace."""
    num_tokens: int
    stored_by: RequestId | None
    stored_by_admission: int | None
    """None, as `stored_by`: it came with an exported state."""
    stored_seq: int
    stored_ts: int
    priority: int
    """The last one."""
    reused: int
    """By how many admissions."""
    last_used_ts: int
    """When it was stored, reused, or let go of last."""
    offloads: int
    last_offloaded_ts: int | None
    onboards: int
    last_onboarded_ts: int | None
    level: str | None
    """Where it is cached at the end of the log; None if it is gone."""
    gone_seq: int | None
    gone_ts: int | None
    gone_why: str | None
    """``evicted``, ``dropped``, ``cleared``, ``copy_failed``, ``invalidated`` or ``restarted``, as in docs/audit.md."""
    gone_for: RequestId | None
    gone_for_admission: int | None
    eviction: int | None
    """The `EvictionRow` that removed it."""


class EvictionRow(NamedTuple):
    """Cached content of one window and level that was removed at once."""

    eviction: int
    """Counts from 0."""
    seq: int
    ts: int
    window: int
    level: str
    why: str
    """As in `BlocksRemoved`: ``capacity``, ``superseded``, ``unreachable``, ``cleared`` or ``invalidated``."""
    blocks: int
    full_blocks: int
    """The others have fewer tokens, and no `BlockLife`."""
    never_reused: int
    """Of the full ones, those that no admission reused since they were stored."""
    for_request: RequestId | None
    for_admission: int | None


class OccupancyRow(NamedTuple):
    """How many blocks one level of a window has after a batch, by what they are."""

    window: int
    level: str
    blocks: int
    held: int
    """By running requests."""
    unreferenced: int
    """Cached and free to evict."""
    blank: int


class StepRow(NamedTuple):
    """One batch: what it did, and the cache after it."""

    seq: int
    ts: int
    admitted: int
    refused: int
    ended: int
    running: int
    """Requests, after it."""
    prompt_tokens: int
    """Of the requests that it admitted."""
    reused_tokens: int
    computed_tokens: int
    """The rest of these prompts, which the engine has to compute, in this step or later."""
    output_tokens: int
    """Appended."""
    stored_blocks: int
    removed_blocks: int
    cleared_blocks: int
    """Gone when the cache was cleared."""
    offloaded_blocks: int
    onboarded_blocks: int
    occupancy: tuple[OccupancyRow, ...]
