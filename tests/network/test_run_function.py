"""`reigen.run(..., hosts="h1:2,h2:2")`: functions, results and exceptions travel through ssh."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from tests.lab import Hosts
from tests.network.conftest import MakeHosts
from tests.network.test_ssh import SOURCE, jobs_of, wait_for

pytestmark = pytest.mark.slow
HEAD = "import os, signal, socket, time, reigen\nhost = socket.gethostname\n"


def program(hosts: Hosts, text: str, **variables: str) -> tuple[int, str, str]:
    """Runs a program on the first machine; nothing may be left of it on any: (exit code, stdout, stderr)."""
    command = [sys.executable, "-c", HEAD + textwrap.dedent(text)]
    done = hosts[0].run(command, env={"PYTHONPATH": str(SOURCE / "src"), **variables}, cwd=SOURCE, timeout=120.0)
    for each in hosts:
        wait_for(lambda each=each: not jobs_of(each), f"nothing runs on {each.name}")
    return done.returncode, done.stdout, done.stderr


def test_results_of_a_closure_by_rank(make_hosts: MakeHosts) -> None:
    text = """
        offset = 7
        def func(factor):
            import reigen.torch as hvd
            hvd.init()
            total = reigen.allreduce(reigen.rank() + 1.0, op=reigen.Sum)
            print("from", host(), flush=True)
            return host(), hvd.rank() * factor + offset, float(total), lambda: host()
        for where, number, total, call in reigen.run(func, (10,), num_proc=4, hosts="h1:2,h2:2"):
            print(where, number, total, call())
    """
    code, out, err = program(make_hosts(2, ssh_port=22), text)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[-4:] == ["h1 7 10.0 h1", "h1 17 10.0 h1", "h2 27 10.0 h1", "h2 37 10.0 h1"]
    assert sorted(lines[:-4]) == ["[0] from h1", "[1] from h1", "[2] from h2", "[3] from h2"]


def test_large_arguments_and_results(make_hosts: MakeHosts) -> None:
    text = """
        import numpy as np
        given = np.arange(6 << 20)
        def func():
            return given * (int(os.environ["REIGEN_RANK"]) + 1)
        for rank, got in enumerate(reigen.run(func, num_proc=3, hosts="h1:1,h2:2")):
            assert np.array_equal(got, given * (rank + 1))
        print("equal")
    """
    assert program(make_hosts(2, ssh_port=22), text) == (0, "equal\n", "")


def test_an_exception_of_a_rank_elsewhere(make_hosts: MakeHosts) -> None:
    text = """
        class Mine(Exception):
            pass
        def func():
            reigen.init()
            if reigen.rank() == 3:
                raise Mine("oops", host())
            reigen.allreduce(1.0, op=reigen.Sum)
        try:
            reigen.run(func, num_proc=4, hosts="h1:2,h2:2")
        except reigen.errors.RankFailedError as error:
            print(error.rank, error.exit_code, type(error.__cause__) is Mine, error.__cause__.args)
    """
    code, out, _ = program(make_hosts(2, ssh_port=22), text)
    assert (code, out) == (0, "3 1 True ('oops', 'h2')\n")


def test_ends_of_processes_and_of_hosts(make_hosts: MakeHosts) -> None:
    text = """
        def killed():
            if os.environ["REIGEN_RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(300)
        def orphaned():
            if os.environ["REIGEN_RANK"] == "1":
                os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(300)
        for func in (killed, orphaned):
            try:
                reigen.run(func, num_proc=2, hosts="h1:1,h2:1")
            except reigen.errors.RankFailedError as error:
                print(error.rank, error.exit_code, error.signum, str(error).replace(chr(10), " | "))
    """
    code, out, _ = program(make_hosts(2, ssh_port=22), text)
    assert code == 0
    first, second = out.splitlines()
    assert first.startswith("1 137 9 rank 1 of 2 was killed by SIGKILL, before the function returned | only the kernel")
    assert second.startswith("1 255 None rank 1 of 2 exited with code 255, before the function returned | host h2 was")


def test_hosts_that_cannot_take_part(make_hosts: MakeHosts, tmp_path: Path) -> None:
    hosts = make_hosts(2, ssh_port=22)
    (hosts[1].root / "root/.ssh/authorized_keys").write_text("")
    text = """
        try:
            reigen.run(host, num_proc=2, hosts="h1,h2")
        except reigen.errors.LaunchError as error:
            print(error)
    """
    code, out, err = program(hosts, text)
    assert (code, err) == (0, "")
    assert out.startswith("1 of 1 other hosts cannot take part; nothing was started\n  h2  it refuses the login")
