"""Names of blocks: the same as TensorRT-LLM's, and as anybody works out from the definition."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import numpy as np
import pytest

from events.tokens.names import ALGORITHMS, salt_digest, salt_id
from events.tokens.rich import ItemSpan, RichTokens
from events.types import Namespace
from kvcache.manager import KVCacheManager
from tests.support.engines import strategies

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
    lora_id, lora_name, salt = namespace[:3]
    events_namespace = Namespace(lora_id, lora_name, None if salt is None else salt_digest(salt))
    blocks = [[7, 8], [2**31 - 1, 0], [9]]
    expected = [strategies.key_of((namespace, *map(tuple, blocks[: count + 1]))) for count in range(3)]
    assert keys("v2_sha256_64", events_namespace, *blocks) == expected


def test_sha256_key_of_a_plain_prompt_by_hand() -> None:
    """The first key of a prompt without namespace, worked out from the definition alone."""
    root = hashlib.sha256(b"\x00").digest()
    by_hand = hashlib.sha256(root + bytes([1, 0, 0, 0, 2, 0, 0, 0])).digest()
    assert keys("v2_sha256_64", PLAIN, [1, 2]) == [by_hand]


def test_xxh3_keys_by_hand() -> None:
    """Each key is the digest of the parent's and the block's tokens, the last block's also if it is short."""
    digest = pytest.importorskip("xxhash").xxh3_64_digest
    first = digest(digest(b"\x00") + bytes([1, 0, 0, 0, 2, 0, 0, 0]))
    second = digest(first + bytes([3, 0, 0, 0, 4, 0, 0, 0]))
    assert keys("xxh3_64", PLAIN, [1, 2], [3, 4], [5]) == [
        first,
        second,
        digest(second + bytes([5, 0, 0, 0])),
    ]


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


def test_manager_names_blocks_with_items_as_the_definition_does() -> None:
    """Also for a block that begins with an item and was filled by decoding, and for the plain one behind it."""
    manager = KVCacheManager(strategies.config())
    item = (8, 0, b"\x11" * 32, 0), (8, 0, b"\x11" * 32, 1), (8, 0, b"\x11" * 32, 2)
    manager.add_sequences([strategies.request(0, (None, None, None), item)])
    manager.store_context_blocks(0, 3)
    for token in (1, 2, 3, 4):
        manager.add_tokens([0], [token])
    named = {name: tokens for name, (_, _, _, tokens, _) in strategies.cached_blocks(manager.state).items()}
    path = ((None, None, None), item[:2], (item[2], 1), (2, 3))
    assert named == {strategies.name_of(path[:end]): 2 for end in (2, 3, 4)}


# -- extra ids and items

CAT, DOG = bytes(range(32)), bytes(range(32, 64))
EXTRA = Namespace(uses_extra_ids=True)
MASK = 2**64 - 1


def rich(tokens: Sequence[int], extra_ids: Sequence[int] | None = None, *items: ItemSpan) -> RichTokens:
    ids = None if extra_ids is None else np.array(extra_ids, np.uint64)
    return RichTokens(array("i", tokens).tobytes(), ids, items)


def rich_keys(algorithm: str, namespace: Namespace, tokens: RichTokens, size: int) -> list[bytes]:
    chosen = ALGORITHMS[algorithm]
    joined = chosen.chain_rich(namespace, chosen.root_key(namespace), tokens, 4 * size)
    return [joined[at : at + chosen.key_bytes] for at in range(0, len(joined), chosen.key_bytes)]


def v1(parent: int, words: list[tuple[int, int]], num_tokens: int) -> int:
    """TensorRT-LLM's BlockKeyHasher, from its description: (32 or 64, value) for each step."""
    state = num_tokens ^ (parent * 0xBF58476D1CE4E5B9 & MASK)
    for bits, value in words:
        if bits == 32:
            for _ in range(2):
                value = ((value >> 16) ^ value) * 0x45D9F3B % 2**32
            value = (((value >> 16) ^ value) + 0x9E3779B9) % 2**32
        else:
            value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
            value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
            value = ((value ^ (value >> 31)) + 0x9E3779B9) & MASK
        state ^= (value + (state << 6) + (state >> 2)) & MASK
    return state & MASK


def v1_item(digest: bytes, offset: int) -> list[tuple[int, int]]:
    return [*[(32, int.from_bytes(digest[at : at + 4], "little")) for at in range(0, 32, 4)], (64, offset)]


def test_v1_keys_mix_extra_ids_after_each_token() -> None:
    """Where a request uses extra ids each token is followed by its own, also by 0; otherwise by none."""
    first = v1(0, [(32, 5), (64, 2**63), (32, 6), (64, 0), (64, 9)], 2)
    second = v1(first, [(32, 7), (64, 0), (64, 9)], 1)
    namespace = Namespace(lora_id=9, uses_extra_ids=True)
    found = rich_keys("v1_block_key", namespace, rich([5, 6, 7], [2**63, 0, 0]), 2)
    assert [int.from_bytes(key, "big") for key in found] == [first, second]
    plain = rich_keys("v1_block_key", Namespace(lora_id=9), rich([5, 6, 7]), 2)
    assert int.from_bytes(plain[0], "big") == v1(0, [(32, 5), (32, 6), (64, 9)], 2)


def test_v1_keys_of_plain_tokens_say_that_others_have_extra_ids() -> None:
    """A block of plain tokens has another key in a request with extra ids, as in TensorRT-LLM, by both ways."""
    expected = v1(0, [(32, 5), (64, 0)], 1).to_bytes(8, "big")
    assert rich_keys("v1_block_key", EXTRA, rich([5]), 1) == keys("v1_block_key", EXTRA, [5]) == [expected]


def test_v1_keys_mix_items_last() -> None:
    """After the LoRA id comes each item that overlaps the block: its digest as 8 words, then the offset in it."""
    prompt = rich([1, 1, 1, 1, 1, 2], None, ItemSpan(1, 4, CAT, 0), ItemSpan(4, 5, DOG, 0))
    first = v1(0, [(32, 1)] * 3 + [(64, 9)] + v1_item(CAT, 0), 3)
    second = v1(first, [(32, 1), (32, 1), (32, 2), (64, 9), *v1_item(CAT, 2), *v1_item(DOG, 0)], 3)
    found = rich_keys("v1_block_key", Namespace(lora_id=9), prompt, 3)
    assert [int.from_bytes(key, "big") for key in found] == [first, second]


def test_sha256_keys_of_rich_blocks_by_hand() -> None:
    """Behind the tokens stand the extra ids and the items, each behind a marker; plain blocks have nothing there."""
    prompt = rich([1, 2, 3, 4, 5], [0, 7, 0, 0, 0], ItemSpan(1, 3, CAT, 6))
    root = hashlib.sha256(b"\x08").digest()
    first = hashlib.sha256(
        root + bytes.fromhex("01000000 02000000")
        + bytes.fromhex("01000080 0000000000000000 0700000000000000")
        + bytes.fromhex("02000080 01000000 02000000") + CAT + bytes.fromhex("0600000000000000")
    ).digest()  # fmt: skip
    second = hashlib.sha256(
        first + bytes.fromhex("03000000 04000000")
        + bytes.fromhex("02000080 00000000 01000000") + CAT + bytes.fromhex("0700000000000000")
    ).digest()  # fmt: skip
    third = hashlib.sha256(second + bytes.fromhex("05000000")).digest()
    assert rich_keys("v2_sha256_64", EXTRA, prompt, 2) == [first, second, third]


@pytest.mark.parametrize("algorithm", ["v2_sha256_64", "xxh3_64"])
def test_names_report_apart_what_symbols_distinguish(algorithm: str) -> None:
    """Blocks that differ in an extra id, an item, its place, its end or an offset have different names."""
    prompts = [
        rich([1, 2, 3, 4]),
        rich([1, 2, 3, 4], [0, 0, 0, 1]),
        rich([1, 2, 3, 4], [0, 0, 1, 0]),
        rich([1, 2, 3, 4], [0, 0, 0, 2**63]),
        *[rich([1, 2, 3, 4], None, ItemSpan(b, e, d, o)) for b, e, d, o in (
            (0, 1, CAT, 0), (0, 2, CAT, 0), (1, 2, CAT, 0), (0, 2, DOG, 0), (0, 2, CAT, 1), (0, 4, CAT, 0),
        )],
        rich([1, 2, 3, 4], None, ItemSpan(0, 2, CAT, 0), ItemSpan(2, 4, CAT, 0)),
        rich([1, 2, 3, 4], [1, 0, 0, 0], ItemSpan(0, 2, CAT, 0)),
    ]  # fmt: skip
    names = [rich_keys(algorithm, EXTRA, prompt, 4)[0] for prompt in prompts]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("algorithm", ["v1_block_key", "v2_sha256_64", "xxh3_64"])
def test_plain_blocks_keep_their_names(algorithm: str) -> None:
    """Tokens alone have the same keys by both ways, also those of a block before an item."""
    plain = keys(algorithm, PLAIN, [1, 2], [3, 4])
    assert rich_keys(algorithm, PLAIN, rich([1, 2, 3, 4]), 2) == plain
    assert rich_keys(algorithm, PLAIN, rich([1, 2, 3, 4], None, ItemSpan(2, 4, CAT, 0)), 2)[0] == plain[0]


@pytest.mark.parametrize("algorithm", ["v1_block_key", "v2_sha256_64", "xxh3_64"])
def test_requests_with_extra_ids_have_names_of_their_own(algorithm: str) -> None:
    """Equal tokens in a request with extra ids, all 0, and in one without have different names."""
    assert rich_keys(algorithm, EXTRA, rich([1, 2], [0, 0]), 2) != keys(algorithm, PLAIN, [1, 2])
