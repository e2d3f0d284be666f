"""A warm Python stands for a Python that a test starts: what goes in, what comes out, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.multiprocess.launcher import until
from tests.warm_python import Session


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    """Of a process that stands for the one that runs the tests."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield Session(tmp_path, process.pid)
        process.kill()


@pytest.fixture
def warm(session: Session) -> list[str]:
    return session.command("warm", ["json", "not_installed"], os.environ)


def script(directory: Path, text: str) -> str:
    path = directory / "script.py"
    path.write_text(text)
    return str(path)


def start(warm: list[str], *command: str, **options: object) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*warm, *command], text=True, **{**pipes, **options})  # type: ignore[call-overload, no-any-return]


def test_it_is_the_process_that_was_asked_for(warm: list[str], tmp_path: Path) -> None:
    text = "import os, sys; print(*sys.argv[1:], os.environ['A'], os.getcwd(), __name__, sys.stdin.read(), "
    text += "'json' in sys.modules); print('said', file=sys.stderr); sys.exit(7)"
    name = script(tmp_path, text)
    with start(warm, name, "an argument", cwd=tmp_path, env={**os.environ, "A": "b"}) as process:
        out, err = process.communicate("given", timeout=60.0)
    assert (process.returncode, out, err) == (7, f"an argument b {tmp_path} __main__ given True\n", "said\n")


def test_it_inherits_descriptors(warm: list[str], tmp_path: Path) -> None:
    reader, writer = os.pipe()
    name = script(tmp_path, "import os, sys; os.write(int(sys.argv[1]), b'written')")
    with start(warm, name, str(writer), pass_fds=[writer]) as process:
        process.communicate(timeout=60.0)
    os.close(writer)
    with os.fdopen(reader) as file:
        assert file.read() == "written"
    assert process.returncode == 0


def test_an_exception_ends_it_with_a_traceback(warm: list[str], tmp_path: Path) -> None:
    with start(warm, script(tmp_path, "def f():\n    1 / 0\n\nf()\n")) as process:
        _, err = process.communicate(timeout=60.0)
    assert process.returncode == 1
    assert "line 2, in f" in err
    assert err.endswith("ZeroDivisionError: division by zero\n")


def test_a_signal_is_passed_on_and_its_end_is_that_of_the_client(warm: list[str], tmp_path: Path) -> None:
    text = "import os, signal\nsignal.signal(signal.SIGUSR1, lambda *_: os.write(1, b'heard\\n'))\n"
    with start(warm, script(tmp_path, f"{text}os.write(1, b'there\\n')\nwhile True: signal.pause()\n")) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == "heard\n"
        process.terminate()
        assert process.wait(60.0) == -signal.SIGTERM


def test_it_ends_with_a_client_that_is_killed(warm: list[str], tmp_path: Path) -> None:
    text = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    with start(warm, script(tmp_path, text)) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        process.kill()
        until(lambda: not Path(f"/proc/{pid}").exists())


def test_nothing_is_left_of_a_client_that_is_killed_while_it_asks(warm: list[str], tmp_path: Path) -> None:
    for asked in (b"", (100).to_bytes(4, "big") + b"{"):
        with closing(socket.socket(socket.AF_UNIX)) as client:
            client.connect(warm[-1])
            client.sendall(asked)
    server = _server(warm, tmp_path)
    until(lambda: all(_state(pid) == "Z" for pid in _children(server)))


def test_those_of_a_session_share_a_server_that_ends_with_it(session: Session, tmp_path: Path) -> None:
    again = Session(tmp_path, session.pid)
    servers = [_server(each.command("shared", [], os.environ), tmp_path) for each in (session, again)]
    assert servers[0] == servers[1]
    os.kill(session.pid, signal.SIGKILL)
    until(lambda: _state(servers[0]) == "Z")


def test_a_server_that_has_died_is_said_and_the_next_one_who_asks_starts_another(
    session: Session, tmp_path: Path
) -> None:
    warm = session.command("warm", [], os.environ)
    server = _server(warm, tmp_path)
    os.kill(server, signal.SIGKILL)
    until(lambda: _state(server) == "Z")
    with start(warm, script(tmp_path, "")) as process:
        _, err = process.communicate(timeout=60.0)
    assert (process.returncode, err) == (70, "the warm Python has ended\n")
    assert _server(session.command("warm", [], os.environ), tmp_path) != server


def test_one_of_a_session_is_the_first(session: Session, tmp_path: Path) -> None:
    assert [each.is_first("name") for each in (session, Session(tmp_path, session.pid))] == [True, False]
    assert session.is_first("another name")


def _server(warm: list[str], directory: Path) -> int:
    """Return the parent of a process's guardian."""
    with start(warm, script(directory, "import os; print(os.getppid(), flush=True); input()")) as process:
        assert process.stdout is not None
        guardian = int(process.stdout.readline())
        server = int(Path(f"/proc/{guardian}/stat").read_text().rpartition(")")[2].split()[1])
        process.communicate("end", timeout=60.0)
    return server


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
