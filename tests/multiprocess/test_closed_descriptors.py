"""Programs that are started without stdin, stdout or stderr: what they open must not take the place of those."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations

import pytest

CLOSED = [closed for length in range(4) for closed in combinations((0, 1, 2), length)]
WORST = [(1,), (0, 1, 2)]


def start(closed: tuple[int, ...], *command: str, shell_words: str = "") -> tuple[int, str, str]:
    """Run a command with some of its descriptors closed: (exit code, stdout, stderr)."""
    words = " ".join(f"{fd}{'<' if fd == 0 else '>'}&-" for fd in closed)
    done = subprocess.run(
        ["sh", "-c", f'{shell_words} exec "$@" {words}', "sh", *command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def reigen(*arguments: str) -> tuple[str, ...]:
    return sys.executable, "-m", "reigen", *arguments


@pytest.mark.parametrize("closed", CLOSED)
def test_a_job_runs_and_its_exit_code_is_its_own(closed: tuple[int, ...]) -> None:
    code = "import sys; print('out'); sys.stderr.write('err\\n'); sys.exit(3)"
    exit_code, out, err = start(closed, *reigen("run", "-np", "1", sys.executable, "-S", "-c", code))
    assert exit_code == 3
    assert out == ("" if 1 in closed else "[0] out\n")
    assert err.startswith("[0] err\nreigen run: rank 0 failed first: exit code 3\n") or (2 in closed and not err)


@pytest.mark.parametrize("closed", WORST)
def test_reigen_launch(closed: tuple[int, ...]) -> None:
    command = reigen("launch", "-n", "1", "-s", "1", "--launcher", "local", "sh", "-c", "exit 3")
    assert start(closed, *command)[0] == 3


@pytest.mark.parametrize("closed", WORST)
def test_reigen_check(closed: tuple[int, ...]) -> None:
    exit_code, out, err = start(closed, *reigen("check"))
    assert exit_code == 0
    assert out.endswith("a job can run here\n") or (1 in closed and not out)
    assert not err


RANK = """
import os
import numpy as np
import reigen
reigen.init()
seen = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)]
reigen.shutdown()
reigen.init()
total = reigen.allreduce(np.ones(1), op=reigen.Sum)[0]
reigen.shutdown()
with open(f"{os.environ['SEEN']}/{os.environ['REIGEN_RANK']}", "w") as file:
    file.write(f"{total} {' '.join(seen)}")
"""


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_what_init_opens_is_none_of_the_three(tmp_path, backend: str) -> None:
    """The ranks themselves are without them, though the launcher has them."""
    command = f'SEEN={tmp_path} REIGEN_HOST_ID=$(( {int(backend == "tcp")} * RANK )) exec "$@" <&- >&- 2>&-'
    rank = ("sh", "-c", command, "sh", sys.executable, "-c", RANK)
    assert start((), *reigen("run", "-np", "2", *rank)) == (0, "", "")
    nothing = " ".join(["/dev/null"] * 3)
    assert [(tmp_path / f"{rank}").read_text() for rank in range(2)] == [f"2.0 {nothing}"] * 2


CALLER = """
import os
import reigen
def rank():
    reigen.init()
    print("printed")
    return reigen.rank()
results = reigen.run(rank, num_proc=2)
with open(os.environ["SEEN"], "w") as file:
    file.write(str(results))
"""


@pytest.mark.parametrize("closed", WORST)
def test_reigen_run_from_a_program_without_them(tmp_path, closed: tuple[int, ...]) -> None:
    seen = tmp_path / "seen"
    exit_code, out, err = start(closed, sys.executable, "-c", CALLER, shell_words=f"SEEN={seen}")
    assert (exit_code, err) == (0, "")
    assert seen.read_text() == "[0, 1]"
    assert out.count("printed") == (0 if 1 in closed else 2)


def test_a_disk_that_is_full_is_told_as_that() -> None:
    code = "import time\nwhile True: print('x', flush=True); time.sleep(0.01)"
    with open("/dev/full", "wb") as full:  # noqa: PTH123  a device
        command = reigen("run", "-np", "1", sys.executable, "-S", "-c", code)
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=60, check=False)
    assert done.returncode == 141
    assert done.stderr == b"reigen run: stdout cannot be written: No space left on device\n"
