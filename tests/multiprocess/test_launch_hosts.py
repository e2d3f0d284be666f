"""`reigen run` on several hosts: real agents, and in the place of ssh a script that runs them on this machine."""

import os
import signal
import stat
import sys
from pathlib import Path

import pytest

from reigen._version import __version__
from tests.cgroups import limited
from tests.multiprocess.launcher import child_of, launched, python, run, until

pytestmark = pytest.mark.slow
#: Runs what it is given as sshd does: by a shell, in the home directory. $FAKE_SSH_DOES is run first.
FAKE_SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
export SSH_CONNECTION="127.0.0.1 50000 127.0.0.1 22" FAKE_HOST="$2"
cd
eval "$FAKE_SSH_DOES"
exec sh -c "$3"
"""
HOSTS = ("-H", "localhost:1,a.invalid:2,b.invalid:1", "-np", "4")
WAIT = "print('ready', flush=True); time.sleep(300)"


@pytest.fixture
def ssh(tmp_path):
    script = tmp_path / "ssh"
    script.write_text(FAKE_SSH)
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return ("--ssh-command", str(script))


def test_ranks_run_on_their_hosts_and_the_output_comes_home(ssh):
    code = "print(rank, os.environ.get('FAKE_HOST', 'here')); sys.stderr.write(f'{rank} says so\\n')"
    status, out, err = run(*HOSTS, *ssh, *python(code))
    assert status == 0
    assert sorted(out.splitlines()) == ["[0] 0 here", "[1] 1 a.invalid", "[2] 2 a.invalid", "[3] 3 b.invalid"]
    assert sorted(err.splitlines()) == [f"[{rank}] {rank} says so" for rank in range(4)]


def test_a_failure_elsewhere_ends_everything(ssh):
    code = "if rank == 3: sys.stderr.write('what happened\\n'); sys.exit(7)\ntime.sleep(300)"
    status, _, err = run(*HOSTS, *ssh, *python(code))
    assert status == 7
    assert err.endswith(
        "reigen run: rank 3 (host b.invalid) failed first: exit code 7\n"
        "  the last lines of its stderr:\n    what happened\n  3 other ranks were stopped because of it\n"
    )


def test_what_the_shell_prints_when_it_starts_is_no_message(ssh):
    noise = {"FAKE_SSH_DOES": "echo Welcome to $FAKE_HOST; echo; echo and a warning >&2"}
    status, out, err = run(*HOSTS, *ssh, *python("print('done')"), env=noise)
    assert (status, sorted(out.splitlines()), err) == (0, [f"[{rank}] done" for rank in range(4)], "")


def test_an_agent_that_has_no_stderr(ssh):
    code = "print(rank); sys.stderr.write('so\\n'); os.close(2)"
    status, out, _ = run(*HOSTS, *ssh, *python(code), env={"FAKE_SSH_DOES": "exec 2>&-"})
    assert (status, sorted(out.splitlines())) == (0, [f"[{rank}] {rank}" for rank in range(4)])


def test_a_rank_elsewhere_that_the_oom_killer_has_ended(ssh):
    code = "hoard = []\nwhile rank == 3: hoard.append(b'1' * (1 << 23))\ntime.sleep(300)"
    with limited(200 << 20) as group:
        does = f"if [ $FAKE_HOST = b.invalid ]; then echo $$ >{group.directory}/cgroup.procs; fi"
        status, _, err = run(*HOSTS, *ssh, *python(code), env={"FAKE_SSH_DOES": does})
    assert status == 137
    assert (
        "reigen run: rank 3 (host b.invalid) failed first: killed by SIGKILL; the kernel's OOM killer did that: "
        f"out of memory ({group.limit} = 200.0 MiB)\n"
    ) in err


def test_another_version_of_reigen_is_told_apart(ssh):
    does = "if [ $FAKE_HOST = b.invalid ]; then printf '\\0reigen-agent 0.0.1\\n'; exec cat >/dev/null; fi"
    status, out, err = run(*HOSTS, *ssh, *python("print('done')"), env={"FAKE_SSH_DOES": does})
    assert (status, out) == (1, "")
    assert "reigen run: 1 of 2 other hosts cannot take part; nothing was started\n" in err
    assert f"  b.invalid  Reigen 0.0.1 there, {__version__} here: install the same version on all hosts\n" in err


def test_a_host_that_talks_and_talks_is_not_listened_to_for_ever(ssh):
    does = "if [ $FAKE_HOST = b.invalid ]; then exec yes; fi"
    status, _, err = run(*HOSTS, *ssh, *python("print('done')"), env={"FAKE_SSH_DOES": does})
    assert status == 1
    assert "  b.invalid  something else than Reigen's agent answers there\n" in err


def test_no_ssh(tmp_path):
    nowhere = str(tmp_path / "none")
    message = f"reigen run: cannot start {nowhere}: No such file or directory\n"
    assert run(*HOSTS, "--ssh-command", nowhere, "true") == (1, "", message)


def test_an_agent_that_is_killed_is_a_host_that_is_lost(ssh):
    with launched(*HOSTS, *ssh, *python(WAIT)) as launcher:
        assert sorted(launcher.lines(4)) == [f"[{rank}] ready" for rank in range(4)]
        agent = f"{sys.executable} -P -m reigen.launch.agent"
        agents = [pid for pid, command in launcher.processes().items() if command.startswith(agent)]
        of_a = [pid for pid in agents if b"FAKE_HOST=a.invalid" in Path(f"/proc/{pid}/environ").read_bytes()]
        assert len(of_a) == 2  # one does the work, the other one watches over it
        os.kill(child_of(of_a), signal.SIGKILL)
        status, _, err = launcher.finish()
    assert status == 255
    assert "reigen run: host a.invalid was lost, with ranks 1, 2: " in err
    assert err.endswith("2 other ranks were stopped because of it\n")


def test_a_launcher_that_is_stopped_is_given_up_by_its_agents(ssh):
    with launched(*HOSTS, *ssh, *python(WAIT), env={"REIGEN_PEER_TIMEOUT": "4"}) as launcher:
        assert len(launcher.lines(4)) == 4
        os.kill(launcher.supervisor(), signal.SIGSTOP)
        until(lambda: len(launcher.processes()) == 3)  # the launcher's two, and rank 0
        os.kill(launcher.supervisor(), signal.SIGCONT)
        status, _, err = launcher.finish()
    assert status == 255
    assert "reigen run: host a.invalid was lost" in err or "reigen run: host b.invalid was lost" in err
