"""An explanation in words: headings, facts and a table, for a terminal as for a page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from events.types import Namespace
from kvcache.audit.explanation import Explanation, Exported, Moment, Part, Refusal, Stay, Stored
from kvcache.audit.phrases import count, duration, printable, share
from kvcache.audit.reasons import IN_WORDS

_MOST_RANGES = 4
"""Of slots, which mostly lie anywhere."""
When = Callable[[int], str]
"""A wall clock in ns as people want to read it."""


@dataclass(frozen=True, slots=True)
class Told:
    """One refusal, or a request without an admission, which have no table; or one stay of a request."""

    heading: str
    facts: list[tuple[str, str]]
    columns: list[str]
    rows: list[list[str]]

    RIGHT = ("count", "window")
    """Columns of numbers."""


def tell(found: Explanation, when: When) -> list[Told]:
    """All that is known of a request: refusals, what has no admission, then stays."""
    name = printable(str(found.request_id))
    return [
        *(_refusal(name, refusal, when) for refusal in found.refusals),
        *(_exported(name, exported, when) for exported in found.exported),
        *(_stay(name, stay, when) for stay in found.stays),
    ]


def _refusal(name: str, refusal: Refusal, when: When) -> Told:
    needed, available = (
        "/".join(f"{blocks:,}" for blocks in each) for each in (refusal.needed, refusal.available)
    )
    holders = ", ".join(f"{printable(str(each.request_id))} ({each.blocks:,})" for each in refusal.holders)
    facts = [
        ("needed", f"{needed} blocks, {available} could be had"),
        ("running", f"{count(refusal.running, 'request')}; most blocks: {holders or 'none'}"),
    ]
    return Told(f"request {name}: refused in {_moment(refusal.moment, when)}", facts, [], [])


def _exported(name: str, exported: Exported, when: When) -> Told:
    facts = [("prompt", count(exported.num_tokens, "token")), _end(exported, when)]
    since = f"ran already in {_moment(exported.since, when)}; its admission is not in the log"
    return Told(f"request {name}: {since}", facts, [], [])


def _stay(name: str, stay: Stay, when: When) -> Told:
    several = any(part.window is not None for part in stay.parts)
    rows = [
        [
            _range(part.first_block, part.last_block),
            _range(part.first, part.stop - 1),
            f"{part.stop - part.first:,}",
            *([f"{part.window:,}" if part.window is not None else ""] * several),
            _what(part),
            _details(part, stay.admitted, when),
        ]
        for part in stay.parts
    ]
    columns = ["blocks", "tokens", "count", *(["window"] * several), "what", "details"]
    heading = f"request {name}: {stay.num_tokens:,} prompt tokens, admitted in {_moment(stay.admitted, when)}"
    return Told(heading, _facts(stay, when), columns, rows)


def _what(part: Part) -> str:
    if part.group is None:
        return IN_WORDS[part.reason]
    return f"cached, but lost in {group_in_words(part.group, part.kind)}"


def _facts(stay: Stay, when: When) -> list[tuple[str, str]]:
    facts = [("reused", f"{count(stay.reused, 'token')}: {share(stay.reused / stay.num_tokens)}")]
    if stay.not_loaded:
        facts.append(("not loaded", f"{count(stay.not_loaded, 'token')} that were to come from outside"))
    if namespace := namespace_in_words(stay.namespace):
        facts.append(("namespace", namespace))
    if stay.computed_again:
        facts.append(
            ("again", f"{count(stay.computed_again, 'token')} that it had computed before it was preempted")
        )
    return [*facts, _end(stay, when)]


def _end(stay: Stay | Exported, when: When) -> tuple[str, str]:
    if stay.ended is None:
        return "ended", "not in this log"
    outcome = f"with {count(stay.tokens_at_end, 'token')}, {stay.computed_at_end:,} computed"
    return "ended", f"in {_moment(stay.ended, when)}, {outcome}"


def _range(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,}–{last:,}"


def _moment(moment: Moment, when: When) -> str:
    return f"batch {moment.batch:,} ({when(moment.at)})"


def _moments(stored: tuple[Stored, ...], when: When) -> str:
    """One, or the first and the last of several."""
    moments = sorted({each.moment for each in stored}, key=lambda moment: moment.batch)
    first, last = moments[0], moments[-1]
    if first == last:
        return _moment(first, when)
    return f"batches {first.batch:,} to {last.batch:,} ({when(first.at)} to {when(last.at)})"


def _details(part: Part, now: Moment, when: When) -> str:
    said = []
    if part.group is not None and part.gone is None:
        said.append("what is needed there had never been kept")
    if part.gone is not None:
        said.append(f"{duration(max(0, now.at - part.gone.at) / 1e9)} before, in {_moment(part.gone, when)}")
        if part.gone_for is not None:
            said.append(f"to make room for request {printable(str(part.gone_for))}")
    if part.computed_by is not None:
        said.append(f"by request {printable(str(part.computed_by))}")
    if part.stored and part.stored_by is not None:
        stored = f"stored by request {printable(str(part.stored_by))} in {_moments(part.stored, when)}"
        said.append(f"{_slots(part.slots)}, {stored}" if part.slots else stored)
    return ", ".join(said)


def _slots(slots: tuple[int, ...]) -> str:
    """As ranges, in the order of the blocks; the first ones where there are many."""
    ranges: list[list[int]] = []
    for slot in slots:
        if ranges and slot == ranges[-1][1] + 1:
            ranges[-1][1] = slot
        else:
            ranges.append([slot, slot])
    said = ", ".join(_range(first, last) for first, last in ranges[:_MOST_RANGES])
    noun = "slot" if len(slots) == 1 else "slots"
    return f"{noun} {said}" + ", …" * (len(ranges) > _MOST_RANGES)


def group_in_words(group: int, kind: str) -> str:
    """A group that shares the pool of full attention."""
    return f"group {group} ({kind})"


def namespace_in_words(namespace: Namespace) -> str:
    """LoRA adapter and salt; empty for the namespace without either."""
    said = []
    if namespace.lora_id is not None:
        said.append(f"LoRA {namespace.lora_id}")
    if namespace.lora_name is not None:
        said.append(f"LoRA {printable(namespace.lora_name)}")
    if namespace.salt_digest is not None:
        said.append(f"salt {namespace.salt_digest.hex()[:8]}")
    return ", ".join(said)
