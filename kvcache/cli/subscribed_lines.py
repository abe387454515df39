"""Lines of ``kvcache subscribe`` about what happened to a stream, in any format."""

from __future__ import annotations

import msgspec

from events.subscribe.continuity import Missed, Restarted, Restated
from kvcache.cli.output import count


def interruption(report: Missed | Restated | Restarted) -> str:
    """For people: what happened to the stream."""
    if isinstance(report, Restated):
        # Not how many lie between: numbers that follow the clock may jump by millions.
        numbers = f"{report.first - 1} to {report.last + 1}"
        return f"the publisher tells its whole state anew; its numbers go on from {numbers}"
    if isinstance(report, Restarted):
        return f"the publisher restarted: batch {report.first} came after {report.last}"
    batches = count(report.last - report.first + 1, "batch", "batches")
    span = f"{report.first}" if report.first == report.last else f"{report.first}-{report.last}"
    fate = "got by replay, above" if report.recovered else f"lost: {report.reason}"
    return f"missed {batches} ({span}), {fate}"


def json_interruption(report: Missed | Restated | Restarted) -> dict[str, object]:
    """The same for programs."""
    fields = msgspec.structs.asdict(report)
    span = {"first_seq": fields.pop("first"), "last_seq": fields.pop("last")}
    return {"type": type(report).__name__, **span, **fields}
