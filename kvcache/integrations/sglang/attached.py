"""A recorder attached to a scheduler of SGLang and its prefix cache."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from kvcache import KVCacheConfig, Recorder
from kvcache.errors import Unsupported
from kvcache.integrations.attachment import Attachment, describe_error
from kvcache.integrations.settings import RecorderSettings, recorder_settings
from kvcache.integrations.sglang.recording import SGLangRecording
from kvcache.integrations.sglang.windows import SLIDING, window_group

KNOWN = ("0.5.23",)
"""Supported releases."""
ATTACHED = "_kvcache_attached"
_ALLOCATORS = {
    frozenset({0}): ("PagedTokenToKVPoolAllocator", "TokenToKVPoolAllocator"),
    frozenset({0, SLIDING}): ("SWATokenToKVPoolAllocator",),
}
"""Supported allocators by the numbers of SGLang's components."""
_log = logging.getLogger("sglang.kvcache")


def attach(scheduler: Any, directory: str, sinks: list[str]) -> Callable[[Any], None] | None:
    """Record a scheduler's decisions from now on; an unsupported one is refused by a warning. Never raises.

    Returns a callback for each request without room.
    """
    try:
        version = str(importlib.import_module("sglang").__version__)
        if version not in KNOWN:
            raise Unsupported(f"SGLang {version}", f"supported releases: {', '.join(KNOWN)}")
        parallel: Any = importlib.import_module("sglang.srt.runtime_context").get_parallel()
        if parallel.attn_tp_rank or parallel.attn_cp_rank or parallel.pp_rank:
            return None  # the first rank decides the same
        _refuse(scheduler)
        given = {"log": directory} if directory else {}
        asked = recorder_settings({**given, "sinks": sinks}, None, parallel.dp_rank)
        refused = _open(scheduler, asked, f"sglang {version}")
    except Exception as error:  # noqa: BLE001
        _log.warning("The KV cache is not recorded: %s", describe_error(error))
        return None
    _log.info("The KV cache is recorded: %s", asked.outputs)
    return refused


def _refuse(scheduler: Any) -> None:
    """Raise `Unsupported` for an engine that cannot be recorded."""
    context: Any = importlib.import_module("sglang.srt.runtime_context")
    cache, other = scheduler.tree_cache, "there is no workaround yet"
    linker = getattr(cache, "linker", None)
    if scheduler.disable_radix_cache:
        raise Unsupported("an engine without prefix caching", "omit --disable-radix-cache")
    if type(cache).__name__ != "UnifiedRadixCache" or linker is not None:
        raise Unsupported(f"a cache of type {type(cache).__name__}, or one linked to another", other)
    _refuse_layers(scheduler)
    if cache.tree_core.is_eagle:
        raise Unsupported("a radix tree of token pairs, as for EAGLE", "disable EAGLE to record")
    if cache.host_memory_mode != "cache":
        raise Unsupported("host memory used as a buffer", "set --hicache-host-memory-mode cache")
    if context.get_disagg().disaggregation_mode != "null":
        raise Unsupported("prefill/decode disaggregation", other)
    if context.get_serving().enable_streaming_session:
        raise Unsupported("sessions that keep their rows", "leave out --enable-streaming-session")
    if scheduler.enable_hisparse or scheduler.dllm_config is not None or context.get_parallel().dcp_enabled:
        raise Unsupported("HiSparse, a diffusion model, or decode context parallelism", other)


def _refuse_layers(scheduler: Any) -> None:
    """Raise `Unsupported` for layers that cannot be recorded."""
    cache, allocator, other = (
        scheduler.tree_cache,
        scheduler.token_to_kv_pool_allocator,
        "there is no workaround yet",
    )
    kinds = set(map(int, cache.components))
    if type(allocator).__name__ not in _ALLOCATORS.get(frozenset(kinds), ()):
        raise Unsupported("layers with states, or other pools than one for each kind of layers", other)
    if SLIDING in kinds and (cache.cache_controller is not None or allocator.swa_req_ring):
        raise Unsupported("sliding windows with hierarchical cache, or in a ring for each request", other)


def _open(scheduler: Any, asked: RecorderSettings, engine: str) -> Callable[[Any], None]:
    """Open log and sinks as requested, and attach."""
    config, cache = _config(asked, scheduler), scheduler.tree_cache
    with asked.opened_log(config) as (log, failed):
        windows = scheduler.model_config.swa_attention_layer_ids or ()
        groups = [window_group(cache, len(windows))] if SLIDING in cache.components else []
        recorder = Recorder(
            config, engine=engine, log=log, sinks=asked.sinks, first_block_id=1, groups=groups
        )
        failed.callback(recorder.close)
        recording = SGLangRecording(recorder, cache)
        attachment = Attachment(recording, log, _log)
        failed.callback(attachment.release)
        attachment.follow(cache, "maybe_hand_to_session", recording.extended)
        attachment.follow(cache, "checkpoint_into_tree", recording.inserted)
        attachment.precede(cache, "checkpoint_into_tree", recording.inserting)
        attachment.precede(cache, "on_release", recording.released)
        attachment.precede(cache, "_free_values", recording.freed)
        if groups:
            attachment.precede(cache, "_apply_cache_action", recording.acting)
        attachment.follow(cache, "reset", recording.reset)
        attachment.follow(cache, "_execute_kv_backup", recording.backed_up)
        attachment.precede(cache.tree_core, "commit_load_back", recording.loading)
        attachment.follow(scheduler, "process_batch_result", recording.stepped)
    setattr(scheduler, ATTACHED, attachment)
    attachment.close_at_end()
    return partial(attachment.call, recording.refused)


def _config(asked: RecorderSettings, scheduler: Any) -> KVCacheConfig:
    cache, model = scheduler.tree_cache, scheduler.model_config
    size, host = cache.tree_core.page_size, 0
    if cache.cache_controller is not None:
        host = cache.cache_controller.mem_pool_host.logical_size // size
    return asked.config(
        tokens_per_block=size,
        primary_blocks=scheduler.token_to_kv_pool_allocator.size_full // size,
        secondary_blocks=host,
        max_sequence_length=cache.req_to_token_pool.req_to_token.shape[1],
        num_layers=model.num_hidden_layers - len(model.swa_attention_layer_ids or ()),
        model=asked.settings.get("model", str(model.model_path)),
    )
