"""What an engine asks of a manager between its steps: reads the state and never changes it."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from events.tokens.rich import RichTokens
from events.types import PRIMARY, RequestId
from kvcache.config import KVCacheConfig
from kvcache.decide.block_manager import BlockManager
from kvcache.decide.lookup import count_blocks, lookup
from kvcache.device.transfers import TransferEngine
from kvcache.errors import ComputationLost, TransfersPending, UnknownRequest, Unsupported, UsageError
from kvcache.fold.check import check
from kvcache.fold.fingerprint import fingerprint
from kvcache.fold.sequence import Sequence
from kvcache.fold.state import CacheState
from kvcache.guard import Guard, exclusive
from kvcache.inputs.arguments import checked_integer, listed
from kvcache.inputs.multimodal import MultimodalItem, rich_tokens
from kvcache.inputs.requests import Incoming, Request, incoming_batch, namespace_of
from kvcache.inputs.tokens import Tokens, pack_tokens
from kvcache.layout import Layout
from kvcache.record.journal import Journal
from kvcache.results import BlockTable, Match

if TYPE_CHECKING:
    from kvcache.pools import Pools


class Reading:
    """The part of a manager that changes nothing. Bound to the manager's thread, since it reads the live state."""

    config: KVCacheConfig
    layout: Layout
    state: CacheState
    transfers: TransferEngine | None
    _blocks: BlockManager
    _cut: dict[RequestId, int]
    _journal: Journal
    _guard: Guard
    _max_tokens: int
    _pools: Pools | None

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence that can be held."""
        return self._max_tokens

    @exclusive
    def can_add(self, requests: Items[Request]) -> int:
        """How many requests of the batch, from the first on, could be admitted together now."""
        return self._blocks.count_fitting(self._incoming(requests))

    @exclusive
    def remaining_blocks_to_completion(self, request_id: RequestId, max_new_tokens: int) -> int:
        """Blocks that a sequence still needs to grow by `max_new_tokens` tokens."""
        max_new_tokens = checked_integer(max_new_tokens, "max_new_tokens")
        if max_new_tokens < 0:
            raise UsageError("max_new_tokens must not be negative")
        sequence = self._sequence(request_id)
        return self._blocks.window.blocks_for(sequence.num_tokens + max_new_tokens) - len(sequence.tables[0])

    @exclusive
    def match(
        self,
        tokens: Tokens,
        *,
        lora_id: int | None = None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        multimodal: Items[MultimodalItem] = (),
        extra_ids: Tokens | None = None,
    ) -> Match:
        """What a prompt would reuse now, block by block. Changes nothing."""
        namespace = namespace_of(lora_id, lora_name, cache_salt, extra_ids is not None)
        prompt = self._prompt(tokens, multimodal, extra_ids)
        if not self.config.enable_block_reuse:
            return Match(len(prompt), (), None)
        return lookup(self.state, namespace, prompt, partial=self.config.enable_partial_reuse)

    @exclusive
    def count_reusable(
        self,
        tokens: Tokens,
        *,
        lora_id: int | None = None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        multimodal: Items[MultimodalItem] = (),
        extra_ids: Tokens | None = None,
    ) -> int:
        """Full blocks that a prompt would reuse now: as many as `match` lists, without making the list."""
        namespace = namespace_of(lora_id, lora_name, cache_salt, extra_ids is not None)
        prompt = self._prompt(tokens, multimodal, extra_ids)
        return count_blocks(self.state, namespace, prompt) if self.config.enable_block_reuse else 0

    def _prompt(
        self, tokens: Tokens, multimodal: Items[MultimodalItem], extra_ids: Tokens | None
    ) -> RichTokens:
        packed = pack_tokens(tokens, self._max_tokens)
        rich = rich_tokens(packed, multimodal, extra_ids)
        return RichTokens(packed) if rich is None else rich

    @exclusive
    def block_table(self, request_id: RequestId, window: int | None = None) -> BlockTable:
        """The primary slot of each block of a sequence, int32 [blocks].

        With pools a torch tensor on the host, without them a numpy array. Stale after the next call that stores or
        appends.
        """
        only = self.layout.groups[0].window
        if window is not None and checked_integer(window, "a window") != only:
            raise UsageError(f"there is no window of {window} tokens, only one of {only}")
        return self._table_of(self._sequence(request_id))

    @exclusive
    def _block_table_of(self, request_id: RequestId, handle: int) -> BlockTable:
        """The block table of one admission: a later one of the same id is another sequence."""
        if self.state.handles.get(request_id) != handle:
            raise UnknownRequest(request_id)
        return self._table_of(self._sequence(request_id))

    def _table_of(self, sequence: Sequence) -> BlockTable:
        self._refuse_unreadable([sequence])
        return self._presented(np.array(sequence.tables[0], np.int32))

    @exclusive
    def block_tables(self, request_ids: Iterable[RequestId]) -> BlockTable:
        """Block tables of several sequences, int32 [sequences, most blocks], padded with -1.

        With pools a torch tensor on the host, without them a numpy array.
        """
        ids = listed(request_ids, "request_ids")
        sequences = [self._sequence(request_id) for request_id in ids]
        self._refuse_unreadable(sequences)
        tables = [sequence.tables[0] for sequence in sequences]
        padded = np.full((len(tables), max(map(len, tables), default=0)), -1, np.int32)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        return self._presented(padded)

    def _presented(self, table: npt.NDArray[np.int32]) -> BlockTable:
        return table if self._pools is None else self._pools.block_table(table)

    def _refuse_unreadable(self, sequences: Items[Sequence]) -> None:
        self._refuse_cut(sequences)
        if self.transfers is not None and self.transfers.pending:
            raise TransfersPending

    def _refuse_cut(self, sequences: Items[Sequence]) -> None:
        for sequence in sequences if self._cut else ():
            if sequence.request_id in self._cut:
                raise ComputationLost(sequence.request_id, self._cut[sequence.request_id])

    def _refuse_uncomputable(self, sequences: Items[Sequence]) -> None:
        """Raise if one of these sequences has not got what it is computed from.

        `ComputationLost`: a copy has failed. `TransfersPending`: one into its blocks has not been started.
        """
        self._refuse_cut(sequences)
        if self.transfers is None or not self.transfers.pending:
            return
        unwritten = self.transfers.pending_targets(group=0, level=PRIMARY)
        if unwritten and not all(unwritten.isdisjoint(sequence.tables[0]) for sequence in sequences):
            raise TransfersPending

    @property
    @exclusive
    def num_free_blocks(self) -> int:
        """Primary blocks that can be had: blank ones, and cached ones that no sequence holds."""
        return self.state.groups[0].levels[0].available

    @property
    @exclusive
    def num_sequences(self) -> int:
        """Running sequences."""
        return len(self.state.sequences)

    @exclusive
    def fingerprint(self) -> bytes:
        """SHA-256 of the state; equal to that of the replayed log at this point."""
        return fingerprint(self.state)

    @exclusive
    def check(self) -> None:
        """Prove the invariants from scratch; raises `InvariantViolated`. Slow: for tests and debugging."""
        check(self.state)

    def _incoming(self, requests: Items[Request]) -> list[Incoming]:
        batch = incoming_batch(requests, self.state.handles, self._max_tokens, self.state.symbols)
        if self.state.hashing.name == "v1_block_key":
            self._refuse_ambiguous(batch)
        return batch

    def _refuse_ambiguous(self, batch: Items[Incoming]) -> None:
        """Refuse what v1_block_key gives the names of other blocks, where somebody relies on names."""
        instead = "use the default block_hash, v2_sha256_64"
        if any(request.namespace.lora_name is not None for request in batch):
            raise Unsupported(
                "a lora_name with v1_block_key, which knows LoRA ids only", f"{instead}, or lora_id"
            )
        if not self._journal.outlets.records_tokens and any(
            request.rich is not None and request.rich.items for request in batch
        ):
            raise Unsupported("multimodal items with v1_block_key in a log without tokens", instead)

    def _sequence(self, request_id: RequestId) -> Sequence:
        return self._blocks.sequence(request_id)
