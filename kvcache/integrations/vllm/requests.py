"""VLLM's requests in the terms of a log: what tells equal tokens of two prompts apart, and how a request ended."""

from __future__ import annotations

import hashlib
import importlib
from typing import Any

from kvcache import MultimodalItem
from kvcache.integrations.attachment import as_utf8, request_name

_BAD_ENDS = frozenset({"FINISHED_ABORTED", "FINISHED_ERROR"})
_STOPS = {
    "FINISHED_STOPPED": "stop",
    "FINISHED_LENGTH_CAPPED": "length",
    "FINISHED_ABORTED": "abort",
    "FINISHED_ERROR": "error",
    "FINISHED_REPETITION": "repetition",
}
"""Finish reasons by the status of a request."""
_LONGEST_SESSION = 191


class RequestArguments:
    """Arguments of an admission, except the tokens. `block_size`: tokens of a block."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._adapters: dict[str, str] = {}
        """Path under which the name of each LoRA adapter was seen first."""

    def of(self, request: Any) -> dict[str, Any]:
        """Return the namespace, items, session and use of the cache of a request."""
        return {
            "lora_name": self._adapter(request.lora_request),
            "cache_salt": as_utf8(request.cache_salt or "") or None,
            "multimodal": _items(request.mm_features) + self._embeddings(request),
            "session": None if not request.session_id else request_name(request.session_id, _LONGEST_SESSION),
            "lookup": not request.skip_reading_prefix_cache,
        }

    def _adapter(self, lora: Any) -> str | None:
        if lora is None:
            return None
        name, path = lora.lora_name, lora.lora_path
        # vLLM shares blocks of adapters with equal names only if their paths are equal.
        return as_utf8(name if self._adapters.setdefault(name, path) == path else f"{name} ({path})")

    def _embeddings(self, request: Any) -> list[MultimodalItem]:
        """Return the items of a prompt given as embeddings: one for each block of it."""
        embeddings, size = request.prompt_embeds, self._size
        if embeddings is None:
            return []
        return [
            MultimodalItem(_digest(embeddings[at : at + size]), at, len(embeddings[at : at + size]))
            for at in range(0, len(embeddings), size)
        ]


def ending(request: Any) -> tuple[str, str | None]:
    """Return why a request ends, as `EndReason` has it, and its finish reason; it is preempted before its status
    changes.
    """
    status = request.status.name
    if not request.is_finished():
        return "preempted", None
    return "aborted" if status in _BAD_ENDS else "finished", _STOPS.get(status)


def _digest(tensor: Any) -> bytes:
    """Hash the bytes of a tensor of any type."""
    plain = tensor.detach().flatten().cpu().contiguous()
    return hashlib.sha256(plain.view(importlib.import_module("torch").uint8).numpy().data).digest()


def _items(features: Any) -> list[MultimodalItem]:
    """Return images and the like, which vLLM identifies by texts. Overlapping ones are joined, as video and sound."""
    found: list[MultimodalItem] = []
    for feature in sorted(features, key=lambda feature: feature.mm_position.offset):
        begin, length = feature.mm_position.offset, feature.mm_position.length
        known = feature.identifier.encode(errors="backslashreplace")
        if found and begin < found[-1].position + found[-1].length:
            last = found.pop()
            known = b"%b %d %d %b" % (last.digest, begin - last.position, length, known)
            begin, length = last.position, max(last.length, begin - last.position + length)
        found.append(MultimodalItem(hashlib.sha256(known).digest(), begin, length))
    return found
