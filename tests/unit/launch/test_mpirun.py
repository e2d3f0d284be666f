"""The command line of mpirun, for each family of launchers: exactly what is on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from reigen.errors import ConfigError
from reigen.launch.hosts import HostInfo
from reigen.launch.mpi.mpirun import (
    Mpirun,
    MpirunContext,
    MpirunFamily,
    exported_names,
    identify_mpirun,
    mpirun_command,
    mpirun_environ,
)
from reigen.launch.options import LaunchOptions, NetworkOptions
from reigen.launch.payload import InheritedDescriptors
from reigen.launch.ssh.command import SshOptions

SSH = "ssh -T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3"
COMMAND = ("python", "train.py", "--epochs", "3")
HERE = MpirunContext(is_root=False, num_cores=8, has_remote_hosts=False, variables=())
THERE = MpirunContext(is_root=True, num_cores=2, has_remote_hosts=True, variables=("PATH", "SEED"))
TWO_HOSTS = (HostInfo("h1", 2), HostInfo("h2", 2))


def line(
    kind: MpirunFamily, options: LaunchOptions, there: MpirunContext = HERE, path: str = "/opt/mpi/bin/mpirun"
) -> str:
    return " ".join(mpirun_command(Mpirun(path, kind, ""), options, there))


def test_open_mpi_on_this_host() -> None:
    for kind in (MpirunFamily.OPEN_MPI_4, MpirunFamily.OPEN_MPI_5):
        assert line(kind, LaunchOptions(COMMAND, 4)) == (
            "/opt/mpi/bin/mpirun -np 4 -H localhost:4 --bind-to none --map-by slot --tag-output "
            "python train.py --epochs 3"
        )


def test_open_mpi_5_keeps_its_files_where_it_is_told_to() -> None:
    here = replace(HERE, session_directory="/tmp/one")
    base = ["--prtemca", "prte_local_tmpdir_base"]
    assert " ".join([*base, "/tmp/one"]) in line(MpirunFamily.OPEN_MPI_5, LaunchOptions(COMMAND, 4), here)
    asked = LaunchOptions(COMMAND, 4, mpi_args=(*base, "/tmp/mine"))
    assert line(MpirunFamily.OPEN_MPI_5, asked, here).count("tmpdir_base") == 1


def test_open_mpi_4_on_other_hosts() -> None:
    options = LaunchOptions(
        COMMAND, 4, hosts=TWO_HOSTS, network=NetworkOptions(("eth0", "eth1")), ssh=SshOptions(port=2222)
    )
    assert line(MpirunFamily.OPEN_MPI_4, options, THERE) == (
        "/opt/mpi/bin/mpirun --allow-run-as-root -np 4 -H h1:2,h2:2 --bind-to none --map-by slot --tag-output "
        "--mca mpi_yield_when_idle 1 --mca btl_tcp_if_include eth0,eth1 --mca oob_tcp_if_include eth0,eth1 "
        f"--mca plm_rsh_agent {SSH} -p 2222 --prefix /opt/mpi -x PATH -x SEED python train.py --epochs 3"
    )


def test_open_mpi_5_on_other_hosts() -> None:
    options = LaunchOptions(
        COMMAND, 4, hosts=TWO_HOSTS, network=NetworkOptions(("eth0",)), ssh=SshOptions(identity_file="/home/me/key")
    )
    assert line(MpirunFamily.OPEN_MPI_5, options, THERE) == (
        "/opt/mpi/bin/mpirun --allow-run-as-root -np 4 -H h1:2,h2:2 --bind-to none --map-by slot --tag-output "
        "--mca mpi_yield_when_idle 1 --mca btl_tcp_if_include eth0 --prtemca prte_if_include eth0 "
        f"--prtemca plm_ssh_agent {SSH} -i /home/me/key --prefix /opt/mpi -x PATH -x SEED python train.py --epochs 3"
    )


def test_an_mpi_of_the_system_is_where_it_is_on_every_host() -> None:
    options = LaunchOptions(COMMAND, 4, hosts=TWO_HOSTS)
    assert "--prefix" not in line(MpirunFamily.OPEN_MPI_4, options, THERE, "/usr/bin/mpirun")


def test_what_is_printed() -> None:
    options = LaunchOptions(COMMAND, 2, prefix=False, timestamps=True, output_directory=Path("out"))
    assert line(MpirunFamily.OPEN_MPI_5, options) == (
        "/opt/mpi/bin/mpirun -np 2 -H localhost:2 --bind-to none --map-by slot --timestamp-output "
        "--output-filename out python train.py --epochs 3"
    )


def test_binding_and_further_options() -> None:
    assert "--bind-to core --map-by slot" in line(MpirunFamily.OPEN_MPI_5, LaunchOptions(COMMAND, 2, bind="cores"))
    options = LaunchOptions(COMMAND, 2, binding_args=("--map-by", "node"), mpi_args=("--mca", "pml", "ob1"))
    assert line(MpirunFamily.OPEN_MPI_4, options) == (
        "/opt/mpi/bin/mpirun -np 2 -H localhost:2 --map-by node --tag-output --mca pml ob1 python train.py --epochs 3"
    )


def test_hydra_on_this_host() -> None:
    assert line(MpirunFamily.HYDRA, LaunchOptions(COMMAND, 4)) == (
        "/opt/mpi/bin/mpirun -np 4 -bind-to none -prepend-rank python train.py --epochs 3"
    )


def test_hydra_on_other_hosts() -> None:
    options = LaunchOptions(COMMAND, 4, hosts=TWO_HOSTS, network=NetworkOptions(("eth0",)), ssh=SshOptions(port=2222))
    assert line(MpirunFamily.HYDRA, options, THERE) == (
        "/opt/mpi/bin/mpirun -np 4 -hosts h1:2,h2:2 -bind-to none -prepend-rank -iface eth0 "
        "-launcher ssh -launcher-exec ssh -genvlist PATH,SEED python train.py --epochs 3"
    )
    made = mpirun_environ(MpirunFamily.HYDRA, options, {}, is_terminal=False, num_cores=2)
    assert made["HYDRA_LAUNCHER_EXTRA_ARGS"] == SSH.removeprefix("ssh ") + " -p 2222"


@pytest.mark.parametrize(
    ("kind", "asked", "complaint"),
    [
        (MpirunFamily.OPEN_MPI_5, {"sync_directory": "/tmp/x"}, "--sync-dst-dir: mpirun copies nothing"),
        (MpirunFamily.OPEN_MPI_5, {"inherited": InheritedDescriptors(7, 8)}, "functions cannot be run by mpirun"),
        (MpirunFamily.HYDRA, {"output_directory": Path("out")}, "--output-filename"),
        (MpirunFamily.HYDRA, {"timestamps": True}, "does not tell the time"),
        (MpirunFamily.HYDRA, {"network": NetworkOptions(("eth0", "eth1"))}, "takes one"),
    ],
)
def test_what_cannot_be_done(kind: MpirunFamily, asked: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        line(kind, LaunchOptions(COMMAND, 2, **asked))  # type: ignore[arg-type]


def test_a_blank_in_an_option_of_ssh() -> None:
    options = LaunchOptions(COMMAND, 4, hosts=TWO_HOSTS, ssh=SshOptions(identity_file="/home/my self/key"))
    with pytest.raises(ConfigError, match="holds a blank: '/home/my self/key'"):
        line(MpirunFamily.OPEN_MPI_4, options, THERE)


@pytest.mark.parametrize(
    ("version", "kind"),
    [
        ("mpirun (Open MPI) 5.0.9\n\nReport bugs to", MpirunFamily.OPEN_MPI_5),
        ("mpirun (Open MPI) 4.0.3", MpirunFamily.OPEN_MPI_4),
        ("mpirun.openmpi (OpenRTE) 4.1.4\n\nReport bugs to", MpirunFamily.OPEN_MPI_4),
        ("mpirun (IBM Spectrum MPI) 10.3.1.02rtm0", MpirunFamily.OPEN_MPI_4),
        ("HYDRA build details:\n    Version:     4.0.2", MpirunFamily.HYDRA),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701", MpirunFamily.HYDRA),
        ("mpirun: command line of another world", None),
        ("", None),
    ],
)
def test_which_mpirun_it_is(version: str, kind: MpirunFamily | None) -> None:
    assert identify_mpirun(version)[0] is kind


def test_no_value_of_a_variable_and_no_secret_is_on_the_command_line() -> None:
    environ = {"TOKEN": "hunter2", "REIGEN_SECRET": "ab" * 32, "REIGEN_RANK": "0", "OMPI_MCA_btl": "self", "HOME": "/r"}
    made = mpirun_environ(MpirunFamily.OPEN_MPI_5, LaunchOptions(COMMAND, 4), environ, is_terminal=False, num_cores=8)
    assert "REIGEN_SECRET" not in made
    assert "REIGEN_RANK" not in made
    names = exported_names(made, ["HOME"])
    assert names == ("HOME", "OMP_NUM_THREADS", "REIGEN_PREFIXED", "TOKEN")
    there = MpirunContext(is_root=False, num_cores=8, has_remote_hosts=True, variables=names)
    assert "hunter2" not in line(MpirunFamily.OPEN_MPI_5, LaunchOptions(COMMAND, 4, hosts=TWO_HOSTS), there)
    assert made["OMP_NUM_THREADS"] == "2"
