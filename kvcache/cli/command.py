"""From arguments to an exit code: 0, or what went wrong.

::

    0    done
    1    the data is wrong: a damaged log, a replay or a checkpoint that disagrees, wrong bytes in a block
    2    the request was wrong: usage, settings, a missing file, a log of a newer version
    130  ended by Ctrl-C (SIGINT); 143: ended by SIGTERM; 141: nobody reads the output any more

Expected errors are one line on stderr; ``-v`` shows where they come from.
"""

from __future__ import annotations

import io
import signal
import sys
import traceback
from collections.abc import Sequence

from events.errors import EventDecodeError, EventsError, LogDamaged, LogWriteFailed
from kvcache.cli import logs
from kvcache.cli.output import Output, printable
from kvcache.cli.parser import build_parser
from kvcache.cli.streams import complain, forget
from kvcache.errors import ConfigError, InternalError, KVCacheError
from sinks import SinkError

OK, WRONG_DATA, WRONG_REQUEST = 0, 1, 2
_EXPECTED = (KVCacheError, EventsError, SinkError, OSError, MemoryError)
_ABOUT_DATA = (InternalError, EventDecodeError, LogDamaged, LogWriteFailed)


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        code = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        forget(sys.stdout)
        return 128 + signal.SIGPIPE
    except OSError as error:
        # Only the last flush is left to fail, as on a full disk.
        forget(sys.stdout)
        return _report(error, verbose=False)
    return code


def _run(argv: Sequence[str] | None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that has no sign for a letter is no reason to fail.
            stream.reconfigure(errors="backslashreplace")
    try:
        args = build_parser().parse_args(argv)
    except SystemExit as stopped:
        return stopped.code if isinstance(stopped.code, int) else WRONG_REQUEST
    logs.configure(as_json=args.log_json, verbose=args.verbose)
    try:
        return int(args.run(args, Output(quiet=args.quiet, verbose=args.verbose)))
    except BrokenPipeError:
        raise
    except _EXPECTED as error:
        return _report(error, verbose=args.verbose)


def _report(error: Exception, *, verbose: bool) -> int:
    if verbose:
        complain("".join(traceback.format_exception(error)).rstrip())
    for line in _lines(error):
        complain(f"kvcache: error: {printable(line)}")
    return WRONG_DATA if isinstance(error, _ABOUT_DATA) else WRONG_REQUEST


def _lines(error: Exception) -> list[str]:
    """What to say: one line, or one per problem of a configuration."""
    if isinstance(error, ConfigError):
        origin = f"{error.source}: " if error.source else ""
        return [origin + problem for problem in error.problems]
    if isinstance(error, OSError) and error.strerror:
        return [f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror]
    if isinstance(error, MemoryError):
        return [f"there is not enough memory: {error}" if str(error) else "there is not enough memory"]
    return [str(error)]
