"""A kvcache manager in place of the KV cache manager of a vLLM scheduler, for models that it can serve.

Unlike a recorder it is part of the engine: what it cannot serve is refused when the engine starts, and its errors are
the engine's. The log is closed in order all the same.
"""

from __future__ import annotations

import importlib
import logging
from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any

from kvcache import KVCacheManager
from kvcache.errors import Unsupported
from kvcache.integrations.attachment import Attachment
from kvcache.integrations.settings import MODE, RECORD, RecorderSettings, recorder_settings
from kvcache.integrations.vllm.attached import close_with, config_of, known_version, rank_of
from kvcache.integrations.vllm.manager import VLLMCacheManager

_INSTEAD = f"record vLLM's own manager with {MODE}={RECORD}, the default"
_log = logging.getLogger("vllm.kvcache")


def replace_manager(scheduler: Any, given: object, directory: str | None) -> None:
    """Give a new scheduler a kvcache manager. Raises `Unsupported`, ConfigError and the errors of a log
    or sinks that cannot be opened.
    """
    known_version()
    for holds, what in _unsupported(scheduler):
        if holds:
            raise Unsupported(f"{MODE}=manager with {what}", _INSTEAD)
    asked = recorder_settings(given, directory, rank_of(scheduler.vllm_config.parallel_config), manages=True)
    attachment = _replace(scheduler, asked)
    close_with(scheduler, attachment)
    _log.info("The KV cache is managed by kvcache: %s", asked.outputs)


def _unsupported(scheduler: Any) -> list[tuple[bool, str]]:
    """Return what cannot be served, and whether it is wanted."""
    config, stock = scheduler.vllm_config, scheduler.kv_cache_manager
    kinds = importlib.import_module("vllm.v1.core.single_type_kv_cache_manager")
    groups = stock.coordinator.single_type_managers
    return [
        (len(groups) != 1, f"a model with {len(groups)} groups of layers"),
        (
            any(type(each) is not kinds.FullAttentionManager for each in groups),
            f"layers as those of {', '.join(type(each).__name__ for each in groups)}",
        ),
        (scheduler.is_encoder_decoder, "a model with an encoder"),
        (scheduler.num_sampled_tokens_per_step > 1 or config.model_config.is_diffusion, "a diffusion model"),
        (
            scheduler.use_eagle or scheduler.num_lookahead_tokens > 0,
            "speculation by another model, as EAGLE, instead of n-grams",
        ),
        (scheduler.connector is not None, "a KV connector"),
        (scheduler.dcp_world_size > 1, "decode context parallelism"),
        (scheduler.enable_kv_cache_events, "vLLM's own KV events (sinks publish ours)"),
        (
            scheduler.needs_kv_cache_zeroing,
            "a cache of mixed precision, whose blocks vLLM overwrites with zeros",
        ),
        (scheduler.kv_metrics_collector is not None, "metrics of the residency of blocks"),
        (scheduler.aux_output_connector is not None, "auxiliary outputs of the model"),
    ]


def _replace(scheduler: Any, asked: RecorderSettings) -> Attachment:
    stock = scheduler.kv_cache_manager
    config = config_of(
        asked,
        scheduler,
        0,
        enable_block_reuse=stock.enable_caching,
        append_only_tables=True,
        keep_reservations=True,
    )
    with asked.opened_log(config) as (log, failed):
        manager = KVCacheManager(config, log=log, sinks=asked.sinks)
        failed.callback(manager.close)
        by_priority = scheduler.policy.value == "priority"
        copy_type = importlib.import_module("vllm.v1.core.kv_cache_utils").KVCacheBlockCopy
        late = by_priority or config.enable_partial_reuse
        adapter = VLLMCacheManager(manager, stock, copy_type, late=late)
        attachment = Attachment(adapter, log, _log)
    scheduler.kv_cache_manager = adapter
    _refuse_sessions(scheduler)
    for name in ("schedule", "update_from_output", "finish_requests"):
        attachment.wrap(scheduler, name, _closing(attachment, getattr(scheduler, name)))
    return attachment


def _closing(attachment: Attachment, method: Callable[..., Any]) -> Callable[..., Any]:
    """Close the log as soon as a method raises: the engine ends, and its process may be killed."""

    def closing(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except BaseException:
            attachment.close()
            raise

    return closing


def _refuse_sessions(scheduler: Any) -> None:
    """Let requests that are to get further input end with an error, instead of the engine."""
    method = scheduler.add_request

    @wraps(method)
    def add_request(request: Any) -> None:
        refused, request.resumable = request.resumable, False
        method(request)
        if refused:
            _log.warning("A request with streaming input is refused: %s", _INSTEAD)
            request.streaming_queue = deque()  # for further input that comes before it has ended
            # VLLM ends these at the next step, with an error for the client.
            scheduler.encoder_cache_mismatch_reqs.add(request.request_id)

    scheduler.add_request = add_request
