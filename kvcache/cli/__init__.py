"""The command ``kvcache``: play requests through a cache, and read, replay and search its logs.

One module per command, each with `add_arguments` and `run`, loaded only when the command is called.
`kvcache.cli.command` turns errors into one line and an exit code. No module here loads torch; of the commands only
``run`` (with pools) and ``doctor`` do.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

__all__ = ["console", "main"]


def console() -> int:
    """Run `main` as the installed script, in a process of its own."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # While libraries are loaded, which may swallow exceptions: nothing is open that needs closing.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return main()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code. Imports are deferred to this point, so that Ctrl-C is handled."""
    try:
        from kvcache.cli.process import open_missing

        open_missing()
        from kvcache.cli.command import run

        return run(argv)
    except KeyboardInterrupt:
        return 130
