"""Arguments of callers, converted to plain values and checked before the state is read.

Foreign objects may do anything when they are converted: raise, quote a token, or call the manager. So all of them are
converted first, and whatever goes wrong becomes a `UsageError` that shows only types: no token, extra id or digest,
which are parts of prompts.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from operator import attrgetter, index
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace as structs_replace

from events import structs
from events.packed import TOKEN_BYTES
from events.tokens.names import input_digests, salt_digest
from events.tokens.rich import DIGEST_BYTES, ExtraIds, ItemSpan, RichTokens
from events.tokens.symbols import SymbolTable
from events.types import Namespace, RequestId
from kvcache.errors import DuplicateRequest, InvalidTokens, PromptTooLong, Unsupported, UsageError
from kvcache.fold.sequence import DEFAULT_PRIORITY, PRIORITY_MAX

if TYPE_CHECKING:
    from kvcache.config import KVCacheConfig
    from kvcache.fold.state import CacheState
    from kvcache.layout import Layout

Choice = TypeVar("Choice", bound=StrEnum)
LONGEST_ID = 1024
"""Most characters of a request id, which events and error texts repeat."""
LONGEST_STOP = 64
"""Most characters of a stop reason."""


def checked_integer(value: object, what: str) -> int:
    """Return a plain int that the log can hold: other kinds of integers (numpy's) are converted."""
    if type(value) is int:
        number = value
    elif isinstance(value, bool):
        raise UsageError(f"{what} must be an integer, not bool")
    else:
        try:
            number = index(value)  # type: ignore[arg-type]
        except UsageError:
            raise
        except Exception:  # noqa: BLE001
            raise UsageError(f"{what} must be an integer, not {type(value).__name__}") from None
    if not -(2**63) <= number < 2**64:
        raise UsageError(f"{what} must fit 64 bits")
    return number


def checked_natural(value: object, what: str) -> int:
    """Return a plain int from 0 on."""
    number = checked_integer(value, what)
    if number < 0:
        raise UsageError(f"{what} must not be negative")
    return number


def checked_range(start: object, stop: object, longest: int) -> tuple[int, int]:
    """Return the bounds of a range of tokens: 0 <= start <= stop; None and beyond `longest` mean up to the end."""
    first = checked_integer(start, "start")
    last = checked_integer(stop, "stop") if stop is not None else max(first, longest)
    if not 0 <= first <= last:
        raise UsageError(f"0 <= start <= stop must hold: start is {first}, stop is {last}")
    return min(first, longest), min(last, longest)


def checked_text(value: object, what: str) -> str:
    """Return a plain str that the log can hold, as UTF-8."""
    if not isinstance(value, str):
        raise UsageError(f"{what} must be a string, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{what} is not valid Unicode text (lone surrogates)") from None
    return str.__str__(value)


def checked_flag(value: object, what: str) -> bool:
    """Return True or False, and refuse everything that is merely truthy or falsy."""
    if value is not True and value is not False:
        raise UsageError(f"{what} must be True or False, not {type(value).__name__}")
    return value


def checked_choice(value: object, choices: type[Choice], what: str) -> Choice:
    """Return one of a few words."""
    if isinstance(value, str) and value in choices._value2member_map_:
        return choices(value)
    shown = "" if isinstance(value, str) else f", not {type(value).__name__}"
    raise UsageError(f"{what} must be one of {', '.join(choices)}{shown}")


def checked_request_id(value: object) -> RequestId:
    """Return a plain str or int of bounded size. A flag is neither: to Python True is 1, and would be that id."""
    if type(value) is int and -(2**63) <= value < 2**64:
        return value
    if isinstance(value, str):
        text = checked_text(value, "a request id")
        if len(text) > LONGEST_ID:
            raise UsageError(f"a request id must have at most {LONGEST_ID} characters, not {len(text)}")
        return text
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return checked_integer(value, "an integer request id")
    raise UsageError(f"a request id must be a string or an integer, not {type(value).__name__}")


_LONGEST_VALUE, _LONGEST_NAME, _MOST_LABELS = 256, 64, 8
"""Most characters of a session and of a label's value, of a label's name; and most labels of a request."""


def checked_labels(value: object) -> dict[str, str] | None:
    """Return a few names with their values, by name; None for no labels."""
    if not isinstance(value, Mapping):
        raise UsageError(f"labels must be a mapping of names to values, not {type(value).__name__}")
    try:
        items = list(value.items())
    except UsageError:
        raise
    except Exception:  # noqa: BLE001
        raise UsageError(f"labels cannot be read from {type(value).__name__}") from None
    if len(items) > _MOST_LABELS:
        raise UsageError(f"a request must have at most {_MOST_LABELS} labels, not {len(items)}")
    checked = {
        _checked_short(name, "a label's name", _LONGEST_NAME): _checked_short(
            each, "a label's value", _LONGEST_VALUE
        )
        for name, each in items
    }
    return dict(sorted(checked.items())) or None


def _checked_short(value: object, what: str, longest: int) -> str:
    text = checked_text(value, what)
    if not 0 < len(text) <= longest:
        raise UsageError(f"{what} must have 1 to {longest} characters, not {len(text)}")
    return text


def checked_stop(value: object) -> str:
    """Return the stop reason of an output, in the words of an engine."""
    text = checked_text(value, "stop")
    if len(text) > LONGEST_STOP:
        raise UsageError(f"stop must have at most {LONGEST_STOP} characters, not {len(text)}")
    return text


def time_from(wall_ns: Callable[[], int]) -> int:
    """Read a clock of the caller's, as the log can hold it."""
    try:
        now = wall_ns()
    except Exception as error:
        raise UsageError(f"wall_ns, the clock, raised {type(error).__name__}") from error
    if type(now) is int and 0 <= now < 2**63:
        return now
    number = checked_integer(now, "what wall_ns returns")
    if number >= 2**63:
        raise UsageError("what wall_ns returns must fit 63 bits and a sign")
    return number


def listed(values: Any, what: str) -> list[Any]:
    """List the items of a sequence or iterator; a text is one thing, not a row of letters."""
    if isinstance(values, list):
        return values
    try:
        if not isinstance(values, str | bytes | bytearray):
            return list(values)
    except UsageError:
        raise  # from the maker of the items, as by a call that is not allowed meanwhile
    except Exception:  # noqa: BLE001
        raise UsageError(f"{what} must be a list, not {type(values).__name__}") from None
    raise UsageError(f"{what} must be a list, not one {type(values).__name__}")


Tokens = Items[int] | Any
"""A list or tuple of ints, `array`, numpy array, CPU torch tensor, or any buffer of integers. No iterator: the number
must be known before any is read."""

_FEW = 100
"""Up to this number of tokens the types of all are checked: of 100 in 1.9 µs, of 200 in 3.8; beyond it, those below 2
alone, which numpy finds, in 2.3."""


class _Kind(NamedTuple):
    """Kind of the numbers of a row, for texts, and their bits."""

    name: str
    must: str
    bits: int


_TOKEN = _Kind("token id", "a token id must", 31)
_EXTRA = _Kind("extra id", "an extra id must", 64)


def pack_tokens(tokens: Tokens, limit: int | None = None) -> bytes:
    """Pack tokens as int32 LE; raises `InvalidTokens` if they are not one row of numbers in [0, 2**31).

    More than `limit` tokens raise `PromptTooLong`, virtual ones (ranges, repeated views) before they take any memory.
    """
    if isinstance(tokens, list | tuple):
        return _pack_list(tokens)
    if isinstance(tokens, str | bytes | bytearray):
        raise InvalidTokens("text or bytes were given: pass token ids as integers (list, array or tensor)")
    return _checked_row(tokens, _TOKEN, limit).astype("<i4", copy=False).tobytes()


def _pack_list(tokens: list[Any] | tuple[Any, ...]) -> bytes:
    try:
        # As unsigned numbers, which refuses negative ones; three times as fast as `array`.
        packed = struct.pack(f"<{len(tokens)}I", *tokens)
        # True and False pack as 1 and 0; the second byte of few other tokens is 0.
        flagged = 0 in packed[1::4] and _has_flag(tokens, packed)
    except Exception:  # noqa: BLE001  whatever an item's __index__ raised may quote a token
        raise InvalidTokens(*_first_wrong(tokens, _TOKEN)) from None
    # A number is below 2**31 if the highest of its bytes is below 128, that is ASCII.
    if flagged or not packed[3::4].isascii():
        raise InvalidTokens(*_first_wrong(tokens, _TOKEN))
    return packed


def _has_flag(tokens: Items[Any], packed: bytes) -> bool:
    """True if True or False is among the tokens. Checking the type of each takes longer than packing them."""
    if len(tokens) > _FEW:
        small = np.flatnonzero(np.frombuffer(packed, "<u4") < 2)
        tokens = [tokens[position] for position in small.tolist()]
    return bool in map(type, tokens)


def _first_wrong(numbers: Iterable[Any], kind: _Kind) -> tuple[str, int | None]:
    """Explain why a number cannot be packed, and return its position."""
    for position, item in enumerate(numbers):
        try:
            number = index(item)
        except Exception:  # noqa: BLE001
            return f"{kind.must} be an integer", position
        if type(item) is bool:
            return f"{kind.must} be an integer, not a bool", position
        if number < 0:
            return f"{kind.must} not be negative", position
        if number >= 1 << kind.bits:
            return f"{kind.must} be below 2**{kind.bits}", position
    return "the values change while they are read", None


def _checked_row(numbers: Any, kind: _Kind, limit: int | None = None) -> npt.NDArray[Any]:
    """Convert one row of at most `limit` numbers by numpy."""
    try:
        length = len(numbers)
        row = np.asarray(numbers) if limit is None or length <= limit else None
    except Exception:  # noqa: BLE001
        raise InvalidTokens(_unreadable(numbers)) from None
    if row is None:
        raise PromptTooLong(length, limit or 0)
    if row.ndim != 1:
        raise InvalidTokens(f"{kind.name}s must be one-dimensional, not an array of {row.ndim} dimensions")
    if not row.size:
        return row
    if row.dtype.kind not in "iu":
        raise InvalidTokens(f"{kind.name}s must be integers, not {row.dtype}")
    if row.dtype != np.int32 and int(row.max()) >= 1 << kind.bits:
        raise InvalidTokens(f"{kind.must} be below 2**{kind.bits}", int((row >= 1 << kind.bits).argmax()))
    if int(row.min()) < 0:
        raise InvalidTokens(f"{kind.must} not be negative", int((row < 0).argmax()))
    return row


def _unreadable(tokens: Any) -> str:
    """Explain why numpy cannot read something, and for a torch tensor how to fix it."""
    if ("torch", "Tensor") not in {(kind.__module__, kind.__name__) for kind in type(tokens).__mro__}:
        return f"{type(tokens).__name__} cannot be read as an array of integers"
    of = f"a tensor of {tokens.dtype} on {tokens.device}"
    if tokens.is_meta:
        return f"{of} has no values: pass a tensor with the token ids"
    if tokens.is_floating_point():
        return (
            f"token ids must be integers, not {of}, which may have rounded them: keep them as integers and "
            "pass tokens.cpu()"
        )
    return f"{of} cannot be read: pass tokens.cpu()"


def pack_counts(counts: Any, num_sequences: int, num_tokens: int | None = None) -> array[int]:
    """Pack a number of tokens for each sequence, as uint32; raises `InvalidTokens`.

    Each is at least 0; with `num_tokens` at least 1, with that as their sum.
    """
    try:
        # Bytes would be taken for packed numbers.
        fitting = len(counts) == num_sequences and not isinstance(counts, bytes | bytearray)
        packed = array("I", counts) if fitting and bool not in map(type, counts) else None
    except Exception:  # noqa: BLE001
        packed = None
    if num_tokens is not None and packed is not None:
        packed = packed if min(packed, default=1) > 0 and sum(packed) == num_tokens else None
    if packed is None:
        each = (
            "a number of tokens, 0 or more"
            if num_tokens is None
            else f"at least 1 of the {num_tokens} tokens"
        )
        raise InvalidTokens(f"counts must contain {each} for each of {num_sequences} sequences")
    return packed


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """An image, a sound, ... in place of `length` tokens of a prompt, from the token `position` on.

    `digest` is 32 bytes that no other content has. Blocks after equal tokens and equal items are shared, so two prompts
    that hold different lengths of one item share its common beginning. `uuid` is the engine's name for the item; it
    appears in TensorRT-LLM's dicts instead of the digest, and has no other effect.
    """

    digest: bytes
    position: int
    length: int
    uuid: str | None = None


def rich_tokens(tokens: bytes, multimodal: Any, extra_ids: Any) -> RichTokens | None:
    """Attach items and extra ids to a prompt (packed int32); None if it has neither.

    Raises `UsageError`, or `InvalidTokens` for extra ids.
    """
    if extra_ids is None and type(multimodal) is tuple and not multimodal:
        return None  # nearly always
    items = () if multimodal is None else _spans(listed(multimodal, "multimodal"), len(tokens) // 4)
    if not items and extra_ids is None:
        return None
    packed = None if extra_ids is None else _packed_extra(extra_ids, len(tokens) // 4)
    return RichTokens(tokens, packed, items)


def _spans(items: Items[Any], num_tokens: int) -> tuple[ItemSpan, ...]:
    spans = [_span(number, item, num_tokens) for number, item in enumerate(items)]
    spans.sort(key=lambda span: span.begin)
    for before, after in pairwise(spans):
        if after.begin < before.end:
            raise UsageError(
                f"multimodal items overlap at token {after.begin}: a token can belong to one item only"
            )
    return tuple(spans)


def _span(number: int, item: Any, num_tokens: int) -> ItemSpan:
    what = f"multimodal item {number}"
    if not isinstance(item, MultimodalItem):
        raise UsageError(f"{what} must be a MultimodalItem, not {type(item).__name__}")
    digest: object = item.digest
    if not isinstance(digest, bytes) or len(digest) != DIGEST_BYTES:
        raise UsageError(f"the digest of {what} must be {DIGEST_BYTES} bytes")
    begin = checked_integer(item.position, f"the position of {what}")
    length = checked_integer(item.length, f"the length of {what}")
    if begin < 0 or length < 1 or begin + length > num_tokens:
        raise UsageError(
            f"{what} covers {length} tokens from {begin} on: it must cover at least one, and end within the "
            f"{num_tokens} tokens of the prompt"
        )
    uuid = None if item.uuid is None else checked_text(item.uuid, f"the uuid of {what}")
    return ItemSpan(begin, begin + length, bytes(digest), 0, uuid)


def _packed_extra(extra_ids: Any, num_tokens: int) -> ExtraIds:
    """Return the extra ids as uint64."""
    if isinstance(extra_ids, str | bytes | bytearray):
        raise InvalidTokens("text or bytes were given as extra ids: pass integers (list, array or tensor)")
    try:
        length = len(extra_ids)
    except Exception:  # noqa: BLE001
        raise InvalidTokens(f"extra ids must be a list of integers, not {type(extra_ids).__name__}") from None
    if length != num_tokens:
        raise InvalidTokens(f"{length} extra ids were given for {num_tokens} tokens: pass one per token")
    if not isinstance(extra_ids, list | tuple):
        return _checked_row(extra_ids, _EXTRA).astype(np.uint64)
    try:
        # Packed, True would be 1.
        packed = array("Q", extra_ids) if bool not in map(type, extra_ids) else None
    except Exception:  # noqa: BLE001  whatever an item's __index__ raised may quote it
        packed = None
    if packed is None:
        raise InvalidTokens(*_first_wrong(extra_ids, _EXTRA))
    return np.frombuffer(packed, np.uint64)


NS_PER_MS = 1_000_000
_LONGEST_MS = 2**62 // NS_PER_MS
"""Longest duration, some 146 years."""


@dataclass(frozen=True, slots=True)
class RetentionRange:
    """Retention of the blocks with a first token in [start, stop) of a prompt."""

    start: int
    stop: int | None = None
    """End of the range; None: the end of the prompt, only in the last range."""
    priority: int = DEFAULT_PRIORITY
    """0 to 100; lower ones are evicted first."""
    duration_ms: int | None = None
    """Duration of the priority, from the release of a block by its last sequence; then it is 35, and the block goes
    after all others of that priority. None: for good."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Retention of the blocks of a request.

    A new block takes the retention of its first token's range, or the default outside of all: priority 35, for good. A
    block that was already cached takes that of its range too, but stays unchanged outside of all. Ranges are given in
    order and do not overlap.
    """

    ranges: Items[RetentionRange] = ()
    decode_priority: int = DEFAULT_PRIORITY
    """Priority of blocks that begin with a sampled token."""
    decode_duration_ms: int | None = None

    @classmethod
    def stated(cls, recorded: structs.StatedRetention) -> Retention:
        """Convert from the form in an event."""
        ranges = [
            RetentionRange(each.start, each.stop, each.priority, each.duration // NS_PER_MS or None)
            for each in recorded.ranges
        ]
        return cls(ranges, recorded.priority, recorded.duration // NS_PER_MS or None)


def checked_retention(value: Any) -> structs.StatedRetention | None:
    """Convert to the form in events; None if only the default is stated. Raises `UsageError`."""
    if value is None:
        return None
    if not isinstance(value, Retention):
        raise UsageError(f"retention must be a Retention, not {type(value).__name__}")
    ranges, end = [], 0
    for each in listed(value.ranges, "the ranges of a retention"):
        checked = _checked_range(each)
        if end < 0:
            raise UsageError("only the last range of a retention may omit stop")
        if checked.start < end:
            raise UsageError(
                "the ranges of a retention must be ordered and must not overlap: one starts at "
                f"{checked.start}, but the previous one stops at {end}"
            )
        ranges.append(checked)
        end = -1 if checked.stop is None else checked.stop
    priority, duration = _checked_keeping(value.decode_priority, value.decode_duration_ms, "decode_")
    if not ranges and (priority, duration) == (DEFAULT_PRIORITY, 0):
        return None
    return structs.StatedRetention(tuple(ranges), priority, duration)


def _checked_range(value: object) -> structs.StatedRange:
    if not isinstance(value, RetentionRange):
        raise UsageError(f"a range of a retention must be a RetentionRange, not {type(value).__name__}")
    start = checked_integer(value.start, "start")
    stop = None if value.stop is None else checked_integer(value.stop, "stop")
    if not 0 <= start < (2**63 if stop is None else min(stop, 2**63)):
        raise UsageError(
            f"a range of a retention must have 0 <= start < stop: start is {start}, stop is {stop}"
        )
    return structs.StatedRange(start, stop, *_checked_keeping(value.priority, value.duration_ms))


def _checked_keeping(priority: object, duration_ms: object, prefix: str = "") -> tuple[int, int]:
    """Return a priority, and a duration in nanoseconds."""
    number = checked_integer(priority, f"{prefix}priority")
    if not 0 <= number <= PRIORITY_MAX:
        raise UsageError(f"{prefix}priority must be from 0 to {PRIORITY_MAX}, not {number}")
    if duration_ms is None:
        return number, 0
    duration = checked_integer(duration_ms, f"{prefix}duration_ms")
    if not 0 < duration <= _LONGEST_MS:
        raise UsageError(f"{prefix}duration_ms must be from 1 to {_LONGEST_MS}, not {duration}")
    return number, duration * NS_PER_MS


_PLAIN = Namespace()
"""Namespace of most requests."""


def namespace_of(
    lora_id: int | None, lora_name: str | None, cache_salt: str | None, uses_extra_ids: bool = False
) -> Namespace:
    """Build the namespace of a request; the salt is known by its digest from here on. Raises `UsageError`."""
    if lora_id is None and lora_name is None and cache_salt is None and not uses_extra_ids:
        return _PLAIN
    number = None if lora_id is None else checked_integer(lora_id, "a lora_id")
    name = None if lora_name is None else checked_text(lora_name, "a lora_name")
    salt = None if cache_salt is None else salt_digest(checked_text(cache_salt, "a cache_salt"))
    return Namespace(number, name, salt, uses_extra_ids)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to admit. Blocks are shared only between requests with equal LoRA id, LoRA name and cache salt.

    `multimodal` are the items and their tokens, `extra_ids` one more number per token from 0 to 2**64 - 1 (for prompt
    tuning). Tokens are equal only if their extra ids, items and places in the items are; a request with extra ids, be
    they all 0, shares nothing with one without. `request_id` is an integer of 64 bits, or a string of at most 1024
    characters.
    """

    request_id: RequestId
    tokens: Tokens
    lora_id: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    multimodal: Items[MultimodalItem] = ()
    extra_ids: Tokens | None = None
    resumed: bool = False
    """True if it ran before, was preempted, and continues; its prompt is then all that it had. Reused blocks that it
    computed itself count as reused, but not as hits (`Stats.reused_tokens_own`)."""
    retention: Retention | None = None
    """Retention of its blocks; None: new ones get the default priority, 35, others stay as they are."""
    reserve_tokens: int | None = None
    """Number of tokens after the reused ones that get slots at admission, at least 1: an engine that computes the
    prompt in chunks gets the others with `reserve`, chunk by chunk. None: the whole prompt."""
    encoder_tokens: Tokens | None = None
    """Input of the encoder, for encoder-decoder models, which need it (`cross_kv_cache_fraction`), or numbers that
    stand for it, one for each place that has K/V. Everything computed depends on all of it, so requests share blocks
    only where it is equal."""
    session: str | None = None
    """Conversation or agent's run of which it is a turn: 1 to 256 characters. Only recorded."""
    labels: Mapping[str, str] | None = None
    """Further values for logs, such as its tenant: at most 8, names of 1 to 64 characters with values of 1 to 256. Only
    recorded."""
    lookup: bool = True
    """False: it reuses nothing, and computes all of its prompt and of the encoder's input, as for logprobs of the
    prompt's tokens. What it computes is stored as usual."""


_fields = attrgetter(*Request.__dataclass_fields__)


class EncoderInput(NamedTuple):
    """Validated input of an encoder."""

    namespace: Namespace
    num_tokens: int
    tokens: bytes
    """Packed int32, padded to whole blocks: it never grows, so its last block is as good as full."""


class CheckedRequest(NamedTuple):
    """A validated request."""

    request_id: RequestId
    namespace: Namespace
    symbols: bytes
    """The prompt as packed int32; `UNKNOWN` for tokens without a symbol yet."""
    rich: RichTokens | None = None
    """Rich form of the prompt, if it has items or extra ids."""
    resumed: bool = False
    retention: structs.StatedRetention | None = None
    reserve_tokens: int | None = None
    encoder: EncoderInput | None = None
    session: str | None = None
    labels: dict[str, str] | None = None
    lookup: bool = True

    @property
    def num_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.symbols) // TOKEN_BYTES

    def with_symbols(self, table: SymbolTable) -> CheckedRequest:
        """Return a copy with the symbols of this table."""
        return self if self.rich is None else self._replace(symbols=table.symbols_of(self.rich))


class RequestChecker:
    """Validates the requests for one cache."""

    def __init__(
        self, state: CacheState, layout: Layout, config: KVCacheConfig, *, log_has_tokens: bool
    ) -> None:
        self._running, self._symbols = state.handles, state.symbols
        self.longest_sequence = layout.longest_sequence(config)
        self.longest_prompt, self.longest_input = layout.longest_prompt(config), layout.longest_input(config)
        self.max_tokens = self.longest_sequence.tokens
        """Tokens of the longest sequence that can be held."""
        self._knows_lora_ids_only = state.hashing.name == "v1_block_key"
        self._relies_on_names = not log_has_tokens
        self._block_bytes = config.tokens_per_block * TOKEN_BYTES

    def check(self, requests: Items[Any]) -> list[CheckedRequest]:
        """Validate a batch.

        Raises `UsageError`, `InvalidTokens`, `PromptTooLong`, `DuplicateRequest` or `Unsupported`.
        """
        for request in requests:
            if not isinstance(request, Request):
                raise UsageError(f"each request must be a Request, not {type(request).__name__}")
        batch = [self._checked(*_fields(request)) for request in requests]
        seen: set[RequestId] = set()
        for request in batch:
            if request.request_id in self._running or request.request_id in seen:
                raise DuplicateRequest(request.request_id, in_batch=request.request_id not in self._running)
            seen.add(request.request_id)
        if self._knows_lora_ids_only:
            self._refuse_ambiguous(batch)
        return batch

    def check_one(self, *request: Any) -> CheckedRequest:
        """Validate one request, given by the fields of a `Request`, in their order. Raises as `check`."""
        checked = self._checked(*request)
        if checked.request_id in self._running:
            raise DuplicateRequest(checked.request_id, in_batch=False)
        if self._knows_lora_ids_only:
            self._refuse_ambiguous([checked])
        return checked

    def refuse_running(self, request_id: RequestId) -> None:
        """Raise `DuplicateRequest` for the id of a running request."""
        if request_id in self._running:
            raise DuplicateRequest(request_id, in_batch=False)

    def _checked(
        self,
        request_id: Any,
        tokens: Any,
        lora_id: Any,
        lora_name: Any,
        cache_salt: Any,
        multimodal: Any,
        extra_ids: Any,
        resumed: Any,
        retention: Any,
        reserve_tokens: Any,
        encoder_tokens: Any,
        session: Any,
        labels: Any,
        lookup: Any,
    ) -> CheckedRequest:
        request_id = checked_request_id(request_id)
        own = namespace_of(lora_id, lora_name, cache_salt, extra_ids is not None)
        namespace, encoder = self.with_encoder(own, encoder_tokens)
        if reserve_tokens is not None and checked_natural(reserve_tokens, "reserve_tokens") < 1:
            raise UsageError("reserve_tokens must be at least 1, or None for the whole prompt")
        # A prompt that gets slots chunk by chunk need not have all of them at once.
        limit = self.longest_prompt if reserve_tokens is None else self.longest_sequence
        try:
            symbols = pack_tokens(tokens, limit.tokens)
        except PromptTooLong as error:
            raise limit.exceeded_by(error.length) from None
        if not symbols:
            raise InvalidTokens("the prompt is empty: at least one token is needed")
        if len(symbols) > limit.tokens * TOKEN_BYTES:
            raise limit.exceeded_by(len(symbols) // TOKEN_BYTES)
        rich = rich_tokens(symbols, multimodal, extra_ids)
        if rich is not None:
            symbols = self._symbols.symbols_of(rich)
        return CheckedRequest(
            request_id,
            namespace,
            symbols,
            rich,
            checked_flag(resumed, "resumed"),
            checked_retention(retention),
            reserve_tokens,
            encoder,
            None if session is None else _checked_short(session, "a session", _LONGEST_VALUE),
            None if labels is None else checked_labels(labels),
            checked_flag(lookup, "lookup"),
        )

    def with_encoder(
        self, namespace: Namespace, tokens: Tokens | None
    ) -> tuple[Namespace, EncoderInput | None]:
        """Return the namespace of a request with these encoder tokens, and that input.

        Raises as `check`, also for an input without an encoder, and for an encoder without input.
        """
        longest = self.longest_input
        if longest is None:
            if tokens is not None:
                instead = "omit encoder_tokens, or configure the manager with cross_kv_cache_fraction"
                raise Unsupported("an encoder input in a cache without cross attention", instead)
            return namespace, None
        if tokens is None:
            raise UsageError(
                "encoder_tokens is missing: with cross_kv_cache_fraction every request needs an encoder input"
            )
        try:
            packed = pack_tokens(tokens, longest.tokens)
        except PromptTooLong as error:
            raise longest.exceeded_by(error.length) from None
        if not packed:
            raise InvalidTokens("the encoder input is empty: at least one token is needed")
        num_tokens = len(packed) // TOKEN_BYTES
        if num_tokens > longest.tokens:
            raise longest.exceeded_by(num_tokens)
        own, of_input = input_digests(namespace.salt_digest, packed)
        padded = packed + bytes(-len(packed) % self._block_bytes)
        encoder = EncoderInput(
            structs_replace(namespace, salt_digest=of_input, uses_extra_ids=False), num_tokens, padded
        )
        return structs_replace(namespace, salt_digest=own), encoder

    def _refuse_ambiguous(self, batch: Items[CheckedRequest]) -> None:
        """Refuse requests for which v1_block_key yields the names of other blocks, where names are relied on."""
        instead = "use the default block_hash, v2_sha256_64"
        if any(request.namespace.lora_name is not None for request in batch):
            raise Unsupported(
                "a lora_name with v1_block_key, which supports only LoRA ids", f"{instead}, or lora_id"
            )
        if self._relies_on_names and any(
            request.rich is not None and request.rich.items for request in batch
        ):
            raise Unsupported("multimodal items with v1_block_key in a log without tokens", instead)
