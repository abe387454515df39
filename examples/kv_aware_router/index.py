"""Which worker has which blocks: what the balancer knows by the feeds of all of them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from itertools import takewhile
from typing import Protocol

import numpy as np

from events.packed import TOKEN_BYTES, names_of_keys, unpack_names
from events.subscribe.continuity import Report
from events.subscribe.index import GPU, HOST, Index
from events.tokens.names import ALGORITHMS, DEFAULT_ALGORITHM
from events.types import Namespace


class Overlaps(Protocol):
    """What the balancer needs of an index. Workers are known by the topics of their feeds."""

    def fold(self, worker: str, report: Report) -> None:
        """Take in what a worker's feed says."""

    def drop(self, worker: str) -> None:
        """Forget a worker that has gone, and what may still be heard of it."""

    def overlap(self, tokens: list[int]) -> Mapping[str, int]:
        """Leading tokens of a prompt that each worker has in whole blocks; a worker that has none may be missing."""

    def blocks(self, worker: str) -> int:
        """How many blocks a worker has, as far as is known."""


class NameIndex:
    """The names of each worker's blocks, in a set by itself: a prompt's names are looked up one by one.

    Any thread may call it.
    """

    def __init__(self, tokens_per_block: int) -> None:
        self._block_bytes = tokens_per_block * TOKEN_BYTES
        self._tokens_per_block = tokens_per_block
        self._lock = threading.Lock()
        self._workers: dict[str, Index] = {}
        self._gone: set[str] = set()

    def fold(self, worker: str, report: Report) -> None:
        """Take in what a worker's feed says."""
        with self._lock:
            # What a worker has sent before its death may be read after it.
            if worker not in self._gone:
                self._workers.setdefault(worker, Index()).fold(report)

    def drop(self, worker: str) -> None:
        """Forget a worker that has gone, and what may still be heard of it."""
        with self._lock:
            self._gone.add(worker)
            self._workers.pop(worker, None)

    def overlap(self, tokens: list[int]) -> Mapping[str, int]:
        """Leading tokens of a prompt that each worker has in whole blocks."""
        names = self._names(tokens)
        with self._lock:
            return {
                worker: _leading(names, index) * self._tokens_per_block
                for worker, index in self._workers.items()
            }

    def blocks(self, worker: str) -> int:
        """How many blocks a worker has, as far as is known."""
        with self._lock:
            index = self._workers.get(worker)
            return 0 if index is None else index.count(GPU) + index.count(HOST)

    def resident(self, worker: str) -> list[set[int]]:
        """Their names, per level."""
        with self._lock:
            index = self._workers.get(worker, Index())
            return [{int(name) for name in index.resident(level=level)} for level in (GPU, HOST)]

    def faults(self) -> int:
        """What the feeds said that cannot be, and what was lost."""
        with self._lock:
            return sum(
                index.orphans + index.repeated_stores + index.unknown_removals + index.missed_batches
                for index in self._workers.values()
            )

    def _names(self, tokens: list[int]) -> list[int]:
        """Of the prompt's whole blocks, but not of one that ends with it: a last token is always computed."""
        packed = np.asarray(tokens[:-1], "<i4").tobytes()
        packed = packed[: len(packed) // self._block_bytes * self._block_bytes]
        algorithm, namespace = ALGORITHMS[DEFAULT_ALGORITHM], Namespace()
        keys = algorithm.chain(namespace, algorithm.root_key(namespace), packed, self._block_bytes)
        return [] if not packed else unpack_names(names_of_keys(keys, algorithm.key_bytes)).tolist()


def _leading(names: list[int], index: Index) -> int:
    """How many blocks of a prompt are there, on the GPU or in host memory, from where they come soon."""
    gpu, host = (index.blocks.get((0, level), {}) for level in (GPU, HOST))
    return sum(1 for _ in takewhile(lambda name: name in gpu or name in host, names))
