"""What callers pass, turned into plain Python values before anything looks at the state.

Foreign objects may do anything when they are converted: raise, quote a token, or call the manager. So all of them are
converted first, and whatever goes wrong becomes a `UsageError` that shows only types.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from operator import index
from typing import Any, TypeVar

import numpy as np

from events.types import RequestId
from kvcache.errors import UsageError

Choice = TypeVar("Choice", bound=StrEnum)
LONGEST_ID = 1024
"""Characters of a request id, which events and error texts repeat."""


def checked_integer(value: object, what: str) -> int:
    """A plain int that the log can hold: other kinds of integers (numpy's) are converted."""
    if type(value) is int:
        number = value
    elif isinstance(value, bool):
        raise UsageError(f"{what} must be an integer, not bool")
    else:
        try:
            number = index(value)  # type: ignore[arg-type]
        except UsageError:
            raise
        except Exception:  # noqa: BLE001
            raise UsageError(f"{what} must be an integer, not {type(value).__name__}") from None
    if not -(2**63) <= number < 2**64:
        raise UsageError(f"{what} must fit 64 bits")
    return number


def checked_natural(value: object, what: str) -> int:
    """A plain int from 0 on."""
    number = checked_integer(value, what)
    if number < 0:
        raise UsageError(f"{what} must not be negative")
    return number


def checked_range(start: object, stop: object, longest: int) -> tuple[int, int]:
    """The bounds of a row of tokens: 0 <= start <= stop; None and what is beyond `longest` mean up to the end."""
    first = checked_integer(start, "start")
    last = checked_integer(stop, "stop") if stop is not None else max(first, longest)
    if not 0 <= first <= last:
        raise UsageError(f"0 <= start <= stop must hold: start is {first}, stop is {last}")
    return min(first, longest), min(last, longest)


def checked_text(value: object, what: str) -> str:
    """A plain str that the log can hold, as UTF-8."""
    if not isinstance(value, str):
        raise UsageError(f"{what} must be a string, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{what} has characters that are no Unicode text (lone surrogates)") from None
    return str.__str__(value)


def checked_flag(value: object, what: str) -> bool:
    """True or False, and nothing that is merely true or false in an `if`."""
    if value is not True and value is not False:
        raise UsageError(f"{what} must be True or False, not {type(value).__name__}")
    return value


def checked_choice(value: object, choices: type[Choice], what: str) -> Choice:
    """One of a few words."""
    if isinstance(value, str) and value in choices._value2member_map_:
        return choices(value)
    shown = "" if isinstance(value, str) else f", not {type(value).__name__}"
    raise UsageError(f"{what} must be one of {', '.join(choices)}{shown}")


def checked_request_id(value: object) -> RequestId:
    """A plain str or int of bounded size. A flag is neither: to Python True is 1, and would name that request."""
    if type(value) is int and -(2**63) <= value < 2**64:
        return value
    if isinstance(value, str):
        text = checked_text(value, "a request id")
        if len(text) > LONGEST_ID:
            raise UsageError(f"a request id must have at most {LONGEST_ID} characters, not {len(text)}")
        return text
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return checked_integer(value, "an integer request id")
    raise UsageError(f"a request id must be a string or an integer, not {type(value).__name__}")


def time_from(wall_ns: Callable[[], int]) -> int:
    """What a clock of the caller's says, as the log can hold it."""
    try:
        now = wall_ns()
    except Exception as error:
        raise UsageError(f"wall_ns, the clock, raised {type(error).__name__}") from error
    if type(now) is int and 0 <= now < 2**63:
        return now
    number = checked_integer(now, "what wall_ns returns")
    if number >= 2**63:
        raise UsageError("what wall_ns returns must fit 63 bits and a sign")
    return number


def listed(values: Any, what: str) -> list[Any]:
    """The items of a sequence or iterator; a text is one thing, not a row of letters."""
    if isinstance(values, list):
        return values
    try:
        if not isinstance(values, str | bytes | bytearray):
            return list(values)
    except UsageError:
        raise  # of who made the items, as by a call that is not allowed meanwhile
    except Exception:  # noqa: BLE001
        raise UsageError(f"{what} must be a list, not {type(values).__name__}") from None
    raise UsageError(f"{what} must be a list, not one {type(values).__name__}")
