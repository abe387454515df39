"""An engine without a model: K/V of a token is a number that depends on all tokens up to it, as attention makes it.

Before it writes, the engine reads what its block tables say it has, like attention does: in each window the tokens that
this window sees, and no other. If a byte of these is wrong, what it writes is wrong, too. So a block that was ever fed
from a place whose bytes had not arrived stays wrong, and `verify` finds it. What is blank is overwritten, so that
nobody reads right bytes from a place that is not his.

Where there is an encoder, K/V of each token of its input depends on all of it, and all that the engine writes for a
sequence on what it finds there.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from cuda_ops.copier import Copier
from cuda_ops.dma import DmaCopier
from cuda_ops.simulated import SimulatedGpu
from events.packed import unpack_i32
from events.types import CROSS_WINDOW, PRIMARY, SECONDARY, BlocksCopied, BlocksMoved, Namespace
from kvcache.fold.group import Group
from kvcache.fold.prefix_tree import Run, runs_below
from kvcache.fold.survivors import LostPrefix
from kvcache.inputs import Request
from kvcache.layout import Layout
from kvcache.manager import KVCacheManager
from kvcache.pools import KVCacheBlockPool, Pools
from kvcache.results import Admission, PollResult
from tests.support.engines import strategies
from tests.support.engines.inside import is_certain, sequence_of, slots_of
from tests.support.engines.simulated import LateCopier

WRONG = -1.0
DETACHED = -2
"""In a block table: a block that the window has let go of."""
NUMBERS = 2**20
"""So many numbers stand for K/V. Each pool has numbers of its own, which float32 holds exactly for 16 pools."""
RequestId = str | int
Place = tuple[int, int, int]
"""Group, level, slot."""


def expected(tokens: Sequence[int], salt: object = None) -> list[float]:
    """K/V of each token: positive numbers. This is how they lie in the first pool."""
    seed = crc32(repr(salt).encode())
    values = []
    for token in tokens:
        seed = crc32(array("i", [token]).tobytes(), seed)
        values.append(float(seed % (NUMBERS - 1) + 1))
    return values


def expected_input(tokens: Sequence[int], salt: object = None) -> list[float]:
    """K/V of each token of an encoder's input: it depends on those behind it, too."""
    seed = crc32(array("i", tokens).tobytes(), crc32(repr(salt).encode()))
    return expected([*tokens, len(tokens)], (seed, "input"))[:-1]


class Memory:
    """The pools of one window: a token has the same number in all layers and heads of a pool, as K and as V.

    On a simulated GPU what is written waits for its turn on the compute stream, and who reads primary for that.
    """

    def __init__(
        self, pools: Sequence[KVCacheBlockPool], first: int, gpu: SimulatedGpu | None = None
    ) -> None:
        self._gpu = gpu
        self._pools = [
            (tuple(np.moveaxis(level.numpy(), pool.token_dim, 1) for level in pool.levels), raised * NUMBERS)
            for raised, pool in enumerate(pools, first)
        ]

    def write(
        self, slots: npt.NDArray[Any], offsets: npt.NDArray[Any], values: npt.NDArray[np.float32]
    ) -> None:
        """Write tokens into primary."""

        def written() -> None:
            for levels, raised in self._pools:
                levels[PRIMARY][slots, offsets] = (values + raised)[:, None, None, None, None]

        self._do(written)

    def _do(self, operation: Callable[[], None]) -> None:
        if self._gpu is None:
            operation()
        else:
            self._gpu.current_stream().do(operation)

    def read(self, level: int, slots: Sequence[int]) -> npt.NDArray[np.float32]:
        """The tokens' K/V, [blocks, tokens]; wrong where what was written alike differs."""
        if self._gpu is not None and level == PRIMARY:
            self._gpu.current_stream().synchronize()
        index = np.array(slots, np.int32)
        found = []
        for levels, raised in self._pools:
            blocks = levels[level][index]
            found.append(blocks.reshape(*blocks.shape[:2], -1) - np.float32(raised))
        values = np.concatenate(found, axis=2)
        first: npt.NDArray[np.float32] = values[:, :, 0]
        return np.where((values == values[:, :, :1]).all(axis=2), first, np.float32(WRONG))

    def overwrite(self, level: int, slots: Sequence[int]) -> None:
        """Make everything in these slots wrong."""
        index = np.array(slots, np.int32)

        def overwritten() -> None:
            for levels, _ in self._pools:
                levels[level][index] = WRONG

        self._do(overwritten)


def places(group: Group, run: Run, *, sliding: bool) -> Iterator[tuple[int, int, int]]:
    """The blocks of a run that lie somewhere: (index in the run, level, slot)."""
    for index, slot in enumerate(run.slots):
        if not sliding:
            yield index, run.level, slot
        elif slot >= group.levels[PRIMARY].size:
            yield index, SECONDARY, slot - group.levels[PRIMARY].size
        elif slot >= 0:
            yield index, PRIMARY, slot


class FakeEngine:
    """Drives a manager with real pools on the host, or on a simulated GPU; with `log` one that begins or goes on with
    what lies there.

    It knows what `before` knew, an engine of an earlier life, and computes again what is lost.
    """

    def __init__(
        self,
        wrap: Callable[[Copier], Copier] = lambda copier: copier,
        log: Path | None = None,
        before: FakeEngine | None = None,
        gpu: SimulatedGpu | None = None,
        **settings: Any,
    ) -> None:
        defaults: dict[str, Any] = {"dtype": "float32", "num_kv_heads": 1, "head_dim": 1}
        self.config = strategies.config(**(defaults | settings))
        self.pools = Pools(Layout.of(self.config), "cpu", self.config.secondary_path)
        self.gpu = gpu
        copier = self.pools.copier() if gpu is None else DmaCopier(self.pools.groups, gpu, gpu)
        self.copier = wrap(copier)
        self.size = self.config.tokens_per_block
        self.meanings: dict[Namespace, Any] = {} if before is None else before.meanings
        """Namespace to what makes K/V differ beside tokens: who asks, and what an encoder has read, if there is one."""
        firsts = np.cumsum([0, *map(len, self.pools.groups)])
        self.memories = [
            Memory(pools, int(first), gpu) for pools, first in zip(self.pools.groups, firsts, strict=False)
        ]
        if log is None:
            self.manager = KVCacheManager(self.config, pools=self.pools, copier=self.copier)
        else:
            again = None if before is None else self.recompute
            self.manager = KVCacheManager.open(
                self.config, log, pools=self.pools, copier=self.copier, recompute=again
            )
        self.windows = [group.window for group in self.manager.layout.windows]
        self.cross = [group.index for group in self.manager.layout.groups if group.kind == "cross"]
        """The group of cross attention, or none."""
        self.inputs: dict[RequestId, tuple[tuple[object, ...], list[int]]] = {}
        self.running: list[RequestId] = []
        self.failed: list[tuple[int, str]] = []
        self.given_up: list[RequestId] = []
        """Sequences that lost what they had computed behind blocks that they had let go of."""
        self._unread: set[Place] = set()
        """Sources of copies that were asked for and not started."""
        self.manager.bus.subscribe(self._note_sources, BlocksMoved, BlocksCopied)

    def recompute(self, lost: LostPrefix) -> bool:
        """Write what was in primary before what lies in secondary."""
        values = np.array(expected(lost.tokens.tolist(), self.meanings[lost.namespace]), np.float32)
        positions = np.arange(lost.first_token, len(lost.tokens))
        self.memories[0].write(lost.slots[positions // self.size], positions % self.size, values[positions])
        return True

    # -- commands

    def admit(self, *requests: Request) -> list[Admission]:
        admitted = self.manager.add_sequences(requests)
        self.running += [request.request_id for request in requests]
        for request in requests:
            self._note_meaning(request)
        self.overwrite_blank()
        return admitted

    def _note_meaning(self, request: Request) -> None:
        """That one namespace stands for one meaning is what keeps sequences of different inputs apart."""
        sequence = sequence_of(self.manager, request.request_id)
        who = (request.lora_id, request.lora_name, request.cache_salt, request.extra_ids is not None)
        read = None if request.encoder_tokens is None else tuple(request.encoder_tokens)
        meaning: Any = sequence.namespace if read is None else (*who, read)
        assert self.meanings.setdefault(sequence.namespace, meaning) == meaning
        if read is not None:
            assert sequence.encoder is not None
            assert self.meanings.setdefault(sequence.encoder.namespace, (*who[:3], read)) == (*who[:3], read)
            self.inputs[request.request_id] = (*who[:3], read), list(read)

    def encode(self, request_id: RequestId, *, report: bool = True) -> None:
        """Run the encoder unless all that it would compute is there; `report` that to the manager."""
        encoder = sequence_of(self.manager, request_id).encoder
        if encoder is None:
            return
        self.start_transfers()
        meaning, tokens = self.inputs[request_id]
        positions = np.arange(min(encoder.computed, len(tokens)), len(tokens))
        if len(positions):
            right = np.array(expected_input(tokens, meaning), np.float32)
            (group,) = self.cross
            self.memories[group].write(
                self.table(request_id, group)[positions // self.size], positions % self.size, right[positions]
            )
        if report:
            self.manager.store_encoder_blocks(request_id)
            self.overwrite_blank()

    def finds_input(self, request_id: RequestId) -> bool:
        """Whether all that the encoder has made of a sequence's input is right."""
        for group in self.cross:
            meaning, tokens = self.inputs[request_id]
            slots = self.table(request_id, group).tolist()
            found = self.memories[group].read(PRIMARY, slots).ravel().tolist()
            if found[: len(tokens)] != expected_input(tokens, meaning):
                return False
        return True

    def forward(self, request_id: RequestId, stop: int | None = None) -> None:
        """Compute K/V up to a token of the prompt and report it."""
        sequence = sequence_of(self.manager, request_id)
        stop = sequence.num_tokens if stop is None else stop
        self.have_slots(request_id, stop)
        self.write(request_id, stop)
        self.manager.store_context_blocks(request_id, stop)
        self.overwrite_blank()

    def write(self, request_id: RequestId, stop: int) -> None:
        """The first token reads what was computed before, and those behind it that and what is written now."""
        self.start_transfers()
        sequence = sequence_of(self.manager, request_id)
        positions = np.arange(sequence.computed, stop)
        if not len(positions):
            return
        self.encode(request_id, report=False)
        right = np.array(expected(sequence.tokens, self.meanings[sequence.namespace]), np.float32)[positions]
        found = self.finds(request_id, sequence.computed) and self.finds_input(request_id)
        values = right if found else np.full_like(right, WRONG)
        for group, memory in enumerate(self.memories[: len(self.windows)]):
            slots = self.table(request_id, group)[positions // self.size]
            assert slots.min() >= 0, "a window has let go of a block that is to be written"
            memory.write(slots, positions % self.size, values)

    def table(self, request_id: RequestId, group: int) -> npt.NDArray[np.int32]:
        window = CROSS_WINDOW if group in self.cross else self.windows[group]
        return np.asarray(self.manager.block_table(request_id, window=window))

    def finds(self, request_id: RequestId, token: int) -> bool:
        """Whether all that a token sees of the tokens before it is right, in every window."""
        sequence = sequence_of(self.manager, request_id)
        right = expected(sequence.tokens, self.meanings[sequence.namespace])
        begins = [max(0, token - window + 1) for window in self.windows]
        return all(
            self.read(request_id, group, begin, token) == right[begin:token]
            for group, begin in enumerate(begins)
        )

    def read(self, request_id: RequestId, group: int, begin: int, end: int) -> list[float]:
        """What a window finds in its blocks for the tokens from `begin` to `end`."""
        first = begin // self.size
        slots = self.table(request_id, group)[first : -(-end // self.size)].tolist()
        assert begin >= end or min(slots) >= 0, "a window has let go of a block that it sees"
        if begin >= end:
            return []
        found = self.memories[group].read(PRIMARY, slots).ravel()
        return found[begin - first * self.size : end - first * self.size].tolist()

    def decode(self, request_ids: Sequence[RequestId], tokens: Sequence[int]) -> None:
        """One step: write what was sampled last (and whatever of the prompt was left), then append."""
        for request_id in request_ids:
            self.have_slots(request_id, sequence_of(self.manager, request_id).num_tokens)
            self.write(request_id, sequence_of(self.manager, request_id).num_tokens)
        self.manager.add_tokens(list(request_ids), list(tokens))
        self.overwrite_blank()

    def have_slots(self, request_id: RequestId, stop: int) -> None:
        """Have slots for the tokens of a prompt up to one, if it was admitted without."""
        sequence = sequence_of(self.manager, request_id)
        if slots_of(self.manager, request_id) < stop:
            self.manager.reserve([request_id], [stop - sequence.computed])
            self.overwrite_blank()

    def guess_ahead(self, request_id: RequestId, guesses: Sequence[int], right: int, sampled: int) -> None:
        """Compute guessed tokens in reserved slots; of those the first `right` were right, and one more was sampled."""
        self.start_transfers()
        sequence = sequence_of(self.manager, request_id)
        known = sequence.num_tokens
        self.manager.reserve([request_id], [len(guesses)])
        self.overwrite_blank()
        self.write(request_id, known)
        meaning = self.meanings[sequence.namespace]
        values = np.array(expected([*sequence.tokens, *guesses], meaning), np.float32)[known:]
        if not (self.finds(request_id, known - 1) and self.finds_input(request_id)):
            values = np.full_like(values, WRONG)
        positions = np.arange(known, known + len(guesses))
        for group, memory in enumerate(self.memories[: len(self.windows)]):
            memory.write(self.table(request_id, group)[positions // self.size], positions % self.size, values)
        self.manager.add_tokens([request_id], [*guesses[:right], sampled], [right + 1])
        self.overwrite_blank()

    def draft(self, request_id: RequestId, drafts: Sequence[int], right: int, sampled: int) -> None:
        """Behind a sampled token append drafts, compute them, and take back all but the first `right`; then another one
        was sampled.
        """
        self.decode([request_id], [sampled])
        known = sequence_of(self.manager, request_id).num_tokens
        self.manager.add_tokens([request_id], list(drafts), [len(drafts)], draft=True)
        self.overwrite_blank()
        self.write(request_id, known + len(drafts))
        if right < len(drafts):
            self.rewind(request_id, known + right)
        self.manager.add_tokens([request_id], [sampled])
        self.overwrite_blank()

    def fork(self, parent: RequestId, child: RequestId) -> None:
        """Branch a sequence; copies are waited for only where something is read."""
        if not is_certain(self.manager):
            self.start_transfers()
        self.manager.fork(parent, child)
        self.running.append(child)
        if parent in self.inputs:
            self.inputs[child] = self.inputs[parent]
        self.overwrite_blank()

    def rewind(self, request_id: RequestId, num_tokens: int) -> None:
        if not is_certain(self.manager):
            self.start_transfers()
        self.manager.rewind(request_id, num_tokens)
        self.overwrite_blank()

    def end(self, request_id: RequestId, *, store: bool = True) -> None:
        self.running.remove(request_id)
        self.manager.remove_sequence(request_id, store)
        self.overwrite_blank()

    def start_transfers(self) -> None:
        """The device waits for the bytes, the host does not."""
        self.overwrite_blank()
        ticket = self.manager.start_transfers()
        if ticket is not None:
            ticket.wait_on()
        self._unread.clear()
        self.overwrite_blank()

    def poll(self) -> PollResult:
        """Hear of copies. Who has to begin again and has let go of blocks cannot, and is removed."""
        polled = self.manager.poll()
        self.failed += polled.failed
        if polled.invalidated:
            self.manager.check()
            self.start_transfers()  # without it there are no tables
        for request_id, _ in polled.invalidated:
            if any(DETACHED in self.table(request_id, group) for group in range(len(self.windows))):
                self.given_up.append(request_id)
                self.end(request_id)
        self.overwrite_blank()
        return polled

    def tick(self) -> None:
        """Let some time pass, if copies need it."""
        if isinstance(self.copier, LateCopier):
            self.copier.tick()
        if self.gpu is not None:
            self.gpu.run_some(100)

    def settle(self) -> None:
        """Until the host knows what has become of every copy."""
        for _ in range(200):
            self.start_transfers()
            self.tick()
            self.poll()
            if not self.manager.state.transfers:
                return
        raise AssertionError("copies never land")

    # -- what is blank

    def _note_sources(self, event: BlocksMoved | BlocksCopied) -> None:
        if isinstance(event, BlocksCopied):
            self._unread.add((event.group, event.source_level, event.source))
        elif event.transfer:
            slots = unpack_i32(event.from_slots).tolist()
            self._unread.update((event.group, event.from_level, slot) for slot in slots)

    def overwrite_blank(self) -> None:
        """Make what is blank wrong, but for what a copy is still to read."""
        for index, (group, memory) in enumerate(zip(self.manager.state.groups, self.memories, strict=True)):
            for level in group.levels:
                slots = [slot for slot in level.blank if (index, level.index, slot) not in self._unread]
                if slots:
                    memory.overwrite(level.index, slots)

    # -- what must hold

    def verify(self) -> None:
        """Every cached block whose copy is known to have landed holds the K/V of its prefix."""
        self.manager.check()
        self.overwrite_blank()
        for index, group in enumerate(self.manager.state.groups):
            for root in group.tree.roots.values():
                for run in runs_below(root):
                    self.verify_run(index, run, root.namespace)

    def verify_run(self, index: int, run: Run, salt: Namespace) -> None:
        path = [run]
        while isinstance(path[-1].parent, Run):
            path.append(path[-1].parent)
        tokens = array("i", b"".join(bytes(each.symbols) for each in reversed(path)))
        meaning: Any = self.meanings[salt]
        of_input = index in self.cross
        right = expected_input(meaning[-1], meaning) if of_input else expected(tokens, meaning)
        for level, blocks in self.landed(index, run).items():
            found = self.memories[index].read(level, list(blocks.values()))
            for block, values in zip(blocks, found, strict=True):
                of_block = right[block * self.size : (block + 1) * self.size]
                assert values[: len(of_block)].tolist() == of_block, (
                    "a cached block holds the K/V of something else"
                )

    def landed(self, index: int, run: Run) -> dict[int, dict[int, int]]:
        """By level, the slots of a run's blocks that are not on their way; blocks are counted from the root."""
        created, state = self.manager.state.created, self.manager.state
        assert created is not None
        sliding = created.groups[index].kind == "sliding"
        moving = {
            (each.level, slot)
            for each in state.transfers.values()
            if each.group == index and (sliding or run.transfer)
            for slot in each.slots
        }
        found: dict[int, dict[int, int]] = {}
        for block, level, slot in places(state.groups[index], run, sliding=sliding):
            if (level, slot) not in moving:
                found.setdefault(level, {})[run.start + block] = slot
        return found

    def verify_running(self) -> None:
        """Every running sequence finds the K/V of all that it still sees; only true once failures are known."""
        self.start_transfers()
        for request_id in self.running:
            computed = sequence_of(self.manager, request_id).computed
            assert self.finds(request_id, computed), "a sequence reads the K/V of something else"
            encoder = sequence_of(self.manager, request_id).encoder
            if encoder is not None and encoder.computed == encoder.num_tokens:
                assert self.finds_input(request_id), "a sequence reads what an encoder made of something else"
