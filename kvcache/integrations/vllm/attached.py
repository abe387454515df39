"""A recorder attached to a scheduler of vLLM by wrapped methods, until the first error."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import re
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from events.tokens.names import NAMED_BY_ENGINE
from kvcache import KVCacheConfig, Recorder
from kvcache.errors import Unsupported
from kvcache.integrations.attachment import Attachment, describe_error
from kvcache.integrations.settings import RecorderSettings, recorder_settings
from kvcache.integrations.vllm.groups import layer_groups
from kvcache.integrations.vllm.recording import Recording

KNOWN = ("0.32", "0.33")
"""Supported releases."""
ATTACHED = "_kvcache_attached"
_log = logging.getLogger("vllm.kvcache")


def attach(scheduler: Any, given: object, directory: str | None) -> None:
    """Record a scheduler's decisions from now on; an unsupported one is refused by a warning. Never raises."""
    try:
        version = known_version()
        manager = scheduler.kv_cache_manager
        group = _recorded_group(manager)
        asked = recorder_settings(given, directory, rank_of(scheduler.vllm_config.parallel_config))
        _open(scheduler, group, asked, f"vllm {version}")
    except Exception as error:  # noqa: BLE001
        _log.warning("The KV cache is not recorded: %s", describe_error(error))
        return
    _log.info("The KV cache is recorded: %s", asked.outputs)


def known_version() -> str:
    """Return vLLM's version. Raises `Unsupported` for an unknown release."""
    version = str(importlib.import_module("vllm").__version__)
    numbers = re.match(r"\d+\.\d+", version)
    if numbers is None or numbers[0] not in KNOWN:
        raise Unsupported(f"vLLM {version}", f"supported releases: {', '.join(KNOWN)}")
    return version


def rank_of(parallel: Any) -> int | None:
    """Return the data-parallel rank; None: there is one engine."""
    # vLLM configures ranks that need not wait for each other as if each were alone.
    of_several = multiprocessing.current_process().name.startswith("EngineCore_DP")
    rank = int(parallel.data_parallel_index)
    return rank if rank or of_several or parallel.data_parallel_size > 1 else None


def _recorded_group(manager: Any) -> int:
    """Return the number of the recorded group of layers. Raises `Unsupported` if there is none."""
    managers = manager.coordinator.single_type_managers
    kinds = importlib.import_module("vllm.v1.core.single_type_kv_cache_manager")
    full = [at for at, each in enumerate(managers) if type(each) is kinds.FullAttentionManager]
    if not full:
        raise Unsupported("a model without full-attention layers", "there is no workaround yet")
    if getattr(manager.coordinator, "enable_partial_hash_hits", False):
        raise Unsupported("hits that end inside a block", "set --prefix-match-unit to the block size")
    if not manager.enable_caching:
        raise Unsupported("an engine without prefix caching", "omit --no-enable-prefix-caching")
    size, unit = managers[full[0]].block_size, manager.block_pool.hash_block_size
    if size % unit:
        raise Unsupported(
            f"blocks of {size} tokens with hashes of {unit} tokens", "there is no workaround yet"
        )
    return int(full[0])


def _open(scheduler: Any, group: int, asked: RecorderSettings, engine: str) -> None:
    """Open log and sinks as requested, and attach."""
    config, names = config_of(asked, scheduler, group), _name_bytes(scheduler.vllm_config)
    others = layer_groups(scheduler, group)
    if others and names is None:
        raise Unsupported(
            "layers of several kinds with this hash algorithm", "set --prefix-caching-hash-algo sha256"
        )
    with asked.opened_log(config) as (log, failed):
        recorder = Recorder(
            config,
            engine=engine,
            log=log,
            sinks=asked.sinks,
            first_block_id=1,
            name_bytes=names,
            groups=others,
            drops_last_hit=group in scheduler.kv_cache_manager.coordinator.eagle_group_ids,
        )
        failed.callback(recorder.close)
        recording = Recording(recorder, scheduler.kv_cache_manager, group, named=names is not None)
        attachment = Attachment(recording, log, _log)
        failed.callback(attachment.release)
        _listen(attachment, scheduler, recording, in_groups=bool(others))
    close_with(scheduler, attachment)


def close_with(scheduler: Any, attachment: Attachment) -> None:
    """Close an attachment when its scheduler's engine ends."""
    setattr(scheduler, ATTACHED, attachment)
    _close_before(type(scheduler), "shutdown", lambda ending: ending)
    core = sys.modules.get("vllm.v1.engine.core")
    if core is not None:
        # The engine stops its workers before it stops the scheduler, and is killed if that takes long.
        _close_before(core.EngineCore, "shutdown", lambda ending: getattr(ending, "scheduler", None))
    attachment.close_at_end()


def config_of(asked: RecorderSettings, scheduler: Any, group: int, **decided: Any) -> KVCacheConfig:
    """Return the settings of a group of layers: requested ones, and those that vLLM or the caller has decided."""
    manager = scheduler.kv_cache_manager
    return asked.config(
        tokens_per_block=manager.coordinator.single_type_managers[group].block_size,
        # Block 0 is never allocated.
        primary_blocks=manager.block_pool.num_gpu_blocks - 1,
        max_sequence_length=scheduler.max_model_len,
        num_layers=len(scheduler.kv_cache_config.kv_cache_groups[group].layer_names) or 1,
        model=asked.settings.get("model", str(scheduler.vllm_config.model_config.model)),
        **decided,
    )


def _name_bytes(config: Any) -> int | None:
    """Return the length of vLLM's own names of blocks; None: unsupported in a log."""
    hashing = importlib.import_module("vllm.utils.hashing")
    size = len(hashing.get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)(0))
    return size if size in NAMED_BY_ENGINE else None


def _listen(attachment: Attachment, scheduler: Any, recording: Recording, *, in_groups: bool) -> None:
    """Attach each method of a recording to the calls that it records."""
    manager, follow, precede = scheduler.kv_cache_manager, attachment.follow, attachment.precede
    follow(manager.block_pool, "get_new_blocks", recording.taken)
    if in_groups:
        follow(manager, "allocate_slots", recording.allocated_in_groups)
        precede(manager.block_pool, "cache_full_blocks", recording.naming)
        precede(manager.block_pool, "cache_partial_block", recording.naming)
        follow(manager.block_pool, "_insert_block_hash", recording.name_given)
        follow(manager.block_pool, "_remove_cached_block_hashes", recording.names_taken)
        precede(manager, "allocate_slots", recording.allocating)
        precede(manager, "remove_skipped_blocks", recording.settle)
        follow(manager, "remove_skipped_blocks", recording.skipped)
    else:
        _follow_allocations(attachment, manager, recording.allocated)
    precede(manager, "free", recording.freed)
    precede(manager, "pop_blocks_for_free", recording.freed)
    follow(manager, "reset_prefix_cache", recording.reset)
    follow(manager, "evict_blocks", recording.unnamed)
    follow(manager, "make_prefix_cache_stats", recording.counted)
    follow(manager, "take_events", recording.stepped)
    precede(scheduler, "_update_request_as_session", recording.continuing)
    follow(scheduler, "_update_request_as_session", recording.continued)


def _follow_allocations(attachment: Attachment, manager: Any, record: Callable[..., None]) -> None:
    """Follow the method that is called for each request in each step; mostly it allocates nothing."""
    method, nothing = manager.allocate_slots, manager.empty_kv_cache_blocks

    def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(request, *args, **kwargs)
        # Blocks for tokens loaded from outside are not in the result.
        if result is not nothing or kwargs.get("num_external_computed_tokens"):
            attachment.call(record, result, request, *args, **kwargs)
        return result

    attachment.wrap(manager, "allocate_slots", allocate_slots)


def _close_before(owner: Any, name: str, scheduler_of: Callable[[Any], Any]) -> None:
    """Close the attachment before a method of a class runs."""
    method = getattr(owner, name, None)
    if method is None or getattr(method, "kvcache", False):
        return

    @wraps(method)
    def closing(self: Any, *args: Any, **kwargs: Any) -> Any:
        attached = getattr(scheduler_of(self), ATTACHED, None)
        if attached is not None:
            attached.close()
        return method(self, *args, **kwargs)

    closing.kvcache = True  # type: ignore[attr-defined]
    setattr(owner, name, closing)
