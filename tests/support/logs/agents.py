"""A made-up trace of agents: sessions of two tenants, with turns that go on, go another way, or begin anew."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

SIZE = 64


def agents_lines(seed: int = 0, *, sessions: int = 12, turns: int = 6) -> list[dict[str, Any]]:
    """Requests in Mooncake's form, in the order in which they come, with blocks of 64 tokens.

    Sessions of one tenant begin with the same 3 blocks. Some requests name no tenant, and some no session.
    """
    dice, fresh, lines = random.Random(seed), iter(range(100, 10**6)), list[dict[str, Any]]()
    for number in range(sessions):
        tenant = ("acme", "zeta", None)[number % 3]
        system = {"acme": [0, 1, 2], "zeta": [3, 4, 5], None: [6]}[tenant]
        ids, time = [*system, next(fresh)], 700 * number
        for turn in range(turns):
            match dice.randrange(6):
                case 0 if turn:  # another way is taken from some block on
                    ids = [*ids[: dice.randrange(1, len(ids))], next(fresh), next(fresh)]
                case 1 if turn > 1:  # what was said is replaced by a summary
                    ids = [*system, next(fresh)]
            ids = [*ids, *(next(fresh) for _ in range(dice.randint(1, 4)))]
            lines.append(
                {
                    "timestamp": time,
                    "input_length": len(ids) * SIZE - dice.randrange(SIZE),
                    "output_length": dice.randint(1, 40),
                    "hash_ids": list(ids),
                    "session_id": None if number % 5 == 4 else f"chat {number}",
                    "agent": "main" if turn % 3 else "helper",
                    "tenant": tenant,
                }
            )
            time += dice.randint(200, 4000)
    return sorted(lines, key=lambda line: line["timestamp"])


def write_agents_trace(path: Path, seed: int = 0, **options: int) -> Path:
    """Write `agents_lines` to a file."""
    path.write_text("".join(json.dumps(line) + "\n" for line in agents_lines(seed, **options)))
    return path
