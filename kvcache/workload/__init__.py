"""Work for a cache: traces, a generator of chats, and an engine that plays them and checks every reused byte."""

from kvcache.workload.chats import ChatOptions, generate_chats
from kvcache.workload.clock import StepClock, parse_speed
from kvcache.workload.copies import CopyTotals, TimedCopier
from kvcache.workload.driver import DriveOptions, Progress, drive
from kvcache.workload.mooncake import TraceError, TraceRequest, read_trace, write_trace
from kvcache.workload.pattern import PatternMismatch
from kvcache.workload.summary import Refusal, RunResult

__all__ = [
    "ChatOptions",
    "CopyTotals",
    "DriveOptions",
    "PatternMismatch",
    "Progress",
    "Refusal",
    "RunResult",
    "StepClock",
    "TimedCopier",
    "TraceError",
    "TraceRequest",
    "drive",
    "generate_chats",
    "parse_speed",
    "read_trace",
    "write_trace",
]
