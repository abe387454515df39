"""Running of a command, with its exit code.

::

    0    done
    1    the data is wrong: a damaged log, a log that could not be written to its end, a replay or checkpoint that
         disagrees, wrong bytes in a block; for `diff`, the logs differ
    2    the request was wrong: usage, settings, a missing file, a log of a newer version, or no such request, batch
         or event
    130  ended by Ctrl-C (SIGINT); 143: ended by SIGTERM; 141: the reader of the output has closed it

Expected errors are one line on stderr; ``-v`` shows where they come from, ``--log-json`` makes them JSON.
"""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Sequence

from kvcache.cli import messages
from kvcache.cli.output import PLAIN, Output
from kvcache.cli.parser import build_parser
from kvcache.cli.process import forget


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    try:
        code = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        forget(sys.stdout)
        return 128 + signal.SIGPIPE
    except OSError as error:
        # Only the last flush can still fail, as on a full disk.
        from kvcache.cli.failures import report

        forget(sys.stdout)
        return report(error, verbose=False)
    return code


def _run(argv: Sequence[str] | None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=PLAIN)
    given = sys.argv[1:] if argv is None else argv
    # Parsed by hand: errors in the arguments must also come in this form.
    messages.configure(as_json="--log-json" in given)
    try:
        args = build_parser(given).parse_args(argv)
    except SystemExit as stopped:
        return int(stopped.code or 0)
    # Deferred: `--help` has no need of it.
    from kvcache.cli.failures import EXPECTED, report

    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    messages.configure_diagnostics(as_json=args.log_json, verbose=args.verbose, quiet=args.quiet)
    try:
        return int(args.run(args, Output(quiet=args.quiet)))
    except SystemExit as stopped:
        return int(stopped.code or 0)
    except BrokenPipeError:
        raise
    except EXPECTED as error:
        return report(error, verbose=args.verbose)
