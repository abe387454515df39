"""Chats through vLLM's own scheduler, recorded, and played again in caches of other sizes that vLLM is run with, too.

    python -m tests.support.engines.vllm_sizes

prints a line of JSON: what vLLM reused in each size, and what was played of which log. Runs where vLLM is installed.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from events.log import LogReader
from events.types import SequenceAdded
from kvcache.integrations.vllm.plugin import register
from kvcache.whatif.commands import recorded
from kvcache.whatif.playback import Playback
from kvcache.whatif.trial import Trial, play
from tests.support.engines.stock_vllm import StockVLLM
from tests.support.engines.vllm_model import write_model

SIZES = (600, 1200, 2400)
"""Blocks, of which vLLM gives out all but one."""
BLOCK_SIZE = 16


class Turn(NamedTuple):
    """A request: when it comes, in steps, and what it is."""

    step: int
    name: str
    prompt: list[int]
    output: list[int]


def turns(rng: random.Random, chats: int = 60) -> list[Turn]:
    """What comes: each turn of a chat begins with all before it, and all chats with the same tokens."""
    found = []
    system = [rng.randrange(512) for _ in range(320)]
    for chat in range(chats):
        step, said = rng.randrange(1500), list(system)
        for turn in range(rng.randint(1, 8)):
            said += [rng.randrange(512) for _ in range(rng.randint(20, 700))]
            output = [rng.randrange(512) for _ in range(rng.randint(5, 120))]
            found.append(Turn(step, f"c{chat}t{turn}", list(said), output))
            said += output
            step += len(output) + rng.randint(30, 900)
    return sorted(found)


def serve(coming: list[Turn], blocks: int, directory: Path, *, runs_ahead: bool) -> tuple[int, Path]:
    """What vLLM reuses of these, and its log. Most prompts are longer than what it computes in a step."""
    log = directory / "log"
    engine = StockVLLM(
        write_model(directory / "model"),
        blocks,
        block_size=BLOCK_SIZE,
        runs_ahead=runs_ahead,
        in_flight=16,
        tokens_per_step=256,
        longest=8192,
        additional={"kvcache": {"log": str(log)}},
    )
    outputs = {turn.name: iter(turn.output) for turn in coming}
    left, step = coming[::-1], 0

    def sampled(name: str, _: int) -> list[int]:
        return [next(outputs[name], 0)]

    while left or engine.scheduler.has_requests() or engine.flies:
        while left and left[-1].step <= step:
            turn = left.pop()
            engine.add(turn.name, turn.prompt, len(turn.output))
        if engine.scheduler.has_requests() or engine.flies:
            engine.serve_step(sampled)
        step += 1
    assert engine.attached.attached, "the recorder has let go"
    engine.scheduler.shutdown()
    return engine.hits, log


def differing(log: Path) -> list[int]:
    """Of the requests that reuse something else when they are played as they were, how many tokens more it is."""
    then = {
        event.handle: event.reused
        for batch in LogReader(log)
        for event in batch.events
        if isinstance(event, SequenceAdded)
    }
    now: dict[Any, int] = {}

    def receive(event: object) -> None:
        if isinstance(event, SequenceAdded):
            now[event.request_id] = event.reused

    playback = Playback(on_event=receive)
    for batch in recorded(log):
        playback.play(batch)
    playback.finish()
    assert then.keys() == now.keys()
    return [now[handle] - reused for handle, reused in then.items() if now[handle] != reused]


def main() -> None:
    """Serve, play, print."""
    register()
    coming = turns(random.Random(1))
    found: dict[str, Any] = {"prompt_tokens": sum(len(turn.prompt) for turn in coming)}
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(sys.stderr):
        for name, runs_ahead in (("sync", False), ("ahead", True)):
            trials = [Trial({"primary_blocks": size - 1}) for size in SIZES]
            served = [
                serve(coming, size, Path(directory) / f"{name}{size}", runs_ahead=runs_ahead)
                for size in SIZES
            ]
            log = served[1][1]
            _, *played = play(log, trials)
            found[name] = {
                "vllm": [hits for hits, _ in served],
                "played": [outcome.tally.reused_tokens for outcome in played],
                "differing": differing(log),
                "chunked": sum(len(turn.prompt) > 256 for turn in coming),
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
