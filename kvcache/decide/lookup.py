"""Lookup of a prompt's reusable blocks in a state: for `KVCacheManager.match` and for logs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from events.packed import NAME_BYTES, TOKEN_BYTES
from events.tokens.rich import RichTokens
from events.types import CROSS, SECONDARY, Namespace
from kvcache.decide.window_manager import in_all
from kvcache.errors import Unsupported
from kvcache.fold.prefix_tree import Piece
from kvcache.fold.sliding_group import AnyMatch
from kvcache.fold.state import CacheState
from kvcache.inputs import EncoderInput
from kvcache.results import Match, MatchedBlock


def lookup(
    state: CacheState,
    namespace: Namespace,
    prompt: bytes | RichTokens,
    *,
    partial: bool = True,
    encoder: EncoderInput | None = None,
) -> Match:
    """Look up the blocks that a prompt (plain tokens as packed int32, or rich ones) would reuse. Changes nothing.

    In the state of a log without tokens, blocks are found by their keys, full ones only.
    """
    rich = prompt if isinstance(prompt, RichTokens) else RichTokens(prompt)
    found = _describe(state, len(rich), *_match(state, namespace, rich, partial=partial))
    return found if encoder is None else replace(found, **_input_of(state, encoder))


def count_blocks(state: CacheState, namespace: Namespace, prompt: bytes | RichTokens) -> int:
    """Count the full blocks that a prompt would reuse, without an object for each as in `lookup`."""
    rich = prompt if isinstance(prompt, RichTokens) else RichTokens(prompt)
    return _match(state, namespace, rich, partial=False)[0][0].blocks


def _match(
    state: CacheState, namespace: Namespace, prompt: RichTokens, *, partial: bool
) -> tuple[list[AnyMatch], int]:
    """Match a prompt in all groups; returns the matches and their common number of tokens."""
    symbols = state.symbols.symbols_of(prompt)
    stop = max(len(symbols) - TOKEN_BYTES, 0)
    if not state.tokens_recorded:
        symbols = _keys(state, namespace, prompt, stop)
        stop, partial = len(symbols), False
    found = [
        group.match(namespace, symbols, stop, partial=partial)
        for group in state.groups
        if group.kind != CROSS
    ]
    return in_all(found, state.tokens_per_block, state.hashing.key_bytes)


def _input_of(state: CacheState, encoder: EncoderInput) -> dict[str, Any]:
    """Look up the reusable blocks of an encoder's input, as fields of a `Match`."""
    group, namespace, symbols = state.groups[-1], encoder.namespace, encoder.tokens
    if not state.tokens_recorded:
        size = state.tokens_per_block * TOKEN_BYTES
        symbols = state.hashing.chain(namespace, state.root_key(namespace), symbols, size)
    path = group.match(namespace, symbols, len(symbols), partial=False)
    pieces = path.pieces(0, state.hashing.key_bytes)
    blocks = [block for piece in pieces for block in _blocks(piece, state.tokens_per_block, group.window)]
    reused = min(encoder.num_tokens, path.blocks * state.tokens_per_block)
    return {"encoder_blocks": tuple(blocks), "reused_encoder_tokens": reused}


def _keys(state: CacheState, namespace: Namespace, prompt: RichTokens, stop: int) -> bytes:
    if state.hashing.given:
        instead = "record tokens in the log (log.record_tokens)"
        raise Unsupported(
            "looking up a prompt in a log with the engine's own block names and no tokens", instead
        )
    block_bytes = state.tokens_per_block * TOKEN_BYTES
    chain, full = state.hashing.chain_rich, stop // block_bytes
    keys = chain(namespace, state.root_key(namespace), prompt, block_bytes)
    return keys[: full * state.hashing.key_bytes]


def _describe(state: CacheState, num_tokens: int, found: list[AnyMatch], reused: int) -> Match:
    assert state.created is not None
    size, key_bytes = state.tokens_per_block, state.hashing.key_bytes
    blocks: list[MatchedBlock] = []
    partials: list[MatchedBlock] = []
    secondary = 0
    for group, path in zip(state.created.groups, found, strict=False):
        own = [
            block for piece in path.pieces(reused, key_bytes) for block in _blocks(piece, size, group.window)
        ]
        secondary = max(secondary, sum(block.level == SECONDARY for block in own))
        blocks += own
        if path.partial is not None:
            partials += _blocks(path.partial.block, path.partial.num_tokens, group.window)
    by_level = ((found[0].blocks - secondary) * size, secondary * size)
    return Match(num_tokens, tuple(blocks), tuple(partials), by_level)


def _blocks(piece: Piece, num_tokens: int, window: int) -> list[MatchedBlock]:
    key_bytes = len(piece.keys) // len(piece.slots)
    return [
        MatchedBlock(
            piece.first + index,
            piece.level,
            slot,
            piece.keys[index * key_bytes : index * key_bytes + min(key_bytes, NAME_BYTES)].hex(),
            num_tokens,
            piece.landed,
            window,
        )
        for index, slot in enumerate(piece.slots)
    ]
