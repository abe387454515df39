"""Requests written as a trace."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from kvcache.workload.traces import TraceRequest


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    path.write_bytes(msgspec.json.Encoder().encode_lines(list(requests)))
