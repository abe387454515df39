"""Why each prompt token was computed, worked out as plainly as can be from what docs/how-to/audit.md says alone.

Nothing is shared with the code it judges but the events. A block is what is in it: its namespace, where it begins, and
all tokens up to its end, each spelled out, so that symbols whose numbers are given away again mean what they meant.
Everything is looked for where it could be, one by one, so it is good for small logs only. On the way it proves that it
follows: by the counts in checkpoints, and by what requests reuse.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from events import types as ev
from events.types import SECONDARY, EventBatch, GroupExported, Namespace, RequestId, SymbolPage

REASONS = (
    "last_token",
    "partial",
    "secondary",
    "primary",
    "external",
    "reuse_off",
    "not_looked_up",
    "unaligned",
    "unknown",
    "not_servable",
    "last_hit",
    "not_reused",
    "computing_again",
    "computing_cleared",
    "computing_copy_failed",
    "computing_invalidated",
    "computing_restarted",
    "evicted",
    "dropped",
    "cleared",
    "copy_failed",
    "invalidated",
    "restarted",
    "out_of_window",
    "same_step",
    "being_computed",
    "other_namespace",
    "never_seen",
)
"""In the order of the table."""
COMPUTING = {
    "evicted": "computing_again",
    "dropped": "computing_again",
    "cleared": "computing_cleared",
    "copy_failed": "computing_copy_failed",
    "invalidated": "computing_invalidated",
    "restarted": "computing_restarted",
}
"""Of what is gone for these reasons, while a running request computes it again."""

Token = int | tuple[int, int, bytes | None, int]
"""A plain one, or (token, extra id, digest of its item, offset in the item)."""
Block = tuple[Namespace, int, tuple[Token, ...]]
"""Namespace, first token, and all tokens from the prompt's first one up to the block's end."""


class Admission(NamedTuple):
    """One admitted request."""

    request_id: RequestId
    seq: int
    """The batch."""
    reasons: list[str]
    """Of each prompt token."""
    sums: dict[str, int]
    """Tokens of each reason that there is."""


class Prompt(NamedTuple):
    """What a request began with; no tokens if the log has none."""

    namespace: Namespace
    tokens: list[Token]


class Running:
    """A sequence that was admitted and not removed since."""

    def __init__(self, request_id: RequestId, prompt: Prompt, tokens: list[Token], computed: int) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.tokens = tokens
        self.computed = computed


class Gone(NamedTuple):
    """How a block went the last time that it did."""

    reason: str
    seq: int
    """The batch."""
    for_request: RequestId | None
    """That needed its room."""


class Life:
    """A block from the event that caches it on."""

    def __init__(self, begun: int) -> None:
        self.begun = begun
        self.ended: int | None = None
        """Times."""
        self.reused = 0
        """By admissions."""


class Window:
    """What one window has, and why it has not what it had."""

    def __init__(self) -> None:
        self.places: dict[tuple[int, int], Block | None] = {}
        """By level and slot; None: a block that is not full, or of unknown tokens."""
        self.gone: dict[Block, Gone] = {}
        """Of each block that ever went; it may be back since."""
        self.lives: dict[Block, Life] = {}
        """Of the blocks that are cached, and after `CacheCreated` of those that may go on in the state that follows."""
        self.over: list[Life] = []

    def has(self, block: Block) -> bool:
        return block in self.places.values()

    def lose(self, place: tuple[int, int], gone: Gone) -> None:
        block = self.places.pop(place)
        if block is not None:
            self.gone[block] = gone

    def lose_all(self, gone: Gone) -> None:
        for place in list(self.places):
            self.lose(place, gone)

    def note_lives(self, now: int) -> None:
        """End the lives of what is not cached any more, and begin those of what is cached and had none."""
        cached = {block for block in self.places.values() if block is not None}
        for block in self.lives.keys() - cached:
            life = self.lives.pop(block)
            life.ended = now
            self.over.append(life)
        for block in cached - self.lives.keys():
            self.lives[block] = Life(now)


class Waiting(NamedTuple):
    """An admission of which the rest of its batch may still say more."""

    event: ev.SequenceAdded
    reasons: list[str]
    stores_before: int
    """Blocks that were stored in its batch before it."""
    missing: dict[int, tuple[int, Block]]
    """By token: the window and the block that a running request computes for the first time."""


class NaiveAudit:
    """Follows a log batch by batch."""

    def __init__(self) -> None:
        self.size = 1
        """Tokens per block."""
        self.reuse_on = True
        self.engine, self.slides, self.drops_last_hit = "", False, False
        self.groups: tuple[ev.GroupCreated, ...] = ()
        self.all_windows: list[Window] = []
        """By number, those of earlier epochs too."""
        self.running: dict[int, Running] = {}
        """By handle."""
        self.pages: dict[int, SymbolPage] = {}
        self.stores: list[tuple[int, Block]] = []
        """In this batch: window and block."""
        self.copy_failed = False
        """In this batch."""
        self.seq, self.now = -1, 0
        """The batch, and its time."""
        self.stored = 0
        """Full blocks."""
        self.charged: Counter[tuple[int, Gone]] = Counter()
        """Tokens that were computed again because of evictions, by window and how their blocks went."""
        self.knows_all = True
        """Whether the log has all tokens."""

    @property
    def lives(self) -> list[Life]:
        """Those that are over, and those that are not."""
        return [life for window in self.all_windows for life in (*window.over, *window.lives.values())]

    @property
    def windows(self) -> list[Window]:
        return self.all_windows[: len(self.groups)]

    def batch(self, batch: EventBatch) -> list[Admission]:
        """What was admitted in the next batch."""
        events = batch.events
        gaps = [at for at, event in enumerate(events) if isinstance(event, ev.Gap)]
        if gaps:  # what stands before continues what is missing
            events = events[gaps[-1] :]
        self.seq, self.now, self.stores = batch.seq, batch.ts, []
        self.copy_failed = any(isinstance(event, ev.TransferFailed) for event in events)
        waiting = []
        for at, event in enumerate(events):
            if isinstance(event, ev.SequenceAdded):
                waiting.append(self.admission(event, events[at + 1 :]))
            self.fold(event)
        return [self.admitted(each, batch.seq) for each in waiting]

    # -- one admission

    def admission(self, event: ev.SequenceAdded, later: Sequence[ev.AnyEvent]) -> Waiting:
        """Each token's reason as far as it is known now."""
        prompt = Prompt(event.namespace, self.spelled(event.tokens))
        self.check_reused(event, prompt)
        found = Waiting(event, [], len(self.stores), {})
        secondary = self.taken_from_secondary(event, later)
        for token in range(event.num_tokens):
            reason = self.reason(event, prompt, token, secondary, found.missing)
            found.reasons.append(reason)
            if reason in ("computing_again", "evicted", "dropped"):
                self.charge(prompt, token)
        return found

    def charge(self, prompt: Prompt, token: int) -> None:
        """A token is computed again because of an eviction."""
        block = self.block(prompt, token // self.size)
        assert block is not None
        at = self.first_window_without(block)
        assert at is not None
        self.charged[at, self.windows[at].gone[block]] += 1

    def admitted(self, waiting: Waiting, seq: int) -> Admission:
        """The same at the end of the batch."""
        reasons = list(waiting.reasons)
        for token, missing in waiting.missing.items():
            if missing in self.stores[waiting.stores_before :]:
                reasons[token] = "same_step"
        return Admission(waiting.event.request_id, seq, reasons, dict(Counter(reasons)))

    def taken_from_secondary(self, event: ev.SequenceAdded, later: Sequence[ev.AnyEvent]) -> set[int]:
        """The blocks of the prompt that some window has to bring back."""
        taken: set[int] = set()
        tokens = [0] * len(self.groups)
        for other in later:
            if (
                isinstance(other, ev.BlocksReused)
                and other.handle == event.handle
                and other.level == SECONDARY
            ):
                blocks = range(other.first_block, other.first_block + len(array("i", other.slots)))
                taken |= set(blocks)
                tokens[other.group] += len(blocks) * self.size
        assert tuple(tokens) == event.reused_secondary, "the log says two things about secondary"
        return taken

    def check_reused(self, event: ev.SequenceAdded, prompt: Prompt) -> None:
        """Prove that each window has the whole blocks that are reused, as far as the next token sees them."""
        for created, window in zip(self.groups, self.windows, strict=True):
            seen = max(0, event.reused - created.window + 1) if created.kind == ev.SLIDING else 0
            for index in range(seen // self.size, (event.reused - event.reused_partial) // self.size):
                block = self.block(prompt, index)
                assert block is None or window.has(block)

    def check_counts(self, event: ev.Checkpoint) -> None:
        """Prove that just as many blocks are cached, and as many sequences running, as the log says."""
        levels = [Counter(level for level, _ in window.places) for window in self.windows]
        assert [(count[0], count[1]) for count in levels] == list(event.num_cached)
        assert len(self.running) == event.num_sequences

    def reason(
        self,
        event: ev.SequenceAdded,
        prompt: Prompt,
        token: int,
        secondary: set[int],
        missing: dict[int, tuple[int, Block]],
    ) -> str:
        """The first row of the table that fits."""
        index = token // self.size
        if token == event.num_tokens - 1:
            return "last_token"
        if token < event.reused:
            if token >= event.reused - event.reused_partial:
                return "partial"
            return "secondary" if index in secondary else "primary"
        if token < event.reused + event.reused_external:
            return "external"
        if not self.reuse_on:
            return "reuse_off"
        if event.lookup is False:
            return "not_looked_up"
        if (index + 1) * self.size > event.num_tokens - 1:
            return "unaligned"
        block = self.block(prompt, index)
        if block is None:
            return "unknown"
        at = self.first_window_without(block)
        if at is None and self.drops_last_hit and index * self.size == event.reused:
            later = self.block(prompt, index + 1) if (index + 2) * self.size < event.num_tokens else None
            if later is None or self.first_window_without(later) is not None:
                return "last_hit"
        if at is None:
            return "not_reused" if self.engine and not self.slides else "not_servable"
        reason = self.why_missing(at, block)
        if reason == "being_computed":
            missing[token] = at, block
        return reason

    def first_window_without(self, block: Block) -> int | None:
        for at, window in enumerate(self.windows):
            if not window.has(block):
                return at
        return None

    def why_missing(self, at: int, block: Block) -> str:
        """Of a block that a window has not; `same_step` is not told from `being_computed` yet."""
        window = self.windows[at]
        if block in window.gone:
            reason = window.gone[block].reason
            return COMPUTING[reason] if self.is_being_computed(block) else reason
        if any(other.has(block) for other in self.windows):
            return "out_of_window"
        if self.is_being_computed(block):
            return "being_computed"
        if self.is_elsewhere(window, block):
            return "other_namespace"
        return "never_seen"

    def is_being_computed(self, block: Block) -> bool:
        """Whether it is in the prompt of a running request, which has not computed it yet."""
        return any(
            block in self.blocks(each.prompt) and len(block[2]) > each.computed
            for each in self.running.values()
        )

    def is_elsewhere(self, window: Window, block: Block) -> bool:
        """Whether the window has it in another namespace."""
        return any(
            other is not None and other[1:] == block[1:] and other[0] != block[0]
            for other in window.places.values()
        )

    # -- blocks

    def block(self, prompt: Prompt, index: int) -> Block | None:
        """A full block of these tokens; None if they do not reach so far."""
        begin, end = index * self.size, (index + 1) * self.size
        if len(prompt.tokens) < end:
            return None
        return prompt.namespace, begin, tuple(prompt.tokens[:end])

    def blocks(self, prompt: Prompt) -> list[Block]:
        """All full ones."""
        found = [self.block(prompt, index) for index in range(len(prompt.tokens) // self.size)]
        return [block for block in found if block is not None]

    def spelled(self, packed: bytes) -> list[Token]:
        """What symbols stand for."""
        return [self.spelled_one(symbol) for symbol in array("i", packed)]

    def spelled_one(self, symbol: int) -> Token:
        if symbol >= 0:
            return symbol
        number, index = divmod(-1 - symbol, 256)
        page = self.pages[number]
        if page.digest is None:
            return page.token + index, page.extra_id, None, 0
        return page.token, page.extra_id, page.digest, page.offset + index

    # -- what happens

    def fold(self, event: ev.AnyEvent) -> None:
        match event:
            case ev.EpochStarted():
                self.knows_all &= event.tokens_recorded
            case ev.CacheCreated():
                self.create(event)
            case ev.StateExported():
                self.install(event)
            case ev.SymbolsInterned():
                self.pages |= {page.number: page for page in event.pages}
            case ev.SymbolsForgotten():
                for number in array("I", event.pages):
                    self.pages.pop(number, None)
            case ev.SequenceAdded():
                prompt = Prompt(event.namespace, self.spelled(event.tokens))
                self.running[event.handle] = Running(
                    event.request_id, prompt, list(prompt.tokens), event.reused
                )
            case ev.TokensAppended():
                self.append(event)
            case ev.ContextComputed():
                self.running[event.handle].computed = event.num_tokens
            case ev.TransferFailed():
                for running in self.running.values():
                    running.computed = 0
            case ev.SequenceRewound():
                running = self.running[event.handle]
                del running.tokens[event.num_tokens :]
                running.prompt = running.prompt._replace(tokens=running.prompt.tokens[: event.num_tokens])
                running.computed = min(running.computed, event.num_tokens - 1)
            case ev.SequenceForked():
                parent = self.running[event.handle]
                child = Running(event.request_id, parent.prompt, list(parent.tokens), parent.computed)
                self.running[event.child] = child
            case ev.SequenceRemoved():
                del self.running[event.handle]
            case ev.BlocksStored():
                self.store(event)
            case ev.BlocksFilled():
                self.fill(event)
            case ev.BlocksReused():
                self.reuse(event)
            case ev.BlocksMoved():
                self.move(event)
            case ev.BlocksRemoved():
                self.remove(event)
            case ev.CacheCleared():
                for window in self.windows:
                    window.lose_all(Gone("copy_failed" if self.copy_failed else "cleared", self.seq, None))
                    window.note_lives(self.now)
            case ev.Checkpoint():
                self.check_counts(event)
            case _:
                pass  # nothing is cached by it, nor gone

    def create(self, event: ev.CacheCreated) -> None:
        for window in self.windows:
            window.lose_all(Gone("restarted", self.seq, None))
        self.size, self.groups = event.tokens_per_block, event.groups
        self.engine, self.slides = event.engine, any(group.kind == "sliding" for group in event.groups)
        self.drops_last_hit = event.drops_last_hit
        self.reuse_on = json.loads(event.config)["enable_block_reuse"]
        self.all_windows += [Window() for _ in range(len(self.all_windows), len(event.groups))]
        self.running, self.pages = {}, {}

    def append(self, event: ev.TokensAppended) -> None:
        for handle in array("q", event.handles):
            running = self.running[handle]
            if not event.draft:
                running.computed = max(running.computed, len(running.prompt.tokens))
        if not event.tokens:
            return  # the log has none
        handles, tokens = array("q", event.handles), self.spelled(event.tokens)
        counts = array("I", event.counts) if event.counts else [1] * len(handles)
        for handle, count in zip(handles, counts, strict=True):
            self.running[handle].tokens += tokens[:count]
            tokens = tokens[count:]

    def store(self, event: ev.BlocksStored) -> None:
        slots = array("i", event.slots)
        for at, slot in enumerate(slots):
            full = at < len(slots) - 1 or event.last_tokens == self.size
            self.cache(event.group, event.level, slot, event.handle, event.first_block + at, full=full)

    def fill(self, event: ev.BlocksFilled) -> None:
        rows = zip(array("q", event.handles), array("I", event.blocks), array("i", event.slots), strict=True)
        for handle, index, slot in rows:
            self.cache(event.group, ev.PRIMARY, slot, handle, index, full=True)

    def cache(self, group: int, level: int, slot: int, handle: int, index: int, *, full: bool) -> None:
        """A block of a sequence is cached from now on."""
        running = self.running[handle]
        block = self.block(Prompt(running.prompt.namespace, running.tokens), index) if full else None
        self.windows[group].places[level, slot] = block
        self.windows[group].note_lives(self.now)
        if block is not None:
            self.stores.append((group, block))
            self.stored += 1

    def reuse(self, event: ev.BlocksReused) -> None:
        """An admission reuses blocks; with `replaced` a sequence takes them in the place of its own."""
        window = self.windows[event.group]
        for slot in array("i", event.slots):
            block = window.places[event.level, slot]
            if block is not None and not event.replaced:
                window.lives[block].reused += 1

    def remove(self, event: ev.BlocksRemoved) -> None:
        """Blocks are gone from a level, and so altogether."""
        window = self.windows[event.group]
        running = None if event.handle is None else self.running.get(event.handle)
        needed_by = None if running is None else running.request_id
        reason = "dropped" if event.level == SECONDARY else "evicted"
        reason = "invalidated" if event.why == ev.RemoveReason.INVALIDATED else reason
        for slot in array("i", event.slots):
            window.lose((event.level, slot), Gone(reason, self.seq, needed_by))
        window.note_lives(self.now)

    def move(self, event: ev.BlocksMoved) -> None:
        places = self.windows[event.group].places
        for slot, to in zip(array("i", event.from_slots), array("i", event.to_slots), strict=True):
            places[event.to_level, to] = places.pop((event.from_level, slot))

    # -- a whole state

    def install(self, event: ev.StateExported) -> None:
        """What is in it is cached; what was cached before and is not in it was lost."""
        self.pages = {page.number: page for page in event.symbols}
        self.running = {}
        for each in event.sequences:
            tokens = self.spelled(each.tokens)
            prompt = Prompt(each.namespace, tokens[: each.num_prompt_tokens])
            self.running[each.handle] = Running(each.request_id, prompt, tokens, each.computed)
        for window, created, exported in zip(self.windows, self.groups, event.groups, strict=True):
            window.lose_all(Gone("restarted", self.seq, None))
            window.places = dict(self.exported(exported, slides=created.kind == ev.SLIDING))
            window.note_lives(self.now)

    def exported(
        self, group: GroupExported, *, slides: bool
    ) -> Iterator[tuple[tuple[int, int], Block | None]]:
        """The places of a window and what is in them: run by run, each behind its parent."""
        runs, slots, columns = array("q", group.runs), array("i", group.slots), array("q", group.blocks)
        tokens, rows, number = self.spelled(group.symbols), list[Prompt](), 0
        for at in range(0, len(runs), 10):
            parent, count, last_tokens, level = runs[at : at + 4]
            above = rows[parent] if parent >= 0 else Prompt(group.namespaces[-1 - parent], [])
            length = (count - 1) * self.size + last_tokens
            rows.append(Prompt(above.namespace, above.tokens + tokens[:length]))
            tokens = tokens[length:]
            for index in range(count):
                block = self.block(rows[-1], len(above.tokens) // self.size + index)
                if slots[number] >= 0:
                    yield (columns[7 * number] if slides else level, slots[number]), block
                number += 1


def naive_audit(batches: Iterable[EventBatch]) -> Iterator[Admission]:
    """All admissions of a log."""
    audit = NaiveAudit()
    for batch in batches:
        yield from audit.batch(batch)
