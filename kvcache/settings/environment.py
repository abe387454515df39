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
ENV_NESTING = "__"
_OF_SERVICE = re.compile(
    r"(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)", re.ASCII
)
"""What Kubernetes tells containers of a Service, behind its name."""
_OF_EACH_SERVICE = ("SERVICE_HOST", "SERVICE_PORT", "PORT")
"""What there is for every Service."""


class Environment(NamedTuple):
    """What an environment holds for a model of settings."""

    values: dict[str, Any]
    """The settings, as a file would give them."""
    variables: tuple[str, ...]
    """The variables that hold them."""
    unknown: tuple[str, ...]
    """Other variables that may have been meant as settings."""

    def warning(self, model: type[BaseModel]) -> str | None:
        """What to tell of the unknown variables, without their values; None: there are none."""
        if not self.unknown:
            return None
        known = variables_of(model)
        names = ", ".join(_with_closest(name, known) for name in self.unknown)
        verb = "is no setting and is" if len(self.unknown) == 1 else "are no settings and are"
        return f"{names} {verb} ignored"


def read_environment(model: type[BaseModel], env: Mapping[str, str]) -> Environment:
    """Read the settings of a model; an empty variable counts as an unset one. What they accept is checked later."""
    given = {
        name: env[name].strip() for name in sorted(env) if name.startswith(ENV_PREFIX) and env[name].strip()
    }
    known = variables_of(model)
    values: dict[str, Any] = {}
    variables = tuple(name for name in given if name in known)
    for name in variables:
        *outer, field = name.removeprefix(ENV_PREFIX).lower().split(ENV_NESTING)
        target = values
        for step in outer:
            target = target.setdefault(step, {})
        unset = given[name].lower() == "none" and may_be_none(known[name])
        target[field] = None if unset else given[name]
    services = _services(given)
    unknown = tuple(name for name in given if name not in known and not _is_of(services, name))
    return Environment(values, variables, unknown)


def _services(given: Mapping[str, str]) -> list[str]:
    """How the variables of each Service begin: one named "kvcache", and those of which the usual ones are there."""
    ends = _OF_EACH_SERVICE[0]
    begins = [name.removesuffix(ends) for name in given if name.endswith(f"_{ends}")]
    return [ENV_PREFIX, *(each for each in begins if all(each + end in given for end in _OF_EACH_SERVICE))]


def _is_of(services: list[str], name: str) -> bool:
    return any(name.startswith(each) and _OF_SERVICE.fullmatch(name, len(each)) for each in services)


def problems_in(model: type[BaseModel], env: Mapping[str, str]) -> list[str]:
    """What is wrong with the variables, each by itself: whether they fit together depends on what else is given."""
    values, problems = read_environment(model, env).values, []
    for name, field in variables_of(model).items():
        setting = name.removeprefix(ENV_PREFIX).lower().split(ENV_NESTING)
        value: Any = values
        for step in setting:
            value = value.get(step, ...) if isinstance(value, dict) else ...
        if value is not ... and not _fits(field, value):
            problems.append(
                f"{name}: {'.'.join(setting)}: given {quoted(value)}; accepted: {accepted(field)}"
            )
    return problems


def _fits(field: FieldInfo, value: Any) -> bool:
    kind: Any = Annotated[(field.annotation, *field.metadata)]
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return False
    return True


def variables_of(model: type[BaseModel], prefix: str = ENV_PREFIX) -> dict[str, FieldInfo]:
    """The environment variables that set fields of a model, and of the models inside it."""
    found = {}
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found.update(variables_of(kind, f"{prefix}{name.upper()}{ENV_NESTING}"))
        else:
            found[prefix + name.upper()] = field
    return found


def may_be_none(field: FieldInfo) -> bool:
    """Whether ``none`` is a value of the setting, and not a text."""
    return type(None) in get_args(field.annotation)


def _with_closest(name: str, known: Mapping[str, FieldInfo]) -> str:
    shown = name if name.isidentifier() else quoted(name)
    # Without what all of them begin with, which would make any two alike.
    meant = closest(name.removeprefix(ENV_PREFIX), [each.removeprefix(ENV_PREFIX) for each in known])
    return f"{shown} (did you mean {ENV_PREFIX}{meant}?)" if meant else shown
