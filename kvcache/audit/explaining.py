"""Why each block of a prompt was not reused, as far as the history knows at that moment."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from events.types import BlocksReused, SequenceAdded
from kvcache.audit.admission import Admission
from kvcache.audit.columns import Ids
from kvcache.audit.history import History
from kvcache.audit.reasons import Reason
from kvcache.audit.running import Running
from kvcache.audit.sharing import Lacking
from kvcache.audit.window import Window


def explain(history: History, event: SequenceAdded, sequence: Running, ids: Ids) -> Admission:
    """The admission, with a reason for each block. What it takes from secondary is told by the events that follow."""
    size, last = history.tokens_per_block, event.num_tokens - 1
    external = event.reused + event.reused_external
    reasons = np.full(-(-last // size), Reason.UNALIGNED, np.int8)
    windows = np.full(len(reasons), -1, np.int8)
    reused = (event.reused - event.reused_partial) // size
    full = last // size
    if not history.reuse:
        reasons[:] = Reason.REUSE_OFF
    elif not history.tokens_recorded:
        reasons[reused:full] = Reason.UNKNOWN
    else:
        reasons[reused:full], windows[reused:full] = _why_not(history, ids[reused:])
        if history.drops_last_hit and (reasons[reused : reused + 2] == Reason.NOT_REUSED).tolist() in _ONE:
            reasons[reused] = Reason.LAST_HIT
    loaded = len(reasons) if external == last else external // size
    reasons[reused:loaded], windows[reused:loaded] = Reason.EXTERNAL, -1
    reasons[:reused] = Reason.PRIMARY
    lacking = _lacking(history, ids, reused)
    if lacking is not None:
        reasons[lacking.first_block : lacking.stop_block] = Reason.NOT_SERVABLE
    return Admission(
        number=sequence.number,
        request_id=event.request_id,
        namespace=event.namespace,
        batch=history.batch,
        at=history.now,
        num_tokens=event.num_tokens,
        reused=event.reused,
        partial=event.reused_partial,
        external=event.reused_external,
        tokens_per_block=size,
        ids=ids,
        reasons=reasons,
        windows=windows,
        lacking=lacking,
    )


def _lacking(history: History, ids: Ids, reused: int) -> Lacking | None:
    """What a group that shares the pool lost of the leading blocks that full attention has."""
    if not history.shared.groups or not history.reuse or history.names is None:
        return None
    gone = np.flatnonzero(history.windows[0].of["level"][ids] < 0)
    stop = int(gone[0]) if len(gone) else len(ids)
    if stop <= reused:
        return None
    history.names.reach(len(history.contents))
    return history.shared.lacking(history.names["name"][ids[:stop]], reused, history.tokens_per_block)


def _why_not(history: History, ids: Ids) -> tuple[Ids, Ids]:
    """Reason and window of blocks that were not reused."""
    reasons = np.full(len(ids), history.not_taken, np.intp)
    windows = np.full(len(ids), -1, np.intp)
    if not len(ids):
        return reasons, windows
    cached = np.array([window.of["level"][ids] >= 0 for window in history.windows])
    missing = np.flatnonzero(~cached.all(axis=0))
    windows[missing] = cached[:, missing].argmin(axis=0)
    for group, window in enumerate(history.windows):
        at = np.flatnonzero(windows == group)
        if not len(at):
            continue
        of, own = window.of, ids[at]
        gone, pending = of["seen"][own] > 0, history.pending["count"][own] > 0
        new = np.where(pending, Reason.BEING_COMPUTED, Reason.NEVER_SEEN)
        new = np.where(cached[:, at].any(axis=0), Reason.OUT_OF_WINDOW, new)
        why = of["why"][own]
        reasons[at] = np.where(gone, np.where(pending, _COMPUTING[why], why), new)
    if history.contents.has_several_namespaces:
        for block in np.flatnonzero(reasons == Reason.NEVER_SEEN).tolist():
            levels = history.windows[windows[block]].of["level"]
            if any(levels[other] >= 0 for other in history.contents.elsewhere(int(ids[block]))):
                reasons[block] = Reason.OTHER_NAMESPACE
    return reasons, windows


def facts_of(history: History, admission: Admission) -> dict[str, npt.NDArray[np.int64]]:
    """Of each block what its window knows of it now: numbers of requests and batches, times in ns, or -1."""
    names = ("level", "stored_by", "stored_batch", "stored_at", "gone_batch", "gone_at", "gone_by")
    size = len(admission.ids)
    blocks = (admission.num_tokens - 1) // admission.tokens_per_block
    facts = {name: np.full(blocks, -1, np.int64) for name in (*names, "slot", "computed_by")}
    windows = admission.windows[:size]
    for group, window in enumerate(history.windows):
        at = (windows == group) | ((windows < 0) & (group == 0))
        for name in names:
            facts[name][:size][at] = window.of[name][admission.ids[at]]
    for block in np.flatnonzero(np.isin(admission.reasons[:size], _PENDING)).tolist():
        facts["computed_by"][block] = _computing(history, int(admission.ids[block]), block)
    return facts


def note_reused(admission: Admission, event: BlocksReused, window: Window, ids: Ids) -> None:
    """Add to the facts where reused blocks lie, and whose they are; the first window that says so counts."""
    slots = np.frombuffer(event.slots, np.int32)
    at = np.arange(event.first_block, event.first_block + len(slots))
    new = admission.facts["slot"][at] < 0
    admission.facts["slot"][at[new]] = slots[new]
    for name in ("stored_by", "stored_batch", "stored_at"):
        admission.facts[name][at[new & (ids >= 0)]] = window.of[name][ids[new & (ids >= 0)]]


def _computing(history: History, content: int, block: int) -> int:
    """The first running request that has this content in its prompt, still to be computed."""
    size = history.tokens_per_block
    for sequence in history.running.values():
        stop = sequence.num_prompt_tokens // size
        to_come = block < stop and (block + 1) * size > sequence.computed
        if to_come and int(sequence.contents(history.contents, stop, size)[block]) == content:
            return sequence.number
    return -1


_ONE = ([True], [True, False])
"""Of two blocks after what is reused, whether they could have been: only the first."""
_COMPUTING = np.full(len(Reason), Reason.COMPUTING_AGAIN)
_COMPUTING[Reason.CLEARED] = Reason.COMPUTING_CLEARED
_COMPUTING[Reason.COPY_FAILED] = Reason.COMPUTING_COPY_FAILED
_COMPUTING[Reason.INVALIDATED] = Reason.COMPUTING_INVALIDATED
_COMPUTING[Reason.RESTARTED] = Reason.COMPUTING_RESTARTED
"""By why a block is gone: its reason while a running request computes it again."""
_PENDING = (
    Reason.COMPUTING_AGAIN,
    Reason.COMPUTING_CLEARED,
    Reason.COMPUTING_COPY_FAILED,
    Reason.COMPUTING_INVALIDATED,
    Reason.COMPUTING_RESTARTED,
    Reason.BEING_COMPUTED,
)
