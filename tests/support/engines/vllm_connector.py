"""A KV connector for vLLM's scheduler that has what it likes, at once or later, and fails at times."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.v1.outputs import KVConnectorOutput


@dataclass
class Loads(KVConnectorMetadata):  # type: ignore[misc]
    """What the worker loads before it runs a step: of each request the blocks."""

    blocks: dict[str, list[int]] = field(default_factory=dict)


class Elsewhere(KVConnectorBase_V1):  # type: ignore[misc]
    """The scheduler's side; what the worker would say is drawn."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.rng = random.Random(0)
        self.fails_in_steps = True
        """Whether what a step waits for may not come, too."""
        self._size = vllm_config.cache_config.block_size
        self._loads = Loads()
        self._received: set[str] = set()
        self._asked: dict[str, tuple[int, bool]] = {}
        self.awaited: dict[str, list[int]] = {}
        """By request, the blocks that are loaded while nothing of it is scheduled."""
        self.sending: set[str] = set()
        """Ended requests whose blocks are still read."""

    @property
    def busy(self) -> bool:
        """Whether something is on its way."""
        return bool(self.awaited or self.sending)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How much there is elsewhere after what the scheduler has, and whether to wait for it."""
        rng, left = self.rng, request.num_tokens - num_computed_tokens
        if rng.random() < 0.1:
            return None, False
        if rng.random() < 0.5 or left < 2:
            return 0, False
        waits = rng.random() < 0.6
        tokens = left if waits and rng.random() < 0.3 else rng.randrange(1, left)
        self._asked[request.request_id] = num_computed_tokens, waits
        return tokens, waits

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """It has been given blocks."""
        if not num_external_tokens:
            return
        begin, waits = self._asked.pop(request.request_id)
        stop = -(-(begin + num_external_tokens) // self._size)
        ids = blocks.get_block_ids()[0][begin // self._size : stop]
        self._received.update([request.request_id] if waits else ())
        (self.awaited if waits else self._loads.blocks)[request.request_id] = ids

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        """What is loaded in a step."""
        loads, self._loads = self._loads, Loads()
        return loads

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether its blocks are to be kept for a while."""
        waits = request.request_id not in self._received and self.rng.random() < 0.2
        if waits:
            self.sending.add(request.request_id)
        return waits, None

    def outcome(self, loads: Loads) -> KVConnectorOutput:
        """What the worker says after a step."""
        rng = self.rng
        arrived = {name for name in self.awaited if rng.random() < 0.4}
        sent = {name for name in self.sending if rng.random() < 0.4}
        self.sending -= sent
        chance = 0.2 * self.fails_in_steps
        bad = [block for blocks in loads.blocks.values() if rng.random() < chance for block in blocks[-2:]]
        for name in sorted(arrived):
            blocks = self.awaited.pop(name)
            if rng.random() < 0.3:
                bad += blocks[rng.randrange(len(blocks)) :]
        return KVConnectorOutput(
            finished_sending=sent or None, finished_recving=arrived or None, invalid_block_ids=set(bad)
        )

    def start_load_kv(self, *_: Any, **__: Any) -> None:
        """The worker's business, as the next three."""

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *_: Any, **__: Any) -> None: ...

    def wait_for_save(self) -> None: ...
