"""A manager without tensors, driven as the cases drive theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from events.types import Event
from kvcache import Retention, RetentionRange
from kvcache.manager import KVCacheManager
from tests import strategies

Range = tuple[int, int | None, int] | tuple[int, int | None, int, int | None]


def keep(*ranges: Range, decode: int = 35, decode_ms: int | None = None) -> Retention:
    """Ranges (from, up to, priority[, ms]), and the priority of what is decoded."""
    return Retention([RetentionRange(*each) for each in ranges], decode, decode_ms)


class Rig:
    """Requests by name; their events."""

    def __init__(
        self, primary_blocks: int, secondary_blocks: int = 0, size: int = 4, **settings: Any
    ) -> None:
        self.ticks = strategies.Ticks()
        self.manager = KVCacheManager(
            strategies.config(
                primary_blocks=primary_blocks,
                secondary_blocks=secondary_blocks,
                tokens_per_block=size,
                **({"max_sequence_length": 128} | settings),
            ),
            monotonic_ns=self.ticks,
        )
        self.events: list[Event] = []
        self.manager.bus.subscribe(self.events.append)

    def add(
        self, name: Any, tokens: Sequence[int], retention: Retention | None = None, **options: Any
    ) -> int:
        """Admit a request; returns how many tokens are reused."""
        return self.manager.add_sequence(name, tokens, retention=retention, **options).reused_tokens

    def prefill(
        self, name: Any, tokens: Sequence[int], retention: Retention | None = None, **options: Any
    ) -> int:
        """The same, and compute its prompt."""
        reused = self.add(name, tokens, retention, **options)
        self.manager.store_context_blocks(name, len(tokens))
        return reused

    def run(
        self, name: Any, tokens: Sequence[int], retention: Retention | None = None, **options: Any
    ) -> int:
        """The same, and end it."""
        reused = self.prefill(name, tokens, retention, **options)
        self.end(name)
        return reused

    def generate(self, name: Any, *tokens: int) -> None:
        """One token a step."""
        for token in tokens:
            self.manager.add_tokens([name], [token])

    def end(self, *names: Any, store: bool = True) -> None:
        """End requests."""
        for name in names:
            self.manager.remove_sequence(name, store)

    def wait(self, ms: int) -> None:
        """Time goes on, and a step ends."""
        self.ticks.now += ms * strategies.MS
        self.manager.flush()
        self.manager.check()

    @property
    def free(self) -> int:
        """Primary blocks that can be had."""
        return self.manager.num_free_blocks

    @property
    def priorities(self) -> set[int]:
        """Of the cached blocks."""
        return {block[-1] for block in strategies.cached_blocks(self.manager.state).values()}

    def told(self, kind: type[Any]) -> list[Any]:
        """The events of a kind since the last time that one asked."""
        found = [event for event in self.events if isinstance(event, kind)]
        self.events.clear()
        return found
