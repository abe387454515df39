"""Settings in the environment: variables that begin with ``KVCACHE_`` and go on with the name of a setting.

Not all that begin so are meant for this library: for a Service named "kvcache", Kubernetes gives every container
``KVCACHE_SERVICE_HOST``, ``KVCACHE_PORT`` and more, and for "kvcache-router" ``KVCACHE_ROUTER_SERVICE_HOST`` and so
on. So only the settings' own names count. Any other is told, since it may be a mistyped setting, unless it is of a
Service.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from kvcache.settings.problems import accepted, closest, quoted

ENV_PREFIX = "KVCACHE_"
_OF_SERVICE = re.compile(
    r"(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)", re.ASCII
)
"""What Kubernetes tells containers of a Service, behind its name."""
_OF_EACH_SERVICE = ("SERVICE_HOST", "SERVICE_PORT", "PORT")
"""What there is for every Service."""


_OF_ENGINES = ("KVCACHE_LOG",)
"""What other engines look at: where vLLM is to be recorded."""


class Environment(NamedTuple):
    """What an environment holds for a model of settings."""

    values: dict[str, Any]
    """By the setting's name, as in ``log.fsync``."""
    unknown: tuple[str, ...]
    """Other variables that may have been meant as settings."""

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables that hold settings."""
        return tuple(map(variable_of, self.values))

    def warning(self, model: type[BaseModel]) -> str | None:
        """What to tell of the unknown variables, without their values; None: there are none."""
        if not self.unknown:
            return None
        known = [variable_of(name).removeprefix(ENV_PREFIX) for name in fields_of(model)]
        names = ", ".join(_with_closest(name, known) for name in self.unknown)
        verb = "is no setting and is" if len(self.unknown) == 1 else "are no settings and are"
        return f"{names} {verb} ignored"


def read_environment(model: type[BaseModel], env: Mapping[str, str]) -> Environment:
    """Read the settings of a model; an empty variable counts as an unset one. What they accept is checked later."""
    given = {
        name: env[name].strip() for name in sorted(env) if name.startswith(ENV_PREFIX) and env[name].strip()
    }
    known = {variable_of(name): (name, field) for name, field in fields_of(model).items()}
    values = {
        known[variable][0]: value_in(text, known[variable][1])
        for variable, text in given.items()
        if variable in known
    }
    services = _services(given)
    others = (name for name in given if name not in known and name not in _OF_ENGINES)
    unknown = tuple(name for name in others if not _is_of(services, name))
    return Environment(values, unknown)


def fields_of(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """The settings of a model, and of the models inside it, by their full name."""
    found = {}
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found.update(fields_of(kind, f"{prefix}{name}."))
        else:
            found[prefix + name] = field
    return found


def variable_of(name: str) -> str:
    """The variable that holds a setting."""
    return ENV_PREFIX + name.upper().replace(".", "__")


def value_in(text: str, field: FieldInfo | None) -> str | None:
    """What a text gives a setting: "none" is no value, where the setting may be without one."""
    may_be_none = field is not None and type(None) in get_args(field.annotation)
    return None if may_be_none and text.lower() == "none" else text


def problems_in(model: type[BaseModel], env: Mapping[str, str]) -> list[str]:
    """What is wrong with the variables, each by itself: whether they fit together depends on what else is given."""
    values = read_environment(model, env).values
    return [
        f"{variable_of(name)}: {name}: given {quoted(values[name])}; accepted: {accepted(field)}"
        for name, field in fields_of(model).items()
        if name in values and not _fits(field, values[name])
    ]


def _fits(field: FieldInfo, value: Any) -> bool:
    kind: Any = Annotated[(field.annotation, *field.metadata)]
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return False
    return True


def _services(given: Mapping[str, str]) -> list[str]:
    """How the variables of each Service begin: one named "kvcache", and those of which the usual ones are there."""
    ends = _OF_EACH_SERVICE[0]
    begins = [name.removesuffix(ends) for name in given if name.endswith(f"_{ends}")]
    return [ENV_PREFIX, *(each for each in begins if all(each + end in given for end in _OF_EACH_SERVICE))]


def _is_of(services: list[str], name: str) -> bool:
    return any(name.startswith(each) and _OF_SERVICE.fullmatch(name, len(each)) for each in services)


def _with_closest(name: str, known: list[str]) -> str:
    shown = name if name.isidentifier() else quoted(name)
    # Without what all of them begin with, which would make any two alike.
    meant = closest(name.removeprefix(ENV_PREFIX), known)
    return f"{shown} (did you mean {ENV_PREFIX}{meant}?)" if meant else shown
