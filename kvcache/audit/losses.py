"""Cost of evictions by lost prefix and by tenant, and the part of the cache that running requests held."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from events import types as ev
from events.types import FULL, RequestId
from kvcache.audit.admission import ExplainedAdmission
from kvcache.audit.contents import Columns, Ids, Window
from kvcache.audit.explanation import namespace_in_words
from kvcache.audit.history import HistoryFold, HistoryListener
from kvcache.audit.reasons import IS_EVICTION
from kvcache.audit.tables import occupancy

NEARLY_ALL = 0.9
"""Part of the blocks from which on running requests leave no room for others."""
_SHARED, _FEW = 0.05, 10
"""Least part and least number of requests with a prefix for it to count as shared."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Common beginning of the prompts of many requests."""

    blocks: int
    requests: int
    """Requests that begin with all of it."""
    asked: int
    """Block requests for it or a part of it."""
    lost: int
    """Its tokens that were computed again because of evictions."""
    first: int
    """Number of the first request with it."""
    last_block: int
    """Number of its last block."""


class SharedPrefixes:
    """Counter of block requests and lost tokens by block."""

    def __init__(self) -> None:
        self._of = Columns(
            parent=(np.int64, -1), asked=(np.int64, 0), lost=(np.int64, 0), first=(np.int64, -1)
        )
        self._blocks = 0
        self._requests = 0

    def add(self, blocks: Ids, lost: npt.NDArray[np.int64] | int = 0) -> None:
        """Add the next prompt.

        Args:
            blocks: Numbers of its blocks, from 0 on; equal ones stand for equal blocks after equal blocks, and each
                is larger than that of the block before it.
            lost: Tokens of each block that are computed again because of an eviction.
        """
        if len(blocks):
            of = self._of
            self._blocks = max(self._blocks, int(blocks.max()) + 1)
            of.reach(self._blocks)
            of["parent"][blocks[1:]] = blocks[:-1]
            of["asked"][blocks] += 1
            of["lost"][blocks] += lost
            of["first"][blocks[of["first"][blocks] < 0]] = self._requests
        self._requests += 1

    def worst(self) -> SharedPrefix | None:
        """Return the shared prefix with the most lost tokens (if nothing was lost, the most requested one), or None."""
        of, least = self._of, max(_FEW, _SHARED * self._requests)
        shared = np.flatnonzero(of["asked"][: self._blocks] >= least).tolist()
        if not shared:
            return None
        paths: dict[int, tuple[int, int, int]] = {}
        for block in shared:
            lost, asked, blocks = paths.get(int(of["parent"][block]), (0, 0, 0))
            paths[block] = lost + int(of["lost"][block]), asked + int(of["asked"][block]), blocks + 1
        last = max(shared, key=paths.__getitem__)
        lost, asked, blocks = paths[last]
        return SharedPrefix(blocks, int(of["asked"][last]), asked, lost, int(of["first"][last]), last)


@dataclass(slots=True)
class TenantLosses:
    """Cost of evictions for the requests of one tenant."""

    by: str
    """Key that identifies it: ``tenant``, ``model``, ``salt`` or ``lora``."""
    requests: int = 0
    prompt_tokens: int = 0
    lost: int = 0
    """Tokens that were computed again because of evictions."""
    lost_to: Counter[str | None] = field(default_factory=Counter)
    """These tokens by the tenant of the request that needed the room; None: unknown."""


@dataclass(slots=True)
class RunningHeld:
    """Blocks held by running requests, at the end of each step that admitted one."""

    moments: int = 0
    """Number of admissions."""
    full: int = 0
    """Number of admissions at which they held `NEARLY_ALL` or more."""
    blocks: int = 0
    """Sums over all moments: blocks held, and running requests."""
    requests: int = 0
    most: int = 0
    """Maximum number of blocks held at one moment."""
    most_at: int = -1
    """Batch of that moment."""

    def note(self, moments: int, held: int, size: int, requests: int, batch: int) -> None:
        """Add moments of a batch at which `requests` requests hold `held` of `size` blocks."""
        self.moments += moments
        self.full += moments * (held >= NEARLY_ALL * size)
        self.blocks += moments * held
        self.requests += moments * requests
        if held > self.most:
            self.most, self.most_at = held, batch


def tenant_of(admission: ExplainedAdmission) -> tuple[str, str]:
    """Return a request's label ``tenant``, or its label ``model``, or its salt and LoRA adapter in words; and the key
    by which `kvcache audit --by` separates such tenants.
    """
    labels, namespace = admission.origin.labels or {}, admission.namespace
    for by in ("tenant", "model"):
        if by in labels:
            return labels[by], by
    by = "salt" if namespace.salt_digest is not None else "lora"
    return namespace_in_words(namespace) or "none", by


class LossCounter(HistoryListener):
    """Listener that counts the cost of evictions."""

    def __init__(self) -> None:
        self.request_ids: list[RequestId] = []
        """Request ids of all admissions, in order: `SharedPrefix.first` is an index into it."""
        self.reused_tokens = 0
        """Reused prompt tokens."""
        self.lost_tokens = 0
        """Prompt tokens that were computed again because of evictions."""
        self.evictions = 0
        """Blocks evicted from any level."""
        self.used = 0
        """Largest number of primary blocks that were not blank."""
        self.refusals = 0
        self.tenants: dict[str, TenantLosses] = {}
        """Losses by `tenant_of`."""
        self.prefixes = SharedPrefixes()
        self.held = RunningHeld()
        self.primary = 0
        """Blocks of the last cache, of the window with full attention."""
        self.secondary = 0
        self._tenant_of: dict[int, str] = {}
        """Tenants by admission number."""
        self._moments = 0
        """Admissions of this batch."""

    def looked_up(self, history: HistoryFold, admission: ExplainedAdmission) -> None:
        """Count the lost tokens of a prompt."""
        evicted, lost = IS_EVICTION[admission.reasons[: len(admission.ids)]], np.zeros(1, np.int64)
        if evicted.any():
            lost = np.where(evicted, admission.tokens()[: len(evicted)], 0)
        self.request_ids.append(admission.request_id)
        self.reused_tokens += admission.reused
        self.lost_tokens += int(lost.sum())
        self.prefixes.add(admission.ids, lost)
        self._moments += 1
        tenant, by = tenant_of(admission)
        self._tenant_of[admission.number] = tenant
        own = self.tenants.setdefault(tenant, TenantLosses(by))
        own.requests += 1
        own.prompt_tokens += admission.num_tokens
        own.lost += int(lost.sum())
        for window, ids, tokens in history.evicted_blocks(admission):
            for taker, each in zip(window.of["gone_by"][ids].tolist(), tokens.tolist(), strict=True):
                own.lost_to[self._tenant_of.get(taker)] += each

    def refused(self, history: HistoryFold, event: ev.AdmissionRefused) -> None:
        """Count a refusal."""
        self.refusals += 1

    def evicted(self, history: HistoryFold, window: Window, ids: Ids, level: int) -> None:
        """Count evicted blocks."""
        self.evictions += len(ids)

    def batch_ended(self, history: HistoryFold) -> None:
        """Record the blocks that running requests hold, if a request was admitted."""
        state = history.replayed.state
        if not self._moments or state.created is None:
            return
        full = next((at for at, group in enumerate(state.created.groups) if group.kind == FULL), 0)
        self.primary, self.secondary = state.created.groups[full].num_blocks
        primary = occupancy(state)[2 * full]
        self.used = max(self.used, primary.blocks - primary.blank)
        self.held.note(self._moments, primary.held, primary.blocks, len(state.sequences), history.batch)
        self._moments = 0
