"""How the log that was read begins and ends: on stderr if it is not whole, and in JSON."""

from __future__ import annotations

from typing import Any

from events.log import LogEnd
from kvcache.audit.phrases import describe_end, is_whole, printable
from kvcache.cli.output import Output


def note_end(out: Output, end: LogEnd | None, log: object = None) -> None:
    """Say it of a log that lacks its beginning or its last batches, is torn, or may grow.

    `log` is its name where there are several.
    """
    if end is not None and end.begins is not None:
        which = "the log" if log is None else printable(str(log))
        out.note(f"{which} begins with the state after batch {end.begins:,}: what was before is not kept")
    if end is not None and not is_whole(end):
        which = "the log" if log is None else printable(str(log))
        out.note(f"{which} is {describe_end(end)}")


def end_json(end: LogEnd | None) -> dict[str, Any] | None:
    """For programs; None: the log was not read to its end."""
    if end is None:
        return None
    return {
        "kind": end.kind,
        "path": str(end.path),
        "offset": end.offset,
        "next_seq": end.next_seq,
        "begins": end.begins,
    }
