"""A strict index of a feed's changes, and an engine whose random commands cause them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from cuda_ops.copier import Copy, FinishedTicket, Ticket
from events.feed.changes import Change, Cleared, Removed
from events.feed.fold import Feed
from events.feed.slots import ANNOUNCED
from events.packed import NAME_BYTES, split_names
from events.tokens.symbols import has_symbols
from events.types import EventBatch
from kvcache import KVCacheManager, MultimodalItem, Request
from kvcache.errors import CapacityError


def resident_in(feed: Feed, group: int, level: int) -> set[bytes]:
    """The names that routers know in this level, as the feed has noted it."""
    columns = feed._columns[group][level]
    return set(split_names(columns._names[columns._state == ANNOUNCED].tobytes()))


class StrictIndex:
    """What a router builds from the changes; refuses orphans, repeats and unknown removals.

    In groups that slide a block may be told without the one before.
    """

    def __init__(self, sliding: Sequence[int] = ()) -> None:
        self.resident: dict[tuple[int, int], dict[bytes, bytes]] = {}
        self.sliding = sliding

    def apply(self, change: Change) -> None:
        """Follow one change."""
        if isinstance(change, Cleared):
            self.resident.clear()
            return
        level = self.resident.setdefault((change.group, change.level), {})
        names = [change.names[at : at + NAME_BYTES] for at in range(0, len(change.names), NAME_BYTES)]
        if isinstance(change, Removed):
            for name in names:
                del level[name]
            return
        assert len(change.tokens) == 4 * change.tokens_per_block * len(names)
        assert not has_symbols(change.tokens)
        assert len(change.extras) in (0, len(names))
        parent, orphans_are_reported = change.parent, change.group in self.sliding
        group = [known for (index, _), known in self.resident.items() if index == change.group]
        for name in names:
            assert not parent or orphans_are_reported or any(parent in known for known in group), "orphan"
            assert name not in level, "told twice"
            level[name] = parent
            parent = name

    def names(self, level: int, group: int = 0) -> set[bytes]:
        """Names in a level of a group."""
        return set(self.resident.get((group, level), {}))


class Engine:
    """Random commands on a manager."""

    def __init__(self, manager: KVCacheManager, rng: random.Random) -> None:
        self.manager = manager
        self.rng = rng
        self.running: list[int] = []
        self.next_id = 0

    def step(self) -> None:
        """One command; a refusal for lack of room is part of life."""
        commands = [
            self.add,
            self.add,
            self.add,
            self.compute,
            self.compute,
            self.decode,
            self.decode,
            self.remove,
        ]
        try:
            self.rng.choice(commands)()
        except CapacityError:
            return

    def add(self) -> None:
        """Admit one or two prompts of a tiny alphabet."""
        rng = self.rng
        batch = [self.request(self.next_id + index) for index in range(rng.choice([1, 2]))]
        self.next_id += len(batch)
        self.manager.add_sequences(batch)
        self.manager.start_transfers()
        self.running += [int(request.request_id) for request in batch]

    def request(self, request_id: int) -> Request:
        """A prompt, sometimes with an image at its start, or with extra ids."""
        rng = self.rng
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 14))]
        image = MultimodalItem(bytes([rng.randrange(2)]) * 32, 0, rng.randrange(1, len(tokens) + 1))
        return Request(
            request_id,
            tokens,
            cache_salt=rng.choice([None, None, "salt"]),
            multimodal=rng.choice([(), (), [image]]),
            extra_ids=rng.choice([None, None, [rng.randrange(2) for _ in tokens]]),
        )

    def compute(self) -> None:
        """Compute some more of a prompt."""
        if self.running:
            request = self.rng.choice(self.running)
            sequence = self.manager.state.sequences[self.manager.state.handles[request]]
            computed = self.rng.randrange(sequence.computed, sequence.num_tokens + 1)
            self.manager.store_context_blocks(request, computed)

    def decode(self) -> None:
        """One token each for some sequences."""
        if self.running:
            chosen = self.rng.sample(self.running, self.rng.randrange(1, len(self.running) + 1))
            self.manager.add_tokens(chosen, [self.rng.randrange(2) for _ in chosen])
            self.manager.start_transfers()

    def remove(self) -> None:
        """End a sequence."""
        if self.running:
            self.manager.remove_sequence(self.running.pop(self.rng.randrange(len(self.running))))


def batches(
    manager: KVCacheManager, rng: random.Random, steps: int, kind: type[Engine] = Engine
) -> Iterator[EventBatch]:
    """The stream of a random run, from its first batch on; what was published between two flushes is in one batch."""
    yield EventBatch(0, 0, (manager.state.created,))  # type: ignore[arg-type]
    engine, received, seq = kind(manager, rng), list[Any](), 1
    manager.bus.subscribe(received.append)
    for _ in range(steps):
        engine.step()
        if rng.random() < 0.6:
            manager.flush()
            if received:
                yield EventBatch(seq, seq, tuple(received))
                received.clear()
                seq += 1


def landed_prefixes(manager: KVCacheManager, index: int = 0) -> list[set[bytes]]:
    """Per level, the names of the full blocks that have landed with all before them: routers must know these."""
    size = manager.state.hashing.key_bytes
    found: list[set[bytes]] = [set(), set()]
    group: Any = manager.state.groups[index]
    for run in group.tree.runs.values():
        if not any(each.transfer for each in group.path(run)):
            full = range(len(run.slots) - bool(run.partial))
            found[run.level].update(bytes(run.keys[at * size : at * size + NAME_BYTES]) for at in full)
    return found


class NoBytes:
    """Copies nothing, at once."""

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        return FinishedTicket()
