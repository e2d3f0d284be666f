"""What tests on several hosts rely on: stand-in machines are as separate as real ones, their network does as told."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from reigen.launch.supervision.process_tree import find_descendants
from tests.lab import Host, HostProcess, MachineError, why_unavailable
from tests.network.conftest import MakeHosts
from tests.network.waiting import wait_for

pytestmark = pytest.mark.slow
TALK = (sys.executable, "-I", "-S", Path(__file__).with_name("talk.py"))
PORT = 5000


def serve(host: Host, what: str = "serve", address: str = "") -> HostProcess:
    process = host.start([*TALK, what, address or host.address, str(PORT)])
    host.wait_until_listening(PORT)
    return process


def ask(host: Host, address: str, *, num_bytes: int = 256, times: int = 1) -> list[float]:
    """Seconds that each of some conversations took; raises if one failed."""
    done = host.run([*TALK, "ask", address, str(PORT), str(num_bytes), str(times)], timeout=90.0)
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.split()]


def reaches(host: Host, address: str, seconds: float = 30.0) -> bool:
    """Whether a connection is made within some seconds: some more where it is to be made."""
    command = f"import socket; socket.create_connection(('{address}', {PORT}), timeout={seconds})"
    return host.run([sys.executable, "-I", "-S", "-c", command], timeout=90.0).returncode == 0


def seconds_to_send(host: Host, address: str, num_bytes: int) -> float:
    """How long it takes until the sink there has taken so many bytes."""
    done = host.run([*TALK, "send", address, str(PORT), str(num_bytes)], timeout=90.0)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def test_a_machine_has_its_own_name_processes_memory_files_and_boot(make_hosts: MakeHosts, tmp_path: Path) -> None:
    one, two = make_hosts(2, shared=[tmp_path])
    uptimes = [float(host.run(["cat", "/proc/uptime"]).stdout.split()[0]) for host in (one, two)]
    assert uptimes[1] - uptimes[0] > 1000
    boot_id = "/proc/sys/kernel/random/boot_id"
    script = f"hostname; cat {boot_id}; ls /dev/shm | wc -l; touch /dev/shm/x /root/mine {tmp_path}/ours"
    here = Path(boot_id).read_text().strip()
    name1, boot1, shm1 = one.run(["sh", "-c", script]).stdout.split()
    name2, boot2, shm2 = two.run(["sh", "-c", script]).stdout.split()
    assert (name1, name2) == ("h1", "h2")
    assert len({boot1, boot2, here}) == 3
    assert (shm1, shm2) == ("0", "0")
    assert (one.root / "root/mine").exists()
    assert not Path("/root/mine").exists()
    assert not Path("/dev/shm/x").exists()
    assert (tmp_path / "ours").exists()

    sleeper = one.start(["sleep", "60"])
    wait_for(lambda: "sleep 60" in one.processes().values(), "the process is seen")
    assert sleeper.pid in one.processes()
    assert two.processes() == {}
    sleeper.kill()
    assert sleeper.wait() == -signal.SIGKILL
    assert one.processes() == {}


def test_machines_know_each_other_by_name_over_ipv4_and_ipv6(make_hosts: MakeHosts) -> None:
    one, two = make_hosts(2)
    before = two.counters
    serve(two)
    assert ask(one, "h2", num_bytes=1 << 20)
    moved = two.counters - before
    assert 1 << 20 <= moved.received_bytes <= 1.1 * (1 << 20)
    assert 1 << 20 <= moved.sent_bytes <= 1.1 * (1 << 20)
    serve(one, address=one.address6)
    assert ask(two, "h1-6")


def test_ssh_leads_from_any_machine_to_any_other(make_hosts: MakeHosts) -> None:
    one, two = make_hosts(2, ssh_port=2222)
    there = one.run(["ssh", "h2", "hostname; exit 3"])
    assert (there.stdout, there.returncode) == ("h2\n", 3), there.stderr
    back = two.run(["ssh", "h1-6", "cat >/root/copy; hostname"])
    assert (back.stdout, back.returncode) == ("h1\n", 0), back.stderr
    wait_for(lambda: not one.processes() and not two.processes(), "nothing runs but the servers")


@pytest.mark.parametrize("network", ["bridge", "switch"])
def test_a_shaped_link_has_that_rate_in_both_directions(make_hosts: MakeHosts, network: str) -> None:
    one, two = make_hosts(2, network=network)
    rate_bits, num_bytes = 50e6, 1 << 22
    serve(two, "sink")
    one.shape(rate_bits)
    expected = 8 * num_bytes / rate_bits
    for _ in range(2):  # the sender is limited, then the receiver; a busy machine is slower, but not every time
        took: list[float] = []
        while not took or (took[-1] > 3.0 * expected and len(took) < 10):
            took.append(seconds_to_send(one, two.address, num_bytes))
        assert 0.9 * expected <= min(took) <= 3.0 * expected, took
        one.shape(None)
        two.shape(rate_bits)
    two.shape(None)
    assert any(seconds_to_send(one, two.address, num_bytes) < 0.5 * expected for _ in range(10)), "it is fast again"


def test_the_switch_delays_each_packet(make_hosts: MakeHosts) -> None:
    one, two = make_hosts(2, network="switch")
    for host in (one, two):
        host.shape(None, delay_seconds=0.02)
    serve(two)
    took = ask(one, two.address, times=10)
    while min(took) >= 0.08 and len(took) < 200:  # a busy machine is slower, but not every time
        took += ask(one, two.address, times=10)
    assert 0.04 <= min(took) < 0.08


def test_a_bridge_has_no_delays_and_says_so(make_hosts: MakeHosts) -> None:
    (one,) = make_hosts(1)
    with pytest.raises(ValueError, match="switch"):
        one.shape(None, delay_seconds=0.01)


@pytest.mark.parametrize("network", ["bridge", "switch"])
def test_what_is_cut_off_gets_nothing_until_it_is_joined_again(make_hosts: MakeHosts, network: str) -> None:
    one, two = make_hosts(2, network=network)
    serve(two)
    assert reaches(one, two.address)
    two.cut()
    assert not reaches(one, two.address, 1.0)
    two.join()
    assert reaches(one, two.address)


def test_a_partition_separates_two_and_not_the_third(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(3)
    one, two, three = hosts
    for host in hosts:
        serve(host)
    hosts.partition(one, two)
    assert not reaches(one, two.address, 1.0)
    assert not reaches(two, one.address6, 1.0)
    assert reaches(one, three.address)
    assert reaches(three, two.address)
    hosts.heal(one, two)
    assert reaches(one, two.address)


@pytest.mark.parametrize("network", ["bridge", "switch"])
def test_lost_packets_are_sent_again(make_hosts: MakeHosts, network: str) -> None:
    one, two = make_hosts(2, network=network)
    for host in (one, two):
        host.lose(0.01)
    sink = serve(two, "sink")
    num_bytes = 1 << 23
    done = one.run([*TALK, "send", two.address, str(PORT), str(num_bytes)], timeout=90.0)
    assert done.returncode == 0, done.stderr
    wait_for(lambda: sink.output()[0] == f"{num_bytes}\n", "everything has arrived")
    assert 15 <= one.num_retransmissions <= 600  # of about 5,800 packets


def test_a_crash_ends_all_processes_and_tells_nobody(make_hosts: MakeHosts) -> None:
    one, two, three = make_hosts(3)
    crashed, ended = serve(two), serve(three)
    holders = [one.start([*TALK, "hold", host.address, str(PORT)]) for host in (two, three)]
    for holder in holders:
        wait_for(lambda holder=holder: holder.output()[0] == "connected\n", "the connection is there")
    two.crash()
    assert crashed.wait() == -signal.SIGKILL
    assert two.processes() == {}
    three.kill_everything()
    assert ended.wait() == -signal.SIGKILL
    # What the third machine's kernel sent came after any that the second's might have sent.
    wait_for(lambda: holders[1].returncode is not None, "the end of a connection to a machine that ended")
    assert holders[1].output()[0].split()[1] in {"end", "ConnectionResetError"}
    assert holders[0].returncode is None


def test_a_process_that_is_stopped_does_not_hold_up_the_end(make_hosts: MakeHosts) -> None:
    (one,) = make_hosts(1)
    sleeper = one.start(["sleep", "60"])
    sleeper.signal(signal.SIGSTOP)
    wait_for(lambda: _state(sleeper.pid) == "T", "it is stopped")
    with pytest.raises(MachineError, match="sleep 60 has not ended"):
        sleeper.wait(0.01)
    one.crash()
    assert sleeper.wait() == -signal.SIGKILL


def test_connections_use_the_congestion_control_that_was_asked_for(make_hosts: MakeHosts) -> None:
    one, two = make_hosts(2, congestion_control="reno")
    serve(two)
    holder = one.start([*TALK, "hold", two.address, str(PORT)])
    wait_for(lambda: holder.output()[0], "the connection is there")
    assert " reno " in one.run(["ss", "-tin"]).stdout


def test_everything_ends_with_the_process_that_made_it_however_that_ends() -> None:
    if reason := why_unavailable():
        pytest.skip(reason)
    program = (
        "from tests.lab import Hosts; hosts = Hosts(2); hosts[0].start(['sleep', '60'])\n"
        "print(*[host.pid for host in hosts], flush=True); input()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    with owner:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 2
        started = find_descendants(owner.pid)
        assert started > set(pids)
        owner.kill()
    wait_for(lambda: not _unless_ended(started), "all processes have ended")


def _unless_ended(pids: set[int]) -> list[int]:
    """Those that have not ended; orphans that were given to this process, if it is a subreaper, are waited for."""
    left = []
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        if Path(f"/proc/{pid}").exists():
            left.append(pid)
    return left


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
