"""Names of blocks.

A key names a block for the outside: routers, logs, people. A hit is never decided by a key (matching
compares tokens), so a weak algorithm can mislead a router but never mix up two prompts. A child's key
continues its parent's full key; the public name is the first 8 bytes of the key, big-endian.

The namespace seeds the root key, so that equal prompts in two namespaces have different names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from events.types import Namespace

DEFAULT_ALGORITHM = "v2_sha256_64"

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_GOLDEN = 0x9E3779B9


def salt_digest(cache_salt: str) -> bytes:
    """The digest under which a cache salt appears in events and namespaces."""
    return hashlib.sha256(cache_salt.encode()).digest()


def salt_id(namespace: Namespace) -> int | None:
    """The 64-bit id of the salt: the first 8 bytes of its digest, little-endian (as TensorRT-LLM V2 does)."""
    if namespace.salt_digest is None:
        return None
    return int.from_bytes(namespace.salt_digest[:8], "little")


def scope_bytes(namespace: Namespace) -> bytes:
    """One mask byte and 8 little-endian bytes for each part that is present (LoRA id, salt, LoRA name)."""
    name = namespace.lora_name
    name_id = None if name is None else int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    parts = (namespace.lora_id, salt_id(namespace), name_id)
    mask = sum(1 << bit for bit, part in enumerate(parts) if part is not None)
    return bytes([mask]) + b"".join(
        (part & _MASK64).to_bytes(8, "little") for part in parts if part is not None
    )


@dataclass(frozen=True)
class HashAlgorithm:
    """How keys are made."""

    name: str
    key_bytes: int
    """Size of a key; 0: blocks have no names."""
    root_key: Callable[[Namespace], bytes]
    """The key that the first block of a prompt continues."""
    chain: Callable[[Namespace, bytes, bytes, int], bytes]
    """(namespace, parent key, symbols, bytes per block) to the keys of all blocks, joined; the last may be short."""


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
    keys = []
    for start in range(0, len(symbols), block_bytes):
        parent = digest(parent + symbols[start : start + block_bytes])
        keys.append(parent)
    return b"".join(keys)


def _xxh3_root(namespace: Namespace) -> bytes:
    return _xxh3()(scope_bytes(namespace))


def _xxh3() -> Callable[[bytes], bytes]:
    try:
        from xxhash import xxh3_64_digest
    except ImportError as error:
        raise ImportError(
            "the algorithm xxh3_64 needs the package xxhash: pip install 'kvcache[hash]'"
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


def _v1_key(namespace: Namespace, parent: int, tokens: memoryview) -> int:
    state = (len(tokens) ^ (parent * 0xBF58476D1CE4E5B9)) & _MASK64
    salt = salt_id(namespace)
    if parent == 0 and salt is not None:
        state = _mix64(state, salt)
    for token in tokens:
        state = _mix32(state, token & _MASK32)
    if namespace.lora_id is not None:
        state = _mix64(state, namespace.lora_id)
    return state


def _v1_chain(namespace: Namespace, parent: bytes, symbols: bytes, block_bytes: int) -> bytes:
    key = int.from_bytes(parent, "big")
    view = memoryview(symbols).cast("i")
    per_block = block_bytes // 4
    keys = []
    for start in range(0, len(view), per_block):
        key = _v1_key(namespace, key, view[start : start + per_block])
        keys.append(key.to_bytes(8, "big"))
    return b"".join(keys)


ALGORITHMS: dict[str, HashAlgorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        HashAlgorithm("v2_sha256_64", 32, _sha256_root, _sha256_chain),
        HashAlgorithm("v1_block_key", 8, lambda namespace: bytes(8), _v1_chain),
        HashAlgorithm("xxh3_64", 8, _xxh3_root, _xxh3_chain),
        HashAlgorithm("none", 0, lambda namespace: b"", lambda *_: b""),
    )
}
"""By name. Ids of ``v2_sha256_64`` and ``v1_block_key`` agree with TensorRT-LLM's for equal tokens, LoRA id, salt."""
