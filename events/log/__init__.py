"""The log: every event batch, on disk, in order, checksummed.

`LogWriter` appends from the engine, `LogReader` iterates; `LogEnd` says how a log ends. The format is
described in `events.log.frames`.

What the log promises: a reader gets a gapless beginning of what was appended and knows where and how it
ends; after a power cut that is at least all that was synced, in whatever order the rest has reached the disk; damage
is never taken for an end (except to what the last sync made durable in a log that was not closed, which looks like an
interrupted write); lost batches are announced; what a disk refuses to take is written anew until it takes it; opening
to write destroys nothing.
"""

from events.log.reader import LogEnd, LogReader
from events.log.writer import LogStats, LogWriter

__all__ = ["LogEnd", "LogReader", "LogStats", "LogWriter"]
