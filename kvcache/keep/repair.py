"""Doing to a log what a writer does on opening it, without writing on."""

from __future__ import annotations

from pathlib import Path

from events.errors import NotALog
from events.log.recovery import Recovery, carry_out, claim, plan
from events.log.segments import is_log


def repair(log: Path, *, dry_run: bool = False) -> Recovery:
    """Put what an interrupted write has left into `quarantine/` and cut it off; says what was, or would be, done.

    With `dry_run` nothing is changed, and nobody is asked whether a writer is at work, whose half-written batch then
    looks like an interrupted one. Raises NotALog, LogLocked, LogTooNew, OSError, and LogDamaged for what no interrupted
    write can have left, which no byte is changed for.
    """
    if not is_log(log):
        raise NotALog(log)
    if dry_run:
        return plan(log)
    lock = claim(log, resume=True)
    try:
        recovery = plan(log)
        carry_out(log, recovery)
        return recovery
    finally:
        lock.give_back()
