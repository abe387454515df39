"""How far a reader follows the code: the calls of an admission and of a flush, through which modules, and how deep.

A failure prints the path.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from kvcache.manager import KVCacheManager
from kvcache.results import Admission
from tests.support.engines import strategies
from tests.support.places import ROOT
from tests.support.sources import PACKAGES

MODULES, DEPTH, FLUSH_CALLS = 15, 13, 25
PROMPT = list(range(100))


class Call(NamedTuple):
    """A call of one of our functions."""

    depth: int
    module: str
    function: str


def path_of(command: Callable[[], Any]) -> list[Call]:
    """Return the calls of our functions that a command makes on this thread."""
    calls: list[Call] = []
    depth = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal depth
        file = Path(frame.f_code.co_filename)
        if not file.is_relative_to(ROOT) or file.relative_to(ROOT).parts[0] not in PACKAGES:
            return
        if event == "call":
            depth += 1
            calls.append(Call(depth, file.relative_to(ROOT).as_posix(), frame.f_code.co_qualname))
        elif event == "return":
            depth -= 1

    sys.setprofile(note)
    try:
        command()
    finally:
        sys.setprofile(None)
    return calls


def shown(calls: list[Call]) -> str:
    """Return a path as lines, indented by depth."""
    lines = [f"{'  ' * call.depth}{call.module} {call.function}" for call in calls]
    modules = sorted({call.module for call in calls})
    return "\n".join([f"{len(calls)} calls, {len(modules)} modules:", *lines, *modules])


def recorded(directory: Path) -> KVCacheManager:
    """Return a manager with a log and a file of events, in whose cache the prompt is."""
    sinks = [f"file:{directory / 'events.jsonl'}"]
    manager = KVCacheManager(
        strategies.config(
            tokens_per_block=16, primary_blocks=64, max_sequence_length=1024, enable_partial_reuse=False
        ),
        log=directory / "log",
        sinks=sinks,
    )
    for _ in range(2):
        manager.add_sequence("before", PROMPT)
        manager.store_context_blocks("before", len(PROMPT))
        manager.remove_sequence("before")
        manager.flush()
    return manager


def test_an_admission_and_a_flush_take_short_paths(tmp_path: Path) -> None:
    """Through few modules, and not deep; and little is done for sinks on the engine's thread."""
    admitted: list[Admission] = []
    with recorded(tmp_path) as manager:
        admission = path_of(lambda: admitted.append(manager.add_sequence("a", PROMPT)))
        manager.store_context_blocks("a", len(PROMPT))
        flush = path_of(manager.flush)
    assert admitted[0].reused_tokens == 96, "the prefix is not warm"
    assert len({call.module for call in admission}) <= MODULES, shown(admission)
    assert max(call.depth for call in admission) <= DEPTH, shown(admission)
    assert 0 < len(flush) <= FLUSH_CALLS, shown(flush)
