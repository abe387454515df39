"""A request as it enters the manager: validated, its tokens packed, its salt turned into a digest."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from events.types import Namespace, RequestId
from kvcache.errors import DuplicateRequest, InvalidTokens, PromptTooLong, UsageError
from kvcache.lookup import checked_integer, checked_text, namespace_of
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


def incoming(request: Request) -> Incoming:
    """Validate a request; raises `UsageError` or `InvalidTokens`."""
    given: object = request.request_id
    request_id: RequestId
    if isinstance(given, str):
        request_id = checked_text(given, "a request id")
    elif isinstance(given, int) and not isinstance(given, bool):
        request_id = checked_integer(given, "an integer request id")
    else:
        raise UsageError(f"a request id must be a string or an integer, not {type(given).__name__}")
    namespace = namespace_of(request.lora_id, request.lora_name, request.cache_salt)
    symbols = pack_tokens(request.tokens)
    if not symbols:
        raise InvalidTokens("the prompt is empty: at least one token is needed")
    return Incoming(request_id, namespace, symbols)


def incoming_batch(
    requests: Iterable[Request], running: Container[RequestId], max_tokens: int
) -> list[Incoming]:
    """Validate a batch; raises `DuplicateRequest` and `PromptTooLong` as well."""
    batch = [incoming(request) for request in requests]
    seen: set[RequestId] = set()
    for request in batch:
        if request.request_id in running or request.request_id in seen:
            raise DuplicateRequest(request.request_id)
        seen.add(request.request_id)
        if request.num_tokens > max_tokens:
            raise PromptTooLong(request.num_tokens, max_tokens)
    return batch
