"""Stand-in pods: machines whose names, files and signals come as from a kubelet, without Kubernetes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.lab import Host, HostProcess, Hosts
from tests.network.waiting import wait_for

SOURCE = Path(__file__).parents[2] / "src"
DOMAIN = "net.space.svc.cluster.local"
#: What a container image has: this Python, and no shell's variables.
IMAGE = {"PYTHONPATH": os.pathsep.join([str(SOURCE), *filter(None, sys.path)])}


class Pods:
    """Pods of an Indexed Job, one a machine, or of what names its pods likewise.

    Args:
        hosts: the machines.
        job: its name; pod i is called ``JOB-i``.
    """

    def __init__(self, hosts: Hosts, job: str) -> None:
        self.hosts, self.job = hosts, job
        for index, host in enumerate(hosts):
            with contextlib.closing(host.start(["hostname", f"{job}-{index}"])) as process:
                assert process.wait() == 0
            own = f"{host.address} {job}-{index}.{DOMAIN} {job}-{index}"
            (host.root / "etc/hosts").write_text(f"127.0.0.1 localhost\n{own}\n")

    def resolve(self, name: str = "", of: int = 0) -> None:
        """Lets all pods know a name of one, as DNS does after a while."""
        for host in self.hosts:
            with (host.root / "etc/hosts").open("a") as file:
                file.write(f"{self.hosts[of].address} {name or f'{self.job}-{of}.{DOMAIN}'}\n")

    def mount_secret(self, text: str, path: str = "/run/mine/secret", indices: Sequence[int] = (0, 1, 2)) -> None:
        """Writes the file as a Secret of mode 0400 is mounted: a link to a link to it."""
        for index in indices:
            file = self.hosts[index].root / path.removeprefix("/var").lstrip("/")  # /var/run is an absolute link
            data = file.parent / "..2026"
            data.mkdir(parents=True, exist_ok=True)
            for link in (file, file.parent / "..data"):
                link.unlink(missing_ok=True)
            (data / file.name).unlink(missing_ok=True)
            (data / file.name).write_text(text)
            (data / file.name).chmod(0o400)
            (file.parent / "..data").symlink_to("..2026")
            file.symlink_to(f"..data/{file.name}")

    def start(self, index: int, command: Sequence[str], env: Mapping[str, str]) -> Container:
        """Starts a pod's container."""
        return Container(self.hosts[index], command, {**IMAGE, **env})

    @contextlib.contextmanager
    def job_of(self, command: Sequence[str], **env: str) -> Iterator[list[Container]]:
        """All containers of an Indexed Job, until the block ends."""
        own = {"REIGEN_NODES": str(len(self.hosts)), "REIGEN_SECRET_FILE": "/run/mine/secret", **env}
        with contextlib.ExitStack() as stack:
            containers = []
            for index in reversed(range(len(self.hosts))):
                container = self.start(index, command, {"JOB_COMPLETION_INDEX": str(index), **own})
                containers.append(stack.enter_context(contextlib.closing(container)))
            yield containers[::-1]


class Container:
    """A container: its command is process 1 there."""

    def __init__(self, host: Host, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.host = host
        program = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *command]
        self._process: HostProcess = host.start(program, env=env)

    @property
    def pid(self) -> int:
        """The number of its process 1 outside."""
        unshare = self._process.pid
        children = Path(f"/proc/{unshare}/task/{unshare}/children")
        wait_for(children.read_text, "the container has begun")
        return int(children.read_text().split()[0])

    def delete(self) -> None:
        """SIGTERM, as a kubelet sends it; `kill` is what comes after the grace."""
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Ends everything in it at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float = 60.0) -> int:
        """Its exit code, as a kubelet has it: 128 + n for a signal."""
        code = self._process.wait(timeout)
        return code if code >= 0 else 128 - code

    @property
    def out(self) -> str:
        return self._process.output()[0]

    @property
    def err(self) -> str:
        return self._process.output()[1]

    def close(self) -> None:
        self._process.close()
