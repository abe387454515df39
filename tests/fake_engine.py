"""An engine without a model: K/V of a token is a number that depends on all tokens up to it, as attention makes it.

Before it writes, the engine reads what its block table says it has, like attention does: if a byte before is wrong,
what it writes is wrong, too. So a block that was ever fed from a place whose bytes had not arrived stays wrong, and
`verify` finds it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from cuda_ops.copier import Copier
from cuda_ops.simulated import LateCopier
from kvcache.fold.prefix_tree import Run, runs_below
from kvcache.inputs.requests import Request
from kvcache.layout import Layout
from kvcache.manager import KVCacheManager
from kvcache.pools import Pools
from kvcache.results import Admission, PollResult
from tests import strategies

WRONG = -1.0
RequestId = str | int


def expected(tokens: Sequence[int], salt: object = None) -> list[float]:
    """K/V of each token: positive numbers that float32 holds exactly."""
    seed = crc32(repr(salt).encode())
    values = []
    for token in tokens:
        seed = crc32(array("i", [token]).tobytes(), seed)
        values.append(float(seed % 2**22 + 1))
    return values


class FakeEngine:
    """Drives a manager with real pools on the host."""

    def __init__(self, wrap: Callable[[Copier], Copier] = lambda copier: copier, **settings: Any) -> None:
        self.config = strategies.config(dtype="float32", num_kv_heads=1, head_dim=1, **settings)
        self.pools = Pools(Layout.of(self.config), "cpu")
        self.copier = wrap(self.pools.copier())
        self.manager = KVCacheManager(self.config, pools=self.pools, copier=self.copier)
        self.size = self.config.tokens_per_block
        self.running: list[RequestId] = []
        self.failed: list[tuple[int, str]] = []

    @property
    def memory(self) -> tuple[npt.NDArray[np.float32], ...]:
        """Per level [blocks, K and V, tokens]: views of the pools' tensors."""
        return tuple(level.view(-1, 2, self.size).numpy() for level in self.pools.groups[0][0].levels)

    # -- commands

    def admit(self, *requests: Request) -> list[Admission]:
        admitted = self.manager.add_sequences(requests)
        self.running += [request.request_id for request in requests]
        return admitted

    def forward(self, request_id: RequestId, stop: int | None = None) -> None:
        """Compute K/V up to a token of the prompt and report it."""
        sequence = self.manager._blocks.sequence(request_id)
        stop = sequence.num_tokens if stop is None else stop
        self.write(request_id, stop)
        self.manager.store_context_blocks(request_id, stop)

    def write(self, request_id: RequestId, stop: int) -> None:
        self.start_transfers()
        sequence, memory = self.manager._blocks.sequence(request_id), self.memory[0]
        right = expected(sequence.tokens, sequence.namespace)
        table = self.manager.block_table(request_id)
        wrong = self.read(request_id, sequence.computed) != right[: sequence.computed]
        for at in range(sequence.computed, stop):
            memory[table[at // self.size], :, at % self.size] = WRONG if wrong else right[at]

    def read(self, request_id: RequestId, stop: int) -> list[float]:
        """What the engine finds in its blocks."""
        return self.read_slots(0, self.manager.block_table(request_id))[:stop]

    def read_slots(self, level: int, slots: npt.ArrayLike) -> list[float]:
        """The tokens' K/V; wrong where K and V differ, which are written alike."""
        blocks = self.memory[level][np.asarray(slots, np.int32)]
        return np.where(blocks[:, 0] == blocks[:, 1], blocks[:, 0], WRONG).ravel().tolist()

    def decode(self, request_ids: Sequence[RequestId], tokens: Sequence[int]) -> None:
        """One step: write what was sampled last (and whatever of the prompt was left), then append."""
        for request_id in request_ids:
            self.write(request_id, self.manager._blocks.sequence(request_id).num_tokens)
        self.manager.add_tokens(list(request_ids), list(tokens))

    def end(self, request_id: RequestId, *, store: bool = True) -> None:
        self.running.remove(request_id)
        self.manager.remove_sequence(request_id, store)

    def start_transfers(self) -> None:
        """The device waits for the bytes, the host does not."""
        ticket = self.manager.start_transfers()
        if ticket is not None:
            ticket.wait_on()

    def poll(self) -> PollResult:
        polled = self.manager.poll()
        self.failed += polled.failed
        return polled

    def settle(self) -> None:
        """Until the host knows what has become of every copy."""
        for _ in range(200):
            self.start_transfers()
            if isinstance(self.copier, LateCopier):
                self.copier.tick()
            self.poll()
            if not self.manager.state.transfers:
                return
        raise AssertionError("copies never land")

    # -- what must hold

    def verify(self) -> None:
        """Every cached block whose copy is known to have landed holds the K/V of its prefix."""
        self.manager.check()
        for root in self.manager.state.groups[0].tree.roots.values():
            for run in runs_below(root):
                if not run.transfer:
                    self.verify_run(run, root.namespace)

    def verify_run(self, run: Run, salt: object) -> None:
        path = [run]
        while isinstance(path[-1].parent, Run):
            path.append(path[-1].parent)
        tokens = array("i", b"".join(bytes(each.symbols) for each in reversed(path)))
        right = expected(tokens, salt)[run.start * self.size :]
        found = self.read_slots(run.level, run.slots)
        assert found[: len(right)] == right, "a cached block holds the K/V of something else"

    def verify_running(self) -> None:
        """Every running sequence finds the K/V of all that counts as computed; only true once failures are known."""
        self.start_transfers()
        for request_id in self.running:
            sequence = self.manager._blocks.sequence(request_id)
            right = expected(sequence.tokens, sequence.namespace)[: sequence.computed]
            assert self.read(request_id, sequence.computed) == right, (
                "a sequence reads the K/V of something else"
            )
