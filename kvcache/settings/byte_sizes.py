"""Settings in bytes, as a number or as people write sizes: ``64MiB``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from events.units import parse_bytes


def in_bytes(value: object) -> object:
    """The number of bytes that a text with a unit stands for; all else stays as it is."""
    if isinstance(value, str):
        with suppress(ValueError):
            return parse_bytes(value)
    return value


def or_size(letters: str = "KMGT") -> Callable[[dict[str, Any]], None]:
    """Say in a setting's schema that a text will do; `letters` begin the units of which one is enough."""

    def extend(schema: dict[str, Any]) -> None:
        if "anyOf" not in schema:
            schema["anyOf"] = [{name: schema.pop(name) for name in ("type", "minimum", "maximum")}]
        pattern = rf"^[1-9][0-9]{{0,5}}(\.[0-9]{{1,9}})?[{letters}]i?B$"
        schema["anyOf"].insert(1, {"type": "string", "pattern": pattern})

    return extend
