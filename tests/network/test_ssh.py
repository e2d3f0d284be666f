"""`reigen run -H h1:2,h2:2`: real sshd on stand-in machines. However it ends, nothing is left on any of them."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab import Host, HostProcess, Hosts
from tests.network.conftest import MakeHosts
from tests.network.waiting import wait_for
from tests.patience import patiently

pytestmark = pytest.mark.slow
SOURCE = Path(__file__).parents[2]
RUN = (sys.executable, "-m", "reigen", "run")
#: Each rank has a child in its session and a daemon that has left it, as badly behaved scripts have.
FAMILY = ("sh", "-c", "(setsid sleep 300 &); sleep 300 & echo ready; wait")
#: One that adds something up until it cannot.
SUMS = """
import numpy as np, reigen
reigen.init()
reigen.barrier()
print("ready", flush=True)
while True:
    reigen.allreduce(np.ones(1000, np.float32), name="x")
"""
#: A rank that has no children and does not want to end.
STUBBORN = ("sh", "-c", "trap '' TERM INT HUP; echo ready; exec tail -f /dev/null")


def jobs_of(host: Host) -> dict[int, str]:
    """What runs on a machine that is not sshd's."""
    return {pid: command for pid, command in host.processes().items() if not command.startswith("sshd")}


class Job:
    """`reigen run` on the first machine."""

    def __init__(self, hosts: Hosts, process: HostProcess) -> None:
        self.hosts, self.process = hosts, process

    def output(self) -> list[str]:
        return self.process.output()[0].splitlines()

    def wait_until_ready(self, num_ranks: int) -> None:
        def ready() -> bool:
            assert self.process.returncode is None, self.process.output()
            return sum("ready" in line for line in self.output()) == num_ranks

        wait_for(ready, f"{num_ranks} ranks are ready")

    def finish(self, timeout: float = 90.0) -> tuple[int, str, str]:
        """(exit code, stdout, stderr), when nothing is left on any machine."""
        code = self.process.wait(timeout)
        self.nothing_is_left()
        return code, *self.process.output()

    def nothing_is_left(self, timeout: float = 40.0) -> None:
        for host in self.hosts:
            wait_for(lambda host=host: not jobs_of(host), f"nothing runs on {host.name}: {jobs_of(host)}", timeout)


@pytest.fixture
def start(make_hosts: MakeHosts) -> Callable[..., Job]:
    """``start(num_hosts, *arguments)``: a job on new machines."""

    def make(num_hosts: int, *arguments: object, **options: object) -> Job:
        return on(make_hosts(num_hosts, ssh_port=22), *arguments, **options)

    return make


def on(hosts: Hosts, *arguments: object, env: dict[str, str] | None = None, cwd: Path = SOURCE) -> Job:
    environ = {"PYTHONPATH": str(SOURCE / "src"), **(env or {})}
    return Job(hosts, hosts[0].start([*RUN, *map(str, arguments)], env=environ, cwd=cwd))


TWO = ("-np", 4, "-H", "h1:2,h2:2")


def test_ranks_run_on_their_hosts(start):
    words = "echo $(hostname) $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $REIGEN_CROSS_RANK $MASTER_ADDR $(pwd)"
    code, out, err = start(3, "-np", 5, "-H", "h1:2,h3:1,h2:2", "--torchrun-env", "sh", "-c", words).finish()
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [
        f"[0] h1 0/5 0/2 0 10.77.0.1 {SOURCE}",
        f"[1] h1 1/5 1/2 0 10.77.0.1 {SOURCE}",
        f"[2] h3 2/5 0/1 1 10.77.0.1 {SOURCE}",
        f"[3] h2 3/5 0/2 2 10.77.0.1 {SOURCE}",
        f"[4] h2 4/5 1/2 1 10.77.0.1 {SOURCE}",
    ]


def test_the_first_failure_anywhere_ends_everything(start):
    script = "echo ready; if [ $REIGEN_RANK = 3 ]; then echo 'what happened' >&2; exit 7; fi; sleep 300"
    code, _, err = start(2, *TWO, "sh", "-c", script).finish()
    assert code == 7
    assert err.endswith(
        "reigen run: rank 3 (host h2) failed first: exit code 7\n"
        "  the last lines of its stderr:\n    what happened\n  3 other ranks were stopped because of it\n"
    )


@pytest.mark.parametrize("victim", ["h1", "h2"])
def test_a_rank_that_is_killed_ends_everything(start, victim):
    job = start(2, *TWO, *FAMILY)
    job.wait_until_ready(4)
    host = next(host for host in job.hosts if host.name == victim)
    ranks = [pid for pid, command in jobs_of(host).items() if command.startswith("sh -c")]
    os.kill(min(ranks), signal.SIGKILL)
    code, _, err = job.finish()
    assert code == 137
    assert f"(host {victim}) failed first: killed by SIGKILL" in err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(start, signum):
    job = start(2, *TWO, *FAMILY)
    job.wait_until_ready(4)
    job.process.signal(signum)
    assert job.finish()[::2] == (128 + signum, f"reigen run: stopped by {signum.name}\n")


def test_a_killed_launcher_leaves_nothing(start):
    job = start(2, *TWO, *FAMILY)
    job.wait_until_ready(4)
    job.process.kill()
    job.finish()


def test_both_processes_of_the_launcher_killed_leave_nothing_elsewhere(start):
    job = start(2, *TWO, *STUBBORN)
    job.wait_until_ready(4)
    for pid, command in jobs_of(job.hosts[0]).items():
        if "reigen run" in command:
            os.kill(pid, signal.SIGKILL)
    job.finish()


@pytest.mark.parametrize("which", [0, 1])
def test_a_killed_agent_leaves_nothing(start, which):
    job = start(2, *TWO, *FAMILY)
    job.wait_until_ready(4)
    agents = sorted(pid for pid, command in jobs_of(job.hosts[1]).items() if "reigen.launch.agent" in command)
    assert len(agents) == 2
    os.kill(agents[which], signal.SIGKILL)
    code, _, err = job.finish()
    assert code == 255
    assert "reigen run: host h2 was lost, with ranks 2, 3: " in err


def test_a_connection_that_is_killed_leaves_nothing(start):
    job = start(2, *TWO, *FAMILY)
    job.wait_until_ready(4)
    sessions = [pid for pid, command in job.hosts[1].processes().items() if command.startswith("sshd: root")]
    for session in sessions:
        os.kill(session, signal.SIGKILL)
    code, _, err = job.finish()
    assert code == 255
    assert "host h2 was lost, with ranks 2, 3: " in err


def test_a_cut_network_leaves_nothing(start):
    job = start(2, *TWO, *FAMILY, env={"REIGEN_PEER_TIMEOUT": "4"})
    job.wait_until_ready(4)
    job.hosts[1].cut()
    code, _, err = job.finish()
    assert code == 255
    assert "host h2 was lost, with ranks 2, 3: nothing has been heard of it for 6 s" in err


def test_a_crash_of_a_host_ends_the_job(start):
    job = start(2, *TWO, *FAMILY, env={"REIGEN_PEER_TIMEOUT": "4"})
    job.wait_until_ready(4)
    job.hosts[1].crash()
    code, _, err = job.finish()
    assert code == 255
    assert "host h2 was lost" in err


@pytest.mark.parametrize("cause", [Host.crash, Host.cut])
def test_the_launcher_ends_soon_after_the_survivors_of_a_machine(make_hosts, cause):
    """They have their errors after REIGEN_PEER_TIMEOUT, and then nobody needs the lost machine to be waited for."""

    def attempt(seconds: float) -> None:
        hosts = make_hosts(3, ssh_port=22)
        command = (sys.executable, "-c", SUMS)
        job = on(hosts, "-np", 3, "-H", "h1,h2,h3", *command, env={"REIGEN_PEER_TIMEOUT": f"{seconds:g}"})
        job.wait_until_ready(3)
        cause(hosts[2])
        begin = time.monotonic()
        code = job.process.wait(90.0 + seconds)
        assert time.monotonic() - begin <= 1.2 * seconds + 0.4  # with 3 s: 4 s
        assert code == 1
        said = job.process.output()[1]
        assert re.search(r"PeerLostError: x: .*\bh3\b", said), said
        assert "rank 2 (host h3) failed" not in said
        job.nothing_is_left()
        hosts.close()

    patiently(attempt, 3.0)


def refused(job: Job) -> str:
    """What the user is told of a job that does not start."""
    code, out, err = job.finish()
    assert (code != 0, out) == (True, "")
    return err


def write(host: Host, path: str, text: str, mode: int = 0o755) -> None:
    file = host.root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(mode)


def test_every_host_that_cannot_take_part_is_named_with_the_reason(make_hosts):
    hosts = make_hosts(4, ssh_port=22)
    known = hosts[0].root / "root/.ssh/known_hosts"
    lines = known.read_text().splitlines()
    wrong = [line for line in lines if not line.startswith("h2")]
    wrong.append(f"h2 {lines[2].split(None, 1)[1]}")  # the third host's key
    known.write_text("\n".join(wrong) + "\n")
    write(hosts[2], "/root/.ssh/authorized_keys", "", 0o600)
    # h4: nobody listens at that port; 10.77.0.9: there is no such host
    write(hosts[0], "/root/.ssh/config", "Host h4\n  Port 23\n" + (hosts[0].root / "root/.ssh/config").read_text())
    job = on(hosts, "-np", 5, "-H", "h1,h2,h3,h4,10.77.0.9", "--", *FAMILY)
    err = refused(job)
    assert "reigen run: 4 of 4 other hosts cannot take part; nothing was started\n" in err
    reasons = dict(line.strip().split("  ", 1) for line in err.splitlines()[1:] if line[2:3].strip())
    assert "its host key is not the one that is known" in reasons["h2"]
    assert "it refuses the login" in reasons["h3"]
    assert "it refuses the connection" in reasons["h4"]
    assert "it cannot be reached" in reasons["10.77.0.9"]


def test_a_host_that_is_not_known_is_refused_unless_the_user_says_otherwise(make_hosts):
    hosts = make_hosts(2, ssh_port=22)
    write(hosts[0], "/root/.ssh/known_hosts", "", 0o600)
    words = ("-np", 2, "-H", "h1,h2")
    assert "its host key is not known" in refused(on(hosts, *words, "true"))
    assert on(hosts, *words, "--ssh-no-host-key-check", "true").finish()[0] == 0


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--remote-python", "/opt/python", "true"), "there is no /opt/python"),
        (("--remote-python", "/usr/bin/false", "true"), "the agent ended with exit code 1"),
        (("no-such-command",), "no such command there: no-such-command"),
        (("python3", "train.py"), "there is no train.py in /work there"),
    ],
)
def test_what_a_host_lacks(make_hosts, arguments, what):
    hosts = make_hosts(2, ssh_port=22)
    write(hosts[0], "/work/train.py", "")
    write(hosts[0], "/usr/bin/no-such-command", "#!/bin/sh\n")
    write(hosts[1], "/work/other.py", "")
    err = refused(on(hosts, "-np", 2, "-H", "h1,h2", *arguments, cwd=Path("/work")))
    assert "1 of 1 other hosts cannot take part" in err
    assert what in err


def test_a_working_directory_that_is_not_there_and_its_copy(make_hosts):
    hosts = make_hosts(3, ssh_port=22)
    write(hosts[0], "/project/train.py", "import os; print(os.getcwd(), flush=True)")
    words = ("-np", 3, "-H", "h1,h2,h3")
    at = {"cwd": Path("/project")}
    err = refused(on(hosts, *words, "python3", "train.py", **at))
    assert "the working directory /project cannot be used there: No such file or directory" in err
    code, out, err = on(hosts, *words, "--sync-dst-dir", "some where/new", "python3", "train.py", **at).finish()
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["[0] /project", "[1] /root/some where/new", "[2] /root/some where/new"]


def test_a_copy_that_fails_is_told_and_nothing_starts(make_hosts):
    hosts = make_hosts(3, ssh_port=22)
    write(hosts[1], "/full", "a file, no directory")
    (hosts[2].root / "usr/bin/rsync").unlink()
    err = refused(on(hosts, "-np", 3, "-H", "h1,h2,h3", "--sync-dst-dir", "/full", "--", *FAMILY))
    assert "2 of 2 other hosts cannot take part" in err
    assert "h2  rsync failed" in err
    assert "h3  rsync failed" in err


def test_variables_travel(make_hosts):
    hosts = make_hosts(2, ssh_port=22)
    words = "echo $HOME $TMPDIR $MINE $ASKED"
    environ = {"HOME": "/home/of/h1", "TMPDIR": "/scratch", "MINE": "mine"}
    job = on(hosts, "-np", 2, "-H", "h1,h2", "-x", "ASKED=a b", "sh", "-c", words, env=environ)
    assert sorted(job.finish()[1].splitlines()) == ["[0] /home/of/h1 /scratch mine a b", "[1] /root mine a b"]


def test_the_secret_is_on_no_command_line(start):
    job = start(2, *TWO, "sh", "-c", "echo ready $REIGEN_SECRET; sleep 300")
    job.wait_until_ready(4)
    secret = job.output()[0].split()[-1]
    assert len(secret) == 64
    commands = [command for host in job.hosts for command in host.processes().values()]
    assert any("reigen.launch.agent" in command for command in commands)
    assert not any(secret in command for command in commands)
    job.process.signal(signal.SIGINT)
    job.finish()


def test_much_output_of_all_hosts_comes_home_whole(start):
    num_lines = 60_000
    job = start(2, *TWO, "sh", "-c", f"seq -f $REIGEN_RANK-%.0f {num_lines}")
    code, out, err = job.finish()
    assert (code, err) == (0, "")
    for rank in range(4):
        lines = [line for line in out.splitlines() if line.startswith(f"[{rank}]")]
        assert lines == [f"[{rank}] {rank}-{number}" for number in range(1, num_lines + 1)]


def test_ctrl_c_while_hosts_are_called_ends_the_job(make_hosts):
    hosts = make_hosts(2, ssh_port=22)
    hosts[1].cut()
    job = on(hosts, "-np", 2, "-H", "h1,h2", *FAMILY)
    wait_for(lambda: any(command.startswith("ssh ") for command in hosts[0].processes().values()), "ssh runs")
    job.process.signal(signal.SIGINT)
    assert job.finish()[0] == 130  # ssh itself would give up after 10 s, and otherwise


def test_the_interface_that_was_asked_for(make_hosts):
    hosts = make_hosts(2, ssh_port=22)
    words = ("-np", 2, "-H", "h2,h1", "--torchrun-env", "--network-interfaces")
    code, out, err = on(hosts, *words, "nothing0,eth0", "sh", "-c", "echo $MASTER_ADDR").finish()
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [f"[0] {hosts[1].address}", f"[1] {hosts[1].address}"]
    assert "host h1 has no network interface nothing0" in refused(on(hosts, *words, "nothing0", "true"))


@pytest.mark.parametrize("names", ["h1-6:1,h2-6:1", "[fd77::1]:1,[fd77::2]:1"])
def test_hosts_of_ipv6(make_hosts, names):
    hosts = make_hosts(2, ssh_port=22)
    words = "echo $REIGEN_RENDEZVOUS $MASTER_ADDR"
    code, out, err = on(hosts, "-np", 2, "-H", names, "--torchrun-env", "sh", "-c", words).finish()
    assert (code, err) == (0, "")
    assert re.fullmatch(r"\[0\] \[fd77::1\]:\d+ fd77::1", min(out.splitlines()))


@pytest.mark.parametrize("tls", ["0", "1"])
def test_ranks_reach_the_rendezvous(make_hosts, tls):
    if tls == "1":
        pytest.importorskip("cryptography")
    program = (
        "import os; from reigen.cluster.membership.rendezvous import RendezvousClient; from "
        "reigen.net.tls import TlsContext\n"
        "rank = int(os.environ['REIGEN_RANK']); tls = TlsContext() if os.environ['REIGEN_TLS'] == '1' else None\n"
        "secret = bytes.fromhex(os.environ['REIGEN_SECRET'])\n"
        "client = RendezvousClient(os.environ['REIGEN_RENDEZVOUS'], secret, rank, 60.0, tls)\n"
        "client.put(f'key/{rank}', b'value of %d' % rank); print(client.get(f'key/{1 - rank}', 60.0).decode())"
    )
    job = on(
        make_hosts(2, ssh_port=22), "-np", 2, "-H", "h1,h2", sys.executable, "-c", program, env={"REIGEN_TLS": tls}
    )
    code, out, err = job.finish()
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["[0] value of 1", "[1] value of 0"]


def test_ranks_that_lose_a_host_get_their_own_error_first(start):
    program = (
        "import reigen as hvd; hvd.init(); print('ready', flush=True)\n"
        "while True: hvd.allreduce(1.0, op=hvd.Sum, name='x')"
    )
    job = start(2, *TWO, sys.executable, "-c", program, env={"REIGEN_PEER_TIMEOUT": "10"})
    job.wait_until_ready(4)
    job.hosts[1].cut()
    code, _, err = job.finish()
    assert code == 1
    assert "(host h1) failed first: exit code 1\n" in err
    # who was in the middle of an exchange may have noticed before it was told
    noticed = r"rank [01] \(host h1\) has heard nothing of the host of rank [23] \(host h2\) for 10 s"
    assert re.search(rf"PeerLostError: x: (host h2 |{noticed})", err), err
    assert "\n  host h2 was lost: nothing has been heard of it for 10 s\n" in err
