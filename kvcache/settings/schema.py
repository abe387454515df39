"""What the JSON schema of the settings says beside their types: each field's docstring, and what it accepts.

The docstrings stand in the source alone. They are read when a schema is asked for: pydantic itself would read them
whenever the settings are imported, which makes that a tenth slower.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from pydantic import BaseModel

from kvcache.settings.problems import Accepts


def describe(model: type[BaseModel], properties: Mapping[str, dict[str, Any]]) -> None:
    """Give each property of a model's schema its description."""
    docstrings = _docstrings(model)
    for name, schema in properties.items():
        accepted = Accepts.of(model.model_fields[name])
        said = [docstrings.get(name), None if accepted is None else f"Accepted: {accepted}."]
        schema["description"] = " ".join(filter(None, said))


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The text below each field of the class; nothing where Python has no source."""
    try:
        [definition] = ast.parse(inspect.getsource(model)).body
    except (OSError, TypeError):
        return {}
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
