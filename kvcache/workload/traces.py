"""Traces: the requests of a service, and the common beginnings of their prompts.

The form is detected by the first line:

====================  ================================================================  ==============================
form                  fields                                                            equal prompts by
====================  ================================================================  ==============================
Mooncake, Weka        ``timestamp`` (ms), ``input_length``, ``output_length``,           ``hash_ids``
                      ``hash_ids``; ``model``, ``cache_salt``, ``session_id``,
                      ``agent``, ``tenant``, ``stop``
Qwen-Bailian          ``chat_id``, ``timestamp`` (s), ``input_length``,                  ``hash_ids`` of 16 tokens
                      ``output_length``, ``hash_ids``; ``parent_chat_id``
requests in OpenAI's  ``prompt_token_ids``, or ``messages`` (with ``tools``) and a       tokens
form                  tokenizer; ``timestamp``, ``usage``; ``metadata``,
                      ``prompt_cache_key``, ``user``
Dynamo's request      ``request_end`` records: ``request_received_ms``,                 ``input_sequence_hashes`` of
traces                ``output_tokens``, ``replay``; ``model``, ``agent_context``        ``trace_block_size`` tokens
Azure                 CSV: ``TIMESTAMP,ContextTokens,GeneratedTokens``                   nothing: arrivals only
====================  ================================================================  ==============================

``hash_ids`` name a prompt's blocks by numbers: equal numbers, equal tokens. No text and no token ids are in such a
file, which is why real services can publish them. The last block is cut to the prompt's length. How many tokens a block
has is found from the first lines: a line with a length L and N > 1 numbers allows sizes in [L / N, L / (N - 1)), among
which is one power of two.

Reading streams: a trace of any length takes the memory of its longest line, or of its first lines up to 4 MiB. A line
has at most 16 MiB; one of 8 million ``hash_ids`` takes 160 MiB, one of 5 million empty messages 430 MiB. But
Dynamo writes requests as they end: those of a whole trace are in memory while they are put in the order of arrival.
"""

from __future__ import annotations

import codecs
import gzip
from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from itertools import chain, count, islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import msgspec
import numpy as np

from events.log.zstd import has_zstd, zstd_module
from kvcache.errors import UsageError
from kvcache.workload.tokens import TRACE_BLOCK_TOKENS, Int32s, prompt_tokens

MAX_LINE_BYTES = 16 * 2**20
"""A longer line is no request: a million token ids take half. The bound keeps a wrong file from being read whole."""
BAILIAN_BLOCK_TOKENS = 16
_LOOKED_AT, _LOOKED_AT_BYTES = 200, 4 * 2**20
"""Number of lines, and about the number of bytes, from which the block size is determined."""
_SIZES = (TRACE_BLOCK_TOKENS, *(2**power for power in range(2, 15) if 2**power != TRACE_BLOCK_TOKENS))
_MASK = 2**63 - 1
_MAX_LENGTH = 2**31 - 1
"""Longest sequence in tokens: counts are int32 in many places."""
_LONGEST_MS, _YEAR_MS = 2**42, 365.25 * 86_400_000
"""Latest arrival after the start, 139 years: clocks count ns in 63 bits, even from 2026 on. Length of a year."""
HashId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Length = Annotated[int, msgspec.Meta(ge=0, le=_MAX_LENGTH)]
PromptLength = Annotated[int, msgspec.Meta(ge=1, le=_MAX_LENGTH)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Time = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
"""Seconds or milliseconds since 1970."""


@dataclass(eq=False, repr=False)
class TraceError(UsageError):
    """A line of a trace cannot be used; `path`, `line` (from 1) and `reason` say which and why."""

    path: str
    line: int
    reason: str
    text = "{path}:{line}: {reason}"


class TraceRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request of a trace, whatever the trace's form."""

    timestamp: int
    """Arrival in milliseconds after the start of the trace."""
    input_length: int
    """Tokens of the prompt."""
    output_length: int
    """Tokens to generate."""
    hash_ids: tuple[int, ...]
    """One number per `block_tokens` prompt tokens, rounded up: the last may stand for fewer. Empty with `tokens`."""
    cache_salt: str | None = None
    """Requests share blocks only if their salts are equal. Published traces have none."""
    model: str | None = None
    """Requests of different models share nothing. Played, it is the name of a LoRA adapter."""
    block_tokens: int = TRACE_BLOCK_TOKENS
    """Tokens per number of `hash_ids`."""
    tokens: tuple[int, ...] | None = None
    """Token ids of the prompt, if the trace has them."""
    stop: str | None = None
    """Stop reason of the output, as in the trace, such as ``tool_use`` or ``end_turn``; None if unknown."""
    session: str | None = None
    """Conversation or agent run of which it is a turn."""
    labels: dict[str, str] | None = None
    """Labels ``agent``, ``tenant``, ``user`` and ``model``, those that the trace has."""
    reported_length: int | None = None
    """Prompt tokens reported by the service; None if the trace has none."""
    reported_cached: int | None = None
    """Cached prompt tokens reported by the service."""
    begin_ms: int | None = None
    """Start of the trace in milliseconds since 1970; None if it has no dates."""

    @property
    def scope(self) -> tuple[str | None, str | None]:
        """The model and the salt: requests share blocks only if they have both in common."""
        return self.model, self.cache_salt

    def prompt(self, seed: int = 0) -> Int32s:
        """Return the prompt's token ids; `seed` selects another vocabulary if the trace has none."""
        if self.tokens is not None:
            return np.array(self.tokens, np.int32)
        return prompt_tokens(self.hash_ids, self.input_length, seed, self.block_tokens)


def read_trace(
    path: str | Path,
    limit: int | None = None,
    *,
    block_tokens: int | None = None,
    tokenizer: str | Path | None = None,
    shown: str | None = None,
    named: bool = False,
) -> Iterator[TraceRequest]:
    """Yield the requests of a trace in file order, Dynamo's by arrival; at most `limit`. Blank lines are skipped.

    A file may be compressed (gzip, zstd). `block_tokens` is the number of tokens per number of ``hash_ids``; None:
    determined from the first lines. `tokenizer` is a local directory, for prompts that are messages. `shown` is the
    file's name in errors. `named` rejects a trace that does not show which prompts share a beginning.

    Raises TraceError at the first line that is no request, UsageError, OSError if the file cannot be read.
    """
    shown = str(path) if shown is None else shown
    with ExitStack() as files:
        lines = ((at, line) for at, line in _lines(_open(Path(path), files), shown) if line.strip())
        first = deque[tuple[int, bytes]]()
        size = 0
        while limit != 0 and len(first) < min(limit or _LOOKED_AT, _LOOKED_AT) and size < _LOOKED_AT_BYTES:
            if (found := next(lines, None)) is None:
                break
            first.append(found)
            size += len(found[1])
        if not first:
            return
        parse = _parser_of(shown, first, block_tokens, tokenizer)
        if named and isinstance(parse, _AzureLines):
            raise UsageError(
                f"{shown} has arrivals and lengths only, so shared prefixes of its prompts are unknown"
            )
        drained = (first.popleft() for _ in range(len(first)))
        requests = _parsed(shown, parse, islice(chain(drained, lines), parse.header_lines, None))
        yield from islice(requests if parse.in_order else _by_arrival(requests), limit)


def _parsed(shown: str, parse: _Parser, lines: Iterable[tuple[int, bytes]]) -> Iterator[TraceRequest]:
    for at, line in lines:
        try:
            request = parse.request(line)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise TraceError(shown, at, str(error)) from None
        if request is not None:
            yield request


def _by_arrival(requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    """Yield requests in the order of arrival, with times from the first one on."""
    ordered = sorted(requests, key=lambda request: request.timestamp)
    for request in ordered:
        begin = ordered[0].timestamp
        yield msgspec.structs.replace(
            request, timestamp=request.timestamp - begin, begin_ms=_dated(begin / 1000)
        )


class BlockNumbers:
    """Numbering of blocks: equal numbers stand for equal blocks after equal blocks, of requests with one model and
    salt.

    Args:
        tokens_per_block: Block size if a trace has tokens; with ``hash_ids`` theirs is used.
    """

    def __init__(self, tokens_per_block: int) -> None:
        self.tokens_per_block = tokens_per_block
        self._numbers: dict[tuple[int, object], int] = {}
        """By the number of the previous block and a block's contents; a scope precedes its first blocks."""

    def of(self, request: TraceRequest) -> tuple[list[int], int]:
        """Return the numbers of the full blocks before the prompt's last token, and how many were known before."""
        if request.tokens is None:
            self.tokens_per_block = request.block_tokens
            contents: Iterable[object] = request.hash_ids
        else:
            size, tokens = self.tokens_per_block, request.prompt()
            contents = (
                blake2b(tokens[at : at + size].tobytes(), digest_size=16).digest()
                for at in range(0, len(tokens), size)
            )
        numbers, last = self._numbers, -1
        path, before = list[int](), len(numbers)
        for content in chain([request.scope], contents):
            last = numbers.setdefault((last, content), len(numbers))
            path.append(last)
        blocks = path[1 : 1 + (request.input_length - 1) // self.tokens_per_block]
        return blocks, bisect_left(blocks, True, key=lambda number: number >= before)


class TracePrompts:
    """Requests of a trace, iterable once: for each one the numbers of the full blocks that end before its last token.

    Equal numbers stand for equal blocks after equal blocks, of requests with one model and one salt. Other attributes
    are complete when the iteration has ended. Raises what `read_trace` raises, and UsageError for a trace without
    requests, or one that does not show which prompts share a beginning.

    Args:
        path: A trace, as for `read_trace`, which also takes `block_tokens`, `tokenizer` and `shown`.
        tokens_per_block: Block size if the trace has tokens; with ``hash_ids`` theirs is used.
        progress: Called with the number of requests so far.
        watch: Called with each request, and the tokens of its prompt that an unlimited cache would have by then, in
            whole blocks.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        block_tokens: int | None = None,
        tokenizer: str | Path | None = None,
        tokens_per_block: int = 64,
        shown: str | None = None,
        progress: Callable[[int], None] = lambda _: None,
        watch: Callable[[TraceRequest, int], object] = lambda _request, _tokens: None,
    ) -> None:
        self._shown, self._progress, self._watch = str(path) if shown is None else shown, progress, watch
        self._requests = read_trace(
            path, block_tokens=block_tokens, tokenizer=tokenizer, shown=shown, named=True
        )
        self._numbers = BlockNumbers(tokens_per_block)
        self.requests = 0
        self.at = 0
        """Arrival of the last prompt yielded, in ns since the start of the trace."""
        self.lengths = array("q")
        """Number of tokens of each prompt."""
        self.request: TraceRequest | None = None
        """Request of the last prompt."""
        self._times: tuple[int, int] | None = None
        """Earliest and latest arrival."""

    @property
    def hours(self) -> float | None:
        """From the earliest request to the latest; None: no time has passed."""
        first, last = self._times or (0, 0)
        return (last - first) / 3.6e6 if last > first else None

    @property
    def tokens_per_block(self) -> int:
        """Size of the numbered blocks."""
        return self._numbers.tokens_per_block

    def __iter__(self) -> Iterator[list[int]]:
        for _, numbers in self.numbered():
            yield numbers

    def numbered(self) -> Iterator[tuple[TraceRequest, list[int]]]:
        """Iterate likewise; yield each request with the numbers of its blocks."""
        for request in self._requests:
            self.requests += 1
            self.request = request
            self.lengths.append(request.input_length)
            at = request.timestamp
            first, last = self._times or (at, at)
            self._times = min(first, at), max(last, at)
            self.at = at * 1_000_000
            blocks, known = self._numbers.of(request)
            self._watch(request, known * self.tokens_per_block)
            yield request, blocks
            self._progress(self.requests)
        if not self.requests:
            raise UsageError(f"{self._shown} contains no requests")


def _open(path: Path, files: ExitStack) -> BinaryIO:
    """Open a file, decompressing it while reading."""
    file: Any = files.enter_context(path.open("rb"))
    magic = file.peek(4)[:4]
    if magic.startswith(b"\x1f\x8b"):
        return files.enter_context(gzip.open(file))  # type: ignore[return-value]
    if magic == b"\x28\xb5\x2f\xfd":
        if not has_zstd():
            raise UsageError(f"{path} is compressed by zstd: pip install 'kvcache[zstd]'")
        return files.enter_context(zstd_module().open(file))  # type: ignore[no-any-return]
    return file  # type: ignore[no-any-return]


def _lines(file: BinaryIO, path: str) -> Iterator[tuple[int, bytes]]:
    """Yield the lines with their numbers, from 1."""
    for number in count(1):
        try:
            line = file.readline(MAX_LINE_BYTES + 1)
        except OSError as error:
            if not isinstance(error, gzip.BadGzipFile):
                raise
            raise TraceError(path, number, f"decompression failed: {error}") from None
        except Exception as error:  # noqa: BLE001 - each kind of compression has errors of its own
            raise TraceError(path, number, f"decompression failed: {error}") from None
        if len(line) > MAX_LINE_BYTES:
            raise TraceError(path, number, f"longer than {MAX_LINE_BYTES} bytes; is this a trace?")
        if not line:
            return
        yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line


def _parser_of(
    path: str, lines: deque[tuple[int, bytes]], block_tokens: int | None, tokenizer: str | Path | None
) -> _Parser:
    """Return the parser of a trace's lines, which decodes them in order: those about something else as None.

    Its `request` raises ValueError, also as `msgspec.DecodeError`.
    """
    number, first = lines[0]
    if first.startswith(_AZURE_HEADER[0].encode()):
        return _AzureLines()
    if first.lstrip().startswith(b"["):
        raise TraceError(path, number, "a JSON list: write one item per line, as jq -c '.[]' FILE does")
    try:
        fields = msgspec.json.decode(first, type=_Fields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(path, number, str(error)) from None
    if fields.is_dynamo:
        return _DynamoLines()
    if fields.chat_id is not msgspec.UNSET:
        return _BailianLines(block_tokens or BAILIAN_BLOCK_TOKENS)
    if any(each is not msgspec.UNSET for each in (fields.messages, fields.prompt_token_ids, fields.request)):
        return _OpenAILines(tokenizer)
    return _MooncakeLines(block_tokens or _size_of_blocks([line for _, line in lines]))


class _Fields(msgspec.Struct):
    """Fields by which forms are distinguished."""

    schema: msgspec.Raw = msgspec.Raw(b"null")
    event: msgspec.Raw = msgspec.Raw(b"null")
    chat_id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    request: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    @property
    def is_dynamo(self) -> bool:
        """True for a record of Dynamo's, bare or in an envelope; other fields belong to other formats."""
        schemas = [self.schema]
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            schemas.append(msgspec.json.decode(self.event, type=_Fields).schema)
        return any(bytes(each).startswith(b'"dynamo.') for each in schemas)


class _Sizes(msgspec.Struct):
    input_length: PromptLength
    hash_ids: list[int]


def _size_of_blocks(lines: Iterable[bytes]) -> int:
    """Determine the tokens per number: the size that fits the most of these lines, and 512 if it is among them."""
    decoder, fits = msgspec.json.Decoder(_Sizes), Counter[int]()
    for line in lines:
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            sizes = decoder.decode(line)
            fits.update([each for each in _SIZES if -(-sizes.input_length // each) == len(sizes.hash_ids)])
    best: int = max(_SIZES, key=lambda each: (fits[each], each == TRACE_BLOCK_TOKENS))
    return best


def _check_blocks(
    input_length: int, hash_ids: Sequence[int], block_tokens: int, named: str = "hash_ids"
) -> None:
    needed = -(-input_length // block_tokens)
    if len(hash_ids) != needed:
        remedy = "; give --trace-block-size if the trace's blocks have another size" * (named == "hash_ids")
        raise ValueError(
            f"{named} has {len(hash_ids)} entries, but input_length {input_length} needs {needed}, "
            f"one per {block_tokens} tokens{remedy}"
        )


def _checked_ms(ms: float, field: str, since: str = "the start") -> int:
    """Return a time in whole milliseconds after the start. Raises ValueError for an impossible one."""
    if ms > _LONGEST_MS:
        raise ValueError(
            f"{field} is {ms / _YEAR_MS:,.0f} years after {since}, and {_LONGEST_MS / _YEAR_MS:.0f} are the most: "
            "is it in another unit?"
        )
    return max(0, int(ms))


class MooncakeLine(msgspec.Struct, omit_defaults=True):
    """One request, as written and read; `timestamp` is in milliseconds."""

    timestamp: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    input_length: PromptLength
    output_length: Length
    hash_ids: tuple[HashId, ...]
    session_id: Any = None
    agent: Any = None
    tenant: Any = None
    model: str | int | None = None
    stop: Any = None
    cache_salt: str | None = None


class _MooncakeLines:
    """Parser of requests with blocks of any size."""

    header_lines, in_order = 0, True

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._decoder = msgspec.json.Decoder(MooncakeLine)

    def request(self, line: bytes) -> TraceRequest:
        """Decode a line."""
        found = self._decoder.decode(line)
        _check_blocks(found.input_length, found.hash_ids, self._block_tokens)
        return TraceRequest(
            _checked_ms(found.timestamp, "timestamp"),
            found.input_length,
            found.output_length,
            found.hash_ids,
            found.cache_salt,
            _name(found.model),
            self._block_tokens,
            session=_name(found.session_id),
            labels=_labels(agent=found.agent, tenant=found.tenant, model=found.model),
            stop=_name(found.stop),
        )


_LONGEST_NAME = 256


def _name(value: object) -> str | None:
    """Return the name of a session or a label; None for a value that is neither text nor a number."""
    text = str(value)[:_LONGEST_NAME] if isinstance(value, str | int) else ""
    return text or None


def _labels(**given: object) -> dict[str, str] | None:
    return {name: text for name, value in given.items() if (text := _name(value)) is not None} or None


class _BailianLine(msgspec.Struct):
    chat_id: int | str
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=2**50)]
    input_length: PromptLength
    output_length: Length
    hash_ids: tuple[HashId, ...]
    parent_chat_id: int | str | None = None


class _BailianLines:
    """Parser of chat turns with times in seconds. Each names its parent; the first one's number is the session."""

    header_lines, in_order = 0, True

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._decoder = msgspec.json.Decoder(_BailianLine)
        self._first: dict[int | str, int | str] = {}
        """First turn of each turn that has a parent."""

    def request(self, line: bytes) -> TraceRequest:
        """Decode a line."""
        found = self._decoder.decode(line)
        _check_blocks(found.input_length, found.hash_ids, self._block_tokens)
        time = _checked_ms(found.timestamp * 1000, "timestamp")
        lengths = found.input_length, found.output_length
        first, before = found.chat_id, found.parent_chat_id
        if before not in (None, -1):
            first = self._first[found.chat_id] = self._first.get(before, before)
        return TraceRequest(
            time, *lengths, found.hash_ids, block_tokens=self._block_tokens, session=_name(first)
        )


class _DynamoReplay(msgspec.Struct):
    trace_block_size: Annotated[int, msgspec.Meta(ge=1, le=_MAX_LENGTH)]
    input_length: PromptLength
    input_sequence_hashes: list[Annotated[int, msgspec.Meta(ge=0)]]


class _DynamoFinish(msgspec.Struct):
    finish_reason: Any = None


class _DynamoRequest(msgspec.Struct):
    request_received_ms: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    output_tokens: Length | None = None
    model: str | None = None
    input_tokens: Length | None = None
    cached_tokens: Length | None = None
    replay: _DynamoReplay | None = None
    finish_reason_metadata: _DynamoFinish | None = None


class _DynamoContext(msgspec.Struct):
    session_id: Any = None
    trajectory_id: Any = None


class _DynamoRecord(msgspec.Struct):
    schema: Literal["dynamo.request.trace.v1", "dynamo.agent.trace.v1"]
    event_type: str
    agent_context: _DynamoContext | None = None
    request: _DynamoRequest | None = None


class _DynamoEnvelope(msgspec.Struct):
    event: _DynamoRecord | None = None


class _DynamoLines:
    """Parser of request records, each written when its request ends. Those of tools and of texts are skipped."""

    header_lines, in_order = 0, False

    def __init__(self) -> None:
        self._envelopes = msgspec.json.Decoder(_DynamoEnvelope)
        self._records = msgspec.json.Decoder(_DynamoRecord)
        self._block_tokens: int | None = None

    def request(self, line: bytes) -> TraceRequest | None:
        """Decode a line."""
        record = self._envelopes.decode(line).event or self._records.decode(line)
        if record.event_type != "request_end":
            return None
        found = record.request or _DynamoRequest()
        replay = found.replay
        if replay is None:
            raise ValueError("request.replay is missing, so the prompt is unknown")
        if found.request_received_ms is None:
            raise ValueError("request.request_received_ms is missing: a trace needs arrival times")
        size, hashes = replay.trace_block_size, replay.input_sequence_hashes
        if size != (self._block_tokens or size):
            raise ValueError(f"request.replay.trace_block_size is {size}, and {self._block_tokens} before")
        self._block_tokens = size
        _check_blocks(replay.input_length, hashes, size, "request.replay.input_sequence_hashes")
        context, finish = record.agent_context or _DynamoContext(), found.finish_reason_metadata
        return TraceRequest(
            _checked_ms(found.request_received_ms, "request.request_received_ms", "1970"),
            replay.input_length,
            found.output_tokens or 0,
            tuple(number & _MASK for number in hashes),
            model=_name(found.model),
            block_tokens=size,
            stop=None if finish is None else _name(finish.finish_reason),
            session=_name(context.trajectory_id) or _name(context.session_id),
            labels=_labels(model=found.model),
            reported_length=found.input_tokens,
            reported_cached=found.cached_tokens,
        )


_AZURE_HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_FIRST = "the first one"


class _AzureLengths(msgspec.Struct):
    ContextTokens: PromptLength
    GeneratedTokens: Length


class _AzureLines:
    """Parser of arrivals and lengths. All prompts are distinct."""

    header_lines, in_order = 1, True

    def __init__(self) -> None:
        self._begin: datetime | None = None
        self._next_id = 0

    def request(self, line: bytes) -> TraceRequest:
        """Decode a line."""
        row = line.decode().strip().split(",")
        if len(row) != len(_AZURE_HEADER):
            raise ValueError(f"{len(row)} columns instead of {', '.join(_AZURE_HEADER)}")
        time = _time_of(row[0])
        found = msgspec.convert(
            dict(zip(_AZURE_HEADER[1:], row[1:], strict=True)), _AzureLengths, strict=False
        )
        prompt, output = found.ContextTokens, found.GeneratedTokens
        self._begin = self._begin or time
        blocks = -(-prompt // TRACE_BLOCK_TOKENS)
        self._next_id += blocks
        ids = tuple(range(self._next_id - blocks, self._next_id))
        ms = (time - self._begin).total_seconds() * 1000
        since = _checked_ms(ms, _AZURE_HEADER[0], _FIRST)
        return TraceRequest(since, prompt, output, ids, begin_ms=_dated(self._begin.timestamp()))


def _time_of(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(
            "the timestamp is neither a number nor an ISO 8601 time such as 2026-05-01T10:00:00Z"
        ) from None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def _dated(seconds: float) -> int | None:
    """Return the time in ms if it is a date of these decades; None if it counts from another start."""
    return round(seconds * 1000) if _OLDEST <= seconds < _LATEST else None


class _PromptDetails(msgspec.Struct):
    cached_tokens: Length | None = None


class _Usage(msgspec.Struct):
    completion_tokens: Length | None = None
    prompt_tokens: Length | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Response(msgspec.Struct):
    created: Time | None = None
    usage: _Usage | None = None
    choices: Any = None

    @property
    def finish_reason(self) -> str | None:
        """Finish reason of the first choice."""
        match self.choices:
            case [{"finish_reason": reason}, *_]:
                return _name(reason)
        return None


class _Call(msgspec.Struct):
    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: tuple[TokenId, ...] | None = None
    tools: list[dict[str, Any]] | None = None
    model: str | None = None
    cache_salt: str | None = None
    metadata: Any = None
    prompt_cache_key: Any = None
    user: Any = None


class _LoggedCall(msgspec.Struct):
    """Fields of a request log's line in addition to the call's own, which may be in a nested object."""

    timestamp: Time | str | None = None
    request: _Call | None = None
    response: _Response | None = None


_OLDEST, _LATEST = 1e9, 4e9
"""2001 and 2096, in seconds since 1970."""
_MILLISECONDS = 1e11
"""Smallest time that cannot be in seconds."""


class _OpenAILines:
    """Parser of calls of an interface such as OpenAI's, as logged by proxies."""

    header_lines, in_order = 0, True

    def __init__(self, tokenizer: str | Path | None) -> None:
        self._logged = msgspec.json.Decoder(_LoggedCall)
        self._calls, self._responses = msgspec.json.Decoder(_Call), msgspec.json.Decoder(_Response)
        self._tokenizer = None if tokenizer is None else ChatTokenizer(tokenizer)
        self._begin: float | None = None

    def request(self, line: bytes) -> TraceRequest:
        """Decode a line."""
        logged = self._logged.decode(line)
        call = logged.request or self._calls.decode(line)
        response = logged.response or self._responses.decode(line)
        tokens = self._tokens(call)
        if not tokens:
            raise ValueError("the prompt is empty")
        usage = response.usage or _Usage()
        details = usage.prompt_tokens_details or _PromptDetails()
        about = call.metadata if isinstance(call.metadata, dict) else {}
        return TraceRequest(
            self._since_begin(logged.timestamp, response.created),
            len(tokens),
            usage.completion_tokens or 0,
            (),
            call.cache_salt,
            _name(call.model),
            tokens=tokens,
            stop=response.finish_reason,
            session=_name(about.get("session_id")) or _name(call.prompt_cache_key),
            labels=_labels(
                agent=about.get("agent"), tenant=about.get("tenant"), user=call.user, model=call.model
            ),
            reported_length=usage.prompt_tokens,
            reported_cached=details.cached_tokens,
            begin_ms=_dated(self._begin or 0.0),
        )

    def _tokens(self, call: _Call) -> tuple[int, ...]:
        if call.prompt_token_ids is not None:
            return call.prompt_token_ids
        if not call.messages:
            raise ValueError("neither prompt_token_ids nor messages: the prompt is unknown")
        if self._tokenizer is None:
            raise ValueError(
                "the prompt consists of messages: give --tokenizer, the directory of the model's tokenizer"
            )
        return self._tokenizer.encode(call.messages, call.tools)

    def _since_begin(self, timestamp: float | str | None, created: float | None) -> int:
        time, field = (timestamp, "timestamp") if timestamp is not None else (created, "created")
        if time is None:
            raise ValueError("neither timestamp nor created: a trace needs arrival times")
        seconds = _time_of(time).timestamp() if isinstance(time, str) else time
        if seconds > _MILLISECONDS:
            seconds /= 1000
        if self._begin is None:
            self._begin = seconds
        return _checked_ms(round((seconds - self._begin) * 1000), field, _FIRST)


_Parser = _MooncakeLines | _BailianLines | _DynamoLines | _AzureLines | _OpenAILines


class ChatTokenizer:
    """Renderer and encoder of chats, with the template of a model's tokenizer.

    Args:
        path: Local directory in Hugging Face's form (`tokenizer.json`, `tokenizer_config.json`).
    """

    def __init__(self, path: str | Path) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise UsageError("to render messages: pip install 'kvcache[transformers]'") from None
        if not Path(path).is_dir():
            raise UsageError(
                f"{path} is not a directory: a tokenizer is one, with tokenizer.json and a chat template"
            )
        try:
            # SECURITY: such a directory may contain code, which is not run.
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(path), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # noqa: BLE001 - whatever its files hold
            raise UsageError(f"{path} contains no tokenizer: {type(error).__name__}") from None
        self._tokenizer.model_max_length = _MAX_LENGTH  # otherwise it warns of long prompts
        if self._tokenizer.chat_template is None:
            raise UsageError(f"the tokenizer in {path} has no chat template, which is needed for messages")

    def encode(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> tuple[int, ...]:
        """Return the token ids of a prompt, up to the start of the answer. Raises ValueError."""
        try:
            encoded = self._tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except Exception as error:  # noqa: BLE001 - a template raises what it likes
            raise ValueError(
                f"the tokenizer's template refuses these messages: {type(error).__name__}"
            ) from None
        return tuple(encoded["input_ids"])
