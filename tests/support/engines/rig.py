"""A manager without tensors, driven as the cases drive theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from events.types import PRIMARY, Event
from kvcache import Retention, RetentionRange
from kvcache.manager import KVCacheManager, Substitutes
from tests.support.engines import strategies

UNKNOWN = 2**20
"""A token that no prompt has."""
GONE = -2
"""In a block table: a block that the window has let go of."""
Range = tuple[int, int | None, int] | tuple[int, int | None, int, int | None]


def prompt(first: int, stop: int) -> list[int]:
    """The tokens from `first` up to `stop`."""
    return list(range(first, stop))


def keep(*ranges: Range, decode: int = 35, decode_ms: int | None = None) -> Retention:
    """Ranges (from, up to, priority[, ms]), and the priority of what is decoded."""
    return Retention([RetentionRange(*each) for each in ranges], decode, decode_ms)


class Rig:
    """Requests by name; their events. `windows` has one for each layer."""

    def __init__(
        self,
        primary_blocks: int | tuple[int, ...],
        secondary_blocks: int = 0,
        size: int = 4,
        windows: tuple[int, ...] | None = None,
        **settings: Any,
    ) -> None:
        self.ticks = strategies.Ticks()
        self.last: dict[Any, int] = {}
        if windows is not None:
            settings |= {"num_layers": len(windows), "max_attention_window": windows}
        self.manager = KVCacheManager(
            strategies.config(
                primary_blocks=primary_blocks,
                secondary_blocks=secondary_blocks,
                tokens_per_block=size,
                **({"max_sequence_length": 128} | settings),
            ),
            substitutes=Substitutes(monotonic_ns=self.ticks),
        )
        self.events: list[Event] = []
        self.manager.bus.subscribe(self.events.append)

    def add(
        self, name: Any, tokens: Sequence[int], retention: Retention | None = None, **options: Any
    ) -> int:
        """Admit a request; returns how many tokens are reused."""
        self.last[name] = tokens[-1]
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

    def go_on(self, name: Any, count: int = 1) -> None:
        """The same with tokens that go on counting where the prompt ended."""
        for _ in range(count):
            self.last[name] += 1
            self.manager.add_tokens([name], [self.last[name]])

    def end(self, *names: Any, store: bool = True) -> None:
        """End requests."""
        for name in names:
            self.manager.remove_sequence(name, store)
            self.manager.check()

    def wait(self, ms: int) -> None:
        """Time goes on, and a step ends."""
        self.ticks.now += ms * strategies.MS
        self.manager.flush()
        self.manager.check()

    def table(self, name: Any, window: int | None = None) -> list[int]:
        """The block table; slots are told apart."""
        found: list[int] = self.manager.block_table(name, window).tolist()
        held = [slot for slot in found if slot != GONE]
        assert len(set(held)) == len(held)
        assert min(held) >= 0
        return found

    def gone(self, name: Any, window: int | None = None) -> tuple[int, int]:
        """Entries of the block table, and how many of them the window has let go of: the first ones."""
        table = self.table(name, window)
        count = table.count(GONE)
        assert table[:count] == [GONE] * count
        return len(table), count

    def reusable(self, tokens: Sequence[int]) -> int:
        """Tokens that a prompt would reuse now."""
        return self.manager.match(tokens).reused_tokens

    def levels(self, tokens: Sequence[int]) -> list[int]:
        """Where the blocks lie that are cached of these tokens: 0 for primary, 1 for secondary."""
        found = self.manager.match([*tokens, UNKNOWN])
        return [block.level for block in (*found.blocks, *found.partials)]

    @property
    def free(self) -> int:
        """Primary blocks that can be had, of the window that has the fewest."""
        self.manager.check()
        return self.manager.num_free_blocks

    @property
    def used(self) -> int:
        """Primary blocks that sequences hold, of the first window."""
        return self.manager.state.groups[0].levels[PRIMARY].size - self.free

    @property
    def priorities(self) -> set[int]:
        """Of the cached blocks."""
        return {block[-1] for block in strategies.cached_blocks(self.manager.state).values()}

    def polled(self) -> list[dict[str, Any]]:
        """What programs that poll are told, at the end of a step."""
        self.manager.flush()
        return self.manager.get_latest_events()

    def reported(self, kind: type[Any]) -> list[Any]:
        """The events of a kind since the last time that one asked."""
        found = [event for event in self.events if isinstance(event, kind)]
        self.events.clear()
        return found
