"""Jobs in a control group that has little memory, and processes with limits of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.cgroups import Cgroup, limited
from tests.multiprocess.launcher import run

MIB = 1 << 20
SCRIPT = """
import numpy as np, sys
from reigen import context
from reigen.errors import SharedMemoryError
from reigen.types import DTYPES, ReduceOp
FLOAT32 = DTYPES["float32"]

job = context.init()
def works(mebibytes, name):
    region = job.allocate(mebibytes << 20, name=name)
    view = region.array.view(np.float32)
    view[:] = 1
    job.allreduce(view, view, FLOAT32, name=name, region=region).wait()
    assert (view == 1).all()
"""


@pytest.fixture
def cgroup() -> Iterator[Cgroup]:
    with limited(300 * MIB) as group:
        yield group


def ranks(code: str) -> tuple[str, ...]:
    return "-np", "2", sys.executable, "-c", SCRIPT + code


def test_too_much_for_the_cgroup_is_an_error_that_names_it_and_not_a_kill(cgroup: Cgroup) -> None:
    code = """
try:
    works(400, "large")
except SharedMemoryError as error:
    print(error)
works(1, "small")
context.shutdown()
"""
    exit_code, out, err = run(*ranks(code), preexec_fn=cgroup.enter())
    assert exit_code == 0, err
    told = [line for line in out.splitlines() if "not enough shared memory for registered memory" in line]
    assert len(told) == 2
    assert all("800.0 MiB needed on this host" in line for line in told)
    limit = f"available within {cgroup.limit} = 300.0 MiB, less 16.0 MiB that are kept free"
    assert all(limit in line for line in told)


def test_what_only_one_rank_takes_is_needed_once(cgroup: Cgroup) -> None:
    code = """
region = job.allocate(130 << 20, name="parameters", shared=True)
assert not region.array.any()
context.shutdown()
"""
    exit_code, _, err = run(*ranks(code), preexec_fn=cgroup.enter())
    assert exit_code == 0, err


def test_two_ranks_take_nearly_all_that_there_is(cgroup: Cgroup) -> None:
    code = """
from reigen.resources.memory import available_memory
left = np.array([available_memory().num_bytes >> 20], np.float32)
job.allreduce(left, left, FLOAT32, op=ReduceOp.MIN, name="left").wait()
works(int(left[0] * 0.4), "most of it")
context.shutdown()
"""
    exit_code, _, err = run(*ranks(code), preexec_fn=cgroup.enter())
    assert exit_code == 0, err


def test_a_limit_of_file_sizes_is_told_as_that() -> None:
    script = "from reigen import context\ncontext.init()"
    command = f"ulimit -f 64; exec {sys.executable} -c '{script}'"
    exit_code, _, err = run("-np", "2", "sh", "-c", command)
    assert exit_code == 1
    assert "no shared memory for staging and control messages" in err
    assert "File too large: a file, which shared memory is, too, may have" in err
    assert "(RLIMIT_FSIZE): only root can raise what `ulimit -f` shows" in err


def test_processes_that_know_nothing_of_each_other_take_no_more_than_there_is(cgroup: Cgroup) -> None:
    """As workers and servers of a parameter server do: each looks by itself, all at the same moment."""
    code = """
import os
from reigen.errors import SharedMemoryError
from reigen.net.shm_segment import ShmSegment

wait, go = os.pipe()
children = []
for _ in range(8):
    if not (child := os.fork()):
        os.close(go)
        segment = ShmSegment.create("reigen-test")
        os.read(wait, 1)
        try:
            segment.grow(100 << 20, "an arena")
        except SharedMemoryError:
            os._exit(3)
        os._exit(0)
    children.append(child)
os.close(go)
print(sorted({os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], preexec_fn=cgroup.enter(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() in {"[0, 3]", "[3]"}, done.stdout + done.stderr


GREEDY = """
import signal, sys
import numpy as np
from reigen import context
from reigen.errors import PeerLostError
from reigen.types import DTYPES

job = context.init()
if job.rank == 1:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # the kernel chooses this one
    hoard = []
    while True:
        hoard.append(np.ones(1 << 20))
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher stops it while it hears of the loss
try:
    job.barrier().wait()
except PeerLostError as error:
    print(error, file=sys.stderr)
    sys.exit(5)
"""


def test_a_rank_that_the_oom_killer_has_ended_is_told_as_that() -> None:
    with limited(200 * MIB) as group:
        exit_code, _, err = run("-np", "2", sys.executable, "-c", GREEDY, preexec_fn=group.enter())
    limit = f"({group.limit} = 200.0 MiB)"
    assert exit_code == 137
    told = f"rank 1 failed first: killed by SIGKILL; the kernel's OOM killer did that: out of memory {limit}\n"
    assert told in err
    assert f"has ended a process of this control group meanwhile {limit}" in err  # rank 0's own words


def test_the_caller_of_run_is_told_of_the_oom_killer() -> None:
    code = """
import reigen
from reigen.errors import RankFailedError
def greedy():
    hoard = []
    while True:
        hoard.append(bytearray(b"1" * (8 << 20)))
try:
    reigen.run(greedy)
except RankFailedError as error:
    print(error, error.signum)
"""
    with limited(200 * MIB) as group:
        done = subprocess.run(
            [sys.executable, "-c", code],
            preexec_fn=group.enter(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    told = "rank 0 of 1 was killed by SIGKILL, before the function returned; the kernel's OOM killer did that: out of"
    assert told in done.stdout, done.stderr
    assert f"({group.limit} = 200.0 MiB) 9" in done.stdout


def test_another_kill_is_not_the_oom_killers() -> None:
    code = "import os; os.kill(os.getpid(), 9)"
    with limited(200 * MIB) as group:
        exit_code, _, err = run("-np", "1", sys.executable, "-c", code, preexec_fn=group.enter())
    assert exit_code == 137
    assert "rank 0 failed first: killed by SIGKILL\n" in err


def test_another_kill_is_not_the_oom_killers_though_that_has_ended_a_child_long_before() -> None:
    code = f"""
import os, subprocess, sys, time
greedy = "open('/proc/self/oom_score_adj', 'w').write('1000'); hoard = [bytearray(b'1' * {400 * MIB})]"
assert subprocess.run([sys.executable, "-c", greedy]).returncode == -9
time.sleep(3)  # of a job's life
os.kill(os.getpid(), 9)
"""
    with limited(200 * MIB) as group:
        exit_code, _, err = run("-np", "1", sys.executable, "-c", code, preexec_fn=group.enter())
    assert exit_code == 137
    told = "rank 0 failed first: killed by SIGKILL; the kernel's OOM killer has ended a process of this control group"
    assert f"{told} meanwhile ({group.limit} = 200.0 MiB), perhaps this one\n" in err
