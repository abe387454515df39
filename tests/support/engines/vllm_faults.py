"""The recorder breaks while vLLM's scheduler works: its decisions are the same, and the log is closed.

    python -m tests.support.engines.vllm_faults FIRST LAST

prints how often it broke, as JSON. Runs where vLLM is installed.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

from kvcache import Recorder
from kvcache.integrations.vllm.plugin import register
from kvcache.integrations.vllm.recording import Recording
from kvcache.replay import replay
from tests.support.engines.vllm_programs import Program

SECRET = "12345 is a token that no message may hold"
PLACES: dict[str, Any] = {
    **dict.fromkeys(("taken", "allocated", "freed", "reset", "stepped"), Recording),
    **dict.fromkeys(
        ("admitted", "grown", "stored", "filled", "appended", "evicted", "ended", "flush", "close"), Recorder
    ),
}


class Messages(logging.Handler):
    """What the recorder tells people."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.texts.append(record.getMessage())


def broken(name: str, at: int) -> Any:
    """A method that raises when it is called for this time, before or behind what it does."""
    method, calls = getattr(PLACES[name], name), 0

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at and at % 2:
            raise RuntimeError(SECRET)
        done = method(self, *args, **kwargs)
        if calls == at:
            raise RuntimeError(SECRET)
        return done

    return mock.patch.object(PLACES[name], name, call)


def decisions(seed: int, *, recorded: bool) -> tuple[list[Any], bool]:
    """What vLLM decides, and whether it was recorded to the end."""
    with tempfile.TemporaryDirectory() as directory:
        program = Program(seed, Path(directory), recorded=recorded)
        program.engine.remembers = True
        listening = []
        for _ in program.steps():
            listening.append(bool(recorded and program.attached.attached))
        if recorded:
            end = replay(program.log, verify=True).end
            assert end is not None
            assert end.kind == "clean", end
            lost = end.next_seq - (end.last_seq or 0) - 1
            assert lost == (not listening[-1]), end
        return program.engine.decisions, listening[-1]


def main(first: int, last: int) -> None:
    """Break each of the places once for each seed."""
    register()
    messages, seen = Messages(), Counter[str]()
    logging.getLogger("vllm.kvcache").addHandler(messages)
    for seed in range(first, last):
        stock, _ = decisions(seed, recorded=False)
        rng = random.Random(seed)
        for name in PLACES:
            messages.texts.clear()
            with broken(name, 1 if name in ("close", "reset") else rng.randrange(1, 40)):
                found, to_the_end = decisions(seed, recorded=True)
            assert found == stock, f"seed {seed}: {name} changes what vLLM decides"
            warned = [text for text in messages.texts if "not recorded any further" in text]
            assert len(warned) == (not to_the_end), messages.texts
            assert SECRET not in " ".join(messages.texts)
            seen[name] += not to_the_end
    print(json.dumps(seen))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
