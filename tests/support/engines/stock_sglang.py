"""SGLang's own scheduler and a small model with random weights, on a CPU, in this process.

Runs where SGLang is installed.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.engines import cpu_sglang  # noqa: F401  before anything of SGLang's

# isort: split

import torch
from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisherFactory,
    NullEventPublisher,
)
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler, SpawnRanks, publish
from sglang.srt.mem_cache.l2_transfer import L2TransferEngine, TransferCompletion
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs

__all__ = ["HookRegistry", "StockSGLang"]
VOCABULARY = 64
WINDOW = 12
"""Tokens that a layer of the model "sliding" looks back."""
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}
_KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": {"is_hybrid_swa": True, "hybrid_layer_pattern": [0, 1], "sliding_window_size": WINDOW},
}


def _copy_nothing() -> None:
    """Let a hierarchical cache decide as ever; what it copies between levels is not there, as its kernels are not."""
    ALLOC_MEMORY_FUNCS["cpu"] = lambda dims, dtype, device, **_: torch.zeros(dims, dtype=dtype, device=device)

    def done(*_: Any, transfer_layer_id_max: int = 0, on_layer_done: Any = None, **__: Any) -> Any:
        for layer in range(transfer_layer_id_max if on_layer_done else 0):
            on_layer_done(layer)
        return TransferCompletion(_Event(), _Event(), timing_enabled=False)

    L2TransferEngine.submit_device_to_host = L2TransferEngine.submit_host_to_device = done


def _attend_nothing() -> None:
    """Let attention return its queries: SGLang's on a CPU reads sliding windows where full attention's pages lie."""
    TorchNativeAttnBackend.forward_extend = TorchNativeAttnBackend.forward_decode = lambda _, q, *__, **___: q


class _Event:
    """What a copy is done with, at once."""

    def query(self) -> bool:
        """It is."""
        return True

    def synchronize(self, *_: Any) -> None:
        """It need not be waited for."""

    record = wait = synchronize


class StockSGLang:
    """A scheduler that `load_plugins` has been called for; requests come to it from here instead of a socket."""

    def __init__(self, directory: Path, tokens: int, model: str = "full", **settings: Any) -> None:
        path = directory / "model"
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(_MODEL | _KINDS[model]))
        EventPublisherFactory._registry["nobody"] = lambda **_: NullEventPublisher()
        _copy_nothing()
        if model != "full":
            _attend_nothing()
        load_plugins()
        arguments = ServerArgs(
            model_path=str(path),
            load_format="dummy",
            device="cpu",
            dtype="float32",
            attention_backend="torch_native",
            sampling_backend="pytorch",
            skip_tokenizer_init=True,
            max_total_tokens=tokens,
            mem_fraction_static=0.5,
            kv_events_config=json.dumps({"publisher": "nobody"}),
            random_seed=7,
            **{"disable_overlap_schedule": True, "max_running_requests": 8, **settings},
        )
        torch.set_num_threads(1)
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
        self.scheduler = Scheduler(arguments, PortArgs.init_new(arguments))
        self.cache = self.scheduler.tree_cache
        self.contents: dict[str, Counter[int]] = {"GPU": Counter(), "CPU_PINNED": Counter()}
        """What the cache holds in each medium, by SGLang's own events: hashes of pages."""
        self._take_events = self.cache.take_events
        self.cache.take_events = self.follow_events
        self.requests: dict[str, Req] = {}
        """All that came and have not left."""
        self.outputs: dict[str, list[int]] = {}
        """What each was answered with in the end."""

    def follow_events(self) -> list[Any]:
        """What SGLang tells of its cache since the last time; it is folded into `contents`."""
        events: list[Any] = self._take_events()
        for event in events:
            match event:
                case AllBlocksCleared():
                    for medium in self.contents.values():
                        medium.clear()
                case BlockStored():
                    self.contents[event.medium].update(event.block_hashes)
                case BlockRemoved():
                    self.contents[event.medium].subtract(event.block_hashes)
        return events

    @property
    def attached(self) -> Any:
        """What listens, if it is recorded."""
        return getattr(self.scheduler, "_kvcache_attached", None)

    def add(
        self,
        name: str,
        tokens: list[int],
        output: int,
        *,
        salt: str | None = None,
        key: str | None = None,
        priority: int | None = None,
    ) -> None:
        """A request comes."""
        sampling = SamplingParams(max_new_tokens=output, temperature=0, ignore_eos=True)
        sampling.normalize(None)
        self.scheduler.handle_generate_request(
            TokenizedGenerateReqInput(
                rid=name,
                input_text="",
                input_ids=array("q", tokens),
                input_embeds=None,
                mm_inputs=None,
                token_type_ids=None,
                sampling_params=sampling,
                return_logprob=False,
                logprob_start_len=-1,
                top_logprobs_num=0,
                token_ids_logprob=None,
                stream=False,
                cache_salt=salt,
                extra_key=key,
                priority=priority,
            )
        )
        self.requests[name] = self.scheduler.waiting_queue[-1]

    def abort(self, name: str) -> None:
        """A client goes away."""
        waits = any(each.rid == name for each in self.scheduler.waiting_queue)
        self.scheduler.abort_request(AbortReq(rid=name))
        if waits:
            del self.requests[name]

    def serve(self, before_step: Callable[[], bool]) -> None:
        """Run SGLang's event loop; before each step `before_step` is called, until it returns false."""
        scheduler = self.scheduler

        def ingest() -> None:
            for name, request in list(self.requests.items()):
                if request.finished():
                    self.outputs[name] = list(request.output_ids)
                    del self.requests[name]
            scheduler.gracefully_exit = not before_step()

        scheduler.ingest_requests = ingest
        with torch.no_grad():
            scheduler.run_event_loop()
        scheduler.gracefully_exit = False

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return bool(self.scheduler.is_fully_idle())
