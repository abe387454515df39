"""What can be wrong with a file that is to hold the secondary level. Whatever is, the file stays as it is.

::

    UsageError
    └── SecondaryFileError             about a file; `path` says which
        ├── NotASecondaryFile          something else is in it
        ├── SecondaryFileTooNew        written by a newer version of this software
        ├── SecondaryFileDamaged       shorter than it was, or its header is not what was written
        ├── SecondaryFileOfOther       of another model, or of a cache of another shape
        ├── SecondaryFileLocked        another process has it open
        └── SecondaryFileUnavailable   the system does not let us have it
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvcache.errors import UsageError


@dataclass(eq=False, repr=False)
class SecondaryFileError(UsageError):
    """Base of the errors about the file of `secondary_path`, of which nothing was changed."""

    path: Path


class NotASecondaryFile(SecondaryFileError):
    """Something else is there."""

    text = "{path} is no file of a cache's secondary level: give secondary_path a name that is new"


@dataclass(eq=False, repr=False)
class SecondaryFileTooNew(SecondaryFileError):
    """The file has a format version that this software does not know."""

    version: int
    text = (
        "{path} has format version {version}, which is newer than this software: upgrade it, or remove the file and "
        "begin with an empty secondary level"
    )


@dataclass(eq=False, repr=False)
class SecondaryFileDamaged(SecondaryFileError):
    """What was there once is not there any more. `reason` says what is wrong."""

    reason: str
    text = "{path} is damaged: {reason}; remove it, and begin with an empty secondary level"


@dataclass(eq=False, repr=False)
class SecondaryFileOfOther(SecondaryFileError):
    """The file is of another cache. `what` says in what they differ, and how."""

    what: str
    text = (
        "{path} holds the blocks of another cache: {what}; give the settings with which it was made, another "
        "secondary_path, or remove the file"
    )


@dataclass(eq=False, repr=False)
class SecondaryFileLocked(SecondaryFileError):
    """Another cache has the file open; `holder` says which process, as far as is known."""

    holder: str
    text = "{path} is in use by {holder}: stop that process, or choose another secondary_path"


@dataclass(eq=False, repr=False)
class SecondaryFileUnavailable(SecondaryFileError):
    """The system refuses: no permission, no such directory, no room."""

    reason: str
    text = (
        "{path} cannot hold the secondary level: {reason}; choose a secondary_path where this user may write"
    )
