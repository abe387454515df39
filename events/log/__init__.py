"""The log: every event batch, on disk, in order, checksummed.

`LogWriter` appends from the engine, `LogReader` iterates; `LogEnd` describes a log's end. The format is described in
`events.log.frames`.

The log's guarantees: a reader receives a gapless beginning of the appended batches and knows where and how it ends;
after a power cut that is at least all that was synced, in whatever order the rest has reached the disk; damage is never
taken for an end (except to what the last sync made durable in a log that was not closed, which looks like an
interrupted write); lost batches are announced; failed writes are retried until they succeed; opening to write destroys
nothing.
"""

from events.log.reader import LogEnd, LogReader
from events.log.writer import LogStats, LogWriter

__all__ = ["LogEnd", "LogReader", "LogStats", "LogWriter"]
