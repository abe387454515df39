"""Encoders' inputs: what is stored of them, and when they end.

An input is a sequence of its own in the group of cross attention, padded to whole blocks, that the request's sequence
and its branches read. So it is matched, stored, evicted and brought back like any other; it just never grows.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

from events import types as ev
from events.ids import Handle
from events.types import Event
from kvcache.decide.window_manager import WindowBlockManager
from kvcache.fold.sequence import Sequence
from kvcache.fold.state import CacheState
from kvcache.inputs.requests import EncoderInput
from kvcache.results import StoreResult


def add_input(
    state: CacheState,
    cross: WindowBlockManager,
    emit: Callable[[Event], None],
    reader: Sequence,
    given: EncoderInput,
    reused: tuple[int, int],
) -> Sequence:
    """Emit the input of a request that was admitted; `reused` are its blocks from primary and from secondary."""
    handle = Handle(state.next_handle)
    emit(
        ev.EncoderAdded(
            handle=handle,
            sequence=reader.handle,
            group=cross.index,
            namespace=given.namespace,
            num_tokens=given.num_tokens,
            tokens=given.tokens,
            reused_primary=reused[0],
            reused_secondary=reused[1],
        )
    )
    return state.sequences[handle]


def store_input(cross: WindowBlockManager, emit: Callable[[Event], None], encoder: Sequence) -> StoreResult:
    """The engine has written all K/V of an input: its blocks become reusable."""
    if encoder.computed < encoder.num_tokens:
        emit(ev.ContextComputed(handle=encoder.handle, num_tokens=encoder.num_tokens))
    replaced = cross.store(encoder)
    return StoreResult(encoder.stored_blocks, replaced)


def release_input(
    cross: Items[WindowBlockManager],
    emit: Callable[[Event], None],
    encoder: Sequence | None,
    clock: int,
    *,
    store: bool,
) -> None:
    """A sequence has ended that read an input; with the last one that ends, too, its blocks stay reusable."""
    for window in cross:
        if encoder is not None and not encoder.holders:
            if store:
                window.store(encoder)
            freed = window.freed_by(encoder)
            emit(ev.EncoderRemoved(handle=encoder.handle, group=window.index, freed=freed, clock=clock))
