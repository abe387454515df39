"""Files that are ours alone: what another user has put under one of our names is not followed, believed or written to.

Whatever is opened for writing, or is believed when it is read again, is looked at once it is open, so nobody can
exchange it in between. It must be a regular file with one name (no hard links), belong to the user of this process or
to root, and not be writable by others. New files are made exclusively, with mode 0600. So it does not matter who may
write the directory: he can remove or hide a file there, and what he puts in its place is refused.

A group's right to write is no obstacle: Kubernetes gives it to the group of a volume's `fsGroup`.

Some file systems have owners or modes of their own (NFS for root, disks of other systems). There a file counts as ours
if a new file of ours beside it has the same owner, and as private if a new file gives others the same rights.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from events.errors import NoRegularFile, UnsafeFile

OTHERS_WRITE = stat.S_IWOTH
"""What is forbidden of most files."""
OTHERS = stat.S_IRWXO
"""What is forbidden of files which hold prompts or K/V."""
PROBE_PREFIX = ".kvcache-probe-"
"""Of files that are made for a moment, to see what the file system makes of them."""
_OWN_OUTPUTS = ("/dev/stdout", "/dev/stderr")
_OWN_DESCRIPTORS = ("/dev/fd", "/proc/self/fd")
_MOST_LINKS = 40
"""As many as Linux follows."""
_RIGHTS = (
    (stat.S_IROTH, "others may read it"),
    (stat.S_IWOTH, "others may write it"),
    (stat.S_IXOTH, "others may look into it"),
    (stat.S_IWGRP, "its group may write it"),
)


def open_own(path: Path, flags: int, forbids: int = OTHERS_WRITE) -> int:
    """Open a regular file that is there and ours; `forbids` are bits of its mode. Raises UnsafeFile, OSError."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        if path.is_symlink():
            raise UnsafeFile(path, "it is a symbolic link", "name the file itself") from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NoRegularFile(path)
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
    """Make a new file, for us alone; one that an interrupted process has left there is removed first.

    Raises UnsafeFile if that is no regular file, or cannot be removed because it is somebody else's; OSError.
    """
    with suppress(FileNotFoundError):
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise NoRegularFile(path)
        try:
            path.unlink()
        except PermissionError:
            refuse_foreign(path, status)
            raise
    return _made(path, flags)


def open_output(path: Path, forbids: int = OTHERS_WRITE) -> int:
    """Open what a user has named to append to: a file of ours, made if it is missing, a pipe of ours, or a device.

    Symbolic links are followed, one after the other, if we or root have made them, in directories where nobody else
    could exchange them. What is named as a descriptor of this process, as by ``/dev/stdout``, is taken as it is. Raises
    UnsafeFile, OSError.
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
    """What symbolic links lead to, each of which is ours or root's."""
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
        flags |= os.O_NONBLOCK  # Somebody may put a pipe in its place.
    descriptor = os.open(path, flags)
    try:
        status = os.fstat(descriptor)
        # Only root can make devices, and what is written to a terminal is seen by who has it.
        if not (stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)):
            refuse_foreign(path, status, forbids)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_directory(path: Path, forbids: int = OTHERS_WRITE, *, may_be_sticky: bool = True) -> None:
    """Raise UnsafeFile unless a directory is ours or root's, and others cannot put files there under our names.

    Where it has the sticky bit, as ``/tmp``, all have their own files in it (`may_be_sticky`). Raises OSError.
    """
    refuse_foreign_link(path)
    status = path.stat()
    is_shared = may_be_sticky and status.st_mode & stat.S_ISVTX
    refuse_foreign(path, status, 0 if is_shared else forbids)


def make_private(path: Path) -> list[Path]:
    """Make a directory for us alone, and those above it that are missing; returns which were made. Raises OSError."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for above in reversed(missing[1:]):
        above.mkdir(mode=0o755, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    return missing


def refuse_foreign_link(path: Path) -> None:
    """Raise UnsafeFile if a path is a symbolic link that somebody else has made. Raises OSError."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode) and status.st_uid not in (0, os.geteuid()):
        raise UnsafeFile(
            path, f"it is a symbolic link of another user (uid {status.st_uid})", "name the file itself"
        )


def refuse_foreign(
    path: Path,
    status: os.stat_result,
    forbids: int = OTHERS_WRITE,
    *,
    one_name: bool = True,
    strict: bool = False,
) -> None:
    """Raise UnsafeFile unless what has this `status` is ours, without these bits of its mode, and a file has one name.

    `strict`: whatever the file system makes of new files.
    """
    foreign, wrong = status.st_uid not in (0, os.geteuid()), status.st_mode & forbids
    if (foreign or wrong) and not strict:
        is_directory = stat.S_ISDIR(status.st_mode)
        owner, mode = _of_new_file(path if is_directory else path.parent)
        foreign, wrong = foreign and status.st_uid != owner, wrong & ~mode
    if foreign:
        reason = f"it belongs to another user (uid {status.st_uid})"
        raise UnsafeFile(path, reason, "run this as that user, chown it, or name another place")
    if one_name and stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
        reason = "it has other names (hard links), by which somebody may have it, too"
        raise UnsafeFile(path, reason, "remove those, or name another place")
    if wrong:
        reason = " and ".join(text for bit, text in _RIGHTS if wrong & bit)
        raise UnsafeFile(path, reason, f"{_remedy(status, forbids)} it, or name another place")


def _remedy(status: os.stat_result, forbids: int) -> str:
    if forbids & stat.S_IROTH:
        return "chmod 700" if stat.S_ISDIR(status.st_mode) else "chmod 600"
    return "chmod go-w" if forbids & stat.S_IWGRP else "chmod o-w"


def _of_new_file(directory: Path) -> tuple[int, int]:
    """The owner and the mode that a new file of ours has there."""
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
