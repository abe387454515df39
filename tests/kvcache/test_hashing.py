"""Names of blocks: the same as TensorRT-LLM's, and as anybody works out from the definition."""

from __future__ import annotations

import hashlib
from array import array

import pytest

from events.hashing import ALGORITHMS, salt_digest, salt_id
from events.types import Namespace
from kvcache.manager import KVCacheManager
from tests import strategies

PLAIN = Namespace()


def keys(algorithm: str, namespace: Namespace, *blocks: list[int]) -> list[bytes]:
    """The keys of a prompt's blocks, hashed in one go."""
    chosen = ALGORITHMS[algorithm]
    size = 4 * len(blocks[0])
    symbols = array("i", [token for block in blocks for token in block]).tobytes()
    joined = chosen.chain(namespace, chosen.root_key(namespace), symbols, size)
    return [joined[at : at + chosen.key_bytes] for at in range(0, len(joined), chosen.key_bytes)]


@pytest.mark.parametrize(
    ("salt", "ids"),
    [
        (None, [924206229973855, 6875034662206558884]),
        (123, [6280297290684427985, 18177682803760873588]),
    ],
)
def test_v1_keys_are_those_of_tensorrt_llm(salt: int | None, ids: list[int]) -> None:
    """Known blocks have the ids that TensorRT-LLM's BlockKeyHasher gives them, with and without a salt."""
    digest = None if salt is None else salt.to_bytes(8, "little") + bytes(24)
    found = keys("v1_block_key", Namespace(salt_digest=digest), [1, 2, 3, 4], [5, 6])
    assert [int.from_bytes(key, "big") for key in found] == ids


@pytest.mark.parametrize("namespace", strategies.NAMESPACES)
def test_sha256_keys_chain_over_whole_digests(namespace: strategies.Namespace) -> None:
    """A key is the SHA-256 of the parent's whole key and the block's tokens, and starts from the namespace's."""
    lora_id, lora_name, salt = namespace
    events_namespace = Namespace(lora_id, lora_name, None if salt is None else salt_digest(salt))
    blocks = [[7, 8], [2**31 - 1, 0], [9]]
    expected = [strategies.key_of((namespace, *map(tuple, blocks[: count + 1]))) for count in range(3)]
    assert keys("v2_sha256_64", events_namespace, *blocks) == expected


def test_sha256_key_of_a_plain_prompt_by_hand() -> None:
    """The first key of a prompt without namespace, worked out from the definition alone."""
    root = hashlib.sha256(b"\x00").digest()
    by_hand = hashlib.sha256(root + bytes([1, 0, 0, 0, 2, 0, 0, 0])).digest()
    assert keys("v2_sha256_64", PLAIN, [1, 2]) == [by_hand]


@pytest.mark.parametrize("algorithm", ["v1_block_key", "v2_sha256_64", "xxh3_64"])
def test_keys_do_not_depend_on_how_a_prompt_was_cut(algorithm: str) -> None:
    """Continuing from a block's key gives the keys that hashing the whole prompt gives."""
    chosen = ALGORITHMS[algorithm]
    whole = keys(algorithm, PLAIN, [1, 2], [3, 4], [5, 6])
    rest = chosen.chain(PLAIN, whole[0], array("i", [3, 4, 5, 6]).tobytes(), 8)
    assert rest == b"".join(whole[1:])


@pytest.mark.parametrize("algorithm", ["v1_block_key", "v2_sha256_64", "xxh3_64"])
def test_namespaces_have_names_of_their_own(algorithm: str) -> None:
    """Equal prompts under different LoRA ids or salts have different names."""
    spaces = [PLAIN, Namespace(lora_id=1), Namespace(lora_id=2), Namespace(salt_digest=salt_digest("x"))]
    assert len({keys(algorithm, each, [1, 2])[0] for each in spaces}) == len(spaces)


def test_salt_is_known_by_its_digest() -> None:
    """The salt's id is the start of its SHA-256, read as a little-endian number."""
    digest = hashlib.sha256(b"tenant").digest()
    assert salt_digest("tenant") == digest
    assert salt_id(Namespace(salt_digest=digest)) == int.from_bytes(digest[:8], "little")


def test_manager_names_blocks_as_the_definition_does() -> None:
    """The name that a lookup shows is the one worked out from the prompt, also for blocks stored one by one."""
    manager = KVCacheManager(strategies.config())
    manager.add_sequence(0, [5, 6, 7], cache_salt="tenant")
    manager.store_context_blocks(0, 2)
    manager.add_tokens([0], [8])
    manager.add_tokens([0], [9])
    found = manager.match([5, 6, 7, 8, 1], cache_salt="tenant")
    path = ((None, None, "tenant"), (5, 6), (7, 8))
    assert [block.name for block in found.blocks] == [strategies.name_of(path[:end]).hex() for end in (2, 3)]
