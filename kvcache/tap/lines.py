"""Follower of a growing file of TensorRT-LLM's event dicts, one JSON object per line.

The file is read from its beginning each time, so continuity needs no proof. If it is replaced or truncated, the new
content is also read from its beginning: its numbers go back, unless it continues the old one.

A dict for a change of level lacks the block's contents, and there is no "cleared". So the contents of each block are
kept: a block that changes its level is removed from one medium and stored in the other. After missing numbers anything
may have been removed, so all blocks are cleared. Numbers that go back mean a restart of the engine.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec
import numpy as np

from events.diagnostics import get_logger
from events.errors import EventDecodeError
from events.formats.trtllm import (
    CreatedDict,
    DictData,
    DictEvent,
    RemovedDict,
    StoredBlock,
    StoredDict,
    UpdatedDict,
    decode_line,
    hash_of,
)
from events.formats.vllm import AllBlocksCleared, BlockRemoved, BlockStored, Hash, VLLMBatch, VLLMEvent
from events.subscribe.continuity import Missed, Received, Report, Restarted
from events.subscribe.endpoints import EndpointError

MEDIA = ("GPU", "CPU", "STORAGE")
"""Media by cache level."""


class KnownBlock(NamedTuple):
    """A known block, with its place."""

    level: int
    parent: Hash | None
    tokens: tuple[int, ...]
    """Token ids; empty if they are reported as digests."""
    keys: tuple[Any, ...]
    """Multimodal items, as [digest, offset at which this part begins], and extra ids."""
    lora: tuple[int | None, str | None]
    salt: str | None


class DictFollower:
    """Converter of lines to reports, for one stream of one engine with all its ranks.

    With `block_size`, blocks of other sizes are left out: partial blocks, which these dicts report like full ones.
    """

    def __init__(self, block_size: int | None = None) -> None:
        self._block_size = block_size
        self._ranks: dict[int | None, _Rank] = {}

    def take(self, line: bytes) -> list[Report]:
        """Return the reports of a line. Raises EventDecodeError."""
        event = decode_line(line)
        if event is None:
            return []
        return self._ranks.setdefault(event.rank, _Rank(event.rank, self._block_size)).take(event)


class _Rank:
    def __init__(self, rank: int | None, block_size: int | None) -> None:
        self._rank, self._size = rank, block_size
        self._next: int | None = None
        self._windows: dict[int, int] = {}
        """Group numbers by layer group, or by window if layer groups are not reported."""
        self._widest = 0
        self._blocks: dict[int, dict[Hash, KnownBlock]] = {}

    def take(self, event: DictEvent) -> list[Report]:
        reports: list[Report] = []
        events: list[VLLMEvent] = []
        number, expected = event.number, self._next
        if expected is not None and number != expected:
            self._blocks.clear()
            if number < expected:
                reports.append(Restarted(expected - 1, number))
            else:
                reason = "the engine did not keep them for long enough"
                reports.append(Missed(expected, number - 1, recovered=False, reason=reason))
                events.append(AllBlocksCleared())
        self._next = number + 1
        if event.data is not None:
            events += self._events(event, event.data)
        batch = VLLMBatch(0.0, tuple(events), self._rank)
        return [*reports, Received(number, "", batch, replayed=False)]

    def _events(self, event: DictEvent, data: DictData) -> Iterator[VLLMEvent]:
        key = event.window if event.group is None else event.group
        group = self._windows.setdefault(key, len(self._windows))
        self._widest = max(self._widest, event.window)
        window = event.window if event.window < self._widest else None
        blocks = self._blocks.setdefault(group, {})
        match data:
            case StoredDict():
                wanted = [b for b in data.blocks if self._size in (None, len(b.tokens))]
                above = None if data.parent_hash is None else hash_of(data.parent_hash)
                for block in wanted:
                    name = hash_of(block.block_hash)
                    blocks[name] = _known(block, above, (data.lora_id, data.lora_name))
                    above = name
                yield from _stores(group, window, [hash_of(block.block_hash) for block in wanted], blocks)
            case RemovedDict():
                names = [*map(hash_of, data.block_hashes)]
                yield from _removals(group, [n for n in names if self._size is None or n in blocks], blocks)
            case UpdatedDict() if data.cache_level is not None:
                name, level = hash_of(data.block_hash), data.cache_level.new_value
                if self._size is not None and name not in blocks:
                    return
                before = blocks.get(name)
                yield BlockRemoved((name,), _medium(data.cache_level.old_value), group)
                blocks[name] = (before or KnownBlock(level, None, (), (), (None, None), None))._replace(
                    level=level
                )
                yield from _stores(group, window, [name], blocks)
            case UpdatedDict() | CreatedDict():
                pass


def _known(block: StoredBlock, parent: Hash | None, lora: tuple[int | None, str | None]) -> KnownBlock:
    ids = tuple([token.token_id for token in block.tokens if isinstance(token.token_id, int)])
    keys: list[Any] = [(item.hash, item.start_offset) for item in block.mm_keys]
    if any(token.token_extra_id for token in block.tokens):
        extra_ids = np.array([token.token_extra_id for token in block.tokens], "<u8")
        keys.append((hashlib.sha256(extra_ids.tobytes()).hexdigest(), 0))
    tokens = ids if len(ids) == len(block.tokens) else ()
    return KnownBlock(block.cache_level, parent, tokens, tuple(keys), lora, block.cache_salt)


def _stores(
    group: int, window: int | None, names: list[Hash], blocks: dict[Hash, KnownBlock]
) -> Iterator[BlockStored]:
    """Yield stores of consecutive blocks, merged if they share level and size."""
    for (level, size), part in groupby(names, lambda name: (blocks[name].level, len(blocks[name].tokens))):
        its = list(part)
        first = blocks[its[0]]
        keys = tuple([blocks[name].keys or None for name in its])
        yield BlockStored(
            block_hashes=tuple(its),
            parent_block_hash=first.parent,
            token_ids=tuple([token for name in its for token in blocks[name].tokens]),
            block_size=size,
            lora_id=first.lora[0],
            medium=_medium(level),
            lora_name=first.lora[1],
            extra_keys=keys if any(keys) else None,
            group_idx=group,
            kv_cache_spec_kind="full_attention" if window is None else "sliding_window",
            kv_cache_spec_sliding_window=window,
            cache_salt=first.salt,
        )


def _removals(group: int, names: Iterable[Hash], blocks: dict[Hash, KnownBlock]) -> Iterator[BlockRemoved]:
    """Yield one removal for each level; unknown blocks are taken to be in the first one."""
    by_level: dict[int, list[Hash]] = {}
    for name in names:
        block = blocks.pop(name, None)
        by_level.setdefault(0 if block is None else block.level, []).append(name)
    for level, its in by_level.items():
        yield BlockRemoved(tuple(its), _medium(level), group)


def _medium(level: int) -> str:
    return MEDIA[level] if 0 <= level < len(MEDIA) else MEDIA[-1]


SCHEME = "file:"
_READ_BYTES = 1 << 20
_LONGEST_LINE = 1 << 28
"""Longest line in bytes; a longer one is not a line."""
_LOOK_SECONDS = 1.0
_PAUSE_SECONDS = 0.02

_log = get_logger(__name__)


class DictFileOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options after the path."""

    format: Literal["trtllm"] = "trtllm"
    block_size: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Tokens of a full block: partial blocks, which routers cannot use, are then left out."""


class LineListener:
    """Listener for the file of ``file:PATH?format=trtllm&block_size=N``. Raises EndpointError for any other address."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        pairs = dict(parse_qsl(parts.query, keep_blank_values=True))
        try:
            options = msgspec.convert(pairs, DictFileOptions, strict=False)
        except msgspec.ValidationError:
            reason = "valid options are format=trtllm and block_size=N (N of at least 1)"
            raise EndpointError(address, reason) from None
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise EndpointError(address, "write file:///tmp/events.jsonl or file:events.jsonl")
        self.address = address
        self._path = Path(unquote(parts.path)).absolute()
        self._source = f"{SCHEME}{self._path}"
        self._follower = DictFollower(options.block_size)
        self._file: BinaryIO | None = None
        self._rest = b""
        self._looked_at = 0.0

    ignored = 0
    """Always 0: everything in the file is read."""

    def poll(self, timeout_ms: int = 50) -> list[tuple[str, Report]]:
        """Return what was written, after at most `timeout_ms`."""
        deadline = time.monotonic() + timeout_ms / 1000
        while not (lines := self._lines()) and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _PAUSE_SECONDS))
        return [(self._source, report) for line in lines for report in self._reports(line)]

    def close(self) -> None:
        """Stop reading."""
        if self._file is not None:
            self._file.close()

    def _reports(self, line: bytes) -> list[Report]:
        try:
            return self._follower.take(line) if line.strip() else []
        except EventDecodeError as error:
            # If it was an event, its number will be missing.
            _log.warning("line_not_understood", source=self._source, reason=str(error))
            return []

    def _lines(self) -> list[bytes]:
        """Return the new complete lines."""
        if self._file is None:
            with suppress(FileNotFoundError):
                self._file = self._path.open("rb")
        data = b"" if self._file is None else self._file.read(_READ_BYTES)
        if not data:
            self._look()
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            raise EndpointError(self.address, "it has no lines: is it the right file?")
        return lines

    def _look(self) -> None:
        """Check, at the end of the file, if it was replaced or truncated."""
        now = time.monotonic()
        if self._file is None or now - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = now
        opened = os.fstat(self._file.fileno())
        with suppress(FileNotFoundError):
            if os.path.samestat(self._path.stat(), opened) and self._file.tell() <= opened.st_size:
                return
            self._file.close()
            self._file, self._rest = None, b""
