"""Whom evictions cost: the requests that computed again what was gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from events.types import PRIMARY, SECONDARY, RequestId
from kvcache.audit.admission import ExplainedAdmission
from kvcache.audit.history import HistoryFold, HistoryListener
from kvcache.audit.reasons import EVICTIONS, Reason
from kvcache.audit.totals import Eviction


@dataclass(slots=True)
class Bill:
    """What one eviction cost, and whom."""

    eviction: Eviction
    level: int = PRIMARY
    """From which most of it went."""
    payers: Counter[RequestId] = field(default_factory=Counter)
    """Tokens by the request that computed them again."""


class Payers(HistoryListener):
    """Finds who paid for chosen evictions; counts as `kvcache.audit.totals` does."""

    def __init__(self, evictions: Iterable[Eviction]) -> None:
        self.bills = [Bill(each) for each in evictions]
        self._by_key = {
            (each.eviction.window, each.eviction.batch, each.eviction.for_request): each
            for each in self.bills
        }
        self._batches = np.array(sorted({each.eviction.batch for each in self.bills}), np.int64)

    def looked_up(self, history: HistoryFold, admission: ExplainedAdmission) -> None:
        """See which of the evictions it pays for."""
        lost = np.flatnonzero(np.isin(admission.reasons, EVICTIONS))
        if not len(lost):
            return
        tokens_of = admission.tokens()
        for group, window in enumerate(history.windows):
            blocks = lost[admission.windows[lost] == group]
            blocks = blocks[np.isin(window.of["gone_batch"][admission.ids[blocks]], self._batches)]
            ids = admission.ids[blocks]
            columns = (window.of[name][ids].tolist() for name in ("gone_batch", "gone_by", "why"))
            for batch, by, why, tokens in zip(*columns, tokens_of[blocks].tolist(), strict=True):
                key = (window.created.window, batch, history.requests[by] if by >= 0 else None)
                bill = self._by_key.get(key)
                if bill is not None:
                    bill.payers[admission.request_id] += tokens
                    bill.level = SECONDARY if why == Reason.DROPPED else PRIMARY
