"""A request as it enters the manager: validated, its tokens packed, its salt turned into a digest."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from events.types import Namespace, RequestId
from kvcache.arguments import checked_request_id, listed
from kvcache.errors import DuplicateRequest, InvalidTokens, PromptTooLong, UsageError
from kvcache.lookup import namespace_of
from kvcache.prefix_tree import SYMBOL_BYTES
from kvcache.results import Request
from kvcache.tokens import pack_tokens


@dataclass(frozen=True, slots=True)
class Incoming:
    """A validated request."""

    request_id: RequestId
    namespace: Namespace
    symbols: bytes
    """The prompt as packed int32."""

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.symbols) // SYMBOL_BYTES


def incoming(request: Any, max_tokens: int) -> Incoming:
    """Validate a `Request`; raises `UsageError`, `InvalidTokens` or `PromptTooLong`."""
    if not isinstance(request, Request):
        raise UsageError(f"each request must be a Request, not {type(request).__name__}")
    request_id = checked_request_id(request.request_id)
    namespace = namespace_of(request.lora_id, request.lora_name, request.cache_salt)
    symbols = pack_tokens(request.tokens, max_tokens)
    if not symbols:
        raise InvalidTokens("the prompt is empty: at least one token is needed")
    return Incoming(request_id, namespace, symbols)


def incoming_batch(requests: object, running: Container[RequestId], max_tokens: int) -> list[Incoming]:
    """Validate a batch, given as a list or iterator; raises `DuplicateRequest` as well."""
    batch = [incoming(request, max_tokens) for request in listed(requests, "requests")]
    seen: set[RequestId] = set()
    for request in batch:
        if request.request_id in running or request.request_id in seen:
            raise DuplicateRequest(request.request_id)
        seen.add(request.request_id)
        if request.num_tokens > max_tokens:
            raise PromptTooLong(request.num_tokens, max_tokens)
    return batch
