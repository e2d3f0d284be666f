"""A warm Python stands for a Python that a test starts: what goes in, what comes out, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.multiprocess.launcher import until
from tests.warm_python import WarmPython


@pytest.fixture
def warm() -> Iterator[WarmPython]:
    with closing(WarmPython(["json", "not_installed"], os.environ)) as server:
        yield server


def script(directory: Path, text: str) -> str:
    path = directory / "script.py"
    path.write_text(text)
    return str(path)


def start(warm: WarmPython, *command: str, **options: object) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*warm.command, *command], text=True, **{**pipes, **options})  # type: ignore[call-overload, no-any-return]


def test_it_is_the_process_that_was_asked_for(warm: WarmPython, tmp_path: Path) -> None:
    text = "import os, sys; print(*sys.argv[1:], os.environ['A'], os.getcwd(), __name__, sys.stdin.read(), "
    text += "'json' in sys.modules); print('said', file=sys.stderr); sys.exit(7)"
    name = script(tmp_path, text)
    with start(warm, name, "an argument", cwd=tmp_path, env={**os.environ, "A": "b"}) as process:
        out, err = process.communicate("given", timeout=60.0)
    assert (process.returncode, out, err) == (7, f"an argument b {tmp_path} __main__ given True\n", "said\n")


def test_it_inherits_descriptors(warm: WarmPython, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    name = script(tmp_path, "import os, sys; os.write(int(sys.argv[1]), b'written')")
    with start(warm, name, str(writer), pass_fds=[writer]) as process:
        process.communicate(timeout=60.0)
    os.close(writer)
    with os.fdopen(reader) as file:
        assert file.read() == "written"
    assert process.returncode == 0


def test_an_exception_ends_it_with_a_traceback(warm: WarmPython, tmp_path: Path) -> None:
    with start(warm, script(tmp_path, "def f():\n    1 / 0\n\nf()\n")) as process:
        _, err = process.communicate(timeout=60.0)
    assert process.returncode == 1
    assert "line 2, in f" in err
    assert err.endswith("ZeroDivisionError: division by zero\n")


def test_a_signal_is_passed_on_and_its_end_is_that_of_the_client(warm: WarmPython, tmp_path: Path) -> None:
    text = "import os, signal\nsignal.signal(signal.SIGUSR1, lambda *_: os.write(1, b'heard\\n'))\n"
    with start(warm, script(tmp_path, f"{text}os.write(1, b'there\\n')\nwhile True: signal.pause()\n")) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == "heard\n"
        process.terminate()
        assert process.wait(60.0) == -signal.SIGTERM


def test_it_ends_with_a_client_that_is_killed(warm: WarmPython, tmp_path: Path) -> None:
    text = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    with start(warm, script(tmp_path, text)) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        process.kill()
        until(lambda: not Path(f"/proc/{pid}").exists())


def test_nothing_is_left_of_a_client_that_is_killed_while_it_asks(warm: WarmPython, tmp_path: Path) -> None:
    for asked in (b"", (100).to_bytes(4, "big") + b"{"):
        with closing(socket.socket(socket.AF_UNIX)) as client:
            client.connect(warm.command[-1])
            client.sendall(asked)
    with start(warm, script(tmp_path, "")) as process:
        assert process.wait(60.0) == 0
    until(lambda: all(_state(pid) == "Z" for pid in _children(warm.pid)))


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
