"""MPIJobs of Kubeflow's operator on stand-in pods: a launcher, and two workers with sshd."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator

import pytest

from tests.lab import Hosts, Unavailable
from tests.network.pods import IMAGE

pytestmark = pytest.mark.slow
#: As the operator's ConfigMap has it for Open MPI.
HOSTFILE = "train-worker-0.train.space.svc slots=2\ntrain-worker-1.train.space.svc slots=2\n"
#: As the operator sets them in the launcher.
VARIABLES = {
    "K_MPI_JOB_ROLE": "launcher",
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
    "OMPI_MCA_orte_set_default_slots": "2",
}
SCRIPT = """
import os, socket, numpy, reigen
reigen.init()
total = int(reigen.allreduce(numpy.ones(3), op=reigen.Sum)[0])
os.write(1, f"rank {reigen.rank()} {socket.gethostname()} {total}\\n".encode())
"""


@pytest.fixture(scope="module")
def mpi_job() -> Iterator[Hosts]:
    try:
        with Hosts(3, ssh_port=22) as hosts:
            names = ["train-launcher", "train-worker-0", "train-worker-1"]
            lines = [f"{host.address} {name}.train.space.svc {name}" for host, name in zip(hosts, names, strict=True)]
            for host, name in zip(hosts, names, strict=True):
                with contextlib.closing(host.start(["hostname", name])) as process:
                    assert process.wait() == 0
                (host.root / "etc/hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
                config = host.root / "root/.ssh/config"
                config.write_text(config.read_text().replace("StrictHostKeyChecking yes", "StrictHostKeyChecking no"))
            (hosts[0].root / "etc/mpi").mkdir()
            (hosts[0].root / "etc/mpi/hostfile").write_text(HOSTFILE)
            yield hosts
    except Unavailable as error:
        pytest.skip(str(error))


def launch(hosts: Hosts, *command: str) -> list[list[str]]:
    """What the ranks print, in order, without the launcher's prefixes."""
    with contextlib.closing(hosts[0].start(command, env={**IMAGE, **VARIABLES})) as process:
        assert process.wait(60) == 0, process.output()[1]
        out = process.output()[0]
    return sorted(line[line.index("rank ") :].split()[1:] for line in out.splitlines() if "rank " in line)


EXPECTED = [[str(rank), f"train-worker-{rank // 2}", "4"] for rank in range(4)]


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed (openmpi-bin)")
def test_mpirun_in_the_launcher(mpi_job: Hosts) -> None:
    options = (
        "--allow-run-as-root",
        "-np",
        "4",
        "-bind-to",
        "none",
        "-map-by",
        "slot",
        "-x",
        "PATH",
        "-x",
        "PYTHONPATH",
    )
    secret = ("-x", f"REIGEN_SECRET={'5e' * 32}")
    found = launch(mpi_job, "mpirun", *options, *secret, "-mca", "pml", "ob1", sys.executable, "-c", SCRIPT)
    assert found == EXPECTED


def test_reigen_run_in_the_launcher(mpi_job: Hosts) -> None:
    run = (sys.executable, "-P", "-m", "reigen", "run", "--hostfile", "/etc/mpi/hostfile", "--launcher", "ssh")
    assert launch(mpi_job, *run, "-np", "4", sys.executable, "-c", SCRIPT) == EXPECTED
