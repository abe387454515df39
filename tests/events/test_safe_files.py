"""Files that are ours alone: what is opened, what is refused and left as it is, and what each says."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from events.errors import NotARegularFile, UnsafeFile
from events.files import safe
from events.files.safe import OTHERS, check_directory, create_file, open_or_create, open_output, open_own
from events.log import LogReader, LogWriter
from events.log.durable import replace_file
from events.log.leases import Lease, leased
from tests.support.logs.logs import batch, batches, read_log, write_log
from tests.support.logs.planted import OTHER, as_root, plant


@pytest.fixture(autouse=True)
def umask_of_nobody() -> Iterator[None]:
    """A umask that forbids nothing."""
    before = os.umask(0)
    yield
    os.umask(before)


def to_write(path: Path) -> int:
    return open_own(path, os.O_RDWR)


def to_lock(path: Path) -> int:
    return open_or_create(path, os.O_RDWR)


WAYS: list[Callable[[Path], int]] = [to_write, to_lock, open_output]


def refused(path: Path, way: Callable[[Path], int], reason: str) -> None:
    """It is, and no descriptor stays open, no file is made, and no byte changes."""
    before = sorted(path.parent.iterdir()), path.read_bytes() if path.is_file() else None, open_descriptors()
    with pytest.raises(UnsafeFile, match=reason) as raised:
        way(path)
    assert raised.value.path == path
    after = sorted(path.parent.iterdir()), path.read_bytes() if path.is_file() else None, open_descriptors()
    assert after == before


def refused_link(path: Path, link: Path) -> None:
    """Because of another link, to which it leads."""
    with pytest.raises(UnsafeFile, match="symbolic link of another user") as raised:
        open_output(path)
    assert raised.value.path == link


def open_descriptors() -> int:
    return len(list(Path("/dev/fd").iterdir()))


@pytest.mark.parametrize("way", WAYS)
def test_what_others_may_have_is_refused(tmp_path: Path, way: Callable[[Path], int]) -> None:
    """Files that others may write, and such that have a second name, which may be in another directory."""
    path = tmp_path / "file"
    path.write_bytes(b"mine")
    path.chmod(0o646)
    refused(path, way, "others can write it; chmod o-w it, or choose another path")
    path.chmod(0o660)
    os.close(way(path))
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "name").hardlink_to(path)
    refused(path, way, "it has other names .* remove them")


@as_root
@pytest.mark.parametrize("way", WAYS)
def test_what_another_user_has_planted_is_refused(tmp_path: Path, way: Callable[[Path], int]) -> None:
    """His files, with whatever mode, and his links to files of ours."""
    path = plant(tmp_path / "file", b"his", mode=0o600)
    refused(path, way, rf"it belongs to another user \(uid {OTHER}\); run this as that user, chown it")
    (tmp_path / "precious").write_bytes(b"mine")
    link = plant(tmp_path / "link", tmp_path / "precious")
    refused(link, way, "symbolic link.*give the path of the file itself")


@pytest.mark.parametrize("way", [to_write, to_lock, create_file])
def test_what_is_no_file_is_refused(tmp_path: Path, way: Callable[[Path], int]) -> None:
    """A pipe is neither waited for nor removed; it says so."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(NotARegularFile, match="not a regular file; remove it, or choose another path"):
        way(path)
    assert stat.S_ISFIFO(path.lstat().st_mode)


@pytest.mark.parametrize("way", [to_lock, create_file, open_output])
def test_new_files_are_private(tmp_path: Path, way: Callable[[Path], int]) -> None:
    """Whatever the umask."""
    os.close(way(tmp_path / "file"))
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


def test_unfinished_files_are_made_anew(tmp_path: Path) -> None:
    """What is there under the name is removed, not written to: others may have it open."""
    left = tmp_path / "file.new"
    left.write_bytes(b"left")
    left.chmod(0o666)
    with left.open("rb") as opened:
        replace_file(tmp_path / "file", b"new")
        assert opened.read() == b"left"
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    (tmp_path / "precious").write_bytes(b"mine")
    left.symlink_to(tmp_path / "precious")
    with pytest.raises(NotARegularFile):
        replace_file(tmp_path / "file", b"newer")
    assert (tmp_path / "precious").read_bytes() == b"mine"


class TestOutput:
    """What a user names to append to."""

    def test_links_of_ours_are_followed(self, tmp_path: Path) -> None:
        """To a file that is there, and to one that is not yet; where others could exchange the link, it is refused."""
        target, link = tmp_path / "target", tmp_path / "links" / "link"
        link.parent.mkdir(0o755)
        link.symlink_to(target)
        for line in (b"1", b"2"):
            descriptor = open_output(link)
            os.write(descriptor, line)
            os.close(descriptor)
        assert target.read_bytes() == b"12"
        link.parent.chmod(0o777)
        with pytest.raises(UnsafeFile, match="others can write it") as raised:
            open_output(link)
        assert raised.value.path == link.parent
        link.parent.chmod(0o1777)
        os.close(open_output(link))

    @as_root
    def test_links_of_ours_do_not_lead_to_links_of_others(self, tmp_path: Path) -> None:
        """Neither to what is there, nor to what would be made; and a loop of links ends."""
        (tmp_path / "shared").mkdir()
        (tmp_path / "shared").chmod(0o1777)
        link, his = tmp_path / "link", tmp_path / "shared" / "his"
        link.symlink_to(his)
        for target in (tmp_path / "precious", tmp_path / "missing"):
            plant(his, target)
            (tmp_path / "precious").write_bytes(b"mine")
            refused_link(link, his)
            his.unlink()
        assert (tmp_path / "precious").read_bytes() == b"mine"
        assert not (tmp_path / "missing").exists()
        his.symlink_to(link)
        with pytest.raises(OSError, match=str(link)) as raised:
            open_output(link)
        assert raised.value.errno == errno.ELOOP

    def test_a_pipe_in_place_of_a_file_is_not_waited_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Put there after it was looked what the path has."""
        path, opened = tmp_path / "file", os.open

        def exchange(name: Path, flags: int, *mode: int) -> int:
            path.unlink()
            os.mkfifo(path)
            return opened(name, flags, *mode)

        path.touch(0o600)
        monkeypatch.setattr(os, "open", exchange)
        with pytest.raises(OSError, match=os.strerror(errno.ENXIO)):
            open_output(path)

    def test_devices_and_descriptors_are_taken(self, tmp_path: Path) -> None:
        """All may write to /dev/null; what is named by a descriptor is this process's own, whatever it is."""
        os.close(open_output(Path("/dev/null"), OTHERS))
        (tmp_path / "file").touch(0o666)
        with (tmp_path / "file").open("a") as file:
            descriptor = open_output(Path(f"/dev/fd/{file.fileno()}"), OTHERS)
        os.write(descriptor, b"x")
        os.close(descriptor)
        assert (tmp_path / "file").read_bytes() == b"x"

    def test_links_to_descriptors_are_followed(self, tmp_path: Path) -> None:
        """As in containers, where a log file is a link to standard output."""
        link = tmp_path / "log"
        reading, writing = os.pipe()
        link.symlink_to(f"/dev/fd/{writing}")
        descriptor = open_output(link)
        os.write(descriptor, b"x")
        assert os.read(reading, 1) == b"x"
        for each in (descriptor, reading, writing):
            os.close(each)

    def test_what_holds_prompts_is_not_for_others_to_read(self, tmp_path: Path) -> None:
        """A group may, as those who collect logs."""
        path = tmp_path / "file"
        path.touch(0o644)
        with pytest.raises(UnsafeFile, match="others can read it; chmod 600 it"):
            open_output(path, OTHERS)
        os.close(open_output(path))
        path.chmod(0o640)
        os.close(open_output(path, OTHERS))

    @as_root
    def test_a_planted_pipe_is_not_waited_for(self, tmp_path: Path) -> None:
        """Whoever reads from it would get everything, and whoever does not would stop us."""
        os.mkfifo(tmp_path / "pipe", 0o666)
        os.chown(tmp_path / "pipe", OTHER, OTHER)
        with pytest.raises(UnsafeFile, match="another user"):
            open_output(tmp_path / "pipe")


class TestDirectories:
    def test_others_may_not_write_there(self, tmp_path: Path) -> None:
        """But where all have their own files, as in /tmp."""
        for mode, fine in ((0o700, True), (0o775, True), (0o1777, True), (0o777, False)):
            tmp_path.chmod(mode)
            if fine:
                check_directory(tmp_path)
            else:
                with pytest.raises(UnsafeFile, match="chmod o-w"):
                    check_directory(tmp_path)
        tmp_path.chmod(0o1777)
        with pytest.raises(UnsafeFile, match="chmod o-w"):
            check_directory(tmp_path, may_be_sticky=False)

    @as_root
    def test_those_of_others_are_refused(self, tmp_path: Path) -> None:
        """Whatever their mode, and so are their links to directories of ours."""
        for path in (
            plant(tmp_path / "his", None, 0o700),
            plant(tmp_path / "sticky", None, 0o1777),
            plant(tmp_path / "link", tmp_path),
        ):
            with pytest.raises(UnsafeFile, match="another user"):
                check_directory(path)


def test_file_systems_with_owners_and_modes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a new file of ours belongs to somebody else, or is open to all, such files are ours, and no others."""
    path = tmp_path / "file"
    path.touch(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: OTHER + 1)
    if os.getuid() != 0:  # What is root's counts as ours.
        os.close(to_write(path))
    path.chmod(0o666)
    really = os.fstat

    def fstat(descriptor: int) -> os.stat_result:
        return os.stat_result((really(descriptor).st_mode | 0o666, *really(descriptor)[1:]))

    monkeypatch.setattr(os, "fstat", fstat)
    os.close(to_write(path))
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    monkeypatch.setattr(safe, "_of_new_file", lambda _: (OTHER, 0o600))
    with pytest.raises(UnsafeFile, match=r"others can read it and others can write it|another user"):
        open_own(path, os.O_RDWR, OTHERS)


class TestLogs:
    """Log directories."""

    def test_a_log_is_made_private_again(self, tmp_path: Path) -> None:
        """One that others may list, as a copy or one on a volume with a group of its own, has its mode again."""
        log = tmp_path / "log"
        write_log(log, batches(2))
        for mode in (0o755, 0o770):
            log.chmod(mode)
            LogWriter(log, resume=True).close()
            assert stat.S_IMODE(log.stat().st_mode) == 0o700

    def test_one_into_which_others_may_have_put_segments_is_not_continued(self, tmp_path: Path) -> None:
        """Reading it is nobody's harm; what the error says makes it right."""
        log = tmp_path / "log"
        write_log(log, batches(2))
        log.chmod(0o1777)
        with pytest.raises(UnsafeFile, match=r"log is not used: others can write it; chmod o-w it"):
            LogWriter(log, resume=True)
        assert read_log(log)[0] == batches(2)
        log.chmod(0o1775)
        LogWriter(log, resume=True).close()

    @as_root
    def test_a_log_of_another_user_is_not_continued(self, tmp_path: Path) -> None:
        """Neither his directory, empty or with a log, nor a segment of his in ours; all stays as it is."""
        empty = plant(tmp_path / "empty", None, 0o777)
        log = tmp_path / "log"
        write_log(log, batches(2))
        [segment] = log.glob("*.kvlog")
        for his, directory in ((empty, empty), (log, log), (segment, log)):
            os.chown(his, OTHER, OTHER)
            names = sorted(directory.iterdir())
            with pytest.raises(
                UnsafeFile, match=rf"another user \(uid {OTHER}\); run this as that user"
            ) as raised:
                LogWriter(directory, resume=True)
            assert raised.value.path == his
            assert sorted(directory.iterdir()) == names
            os.chown(his, 0, 0)
        assert read_log(log)[0] == batches(2)
        LogWriter(log, resume=True).close()

    @as_root
    def test_whoever_follows_the_log_of_another_user_leaves_nothing_there(self, tmp_path: Path) -> None:
        """It reads on without a lease."""
        log = tmp_path / "log"
        write_log(log, [batch(0)])
        os.chown(log, OTHER, OTHER)
        lease = Lease(log)
        lease.hold(0)
        assert leased(log) is None
        assert list(LogReader(log)) == [batch(0)]
        assert not (log / "leases").exists()
