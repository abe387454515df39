"""What is known of a log's contents and requests up to an event."""

from __future__ import annotations

import numpy as np

from events.types import RequestId
from kvcache.audit.columns import Columns
from kvcache.audit.contents import ContentIds
from kvcache.audit.epochs import EpochClock
from kvcache.audit.reasons import Reason
from kvcache.audit.running import Running
from kvcache.audit.sharing import SharedGroups
from kvcache.audit.window import Window


class History:
    """Contents, windows and running requests; changed only by `kvcache.audit.fold`."""

    def __init__(self) -> None:
        self.contents = ContentIds()
        self.windows: list[Window] = []
        self.running: dict[int, Running] = {}
        """By handle."""
        self.pending = Columns(count=(np.int32, 0))
        """Per content: running requests in whose prompt it is, and that have not computed it yet."""
        self.tokens_recorded = True
        self.reuse = True
        self.engine = ""
        """Who decides; empty: this library's manager."""
        self.drops_last_hit = False
        """As in `CacheCreated`."""
        self.not_taken = Reason.NOT_SERVABLE
        """Why a block is not reused that is cached in every window."""
        self.tokens_per_block = 0
        self.key_bytes = 0
        self.names: Columns | None = None
        """Per content its name as the log has it (`name`); None unless somebody asks for them."""
        self.served_names = Columns(name=(np.uint64, 0))
        """Per content that was reused its name; 0 where the log has none."""
        self.shared = SharedGroups()
        """Further groups, whose slots lie in the pool of the first one."""
        self.epochs = EpochClock()
        self.batch, self.now = -1, 0
        """The batch that is folded, and its wall clock in ns."""
        self.requests: list[RequestId] = []
        """By number of the admission."""

    @property
    def keeps_names(self) -> bool:
        """Whether names of blocks are of use: where there are no tokens, or somebody asks for them."""
        return self.names is not None or not self.tokens_recorded

    def reach(self) -> None:
        """Have rows for all contents."""
        rows = len(self.contents)
        self.pending.reach(rows)
        for window in self.windows:
            window.of.reach(rows)
