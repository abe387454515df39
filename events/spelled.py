"""Marks of fields that JSON spells otherwise than their types say: levels by name, the configuration as an object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from events.ids import LevelIndex

LEVEL_NAMES = ("primary", "secondary")
"""Of the levels, by number."""


@dataclass(frozen=True)
class Spelled:
    """Marks a field; `form` says how JSON spells it."""

    form: Literal["level", "json", "tokens"]


Level = Annotated[LevelIndex, Spelled("level")]
"""A level; in JSON by its name."""
JsonText = Annotated[str, Spelled("json")]
"""A JSON object as text; in JSON the object."""
OF_TOKENS = Spelled("tokens")
"""Marks a row that tells of tokens, and is empty where tokens are left out; in JSON null then."""
