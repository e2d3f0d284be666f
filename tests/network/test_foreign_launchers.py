"""Ranks on several machines that somebody else has started: they find each other, or say why they cannot."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from reigen.cluster.bootstrap.job_credentials import derive_job_secret, derive_ports
from tests.lab import Host, HostProcess
from tests.network.conftest import MakeHosts
from tests.network.slurm import Slurm, why_no_slurm
from tests.network.test_hosts import wait_for

TRAIN = (sys.executable, str(Path(__file__).with_name("train.py")))
MEET = (sys.executable, str(Path(__file__).with_name("meet.py")))
SECRET = os.urandom(32).hex()

pytestmark = pytest.mark.slow


def torch_like(rank: int, size: int, **more: str) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "h1", "MASTER_PORT": "29500", **more}


def met(outputs: Sequence[str]) -> list[list[Any]]:
    """What ranks printed, by rank."""
    return sorted(json.loads(line) for output in outputs for line in output.splitlines() if line.startswith("["))


def run_on(hosts: Sequence[Host], environs: Sequence[Mapping[str, str]]) -> list[tuple[int, str, str]]:
    """A rank on each host: exit code, stdout, stderr."""
    ranks = [host.start(MEET, env=environ) for host, environ in zip(hosts, environs, strict=True)]
    codes = [rank.wait(60.0) for rank in ranks]
    return [(code, *rank.output()) for code, rank in zip(codes, ranks, strict=True)]


def check_met(ends: Sequence[tuple[int, str, str]], machines: list[list[int]], hostnames: list[str], port: int) -> None:
    assert [code for code, _, _ in ends] == [0] * len(ends), ends
    found = met([out for _, out, _ in ends])
    assert [rank[:3] for rank in found] == [[rank, machines, hostnames] for rank in range(len(ends))]
    assert {rank[3] for rank in found} <= {f"10.77.0.1:{port}", f"h1:{port}"}


def first_port(job_id: str = "29500") -> int:
    return derive_ports(derive_job_secret(bytes.fromhex(SECRET), job_id))[0]


@pytest.mark.parametrize("way", ["variable", "file"])
def test_ranks_meet_by_a_secret(make_hosts: MakeHosts, tmp_path: Path, way: str) -> None:
    one, two = make_hosts(2, shared=[tmp_path])
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "secret").chmod(0o600)
    secret = {"REIGEN_SECRET": SECRET} if way == "variable" else {"REIGEN_SECRET_FILE": str(tmp_path / "secret")}
    ends = run_on([one, two, two, one], [torch_like(rank, 4, **secret) for rank in range(4)])
    check_met(ends, [[0, 3], [1, 2]], ["h1", "h2", "h2", "h1"], first_port())


def test_a_host_that_calls_itself_loopback_listens_where_the_others_look(make_hosts: MakeHosts) -> None:
    one, two = make_hosts(2)
    (one.root / "etc/hosts").write_text("127.0.0.1 localhost\n127.0.1.1 h1\n10.77.0.2 h2\n")  # as Debian does
    ends = run_on([one, two], [torch_like(rank, 2, REIGEN_SECRET=SECRET) for rank in range(2)])
    check_met(ends, [[0], [1]], ["h1", "h2"], first_port())


def test_a_port_of_choice_and_the_next_one_where_it_is_taken(make_hosts: MakeHosts) -> None:
    one, two = make_hosts(2)
    port = {"REIGEN_RENDEZVOUS_PORT": "4321"}
    ends = run_on([one, two], [torch_like(rank, 2, REIGEN_SECRET=SECRET, **port) for rank in range(2)])
    check_met(ends, [[0], [1]], ["h1", "h2"], 4321)
    taken = one.start(
        [sys.executable, "-c", f"import socket; taken = socket.create_server(('', {first_port()})); input()"],
        has_input=True,
    )
    one.wait_until_listening(first_port())
    ends = run_on([one, two], [torch_like(rank, 2, REIGEN_SECRET=SECRET) for rank in range(2)])
    check_met(ends, [[0], [1]], ["h1", "h2"], derive_ports(derive_job_secret(bytes.fromhex(SECRET), "29500"))[1])
    taken.kill()


def test_without_a_secret_only_the_host_of_rank_0_can_come(make_hosts: MakeHosts) -> None:
    one, two = make_hosts(2)
    short = {"REIGEN_START_TIMEOUT": "10"}
    ends = run_on([one, one, two], [torch_like(rank, 3, **short) for rank in range(3)])
    assert [code for code, _, _ in ends] == [1, 1, 1]
    for _, _, err in ends[:2]:
        assert "rank(s) 2 did not call init() within 10 s" in err
    assert "REIGEN_SECRET" in ends[2][2]
    assert "started this process as rank 2 of 3" in ends[2][2]


def test_a_wrong_secret_is_told_on_both_sides(make_hosts: MakeHosts) -> None:
    one, two = make_hosts(2)
    common = {"REIGEN_START_TIMEOUT": "4", "REIGEN_RENDEZVOUS_PORT": "4321"}
    ends = run_on(
        [one, two], [torch_like(rank, 2, REIGEN_SECRET=digit * 64, **common) for rank, digit in enumerate("ab")]
    )
    assert [code for code, _, _ in ends] == [1, 1]
    assert "DeadlineError: rank(s) 1 did not call init() within 4 s" in ends[0][2]
    assert "AuthenticationError" in ends[1][2] or "cannot be reached" in ends[1][2]


def test_one_rank_on_two_hosts(make_hosts: MakeHosts) -> None:
    one, two = make_hosts(2)
    ranks = [torch_like(rank, 3, REIGEN_SECRET=SECRET, REIGEN_START_TIMEOUT="120") for rank in range(3)]
    zero, first = one.start(MEET, env=ranks[0]), one.start(MEET, env=ranks[1])
    one.wait_until_listening(first_port())
    wait_for(lambda: is_connected(one, first), "rank 1 to be in")
    for rank in (0, 1):
        ((code, _, err),) = run_on([two], [ranks[rank]])
        assert code == 1
        assert f"ConfigError: rank {rank} of this job is process " in err
        assert "of host h1, and process" in err
        assert "of host h2 says that it is this rank, too" in err
    ((code, _, err),) = run_on([two], [ranks[2]])
    assert (code, zero.wait(60.0), first.wait(60.0)) == (0, 0, 0), err


def is_connected(host: Host, process: HostProcess) -> bool:
    """Whether a process waits at the rendezvous: it has a connection over TCP and is done with importing."""
    lines = Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]
    return sum(line.split()[3] == "01" for line in lines) >= 4  # both ends of rank 0's and of rank 1's


def check_trained(output: str, size: int, num_hosts: int) -> None:
    """All ranks have the sums of all, twice."""
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
    assert sorted(lines) == [[rank, size, num_hosts, size * (size + 1) / 2] for rank in range(size) for _ in range(2)]


def test_torchrun_on_several_hosts(make_hosts: MakeHosts, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    hosts = make_hosts(2, shared=[tmp_path])
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--master-addr=h1"]
    agents = [
        host.start([*command, f"--node-rank={number}", TRAIN[1]], env={"REIGEN_SECRET_FILE": str(secret)})
        for number, host in enumerate(hosts)
    ]
    codes = [agent.wait(90.0) for agent in agents]
    assert codes == [0, 0], [agent.output() for agent in agents]
    check_trained("".join(agent.output()[0] for agent in agents), 4, 2)


UNTIL_A_DEATH = """
import json, os
import numpy as np
import reigen
from reigen.errors import CollectiveError
reigen.init()
try:
    for step in range(10**6):
        reigen.allreduce(np.ones(300_000, np.float32), name=f"x{step % 3}")
        if step == 5:
            os.write(1, b"runs\\n")
except CollectiveError as error:
    os.write(1, (json.dumps([type(error).__name__, list(error.ranks), str(error)]) + "\\n").encode())
"""


@pytest.mark.parametrize("victim", [0, 2])
def test_the_death_of_a_rank_is_told_on_all_hosts(make_hosts: MakeHosts, victim: int) -> None:
    one, two = make_hosts(2)
    ranks = [
        host.start([sys.executable, "-c", UNTIL_A_DEATH], env=torch_like(rank, 4, REIGEN_SECRET=SECRET))
        for rank, host in enumerate((one, one, two, two))
    ]
    for process in ranks:
        wait_for(lambda process=process: "runs" in process.output()[0], "ranks to run")  # type: ignore[misc]
    ranks[victim].signal(signal.SIGKILL)
    begun = time.monotonic()
    for rank, process in enumerate(ranks):
        process.wait(60.0)
        if rank != victim:
            assert process.output()[0].count("\n") > 1, process.output()
            kind, lost, text = json.loads(process.output()[0].splitlines()[1])
            assert (kind, lost) == ("PeerLostError", [victim]), text
            host = "h1" if victim == 0 else "h2"
            seen = f"rank(s) {victim} (host {host}) died while others wait for them" in text
            # rank 0 hosts the service; who hears of its death first depends on who looks first
            assert seen or (victim == 0 and "rank 0 has ended, and with it the job's control service" in text), text
    assert time.monotonic() - begun < 15.0


@pytest.fixture
def slurm(make_hosts: MakeHosts, tmp_path: Path) -> Slurm:
    if reason := why_no_slurm():
        pytest.skip(reason)
    return Slurm(make_hosts(2, shared=[tmp_path]), tmp_path)


def test_steps_and_scripts_of_slurm(slurm: Slurm, tmp_path: Path) -> None:
    # one host needs nothing
    code, out, err = slurm.run("srun", "-N1", "-n2", *MEET)
    assert code == 0, err
    assert [rank[:3] for rank in met([out])] == [[rank, [[0, 1]], ["h1", "h1"]] for rank in range(2)]
    # several need a secret, which the step inherits; the ranks are numbered in turn
    code, out, err = slurm.run("srun", "-N2", "-n3", "--distribution=cyclic", *MEET, env={"REIGEN_SECRET": SECRET})
    assert code == 0, err
    assert [rank[:3] for rank in met([out])] == [[rank, [[0, 2], [1]], ["h1", "h2", "h1"]] for rank in range(3)]
    code, out, err = slurm.run("srun", "-N2", "--ntasks-per-node=2", *TRAIN, env={"REIGEN_SECRET": SECRET})
    assert code == 0, err
    check_trained(out, 4, 2)
    # and say so
    code, _, err = slurm.run("srun", "-N2", "-n2", *MEET)
    assert code != 0
    for rank in range(2):
        assert f"srun (a Slurm step) started this process as rank {rank} of 2" in err
    assert "REIGEN_SECRET" in err
    # a batch script is one process, whatever it has reserved
    script = tmp_path / "batch.sh"
    script.write_text(f"#!/bin/sh\n{sys.executable} -c 'import reigen; reigen.init(); print(reigen.size())'\n")
    code, _, err = slurm.run("sbatch", "--wait", "-N2", "-n4", "-o", str(tmp_path / "out"), str(script))
    assert (code, (tmp_path / "out").read_text()) == (0, "1\n"), err
