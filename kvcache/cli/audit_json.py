"""An audit as JSON: ages in seconds, times as ISO 8601 and in ns, levels by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from events.structs import LEVEL_NAMES
from events.types import Namespace
from kvcache.audit.histogram import Ages
from kvcache.audit.reasons import Reason
from kvcache.audit.totals import Audit, verdict_on
from kvcache.cli.output import pick, stamp
from kvcache.phrases import duration, iso


def to_json(audit: Audit) -> dict[str, Any]:
    """All of an audit."""
    return {
        **stamp(audit.first_batch, audit.first_at, "first_"),
        **stamp(audit.last_batch, audit.last_at, "last_"),
        **pick(audit, "tokens_recorded", "requests", "refusals", "prompt_tokens", reused_tokens="reused"),
        **pick(
            audit, loaded_tokens="loaded", not_loaded_tokens="not_loaded", duplicated_tokens="computed_twice"
        ),
        "engine_counts": _counts_json(audit),
        "reasons": reasons_json(audit.reasons),
        "namespaces": [
            {**namespace_json(namespace), "reasons": reasons_json(tokens)}
            for namespace, tokens in audit.by_namespace.items()
        ],
        "lost_by_group": [
            {"group": group, "kind": kind, "tokens": tokens}
            for (group, kind), tokens in sorted(audit.lost_by_group.items())
        ],
        "over_time": _time_json(audit),
        "evictions": {
            "recomputed_tokens": sum(audit.lost_by_priority.values()),
            "by_priority": dict(sorted(audit.lost_by_priority.items())),
            "ages": ages_json(audit.lost_ages),
            "worst": [
                stamp(each.batch, each.at) | pick(each, "window", "for_request", recomputed_tokens="tokens")
                for each in audit.worst
            ],
        },
        "levels": {name: _level_json(audit, level) for level, name in enumerate(LEVEL_NAMES)},
        "blocks": {
            **pick(
                audit, "stored", "never_reused", "offloaded", "onboarded", "taken_over", uses_when_gone="uses"
            ),
            "lifetimes": ages_json(audit.lifetimes),
        },
        "prefixes": [
            pick(each, "number", "first", "stop", "times", "stored_by", "name", continues="parent")
            | pick(each, served_tokens="tokens_served", cached_at_end="cached")
            | {"last_used": {"ts": each.last_used, "time": iso(each.last_used)}}
            for each in audit.prefixes
        ],
    }


def _level_json(audit: Audit, level: int) -> dict[str, Any]:
    lives, verdict = audit.levels[level], verdict_on(audit, level)
    return {
        "hit_ages": ages_json(lives.hit_ages),
        "eviction_ages": ages_json(lives.eviction_ages),
        **pick(lives, "evicted", recomputed_tokens="recomputed"),
        "verdict": None if verdict is None else verdict.size,
        "curves_cross": None if verdict is None else verdict.crosses,
    }


def reasons_json(tokens: npt.NDArray[np.int64]) -> dict[str, int]:
    """Prompt tokens by reason."""
    return {reason.label: int(tokens[reason]) for reason in Reason}


def namespace_json(namespace: Namespace) -> dict[str, Any]:
    """What keeps a prompt apart from others."""
    salt = namespace.salt_digest
    return pick(namespace, "lora_id", "lora_name") | {"salt_digest": None if salt is None else salt.hex()}


def _counts_json(audit: Audit) -> dict[str, Any] | None:
    if audit.counts is None:
        return None
    ours, theirs = (dict(zip(("prompt_tokens", "reused_tokens"), each, strict=True)) for each in audit.counts)
    return {**theirs, "in_log": ours}


def _time_json(audit: Audit) -> dict[str, Any]:
    start, width, rows = audit.over_time.start, audit.over_time.width, audit.over_time.rows
    return {
        "ts": start,
        "time": None if start is None else iso(start),
        "seconds": None if start is None else width / 1e9,
        "parts": [] if start is None else [reasons_json(row) for row in rows],
        "clock_set_back": [] if start is None else audit.set_back,
    }


def ages_json(ages: Ages) -> dict[str, Any]:
    """Quantiles, and the histogram."""
    return {
        "count": ages.total,
        **{f"p{percent}_seconds": ages.quantile(percent / 100) for percent in (10, 50, 90)},
        "histogram": [{"up_to_seconds": edge, "count": blocks} for edge, blocks in ages.rows()],
    }


def ages_in_words(ages: Ages) -> str:
    """The median, and what a tenth lies below and above."""
    low, middle, high = (duration(ages.quantile(part) or 0.0) for part in (0.1, 0.5, 0.9))
    return f"{middle} ({low} to {high})"
