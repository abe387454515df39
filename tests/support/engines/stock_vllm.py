"""vLLM's own scheduler and KV cache manager, with a worker that invents tokens. Runs where vLLM is installed."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from math import lcm
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

Served = tuple[list[int], list[int]]
"""A prompt, and what is sampled for it."""


def _config(
    model: Path,
    longest: int,
    scheduling: SchedulerConfig,
    block_size: int,
    hashing: str,
    drafts: int,
    publishes_events: bool,
    additional: dict[str, Any] | None,
    on_failure: str | None,
) -> VllmConfig:
    config = ModelConfig(
        model=str(model),
        tokenizer=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=longest,
    )
    speculative = None
    if drafts:
        speculative = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=drafts,
            prompt_lookup_max=3,
            target_model_config=config,
            target_parallel_config=ParallelConfig(),
        )
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null") if publishes_events else None
    transfer = None
    if on_failure is not None:
        transfer = KVTransferConfig(
            kv_connector="Elsewhere",
            kv_connector_module_path="tests.support.engines.vllm_connector",
            kv_role="kv_both",
            kv_load_failure_policy=on_failure,
        )
    return VllmConfig(
        model_config=config,
        kv_transfer_config=transfer,
        cache_config=CacheConfig(
            block_size=block_size, enable_prefix_caching=True, prefix_caching_hash_algo=hashing
        ),
        scheduler_config=scheduling,
        device_config=DeviceConfig("cpu"),
        speculative_config=speculative,
        kv_events_config=events,
        additional_config=additional or {},
    )


def _groups(
    sizes: Sequence[int], window: int | None, others: Sequence[str], drafts: int
) -> list[KVCacheGroupSpec]:
    kinds = ["full", *(["sliding"] if window is not None else []), *others]
    return [
        KVCacheGroupSpec([f"{kind}{at}"], _spec(kind, sizes[at % len(sizes)], window, drafts))
        for at, kind in enumerate(kinds)
    ]


def _spec(kind: str, block_size: int, window: int | None, drafts: int) -> Any:
    shape: dict[str, Any] = {
        "block_size": block_size,
        "num_kv_heads": 2,
        "head_size": 32,
        "dtype": torch.float32,
    }
    if kind == "full":
        return FullAttentionSpec(**shape)
    if kind == "sliding":
        return SlidingWindowSpec(sliding_window=window or 2 * block_size, **shape)
    if kind == "chunked":
        return ChunkedLocalAttentionSpec(attention_chunk_size=2 * block_size, **shape)
    return MambaSpec(
        block_size=block_size,
        shapes=((4, 4),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
        num_speculative_blocks=drafts,
    )


class StockVLLM:
    """A scheduler as vLLM makes it, and the steps of an engine without a model."""

    worker: Callable[[Any, Any, Any], None] | None = None
    """Called with the scheduler, what it has scheduled and what was sampled, in the order of execution."""

    def __init__(
        self,
        model: Path,
        blocks: int,
        *,
        block_size: int = 16,
        window: int | None = None,
        runs_ahead: bool = False,
        drafts: int = 0,
        in_flight: int = 8,
        tokens_per_step: int = 64,
        longest: int = 512,
        hashing: str = "sha256",
        additional: dict[str, Any] | None = None,
        chunked: bool = True,
        reserve_all: bool = True,
        by_priority: bool = False,
        publishes_events: bool = False,
        others: Sequence[str] = (),
        retention: int | None = 0,
        on_failure: str | None = None,
        eagle: bool = False,
        steps_in_flight: int = 0,
        factors: Sequence[int] = (1,),
        watermark: float = 0.0,
    ) -> None:
        scheduling = SchedulerConfig(
            max_num_seqs=in_flight,
            max_num_batched_tokens=tokens_per_step,
            max_model_len=longest,
            is_encoder_decoder=False,
            enable_chunked_prefill=chunked,
            async_scheduling=False,
            scheduler_reserve_full_isl=reserve_all,
            policy="priority" if by_priority else "fcfs",
            watermark=watermark,
        )
        self.config = _config(
            model, longest, scheduling, block_size, hashing, drafts, publishes_events, additional, on_failure
        )
        # Not every kind of drafts goes with it for a whole engine; the scheduler does not mind.
        self.config.scheduler_config.async_scheduling = runs_ahead
        self.config.cache_config.num_gpu_blocks = blocks
        self.config.cache_config.prefix_cache_retention_interval = retention
        if eagle:
            # Of the model that makes such drafts the scheduler knows no more than that.
            self.config.speculative_config.method = "eagle"
        made = AsyncScheduler if runs_ahead else Scheduler
        groups = _groups([factor * block_size for factor in factors], window, others, drafts)
        self.scheduler = made(
            vllm_config=self.config,
            kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=block_size * lcm(*factors),
            hash_block_size=block_size,
            log_stats=True,
        )
        hash_of = get_hash_fn_by_name(hashing)
        init_none_hash(hash_of)
        self._hasher: Any = get_request_block_hasher(block_size, hash_of)
        self._drafts, self._ahead, self._in_flight = drafts, runs_ahead, steps_in_flight or int(runs_ahead)
        self._flying: deque[tuple[Any, Any]] = deque()
        self.hits = self.queries = 0
        """As vLLM counts them, of preempted requests, too."""
        self.amid_step = False
        """Whether something was scheduled since outputs came last: the engine has begun to run ahead."""
        self.remembers = False
        self.decisions: list[Any] = []
        """If it remembers them, of each step the tokens of each request that were scheduled, and the tables."""

    def hash_nothing(self) -> None:
        """Hash no blocks of requests from now on, as an engine with a manager of ours."""
        self._hasher = None

    @property
    def attached(self) -> Any:
        """What records it; None: nothing does."""
        return getattr(self.scheduler, "_kvcache_attached", None)

    @property
    def flies(self) -> bool:
        """Whether outputs of steps are still to come."""
        return bool(self._flying)

    @property
    def waits(self) -> bool:
        """Whether a connector has something on its way."""
        return self.scheduler.connector is not None and self.scheduler.connector.busy

    def add(
        self,
        name: str,
        tokens: list[int],
        output: int,
        *,
        salt: str | None = None,
        adapter: tuple[str, int, str] | None = None,
        skip: bool = False,
        priority: int = 0,
        resumable: bool = False,
        embeddings: torch.Tensor | None = None,
    ) -> None:
        """A request comes, or further input of a session. The lowest `priority` is served first, if the scheduler goes
        by them. `resumable`: there may be more input; without, the session with this name ends.
        """
        # Of further input a recorder hears with the next step.
        self.amid_step = self.amid_step or name in self.scheduler.requests
        lora = None if adapter is None else LoRARequest(*adapter)
        params = SamplingParams(max_tokens=output, ignore_eos=True, skip_reading_prefix_cache=skip or None)
        self.scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=None if embeddings is not None else tokens,
                prompt_embeds=embeddings,
                resumable=resumable,
                sampling_params=params,
                pooling_params=None,
                lora_request=lora,
                cache_salt=salt,
                priority=priority,
                block_hasher=self._hasher,
            )
        )

    def abort(self, name: str) -> None:
        """A client has gone away."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self, rng: random.Random) -> bool:
        """One step of the engine, which runs one ahead of its outputs if it is asynchronous; False: nothing to do.

        How many drafts are right, and the tokens, are drawn.
        """
        if not self.scheduler.has_requests() and not self._flying and not self.waits:
            return False

        def sampled(_: str, drafts: int) -> list[int]:
            return [rng.randrange(2) for _ in range(1 + rng.randint(0, drafts))]

        self.serve_step(sampled)
        if self._drafts and not self._ahead:
            names = list(self.scheduler.requests)
            drafts = [[rng.randrange(2) for _ in range(rng.randint(0, self._drafts))] for _ in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))
        return True

    def serve(self, requests: Iterable[Served], most: int) -> Iterator[None]:
        """All of these, of which so many are there at a time: "r0", "r1", ... Yields after each step."""
        coming, left = enumerate(requests), dict[str, Iterator[int]]()

        def sampled(name: str, _: int) -> list[int]:
            return [next(left[name], 0)]

        while True:
            for number, (prompt, output) in islice(coming, most - len(self.scheduler.requests)):
                left[f"r{number}"] = iter(output)
                self.add(f"r{number}", prompt, len(output))
            if not self.scheduler.has_requests() and not self.flies:
                return
            self.serve_step(sampled)
            yield

    def serve_step(self, sampled: Callable[[str, int], list[int]]) -> None:
        """Schedule, and hand over what was `sampled` for a request and so many drafts."""
        scheduled, self.amid_step = 0, True
        if self.scheduler.has_requests() or self.waits:
            output = self.scheduler.schedule()
            scheduled = output.total_num_scheduled_tokens
            if self.remembers:
                self.decisions.append((dict(output.num_scheduled_tokens), self.tables()))
            if scheduled or not self._flying:
                self._flying.append((output, self._outputs(output, sampled)))
                if self.worker is not None:
                    self.worker(self.scheduler, *self._flying[-1])
        if self._flying and (len(self._flying) > self._in_flight or not scheduled):
            self._deliver(*self._flying.popleft())
            self.amid_step = False

    def _outputs(self, output: Any, sampled: Callable[[str, int], list[int]]) -> Any:
        names, drafts = list(output.num_scheduled_tokens), output.scheduled_spec_decode_tokens
        tokens = [
            [] if self.scheduler.requests[name].is_prefill_chunk else sampled(name, len(drafts.get(name, ())))
            for name in names
        ]
        sampled_by = ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, tokens)
        if self.scheduler.connector is not None:
            sampled_by.kv_connector_output = self.scheduler.connector.outcome(output.kv_connector_metadata)
        return sampled_by

    def _deliver(self, output: Any, sampled: Any) -> None:
        for outputs in self.scheduler.update_from_output(output, sampled).values():
            stats = outputs.scheduler_stats
            if stats is not None and stats.prefix_cache_stats is not None:
                counted = stats.prefix_cache_stats
                self.hits += counted.hits + counted.preempted_hits
                self.queries += counted.queries + counted.preempted_queries

    def names(self, group: int = 0) -> Iterator[tuple[int, bytes]]:
        """All that is cached of a group: a block, and its name."""
        pool = self.scheduler.kv_cache_manager.block_pool
        for block in pool.blocks:
            for key in {block.block_hash, *pool.cached_block_hashes_by_block.get(block.block_id, ())}:
                if key is not None and key[-4:] == group.to_bytes(4, "big"):
                    yield block.block_id, bytes(key[:-4])

    def positions(self) -> dict[tuple[int, bytes], int]:
        """How many tokens each block's first name stands for."""
        return {
            (block.block_id, bytes(block.block_hash[:-4])): block.block_hash_num_tokens
            for block in self.scheduler.kv_cache_manager.block_pool.blocks
            if block.block_hash is not None
        }

    def tables(self, group: int = 0) -> dict[str, list[int]]:
        """The blocks of each request that has some; 0 stands for none."""
        blocks = self.scheduler.kv_cache_manager.coordinator.single_type_managers[group].req_to_blocks
        return {name: [block.block_id for block in table] for name, table in blocks.items() if table}
