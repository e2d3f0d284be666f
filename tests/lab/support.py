"""Whether stand-in machines can be made here: a question to the kernel, asked before anything is made."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

_COMMANDS = ("unshare", "nsenter", "setpriv", "ip", "tc", "iptables", "ip6tables")
_SSH_COMMANDS = ("sshd", "ssh", "ssh-keygen")
_UNSHARE = ("unshare", "--net", "--uts", "--pid", "--ipc", "--mount", "--time", "--propagation", "private", "--fork")
_ATTEMPT = """set -e
mount -t tmpfs tmpfs /mnt
mkdir /mnt/up /mnt/work /mnt/root
mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/up,workdir=/mnt/work /mnt/root
ip link add name v0 type veth peer name v1
ip link add name br0 type bridge
tc qdisc add dev v0 root tbf rate 1gbit burst 256kb latency 20ms
"""
#: Where administrators' commands are that an ordinary PATH may leave out.
ADMINISTRATORS_PATH = "/usr/local/sbin:/usr/sbin:/sbin"


class Unavailable(RuntimeError):
    """This computer cannot have stand-in machines; the message says why."""


@functools.cache
def why_unavailable(*, ssh: bool = False, tun: bool = False) -> str:
    """Why there can be no stand-in machines here; empty if there can.

    Args:
        ssh: they are to be reachable by ssh.
        tun: their network is to be a switch with delays.
    """
    if os.geteuid() != 0:
        return "stand-in machines need root"
    wanted = (*_COMMANDS, *(_SSH_COMMANDS if ssh else ()))
    path = f"{os.environ.get('PATH', os.defpath)}:{ADMINISTRATORS_PATH}"
    if missing := [command for command in wanted if shutil.which(command, path=path) is None]:
        return f"not installed: {', '.join(missing)}"
    if tun and not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    attempt = subprocess.run(
        [*_UNSHARE, "sh", "-c", _ATTEMPT],
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if attempt.returncode:
        return f"the kernel refuses namespaces, overlayfs, veth or tbf: {attempt.stderr.strip()}"
    return ""


def with_full_disk(directory: str) -> tuple[str, ...]:
    """The beginning of a command whose rest finds this directory on a disk without space; nobody else does."""
    script = f'mount -t tmpfs -o size=4k none {directory} && head -c 4096 /dev/zero >{directory}/it; exec "$@"'
    return ("unshare", "--mount", "sh", "-c", script, "sh")
