"""What a prompt would reuse in a state, block by block: for `KVCacheManager.match` and for logs."""

from __future__ import annotations

from events.packed import NAME_BYTES, TOKEN_BYTES
from events.tokens.rich import RichTokens
from events.types import PRIMARY, Namespace
from kvcache.fold.matching import PathMatch, in_all, match
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
    """How many full blocks of each window `lookup` would find, without an object for each."""
    rich = prompt if isinstance(prompt, RichTokens) else RichTokens(prompt)
    return _match(state, namespace, rich, partial=False)[0].blocks


def _match(state: CacheState, namespace: Namespace, prompt: RichTokens, *, partial: bool) -> list[PathMatch]:
    """What all groups have of it."""
    symbols = state.symbols.symbols_of(prompt)
    stop = max(len(symbols) - TOKEN_BYTES, 0)
    if not state.tokens_recorded:
        symbols = _keys(state, namespace, prompt, stop)
        stop, partial = len(symbols), False
    trees = [group.tree for group in state.groups]
    found = [match(tree, tree.roots.get(namespace), symbols, stop, partial=partial) for tree in trees]
    return in_all(found, state.tokens_per_block)


def _keys(state: CacheState, namespace: Namespace, prompt: RichTokens, stop: int) -> bytes:
    block_bytes = state.tokens_per_block * TOKEN_BYTES
    chain, full = state.hashing.chain_rich, stop // block_bytes
    keys = chain(namespace, state.root_key(namespace), prompt, block_bytes)
    return keys[: full * state.hashing.key_bytes]


def _describe(state: CacheState, num_tokens: int, found: list[PathMatch]) -> Match:
    assert state.created is not None
    size, key_bytes = state.tokens_per_block, state.hashing.key_bytes
    blocks: list[MatchedBlock] = []
    partials: list[MatchedBlock] = []
    for group, path in zip(state.created.groups, found, strict=True):
        for run, take in path.runs:
            blocks += [_block(run, index, size, key_bytes, group.window) for index in range(take)]
        partial = path.partial
        if partial is not None:
            partials.append(_block(partial.run, partial.block, partial.num_tokens, key_bytes, group.window))
    primary = min(len(path.slots(PRIMARY)) for path in found)
    by_level = (primary * size, (found[0].blocks - primary) * size)
    return Match(num_tokens, tuple(blocks), tuple(partials), by_level)


def _block(run: Run, index: int, num_tokens: int, key_bytes: int, window: int) -> MatchedBlock:
    name = bytes(run.keys[index * key_bytes : index * key_bytes + min(key_bytes, NAME_BYTES)]).hex()
    landed = run.transfer == 0
    return MatchedBlock(run.start + index, run.level, run.slots[index], name, num_tokens, landed, window)
