"""A request as it enters the manager: validated, its tokens packed, its salt turned into a digest."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any

from events.tokens.rich import RichTokens
from events.tokens.symbols import SymbolTable
from events.types import Namespace, RequestId
from kvcache.decide.lookup import namespace_of
from kvcache.errors import DuplicateRequest, InvalidTokens, PromptTooLong, UsageError
from kvcache.fold.prefix_tree import SYMBOL_BYTES
from kvcache.inputs.arguments import checked_request_id, listed
from kvcache.inputs.multimodal import rich_tokens
from kvcache.inputs.tokens import pack_tokens
from kvcache.results import Request


@dataclass(frozen=True, slots=True)
class Incoming:
    """A validated request."""

    request_id: RequestId
    namespace: Namespace
    symbols: bytes
    """The prompt as packed int32; `UNKNOWN` for what has no symbol yet."""
    rich: RichTokens | None = None
    """What it stands for, if it has items or extra ids."""

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.symbols) // SYMBOL_BYTES

    def with_symbols(self, table: SymbolTable) -> Incoming:
        """The same with the symbols of this table."""
        return self if self.rich is None else replace(self, symbols=table.symbols_of(self.rich))


def incoming(request: Any, max_tokens: int, table: SymbolTable) -> Incoming:
    """Validate a `Request`; raises `UsageError`, `InvalidTokens` or `PromptTooLong`."""
    if not isinstance(request, Request):
        raise UsageError(f"each request must be a Request, not {type(request).__name__}")
    request_id = checked_request_id(request.request_id)
    uses_extra_ids = request.extra_ids is not None
    namespace = namespace_of(request.lora_id, request.lora_name, request.cache_salt, uses_extra_ids)
    symbols = pack_tokens(request.tokens, max_tokens)
    if not symbols:
        raise InvalidTokens("the prompt is empty: at least one token is needed")
    if len(symbols) > max_tokens * SYMBOL_BYTES:
        raise PromptTooLong(len(symbols) // SYMBOL_BYTES, max_tokens)
    rich = rich_tokens(symbols, request.multimodal, request.extra_ids)
    return Incoming(request_id, namespace, symbols, rich).with_symbols(table)


def incoming_batch(
    requests: object, running: Container[RequestId], max_tokens: int, table: SymbolTable
) -> list[Incoming]:
    """Validate a batch, given as a list or iterator; raises `DuplicateRequest` as well."""
    batch = [incoming(request, max_tokens, table) for request in listed(requests, "requests")]
    seen: set[RequestId] = set()
    for request in batch:
        if request.request_id in running or request.request_id in seen:
            raise DuplicateRequest(request.request_id, in_batch=request.request_id not in running)
        seen.add(request.request_id)
    return batch
