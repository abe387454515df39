"""What became of each prompt token of one admission."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from events.types import Namespace, RequestId
from kvcache.audit.columns import Ids
from kvcache.audit.reasons import Reason
from kvcache.audit.sharing import Lacking


@dataclass(eq=False, slots=True)
class Admission:
    """One request, as it was admitted; `counts` is known when its batch is over."""

    number: int
    """Admissions of the log before this one."""
    request_id: RequestId
    namespace: Namespace
    batch: int
    at: int
    """Wall-clock ns."""
    num_tokens: int
    reused: int
    partial: int
    """Of the reused tokens, those of a copied block."""
    external: int
    """Tokens after the reused ones that were to be loaded from outside."""
    tokens_per_block: int
    ids: Ids
    """The contents of the blocks that end before the last token; empty for a log without tokens."""
    reasons: npt.NDArray[np.int8]
    """`Reason` per block, of its `tokens`."""
    windows: npt.NDArray[np.int8]
    """Per block the window (as an index) that the reason is about; -1: none in particular."""
    lacking: Lacking | None = None
    """What a further group lost of it."""
    facts: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    """For who asked for details: what was known of each block."""
    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(Reason), np.int64))
    """Prompt tokens by reason."""

    def spans(self) -> list[tuple[int, int, Reason, int]]:
        """The prompt in parts of one reason: first token, the one behind the last, reason, window."""
        size, last = self.tokens_per_block, self.num_tokens - 1
        spans: list[tuple[int, int, Reason, int]] = []
        for block, (reason, window) in enumerate(
            zip(self.reasons.tolist(), self.windows.tolist(), strict=True)
        ):
            begin, end = block * size, min((block + 1) * size, last)
            middle = min(max(self.reused, begin), end)
            if begin < middle and reason not in (Reason.PRIMARY, Reason.SECONDARY):
                spans.append((begin, middle, Reason.PARTIAL, -1))
                begin = middle
            middle = min(max(self.reused + self.external, begin), end)
            if begin < middle and reason > Reason.EXTERNAL:
                spans.append((begin, middle, Reason.EXTERNAL, -1))
                begin = middle
            if begin < end:
                spans.append((begin, end, Reason(reason), window))
        return [*spans, (last, last + 1, Reason.LAST_TOKEN, -1)]

    def tokens(self) -> npt.NDArray[np.int64]:
        """Per block the tokens in it that the reason is about: neither reused nor loaded in part, nor the last one."""
        size, last = self.tokens_per_block, self.num_tokens - 1
        begins = np.arange(len(self.reasons)) * size
        tokens = np.minimum(begins + size, last) - begins
        if self.partial:
            tokens[(self.reused - self.partial) // size] -= self.partial
        if self._begun:
            tokens[(self.reused + self.external) // size] -= self._begun
        return tokens

    @property
    def _begun(self) -> int:
        """Tokens that were to be loaded in a block that was to be loaded only in part."""
        end = self.reused + self.external
        return end % self.tokens_per_block if self.external and end < self.num_tokens - 1 else 0

    def count(self) -> None:
        """Fill `counts`."""
        self.counts += np.bincount(self.reasons, self.tokens(), len(Reason)).astype(np.int64)
        self.counts[Reason.PARTIAL] += self.partial
        self.counts[Reason.EXTERNAL] += self._begun
        self.counts[Reason.LAST_TOKEN] += 1
