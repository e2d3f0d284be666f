"""`reigen check`: what is installed here, whether jobs can run, and how they would."""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata

from reigen._version import __version__
from reigen.cli.run_options import add_login, ssh_of
from reigen.errors import ConfigError, LaunchError, ReigenError
from reigen.launch.hosts import hosts_of

_FRAMEWORKS = ("torch", "tensorflow", "keras", "jax", "mxnet")
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        topic: heading under which it stands.
        name: what was looked at.
        value: what was found.
        is_problem: no job can run here because of it.
    """

    topic: str
    name: str
    value: str
    is_problem: bool = False


def main(arguments: Sequence[str]) -> int:
    """Print the report; returns 0 when a job can run here, or on the hosts that were named, else 1."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if chosen.hosts is not None or chosen.hostfile is not None:
        from reigen.cli.check_hosts import check_hosts, options_of

        try:
            hosts = hosts_of(chosen.hosts, chosen.hostfile, 1)
            return check_hosts(hosts, ssh_of(chosen), options_of(chosen))
        except (ConfigError, LaunchError) as error:
            parser.error(str(error))
    findings = look_around(os.environ)
    _show(findings)
    problems = [finding for finding in findings if finding.is_problem]
    for finding in problems:
        print(f"problem: {finding.name}: {finding.value}")
    print("no job can run here" if problems else "a job can run here")
    return 1 if problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="reigen check",
        description="Say what is installed here, whether jobs can run, and how they would; or, with --hosts, whether "
        "these hosts can run jobs together, and how fast they talk to each other.",
        allow_abbrev=False,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("-H", "--hosts", metavar="HOSTS", help="look at these hosts: h1,h2")
    which.add_argument("-hostfile", "--hostfile", metavar="FILE", help="look at the hosts of this file, a line each")
    add_login(parser.add_argument)
    parser.add_argument("--network-interfaces", metavar="X", help="interfaces through which they may talk: eth0,eth1")
    return parser


def build_report() -> str:
    """What there is, in the form of `horovodrun --check-build`."""
    sections: dict[str, dict[str, bool]] = {
        "Frameworks": {
            "TensorFlow": False,
            "PyTorch": _version("torch") is not None,
            "MXNet": _version("mxnet") is not None,
            "NumPy": True,
        },
        "Controllers": {"MPI": False, "Gloo": False, "Reigen": True},
        "Tensor Operations": {
            "NCCL": False,
            "DDL": False,
            "CCL": False,
            "MPI": _version("mpi4py") is not None,
            "Gloo": False,
            "Shared memory": True,
            "TCP": True,
        },
    }
    lines = [f"Reigen v{__version__}:"]
    for title, entries in sections.items():
        lines += [
            "",
            f"Available {title}:",
            *(f"    [{'X' if here else ' '}] {name}" for name, here in entries.items()),
        ]
    return "\n".join(lines)


def look_around(environ: Mapping[str, str]) -> list[Finding]:
    """Everything that the report says, in its order. Imports no framework."""
    return [*_versions(), *_kernel(), *_machine(), *_frameworks(), *_planes(environ)]


def _versions() -> list[Finding]:
    found = [Finding("versions", "reigen", __version__), Finding("versions", "python", platform.python_version())]
    for name, is_needed in (
        ("numpy", True),
        ("msgspec", True),
        ("cloudpickle", False),
        ("pyyaml", False),
        ("rich", False),
    ):
        version = _version(name)
        found.append(Finding("versions", name, version or "not installed", is_needed and version is None))
    return found


def _frameworks() -> list[Finding]:
    return [Finding("frameworks", name, _version(name) or "not installed") for name in _FRAMEWORKS]


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _kernel() -> list[Finding]:
    found = [
        Finding("kernel", platform.system(), f"{platform.release()} {platform.machine()}", sys.platform != "linux")
    ]
    tries: tuple[tuple[str, str, Callable[[], object]], ...] = (
        ("memfd", "shared memory without a name", _try_memfd),
        ("futex", "waiting in shared memory", _try_futex),
        ("pidfd", "seeing a process end, Linux 5.3", lambda: os.close(os.pidfd_open(os.getpid()))),
    )
    for name, purpose, attempt in tries:
        try:
            attempt()
        except (OSError, AttributeError, ReigenError) as error:
            found.append(Finding("kernel", name, f"missing ({purpose}): {error}", is_problem=True))
        else:
            found.append(Finding("kernel", name, f"available ({purpose})"))
    found.append(Finding("kernel", "readv", _direct_reads()))
    return found


def _direct_reads() -> str:
    """Whether ranks may read each other's memory: asked of a child, which stands in the place of another rank."""
    secret = ctypes.create_string_buffer(os.urandom(16), 16)
    program = "import sys; from reigen.wire.crossmemory import probe; "
    program += "sys.exit(not probe(int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3])))"
    words = [str(os.getpid()), str(ctypes.addressof(secret)), secret.raw.hex()]
    child = subprocess.run([sys.executable, "-c", program, *words], stderr=subprocess.DEVNULL, check=False)
    purpose = "large ordinary arrays in one copy: process_vm_readv"
    return f"available ({purpose})" if child.returncode == 0 else f"refused, staging takes its place ({purpose})"


def _try_memfd() -> None:
    fd = os.memfd_create("reigen-check")
    try:
        os.ftruncate(fd, os.sysconf("SC_PAGE_SIZE"))
    finally:
        os.close(fd)


def _try_futex() -> None:
    import numpy as np

    from reigen.wire.futex import Word

    word = Word(np.zeros(64, np.uint8), 0)
    word.wait(1, 0.0)  # its value is another, so it returns at once
    word.wake()


def _machine() -> list[Finding]:
    from reigen.launch.local import cores_here
    from reigen.wire.segment import available_memory_bytes

    cores = cores_here()
    text = f"{len(cores.cpus)} of {os.cpu_count()} processors may be used"
    if cores.quota is not None:
        text += f", the control group allows the time of {cores.quota:g}"
    available = available_memory_bytes()
    total = 0
    with suppress(OSError, ValueError):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = f"{total / _GIB:.1f} GiB" + ("" if available is None else f", {available / _GIB:.1f} GiB available")
    return [Finding("machine", "processors", text), Finding("machine", "memory", memory)]


def _planes(environ: Mapping[str, str]) -> list[Finding]:
    from reigen.planes.choice import PLANES, choose

    found = [Finding("planes", "there are", ", ".join(PLANES))]
    try:
        choice = choose([2], environ.get("REIGEN_PLANE") or None)
    except ReigenError as error:
        return [*found, Finding("planes", "for -np 2", str(error), is_problem=True)]
    return [*found, Finding("planes", "for -np 2", f"{choice.name}: {choice.reason}"), _cuda_tensors(environ)]


def _cuda_tensors(environ: Mapping[str, str]) -> Finding:
    """Where they are reduced; as far as one can tell without torch, which may bring an NCCL that nobody else finds."""
    from reigen.config import load as load_config
    from reigen.planes import nccl_library

    try:
        wanted = load_config(environ).nccl
    except ReigenError as error:
        return Finding("planes", "CUDA", str(error), is_problem=True)
    nccl, source = nccl_library.load() if wanted else (None, "REIGEN_NCCL=0")
    where = "staged through the host" if nccl is None else "reduced on the GPUs"
    return Finding("planes", "CUDA", f"tensors are {where}: {source}")


def _show(findings: Sequence[Finding]) -> None:
    if not (sys.stdout.isatty() and _version("rich")):
        for finding in findings:
            print(f"{finding.topic:11}{finding.name:12}{finding.value}")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("", "", "", box=None, show_header=False)
    topic = ""
    for finding in findings:
        heading = "" if finding.topic == topic else finding.topic
        topic = finding.topic
        style = "bold red" if finding.is_problem else ""
        table.add_row(Text(heading, "bold"), finding.name, Text(finding.value, style))
    Console().print(table)
