"""Files that are written in directories that others may write to: nothing that they have put there is opened."""

from __future__ import annotations

import ast
import os
import re
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

import reigen
from benchmarks.harness.report import Document
from reigen.errors import LaunchError
from reigen.files import check_can_be_written, open_locked, open_replacement, privacy_problem, write_atomically
from reigen.launch.output.output_files import OutputFile
from reigen.observe.trace_writer import TraceFile

MINE = "only mine"
STRANGER = 12345
_WRITING = re.compile(r"(?=.*[wax+])[rwaxbt+]{1,3}")


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A file that nobody else can write to."""
    path = tmp_path / "mine"
    path.write_text(MINE)
    path.chmod(0o600)
    return path


@pytest.fixture
def everybodys(tmp_path: Path) -> Path:
    """A directory that all can write to; without the sticky bit, so that the kernel protects no links in it."""
    path = tmp_path / "everybodys"
    path.mkdir()
    path.chmod(0o777)
    return path


def trap(path: Path, target: Path, kind: str = "symbolic") -> None:
    """A link that another user has left."""
    if kind == "hard":
        path.hardlink_to(target)
    else:
        path.symlink_to(target)
        if os.geteuid() == 0:
            os.lchown(path, STRANGER, STRANGER)


def trace(path: Path) -> None:
    TraceFile(path, b"{}").close()


def states(path: Path) -> None:
    write_atomically(path, [b"states"])


def benchmark(path: Path) -> None:
    Document("reigen bench", 2, 1).save(path)


def output(path: Path) -> None:
    """Called with ``directory/stdout``."""
    OutputFile(path.parent, 0, print).close()


WRITERS = pytest.mark.parametrize("write", [trace, states, benchmark, output])


@WRITERS
@pytest.mark.parametrize("kind", ["symbolic", "hard"])
def test_what_another_user_put_in_a_files_place_is_replaced_and_not_written_to(
    mine: Path, everybodys: Path, write: Callable[[Path], None], kind: str
) -> None:
    path = everybodys / "stdout"
    trap(path, mine, kind)
    write(path)
    assert mine.read_text() == MINE
    assert not path.is_symlink()
    assert not path.samefile(mine)
    assert list(everybodys.iterdir()) == [path]


@WRITERS
@pytest.mark.parametrize("kind", ["symbolic", "hard"])
def test_no_name_that_can_be_foreseen_is_opened(
    mine: Path, everybodys: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None], kind: str
) -> None:
    """Whatever name a file has before it takes its place: it is new in each run, and what lies there is left alone."""
    names: list[str] = []
    original, path = os.open, everybodys / "stdout"

    def spied(name: str | Path, flags: int, *arguments: int, dir_fd: int | None = None) -> int:
        parent = Path(name).parent if dir_fd is None else Path(f"/proc/self/fd/{dir_fd}").resolve()
        if flags & os.O_ACCMODE and parent == everybodys:
            names.append(Path(name).name)
            assert flags & os.O_EXCL
            assert flags & os.O_NOFOLLOW
        return original(name, flags, *arguments, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", spied)
    write(path)
    write(path)
    assert len(set(names)) == len(names) == 2
    path.unlink()

    monkeypatch.setattr(secrets, "token_hex", lambda num_bytes: "guessed")
    write(path)
    path.unlink()
    trap(everybodys / names[-1], mine, kind)
    with pytest.raises(Exception, match="File exists"):
        write(path)
    assert mine.read_text() == MINE
    assert [each.name for each in everybodys.iterdir()] == [names[-1]], "what is not ours is left where it is"


def test_the_name_of_earlier_versions_is_not_opened(mine: Path, everybodys: Path) -> None:
    """It was made of the file's name and the number of the process."""
    trap(everybodys / f".trace.json.{os.getpid()}", mine)
    trace(everybodys / "trace.json")
    assert mine.read_text() == MINE


def test_a_folder_of_a_process_that_leads_elsewhere_is_refused(tmp_path: Path, everybodys: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "stdout").write_text(MINE)
    trap(everybodys / "rank.0", tmp_path / "home")
    with pytest.raises(LaunchError, match=r"cannot keep output in .*/rank.0/stdout: .*/rank.0 is a link"):
        OutputFile(everybodys / "rank.0", 0, print)
    assert (tmp_path / "home" / "stdout").read_text() == MINE
    assert len(list((tmp_path / "home").iterdir())) == 1


@pytest.mark.parametrize("function", [(secrets, "token_hex"), (os, "replace")], ids=["before", "after"])
def test_a_folder_of_a_process_that_leads_elsewhere_after_the_look_is_not_followed(
    tmp_path: Path, everybodys: Path, monkeypatch: pytest.MonkeyPatch, function: tuple[object, str]
) -> None:
    """Another user exchanges it before the new file is made, or before that takes its place."""
    home, folder, moved = tmp_path / "home", everybodys / "rank.0", everybodys / "moved"
    home.mkdir()
    (home / "stdout").write_text(MINE)
    original = getattr(*function)

    def exchanged(*arguments: object, **options: object) -> object:
        if not moved.exists():
            folder.rename(moved)
            trap(folder, home)
        return original(*arguments, **options)

    monkeypatch.setattr(*function, exchanged)
    record = OutputFile(folder, 0, print)
    record.write(b"printed")
    record.close()
    assert (home / "stdout").read_text() == MINE
    assert [each.name for each in home.iterdir()] == ["stdout"]
    assert (moved / "stdout").read_text() == "printed"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make what belongs to somebody else")
def test_a_folder_of_a_process_that_belongs_to_another_user_is_refused(everybodys: Path) -> None:
    folder = everybodys / "rank.0"
    folder.mkdir()
    os.chown(folder, STRANGER, STRANGER)
    with pytest.raises(LaunchError, match=r"/rank.0/stdout: .*/rank.0 belongs to user 12345, this process to user 0"):
        OutputFile(folder, 0, print)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
@WRITERS
def test_others_may_do_what_the_umask_allows(
    tmp_path: Path, write: Callable[[Path], None], umask: int, mode: int
) -> None:
    before = os.umask(umask)
    try:
        write(tmp_path / "stdout")
    finally:
        os.umask(before)
    assert (tmp_path / "stdout").stat().st_mode & 0o777 == mode


def test_a_block_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def fail() -> None:
        with open_replacement(path) as descriptor:
            os.write(descriptor, b"half")
            os.close(descriptor)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_trace_that_cannot_take_its_place_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(*arguments: Path, **options: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "replace", replace)
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match=r"error: '.*t\.json'"):
        trace(tmp_path / "t.json")
    assert list(tmp_path.iterdir()) == []
    assert len(list(Path("/proc/self/fd").iterdir())) == num_open


@pytest.mark.parametrize("flags", [os.O_WRONLY | os.O_CREAT, os.O_RDONLY | os.O_DIRECTORY], ids=["file", "directory"])
def test_a_lock_is_held_by_one_and_until_it_is_closed(tmp_path: Path, flags: int) -> None:
    path = tmp_path if flags & os.O_DIRECTORY else tmp_path / "lock"
    held = open_locked(path, flags)
    with pytest.raises(BlockingIOError):
        open_locked(path, flags)
    os.close(held)
    os.close(open_locked(path, flags))


def test_what_is_locked_is_not_reached_through_a_link(mine: Path, tmp_path: Path) -> None:
    for link, flags in ((tmp_path / "file", os.O_WRONLY | os.O_CREAT), (tmp_path / "folder", os.O_DIRECTORY)):
        link.symlink_to(mine if link.name == "file" else mine.parent)
        with pytest.raises(OSError, match=str(link)):
            open_locked(link, flags)


def test_a_pipe_or_a_device_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/null")
    for path in (tmp_path / "pipe", tmp_path / "device"):
        for write in (trace, states, benchmark, check_can_be_written):
            with pytest.raises(OSError, match=f"Not a regular file: '{path}'"):
                write(path)
    assert len(list(tmp_path.iterdir())) == 2


def opens_to_write(call: ast.Call) -> bool:
    """Whether a call opens or writes a file, by Python's usual ways."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in ("write_text", "write_bytes", "mkstemp", "mktemp", "NamedTemporaryFile"):
        return True
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    texts = [each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return name == "open" and ("O_CREAT" in ast.dump(call) or any(map(_WRITING.fullmatch, texts)))


def test_the_library_writes_files_in_one_way() -> None:
    source = Path(reigen.__file__).parent
    # the way, a Store's files, which may be anywhere, and states of a witness, which must not be there yet
    allowed = {"files.py", "spark/estimator_task.py", "cluster/membership/elastic/witness.py"}
    found = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and opens_to_write(node)
    }
    assert found == allowed


@pytest.mark.parametrize(
    ("mode", "user", "is_parent", "problem"),
    [
        (0o700, 1000, False, None),
        (0o600, 1000, False, None),
        (0o750, 1000, False, "may be used by others (mode 0750)"),
        (0o701, 1000, False, "may be used by others (mode 0701)"),
        (0o700, 1001, False, "belongs to user 1001, this process to user 1000"),
        (0o700, 0, False, "belongs to user 0, this process to user 1000"),
        (0o755, 1000, True, None),
        (0o755, 0, True, None),
        (0o1777, 0, True, None),
        (0o770, 1000, True, "may be changed by others (mode 0770)"),
        (0o755, 1001, True, "belongs to user 1001, this process to user 1000"),
    ],
)
def test_what_is_not_this_users_alone(
    monkeypatch: pytest.MonkeyPatch, mode: int, user: int, is_parent: bool, problem: str | None
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    status = os.stat_result((stat.S_IFDIR | mode, 0, 0, 1, user, 0, 0, 0, 0, 0))
    assert privacy_problem(status, is_parent=is_parent) == problem
