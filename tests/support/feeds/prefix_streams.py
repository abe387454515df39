"""Streams of events for the prefix index: publishers that behave, and some that err and lie."""

from __future__ import annotations

import random
from typing import Any

from events.formats.vllm import AllBlocksCleared, BlockRemoved, BlockStored, Unknown, VLLMEvent

SIZES = {0: 2, 1: 2, 2: 4}
"""Tokens per block of each group, if its publisher behaves."""
KINDS: dict[int, tuple[str | None, int | None]] = {
    0: ("full_attention", None),
    1: ("sliding_window", 5),
    2: ("sliding_window_mla", 7),
}
MEDIA = (None, "GPU", "GPU", "GPU", "cpu", "CPU_PINNED", "DISK")
EXTRAS: tuple[Any, ...] = (None, None, None, None, ("img", 3), (["img", 4],), ("salt",))


class Honest:
    """One whose names follow from contents, and who stores nothing without what is before it."""

    def __init__(self, rng: random.Random, groups: int, salt: int) -> None:
        self.rng, self.salt = rng, salt
        self.groups = list(range(groups))

    def name(self, group: int, adapter: Any, tokens: tuple[int, ...]) -> int:
        # 64 bits, signed: of other publishers other numbers.
        return hash((SIZES[group], adapter, tokens, self.salt))

    def event(self) -> VLLMEvent:
        rng = self.rng
        group = rng.choice(self.groups)
        size = SIZES[group]
        adapter = rng.choice([None, None, None, "style"])
        prompt = tuple(rng.randrange(2) for _ in range(size * rng.randrange(1, 9)))
        ends = range(size, len(prompt) + 1, size)
        names = [self.name(group, adapter, prompt[:end]) for end in ends]
        first = rng.randrange(len(names)) if rng.random() < 0.5 else 0
        medium = rng.choice(MEDIA)
        if rng.random() < 0.4:
            if rng.random() < 0.7:
                names.reverse()
            if rng.random() < 0.3:
                rng.shuffle(names)
            return BlockRemoved(tuple(names[: rng.randrange(1, 9)]), medium, group)
        kind, window = KINDS[group]
        return BlockStored(
            tuple(names[first:]),
            names[first - 1] if first else None,
            prompt[first * size :],
            size,
            medium=medium,
            lora_name=adapter,
            extra_keys=tuple((adapter,) if adapter else None for _ in names[first:]),
            group_idx=group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
        )


class Liar:
    """One of whom nothing can be expected."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.names: list[Any] = [0, 1, -1, 2**64 - 1, *range(2, 11), b"\0" * 32, b"n"]

    def event(self) -> VLLMEvent:
        rng = self.rng
        chance = rng.random()
        if chance < 0.02:
            return AllBlocksCleared()
        if chance < 0.04:
            return Unknown("BlockMoved")
        names = tuple(rng.choice(self.names) for _ in range(rng.randrange(7)))
        if rng.random() < 0.8:
            names = tuple(dict.fromkeys(names))
        if chance < 0.35:
            group = rng.choice([None, 0, 0, 1, 2, 3, 99, -1])
            locality = "REMOTE" if rng.random() < 0.02 else None
            return BlockRemoved(names, rng.choice(MEDIA), group, locality)
        return self.store(names)

    def store(self, names: tuple[Any, ...]) -> BlockStored:
        rng = self.rng
        size = rng.choice([2, 2, 2, 2, 2, 1, 4, 0, -1])
        count = max(0, len(names) * size + rng.choice([0, 0, 0, 0, 0, 0, -1, -2, 1, -100]))
        tokens: tuple[Any, ...] = tuple(rng.randrange(2) for _ in range(count))
        if tokens and rng.random() < 0.05:
            tokens = (rng.choice([2**31, -(2**31) - 1, (0, 1), -1]), *tokens[1:])
        kind, window = KINDS.get(rng.randrange(3), (None, None))
        group = rng.choice([None, 0, 0, 0, 1, 2, 3, 64, -1, 2**62])
        if group in KINDS and rng.random() < 0.95:
            kind, window = KINDS[group]
        if rng.random() < 0.1:
            kind, window = rng.choice(
                [
                    (None, None),
                    ("mamba", None),
                    ("sliding_window", None),
                    ("sliding_window", 0),
                    ("mla_attention", None),
                ]
            )
        extras = None
        if rng.random() < 0.3:
            extras = tuple(
                rng.choice(EXTRAS) for _ in range(max(0, len(names) + rng.choice([0, 0, 0, -1, 1])))
            )
        return BlockStored(
            names,
            rng.choice([None, None, *self.names]),
            tokens,
            size,
            lora_id=rng.choice([None, None, 7]),
            medium=rng.choice(MEDIA),
            lora_name=rng.choice([None, None, None, "style"]),
            extra_keys=extras,
            group_idx=group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
            locality=rng.choice([None] * 20 + ["LOCAL", "REMOTE"]),
            cache_salt=rng.choice([None] * 9 + ["salt"]),
        )
