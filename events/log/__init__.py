"""The log: every event batch, on disk, in order, checksummed.

`LogWriter` appends from the engine, `LogReader` iterates; `LogEnd` says how a log ends. The format is
described in `events.log.frames`.

What the log promises: a reader gets a gapless beginning of what was appended and knows where and how it
ends; damage is never taken for an end (except to the last frame, which looks like an interrupted write); lost
batches are announced; what a disk refuses to take is written anew until it takes it; equal batches give equal
files; opening to write destroys nothing. What it does not: after a power cut the sectors of the last unsynced
group may have reached the disk in any order, and then an intact frame behind a missing one is reported as damage
although only unsynced batches are concerned.
"""

from events.log.reader import LogEnd, LogReader
from events.log.stats import LogStats
from events.log.writer import LogWriter

__all__ = ["LogEnd", "LogReader", "LogStats", "LogWriter"]
