"""A log for an engine with a cache manager of its own: its decisions become events, with all that logs are good for.

Each call is one decision, in the engine's own block ids, and becomes events as a `KVCacheManager` emits them. They go
to the same log and sinks, and change a mirror of the cache by the same `CacheState.apply`. A call that cannot be true
after those before raises `Contradiction` and leaves no trace: everything is checked before the first event.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from typing import Literal

import msgspec

from events import types as ev
from events.ids import Handle
from events.packed import NAME_BYTES, TOKEN_BYTES
from events.tokens.names import NAMED_BY_ENGINE
from events.types import FULL, PRIMARY, SECONDARY, UNCACHED, RemoveReason, RequestId
from kvcache.calls.guard import exclusive
from kvcache.config import KVCacheConfig
from kvcache.decide.decoding import RunningRequests
from kvcache.decide.housekeeping import Housekeeping
from kvcache.decide.window_manager import BlockEvents
from kvcache.errors import (
    Contradiction,
    OutOfBlocks,
    Unsupported,
    UsageError,
    shown,
)
from kvcache.fold.full_group import FullGroup
from kvcache.fold.positional import MOST_TOKENS, PositionalGroup, shared_slots
from kvcache.fold.prefix_tree import Piece
from kvcache.fold.sequence import DEFAULT, DEFAULT_PRIORITY, Sequence, packed_handles
from kvcache.inputs import (
    CheckedRequest,
    MultimodalItem,
    RequestChecker,
    Tokens,
    checked_choice,
    checked_integer,
    checked_natural,
    checked_request_id,
    checked_stop,
    checked_text,
    listed,
    pack_counts,
    pack_tokens,
)
from kvcache.layout import Layout
from kvcache.record.journal import EventSourcedCache, cache_created
from kvcache.record.mirror import (
    BlockIds,
    Blocks,
    LayerGroup,
    Mirror,
    contradiction,
    listed_blocks,
    pool_shared,
)
from kvcache.record.outputs import LogTarget, Outputs
from sinks import Sink, SinkRunner

Names = bytes | Items[bytes]
"""Names of blocks made by an engine, concatenated or one by one; each has `name_bytes`."""


class Recorder(EventSourcedCache):
    """Recorder of the decisions of an engine with a cache manager of its own, with a mirror of its cache.

    `config` describes its cache: `tokens_per_block`, `primary_blocks`, `max_sequence_length`, and if it keeps blocks in
    host memory `secondary_blocks`; `log.*` are the log's settings. `engine` is its name, as in "vllm 0.33.0". `log` and
    `sinks` are as a `KVCacheManager` takes them. Its block ids count from `first_block_id`. `name_bytes`: length of the
    engine's own names of blocks (8, 16 or 32); None: names are made here, by `config.block_hash`. `drops_last_hit`: it
    recomputes the last block of each hit by design, as speculative decoding with EAGLE does. `groups`: further layers
    with blocks in the same pool. One thread makes all calls.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        engine: str,
        log: LogTarget = None,
        sinks: Items[str | Sink | SinkRunner] = (),
        first_block_id: int = 0,
        name_bytes: int | None = None,
        groups: Items[LayerGroup] = (),
        drops_last_hit: bool = False,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        if not isinstance(config, KVCacheConfig):
            raise UsageError(f"config must be a KVCacheConfig, not {type(config).__name__}")
        # No call records a copy of the start of a block, so none is made when the engine's requests are replayed; and
        # what `replaced` records is free.
        without = {"enable_partial_reuse": False, "append_only_tables": False}
        self.config = config = config.model_copy(update=without)
        self.engine, sinks = checked_text(engine, "engine"), listed(sinks, "sinks")
        if not engine:
            raise UsageError('engine must name the engine that makes the decisions, as in "vllm 0.33.0"')
        layout = Layout.of(config)
        created = self._created(layout, name_bytes, drops_last_hit, published=log is not None or bool(sinks))
        first = checked_natural(first_block_id, "first_block_id")
        primary, secondary = created.groups[0].num_blocks
        self._ids, self._lower_ids = BlockIds(first, primary), BlockIds(0, secondary)
        self._first_block = first
        shared = pool_shared(groups, named=created.key_bytes > 0)
        with self._beginning(created, config, log, sinks, wall_ns, shared=shared) as outputs:
            self._assemble(outputs, layout)

    def _created(
        self, layout: Layout, name_bytes: int | None, drops_last_hit: bool, *, published: bool
    ) -> ev.CacheCreated:
        if len(layout.groups) != 1 or layout.groups[0].kind != FULL:
            raise Unsupported(
                "recording a cache with sliding windows or cross attention",
                "record only the layers with full attention, and omit max_attention_window",
            )
        created = msgspec.structs.replace(
            cache_created(self.config, layout, published=published),
            format_version=ev.FORMAT_VERSION,
            engine=self.engine,
            drops_last_hit=drops_last_hit,
        )
        if name_bytes is None:
            return created
        algorithm = NAMED_BY_ENGINE.get(checked_integer(name_bytes, "name_bytes"))
        if algorithm is None:
            raise UsageError(f"name_bytes must be one of {', '.join(map(str, NAMED_BY_ENGINE))}, or None")
        return msgspec.structs.replace(created, hash_algorithm=algorithm, key_bytes=name_bytes)

    def _assemble(self, outputs: Outputs, layout: Layout) -> None:
        """Build the parts that work on the state."""
        config, hashing = self.config, self.state.hashing
        group = self.state.groups[0]
        assert isinstance(group, FullGroup)
        self._group, self._size, self._key_bytes = group, config.tokens_per_block, hashing.key_bytes
        self._names_given = hashing.given
        self._housekeeping = Housekeeping(
            self.state,
            self._emit,
            lambda: 0,
            config.checkpoint_spacing if outputs.log is not None else float("inf"),
        )
        self._checker = RequestChecker(self.state, layout, config, log_has_tokens=outputs.records_tokens)
        self._events = BlockEvents(self.state, group, self._emit)
        self._mirror, self._running = Mirror(self.state, group, self._ids), RunningRequests(self.state)
        self._ids_of: dict[int, BlockIds] = {
            each.index: BlockIds(self._first_block, len(each.pool), each.pool.start)
            if each.pool
            else self._ids
            for each in self.state.positional
        }
        """Mapping of the blocks of each further group."""
        self._fresh: set[int] = set()
        """Sequences without a block of their own so far."""

    # -- admissions

    @exclusive
    def admitted(
        self,
        request_id: RequestId,
        tokens: Tokens,
        reused: Blocks = (),
        *,
        onboarded: Blocks = (),
        onto: Blocks = (),
        lora_id: int | None = None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        multimodal: Items[MultimodalItem] = (),
        extra_ids: Tokens | None = None,
        resumed: bool = False,
        external: int = 0,
        session: str | None = None,
        labels: Mapping[str, str] | None = None,
        lookup: bool = True,
    ) -> None:
        """Record an admitted request with all its tokens so far, and the cached blocks that it reuses, from its first
        one on.

        After those of primary may come `onboarded` ones, ids of secondary blocks that are copied to the free primary
        blocks `onto`. `external`: the number of tokens after these to be loaded from outside of the cache; call
        `computed` when they are there, `not_loaded` if they do not come. At least one token is left to be computed.
        `resumed`: it ran before, and was preempted. The other arguments are those of a `Request`. Further blocks are
        recorded by `allocated`.
        """
        given = (request_id, tokens, lora_id, lora_name, cache_salt, multimodal, extra_ids, resumed)
        request = self._checker.check_one(*given, None, None, None, session, labels, lookup)
        blocks, targets = listed_blocks(reused), listed_blocks(onto)
        lower = listed_blocks(onboarded)
        slots, below, free = self._ids.slots(blocks), self._lower_ids.slots(lower), self._ids.slots(targets)
        loaded = checked_natural(external, "external")
        self._mirror.refuse_other_path(request, blocks, slots, lower, below, loaded)
        self._mirror.refuse_taken(targets, free, request.request_id)
        if len(free) != len(below):
            raise UsageError(f"{len(below)} onboarded blocks need as many free blocks, not {len(free)}")
        pages = self._housekeeping.missing_pages([request.rich] if request.rich is not None else [])
        self._warn_of_no_flush()
        handle = Handle(self.state.next_handle)
        with self._guard:
            self._housekeeping.intern(pages)
            self._ids.hold(handle, blocks, slots)
            self._fresh.add(handle)
            self._admit(handle, request.with_symbols(self.state.symbols), slots, below, free, loaded)
        if self._salts.wanted:
            self._salts.remember([cache_salt])

    def _admit(
        self,
        handle: Handle,
        request: CheckedRequest,
        slots: array[int],
        below: array[int],
        free: array[int],
        external: int,
    ) -> None:
        size = self._size
        self._emit(
            ev.SequenceAdded(
                handle=handle,
                request_id=request.request_id,
                namespace=request.namespace,
                num_tokens=request.num_tokens,
                tokens=request.symbols,
                reused=(len(slots) + len(below)) * size,
                reused_primary=(len(slots) * size,),
                reused_secondary=(len(below) * size,),
                reused_partial=0,
                resumed=request.resumed,
                reused_external=external,
                session=request.session,
                labels=request.labels,
                lookup=None if request.lookup else False,
            )
        )
        sequence = self.state.sequences[handle]
        if slots:
            self._events.reuse(sequence, Piece(PRIMARY, 0, slots, self._mirror.keys_at(PRIMARY, slots)))
        if below:
            found = Piece(SECONDARY, len(slots), below, self._mirror.keys_at(SECONDARY, below))
            self._events.reuse(sequence, found)
            self._events.move_up(sequence, found, free, ev.MoveReason.ONBOARD)

    @exclusive
    def refused(self, request_id: RequestId, needed: int, available: int | None = None) -> None:
        """Record that a request was refused for lack of room: it needed `needed` blocks.

        `available` is the number of available blocks; None: that of the mirror, where each content counts once. The
        events have only the first refusal of a request until it is admitted.
        """
        request_id, blocks = checked_request_id(request_id), checked_natural(needed, "needed")
        self._checker.refuse_running(request_id)
        level, window = self._group.levels[PRIMARY], self._group.window
        held, _ = shared_slots(self.state.positional)
        left = level.available - held if available is None else checked_natural(available, "available")
        with self._guard:
            self._housekeeping.note_refusal(request_id, OutOfBlocks(0, (blocks,), (left,), (window,)))

    # -- running requests

    @exclusive
    def allocated(self, request_id: RequestId, blocks: Blocks) -> None:
        """Record free blocks appended to a request's block table. Anything cached in them is evicted before."""
        sequence = self._running.sequence(request_id)
        ids, slots = self._located(blocks)
        if not slots:
            return
        self._mirror.refuse_taken(ids, slots, sequence.request_id)
        with self._guard:
            self._allocate([sequence], [len(slots)], slots, self._why(sequence))

    @exclusive
    def grown(self, request_ids: Items[RequestId], blocks: Blocks) -> None:
        """Record one block for each of these requests, as `allocated`: one call, and mostly one event, for a step."""
        sequences, ids = self._running.sequences(listed(request_ids, "request_ids")), listed_blocks(blocks)
        slots = self._ids.slots(ids)
        if len(slots) != len(sequences):
            raise UsageError(f"{len(slots)} blocks were given for {len(sequences)} requests: pass one each")
        if not self._group.levels[PRIMARY].are_blank(slots):
            for at, sequence in enumerate(sequences):
                self._mirror.refuse_taken(ids[at : at + 1], slots[at : at + 1], sequence.request_id)
            raise Contradiction("one block was given to two requests")
        reasons = [self._why(sequence) for sequence in sequences]
        with self._guard:
            for why in dict.fromkeys(reasons):
                these = [at for at, other in enumerate(reasons) if other == why]
                given = array("i", [slots[at] for at in these])
                self._allocate([sequences[at] for at in these], None, given, why)

    def _why(self, sequence: Sequence) -> ev.AllocateReason:
        if sequence.handle in self._fresh:
            return ev.AllocateReason.PROMPT
        if len(sequence.tables[0]) * self._size < sequence.num_prompt_tokens:
            return ev.AllocateReason.RESERVE
        return ev.AllocateReason.DECODE

    def _allocate(
        self, sequences: list[Sequence], counts: list[int] | None, slots: array[int], why: ev.AllocateReason
    ) -> None:
        self._fresh.difference_update([sequence.handle for sequence in sequences])
        self._events.allocate(packed_handles(sequences), slots, counts, why)

    @exclusive
    def computed(self, request_id: RequestId, num_tokens: int) -> None:
        """Record that the K/V of the first `num_tokens` tokens is written, or will be by the step that is about to run.

        Needed for prompts: `stored` implies it for its blocks, `appended` for all tokens but the new ones.
        """
        number, sequence = checked_natural(num_tokens, "num_tokens"), self._running.sequence(request_id)
        slots = len(sequence.tables[0]) * self._size
        if number > min(sequence.num_tokens, slots):
            has = f"{sequence.num_tokens} tokens and slots for {slots}"
            raise contradiction(sequence, f"has {has}, so {number} cannot be computed")
        if number < sequence.path_ends[0].end * self._size:
            cached = sequence.path_ends[0].end
            raise contradiction(
                sequence, f"has {cached} cached blocks, so more than {number} tokens are computed"
            )
        if number != sequence.computed:
            with self._guard:
                self._emit(ev.ContextComputed(handle=sequence.handle, num_tokens=number))

    @exclusive
    def not_loaded(self, request_id: RequestId, num_tokens: int) -> None:
        """Record that this number of a request's `external` tokens do not come, and are computed like others."""
        number, sequence = checked_natural(num_tokens, "num_tokens"), self._running.sequence(request_id)
        if number >= sequence.num_tokens:
            raise contradiction(sequence, f"has {sequence.num_tokens} tokens, so {number} cannot be missing")
        if number:
            with self._guard:
                self._emit(ev.LoadFailed(handle=sequence.handle, num_tokens=number))

    @exclusive
    def stored(
        self, request_id: RequestId, num_blocks: int, names: Names | None = None
    ) -> list[tuple[int, int]]:
        """Record that the first `num_blocks` blocks of a request can be found from now on; earlier ones need no
        mention.

        Their K/V is written, or will be by the step that is about to run. `names` are those of the blocks that were not
        stored before, if the engine makes them. A block with content that is cached already is a copy from now on.

        Returns the blocks with a counterpart in secondary, each with that secondary block, which is free now.
        """
        sequence, last = self._running.sequence(request_id), checked_natural(num_blocks, "num_blocks")
        if last <= sequence.path_ends[0].end:
            return []
        keys = self._given(names, last - sequence.path_ends[0].end)
        self._refuse_unstorable(sequence, last, keys)
        with self._guard:
            return self._store(sequence, last, keys)

    @exclusive
    def filled(self, request_ids: Items[RequestId], names: Names | None = None) -> None:
        """Record one more block for each of these requests, as `stored`: one call, and mostly one event, for a step."""
        sequences = self._running.sequences(listed(request_ids, "request_ids"))
        keys, size = self._given(names, len(sequences)), self._key_bytes if self._names_given else 0
        others, row = list[tuple[Sequence, int, bytes]](), list[tuple[Sequence, int, bytes]]()
        named: dict[tuple[int, bytes], bytes] = {}
        for at, sequence in enumerate(sequences):
            key, block = keys[at * size : (at + 1) * size], sequence.path_ends[0].end
            if self._continues_alone(sequence, block):
                row.append((sequence, block, key))
                continue
            self._refuse_unstorable(sequence, block + 1, key)
            content = sequence.packed(block * self._size, (block + 1) * self._size)
            if key != named.setdefault((id(sequence.path_ends[0]), content), key):
                raise self._mirror.other_name(sequence, block, sequence.tables[0][block])
            others.append((sequence, block + 1, key))
        with self._guard:
            if row:
                self._fill(row)
            for each in others:
                # Of two equal ones in this call, the second is a copy of the first.
                self._store(*each)

    @exclusive
    def replaced(self, request_id: RequestId, first_block: int, blocks: Blocks) -> None:
        """Record that a request has computed the content of these cached blocks, and uses them instead of its own, now
        free.

        For engines that keep no copies. `first_block` must be the first one that the request does not have cached.
        """
        sequence, first = self._running.sequence(request_id), checked_natural(first_block, "first_block")
        ids, slots = self._located(blocks)
        if not slots:
            return
        name, last = shown(sequence.request_id), first + len(slots)
        if first != sequence.path_ends[0].end:
            cached = f"its first {sequence.path_ends[0].end} blocks cached"
            raise contradiction(
                sequence, f"has {cached}: the next block to replace is the one after them, not block {first}"
            )
        self._mirror.refuse_unstorable(sequence, first, last)
        found = self._mirror.cached_already(sequence, first, last)
        there = array("i", b"".join([piece.slots for piece in found if piece.level == PRIMARY]))
        if there != slots:
            wrong = next(at for at in range(len(slots)) if there[at : at + 1] != slots[at : at + 1])
            raise Contradiction(
                f"block {ids[wrong]} does not have the content of block {first + wrong} of request {name}, or "
                "is not cached",
                sequence.request_id,
                int(ids[wrong]),
            )
        own = sequence.tables[0][first:last]
        with self._guard:
            self._ids.hold(sequence.handle, ids, slots)
            self._note_computed(sequence, last)
            piece = Piece(PRIMARY, first, slots, self._mirror.keys_at(PRIMARY, slots))
            self._events.reuse(sequence, piece, own[::-1].tobytes())

    @exclusive
    def appended(
        self, request_ids: Items[RequestId], tokens: Tokens, counts: Items[int] | None = None
    ) -> None:
        """Record new tokens of these requests: one each, or `counts`. All but the last of each count as computed, which
        needs no slot yet.
        """
        ids = request_ids if type(request_ids) is list else listed(request_ids, "request_ids")
        limit = self._checker.longest_sequence
        packed = pack_tokens(tokens, limit.tokens * (len(ids) or 1))
        num_tokens = len(packed) // TOKEN_BYTES
        if counts is None:
            batch = self._running.decode_batch(ids, num_tokens, limit)
            for sequence in batch.begun:
                self._mirror.refuse_uncomputable(sequence, sequence.num_tokens)
            if ids:
                with self._guard:
                    self._emit(ev.TokensAppended(handles=batch.handles, counts=b"", tokens=packed))
                    batch.advance()
            return
        sizes, sequences = pack_counts(counts, len(ids), num_tokens), self._running.sequences(ids)
        for sequence, count in zip(sequences, sizes, strict=True):
            if sequence.num_tokens + count > limit.tokens:
                raise limit.exceeded_by(sequence.num_tokens + count)
            self._mirror.refuse_uncomputable(sequence, sequence.num_tokens + count - 1)
        if ids:
            with self._guard:
                self._emit(
                    ev.TokensAppended(
                        handles=packed_handles(sequences), counts=sizes.tobytes(), tokens=packed
                    )
                )

    @exclusive
    def ended(
        self,
        request_id: RequestId,
        why: Literal["finished", "preempted", "aborted"] = "finished",
        *,
        stop: str | None = None,
    ) -> None:
        """Record that a request has released all its blocks: cached ones stay cached, the others are free.

        `stop` is the reason for which its output ended, in the engine's own words of at most 64 characters, as
        ``length``.
        """
        stop = None if stop is None else checked_stop(stop)
        reason, sequence = checked_choice(why, ev.EndReason, "why"), self._running.sequence(request_id)
        with self._guard:
            self._fresh.discard(sequence.handle)
            self._emit(
                ev.SequenceRemoved(
                    handle=sequence.handle,
                    stored=sequence.stored,
                    freed=(self._group.freed_by(sequence),),
                    num_tokens=sequence.num_tokens,
                    computed=sequence.computed,
                    why=reason,
                    stop=stop,
                )
            )
            self._ids.release(sequence.handle, sequence.tables[0])

    # -- evictions

    @exclusive
    def evicted(
        self,
        blocks: Blocks,
        request_id: RequestId | None = None,
        *,
        level: Literal["primary", "secondary"] = "primary",
    ) -> None:
        """Record that the content of these blocks is gone, and they are free. No running request may hold them.

        With full attention nothing can be found after an evicted block, so blocks that continue it must be evicted
        before, or in the same call. `request_id`: the running request that needed the room.
        """
        if level not in ("primary", "secondary"):
            raise UsageError("level must be primary or secondary")
        index, ids = PRIMARY if level == "primary" else SECONDARY, listed_blocks(blocks)
        handle = None if request_id is None else self._running.sequence(request_id).handle
        leaving: list[tuple[int, int]] = []
        if index == PRIMARY:
            leaving, slots = self._ids.evictable(ids, self._ids.slots(ids))
        else:
            slots = self._lower_ids.slots(ids)
        ends = self._mirror.ends(index, slots)
        with self._guard:
            for block, slot in leaving:
                self._ids.leave(block, slot)
            for piece, names in ends:
                self._events.remove(index, piece, names, ev.RemoveReason.CAPACITY, handle)

    @exclusive
    def invalidated(self, blocks: Blocks) -> list[int]:
        """Record that these blocks, and those that continue them, cannot be found any more: their content is wrong, as
        after a load that failed. Blocks held by running requests stay theirs, without a name.

        Returns all blocks affected.
        """
        ids, slots = self._located(blocks)
        self._mirror.refuse_uncached(ids, slots)
        lost = list(map(int, ids))
        with self._guard:
            for level, piece, names in self._mirror.tails(self._ids.invalidate(ids, slots)):
                self._events.remove(level, piece, names, ev.RemoveReason.INVALIDATED)
                lost += self._ids.lose(piece) if level == PRIMARY else ()
        return list(dict.fromkeys(lost))

    @exclusive
    def moved(self, blocks: Blocks, to: Blocks, request_id: RequestId | None = None) -> None:
        """Record that the content of these blocks is from now on in the secondary blocks `to`, and not in primary any
        more.

        No running request may hold them, and nothing in primary may continue them except blocks moved before them in
        the same call. `request_id`: the running request that needed the room.
        """
        ids, targets = listed_blocks(blocks), listed_blocks(to)
        slots, free = self._ids.slots(ids), self._lower_ids.slots(targets)
        if len(slots) != len(free):
            raise UsageError(
                f"{len(slots)} moved blocks need as many secondary blocks, but {len(free)} were given"
            )
        handle = None if request_id is None else self._running.sequence(request_id).handle
        for block, slot in zip(ids, slots, strict=True):
            if slot in self._ids.copies:
                instead = "record its eviction instead, and move the last copy"
                raise Unsupported(f"moving block {block}, which has copies in primary", instead)
        self._mirror.refuse_taken_below(targets, free)
        ends, done = self._mirror.ends(PRIMARY, slots, keep_order=True, moving=True), 0
        with self._guard:
            for piece, names in ends:
                to_slots = free[done : done + len(piece)]
                self._events.offload(piece, names, to_slots, handle)
                done += len(piece)

    @exclusive
    def cleared(self) -> None:
        """Record that nothing is cached any more. Blocks held by running requests stay theirs, without a name."""
        with self._guard:
            self._housekeeping.clear()
            self._ids.forget_names()

    # -- further groups, numbered from 1 on

    @exclusive
    def taken(
        self, request_id: RequestId, indices: Items[int], blocks: Blocks, *, group: int, reused: bool = False
    ) -> None:
        """Record blocks that a request has in its table of a group, at these indices, in each of which it had none.

        They were free or, if `reused`, were found by their names in the group.
        """
        into, sequence = self._positional(group), self._running.sequence(request_id)
        ids = listed_blocks(blocks)
        slots, at = self._ids_of[group].slots(ids), self._indices(indices, len(ids))
        if not slots:
            return
        table = into.tables.get(sequence.handle, {})
        for index in at:
            if index in table:
                raise contradiction(sequence, f"already has a block at index {index} of group {group}")
        if len(set(at)) != len(at):
            raise UsageError("duplicate index in one call")
        if reused:
            for block, slot, index in zip(ids, slots, at, strict=True):
                if not into.ends_in(slot, index):
                    raise contradiction(
                        sequence,
                        f"reuses block {block} at index {index}, but the block has no name there",
                        block,
                    )
        else:
            self._mirror.refuse_taken(ids, slots, sequence.request_id, into)
        with self._guard:
            self._emit(
                ev.SlotsTaken(
                    handle=sequence.handle,
                    group=into.index,
                    indices=at.tobytes(),
                    slots=slots.tobytes(),
                    reused=reused,
                )
            )

    @exclusive
    def left(self, request_id: RequestId, indices: Items[int], *, group: int) -> None:
        """Record that a request released the blocks at these indices of a group: no later token needs them.

        Named blocks can still be found; the others are free. A request that has `ended` has released all of its blocks.
        """
        of, sequence = self._positional(group), self._running.sequence(request_id)
        table, at = of.tables.get(sequence.handle, {}), self._indices(indices)
        slots = array("i")
        for index in at:
            if index not in table:
                raise contradiction(sequence, f"has no block at index {index} of group {group}")
            slots.append(table[index])
        if len(set(at)) != len(at):
            raise UsageError("duplicate index in one call")
        if at:
            with self._guard:
                self._emit(
                    ev.SlotsLeft(
                        handle=sequence.handle, group=of.index, indices=at.tobytes(), slots=slots.tobytes()
                    )
                )

    @exclusive
    def named(
        self,
        request_id: RequestId,
        blocks: Blocks,
        names: Names | None,
        positions: Items[int],
        *,
        group: int,
    ) -> None:
        """Record that these blocks of a request can be found, each by the name of the request's first `positions`
        tokens.

        Their content is written, or will be by the step that is about to run. A block can have several names. `names`
        is None if names are made here: each position must be the end of a block that is `stored`, or reused.
        """
        of, sequence = self._positional(group), self._running.sequence(request_id)
        if of.created.kind == UNCACHED:
            raise UsageError(f"blocks of group {group} have no names and cannot be found")
        ids = listed_blocks(blocks)
        slots, at = self._ids_of[group].slots(ids), self._indices(positions, len(ids))
        keys = self._made_keys(sequence, at) if names is None else self._keys(names, len(slots))
        seen = set[tuple[int, bytes]]()
        own = of.tables.get(sequence.handle, {}).values()
        for block, slot, key, position in zip(ids, slots, keys, at, strict=True):
            if slot not in own:
                raise contradiction(
                    sequence, f"names block {block} of group {group}, which it does not hold", block
                )
            if not 0 < position <= sequence.num_tokens:
                raise contradiction(
                    sequence,
                    f"has {sequence.num_tokens} tokens, so it has no name for position {position}",
                    block,
                )
            if key in of.names.get(slot, {}) or (slot, key) in seen:
                raise contradiction(sequence, f"gives block {block} a name that it already has", block)
            seen.add((slot, key))
        if slots:
            with self._guard:
                self._emit(
                    ev.SlotsNamed(
                        handle=sequence.handle,
                        group=of.index,
                        slots=slots.tobytes(),
                        keys=b"".join(keys),
                        positions=at.tobytes(),
                    )
                )

    @exclusive
    def unnamed(
        self,
        blocks: Blocks,
        names: Names | None,
        request_id: RequestId | None = None,
        *,
        group: int,
        why: Literal["capacity", "superseded"] = "capacity",
    ) -> None:
        """Record that these blocks cannot be found any more by these names, one for each: they make room, perhaps for a
        request.

        `names`: None stands for the only name of each block. `superseded`: something else was written there.
        """
        of, reason = self._positional(group), checked_choice(why, RemoveReason, "why")
        ids = listed_blocks(blocks)
        slots, seen = self._ids_of[group].slots(ids), set[tuple[int, bytes]]()
        if names is None:
            names = [next(iter(of.names.get(slot, ())), bytes(self._key_bytes)) for slot in slots]
        keys = self._keys(names, len(slots))
        handle = None if request_id is None else self._running.sequence(request_id).handle
        for block, slot, key in zip(ids, slots, keys, strict=True):
            if key not in of.names.get(slot, {}) or (slot, key) in seen:
                raise Contradiction(
                    f"block {block} in group {group} does not have the name that it should lose",
                    block=int(block),
                )
            seen.add((slot, key))
        if slots:
            with self._guard:
                self._emit(
                    ev.SlotsUnnamed(
                        group=of.index, slots=slots.tobytes(), keys=b"".join(keys), why=reason, handle=handle
                    )
                )

    @exclusive
    def deferred(self, request_id: RequestId, *, group: int) -> None:
        """Record that a request waits for a step, in which another one writes the blocks that it found in a group."""
        of = self._positional(group)
        with self._guard:
            self._emit(ev.HitDeferred(request_id=checked_request_id(request_id), group=of.index))

    # -- end of a step

    @exclusive
    def counted(self, prompt_tokens: int, reused_tokens: int) -> None:
        """Record the engine's own counts so far: tokens of prompts, and how many of them it reused.

        They are part of checkpoints, so that `audit` can compare the log with them.
        """
        self._housekeeping.engine_counts = (
            checked_natural(prompt_tokens, "prompt_tokens"),
            checked_natural(reused_tokens, "reused_tokens"),
        )

    @exclusive
    def check(self) -> None:
        """Prove the laws of the mirror; raises `InvariantViolated`. Slow: for tests."""
        self.state.check()
        self._ids.check()

    # -- shared by calls

    def _located(self, blocks: Blocks) -> tuple[Blocks, array[int]]:
        """Return blocks of primary, and the slots in which they lie."""
        ids = listed_blocks(blocks)
        return ids, self._ids.slots(ids)

    def _positional(self, group: int) -> PositionalGroup:
        groups, first = self.state.positional, len(self.state.groups)
        if not first <= checked_integer(group, "group") < first + len(groups):
            raise UsageError(f"unknown further group {group}")
        return groups[group - first]

    def _made_keys(self, sequence: Sequence, positions: array[int]) -> list[bytes]:
        """Return the names, made here, of the first tokens of a sequence up to each of these positions."""
        size, keys = self._key_bytes, sequence.keys
        if self._names_given:
            raise UsageError("the engine names its blocks: give names")
        for position in positions:
            if not position or position % self._size or position // self._size * size > len(keys):
                raise contradiction(
                    sequence, f"has no cached block that ends at {position}, whose name to use"
                )
        ends = [position // self._size * size for position in positions]
        return [bytes(keys[end - size : end]) for end in ends]

    def _indices(self, numbers: Items[int], count: int | None = None) -> array[int]:
        row = [checked_natural(each, "an index or position") for each in listed(numbers, "indices")]
        if max(row, default=0) > MOST_TOKENS:
            raise UsageError(f"an index or position must be at most {MOST_TOKENS}")
        at = array("I", row)
        if count is not None and len(at) != count:
            raise UsageError(f"{count} blocks, but {len(at)} numbers for them: pass one per block")
        return at

    def _keys(self, names: Names | None, count: int) -> list[bytes]:
        joined, size = self._joined(names, count), self._key_bytes
        return [joined[at : at + size] for at in range(0, len(joined), size)]

    def _joined(self, names: Names | None, count: int) -> bytes:
        keys = names if isinstance(names, bytes) else b"".join(listed(names or (), "names"))
        if len(keys) != count * self._key_bytes:
            raise UsageError(f"expected {count} names of {self._key_bytes} bytes each, got {len(keys)} bytes")
        return keys

    def _given(self, names: Names | None, blocks: int) -> bytes:
        """Return the keys that an engine made for this number of blocks; empty if they are made here."""
        if not self._names_given:
            if names is not None:
                raise UsageError(
                    "names were given, but the recorder makes them itself: create it with name_bytes, or "
                    "pass no names"
                )
            return b""
        return self._joined(names, blocks)

    def _refuse_unstorable(self, sequence: Sequence, last: int, keys: bytes) -> None:
        """Raise `Contradiction` unless a sequence's next blocks can be found from now on, by these keys."""
        first, size = sequence.path_ends[0].end, self._key_bytes
        self._mirror.refuse_unstorable(sequence, first, last)
        for piece in self._mirror.cached_already(sequence, first, last) if keys else ():
            begin = (piece.first - first) * size
            if keys[begin : begin + len(piece.keys)] != piece.keys:
                wrong = next(
                    at
                    for at in range(len(piece.slots))
                    if keys[begin + at * size : begin + (at + 1) * size]
                    != piece.keys[at * size : (at + 1) * size]
                )
                raise self._mirror.other_name(sequence, piece.first + wrong, piece.slots[wrong])

    def _note_computed(self, sequence: Sequence, blocks: int) -> None:
        """Count blocks with K/V written by the engine as computed, when they are cached."""
        if blocks * self._size > sequence.computed and not sequence.is_decoding:
            self._emit(ev.ContextComputed(handle=sequence.handle, num_tokens=blocks * self._size))

    def _store(self, sequence: Sequence, last: int, keys: bytes) -> list[tuple[int, int]]:
        """Make a sequence's blocks findable; `keys` are those made by the engine, or empty."""
        first, raised = sequence.path_ends[0].end, list[tuple[int, int]]()
        self._note_computed(sequence, last)
        for piece in self._mirror.cached_already(sequence, first, last):
            if piece.level == SECONDARY:
                own = sequence.tables[0][piece.first : piece.first + len(piece.slots)]
                raised += zip(map(self._ids.id_of, own), piece.slots, strict=True)
            self._adopt(sequence, piece)
        begin, size = sequence.path_ends[0].end, self._key_bytes
        if begin < last:
            named = len(sequence.keys) // size if size else last
            keys = keys[max(0, named - first) * size :]
            self._events.store(sequence, begin, last * self._size, DEFAULT, keys)
        return raised

    def _adopt(self, sequence: Sequence, piece: Piece) -> None:
        """Match blocks of a sequence with equal cached ones: as copies of these, or in place of those in secondary."""
        own = sequence.tables[0][piece.first : piece.first + len(piece.slots)]
        if piece.level == PRIMARY:
            for slot, cached in zip(own, piece.slots, strict=True):
                self._ids.share(sequence.handle, slot, cached, self._group.run_at(PRIMARY, cached).refs)
            self._events.reuse(sequence, piece, own[::-1].tobytes())
        else:
            self._events.move_up(sequence, piece, own, ev.MoveReason.RECOMPUTED)

    def _continues_alone(self, sequence: Sequence, block: int) -> bool:
        """True if a sequence fills its next block after a path that it alone has cached, with plain tokens."""
        tail, table, end = sequence.path_ends[0], sequence.tables[0], (block + 1) * self._size
        return (
            block > 0
            and block < len(table)
            and sequence.num_tokens >= end
            and tail.grows(DEFAULT_PRIORITY, 0)
            and (sequence.is_decoding or sequence.computed >= end)
            and not self._group.shared
            and sequence.handle not in self.state.rich
            and len(sequence.keys) == block * self._key_bytes
        )

    def _fill(self, row: list[tuple[Sequence, int, bytes]]) -> None:
        """Store one more block of each of these sequences by one event."""
        size, parents, keys = self._key_bytes, list[bytes](), list[bytes]()
        for sequence, block, key in row if size else ():
            parents.append(bytes(sequence.keys[-size:][:NAME_BYTES]))
            keys.append(key or self._events.made(sequence, block, (block + 1) * self._size))
        blocks = array("I", [block for _, block, _ in row])
        slots = array("i", [sequence.tables[0][block] for sequence, block, _ in row])
        handles = packed_handles([sequence for sequence, _, _ in row])
        self._events.fill(handles, blocks, slots, b"".join(parents), b"".join(keys), DEFAULT)
