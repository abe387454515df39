"""Names of blocks.

A key names a block for routers, logs and people. A hit is never decided by a key (matching compares tokens), so a weak
algorithm can mislead a router but never mix up two prompts. A child's key continues its parent's full key; the public
name is the first 8 bytes of the key, big-endian.

The namespace seeds the root key, so that equal prompts in two namespaces have different names.

Symbols are numbered by each cache for itself, so names are made of their meanings (`events.tokens.rich`).
``v1_block_key`` does it as TensorRT-LLM does, which leaves out an item's place in the block. The others append an
encoding that can be read back to the block's plain tokens, hence differ wherever tokens, extra ids, items or offsets
do. TensorRT-LLM V2 hashes numbers of its own for an item's tokens (its digest, then ids beyond the vocabulary), so only
names of blocks after plain tokens agree with V2's.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from events.packed import TOKEN_BYTES
from events.tokens.rich import ItemSpan, RichTokens
from events.tokens.symbols import SymbolTable, has_symbols
from events.types import Namespace

DEFAULT_ALGORITHM = "v2_sha256_64"

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_GOLDEN = 0x9E3779B9


def salt_digest(cache_salt: str) -> bytes:
    """Return the digest of a cache salt in events and namespaces."""
    return hashlib.sha256(cache_salt.encode()).digest()


def input_digests(salt: bytes | None, tokens: bytes) -> tuple[bytes, bytes]:
    """Return the salt digests for the namespaces of a request with an encoder input.

    The first is for the sequence, the second for the input: the results of the decoder, and of the encoder for each
    token, depend on all of the input, so blocks are shared only if all of it is equal.
    """
    own = (salt or b"") + hashlib.sha256(tokens).digest()
    return hashlib.sha256(b"decoder" + own).digest(), hashlib.sha256(b"encoder" + own).digest()


def salt_id(namespace: Namespace) -> int | None:
    """Return the 64-bit id of the salt: the first 8 bytes of its digest, little-endian (as TensorRT-LLM V2 does)."""
    if namespace.salt_digest is None:
        return None
    return int.from_bytes(namespace.salt_digest[:8], "little")


def scope_bytes(namespace: Namespace) -> bytes:
    """Return one mask byte and 8 little-endian bytes for each part that is present (LoRA id, salt, LoRA name).

    The mask's bit 3 is set if tokens have extra ids.
    """
    name = namespace.lora_name
    name_id = None if name is None else int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    parts = (namespace.lora_id, salt_id(namespace), name_id)
    mask = sum(1 << bit for bit, part in enumerate(parts) if part is not None)
    mask |= namespace.uses_extra_ids << 3
    given = [part & _MASK64 for part in parts if part is not None]
    return bytes([mask]) + b"".join(part.to_bytes(8, "little") for part in given)


@dataclass(frozen=True)
class HashAlgorithm:
    """An algorithm for keys."""

    name: str
    key_bytes: int
    """Size of a key; 0: blocks have no names."""
    root_key: Callable[[Namespace], bytes]
    """The key that the first block of a prompt continues."""
    chain: Callable[[Namespace, bytes, bytes, int], bytes]
    """Maps (namespace, parent key, plain tokens, bytes per block) to the keys of all blocks; the last may be short."""
    chain_rich: Callable[[Namespace, bytes, RichTokens, int], bytes]
    """Chains the names of blocks whose tokens have extra ids or items."""
    given: bool = False
    """True if keys are an engine's own, which cannot be computed: computing one raises a ValueError."""


def _sha256_root(namespace: Namespace) -> bytes:
    return hashlib.sha256(scope_bytes(namespace)).digest()


def _sha256_chain(namespace: Namespace, parent: bytes, symbols: bytes, block_bytes: int) -> bytes:
    if len(symbols) <= block_bytes:
        return hashlib.sha256(parent + symbols).digest()
    copy_empty = hashlib.sha256().copy  # cheaper than to construct
    full = len(symbols) // block_bytes * block_bytes
    keys: list[bytes] = []
    append = keys.append
    for block in np.frombuffer(memoryview(symbols)[:full], f"V{block_bytes}").tolist():
        digest = copy_empty()
        digest.update(parent + block)
        parent = digest.digest()
        append(parent)
    if full < len(symbols):
        keys.append(hashlib.sha256(parent + symbols[full:]).digest())
    return b"".join(keys)


def _xxh3_chain(namespace: Namespace, parent: bytes, symbols: bytes, block_bytes: int) -> bytes:
    digest = _xxh3()
    if len(symbols) <= block_bytes:
        return digest(parent + symbols)
    full = len(symbols) // block_bytes * block_bytes
    keys: list[bytes] = []
    append = keys.append
    for block in np.frombuffer(memoryview(symbols)[:full], f"V{block_bytes}").tolist():
        parent = digest(parent + block)
        append(parent)
    if full < len(symbols):
        keys.append(digest(parent + symbols[full:]))
    return b"".join(keys)


@cache
def _xxh3() -> Callable[[bytes], bytes]:
    """Return the hash function, imported once: an import per block would take ten times as long as the digest."""
    try:
        from xxhash import xxh3_64_digest
    except ImportError as error:
        raise ImportError(
            "the algorithm xxh3_64 requires the package xxhash: pip install 'kvcache[hash]'"
        ) from error
    return xxh3_64_digest


def _mix32(state: int, value: int) -> int:
    value = ((value >> 16) ^ value) * 0x45D9F3B & _MASK32
    value = ((value >> 16) ^ value) * 0x45D9F3B & _MASK32
    value = (((value >> 16) ^ value) + _GOLDEN) & _MASK32
    return (state ^ (value + (state << 6) + (state >> 2))) & _MASK64


def _mix64(state: int, value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK64
    value = ((value ^ (value >> 31)) + _GOLDEN) & _MASK64
    return (state ^ (value + (state << 6) + (state >> 2))) & _MASK64


def _v1_key(
    namespace: Namespace, parent: int, tokens: memoryview, extra_ids: list[int], items: list[ItemSpan]
) -> int:
    state = (len(tokens) ^ (parent * 0xBF58476D1CE4E5B9)) & _MASK64
    salt = salt_id(namespace)
    if parent == 0 and salt is not None:
        state = _mix64(state, salt)
    if namespace.uses_extra_ids:
        for token, extra_id in zip(tokens, extra_ids, strict=True):
            state = _mix64(_mix32(state, token & _MASK32), extra_id)
    else:
        for token in tokens:
            state = _mix32(state, token & _MASK32)
    if namespace.lora_id is not None:
        state = _mix64(state, namespace.lora_id)
    for item in items:
        for word in struct.unpack("<8I", item.digest):
            state = _mix32(state, word)
        state = _mix64(state, item.offset)
    return state


def _v1_chain(namespace: Namespace, parent: bytes, symbols: bytes, block_bytes: int) -> bytes:
    return _v1_chain_rich(namespace, parent, RichTokens(symbols), block_bytes)


def _v1_chain_rich(namespace: Namespace, parent: bytes, tokens: RichTokens, block_bytes: int) -> bytes:
    key = int.from_bytes(parent, "big")
    view = memoryview(tokens.tokens).cast("i")
    per_block = block_bytes // TOKEN_BYTES
    keys = []
    for index, items in enumerate(tokens.items_by_block(per_block)):
        begin, end = index * per_block, (index + 1) * per_block
        extra_ids = tokens.extra_ids_at(begin, end).tolist() if namespace.uses_extra_ids else []
        key = _v1_key(namespace, key, view[begin:end], extra_ids, items)
        keys.append(key.to_bytes(8, "big"))
    return b"".join(keys)


_EXTRA_IDS, _ITEM = struct.pack("<I", 1 << 31 | 1), struct.pack("<I", 1 << 31 | 2)
"""Markers after a block's tokens. No token is so large, so the tokens end where the first of these begins."""
_pack_item = struct.Struct("<4sII32sQ").pack


def rich_blocks(tokens: RichTokens, tokens_per_block: int) -> Iterator[bytes]:
    """Yield bytes unique to each block: of a plain one its tokens as int32 LE.

    If a token has an extra id, those of all tokens follow (a marker, then uint64 LE each); then for each item
    a marker, from which to which token it reaches (uint32 LE), its digest, and the offset in it (uint64 LE).
    """
    size = tokens_per_block * TOKEN_BYTES
    for index, items in enumerate(tokens.items_by_block(tokens_per_block)):
        parts = [tokens.tokens[index * size : (index + 1) * size]]
        if tokens.extra_ids is not None:
            extra_ids = tokens.extra_ids_at(index * tokens_per_block, (index + 1) * tokens_per_block)
            parts += (_EXTRA_IDS, extra_ids.astype("<u8").tobytes()) if extra_ids.any() else ()
        parts += [_pack_item(_ITEM, begin, end, digest, offset) for begin, end, digest, offset, _ in items]
        yield b"".join(parts)


def _sha256_chain_rich(namespace: Namespace, parent: bytes, tokens: RichTokens, block_bytes: int) -> bytes:
    return _chain(lambda data: hashlib.sha256(data).digest(), parent, tokens, block_bytes)


def _xxh3_chain_rich(namespace: Namespace, parent: bytes, tokens: RichTokens, block_bytes: int) -> bytes:
    return _chain(_xxh3(), parent, tokens, block_bytes)


def _chain(digest: Callable[[bytes], bytes], parent: bytes, tokens: RichTokens, block_bytes: int) -> bytes:
    keys = []
    for block in rich_blocks(tokens, block_bytes // TOKEN_BYTES):
        parent = digest(parent + block)
        keys.append(parent)
    return b"".join(keys)


def _given(*_: object) -> bytes:
    raise ValueError("keys are the engine's own")


def _named_by_engine(name: str, size: int) -> HashAlgorithm:
    # Engines give no key of a namespace. This one distinguishes namespaces, as in a fingerprint.
    return HashAlgorithm(name, size, lambda space: _sha256_root(space)[:size], _given, _given, given=True)


NAMED_BY_ENGINE = {8: "engine_64", 16: "engine_128", 32: "engine_256"}
"""Algorithms of logs with keys given by the engine, by the size of a key."""
ALGORITHMS: dict[str, HashAlgorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        HashAlgorithm("v2_sha256_64", 32, _sha256_root, _sha256_chain, _sha256_chain_rich),
        HashAlgorithm("v1_block_key", 8, lambda namespace: bytes(8), _v1_chain, _v1_chain_rich),
        HashAlgorithm("xxh3_64", 8, lambda space: _xxh3()(scope_bytes(space)), _xxh3_chain, _xxh3_chain_rich),
        HashAlgorithm("none", 0, lambda namespace: b"", lambda *_: b"", lambda *_: b""),
        *(_named_by_engine(name, size) for size, name in NAMED_BY_ENGINE.items()),
    )
}
"""Algorithms by name. Ids of ``v2_sha256_64`` and ``v1_block_key`` agree with TensorRT-LLM's for equal tokens, LoRA id,
salt; those of ``v1_block_key`` also for tokens with extra ids or in items."""


def chain_symbols(
    algorithm: HashAlgorithm,
    table: SymbolTable,
    namespace: Namespace,
    parent: bytes,
    symbols: bytes,
    block_bytes: int,
) -> bytes:
    """Return keys as `HashAlgorithm.chain`, for symbols of which some may be below 0."""
    if not has_symbols(symbols):
        return algorithm.chain(namespace, parent, symbols, block_bytes)
    return algorithm.chain_rich(namespace, parent, table.spell(symbols), block_bytes)
