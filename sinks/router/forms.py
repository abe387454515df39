"""In which format a feed writes its batches, as its URL says."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from events.formats.wires import ARRAY_OVERHEAD, ENCODERS, Encode
from sinks.base import SinkURL, SinkURLError

WireFormat = Literal["vllm", "sglang"]
Style = Literal["map", "array"]


class Form(NamedTuple):
    """What writes a batch."""

    encode: Encode = ENCODERS["vllm"]
    overhead: int = 1
    """Up to so many times the bytes that are reckoned for a batch."""


class FormOptions(Protocol):
    """The options by which a URL chooses."""

    @property
    def format(self) -> WireFormat:
        """Whose events they look like."""

    @property
    def style(self) -> Style:
        """Maps, or arrays."""


def form_of(url: SinkURL, options: FormOptions) -> Form:
    """What writes the batches. Raises SinkURLError."""
    if options.style == "array":
        if options.format != "vllm":
            raise SinkURLError(str(url), "style=array is a form of format=vllm: SGLang writes maps only")
        return Form(ENCODERS["vllm-array"], ARRAY_OVERHEAD)
    return Form(ENCODERS[options.format])


MAPS = Form()
"""vLLM's maps: what is written where nothing else is asked for."""
