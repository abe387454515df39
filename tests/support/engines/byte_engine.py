"""An engine with real tensors whose copies are late, fail, or both; its contents are compared with its tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from zlib import crc32

from cuda_ops.copier import Copier
from kvcache.errors import CapacityError, ComputationLost, UsageError
from kvcache.inputs import Request
from tests.support.engines import strategies
from tests.support.engines.fake_engine import FakeEngine
from tests.support.engines.inside import sequence_of
from tests.support.engines.simulated import FailingCopier, LateCopier

Wrap = Callable[[Copier], Copier]


def at_once(copier: Copier) -> Copier:
    return copier


def late(copier: Copier) -> Copier:
    return LateCopier(copier, 3)


class Chosen:
    """The batches that fail: about one in `every`, always the same ones for a seed."""

    def __init__(self, seed: int, every: int) -> None:
        self.seed, self.every = seed, every

    def __contains__(self, number: object) -> bool:
        return crc32(f"{self.seed} {number}".encode()) % self.every == 0


def failing(seed: int) -> Wrap:
    return lambda copier: FailingCopier(copier, Chosen(seed, 4))


def late_and_failing(seed: int) -> Wrap:
    """The host hears late of what the device did, so that much is decided while copies are outstanding."""
    r = random.Random(seed)
    steps, every = r.randrange(1, 14), r.choice([2, 3, 6, 12])
    return lambda copier: LateCopier(FailingCopier(copier, Chosen(seed, every)), steps)


ACTIONS = (
    ("admit",) * 3
    + ("forward",) * 2
    + ("decode",) * 3
    + ("end",) * 2
    + ("poll", "tick", "clear", "flush", "fork", "fork", "pin", "unpin", "rewind", "rewind", "guess", "draft")
    + ("preempt", "return")
)
WINDOWS = ((strategies.LIMIT,),) * 3 + (
    (1,),
    (4,),
    (3, strategies.LIMIT),
    (2, 7),
    (1, 6, strategies.LIMIT),
    (3, 5, 8),
)
"""The longest sequence sees all of its tokens in the largest one only."""


def one_head_count(num_windows: int) -> dict[str, Any]:
    """A layer for each window."""
    return {"num_layers": num_windows}


def two_head_counts(num_windows: int) -> dict[str, Any]:
    """Two layers for each window, with KV heads of their own, hence two pools."""
    return {"num_layers": 2 * num_windows, "num_kv_heads": (1,) * num_windows + (2,) * num_windows}


class Driver:
    """Random commands for an engine; `trusted`: no copy fails, so everything must be right at any time."""

    def __init__(
        self,
        seed: int,
        wrap: Wrap,
        *,
        trusted: bool,
        fill_blank: bool = False,
        encoder: bool | None = None,
        **more: Any,
    ) -> None:
        self.random = r = random.Random(seed)
        self.of_inputs = random.Random(f"what encoders read, {seed}")
        self.has_encoder = seed % 4 == 3 if encoder is None else encoder
        self.trusted = trusted
        windows = r.choice(WINDOWS)
        self.settings: dict[str, Any] = dict(
            tokens_per_block=r.choice([1, 2, 3, 4]),
            primary_blocks=r.choice([3, 4, 6, 8, 12]),
            secondary_blocks=r.choice([1, 2, 4, 8]),
            enable_partial_reuse=r.random() < 0.8,
            kv_layout=r.choice(["NHD", "HND"]),
            kv_factor=1 + seed // 2 % 2,
            debug_fill_blank=fill_blank,
            max_attention_window=windows,
            cross_kv_cache_fraction=0.5 if self.has_encoder else None,
            **r.choice([one_head_count, two_head_counts])(len(windows)),
        )
        self.engine = FakeEngine(wrap=wrap, **(self.settings | more))
        self.next_id = 0
        self.salts: dict[int | str, str | None] = {}
        self.preempted: list[Request] = []
        length = r.choice([6, 8, 10, 13])
        self.bases = [[r.randrange(2) for _ in range(length)] for _ in range(2)]

    def prompt(self) -> list[int]:
        """Most begin alike, and leave the common path where they like."""
        r = self.random
        base = r.choice(self.bases)
        return base[: r.randrange(1, len(base) + 1)] + [r.randrange(4) for _ in range(r.choice([0, 0, 1, 2]))]

    def input(self) -> list[int] | None:
        """What an encoder reads: one of a few, some of which begin alike."""
        r = self.of_inputs
        return r.choice([[0], [0, 1], [0, 1, 1], [0, 1, 1, 0, 1], [1] * 6]) if self.has_encoder else None

    def step(self) -> None:
        r, engine = self.random, self.engine
        action = r.choice(ACTIONS)
        try:
            if action == "admit":
                requests = [
                    Request(
                        self.next_id + number,
                        self.prompt(),
                        cache_salt=r.choice([None] * 4 + ["a"]),
                        reserve_tokens=r.choice([None, None, 1, 4]),
                        encoder_tokens=self.input(),
                    )
                    for number in range(r.choice([1, 1, 2, 3]))
                ]
                self.next_id += len(requests)
                self.salts.update((each.request_id, each.cache_salt) for each in requests)
                engine.admit(*requests)
            elif action == "preempt" and engine.running:
                self.preempt(engine.running[-1])
            elif action == "return" and self.preempted:
                engine.admit(self.preempted[0])
                self.preempted.pop(0)
            elif action == "forward" and engine.running:
                request_id = r.choice(engine.running)
                sequence = sequence_of(engine.manager, request_id)
                if self.of_inputs.random() < 0.7:
                    engine.encode(request_id)
                engine.forward(request_id, r.randrange(sequence.computed, sequence.num_tokens + 1))
            elif action == "decode" and engine.running:
                ids = r.sample(engine.running, r.randrange(1, len(engine.running) + 1))
                engine.decode(ids, [r.randrange(2) for _ in ids])
            elif action == "fork" and engine.running:
                self.next_id += 1
                parent = r.choice(engine.running)
                self.salts[self.next_id - 1] = self.salts[parent]
                engine.fork(parent, self.next_id - 1)
            elif action == "rewind" and engine.running:
                chosen = r.choice(engine.running)
                length = sequence_of(engine.manager, chosen).num_tokens
                with suppress(UsageError):  # some window has let go of what would be needed
                    engine.rewind(chosen, r.randint(max(1, length - 5), length))
            elif action in ("guess", "draft") and engine.running:
                self.speculate(action, r.choice(engine.running))
            elif action == "pin" and engine.running:
                engine.manager.pin(r.choice(engine.running), r.randrange(3))
            elif action == "unpin" and engine.manager.pins():
                engine.manager.unpin(r.choice(list(engine.manager.pins())))
            elif action == "end" and engine.running:
                engine.end(r.choice(engine.running), store=r.random() < 0.8)
            elif action == "poll":
                engine.poll()
            elif action == "tick":
                engine.tick()
            elif action == "clear" and r.random() < 0.3:
                engine.manager.clear()
            elif action == "flush":
                engine.manager.flush()
        except CapacityError:
            if engine.running:
                engine.end(r.choice(engine.running))
        except ComputationLost:
            engine.poll()  # what was lost without having been told: `flush` has noticed it

    def preempt(self, request_id: int | str) -> None:
        """It makes room, and will come back with all that it has."""
        tokens = sequence_of(self.engine.manager, request_id).tokens.tolist()
        salt = self.salts[request_id]
        read = self.engine.inputs[request_id][1] if self.has_encoder else None
        self.preempted.append(
            Request(request_id, tokens, cache_salt=salt, resumed=True, reserve_tokens=4, encoder_tokens=read)
        )
        self.engine.end(request_id)

    def speculate(self, how: str, request_id: int | str) -> None:
        """Some tokens ahead, of which some are right."""
        r, engine = self.random, self.engine
        engine.have_slots(request_id, sequence_of(engine.manager, request_id).num_tokens)
        guesses = [r.randrange(2) for _ in range(r.randint(1, 5))]
        ahead = engine.guess_ahead if how == "guess" else engine.draft
        ahead(request_id, guesses, r.randint(0, len(guesses)), r.randrange(2))

    def run(self, steps: int) -> None:
        for number in range(steps):
            self.step()
            if self.trusted or (number % 9 == 0 and not self.engine.manager.state.transfers):
                self.verify()
            elif number % 50 == 49:
                self.engine.settle()
                self.verify()
        self.engine.settle()
        self.verify()

    def verify(self) -> None:
        self.engine.poll()
        self.engine.verify()
        self.engine.verify_running()
