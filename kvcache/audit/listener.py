"""Who is told what a log says of contents and requests, as it is folded. This one ignores it."""

from __future__ import annotations

from events import types as ev
from kvcache.audit.admission import Admission
from kvcache.audit.columns import Ids
from kvcache.audit.history import History
from kvcache.audit.running import Running
from kvcache.audit.window import Window


class Listener:
    """Hears of each event when the history has folded it, but of a reuse before: ages are those before it."""

    def looked_up(self, history: History, admission: Admission) -> None:
        """A request is being admitted; what it takes from secondary, and what comes later in the step, is not known."""

    def admitted(self, history: History, admission: Admission) -> None:
        """Of each admission, at the end of its batch."""

    def refused(self, history: History, event: ev.AdmissionRefused) -> None:
        """A request did not fit."""

    def forked(self, history: History, child: Running) -> None:
        """A sequence branched: the branch has looked nothing up, so it is no admission."""

    def ended(self, history: History, sequence: Running, event: ev.SequenceRemoved) -> None:
        """A request ended."""

    def not_loaded(self, history: History, sequence: Running, tokens: int) -> None:
        """Prompt tokens that were to be loaded from outside have not come."""

    def counted(self, history: History, ours: tuple[int, int], theirs: tuple[int, int]) -> None:
        """Prompt tokens and reused ones since the cache was created: of the log, and as its engine has counted them."""

    def reused(self, history: History, window: Window, ids: Ids, level: int) -> None:
        """A request is about to reuse full blocks from a level."""

    def computed_twice(self, history: History, window: Window, blocks: int) -> None:
        """A request computed full blocks that another one had stored meanwhile."""

    def stored(self, history: History, window: Window, ids: Ids) -> None:
        """Full blocks are cached."""

    def moved(self, history: History, window: Window, event: ev.BlocksMoved) -> None:
        """Blocks changed their level."""

    def evicted(self, history: History, window: Window, ids: Ids, level: int) -> None:
        """Full blocks have left a level: they moved from primary to secondary, or are about to be `removed`."""

    def removed(self, history: History, window: Window, ids: Ids, event: ev.BlocksRemoved) -> None:
        """Full blocks are gone."""

    def lost(self, history: History, window: Window, ids: Ids) -> None:
        """Full blocks are gone otherwise: cleared, or not in the state that was exported anew. The window may be that
        of the cache before.
        """

    def restarted(self, history: History) -> None:
        """The state was exported anew, and what is not in it has been told as lost."""

    def batch_ended(self, history: History) -> None:
        """After the last event of a batch."""
