"""What the libraries below report (a sink that is quarantined, for example) and where it goes: stderr, if asked for.

A command tells what matters in its own output and messages (`kvcache.cli.messages`), so the reports are silent by
default. ``--log-json`` writes them as JSON lines for machines, ``-v`` as text.
"""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import Processor


def configure(*, as_json: bool, verbose: bool) -> None:
    """Set up structlog for this process."""
    shown = as_json or verbose
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *(_for_machines() if as_json else _for_people()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO if shown else logging.CRITICAL),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )


def _for_machines() -> list[Processor]:
    # SECURITY: local variables hold prompts; no report shows them.
    transformer = ExceptionDictTransformer(show_locals=False)
    return [structlog.processors.ExceptionRenderer(transformer), structlog.processors.JSONRenderer()]


def _for_people() -> list[Processor]:
    plain = structlog.dev.plain_traceback
    return [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
