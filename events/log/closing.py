"""Whether a segment ends with the mark of an orderly end, told by its last bytes, however long it is."""

from __future__ import annotations

from pathlib import Path

from events.log.frames import (
    CLOSED,
    FRAME_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    Chain,
    parse_frame_header,
    seed_of,
)
from events.log.segments import Segment


def closed_chain(segment: Segment) -> Chain | None:
    """Where a log goes on behind a segment that ends with the mark; None if it does not. Raises as `Segment.header`."""
    header, size = segment.header(), segment.size()
    if header is None or size < SEGMENT_HEADER_BYTES + FRAME_HEADER_BYTES:
        return None
    data = segment.data(size - FRAME_HEADER_BYTES, FRAME_HEADER_BYTES)
    if len(data) < FRAME_HEADER_BYTES:
        return None
    last = parse_frame_header(data, seed_of(header.log_id, header.epoch))
    if last is None or not last.flags & CLOSED or last.payload_bytes or last.seq < header.base_seq:
        return None
    return Chain(header.log_id, header.epoch, header.number + 1, last.seq, last.payload_crc, closed=True)


def is_closed(path: Path) -> bool:
    """Whether a segment ends with the mark. Raises LogDamaged, LogTooNew, OSError."""
    with Segment(path) as segment:
        return closed_chain(segment) is not None
