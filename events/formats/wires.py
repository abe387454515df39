"""The formats in which a feed's batches can be written, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from events.feed.changes import AnyChange
from events.formats.sglang import encode_sglang
from events.formats.vllm_arrays import encode_arrays
from events.formats.vllm_encode import Salts, encode_batch
from events.types import GroupCreated

Format = Literal["vllm", "vllm-array", "sglang"]


class Encode(Protocol):
    """Writes one batch; `join_batches` of `events.formats.vllm` puts several of any of these formats together."""

    def __call__(
        self,
        changes: Sequence[AnyChange],
        ts: float,
        rank: int = 0,
        groups: Sequence[GroupCreated] = (),
        *,
        salts: Salts | None = None,
    ) -> bytes:
        """As `events.formats.vllm.encode_batch` says."""


Join = Callable[[Sequence[bytes], int], bytes]
"""Makes one payload of several; the number is the rank."""

ENCODERS: dict[Format, Encode] = {
    "vllm": encode_batch,
    "vllm-array": encode_arrays,
    "sglang": encode_sglang,
}
ARRAY_OVERHEAD = 5
"""Arrays take up to so many times the bytes that are reckoned for maps, since each block is an event of its own."""
