"""A log for commands that read logs, and how it was made if it comes from a trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from events.structs import LEVEL_NAMES
from kvcache.cli.output import Facts, pick
from kvcache.workload.summary import Refusal

if TYPE_CHECKING:
    from kvcache.workload.reported import ReportedReuse


class PlayedTrace(NamedTuple):
    """A trace that was played through a cache."""

    reported: ReportedReuse
    num_blocks: tuple[int, ...]
    """Blocks of the cache by level."""
    tokens_per_block: int
    refused: int
    """Number of requests that no cache of this size can serve."""
    refusals: Sequence[Refusal]
    """First of them, by place in the trace."""

    @property
    def in_words(self) -> str:
        """The cache, as in "4,000 + 0 blocks of 512 tokens"."""
        return f"{' + '.join(f'{each:,}' for each in self.num_blocks)} blocks of {self.tokens_per_block:,} tokens"

    def facts(self) -> Facts:
        """Yield the cache, and the requests that did not fit."""
        yield "played through", f"{self.in_words}, at the trace's own times"
        if self.refused:
            first = self.refusals[0]
            yield (
                "did not fit",
                f"{self.refused:,} requests, such as number {first.request_id}: {first.reason}",
            )

    def to_json(self) -> dict[str, Any]:
        """Return the same for programs."""
        levels = dict(zip(LEVEL_NAMES, self.num_blocks, strict=True))
        refusals = [pick(each, "request_id", "reason") for each in self.refusals]
        return {"num_blocks": levels, **pick(self, "tokens_per_block", "refused"), "refusals": refusals}


class Served(NamedTuple):
    """A log, and how it was made if it comes from a trace."""

    log: Path
    played: PlayedTrace | None = None

    @property
    def reported(self) -> ReportedReuse | None:
        """Reported values of the trace."""
        return None if self.played is None else self.played.reported

    def facts(self) -> Facts:
        """Yield how a trace was played; nothing of a log."""
        return iter(()) if self.played is None else self.played.facts()

    def to_json(self) -> dict[str, Any]:
        """Return the same under its key."""
        return {} if self.played is None else {"played": self.played.to_json()}
