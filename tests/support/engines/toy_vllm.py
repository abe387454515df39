"""Something in the shape of vLLM, as far as the recorder looks at it: for what must hold whatever vLLM is installed."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SCHEDULER, ENGINES, CORE = "vllm.v1.core.sched.scheduler", "vllm.v1.engine.utils", "vllm.v1.engine.core"
SIZE = 4


class Status(IntEnum):
    """Of a request."""

    RUNNING = 1
    FINISHED_STOPPED = 2
    FINISHED_ABORTED = 3
    WAITING_FOR_REMOTE_KVS = 0


class Request:
    """A prompt."""

    def __init__(self, request_id: str, tokens: list[int], **further: Any) -> None:
        self.request_id, self.status = request_id, Status.RUNNING
        self.num_prompt_tokens, self.all_token_ids = len(tokens), list(tokens)
        self._output_token_ids: list[int] = []
        self.num_computed_tokens = self.num_preemptions = 0
        self.lora_request = self.cache_salt = self.prompt_embeds = self.session_id = None
        self.mm_features: list[Any] = []
        self.resumable, self.hash_bytes = False, 32
        self.skip_reading_prefix_cache = False
        vars(self).update(further)

    @property
    def num_tokens(self) -> int:
        """All of them."""
        return len(self.all_token_ids)

    @property
    def block_hashes(self) -> list[bytes]:
        """Of its full blocks."""
        ends = range(SIZE, self.num_tokens + 1, SIZE)
        items = [feature.identifier for feature in self.mm_features]
        named = (repr((items, self.all_token_ids[:end])).encode() for end in ends)
        return [hashlib.sha256(each).digest()[: self.hash_bytes] for each in named]

    def append(self, token: int) -> None:
        """It has given a token."""
        self.all_token_ids.append(token)
        self._output_token_ids.append(token)

    def is_finished(self) -> bool:
        """Whether it ends for good."""
        return self.status > Status.RUNNING


class FullAttentionManager:
    """Blocks of a group of layers."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.num_cached_block: dict[str, int] = {}
        self.req_to_blocks: dict[str, list[Any]] = {}


class SlidingWindowManager:
    """Of layers that forget, and that have nothing here."""

    def __init__(self, block_size: int) -> None:
        self.block_size, self.sliding_window = block_size, 2 * block_size
        self.num_cached_block: dict[str, int] = {}
        self.kv_cache_group_id, self.kv_cache_spec = 1, SimpleNamespace(prefix_cacheable=True)
        self.req_to_blocks: dict[str, list[Any]] = {}
        self.block_pool: Any = None


class MambaManager(SlidingWindowManager):
    """Of layers with states."""


class OddManager(SlidingWindowManager):
    """Of layers that nobody knows."""


class Pool:
    """All blocks; the first is never given out."""

    def __init__(self, blocks: int, hash_block_size: int) -> None:
        self.num_gpu_blocks, self.hash_block_size = blocks, hash_block_size
        self.free = list(range(1, blocks))

    def get_new_blocks(self, count: int) -> list[Any]:
        """Take some."""
        taken, self.free = self.free[:count], self.free[count:]
        return [SimpleNamespace(block_id=block, ref_cnt=1) for block in taken]

    def get_num_free_blocks(self) -> int:
        """How many there are."""
        return len(self.free)

    def cache_full_blocks(self, request: Request, **_: Any) -> None:
        """Name blocks."""

    cache_partial_block = cache_full_blocks

    def _insert_block_hash(self, key: bytes, block: Any, num_tokens: int) -> None:
        """Give one name."""

    def _remove_cached_block_hashes(self, block: Any) -> list[bytes]:
        """Take names away."""
        return []


class Manager:
    """Gives out blocks, names them, and finds none again."""

    def __init__(self, blocks: int, block_size: int, managers: list[Any]) -> None:
        self.coordinator = SimpleNamespace(
            single_type_managers=managers, enable_partial_hash_hits=False, eagle_group_ids=set()
        )
        self.block_pool, self.enable_caching = Pool(blocks, block_size), True
        for each in managers[1:]:
            each.block_pool = self.block_pool
        self.empty_kv_cache_blocks = SimpleNamespace(blocks=((),) * len(managers))
        self.tables: dict[str, list[Any]] = managers[0].req_to_blocks
        self.prefix_cache_stats: Any = None
        self.loaded: list[tuple[Request, int]] = []
        """Tokens from outside in this step."""

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        *,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
    ) -> Any:
        """Room for more tokens, or None."""
        table = self.tables.setdefault(request.request_id, [])
        outside = self._more(table, num_external_computed_tokens)
        self.loaded.append((request, num_external_computed_tokens))
        total = request.num_computed_tokens + num_external_computed_tokens + num_new_tokens
        new = self._more(table, total)
        if outside is None or new is None:
            return None
        if not delay_cache_blocks:
            self.cache_blocks(request, total)
        request.num_computed_tokens += num_new_tokens
        if not new:
            return self.empty_kv_cache_blocks
        return SimpleNamespace(blocks=(new, *((),) * (len(self.coordinator.single_type_managers) - 1)))

    def _more(self, table: list[Any], num_tokens: int) -> list[Any] | None:
        needed = -(-num_tokens // SIZE) - len(table)
        if needed > self.block_pool.get_num_free_blocks():
            return None
        new = self.block_pool.get_new_blocks(needed) if needed > 0 else []
        table += new
        return new

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Name what is full."""
        full = min(num_tokens, request.num_tokens) // SIZE
        self.coordinator.single_type_managers[0].num_cached_block[request.request_id] = full

    def make_prefix_cache_stats(self) -> Any:
        """Begin anew to count."""
        stats, self.prefix_cache_stats = self.prefix_cache_stats, None
        return stats

    def free(self, request: Request) -> None:
        """Its blocks go to the end of the queue, the last one first."""
        table = self.tables.pop(request.request_id)
        self.block_pool.free += [block.block_id for block in reversed(table)]
        self.coordinator.single_type_managers[0].num_cached_block.pop(request.request_id, None)

    def pop_blocks_for_free(self, request: Request) -> list[Any]:
        """The same, a little later."""
        return self.tables.pop(request.request_id)

    def reset_prefix_cache(self) -> bool:
        """Forget the names."""
        return not self.tables

    def remove_skipped_blocks(self, request_id: str, _: int) -> None:
        """Forget what a window has left behind."""

    def evict_blocks(self, blocks: set[int]) -> None:
        """Forget some."""

    def take_events(self) -> list[Any]:
        """A step is over."""
        for request, tokens in self.loaded:
            request.num_computed_tokens += tokens
        self.loaded.clear()
        return []


class Scheduler:
    """Has a manager, and settings."""

    def __init__(
        self,
        *,
        blocks: int = 20,
        block_size: int = SIZE,
        kinds: tuple[type[Any], ...] = (FullAttentionManager,),
        additional: object = None,
        hashing: str = "sha256",
        **parallel: Any,
    ) -> None:
        self.kv_cache_manager = Manager(blocks, block_size, [kind(block_size) for kind in kinds])
        self.connector, self.max_model_len, self.ended = None, 64, False
        self.kv_cache_config = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(layer_names=["a", "b"])] * len(kinds)
        )
        ranks = {"data_parallel_size": 1, "data_parallel_index": 0} | parallel
        self.vllm_config = SimpleNamespace(
            additional_config=additional,
            parallel_config=SimpleNamespace(**ranks),
            model_config=SimpleNamespace(model="toy/model"),
            cache_config=SimpleNamespace(prefix_caching_hash_algo=hashing),
        )

    def shutdown(self) -> None:
        """The engine ends."""
        self.ended = True

    def serve(self, request: Request, output: int = 3) -> list[list[int]]:
        """All of a request; its block table after each step."""
        manager, tables = self.kv_cache_manager, list[list[int]]()
        for step in range(output):
            if manager.allocate_slots(request, request.num_tokens - request.num_computed_tokens) is None:
                return tables
            tables.append([block.block_id for block in manager.tables[request.request_id]])
            request.append(step)
            manager.take_events()
        if request.resumable:
            return tables
        request.status = Status.FINISHED_STOPPED
        manager.free(request)
        manager.take_events()
        return tables

    def _update_request_as_session(self, session: Request, update: list[int]) -> None:
        """A session goes on with more input, and without the token that it has sampled last."""
        session.all_token_ids[-1:] = update
        session._output_token_ids.clear()
        session.num_prompt_tokens = session.num_tokens


class CoreEngineProcManager:
    """Processes of engines, and how long each end has waited for them: None for vLLM's own few seconds."""

    def __init__(self, *, vllm_config: Any) -> None:
        self.config, self.waited = vllm_config, list[float | None]()

    def shutdown(self, timeout: float | None = None) -> None:
        """End them."""
        self.waited.append(timeout)


def engines(monkeypatch: pytest.MonkeyPatch, grace: float = 0) -> type[CoreEngineProcManager]:
    """Let their module be imported, on a platform where vLLM gives them so many seconds; returns the class."""
    contents = dict(vars(CoreEngineProcManager))
    made: type[CoreEngineProcManager] = type("CoreEngineProcManager", (), contents)
    module: Any = ModuleType(ENGINES)
    module.CoreEngineProcManager = made
    module.get_engine_process_shutdown_timeout = lambda _, timeout: grace or timeout
    monkeypatch.setitem(sys.modules, ENGINES, module)
    return made


class EngineCore:
    """Makes a scheduler of a class that its configuration names."""

    def __init__(self, vllm_config: Any) -> None:
        self.scheduler = vllm_config.scheduler_cls()


def core(monkeypatch: pytest.MonkeyPatch) -> type[EngineCore]:
    """Let its module be imported; returns the class."""
    made: type[EngineCore] = type("EngineCore", (), dict(vars(EngineCore)))
    module: Any = ModuleType(CORE)
    module.EngineCore = made
    monkeypatch.setitem(sys.modules, CORE, module)
    return made


def _hash_of(name: str) -> Callable[[Any], bytes]:
    return lambda _: bytes({"sha256": 32, "xxhash": 16}.get(name, 20))


def install(
    monkeypatch: pytest.MonkeyPatch, version: str = "0.33.0", *, scheduler: bool = True
) -> type[Scheduler]:
    """Let it be imported as `vllm`; returns the class of its scheduler, which is nobody else's."""
    made: type[Scheduler] = type("Scheduler", (Scheduler,), {"__init__": Scheduler.__init__})
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": version},
        "vllm.utils.hashing": {"get_hash_fn_by_name": _hash_of},
        "vllm.v1.core.single_type_kv_cache_manager": {
            "FullAttentionManager": FullAttentionManager,
            "SlidingWindowManager": SlidingWindowManager,
            "ChunkedLocalAttentionManager": type("ChunkedLocalAttentionManager", (), {}),
            "MambaManager": MambaManager,
            "RSWAManager": type("RSWAManager", (FullAttentionManager,), {}),
        },
        **({SCHEDULER: {"Scheduler": made}} if scheduler else {}),
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    return made
