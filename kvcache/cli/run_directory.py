"""Where a run's log lies."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from shutil import rmtree
from typing import Self

from events.errors import LogExists
from events.log import LogWriter
from kvcache.cli.output import Output
from kvcache.config import LogConfig
from kvcache.errors import InternalError, UsageError
from kvcache.record.outputs import open_log


class RunDirectory:
    """The log's directory; a temporary one goes away again, unless it is evidence."""

    def __init__(self, args: argparse.Namespace, out: Output) -> None:
        self._out = out
        self._keep = args.keep
        self.temporary = args.log is None
        self.path: Path = args.log or Path(tempfile.mkdtemp(prefix="kvcache-run-"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        stays = self.settle(evidence=isinstance(error, InternalError))
        if stays is not None and self.temporary:
            self._out.note(f"the log is kept in {stays}")

    def settle(self, *, evidence: bool) -> Path | None:
        """Remove a temporary directory if nobody wants it; returns the directory if it stays."""
        wanted = (self._keep or evidence) and any(self.path.glob("*.kvlog"))
        if self.temporary and not wanted:
            rmtree(self.path, ignore_errors=True)
            return None
        return self.path

    def open_log(self, config: LogConfig, log_id: bytes | None, *, resume: bool) -> LogWriter:
        """Open the log, a new one under this id (None: one of its own)."""
        directory = self.path
        if os.path.isfile(directory):  # noqa: PTH113  Path.is_file raises for a path that is too long
            raise UsageError(f"{directory} is a file; --log takes a directory")
        try:
            writer = open_log(directory, config, log_id=log_id, resume=resume)
        except LogExists:
            raise UsageError(
                f"{directory} holds a log already: choose another directory, or add --continue to append to it"
            ) from None
        if resume and writer.epoch_started.previous_epoch is None:
            self._out.note(f"{directory} is new: nothing to continue")
        return writer
