"""An audit as JSON: ages in seconds, times as ISO 8601 and in ns, levels by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from events.structs import LEVEL_NAMES
from events.types import Namespace, RequestId
from kvcache.audit.histogram import Ages
from kvcache.audit.reasons import Reason
from kvcache.audit.totals import Audit, HotPrefix, Verdict, verdict_on
from kvcache.cli.times import iso


def to_json(audit: Audit) -> dict[str, Any]:
    """All of an audit."""
    return {
        "first_seq": audit.first_batch,
        "first_ts": audit.first_at,
        "first_time": iso(audit.first_at),
        "last_seq": audit.last_batch,
        "last_ts": audit.last_at,
        "last_time": iso(audit.last_at),
        "tokens_recorded": audit.tokens_recorded,
        "requests": audit.requests,
        "refusals": audit.refusals,
        "prompt_tokens": audit.prompt_tokens,
        "reused_tokens": audit.reused,
        "loaded_tokens": audit.loaded,
        "not_loaded_tokens": audit.not_loaded,
        "engine_counts": _counts_json(audit),
        "reasons": reasons_json(audit.reasons),
        "namespaces": [
            {**_namespace_json(namespace), "reasons": reasons_json(tokens)}
            for namespace, tokens in audit.by_namespace.items()
        ],
        "lost_by_group": [
            {"group": group, "kind": kind, "tokens": tokens}
            for (group, kind), tokens in sorted(audit.lost_by_group.items())
        ],
        "over_time": _time_json(audit),
        "evictions": _evictions_json(audit),
        "levels": {
            name: {
                "hit_ages": ages_json(lives.hit_ages),
                "eviction_ages": ages_json(lives.eviction_ages),
                "evicted": lives.evicted,
                "recomputed_tokens": lives.recomputed,
                **_verdict_json(verdict_on(audit, level)),
            }
            for level, (name, lives) in enumerate(zip(LEVEL_NAMES, audit.levels, strict=True))
        },
        "blocks": _blocks_json(audit),
        "duplicated_tokens": audit.computed_twice,
        "prefixes": [_prefix_json(each) for each in audit.prefixes],
    }


def _blocks_json(audit: Audit) -> dict[str, Any]:
    return {
        "stored": audit.stored,
        "never_reused": audit.never_reused,
        "uses_when_gone": audit.uses.tolist(),
        "lifetimes": ages_json(audit.lifetimes),
        "offloaded": audit.offloaded,
        "onboarded": audit.onboarded,
        "taken_over": audit.taken_over,
    }


def _evictions_json(audit: Audit) -> dict[str, Any]:
    return {
        "recomputed_tokens": sum(audit.lost_by_priority.values()),
        "by_priority": {str(priority): tokens for priority, tokens in sorted(audit.lost_by_priority.items())},
        "ages": ages_json(audit.lost_ages),
        "worst": [
            {
                "seq": each.batch,
                "ts": each.at,
                "time": iso(each.at),
                "window": each.window,
                "for_request": each.for_request,
                "recomputed_tokens": each.tokens,
            }
            for each in audit.worst
        ],
    }


def _verdict_json(verdict: Verdict | None) -> dict[str, Any]:
    if verdict is None:
        return {"verdict": None, "curves_cross": None}
    return {"verdict": verdict.size, "curves_cross": verdict.crosses}


def reasons_json(tokens: npt.NDArray[np.int64]) -> dict[str, int]:
    """Prompt tokens by reason."""
    return {reason.label: int(tokens[reason]) for reason in Reason}


def _namespace_json(namespace: Namespace) -> dict[str, Any]:
    salt = namespace.salt_digest
    return {
        "lora_id": namespace.lora_id,
        "lora_name": namespace.lora_name,
        "salt_digest": salt.hex() if salt is not None else None,
    }


def _counts_json(audit: Audit) -> dict[str, Any] | None:
    if audit.counts is None:
        return None
    (prompt_tokens, reused_tokens), theirs = audit.counts
    return {
        "prompt_tokens": theirs[0],
        "reused_tokens": theirs[1],
        "in_log": {"prompt_tokens": prompt_tokens, "reused_tokens": reused_tokens},
    }


def _time_json(audit: Audit) -> dict[str, Any]:
    timeline = audit.over_time
    if timeline.start is None:
        return {"ts": None, "time": None, "seconds": None, "parts": [], "clock_set_back": []}
    return {
        "ts": timeline.start,
        "time": iso(timeline.start),
        "seconds": timeline.width / 1e9,
        "parts": [reasons_json(row) for row in timeline.rows],
        "clock_set_back": audit.set_back,
    }


def ages_json(ages: Ages) -> dict[str, Any]:
    """Quantiles, and the histogram."""
    return {
        "count": ages.total,
        "p10_seconds": ages.quantile(0.1),
        "p50_seconds": ages.quantile(0.5),
        "p90_seconds": ages.quantile(0.9),
        "histogram": [{"up_to_seconds": edge, "count": blocks} for edge, blocks in ages.rows()],
    }


def _prefix_json(prefix: HotPrefix) -> dict[str, Any]:
    stored_by: RequestId | None = prefix.stored_by
    return {
        "number": prefix.number,
        "continues": prefix.parent,
        "first": prefix.first,
        "stop": prefix.stop,
        "times": prefix.times,
        "served_tokens": prefix.tokens_served,
        "last_used": {"ts": prefix.last_used, "time": iso(prefix.last_used)},
        "stored_by": stored_by,
        "name": prefix.name,
        "cached_at_end": prefix.cached,
    }
