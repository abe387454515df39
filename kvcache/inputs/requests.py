"""Requests as callers give them, and as they enter the manager: validated, tokens packed, the salt as a digest."""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Items
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from msgspec.structs import replace as structs_replace

import events.structs
from events.packed import TOKEN_BYTES
from events.tokens.names import input_digests, salt_digest
from events.tokens.rich import RichTokens
from events.tokens.symbols import SymbolTable
from events.types import Namespace, RequestId
from kvcache.errors import DuplicateRequest, InvalidTokens, PromptTooLong, Unsupported, UsageError
from kvcache.inputs.arguments import (
    checked_flag,
    checked_integer,
    checked_natural,
    checked_request_id,
    checked_text,
)
from kvcache.inputs.multimodal import MultimodalItem, rich_tokens
from kvcache.inputs.retention import Retention, checked_retention
from kvcache.inputs.tokens import Tokens, pack_tokens
from kvcache.layout import Bound

_PLAIN = Namespace()
"""Of most requests."""


def namespace_of(
    lora_id: int | None, lora_name: str | None, cache_salt: str | None, uses_extra_ids: bool = False
) -> Namespace:
    """The namespace of a request; the salt is known by its digest from here on. Raises `UsageError`."""
    if lora_id is None and lora_name is None and cache_salt is None and not uses_extra_ids:
        return _PLAIN
    number = None if lora_id is None else checked_integer(lora_id, "a lora_id")
    name = None if lora_name is None else checked_text(lora_name, "a lora_name")
    salt = None if cache_salt is None else salt_digest(checked_text(cache_salt, "a cache_salt"))
    return Namespace(number, name, salt, uses_extra_ids)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to admit. Blocks are shared only between requests with equal LoRA id, LoRA name and cache salt.

    `multimodal` says which tokens stand for items, `extra_ids` gives each token one more number from 0 to 2**64 - 1
    (for prompt tuning). Tokens are equal only if their extra ids, items and places in the items are; a request with
    extra ids, be they all 0, shares nothing with one without. `request_id` is an integer of 64 bits, or a string of at
    most 1024 characters.
    """

    request_id: RequestId
    tokens: Tokens
    lora_id: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    multimodal: Items[MultimodalItem] = ()
    extra_ids: Tokens | None = None
    resumed: bool = False
    """It ran before, was preempted, and goes on; its prompt is then all that it had. What it finds of what it computed
    itself counts as reused, but not as hits (`Stats.reused_tokens_own`)."""
    retention: Retention | None = None
    """How its blocks are to be kept; None: those that are new get the default priority, 35, others stay as they are."""
    reserve_tokens: int | None = None
    """For how many tokens beyond what is reused there shall be slots at first, at least 1: an engine that computes the
    prompt in chunks has the others with `reserve`, chunk by chunk. None: for the whole prompt."""
    encoder_tokens: Tokens | None = None
    """For encoder-decoder models, which need it (`cross_kv_cache_fraction`): what the encoder reads, or numbers that
    stand for it, one for each place that has K/V. What is computed depends on all of it, so requests share blocks only
    where it is equal."""


_fields = attrgetter(*Request.__dataclass_fields__)


class EncoderInput(NamedTuple):
    """What an encoder reads, validated."""

    namespace: Namespace
    num_tokens: int
    tokens: bytes
    """Packed int32, filled up to whole blocks: it never grows, so its last block is as good as full."""


class CheckedRequest(NamedTuple):
    """A validated request."""

    request_id: RequestId
    namespace: Namespace
    symbols: bytes
    """The prompt as packed int32; `UNKNOWN` for what has no symbol yet."""
    rich: RichTokens | None = None
    """What it stands for, if it has items or extra ids."""
    resumed: bool = False
    retention: events.structs.StatedRetention | None = None
    reserve_tokens: int | None = None
    encoder: EncoderInput | None = None

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.symbols) // TOKEN_BYTES

    def with_symbols(self, table: SymbolTable) -> CheckedRequest:
        """The same with the symbols of this table."""
        return self if self.rich is None else self._replace(symbols=table.symbols_of(self.rich))


class RequestChecker:
    """Validates the requests for one manager: `running` are the ids that are taken, `symbols` its alphabet."""

    def __init__(
        self,
        running: Container[RequestId],
        symbols: SymbolTable,
        longest_sequence: Bound,
        longest_prompt: Bound,
        *,
        block_hash: str,
        log_has_tokens: bool,
        longest_input: Bound | None = None,
        tokens_per_block: int = 1,
    ) -> None:
        self._running, self._symbols = running, symbols
        self.longest_sequence, self.longest_prompt = longest_sequence, longest_prompt
        self.max_tokens = longest_sequence.tokens
        """Tokens of the longest sequence that can be held."""
        self._knows_lora_ids_only = block_hash == "v1_block_key"
        self._names_tell_all = not log_has_tokens
        self.longest_input, self._block_bytes = longest_input, tokens_per_block * TOKEN_BYTES

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
        """Raise `DuplicateRequest` for an id that is taken."""
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
    ) -> CheckedRequest:
        request_id = checked_request_id(request_id)
        own = namespace_of(lora_id, lora_name, cache_salt, extra_ids is not None)
        namespace, encoder = self.with_encoder(own, encoder_tokens)
        if reserve_tokens is not None and checked_natural(reserve_tokens, "reserve_tokens") < 1:
            raise UsageError("reserve_tokens must be at least 1, or None for the whole prompt")
        # Whoever gets slots chunk by chunk need not have all of them at once.
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
        )

    def with_encoder(
        self, namespace: Namespace, tokens: Tokens | None
    ) -> tuple[Namespace, EncoderInput | None]:
        """The namespace of a request whose encoder reads these tokens, and that input.

        Raises as `check`, also for an input where the model has no encoder, and for none where it has one.
        """
        longest = self.longest_input
        if longest is None:
            if tokens is not None:
                instead = "leave encoder_tokens out, or give cross_kv_cache_fraction when the manager is made"
                raise Unsupported("an encoder's input in a cache without cross attention", instead)
            return namespace, None
        if tokens is None:
            raise UsageError(
                "encoder_tokens are missing: with cross_kv_cache_fraction each request has an encoder's input"
            )
        try:
            packed = pack_tokens(tokens, longest.tokens)
        except PromptTooLong as error:
            raise longest.exceeded_by(error.length) from None
        if not packed:
            raise InvalidTokens("the encoder's input is empty: at least one token is needed")
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
        """Refuse what v1_block_key gives the names of other blocks, where somebody relies on names."""
        instead = "use the default block_hash, v2_sha256_64"
        if any(request.namespace.lora_name is not None for request in batch):
            raise Unsupported(
                "a lora_name with v1_block_key, which knows LoRA ids only", f"{instead}, or lora_id"
            )
        if self._names_tell_all and any(request.rich is not None and request.rich.items for request in batch):
            raise Unsupported("multimodal items with v1_block_key in a log without tokens", instead)
