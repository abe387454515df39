"""A log as a trace fit for publication: lengths, times, and numbers that show which prompts share a beginning.

The numbers are keyed hashes (HMAC-SHA256) of the names of blocks: without the key it cannot be found out if a known
text was among the prompts, and traces with different keys cannot be joined. Sessions, agents, tenants and
models have pseudonyms by the same key; `stop` is as it was. Times begin with the first line.
"""

from __future__ import annotations

import hmac
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from events.ids import Handle
from events.types import EpochStarted, Gap, SequenceRemoved
from kvcache.audit.curve import LoggedPrompt, LoggedPrompts
from kvcache.audit.export import replacing
from kvcache.errors import UsageError
from kvcache.workload.traces import MooncakeLine

TraceForm = Literal["mooncake", "bailian"]
KEY_BYTES = 32
_BEGINS: dict[TraceForm, bytes] = {"mooncake": b'{"timestamp":', "bailian": b'{"chat_id":'}
_MASK = 2**64 - 1


class BailianLine(msgspec.Struct):
    """One admission: a turn of its session, or else a chat of one turn. `timestamp` is in seconds."""

    chat_id: int
    parent_chat_id: int
    timestamp: float
    input_length: int
    output_length: int
    type: str
    turn: int
    hash_ids: list[int]


@dataclass(slots=True)
class _Admission:
    """An admission that waits until its output, and those of all before it, are known."""

    prompt: LoggedPrompt
    output: int | None = None
    stop: str | None = None


class TraceWriter:
    """Writer of a log's admissions, in order, as lines of a trace.

    Args:
        prompts: Prompts of the log, not iterated over before.
        form: Form of the lines, ``mooncake`` or ``bailian``.
        key: Key of the hashes, at least 16 bytes.
    """

    def __init__(self, prompts: LoggedPrompts, form: TraceForm, key: bytes) -> None:
        if len(key) < KEY_BYTES // 2:
            raise UsageError(f"a key of {len(key)} bytes is too short: use at least {KEY_BYTES}")
        self._prompts, self._form, self._key = prompts, form, key
        self.lines = 0
        self._first = 0
        """Time of the first line."""
        self._turns: dict[str | None, tuple[int, int]] = {}
        """By session: its last line, and its number of lines."""

    def write(self, path: Path, *, force: bool = False) -> None:
        """Write all lines to a new file; `force` replaces an earlier trace. Raises what `replacing` raises."""
        encoder = msgspec.json.Encoder()
        with replacing(path, force=force, header=_BEGINS[self._form]) as new, new.open("xb") as file:
            for line in self:
                file.write(encoder.encode(line) + b"\n")
            if not self.lines:
                raise UsageError("the log has no requests yet: nothing to export")

    def __iter__(self) -> Iterator[MooncakeLine | BailianLine]:
        waiting = deque[_Admission]()
        running: dict[Handle, _Admission] = {}
        for batch, prompts in self._prompts.batches():
            for prompt in prompts:
                running[prompt.event.handle] = admission = _Admission(prompt)
                waiting.append(admission)
            for event in batch.events:
                if isinstance(event, SequenceRemoved) and event.handle in running:
                    running[event.handle].stop = event.stop
                    self._end(running.pop(event.handle), event.num_tokens)
                elif isinstance(event, Gap | EpochStarted):
                    for handle in running.keys() - self._prompts.state.sequences.keys():
                        self._end(running.pop(handle), 0)
            while waiting and waiting[0].output is not None:
                yield self._line(waiting.popleft())
        for handle, admission in running.items():
            self._end(admission, self._prompts.state.sequences[handle].num_tokens)
        yield from map(self._line, waiting)

    def _end(self, admission: _Admission, num_tokens: int) -> None:
        admission.output = max(0, num_tokens - admission.prompt.event.num_tokens)

    def _line(self, admission: _Admission) -> MooncakeLine | BailianLine:
        event, numbers, at = admission.prompt
        hashes = [self._hash((number & _MASK).to_bytes(8, "little")) for number in numbers]
        if event.num_tokens % self._prompts.tokens_per_block:
            # Of its own in all traces of one key.
            hashes.append(self._hash(b"end %d of " % self.lines + self._prompts.log_id))
        self._first = at if not self.lines else self._first
        self.lines += 1
        lengths = event.num_tokens, admission.output or 0
        ts = at - self._first
        if self._form == "bailian":
            before, turns = self._turns.get(event.session, (-1, 0))
            if event.session is not None:
                self._turns[event.session] = self.lines, turns + 1
            return BailianLine(self.lines, before, ts // 10**6 / 1000, *lengths, "text", turns + 1, hashes)
        labels = event.labels or {}
        session = self._pseudonym("session", event.session)
        agent, tenant, model = (
            self._pseudonym(name, labels.get(name)) for name in ("agent", "tenant", "model")
        )
        return MooncakeLine(
            ts // 10**6, *lengths, tuple(hashes), session, agent, tenant, model, admission.stop
        )

    def _pseudonym(self, kind: str, name: str | None) -> str | None:
        """Return a pseudonym, equal for equal names of one kind."""
        return None if name is None else f"{self._hash(f'{kind}={name}'.encode()):016x}"

    def _hash(self, content: bytes) -> int:
        return int.from_bytes(hmac.digest(self._key, content, "sha256")[:8], "big") >> 1
