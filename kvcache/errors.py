"""Everything the cache manager raises, as one tree that separates three causes.

::

    KVCacheError
    ├── UsageError            the call was wrong; nothing has changed
    │   ├── ConfigError
    │   ├── DuplicateRequest
    │   ├── UnknownRequest
    │   ├── InvalidTokens
    │   ├── WrongThread
    │   ├── ManagerBusy
    │   ├── TransfersPending
    │   ├── TransfersNotAwaited
    │   ├── StaleTables
    │   ├── ComputationLost
    │   ├── ManagerClosed
    │   ├── Contradiction     an engine's call to a `Recorder` contradicts earlier ones
    │   ├── SnapshotError     a file is not a readable prefix index
    │   └── Unsupported
    ├── CapacityError         there is no room; nothing has changed, less or later may work
    │   ├── OutOfBlocks
    │   ├── PromptTooLong
    │   ├── OutOfSymbols
    │   ├── OutOfNumbers
    │   ├── PinsExceeded
    │   └── NotEnoughMemory
    └── InternalError         a bug of this library; the manager must not be used any further
        ├── InvariantViolated
        └── Poisoned

In addition, opening a log raises the errors of `events.errors`, and `flush`, `clear` and `close` raise its
`LogWriteFailed`, after which the manager is still usable.

Each error has the values that a program can act on as attributes and passes exactly these to ``Exception``, so that it
survives pickling; its text is made from them and says what to do. No text contains token ids: they are the prompt, and
error texts end up in logs that more people read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from events.errors import FieldsError
from events.types import RequestId

_SHOWN_CHARACTERS = 80
"""Number of characters of a longer request id that texts repeat."""


def shown(request_id: RequestId) -> str:
    """Format a request id for texts, shortened to fit into a line."""
    # Python writes no integer with thousands of digits.
    if isinstance(request_id, int):
        return repr(request_id) if request_id.bit_length() <= 64 else "(an integer beyond 64 bits)"
    cut = request_id[:_SHOWN_CHARACTERS]
    return repr(request_id) if cut == request_id else f"{cut!r}..."


def _named(window: int, form: str = "window {}") -> str:
    return form.format(window) if window else "cross attention"


class KVCacheError(FieldsError):
    """Base of all errors of the cache manager."""


class UsageError(KVCacheError):
    """The call was wrong. Nothing has changed."""


class ConfigError(UsageError, ValueError):
    """A configuration cannot be used.

    `problems` holds one line per problem, `source` is the origin of the settings (empty: the code). It is a ValueError
    as well, so that pydantic reports it as the problem of the field it is nested in.
    """

    def __init__(self, problems: Sequence[str], source: str = "") -> None:
        super().__init__(tuple(problems), source)
        self.problems = tuple(problems)
        self.source = source

    def __str__(self) -> str:
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}"
        origin = f" from {self.source}" if self.source else ""
        return f"the configuration{origin} has {count}:" + "".join(f"\n  {line}" for line in self.problems)


@dataclass(eq=False, repr=False)
class DuplicateRequest(UsageError):
    """A request was added with the id of a running one, or (`in_batch`) of another one of the same call."""

    request_id: RequestId
    in_batch: bool = False

    def __str__(self) -> str:
        request = f"request {shown(self.request_id)}"
        if self.in_batch:
            return f"duplicate {request} in this call: give each request its own id"
        return f"{request} is already running: remove it first, or choose another id"


@dataclass(eq=False, repr=False)
class UnknownRequest(UsageError):
    """No running request has this id."""

    request_id: RequestId

    def __str__(self) -> str:
        return f"unknown request {shown(self.request_id)}: it was never added, or has been removed"


@dataclass(eq=False, repr=False)
class InvalidTokens(UsageError):
    """Token ids cannot be used. `reason` explains why without naming any; `position` is the first invalid index."""

    reason: str
    position: int | None = None

    def __str__(self) -> str:
        where = "" if self.position is None else f" at position {self.position}"
        return f"tokens{where}: {self.reason}"


@dataclass(eq=False, repr=False)
class WrongThread(UsageError):
    """The manager was called from another thread than the one that owns it; both by name."""

    owner: str
    caller: str
    text = (
        "the manager belongs to thread {owner!r} and was called from {caller!r}: "
        "make all calls from one thread"
    )


class ManagerBusy(UsageError):
    """The manager was called in the middle of another call, by the same thread."""

    text = (
        "the manager was called while another call is in progress: code that runs during a call (signal "
        "handlers, clocks, copiers, iterables) may only call close(), which then takes effect at its end; "
        "make other calls afterwards"
    )


class TransfersPending(UsageError):
    """Block tables were requested, or tokens reported as computed, before the copies into these blocks were started."""

    text = (
        "copies into these blocks have not been started: call start_transfers() after admissions, before "
        "requesting block tables and computing"
    )


class TransfersNotAwaited(UsageError):
    """With `debug_check_tables`: copies were started, and nothing waits for them before tables are used."""

    text = (
        "copies were started, but nothing waits for them: call wait_on(stream) of the ticket from "
        "start_transfers() before the forward pass (on a CPU wait())"
    )


@dataclass(eq=False, repr=False)
class StaleTables(UsageError):
    """With `debug_check_tables`: tables are used that a later call has made out of date for this request."""

    request_id: RequestId

    def __str__(self) -> str:
        return (
            f"block tables are stale: a later call changed them for request {shown(self.request_id)}; request "
            "tables right before the forward pass, after all other calls"
        )


@dataclass(eq=False, repr=False)
class ComputationLost(UsageError):
    """A request continues before `poll` has reported that a failed copy took all but `computed` leading tokens."""

    request_id: RequestId
    computed: int
    stuck: bool = False
    """True if it cannot restart, because it has released its first blocks: it must be removed and added again."""

    def __str__(self) -> str:
        if self.stuck:
            return (
                f"a copy failed, and request {shown(self.request_id)} has released the first blocks, so it "
                "cannot restart: remove it and add it again"
            )
        return (
            f"a copy failed: only {self.computed} tokens of request {shown(self.request_id)} are still "
            "computed; call poll(), which returns all affected requests, and compute the rest again"
        )


class ManagerClosed(UsageError):
    """The manager was called after close()."""

    text = "the manager is closed: create a new one"


@dataclass(eq=False, repr=False)
class Contradiction(UsageError):
    """An engine's call to a `Recorder` contradicts its earlier calls. Nothing of the call was recorded.

    `reason` names the contradiction; `request_id` and `block`, an id of the engine's, identify the request and the
    block, if any.
    """

    reason: str
    request_id: RequestId | None = None
    block: int | None = None
    text = "{reason}"


@dataclass(eq=False, repr=False)
class Unsupported(UsageError):
    """A combination that this library does not offer. `what` names it, `instead` the remedy."""

    what: str
    instead: str
    text = "{what} is not supported: {instead}"


_NO_SNAPSHOT = {
    "foreign": "is not a saved prefix index: give a file written by PrefixIndex.save",
    "newer": (
        "has format version {detail}, which is newer than this software: upgrade kvcache, or save the "
        "index again"
    ),
    "damaged": "is damaged: {detail}; start with an empty index and let the publishers resend their state",
}


@dataclass(eq=False, repr=False)
class SnapshotError(UsageError):
    """A file cannot be read as a prefix index.

    `problem`: ``foreign``, something else is in the file; ``newer``, in a later format; ``damaged``. `detail` is the
    format's version, or the fault.
    """

    path: Path
    problem: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.path} {_NO_SNAPSHOT[self.problem].format(detail=self.detail)}"


class CapacityError(KVCacheError):
    """There is no room. Nothing has changed; with less, or later, the call may succeed."""


@dataclass(eq=False, repr=False)
class OutOfBlocks(CapacityError):
    """Too few primary blocks are blank or can be evicted.

    `index` is the first request of the batch (or sequence of the step) that does not fit; `needed` and `available`
    count blocks, one entry per group; `windows` are those of the groups, in tokens. `settings` are the ones to raise.
    """

    index: int
    needed: tuple[int, ...]
    available: tuple[int, ...]
    windows: tuple[int, ...]
    settings: str = "primary_blocks"

    def __str__(self) -> str:
        several = len(self.windows) > 1
        groups = zip(self.windows, self.needed, self.available, strict=True)
        short = ", ".join(
            f"{needed} needed, {available} free or evictable"
            + f" in group {index} ({_named(window)})" * several
            for index, (window, needed, available) in enumerate(groups)
            if needed > available
        )
        fewer = f"pass only the entries before index {self.index}, " if self.index else ""
        return f"too few primary blocks: {short}; {fewer}remove a sequence, or raise {self.settings}"


@dataclass(eq=False, repr=False)
class PinsExceeded(CapacityError):
    """More blocks of a window, which is in tokens (0: of cross attention), would be pinned than allowed."""

    blocks: int
    most: int
    window: int

    def __str__(self) -> str:
        return (
            f"{self.blocks} blocks would be pinned in {_named(self.window, 'the window of {} tokens')}, but at most "
            f"{self.most} may be: unpin some, pin fewer, or raise max_pinned_share"
        )


@dataclass(eq=False, repr=False)
class PromptTooLong(CapacityError):
    """A prompt, or a sequence, exceeds the longest that can ever be held; both in tokens.

    `window` is the attention window, in tokens, that limits the length by its primary blocks; 0: it is an encoder's
    input; None: `max_sequence_length` is the limit, or there is only one window. `settings` are the ones to raise.
    """

    length: int
    limit: int
    window: int | None = None
    settings: str = "max_sequence_length and, if the pool is smaller, primary_blocks"
    at_once: bool = False
    """True if a prompt of that length can be admitted with `reserve_tokens`."""

    def __str__(self) -> str:
        where = "" if self.window is None else f" in {_named(self.window)}"
        instead = ", admit the prompt in chunks (reserve_tokens)" if self.at_once else ""
        return (
            f"{self.length} tokens exceed the limit of {self.limit}{' at once' * self.at_once}{where}: "
            f"pass fewer, end the sequence{instead}, or raise {self.settings}"
        )


@dataclass(eq=False, repr=False)
class OutOfSymbols(CapacityError):
    """The prompts in use have too many different multimodal tokens and extra ids; both in pages of symbols."""

    needed: int
    available: int
    text = (
        "the multimodal items and extra ids need {needed} more pages of symbols, but only {available} are "
        "left: remove sequences, or clear the cache and flush"
    )


class OutOfNumbers(CapacityError):
    """The handles, or the transfer ids, of the cache's epoch are used up: after some 10**12 admissions or copies."""

    text = (
        "the cache has used up its sequence or transfer ids: finish the running requests, close the manager "
        "and create a new one; LogWriter(directory, resume=True) continues the log"
    )


@dataclass(eq=False, repr=False)
class NotEnoughMemory(CapacityError):
    """Pools do not fit; both in bytes. `where` names the memory, `lower` the settings that shrink the need."""

    needed: int
    free: int
    where: str = "memory"
    lower: str = "primary_blocks, max_tokens or primary_bytes"
    text = "the cache needs {needed:,} bytes of {where}, but only {free:,} are free: lower {lower}"


class InternalError(KVCacheError):
    """A bug of this library. The manager must not be used any further; please report it."""


@dataclass(eq=False, repr=False)
class InvariantViolated(InternalError):
    """The state breaks one of its laws. `law` names it, `detail` the place, in numbers and ids."""

    law: str
    detail: str = ""

    def __str__(self) -> str:
        where = f" ({self.detail})" if self.detail else ""
        return f"{self.law}{where}: this is a bug in kvcache, please report it"


@dataclass(eq=False, repr=False)
class Poisoned(InternalError):
    """An earlier call ended halfway, so the state cannot be trusted. `cause` names the first failure.

    `interrupted`: it was no bug, but a KeyboardInterrupt, SystemExit or the like in the middle of the call.
    """

    cause: str
    interrupted: bool = False

    def __str__(self) -> str:
        if self.interrupted:
            return (
                f"an earlier call of the manager was interrupted halfway ({self.cause}): create a new manager"
            )
        return (
            f"the manager stopped after an earlier failure ({self.cause}): create a new one, and report "
            "the failure"
        )


def invariant(holds: bool, law: str) -> None:
    """Raise InvariantViolated, naming the law, unless it holds. Unlike ``assert`` it is never off."""
    if not holds:
        raise InvariantViolated(law)
