"""A prefix index for routers: the cached part of a prompt on each worker.

::

    index = PrefixIndex()
    index.apply("worker-1", batch)                     # events.formats.vllm.decode_batch(payload)
    index.match(tokens)                                # {WorkerRank("worker-1", 0): Overlap(primary=48, ...)}

A block is identified by its tokens, those before it, the adapter, and the other inputs of its hash (extra keys, salt),
all of which are compared; hashes are names that each publisher chooses for itself. So publishers of any software can be
mixed, and one that errs or lies about its own blocks changes nothing for the others.

An overlap is exact if the events are: with full attention the longest prefix with all of its blocks present; in several
groups the longest that each of them can serve, where a sliding window needs only the blocks inside it. Groups of other
kinds (``mamba``, ``chunked_local_attention``) are ignored and counted.

Memory follows the resident blocks: a block takes its tokens once for all workers, and a name for each of its workers.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from events.formats.vllm import Hash, VLLMBatch
from events.packed import TOKEN_BYTES
from events.subscribe.continuity import Missed, Received, Report, Restarted, Restated
from kvcache.inputs import Tokens, pack_tokens
from kvcache.prefixes import snapshot
from kvcache.prefixes.publisher import RANKS_MAX, Counts, WorkerRank
from kvcache.prefixes.source import PublisherState, Sources, pack_extras, servable
from kvcache.prefixes.tree import Adapter, ContentTree, Rows, leading_blocks, path, rows_of


class Overlap(NamedTuple):
    """Part of a prompt that a publisher has, from its start: in tokens, or in blocks for lookups by hashes."""

    primary: int
    """Length of the part in GPU memory."""
    secondary: int
    """Length of the part in GPU or host memory."""
    storage: int
    """Length of the part at any level."""


class PrefixIndex:
    """Index of blocks by publisher. Belongs to one thread at a time.

    A publisher is a rank of a worker. Where `rank` is None, events are of the rank that their batch names, or 0, and
    other calls apply to all ranks of the worker.
    """

    def __init__(self) -> None:
        self._tree = ContentTree()
        self._sources: Sources = {}
        self.ignored_batches = 0
        """Batches with an impossible rank (`RANKS_MAX`)."""

    # -- updates

    def apply(self, worker: Hashable, batch: VLLMBatch, rank: int | None = None) -> None:
        """Apply one batch of a worker's events; it is ignored if its rank is impossible (`RANKS_MAX`)."""
        number = (batch.rank or 0) if rank is None else rank
        if 0 <= number < RANKS_MAX:
            self._source(worker, number).take(batch.events)
        else:
            self.ignored_batches += 1

    def fold(self, worker: Hashable, report: Report, rank: int | None = None) -> None:
        """Apply a subscriber's report (`events.subscribe.continuity`).

        A restarted publisher has no blocks any more. After batches that are missed for good the publisher's blocks are
        kept: most are right. `Counts.missed_batches` counts these.
        """
        if isinstance(report, Received):
            self.apply(worker, report.batch, rank)
            return
        for source in self._of(worker, rank) or [self._source(worker, rank or 0)]:
            _take_report(source, report)

    def remove_worker(self, worker: Hashable, rank: int | None = None) -> None:
        """Forget a worker, with its counters."""
        for source in self._of(worker, rank):
            source.forget()
            del self._sources[source.publisher]

    def clear(self) -> None:
        """Forget everything."""
        self._tree = ContentTree()
        self._sources.clear()

    # -- queries

    def match(
        self,
        tokens: Tokens | bytes,
        *,
        lora: Adapter = None,
        salt: str | None = None,
        extra_keys: Sequence[Sequence[Any] | None] | None = None,
    ) -> dict[WorkerRank, Overlap]:
        """Look up the overlap of each publisher with a prompt, in tokens; publishers without any are left out.

        Args:
            tokens: token ids, or these as int32 in little-endian bytes.
            lora: the adapter, by its name in events; its number where they have none.
            salt: the cache salt as in events (publishers of this software: its SHA-256 in hex, unless configured with
                ``salts=plain``).
            extra_keys: the other inputs of each block's hash, such as images, as in events; without adapter and salt.

        Raises InvalidTokens.
        """
        packed = tokens if isinstance(tokens, bytes) else pack_tokens(tokens)
        overlaps: dict[WorkerRank, Overlap] = {}
        several: dict[PublisherState, Rows] = {}
        for size, root in self._tree.roots.get(lora, {}).items():
            extras = _extras(len(packed) // size, salt, extra_keys)
            runs = list(path(root, packed, extras))
            # A publisher with anything of a prompt has something of its first run, or something after it.
            for holder in runs[0][0].holders if runs else ():
                source = self._sources[holder.publisher]
                plane = source.only_plane
                if plane is None:
                    several.setdefault(source, {}).update(rows_of(holder, runs))
                elif blocks := leading_blocks(holder, runs, plane):
                    found = blocks * size // TOKEN_BYTES
                    overlaps[source.publisher] = Overlap(found, found, found)
        for source, rows in several.items():
            _add_overlap(overlaps, source, rows, len(packed) // TOKEN_BYTES, in_tokens=True)
        return overlaps

    def match_hashes(self, hashes: Sequence[Hash]) -> dict[WorkerRank, Overlap]:
        """Look up a prompt given by its blocks' hashes, in blocks; these must be hashes of each publisher's own.

        Also covers blocks with unpublished content.
        """
        overlaps: dict[WorkerRank, Overlap] = {}
        for source in self._sources.values():
            to_the_end = any(group.window is not None for group in source.followed)
            rows: Rows = {}
            for holder in source.holders.values():
                rows.update(holder.rows(hashes, to_the_end=to_the_end))
            _add_overlap(overlaps, source, rows, len(hashes), in_tokens=False)
        return overlaps

    @property
    def publishers(self) -> list[WorkerRank]:
        """All publishers seen."""
        return [source.publisher for source in self._sources.values()]

    def counts(self, worker: Hashable, rank: int = 0) -> Counts:
        """Return the counters of a publisher; zeros for an unknown one."""
        source = self._sources.get((worker, rank))
        return Counts() if source is None else source.counts

    def resident(self, worker: Hashable, rank: int = 0) -> tuple[int, int, int]:
        """Count the blocks of a publisher in GPU memory, in host memory, and elsewhere, over all groups."""
        source = self._sources.get((worker, rank))
        return (0, 0, 0) if source is None else source.resident()

    # -- persistence and checks

    def check(self) -> None:
        """Prove the laws of the structure; slow, for tests. Raises InvariantViolated."""
        snapshot.prove(self._tree, self._sources)

    def save(self, path: Path | str) -> None:
        """Write everything to a file, which replaces an older one when it is complete and on disk.

        Raises Unsupported for a worker's id that is not made of None, bool, int, float, str, bytes and tuples,
        UnsafeFile and OSError.
        """
        snapshot.save(Path(path), self._tree, self._sources)

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Load a file written by `save`. Raises SnapshotError and OSError.

        Later events are missing: continue each feed where it was, or replay it.
        """
        index = cls()
        snapshot.load(Path(path), index._tree, index._sources)
        return index

    def _source(self, worker: Hashable, rank: int) -> PublisherState:
        source = self._sources.get((worker, rank))
        if source is None:
            publisher = WorkerRank(worker, rank)
            source = self._sources[publisher] = PublisherState(publisher, self._tree)
        return source

    def _of(self, worker: Hashable, rank: int | None) -> list[PublisherState]:
        if rank is not None:
            source = self._sources.get((worker, rank))
            return [] if source is None else [source]
        return [source for source in self._sources.values() if source.publisher.worker == worker]


def _take_report(source: PublisherState, report: Missed | Restated | Restarted) -> None:
    counts = source.counts
    if isinstance(report, Restarted):
        counts.restarts += 1
        source.forget()
    elif isinstance(report, Restated):
        counts.restated += 1
    elif report.recovered:
        counts.recovered_batches += report.last - report.first + 1
    else:
        counts.missed_batches += report.last - report.first + 1


def _extras(
    blocks: int, salt: str | None, extra_keys: Sequence[Sequence[Any] | None] | None
) -> list[bytes] | None:
    if salt is None and extra_keys is None:
        return None
    return pack_extras([*(extra_keys or ()), *[None] * blocks][:blocks], None, salt)


def _add_overlap(
    overlaps: dict[WorkerRank, Overlap], source: PublisherState, rows: Rows, stop: int, *, in_tokens: bool
) -> None:
    if any(rows.values()):
        levels = servable(source.followed, rows, stop, in_tokens=in_tokens)
        if levels[-1]:
            overlaps[source.publisher] = Overlap(*levels)
