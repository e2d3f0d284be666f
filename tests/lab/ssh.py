"""Secure shell between stand-in machines: keys made for them alone, a server on each, and what a client needs."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.lab.machine import Machine, environment_of_machines

_SERVER = """Port {port}
AddressFamily any
HostKey /etc/ssh/stand_in_host_key
PidFile /run/sshd.pid
AuthorizedKeysFile /root/.ssh/authorized_keys
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PrintMotd no
MaxStartups 100
Subsystem sftp internal-sftp
"""
_CLIENT = """Host *
    User root
    Port {port}
    IdentityFile /root/.ssh/id_ed25519
    UserKnownHostsFile /root/.ssh/known_hosts
    StrictHostKeyChecking yes
    BatchMode yes
    ConnectTimeout 10
"""


@dataclass(frozen=True, slots=True)
class Key:
    """A key pair, as the text of its two files."""

    private: str
    public: str

    @classmethod
    def make(cls, directory: Path, name: str) -> Key:
        """A new Ed25519 key pair; its files stay in ``directory``."""
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(directory / name)]
        subprocess.run(command, env=environment_of_machines(), stdin=subprocess.DEVNULL, check=True, timeout=30)
        return cls((directory / name).read_text(), (directory / f"{name}.pub").read_text())


def configure(machine: Machine, client: Key, server: Key, known_hosts: Sequence[str], port: int) -> None:
    """Writes to a machine's own disk what its server and its clients need.

    Args:
        machine: the machine.
        client: what every user of these machines identifies with.
        server: this machine's own.
        known_hosts: a line for each machine.
        port: that all servers listen on.
    """
    home = machine.root / "root/.ssh"
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    write(home / "id_ed25519", client.private)
    write(home / "authorized_keys", client.public)
    write(home / "known_hosts", "".join(f"{line}\n" for line in known_hosts))
    write(home / "config", _CLIENT.format(port=port))
    write(machine.root / "etc/ssh/stand_in_host_key", server.private)
    write(machine.root / "etc/ssh/stand_in_sshd_config", _SERVER.format(port=port))
    (machine.root / "run/sshd").mkdir(mode=0o755)


def serve(machine: Machine) -> None:
    """Starts a machine's server."""
    machine.start(["/usr/sbin/sshd", "-D", "-e", "-f", "/etc/ssh/stand_in_sshd_config"])


def known_host(names: Sequence[str], port: int, key: Key) -> str:
    """A line of known_hosts for a server that has these names and addresses."""
    hosts = names if port == 22 else [f"[{name}]:{port}" for name in names]
    return f"{','.join(hosts)} {' '.join(key.public.split()[:2])}"


def write(path: Path, text: str) -> None:
    """Writes a file that its owner alone may read."""
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(text)
