"""What fields of settings accept: types with their limits, for pydantic, and in words, for people."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from kvcache.settings.byte_sizes import in_bytes, or_size
from kvcache.settings.problems import Accepts

MAX_BLOCKS = 2**31 - 1
"""Slots are int32."""
MAX_BYTES = 2**62
"""Sizes in bytes are int64 in the log."""
MAX_LAYERS = 65536


def storable(value: str) -> str:
    """Refuse what is no Unicode text."""
    value.encode()  # what a variable or a file holds beside UTF-8 has no place in a log
    return value


def as_numbers(value: object) -> object:
    """Read "1024,4096" or "[1024, 4096]", as environments hold them, and a list as the tuple it stands for."""
    if isinstance(value, str):
        text = value.strip()
        if text.startswith("[") and text.endswith("]"):  # a bracket alone stays, and is refused as no integer
            text = text[1:-1]
        value = text.split(",")
        if len(value) == 1:
            value = value[0]
    return tuple(value) if isinstance(value, list) else value


def one_or_more(value: object) -> object:
    """A single window is the window of all layers."""
    value = as_numbers(value)
    return (value,) if isinstance(value, int | float | str) else value


def rule_or_numbers(value: object) -> object:
    """The name of a rule stays; all else is one number per window."""
    return value if value in ("equal", "window") else one_or_more(value)


def or_one_in_schema(schema: dict[str, Any]) -> None:
    """Say so in the schema of the list of windows."""
    schema["anyOf"].insert(0, schema["anyOf"][0]["items"])


Positive = Annotated[int, Field(ge=1, le=MAX_BLOCKS), Accepts(f"an integer from 1 to {MAX_BLOCKS}")]
Natural = Annotated[int, Field(ge=0, le=MAX_BLOCKS), Accepts(f"an integer from 0 to {MAX_BLOCKS}")]
Flag = Annotated[bool, Accepts("true or false")]
OneUp = Annotated[int, Field(ge=1, le=MAX_BLOCKS)]
OfLayers = Annotated[tuple[OneUp, ...], Field(min_length=1, max_length=MAX_LAYERS)]
IN_BYTES = BeforeValidator(in_bytes)
Bytes = Annotated[
    int,
    Field(ge=1, le=MAX_BYTES, json_schema_extra=or_size()),
    IN_BYTES,
    Accepts("bytes, from 1 to 2**62, also as 64MiB"),
]
MaybeBytes = Annotated[
    int | None,
    Field(ge=1, le=MAX_BYTES, json_schema_extra=or_size()),
    IN_BYTES,
    Accepts("bytes, from 1 to 2**62, also as 64GiB, or none"),
]
MaybeCount = Annotated[OneUp | None, Accepts(f"an integer from 1 to {MAX_BLOCKS}, or none")]
Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False), Accepts("seconds above 0, up to 1e9")]
MaybeSeconds = Annotated[
    float | None, Field(gt=0, le=1e9, allow_inf_nan=False), Accepts("seconds above 0, up to 1e9, or none")
]
ZeroUp = Annotated[int, Field(ge=0, le=MAX_BLOCKS)]
OfWindows = Field(min_length=1, max_length=MAX_LAYERS)
MaybeBlocks = Annotated[
    OneUp | Annotated[tuple[OneUp, ...], OfWindows] | None,
    BeforeValidator(as_numbers),
    Accepts(f"an integer from 1 to {MAX_BLOCKS}, one such integer per window, or none"),
]
MaybeNoBlocks = Annotated[
    ZeroUp | Annotated[tuple[ZeroUp, ...], OfWindows] | None,
    BeforeValidator(as_numbers),
    Accepts(f"an integer from 0 to {MAX_BLOCKS}, one such integer per window, or none"),
]
Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]
MaybePart = Annotated[float | None, Field(gt=0, lt=1), Accepts("a number above 0 and below 1, or none")]
MaybeTokens = Annotated[
    int | None, Field(ge=1, le=MAX_BYTES), Accepts("tokens, from tokens_per_block to 2**62, or none")
]
