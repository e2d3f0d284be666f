"""Parameter servers beside ranks, with real processes: stand-ins that say what they are, and end as they are told."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from reigen.launch.exit_report import SIGKILL_HINT
from tests.mpirun import PYPI, find
from tests.multiprocess.launcher import child_of, launched, run, until
from tests.patience import patiently

pytestmark = pytest.mark.slow
#: `reigen launch`, as far as `launched` is concerned.
LAUNCH = {"program": "launch"}
LOCAL = ("-n", "2", "-s", "2", "--launcher", "local")
#: Servers and scheduler that end soon after the workers: when the test's directory is there no more.
STAND_IN = """
import os, signal, sys, time
e = os.environ
role, number, attempt = e['DMLC_ROLE'], int(e['DMLC_TASK_ID']), int(e['DMLC_NUM_ATTEMPT'])
def wait_for_the_end():
    while os.path.exists(e.get('UNTIL', '/')): time.sleep(0.01)
"""


def command(code):
    return sys.executable, "-Sc", STAND_IN + code


def launch(*arguments, **options):
    return run(*arguments, program="launch", **options)


@pytest.fixture
def flag(tmp_path):
    """A file whose removal lets stand-ins end."""
    path = tmp_path / "flag"
    path.touch()
    return path


def test_every_process_runs_the_command_and_knows_its_place():
    code = """
print(role, number, e['DMLC_NUM_WORKER'], e['DMLC_NUM_SERVER'], e['DMLC_PS_ROOT_URI'], e.get('REIGEN_RANK'), e.get('A'),
      e.get('B'), sys.argv[1:])
"""
    status, out, err = launch(*LOCAL, "--env-server", "A:x:y", "--env-worker", "B:z", *command(code), "a b", "-n", "--")
    assert (status, err) == (0, "")
    assert sorted(out.splitlines()) == [
        "[0] worker 0 2 2 127.0.0.1 0 None z ['a b', '-n', '--']",
        "[1] worker 1 2 2 127.0.0.1 1 None z ['a b', '-n', '--']",
        "[scheduler] scheduler 0 2 2 127.0.0.1 None None None ['a b', '-n', '--']",
        "[server 0] server 0 2 2 127.0.0.1 None x:y None ['a b', '-n', '--']",
        "[server 1] server 1 2 2 127.0.0.1 None x:y None ['a b', '-n', '--']",
    ]


def test_the_schedulers_port_is_held_for_it():
    code = """
import socket
if role == 'scheduler':
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((e['DMLC_PS_ROOT_URI'], int(e['DMLC_PS_ROOT_PORT'])))
        listener.listen()
        for _ in range(4): listener.accept()[0].close()
else:
    while True:
        try: socket.create_connection((e['DMLC_PS_ROOT_URI'], int(e['DMLC_PS_ROOT_PORT']))).close(); break
        except ConnectionRefusedError: time.sleep(0.01)
"""
    assert launch(*LOCAL, *command(code)) == (0, "", "")


def test_as_many_servers_as_workers_unless_somebody_says():
    assert launch("-n", "3", "--launcher", "local", *command("print(e['DMLC_NUM_SERVER'])"))[1].count("] 3\n") == 7


def test_servers_that_end_when_the_last_worker_has_ended(flag):
    code = "wait_for_the_end() if role != 'worker' else number and os.remove(e['UNTIL'])"
    environ = {"UNTIL": str(flag)}
    assert launch(*LOCAL, "--grace-seconds", "60", *command(code), env=environ) == (0, "", "")


def test_servers_that_do_not_end_are_asked_to(tmp_path):
    code = """
def asked(*_): print('asked', flush=True); sys.exit(3)
if role != 'worker':
    signal.signal(signal.SIGTERM, asked)
    open(f'{sys.argv[1]}/{role}{number}', 'w').close()
    time.sleep(300)
while len(os.listdir(sys.argv[1])) < 3: time.sleep(0.01)
"""

    def attempt(grace: float) -> None:
        directory = tmp_path / f"{grace:g}"
        directory.mkdir()
        status, out, err = launch(*LOCAL, "--grace-seconds", f"{grace:g}", *command(code), str(directory))
        assert (status, err) == (0, "")
        assert sorted(out.splitlines()) == [f"[{name}] asked" for name in ("scheduler", "server 0", "server 1")]

    patiently(attempt, 0.5)


def test_servers_that_do_not_even_hear_are_killed():
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nif role != 'worker': time.sleep(300)"
    assert launch(*LOCAL, "--grace-seconds", "0.2", *command(code)) == (0, "", "")


def test_the_first_worker_that_fails_ends_everything_with_its_exit_code():
    code = """
if role == 'worker' and number == 1: print('what happened', file=sys.stderr); sys.exit(7)
time.sleep(300)
"""
    status, _, err = launch(*LOCAL, *command(code))
    assert status == 7
    assert err == (
        "[1] what happened\nreigen run: rank 1 failed first: exit code 7\n"
        "  the last lines of its stderr:\n    what happened\n  1 other rank was stopped because of it\n"
    )


WHERE = "in the memory of another one (--replicate-servers 2) or on a disk (REIGEN_KV_SNAPSHOT_DIR)"


@pytest.mark.parametrize(
    ("how", "exit_code", "reason"),
    [
        ("sys.exit(3)", 3, "it has ended by itself"),
        ("os.kill(os.getpid(), 9)", 137, f"a server is only where it keeps snapshots, {WHERE}"),
    ],
)
def test_a_server_that_dies_without_snapshots_ends_the_job_by_name(how, exit_code, reason):
    code = f"if role == 'server' and number == 1: print('oh', file=sys.stderr); {how}\ntime.sleep(300)"
    status, _, err = launch(*LOCAL, *command(code))
    assert status == exit_code
    hint = f"  {SIGKILL_HINT}\n" if exit_code == 137 else ""
    assert err.endswith(f"    oh\n{hint}  it was not started again: {reason}\n  2 ranks were stopped because of it\n")
    assert "reigen run: server 1 failed first: " in err


RESTARTED = """
if role == e['VICTIM'] and number == 0 and attempt < 2: print('attempt', attempt, flush=True); os.kill(os.getpid(), 9)
if role == e['VICTIM'] and number == 0: print('attempt', attempt, 'lives', flush=True); os.remove(e['UNTIL'])
wait_for_the_end()
"""


@pytest.mark.parametrize(
    ("victim", "name", "environ"),
    [
        ("server", "server 0", {"REIGEN_KV_SNAPSHOT_DIR": "/tmp"}),
        ("scheduler", "scheduler", {}),
        ("worker", "0", {"REIGEN_KV_ON_WORKER_LOSS": "wait"}),
    ],
)
def test_who_may_be_is_started_again(victim, name, environ, flag, tmp_path):
    environ = {**environ, "UNTIL": str(flag), "VICTIM": victim}
    keep = ("--output-filename", str(tmp_path / "out"))
    status, out, err = launch(*LOCAL, *keep, *command(RESTARTED), env=environ)
    assert (status, out.splitlines()) == (
        0,
        [f"[{name}] attempt 0", f"[{name}] attempt 1", f"[{name}] attempt 2 lives"],
    )
    called = "rank 0" if victim == "worker" else name
    assert err == f"reigen run: {called}: killed by SIGKILL; it is started again\n" * 2
    kept = tmp_path / "out" / called.replace(" ", ".") / "stdout"
    assert kept.read_text() == "attempt 0\nattempt 1\nattempt 2 lives\n"


def test_the_others_may_go_on_without_a_worker(flag):
    code = """
if role == 'worker' and number == 1: os.remove(e['UNTIL']); sys.exit(7)
wait_for_the_end()
if role == 'worker': print('done')
"""
    environ = {"REIGEN_KV_ON_WORKER_LOSS": "continue", "UNTIL": str(flag)}
    status, out, err = launch(*LOCAL, "--grace-seconds", "60", *command(code), env=environ)
    assert (status, out) == (7, "[0] done\n")
    assert err == "reigen run: rank 1 failed first: exit code 7\n  it wrote nothing to stderr\n"


def test_what_a_server_left_behind_is_gone_before_it_is_started_again(flag, tmp_path):
    """Its child would hold the port, or write into the snapshots."""
    code = """
import subprocess
if role == 'server' and number == 0 and attempt == 0:
    print(subprocess.Popen(['sleep', '300']).pid, flush=True)
    os.kill(os.getpid(), 9)
elif role == 'server' and number == 0:
    print('again', flush=True)
wait_for_the_end()
"""
    environ = {"UNTIL": str(flag), "REIGEN_KV_SNAPSHOT_DIR": str(tmp_path)}
    with launched(*LOCAL, *command(code), env=environ, **LAUNCH) as job:
        child, again = job.lines(2)
        assert again == "[server 0] again"
        until(lambda: int(child.rpartition(" ")[2]) not in job.processes())  # although nobody has ended the job
        flag.unlink()
        assert job.finish()[0] == 0


def test_a_server_is_not_started_again_for_ever(tmp_path):
    code = "if role == 'server' and number == 1: os.kill(os.getpid(), 9)\ntime.sleep(300)"
    environ = {"REIGEN_KV_SNAPSHOT_DIR": str(tmp_path)}
    status, _, err = launch(*LOCAL, "--server-restarts", "2", *command(code), env=environ)
    assert status == 137
    assert err.count("server 1: killed by SIGKILL; it is started again\n") == 2
    assert "reigen run: server 1 failed first: killed by SIGKILL\n" in err
    assert "  it had been started again 2 times before\n" in err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(signum):
    with launched(*LOCAL, *command("print('ready', flush=True); time.sleep(300)"), **LAUNCH) as job:
        assert sorted(job.lines(5)) == [f"[{name}] ready" for name in ("0", "1", "scheduler", "server 0", "server 1")]
        job.process.send_signal(signum)
        status, _, err = job.finish()
    assert (status, err) == (128 + signum, f"reigen run: stopped by {signum.name}\n")


@pytest.mark.parametrize("which", ["guard", "supervisor"])
def test_a_killed_launcher_leaves_no_server(which):
    with launched(*LOCAL, *command("print('ready', flush=True); time.sleep(300)"), **LAUNCH) as job:
        assert len(job.lines(5)) == 5
        os.kill(job.process.pid if which == "guard" else job.supervisor(), signal.SIGKILL)


#: Runs what it is given as sshd does. See test_launch_hosts.
FAKE_SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
export SSH_CONNECTION="127.0.0.1 50000 127.0.0.1 22" FAKE_HOST="$2"
cd
exec sh -c "$3"
"""


@pytest.fixture
def there(tmp_path):
    """Options of `reigen launch` for three hosts that this one poses as."""
    script, hosts = tmp_path / "ssh", tmp_path / "hosts"
    script.write_text(FAKE_SSH)
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    hosts.write_text("a.invalid\nb.invalid\nc.invalid\n")
    return ("--ssh-command", str(script), "-H", str(hosts))


def test_servers_first_then_workers_in_turn_over_the_hosts(there):
    code = "print(role, number, e.get('FAKE_HOST', 'here'), e.get('REIGEN_LOCAL_RANK'), e.get('A'), e.get('B'))"
    options = ("-n", "3", "-s", "2", "--env-server", "A:1", "--env-worker", "B:2")
    status, out, err = launch(*options, *there, *command(code))
    assert (status, err) == (0, "")
    assert sorted(out.splitlines()) == [
        "[0] worker 0 c.invalid 0 None 2",
        "[1] worker 1 a.invalid 0 None 2",
        "[2] worker 2 b.invalid 0 None 2",
        "[scheduler] scheduler 0 here None None None",
        "[server 0] server 0 a.invalid None 1 None",
        "[server 1] server 1 b.invalid None 1 None",
    ]


def test_a_server_elsewhere_is_started_again(there, flag, tmp_path):
    environ = {"UNTIL": str(flag), "VICTIM": "server", "REIGEN_KV_SNAPSHOT_DIR": str(tmp_path)}
    status, out, err = launch("-n", "1", "-s", "2", *there, *command(RESTARTED), env=environ)
    assert (status, out.splitlines()[-1]) == (0, "[server 0] attempt 2 lives")
    assert err == "reigen run: server 0 (host a.invalid): killed by SIGKILL; it is started again\n" * 2


def test_a_host_with_a_server_that_is_lost_ends_the_job(there, tmp_path):
    code = "print('ready', flush=True); time.sleep(300)"
    environ = {"REIGEN_KV_SNAPSHOT_DIR": str(tmp_path)}
    with launched("-n", "1", "-s", "1", *there, *command(code), env=environ, **LAUNCH) as job:
        assert len(job.lines(3)) == 3
        agent = f"{sys.executable} -P -m reigen.launch.agent"
        agents = [pid for pid, command in job.processes().items() if command.startswith(agent)]
        os.kill(child_of([pid for pid in agents if host_of(pid) == "a.invalid"]), signal.SIGKILL)
        status, _, err = job.finish()
    assert status == 255
    assert "reigen run: host a.invalid was lost, with server 0: " in err


def host_of(pid):
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.partition("=")[::2] for entry in entries).get("FAKE_HOST")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-n", "2", "true"), "--launcher ssh needs a --hostfile"),
        (("-n", "2", "--launcher", "local", "-H", "hosts", "true"), "--launcher local starts everything on this"),
        (("-n", "2", "-s", "0", "--launcher", "local", "true"), "the number of servers must be at least 1, not 0"),
        (("-n", "2", "--launcher", "sge", "-H", "hosts", "true"), "--launcher sge gives the job its hosts"),
        (("-n", "2", "-H", "no/such", "true"), "hostfile 'no/such' cannot be read"),
        (("-n", "2", "--launcher", "local", "--env-server", "A=1", "true"), "--env-server A=1: it is not of the form"),
        (("-n", "2", "--launcher", "local", "--env", "NO_SUCH", "true"), "there is no such variable"),
        (("-n", "2", "--launcher", "local"), "no command to run"),
    ],
)
def test_what_makes_no_sense(arguments, message):
    command = [sys.executable, "-m", "reigen", "launch", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert message in done.stderr


def needs_mpirun(directory):
    if isinstance(reason := find(PYPI, directory), str):
        pytest.skip(reason)


def test_by_mpirun(tmp_path):
    needs_mpirun(tmp_path)
    code = "print(role, number, len(e['REIGEN_SECRET']), flush=True)"
    status, out, err = launch(*LOCAL[:-1], "mpi", *command(code), env={"PYTHONUNBUFFERED": ""})  # lines in one piece
    assert status == 0, out + err
    assert sorted(line.rpartition(": ")[2] for line in out.splitlines()) == [
        *("scheduler 0 64", "server 0 64", "server 1 64", "worker 0 64", "worker 1 64")
    ]


@pytest.mark.parametrize(("victim", "said"), [("worker", ""), ("server", " of the servers")], ids=["worker", "server"])
def test_a_failure_under_mpirun_ends_everything(victim, said, tmp_path):
    needs_mpirun(tmp_path)
    code = f"if role == {victim!r} and number == 1: sys.exit(7)\ntime.sleep(300)"
    status, _, err = launch(*LOCAL[:-1], "mpi", *command(code))
    assert status == 7
    assert err.splitlines()[-1] == f"reigen run: mpirun (Open MPI 5){said} ended with exit code 7"
