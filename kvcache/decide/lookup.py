"""What a prompt would reuse in a state, block by block: for `KVCacheManager.match` and for logs."""

from __future__ import annotations

from events.packed import NAME_BYTES, TOKEN_BYTES
from events.tokens.rich import RichTokens
from events.types import Namespace
from kvcache.fold.matching import PathMatch, match
from kvcache.fold.prefix_tree import Run
from kvcache.fold.state import CacheState
from kvcache.results import Match, MatchedBlock


def lookup(
    state: CacheState, namespace: Namespace, prompt: bytes | RichTokens, *, partial: bool = True
) -> Match:
    """What a prompt (plain tokens as packed int32, or rich ones) would reuse. Changes nothing.

    In the state of a log without tokens, blocks are found by their keys, full ones only.
    """
    rich = prompt if isinstance(prompt, RichTokens) else RichTokens(prompt)
    return _describe(state, len(rich), _match(state, namespace, rich, partial=partial))


def count_blocks(state: CacheState, namespace: Namespace, prompt: bytes | RichTokens) -> int:
    """How many full blocks `lookup` would find, without an object for each."""
    rich = prompt if isinstance(prompt, RichTokens) else RichTokens(prompt)
    return _match(state, namespace, rich, partial=False).blocks


def _match(state: CacheState, namespace: Namespace, prompt: RichTokens, *, partial: bool) -> PathMatch:
    symbols = state.symbols.symbols_of(prompt)
    tree = state.groups[0].tree
    stop = max(len(symbols) - TOKEN_BYTES, 0)
    if not state.tokens_recorded:
        symbols = _keys(state, namespace, prompt, stop)
        stop, partial = len(symbols), False
    return match(tree, tree.roots.get(namespace), symbols, stop, partial=partial)


def _keys(state: CacheState, namespace: Namespace, prompt: RichTokens, stop: int) -> bytes:
    block_bytes = state.tokens_per_block * TOKEN_BYTES
    chain, full = state.hashing.chain_rich, stop // block_bytes
    keys = chain(namespace, state.root_key(namespace), prompt, block_bytes)
    return keys[: full * state.hashing.key_bytes]


def _describe(state: CacheState, num_tokens: int, found: PathMatch) -> Match:
    size = state.tokens_per_block
    blocks = tuple(_block(state, run, index, size) for run, take in found.runs for index in range(take))
    partial = found.partial
    return Match(
        num_tokens,
        blocks,
        _block(state, partial.run, partial.block, partial.num_tokens) if partial is not None else None,
    )


def _block(state: CacheState, run: Run, index: int, num_tokens: int) -> MatchedBlock:
    key_bytes = state.hashing.key_bytes
    name = bytes(run.keys[index * key_bytes : index * key_bytes + min(key_bytes, NAME_BYTES)]).hex()
    return MatchedBlock(run.start + index, run.level, run.slots[index], name, num_tokens, run.transfer == 0)
