"""What a cache does, written down as plainly as possible: its windows (`window_model`), and what they decide together.

The tests drive it beside the manager and compare. It shares nothing with the manager but the numbers of the levels,
so a mistake would have to be made twice, in two shapes, to stay unseen.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from events.types import PRIMARY, SECONDARY
from tests.oracles.window_model import (
    PRIORITY,
    Kept,
    Path,
    Retention,
    Running,
    Window,
    common_tokens,
    path_of,
)

Request = tuple[Hashable, Hashable, Sequence[Hashable], Retention | None, int | None, tuple[int, ...] | None]
"""Id, namespace, tokens, how its blocks are to be kept, for how many tokens beyond what is reused it gets blocks, and
what an encoder reads for it, if the model has one."""


class Refused(Exception):
    """There is no room: (index of the first that does not fit, needed, available), the latter for each window."""


class Reuse(NamedTuple):
    """What a prompt reuses."""

    path: Path
    """Of its full blocks."""
    copied: int
    """Tokens at the start of the block behind them that are copied into a new one."""
    sources: list[set[Path]]
    """For each window: from any of which."""
    tokens: int
    """All of them."""


class Admitted(NamedTuple):
    """What came of a request."""

    reused: Reuse
    onboarded: list[set[int]]
    """For each window: indices of the blocks that were in secondary."""
    input_reused: int = 0
    """Blocks of the encoder's input."""


class Model:
    """The cache. `windows` are its windows in tokens, ascending; one of `limit` tokens or more does not slide."""

    def __init__(
        self,
        size: int,
        blocks: tuple[int, int],
        windows: Sequence[int],
        limit: int,
        *,
        reuse: bool = True,
        partial: bool = True,
        offload_from: int = 30,
        ahead_share: int = 16,
        evict_ahead: int = 64,
        levels: bool = False,
        cross: bool = False,
        stops: dict[str, Kept] | None = None,
        append_only: bool = False,
        keep_reserved: bool = False,
    ) -> None:
        self.stops = stops or {}
        """How the blocks of a sequence are kept that ends for one of these reasons."""
        self.size, self.reuse, self.partial = size, reuse, partial
        ahead = min(evict_ahead, blocks[PRIMARY] // ahead_share)
        self.windows = [
            Window(
                size,
                blocks,
                tokens,
                tokens < limit,
                reuse,
                partial,
                offload_from,
                ahead,
                levels and tokens >= limit,
            )
            for tokens in windows
        ]
        self.cross = (
            [Window(size, blocks, 2**31, False, reuse, False, offload_from, 0, levels)] if cross else []
        )
        """One window or none: of encoders' inputs, each of which has an entry of its own in it."""
        self.blind: set[Hashable] = set()
        """Requests to be admitted that read nothing from the cache."""
        self.inputs: dict[Hashable, Running] = {}
        self.groups = [*self.windows, *self.cross]
        self.append_only, self.keep_reserved = append_only, keep_reserved
        for window in self.groups:
            window.append_only = append_only
        self.running: dict[Hashable, Running] = {}
        self.stamp = 0
        self.now = 0
        self.next_pin = self.next_input = 0

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.size)

    # -- reading

    def match(self, namespace: Hashable, tokens: Sequence[Hashable], *, blind: bool = False) -> Reuse:
        """As many full blocks as all windows serve, then as many tokens more as each of them can copy."""
        if blind or not self.reuse:
            return Reuse((namespace,), 0, [set() for _ in self.windows], 0)
        usable = tokens[:-1]
        blocks = len(usable) // self.size
        while not all(each.serves(path_of(namespace, usable, blocks, self.size)) for each in self.windows):
            blocks -= 1
        path, rest = path_of(namespace, usable, blocks, self.size), usable[blocks * self.size :]
        common = [
            {child: common_tokens(child[-1], rest) for child in window.children(path)}
            for window in self.windows
        ]
        copied = min(max(each.values(), default=0) for each in common) if self.partial else 0
        sources = [{child for child in each if 0 < copied <= each[child]} for each in common]
        return Reuse(path, copied, sources, blocks * self.size + copied)

    def match_input(self, namespace: Hashable, given: tuple[int, ...], *, blind: bool = False) -> Path:
        """As many blocks of an encoder's input as there are; the last one is full of it, however short."""
        filled = self.filled(given)
        blocks = 0 if blind or not self.reuse else len(filled) // self.size
        of_input = input_namespace(namespace, given)
        while not all(
            path_of(of_input, filled, more + 1, self.size) in self.cross[0].cached for more in range(blocks)
        ):
            blocks -= 1
        return path_of(of_input, filled, blocks, self.size)

    def filled(self, given: tuple[int, ...]) -> list[int]:
        return [*given, *[0] * (-len(given) % self.size)]

    def fitting(self, requests: Sequence[Request]) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """How many of the requests fit, and needed and available blocks at the first that does not (or at the end)."""
        new, new_of_inputs, claimed = 0, 0, [set[Path]() for _ in self.groups]
        needed: tuple[int, ...] = ()
        available: tuple[int, ...] = ()
        for index, (request_id, namespace, tokens, _, reserve, given) in enumerate(requests):
            blind = request_id in self.blind
            found = self.match(reader_namespace(namespace, given), tokens, blind=blind)
            new += self.new_blocks(tokens, found, reserve)
            for window, paths in zip(self.windows, claimed, strict=False):
                paths.update(window.claims(found.path, found.tokens))
            counts = [
                _count(window, new, paths) for window, paths in zip(self.windows, claimed, strict=False)
            ]
            if given is not None:
                path = self.match_input(namespace, given, blind=blind)
                new_of_inputs += self.blocks_for(len(given)) - (len(path) - 1)
                claimed[-1].update(path[: block + 2] for block in range(len(path) - 1))
                counts.append(_count(self.cross[0], new_of_inputs, claimed[-1]))
            needed, available = tuple(each[0] for each in counts), tuple(each[1] for each in counts)
            if any(more > there for more, there in counts):
                return index, needed, available
        return len(requests), needed, available

    def new_blocks(self, tokens: Sequence[Hashable], found: Reuse, reserve: int | None) -> int:
        """Blocks that an admitted request gets beside what it reuses."""
        first = len(tokens) if reserve is None else min(len(tokens), found.tokens + reserve)
        return self.blocks_for(first) - (len(found.path) - 1)

    def blocks_of(self, request_id: Hashable) -> int:
        """How long the tables of a sequence are, in each window."""
        return len(self.windows[0].tables[request_id])

    # -- commands

    def add(
        self, requests: Sequence[Request], sources: Sequence[Sequence[Path | None]] | None = None
    ) -> list[Admitted]:
        """Admit all or none. `sources`: for each request what is copied from in each window, if that has to be said."""
        fit, needed, available = self.fitting(requests)
        if fit < len(requests):
            raise Refused(fit, needed, available)
        admitted = []
        paths_of_inputs = {
            request_id: self.match_input(namespace, given, blind=request_id in self.blind)
            for request_id, namespace, *_, given in requests
            if given is not None
        }
        for request_id, namespace, tokens, retention, _, given in requests:
            own = reader_namespace(namespace, given)
            found = self.match(own, tokens, blind=request_id in self.blind)
            of_input = len(paths_of_inputs.get(request_id, (None,))) - 1
            admitted.append(Admitted(found, [_onboarded(each, found) for each in self.windows], of_input))
            sequence = Running(own, list(tokens), found.tokens, retention, len(tokens))
            self.running[request_id] = sequence
        for index, window in enumerate(self.windows):
            copied_from = [paths[index] for paths in sources] if sources else [None] * len(requests)
            exempt = {path for path in copied_from if path and window.cached[path].level == SECONDARY}
            for (request_id, *_), (found, *_), path in zip(requests, admitted, copied_from, strict=True):
                if path:
                    source = window.cached[path]
                    window.copies[request_id] = len(path) - 2, (source.priority, source.duration)
                window.claim(request_id, found.path, found.tokens)
            window.evict(needed[index], exempt)
            for (request_id, _, tokens, _, reserve, _), (found, *_) in zip(requests, admitted, strict=True):
                window.grow(request_id, self.new_blocks(tokens, found, reserve))
            window.onboard()
        self.add_inputs(requests, paths_of_inputs, needed)
        for (request_id, *_), (found, *_) in zip(requests, admitted, strict=True):
            for window in self.windows:
                window.restate(request_id, self.running[request_id], 0, len(found.path) - 1)
        return admitted

    def add_inputs(
        self, requests: Sequence[Request], paths: dict[Hashable, Path], needed: tuple[int, ...]
    ) -> None:
        """What encoders read for these requests: held as far as it is there."""
        for window in self.cross:
            for request_id, namespace, *_, given in requests:
                assert given is not None
                path, filled, self.next_input = paths[request_id], self.filled(given), self.next_input + 1
                reused = (len(path) - 1) * self.size
                self.inputs[self.next_input] = Running(input_namespace(namespace, given), filled, reused)
                self.running[request_id].input = self.next_input
                window.claim(self.next_input, path, 0)
            window.evict(needed[-1])
            for request_id, *_ in requests:
                number = self.running[request_id].input
                window.grow(number, len(self.inputs[number].tokens) // self.size - len(window.tables[number]))
            window.onboard()

    def compute_input(self, request_id: Hashable) -> list[int]:
        """The encoder has run for a request. Returns the indices of the blocks swapped for another's."""
        number = self.running[request_id].input
        self.inputs[number].computed = len(self.inputs[number].tokens)
        return self.cross[0].store(number, self.inputs[number])

    def end_input(self, number: Hashable, *, store: bool) -> None:
        """Nobody reads an input any more."""
        (window,) = self.cross
        if store:
            window.store(number, self.inputs[number])
        self.stamp += 1
        window.end(number, self.stamp, self.now)
        del self.inputs[number]

    def compute(self, request_id: Hashable, num_tokens: int) -> list[list[int]]:
        """Returns for each window the indices of the blocks swapped for another's."""
        sequence = self.running[request_id]
        sequence.computed = max(sequence.computed, num_tokens)
        swapped = [window.store(request_id, sequence) for window in self.windows]
        self.detach([request_id])
        return swapped

    def append(
        self, ids: Sequence[Hashable], tokens: Sequence[int], counts: Sequence[int], draft: bool = False
    ) -> dict[Hashable, list[list[int]]]:
        """Returns the swapped blocks, for each window, of each sequence that has any."""
        lengths = [len(self.running[each].tokens) + more for each, more in zip(ids, counts, strict=True)]
        storing = [
            each for each, length in zip(ids, lengths, strict=True) if self.fills_or_computes(each, length)
        ]
        least = [self.blocks_of(each) if self.keep_reserved else 0 for each in ids]
        self.grow(
            ids, [max(self.blocks_for(length), has) for length, has in zip(lengths, least, strict=True)]
        )
        rest = list(tokens)
        for request_id, count in zip(ids, counts, strict=True):
            sequence = self.running[request_id]
            sequence.tokens += rest[:count]
            if not draft:
                sequence.computed = len(sequence.tokens) - 1
            del rest[:count]
        swapped = {
            each: [window.store(each, self.running[each]) for window in self.windows]
            for each in ids
            if each in storing and not draft
        }
        self.detach(ids)
        return {each: swaps for each, swaps in swapped.items() if any(swaps)}

    def fills_or_computes(self, request_id: Hashable, length: int) -> bool:
        """Whether a sequence that gets this long fills its last block, or has tokens that were not computed."""
        sequence = self.running[request_id]
        fills = self.blocks_for(length) > self.blocks_for(len(sequence.tokens))
        return fills or sequence.computed < len(sequence.tokens) - 1

    def grow(self, ids: Sequence[Hashable], blocks: Sequence[int]) -> None:
        """Have tables of N blocks. Raises `Refused`."""
        growth: list[int] = []
        for request_id, wanted in zip(ids, blocks, strict=True):
            growth.append(max(0, wanted - self.blocks_of(request_id)))
        returned = sum(
            max(0, self.blocks_of(request_id) - wanted)
            for request_id, wanted in zip(ids, blocks, strict=True)
        )
        for index in range(len(ids)):
            if any(sum(growth[: index + 1]) > window.available() + returned for window in self.windows):
                raise Refused(index)
        for window in self.windows:
            for request_id, wanted in zip(ids, blocks, strict=True):
                del window.tables[request_id][wanted:]
            if sum(growth) > window.blank(PRIMARY):
                window.evict(max(sum(growth), min(window.ahead, window.available())))
            for request_id, more in zip(ids, growth, strict=True):
                window.grow(request_id, more)

    def reserve(self, ids: Sequence[Hashable], counts: Sequence[int]) -> None:
        """Have blocks for tokens to come; of a prompt that has not got all its blocks, for more of what is known."""
        wanted = []
        for request_id, count in zip(ids, counts, strict=True):
            sequence, has = self.running[request_id], self.blocks_of(request_id)
            if has * self.size < len(sequence.tokens):
                chunk = min(sequence.computed + count, len(sequence.tokens))
                wanted.append(max(has, self.blocks_for(chunk)))
            else:
                wanted.append(self.blocks_for(len(sequence.tokens) + count))
        self.grow(ids, wanted)

    def detach(self, ids: Sequence[Hashable]) -> None:
        """Sequences let go of what the windows have left."""
        for window in self.windows:
            for request_id in ids:
                count = window.to_detach(request_id, self.running[request_id])
                if count:
                    self.stamp += 1
                    window.detach(request_id, count, self.stamp, self.now)

    def set_priority(self, request_id: Hashable, priority: int, start: int, stop: int) -> list[list[Path]]:
        """Returns for each window the blocks that had another priority, shallowest first."""
        return [window.set_priority(request_id, priority, start, stop) for window in self.windows]

    def fork(self, parent: Hashable, child: Hashable) -> list[list[int]]:
        """Returns for each window the parent's blocks that were swapped for another's."""
        sequence = self.running[parent]
        own = min(self.blocks_for(len(sequence.tokens)), self.blocks_of(parent))
        new = own - sequence.computed // self.size
        doubled = 0
        if self.append_only and self.reuse:
            # Whatever is stored first may turn out to be there already, and stays with the parent.
            doubled = sequence.computed // self.size - min(each.stored(parent) for each in self.windows)
        if any(new + doubled > window.available() for window in self.windows):
            raise Refused
        swapped = [window.store(parent, sequence) for window in self.windows]
        self.running[child] = replace(sequence, tokens=sequence.tokens[:])
        for window in self.windows:
            window.fork(parent, child, sequence, new)
        return swapped

    def rewind(self, request_id: Hashable, num_tokens: int) -> None:
        """Take back all but the first tokens. Raises `Refused`: True if some window does not see enough any more."""
        sequence = self.running[request_id]
        computed = min(sequence.computed, num_tokens - 1)
        needed = min(self.blocks_for(num_tokens), self.blocks_of(request_id))
        if any(window.first_seen(computed) < window.detached(request_id) for window in self.windows):
            raise Refused(True)
        if not all(each.room_to_rewind(request_id, computed // self.size, needed) for each in self.windows):
            raise Refused(False)
        sequence.computed, sequence.prompt = computed, min(sequence.prompt, num_tokens)
        del sequence.tokens[num_tokens:]
        self.stamp += 1
        for window in self.windows:
            window.rewind(request_id, sequence, needed, self.stamp, self.now)

    def pin(self, request_id: Hashable, start: int, stop: int, share: float) -> int:
        """Returns the number; raises `Refused` beyond a share of the blocks of some window."""
        wanted = [window.to_pin(request_id, start, stop) for window in self.windows]
        for window in self.cross:
            overlaps = start < stop and start // self.size < self.blocks_for(
                len(self.running[request_id].tokens)
            )
            wanted.append(window.to_pin(self.running[request_id].input, 0, 2**31) if overlaps else [])
        for window, entries in zip(self.groups, wanted, strict=True):
            if len({*entries, *(entry for pin in window.pins.values() for entry in pin)}) > int(
                share * window.blocks[PRIMARY]
            ):
                raise Refused
        self.next_pin += 1
        for window, entries in zip(self.groups, wanted, strict=True):
            window.pin(self.next_pin, entries)
        return self.next_pin

    def unpin(self, number: int) -> None:
        self.stamp += 1
        for window in self.groups:
            window.unpin(number, self.stamp, self.now)

    def end(self, request_id: Hashable, *, store: bool, stop: str | None = None) -> None:
        sequence = self.running.pop(request_id)
        self.stamp += 1
        for window in self.windows:
            if store:
                window.store(request_id, sequence)
                window.store_partial(request_id, sequence)
            kept = self.stops.get(stop if stop in self.stops else "*")
            if kept and not sequence.retention:
                # Only a priority below the default is for the end of the prompt, and the output behind it.
                blocks = sequence.prompt // self.size if kept[0] >= PRIORITY else None
                window.keep_own(request_id, kept, blocks)
            window.end(request_id, self.stamp, self.now)
        if sequence.input and not any(each.input == sequence.input for each in self.running.values()):
            self.end_input(sequence.input, store=store)

    def expire(self, reported: Sequence[dict[Path, int]]) -> None:
        """End a step."""
        for window, ranks in zip(self.groups, reported, strict=True):
            self.stamp = window.expire(self.now, self.stamp, ranks)

    def clear(self) -> None:
        for window in self.groups:
            window.clear()


def reader_namespace(namespace: Hashable, given: tuple[int, ...] | None) -> Hashable:
    """Of a sequence: what it computes depends on all that the encoder has read."""
    return namespace if given is None else ("decoder", namespace, given)


def input_namespace(namespace: Any, given: tuple[int, ...]) -> Hashable:
    """Of an encoder's input, each of whose tokens has K/V that depends on all others. They have no extra ids."""
    lora_id, lora_name, salt, *_ = namespace
    return "encoder", (lora_id, lora_name, salt), given


def _count(window: Window, new: int, claimed: Collection[Path]) -> tuple[int, int]:
    """Needed and available primary blocks, when so many are new and these cached ones are held."""
    blocks = [window.cached[path] for path in claimed]
    idle = sum(block.level == PRIMARY and not block.refs for block in blocks)
    return new + sum(block.level == SECONDARY for block in blocks), window.available() - idle


def _onboarded(window: Window, found: Reuse) -> set[int]:
    """The indices of the claimed blocks that are in secondary."""
    claims = window.claims(found.path, found.tokens)
    return {len(path) - 2 for path in claims if window.cached[path].level == SECONDARY}
