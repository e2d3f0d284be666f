"""Training jobs of SageMaker on two stand-in hosts, algo-1 and algo-2, with the service's files and real toolkit."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import Host, Hosts, Unavailable
from tests.network.pods import IMAGE, Container
from tests.network.waiting import wait_for

pytestmark = pytest.mark.slow
SECRET = "5e" * 32
RUN = (sys.executable, "-P", "-m", "reigen", "run", "--nodes-from-env")
SCRIPT = """
import os, socket, sys, numpy, reigen
reigen.init()
total = int(reigen.allreduce(numpy.ones(3), op=reigen.Sum)[0])
os.write(1, f"{reigen.rank()} {os.environ['SM_CURRENT_HOST']} {total} {sys.argv[1:]}\\n".encode())
sys.exit(7 if "--fail" in sys.argv and reigen.rank() == 1 else 0)
"""
HEARING = """
import os, signal, sys, time
def hear(signum, frame):
    os.write(1, b"heard\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, hear)
os.write(1, b"ready\\n")
while True:
    time.sleep(0.05)
"""


def name_hosts(hosts: Hosts) -> None:
    """Files of a training job; names of others are not known yet."""
    for number, host in enumerate(hosts, 1):
        with contextlib.closing(host.start(["hostname", f"algo-{number}"])) as process:
            assert process.wait() == 0
        (host.root / "etc/hosts").write_text(f"127.0.0.1 localhost\n{host.address} algo-{number}\n")
        config = host.root / "opt/ml/input/config"
        config.mkdir(parents=True, exist_ok=True)
        resources = {
            "current_host": f"algo-{number}",
            "current_instance_type": "ml.c5.xlarge",
            "current_group_name": "homogeneousCluster",
            "hosts": ["algo-2", "algo-1"],
            "instance_groups": [
                {
                    "instance_group_name": "homogeneousCluster",
                    "instance_type": "ml.c5.xlarge",
                    "hosts": ["algo-2", "algo-1"],
                }
            ],
            "network_interface_name": "eth0",
        }
        (config / "resourceconfig.json").write_text(json.dumps(resources))
        (config / "inputdataconfig.json").write_text("{}")
        (config / "hyperparameters.json").write_text("{}")
        channel = host.root / "opt/ml/input/data/reigen"
        channel.mkdir(parents=True, exist_ok=True)
        (channel / "secret").write_text(SECRET)
        (channel / "secret").chmod(0o644)


def resolve(hosts: Hosts) -> None:
    for host in hosts:
        with (host.root / "etc/hosts").open("a") as file:
            file.writelines(f"{other.address} algo-{number}\n" for number, other in enumerate(hosts, 1))


@pytest.fixture
def algo(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    try:
        with Hosts(2, ssh_port=getattr(request, "param", None)) as hosts:
            name_hosts(hosts)
            yield hosts
    except Unavailable as error:
        pytest.skip(str(error))


@contextlib.contextmanager
def training_job(hosts: Hosts, *command: str, **env: str) -> Iterator[list[Container]]:
    with contextlib.ExitStack() as stack:
        found = []
        for number, host in enumerate(hosts, 1):
            own = {**IMAGE, "SM_CURRENT_HOST": f"algo-{number}", "TRAINING_JOB_NAME": "mine", **env}
            found.append(stack.enter_context(contextlib.closing(Container(host, command, own))))
        yield found


def failure(host: Host) -> str:
    file = host.root / "opt/ml/output/failure"
    return file.read_text() if file.exists() else ""


def test_an_entry_script_whose_hosts_are_known_late(algo: Hosts) -> None:
    with training_job(algo, *RUN, "-np", "auto", sys.executable, "-c", SCRIPT, SM_NUM_GPUS="2") as containers:
        wait_for(lambda: all(container.pid for container in containers), "both run")
        resolve(algo)
        assert [container.wait() for container in containers] == [0, 0], containers[0].err
        lines = sorted(line.split(" ", 1)[1] for line in containers[0].out.splitlines())
    assert lines == ["0 algo-1 4 []", "1 algo-1 4 []", "2 algo-2 4 []", "3 algo-2 4 []"]
    assert [failure(host) for host in algo] == ["", ""]


def test_the_failure_file_begins_with_the_first_failure(algo: Hosts) -> None:
    resolve(algo)
    with training_job(algo, *RUN, "-np", "2", sys.executable, "-c", SCRIPT, "--fail") as containers:
        assert [container.wait() for container in containers] == [7, 0], containers[0].err
    assert failure(algo[0]).startswith("reigen run: rank 1 (host algo-2) failed first: exit code 7")


def test_a_job_that_is_stopped_has_its_time(algo: Hosts) -> None:
    resolve(algo)
    with training_job(algo, *RUN, sys.executable, "-Sc", HEARING) as containers:
        wait_for(lambda: containers[0].out.count("ready") == 2, "both ranks are ready")
        for container in containers:
            container.delete()
        assert containers[0].wait(20) == 143
        assert containers[0].out.count("heard") == 2
        containers[1].wait(20)


# ---------------------------------------------------------------- AWS's own programs


@pytest.fixture(scope="module")
def toolkit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The training toolkit with mpi4py, in an environment of its own; what REIGEN_SAGEMAKER_TOOLKIT names, if set."""
    if named := os.environ.get("REIGEN_SAGEMAKER_TOOLKIT"):
        return Path(named)
    directory = tmp_path_factory.mktemp("toolkit")
    venv.create(directory)
    pip = [sys.executable, "-m", "pip", "--python", str(directory / "bin/python")]
    command = [*pip, "install", "-q", "--no-compile", "sagemaker-training", "mpi4py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    if done.returncode:
        pytest.skip(f"sagemaker-training cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    return directory


def use_toolkit(algo: Hosts, toolkit: Path, entry: str, text: str, **parameters: object) -> dict[str, str]:
    """Puts an entry point where the service does; the variables of the container."""
    parameters = {
        "sagemaker_program": entry,
        "sagemaker_submit_directory": "/opt/ml/code",
        "sagemaker_job_name": "mine",
        "sagemaker_region": "eu-west-1",
        **parameters,
    }
    for host in algo:
        code = host.root / "opt/ml/code"
        code.mkdir(parents=True, exist_ok=True)
        (code / entry).write_text(text)
        (code / entry).chmod(0o755)
        texts = {name: json.dumps(value) for name, value in parameters.items()}
        (host.root / "opt/ml/input/config/hyperparameters.json").write_text(json.dumps(texts))
    path = f"{toolkit / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"PATH": path, "PYTHONPATH": IMAGE["PYTHONPATH"].split(":")[0]}


@pytest.mark.timeout(240)
def test_a_shell_script_under_the_toolkit(algo: Hosts, toolkit: Path) -> None:
    text = f'#!/bin/sh\nexec {" ".join(RUN)} -np auto {sys.executable} /opt/ml/code/train.py "$@"\n'
    env = use_toolkit(algo, toolkit, "entry.sh", text, epochs=3)
    for host in algo:
        (host.root / "opt/ml/code/train.py").write_text(SCRIPT)
    resolve(algo)
    env["PYTHONPATH"] = IMAGE["PYTHONPATH"]
    with contextlib.ExitStack() as stack:
        command = (str(toolkit / "bin/train"),)
        containers = [
            stack.enter_context(contextlib.closing(Container(host, command, {**env, "TRAINING_JOB_NAME": "mine"})))
            for host in algo
        ]
        assert [container.wait(90) for container in containers] == [0, 0], containers[0].err
        assert "0 algo-1 2 ['--epochs', '3']" in containers[0].out


@pytest.mark.timeout(240)
@pytest.mark.parametrize("algo", [22], indirect=True)
def test_the_mpi_distribution_of_the_toolkit(algo: Hosts, toolkit: Path) -> None:
    if reason := why_no_mpirun():
        pytest.skip(reason)
    resolve(algo)
    mpi = {"sagemaker_mpi_enabled": True, "sagemaker_mpi_num_of_processes_per_host": 2}
    env = use_toolkit(
        algo, toolkit, "train.py", SCRIPT, **mpi, sagemaker_mpi_custom_mpi_options="-x REIGEN_SECRET_FILE"
    )
    for host in algo:
        private = host.root / "opt/ml/private"
        private.write_text(SECRET)
        private.chmod(0o400)
        config = host.root / "root/.ssh/config"
        config.write_text(config.read_text().replace("StrictHostKeyChecking yes", "StrictHostKeyChecking no"))
    env |= {
        "PYTHONPATH": IMAGE["PYTHONPATH"],
        "HOME": "/root",
        "REIGEN_SECRET_FILE": "/opt/ml/private",
    }
    with contextlib.ExitStack() as stack:
        containers = [
            stack.enter_context(contextlib.closing(Container(host, (str(toolkit / "bin/train"),), env)))
            for host in algo
        ]
        # its own sshd finds the port taken; the 30 s that the toolkit waits after mpirun's end are not waited for
        ended = "Begin writing status file"  # by the first host of the file's list, which is this toolkit's master
        wait_for(lambda: ended in containers[1].out + containers[1].err, "mpirun has ended", 90)
        # mpirun gives all ranks the master's SM_CURRENT_HOST
        out = containers[1].out
    assert sorted(re.findall(r"(\d) algo-2 4 \[\]", out)) == ["0", "1", "2", "3"], out


def why_no_mpirun() -> str:
    return "" if shutil.which("mpirun") else "mpirun is not installed (openmpi-bin)"
