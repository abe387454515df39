"""Files that are ours alone: other users' files under our names are not followed, trusted or written to.

Files opened for writing, or trusted when read again, are checked once open, so they cannot be exchanged in between. It
must be a regular file with one name (no hard links), belong to the user of this process or to root, and not be writable
by others. New files are made exclusively, with mode 0600. So it does not matter which users may write the directory:
they can remove or hide a file there, and a file they put in its place is refused.

A group's right to write is no obstacle: Kubernetes gives it to the group of a volume's `fsGroup`.

Some file systems have owners or modes of their own (NFS for root, disks of other systems). There a file counts as ours
if a new file of ours next to it has the same owner, and as private if a new file gives others the same rights.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from events.errors import NotARegularFile, UnsafeFile

OTHERS_WRITE = stat.S_IWOTH
"""Mode bits forbidden for most files."""
OTHERS = stat.S_IRWXO
"""Mode bits forbidden for files that hold prompts or K/V."""
PROBE_PREFIX = ".kvcache-probe-"
"""Prefix of temporary files that show the file system's owners and modes."""
_OWN_OUTPUTS = ("/dev/stdout", "/dev/stderr")
_OWN_DESCRIPTORS = ("/dev/fd", "/proc/self/fd")
_MOST_LINKS = 40
"""The limit of Linux."""
_RIGHTS = (
    (stat.S_IROTH, "others can read it"),
    (stat.S_IWOTH, "others can write it"),
    (stat.S_IXOTH, "others can access it"),
    (stat.S_IWGRP, "its group can write it"),
)


def open_own(path: Path, flags: int, forbids: int = OTHERS_WRITE) -> int:
    """Open a regular file that is there and ours; `forbids` are bits of its mode. Raises UnsafeFile, OSError."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        if path.is_symlink():
            raise UnsafeFile(path, "it is a symbolic link", "give the path of the file itself") from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotARegularFile(path)
        refuse_foreign(path, status, forbids)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_or_create(path: Path, flags: int) -> int:
    """Open a regular file that is ours, or make a new one, for us alone. Raises UnsafeFile, OSError."""
    while True:
        try:
            return open_own(path, flags)
        except FileNotFoundError:
            with suppress(FileExistsError):
                return _made(path, flags)


def create_file(path: Path, flags: int = os.O_WRONLY) -> int:
    """Make a new file, for us alone; one left there by an interrupted process is removed first.

    Raises UnsafeFile if that is no regular file, or cannot be removed because it is another user's; OSError.
    """
    with suppress(FileNotFoundError):
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise NotARegularFile(path)
        try:
            path.unlink()
        except PermissionError:
            refuse_foreign(path, status)
            raise
    return _made(path, flags)


def open_output(path: Path, forbids: int = OTHERS_WRITE) -> int:
    """Open a user's output for appending: a file of ours, made if it is missing, a pipe of ours, or a device.

    Symbolic links are followed, one after the other, if we or root have made them, in directories where no other user
    could exchange them. A descriptor of this process, as ``/dev/stdout``, is used as it is. Raises UnsafeFile, OSError.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
    while True:
        target = _followed(path)
        if _is_own_descriptor(target):
            return os.open(target, flags)
        try:
            return _opened_output(target, flags | os.O_NOFOLLOW, forbids)
        except FileNotFoundError:
            with suppress(FileExistsError):
                return _made(target, flags)


def _followed(path: Path) -> Path:
    """Return the target of symbolic links, each of which is ours or root's."""
    target = path
    for _ in range(_MOST_LINKS):
        if _is_own_descriptor(target) or not target.is_symlink():
            return target
        refuse_foreign_link(target)
        check_directory(target.parent)
        target = target.parent / target.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def _is_own_descriptor(path: Path) -> bool:
    return str(path) in _OWN_OUTPUTS or str(path.parent) in _OWN_DESCRIPTORS


def _opened_output(path: Path, flags: int, forbids: int) -> int:
    status = path.lstat()
    if stat.S_ISFIFO(status.st_mode):  # Before it is opened, which waits for the other end.
        refuse_foreign(path, status, forbids)
    elif stat.S_ISREG(status.st_mode):
        flags |= os.O_NONBLOCK  # Another user may put a pipe in its place.
    descriptor = os.open(path, flags)
    try:
        status = os.fstat(descriptor)
        # Only root can make devices, and output to a terminal is visible to its owner anyway.
        if not (stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)):
            refuse_foreign(path, status, forbids)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_directory(path: Path, forbids: int = OTHERS_WRITE, *, may_be_sticky: bool = True) -> None:
    """Raise UnsafeFile unless a directory is ours or root's, and others cannot put files there under our names.

    With the sticky bit, as in ``/tmp``, each user has their own files in it (`may_be_sticky`). Raises OSError.
    """
    refuse_foreign_link(path)
    status = path.stat()
    is_shared = may_be_sticky and status.st_mode & stat.S_ISVTX
    refuse_foreign(path, status, 0 if is_shared else forbids)


def make_private(path: Path) -> list[Path]:
    """Make a directory for us alone, and its missing parents; return those made. Raises OSError."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for above in reversed(missing[1:]):
        above.mkdir(mode=0o755, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    return missing


def refuse_foreign_link(path: Path) -> None:
    """Raise UnsafeFile if a path is a symbolic link made by another user. Raises OSError."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode) and status.st_uid not in (0, os.geteuid()):
        raise UnsafeFile(
            path,
            f"it is a symbolic link of another user (uid {status.st_uid})",
            "give the path of the file itself",
        )


def refuse_foreign(
    path: Path,
    status: os.stat_result,
    forbids: int = OTHERS_WRITE,
    *,
    one_name: bool = True,
    strict: bool = False,
) -> None:
    """Raise UnsafeFile unless `status` is that of a file of ours, without these mode bits, and with one name.

    `strict`: without comparing a new file's owner and mode.
    """
    foreign, wrong = status.st_uid not in (0, os.geteuid()), status.st_mode & forbids
    if (foreign or wrong) and not strict:
        is_directory = stat.S_ISDIR(status.st_mode)
        owner, mode = _of_new_file(path if is_directory else path.parent)
        foreign, wrong = foreign and status.st_uid != owner, wrong & ~mode
    if foreign:
        reason = f"it belongs to another user (uid {status.st_uid})"
        raise UnsafeFile(path, reason, "run this as that user, chown it, or choose another path")
    if one_name and stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
        reason = "it has other names (hard links), through which others may access it"
        raise UnsafeFile(path, reason, "remove them, or choose another path")
    if wrong:
        reason = " and ".join(text for bit, text in _RIGHTS if wrong & bit)
        raise UnsafeFile(path, reason, f"{_remedy(status, forbids)} it, or choose another path")


def _remedy(status: os.stat_result, forbids: int) -> str:
    if forbids & stat.S_IROTH:
        return "chmod 700" if stat.S_ISDIR(status.st_mode) else "chmod 600"
    return "chmod go-w" if forbids & stat.S_IWGRP else "chmod o-w"


def _of_new_file(directory: Path) -> tuple[int, int]:
    """Return the owner and the mode that a new file of ours has there."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=PROBE_PREFIX, dir=directory)
    except OSError:
        return os.geteuid(), 0
    try:
        status = os.fstat(descriptor)
        return status.st_uid, status.st_mode
    finally:
        os.close(descriptor)
        Path(name).unlink()


def _made(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
