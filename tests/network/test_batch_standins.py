"""`reigen run` in jobs of LSF and PBS, whose remote shells are stand-ins here: ssh, or a process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from reigen.testing import check_launcher
from reigen.testing.launchers import _CASES
from tests.lab import Host
from tests.network.conftest import make_hosts  # noqa: F401  a fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SOURCE = Path(__file__).parents[2]
#: A task has the words as they are; its output and its input are those of blaunch.
BLAUNCH = """#!/bin/sh
[ "$1" = -no-shell ] || exit 97
host=$2; shift 2
words=; for word; do words="$words '$word'"; done
exec ssh -T "$host" "$words"
"""
#: A task reads nothing, and prints to the job's own files.
TMRSH = """#!/bin/sh
shift
exec sh -c "$*" </dev/null >>{directory}/task.out 2>&1
"""
#: Cases that differ from one way of starting agents to another.
CASES = (
    *("unused_launcher", "placement", "too_many_ranks", "arguments", "environment", "bytes", "exit_code", "orphans"),
    *("stopped_job", "killed_supervisor", "killed_watchdog", "killed_agent", "agent_environment", "missing_python"),
    *("secret", "two_jobs", "collective"),
)
OTHERS = dict.fromkeys(_CASES.keys() - set(CASES), "it is the same for all launchers with agents")


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    return directory


def put(directory: Path, name: str, text: str) -> None:
    (directory / name).write_text(text)
    (directory / name).chmod(0o755)


def check(name: str, host: Host, leave_out: dict[str, str], **environ: str) -> None:
    environ |= {"PATH": os.environ["PATH"]}
    outcome = check_launcher(name, "h1:1,h2:2", prefix=host.entry(SOURCE), environ=environ, leave_out=leave_out)
    assert {case for case, result in outcome.items() if result == "passed"} == _CASES.keys() - leave_out.keys()


def test_lsf(make_hosts, tools: Path) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    put(tools, "blaunch", BLAUNCH)
    hosts = make_hosts(2, ssh_port=22)
    check("lsf", hosts[0], OTHERS, LSB_JOBID="17", LSB_MCPU_HOSTS="h1 1 h2 2")


def test_pbs(make_hosts, tools: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    put(tools, "pbs_tmrsh", TMRSH.format(directory=tmp_path))
    (tmp_path / "nodes").write_text("h1\nh2\nh2\n")
    hosts = make_hosts(2)
    before = set(Path(SOURCE).glob(".reigen-*"))
    check("pbs", hosts[0], OTHERS, PBS_JOBID="17", PBS_NODEFILE=str(tmp_path / "nodes"))
    # the dial texts are gone, but for those of supervisors that were killed
    left = set((hosts[0].root / str(SOURCE)[1:]).glob(".reigen-*")) - before
    assert len(left) <= 2, left


def test_pbs_without_its_remote_shell(make_hosts, tools: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    (tmp_path / "nodes").write_text("h1\nh2\nh2\n")
    hosts = make_hosts(2, ssh_port=22)
    kept = {"placement", "collective"}
    leave_out = dict.fromkeys(_CASES.keys() - kept, "ssh has it")
    check("pbs", hosts[0], leave_out, PBS_JOBID="17", PBS_NODEFILE=str(tmp_path / "nodes"))


def test_a_directory_that_tasks_of_pbs_do_not_share_is_named(make_hosts, tools: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    put(tools, "pbs_tmrsh", '#!/bin/sh\nhost=$1; shift\nexec ssh -n "$host" "$*"\n')
    (tmp_path / "nodes").write_text("h1\nh2\nh2\n")
    hosts = make_hosts(2, ssh_port=22)
    environ = {"PATH": os.environ["PATH"], "PBS_JOBID": "17", "PBS_NODEFILE": str(tmp_path / "nodes")}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    process = hosts[0].start([sys.executable, "-m", "reigen", "run", "hostname"], env=environ)
    assert process.wait(60) == 1
    out, err = process.output()
    process.close()
    assert out == ""
    assert "h2  the job's directory is not there" in err, err
