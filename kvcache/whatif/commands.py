"""What an engine asked of a cache, as calls that can be made again."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

from events import structs
from events.tokens.rich import RichTokens
from events.types import AnyEvent, EndReason, Namespace, RequestId
from kvcache.config import KVCacheConfig
from kvcache.inputs.multimodal import MultimodalItem
from kvcache.inputs.requests import Request, namespace_of
from kvcache.inputs.retention import Retention


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a request gave when it was admitted."""

    handle: int
    """Its number in the log, which is never used twice there: the request's id in what is played again."""
    request_id: RequestId
    """Its id in the log, where it has it again when it comes back after it was preempted."""
    namespace: Namespace
    content: RichTokens
    resumed: bool = False
    retention: structs.Retention | None = None
    slots: int | None = None
    """For how many of its tokens, from the first one on, it had slots when it was admitted; None: for all."""
    had_room: bool = True
    """Whether all of it would have fitted then."""
    passed_over: int = 0
    """Tokens that were cached, and that the engine that decided did not reuse."""

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.content)

    @property
    def played_namespace(self) -> Namespace:
        """The namespace of the request when it is played. A log knows salts by their digests only, so a digest's digits
        stand for the salt: what was shared is shared.
        """
        mine = self.namespace
        return namespace_of(mine.lora_id, mine.lora_name, self._salt, mine.uses_extra_ids)

    @property
    def _salt(self) -> str | None:
        return None if self.namespace.salt_digest is None else self.namespace.salt_digest.hex()

    def request(self) -> Request:
        """The request for a manager."""
        content, namespace = self.content, self.namespace
        items = [
            MultimodalItem(item.digest, item.begin, item.end - item.begin, item.uuid)
            for item in content.items
        ]
        extra_ids = None
        if namespace.uses_extra_ids:
            extra_ids = content.extra_ids_at(0, self.num_tokens).tolist()
        return Request(
            self.handle,
            memoryview(content.tokens).cast("i"),
            namespace.lora_id,
            namespace.lora_name,
            self._salt,
            items,
            extra_ids,
            self.resumed,
            None if self.retention is None else Retention.stated(self.retention),
        )


@dataclass(frozen=True, slots=True)
class Create:
    """A manager was made."""

    config: KVCacheConfig
    engine: str = ""
    """Who decided in its place; empty: it did."""


@dataclass(frozen=True, slots=True)
class Admit:
    """One call of `add_sequences`, which admitted all of these."""

    prompts: tuple[Prompt, ...]


@dataclass(frozen=True, slots=True)
class Fork:
    """`fork`."""

    handle: int
    child: Prompt
    """The branch, as if it were admitted with all that its parent had by then."""


@dataclass(frozen=True, slots=True)
class Compute:
    """`store_context_blocks`."""

    handle: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Reserve:
    """`reserve`: a chunk of a prompt got its slots, or tokens to come did."""

    handles: tuple[int, ...]
    slots: tuple[int, ...]
    """For how many tokens each sequence has slots from now on, from its first one on."""

    def only(self, handles: Container[int]) -> Reserve:
        """The call for some of its sequences."""
        kept = [pair for pair in zip(self.handles, self.slots, strict=True) if pair[0] in handles]
        return Reserve(tuple([handle for handle, _ in kept]), tuple([slots for _, slots in kept]))

    def of_each(self) -> Iterator[tuple[int, Reserve]]:
        """A call for each sequence alone."""
        for handle, slots in zip(self.handles, self.slots, strict=True):
            yield handle, Reserve((handle,), (slots,))


@dataclass(frozen=True, slots=True)
class Append:
    """`add_tokens`."""

    handles: tuple[int, ...]
    counts: tuple[int, ...] | None
    """None: one token each."""
    tokens: memoryview
    """int32."""
    draft: bool = False
    """They may be taken back."""

    def only(self, handles: Container[int]) -> Append:
        """The call for some of its sequences."""
        return self._of([part for part in self.parts() if part[0] in handles])

    def of_each(self) -> Iterator[tuple[int, Append]]:
        """A call for each sequence alone."""
        for part in self.parts():
            yield part[0], self._of([part])

    def _of(self, parts: list[tuple[int, memoryview]]) -> Append:
        tokens = memoryview(b"".join(part for _, part in parts)).cast("i")
        handles, counts = tuple(handle for handle, _ in parts), tuple(len(part) for _, part in parts)
        return Append(handles, counts, tokens, self.draft)

    def parts(self) -> list[tuple[int, memoryview]]:
        """The tokens of each sequence."""
        found, start = [], 0
        for index, handle in enumerate(self.handles):
            stop = start + (1 if self.counts is None else self.counts[index])
            found.append((handle, self.tokens[start:stop]))
            start = stop
        return found


@dataclass(frozen=True, slots=True)
class Prioritize:
    """`set_priority`, of the blocks whose priority it changed."""

    handle: int
    priority: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Rewind:
    """`rewind`."""

    handle: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Remove:
    """`remove_sequence`."""

    handle: int
    store: bool
    why: EndReason = EndReason.FINISHED


@dataclass(frozen=True, slots=True)
class Clear:
    """`clear`; also what the cache did when a copy failed."""


@dataclass(frozen=True, slots=True)
class Poll:
    """`poll`, or the end of a step: copies have landed."""


Command = Create | Admit | Fork | Compute | Reserve | Append | Prioritize | Rewind | Remove | Clear | Poll
OfOne = Compute | Prioritize | Rewind | Remove
"""Commands about one sequence."""
OfSeveral = Reserve | Append
"""Commands that give sequences slots, and are divided where these are not at the same point."""


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """A batch of a log, and the commands that made it. A command never makes more than one batch."""

    seq: int
    events: tuple[AnyEvent, ...]
    commands: tuple[Command, ...]
    clock: int = 0
    """The last time that the log has told by its end: all that is played of it happens then."""
