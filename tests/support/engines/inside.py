"""What a manager does not show: the only place that knows where its parts are."""

from __future__ import annotations

from events.types import RequestId
from kvcache.decide.block_manager import BlockManager
from kvcache.fold.sequence import Sequence
from kvcache.manager import KVCacheManager
from kvcache.record.journal import Journal


def sequence_of(manager: KVCacheManager, request_id: RequestId) -> Sequence:
    """Return the sequence of a running request."""
    return manager.state.sequences[manager.state.handles[request_id]]


def slots_of(manager: KVCacheManager, request_id: RequestId) -> int:
    """Return for how many tokens a running request has slots."""
    return len(sequence_of(manager, request_id).tables[0]) * manager.config.tokens_per_block


def is_certain(manager: KVCacheManager) -> bool:
    """Return whether no call is refused for copies that are pending or have failed."""
    checks, transfers = manager._transfer_checks, manager.transfers
    return not (checks._lost or checks._stuck or (transfers is not None and transfers.pending))


def blocks_of(manager: KVCacheManager) -> BlockManager:
    """Return what decides."""
    return manager._blocks


def journal_of(manager: KVCacheManager) -> Journal:
    """Return what records."""
    return manager._journal
