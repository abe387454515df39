"""Warm restarts: the log lists the blocks in secondary, and its checksums verify which of them are intact."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from events.log import LogWriter
from events.types import PRIMARY, SECONDARY, StateExported
from kvcache.config import KVCacheConfig
from kvcache.device.memory import served_layout
from kvcache.device.secondary_file import DEPENDS_ON
from kvcache.errors import Unsupported, UsageError
from kvcache.fold.state import CacheState
from kvcache.fold.survivors import Recompute, Survey, find_survivors
from kvcache.record.journal import cache_created
from kvcache.record.outputs import LogTarget, log_directory, open_log
from kvcache.replay import replay

if TYPE_CHECKING:
    from kvcache.device.secondary_file import SecondaryFile
    from kvcache.pools import Pools


@dataclass(eq=False, repr=False)
class LogOfOtherCache(UsageError):
    """The log is of a cache with other settings, with another meaning of its blocks. Nothing was changed.

    `what` names the difference.
    """

    path: Path
    what: str
    text = (
        "{path} is the log of another cache: {what}; use the settings that it was created with, or choose "
        "another log and another secondary_path"
    )


@dataclass(frozen=True, slots=True)
class Restored:
    """Result of recovering secondary."""

    survey: Survey
    """Counts of blocks of all windows together."""
    replay_seconds: float
    """Time to read the log."""
    verify_seconds: float
    """Time to read the blocks, compare their checksums, and recompute others."""
    verified_bytes: int
    """Bytes of blocks read."""
    state: StateExported
    """Initial state of the cache."""


def config_of(state: object) -> KVCacheConfig:
    """Return the settings of a replayed state, to continue with; see `KVCacheManager.resume`, which raises the same."""
    if not isinstance(state, CacheState):
        raise UsageError(
            f"state must be a CacheState, such as replay.replay(directory).state, not {type(state).__name__}"
        )
    if state.created is None or not state.tokens_recorded:
        instead = "replay a log that records tokens, up to its first batch or later"
        raise Unsupported("resuming from this state", instead)
    if state.created.engine:
        what = f"resuming a cache that {state.created.engine} managed"
        raise Unsupported(
            what, "start with an empty one; `kvcache whatif` shows what this manager would have done"
        )
    config = KVCacheConfig.model_validate_json(state.created.config)
    # "auto" was resolved by the recorded cache.
    return config.model_copy(update={"block_hash": state.hashing.name})


@contextmanager
def reopened(
    config: KVCacheConfig, log: LogTarget, pools: Pools | None, recompute: Recompute | None
) -> Iterator[tuple[LogWriter, Restored | None]]:
    """Open what a manager continues: its log, and what was recovered; None if nothing can be.

    Raises what `KVCacheManager.open` does. If anything fails, also in the body, a log that was opened here is closed.
    """
    file = _file_of(config, pools)
    if log is None:
        raise UsageError("a log is required: only the log knows the content of the secondary level")
    writer = log if isinstance(log, LogWriter) else open_log(log_directory(log), config.log, resume=True)
    try:
        restored = None
        if file is not None and writer.next_seq:
            restored = _restored(config, writer.directory, file, recompute)
        yield writer, restored
    except BaseException:
        if writer is not log:
            with suppress(Exception):
                writer.close()
        raise


def _file_of(config: KVCacheConfig, pools: Pools | None) -> SecondaryFile | None:
    if not isinstance(config, KVCacheConfig):
        raise UsageError(f"config must be a KVCacheConfig, not {type(config).__name__}")
    if config.secondary_path is None:
        return None
    if not config.log.record_tokens:
        instead = "record tokens in the log (log.record_tokens), which blocks are found by"
        raise Unsupported("a warm restart from a log without tokens", instead)
    if pools is None:
        raise UsageError(
            "pools are required, since the blocks are in a file: pass Pools(Layout.of(config), "
            "secondary_path=config.secondary_path)"
        )
    return pools.secondary_file


def _restored(
    config: KVCacheConfig, directory: Path, file: SecondaryFile, recompute: Recompute | None
) -> Restored | None:
    started = time.perf_counter()
    state = replay(directory).state
    replayed = time.perf_counter()
    if state.created is None:
        return None
    _refuse_other(config, directory, state)
    before = file.bytes_read
    primary = [group.num_blocks[PRIMARY] for group in served_layout(config).groups]
    exported, survey = find_survivors(state, file.checksums, primary, recompute)
    verified = time.perf_counter()
    return Restored(survey, replayed - started, verified - replayed, file.bytes_read - before, exported)


def _refuse_other(config: KVCacheConfig, directory: Path, state: CacheState) -> None:
    """Raise unless the blocks of the log mean the same here."""
    there, here = state.created, cache_created(config, served_layout(config), published=True)
    assert there is not None
    if not state.tokens_recorded:
        instead = "start a new log that records them (log.record_tokens)"
        raise Unsupported("a warm restart from a log without tokens", instead)
    if there.content_id != here.content_id:
        raise LogOfOtherCache(directory, f"it has another model, or {DEPENDS_ON}")
    was, given = ([group.num_blocks[SECONDARY] for group in each.groups] for each in (there, here))
    if given != was:
        what = f"it has {was} secondary blocks per window, but these settings give {given}"
        raise LogOfOtherCache(directory, what)
    policy = KVCacheConfig.model_validate_json(there.config).eviction_policy
    for name, has, wanted in (
        ("block_hash", there.hash_algorithm, here.hash_algorithm),
        ("eviction_policy", policy, config.eviction_policy),
    ):
        if has != wanted:
            raise LogOfOtherCache(directory, f"its {name} is {has}, but these settings give {wanted}")
