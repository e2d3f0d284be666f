"""`reigen check`: installed libraries, whether jobs can run here, and with which backend."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from typing import NamedTuple

from reigen._version import __version__
from reigen.api.frameworks import FRAMEWORKS
from reigen.cli.check_elastic import add_elastic_options, check_elastic
from reigen.cli.run_options import add_ssh_options, parse_ssh_options
from reigen.cli.tables import print_table
from reigen.errors import ConfigError, LaunchError, ReigenError
from reigen.launch.hosts import resolve_hosts
from reigen.launch.nodes.sources import NodeJob

#: Distributions in which a framework may be installed, where they are not called like it.
_DISTRIBUTIONS = {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tf-nightly", "tf-nightly-cpu"),
    "tf_keras": ("tf_keras", "tf-keras-nightly"),
}
_GIB = 1 << 30


class CheckResult(NamedTuple):
    """Line of the report: a finding under a heading.

    ``is_problem``: no job can run here because of it.
    """

    topic: str
    name: str
    value: str
    is_problem: bool = False


def main(arguments: Sequence[str]) -> int:
    """Print the report; returns 0 when a job can run here, or on the hosts that were named, else 1."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if (chosen.report or chosen.json) and (chosen.elastic or chosen.hosts or chosen.hostfile):
        parser.error("--report and --json are about this host alone: leave --hosts, --hostfile and --elastic out")
    if chosen.elastic:
        try:
            return check_elastic(chosen)
        except (ConfigError, LaunchError) as error:
            parser.error(str(error))
    if chosen.hosts is not None or chosen.hostfile is not None:
        from reigen.cli.check_hosts import check_hosts, ssh_run_options

        try:
            hosts = resolve_hosts(chosen.hosts, chosen.hostfile, 1)
            return check_hosts(hosts, parse_ssh_options(chosen), ssh_run_options(chosen))
        except (ConfigError, LaunchError) as error:
            parser.error(str(error))
    findings = collect_report(os.environ) if chosen.report else collect_results(os.environ)
    problems = [finding for finding in findings if finding.is_problem]
    if chosen.json:
        print(format_json(findings))
        return 1 if problems else 0
    if chosen.report:
        print(format_report(findings))
        return 1 if problems else 0
    print_table(
        [],
        [finding[:3] for finding in findings],
        [number for number, finding in enumerate(findings) if finding.is_problem],
    )
    for finding in problems:
        print(f"problem: {finding.name}: {finding.value}")
    print("no job can run here" if problems else "a job can run here")
    return 1 if problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="reigen check",
        description="Show what is installed here, and whether and how jobs can run; or, with --hosts, whether "
        "these hosts can run jobs together, and how fast they talk to each other.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--report",
        action="store_true",
        help="print everything that an issue should contain, without secrets, ready to paste",
    )
    add("--json", action="store_true", help="print it as one JSON document")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("-H", "--hosts", metavar="HOSTS", help="check these hosts: h1,h2")
    which.add_argument("-hostfile", "--hostfile", metavar="FILE", help="check the hosts in this file, one per line")
    add_ssh_options(parser.add_argument)
    parser.add_argument("--network-interfaces", metavar="X", help="interfaces that they may use: eth0,eth1")
    add_elastic_options(parser)
    return parser


def collect_report(environ: Mapping[str, str]) -> list[CheckResult]:
    """Collect the lines of `reigen check --report`, without secrets. Imports no framework but for CUDA tensors."""
    from reigen.cli.issue_report import environment_facts, redact

    home = environ.get("HOME", "")
    facts = [CheckResult(*fact) for fact in environment_facts(environ)]
    return [found._replace(value=redact(found.value, home)) for found in (*collect_results(environ), *facts)]


def format_report(findings: Sequence[CheckResult]) -> str:
    """Format findings as a block of Markdown."""
    width = max(len(f"{finding.topic}: {finding.name}") for finding in findings)
    lines = []
    for finding in findings:
        value = " ".join(finding.value.split()).replace("`", "'")
        problem = "PROBLEM: " if finding.is_problem else ""
        lines.append(f"{finding.topic}: {finding.name}".ljust(width + 2) + problem + value)
    verdict = "no job can run here" if any(finding.is_problem for finding in findings) else "a job can run here"
    return "\n".join(["```text", "reigen check --report", *lines, verdict, "```"])


def format_json(findings: Sequence[CheckResult]) -> str:
    """Format findings as a JSON document."""
    entries = [
        {"topic": each.topic, "name": each.name, "value": each.value, "problem": each.is_problem} for each in findings
    ]
    can_run = not any(each.is_problem for each in findings)
    return json.dumps({"reigen": __version__, "can_run": can_run, "findings": entries}, indent=1)


def build_report() -> str:
    """Format the report as `horovodrun --check-build` does."""
    sections: dict[str, dict[str, bool]] = {
        "Frameworks": {
            "TensorFlow": _framework_version("tensorflow") is not None,
            "PyTorch": _framework_version("torch") is not None,
            "MXNet": _framework_version("mxnet") is not None,
            "Keras": _framework_version("keras") is not None,
            "JAX": _framework_version("jax") is not None,
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
        lines += ["", f"Available {title}:"]
        lines += [f"    [{'X' if exists else ' '}] {name}" for name, exists in entries.items()]
    return "\n".join(lines)


def collect_results(environ: Mapping[str, str]) -> list[CheckResult]:
    """Collect the lines of the report, in order. Imports no framework."""
    names = (*FRAMEWORKS, "keras", "tf_keras")
    frameworks = (CheckResult("frameworks", name, _framework_version(name) or "not installed") for name in names)
    return [*_versions(), *_kernel(), *_host(), *_launcher(environ), *_ray(environ), *frameworks, *_backends(environ)]


def _versions() -> list[CheckResult]:
    found = [
        CheckResult("versions", "reigen", __version__),
        CheckResult("versions", "python", platform.python_version()),
    ]
    needs = {"numpy": True, "msgspec": True, "cloudpickle": False, "pyyaml": False, "rich": False}
    for name, is_needed in needs.items():
        version = _version(name)
        found.append(CheckResult("versions", name, version or "not installed", is_needed and version is None))
    return found


def _framework_version(name: str) -> str | None:
    return next(filter(None, map(_version, _DISTRIBUTIONS.get(name, (name,)))), None)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _kernel() -> list[CheckResult]:
    found = [
        CheckResult("kernel", platform.system(), f"{platform.release()} {platform.machine()}", sys.platform != "linux")
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
            found.append(CheckResult("kernel", name, f"missing ({purpose}): {error}", is_problem=True))
        else:
            found.append(CheckResult("kernel", name, f"available ({purpose})"))
    found.append(CheckResult("kernel", "readv", _direct_reads()))
    return found


def _direct_reads() -> str:
    """Find out whether ranks may read each other's memory, by a child in the place of another rank."""
    secret = ctypes.create_string_buffer(os.urandom(16), 16)
    program = "import sys; from reigen.net.process_memory import can_read_process_memory; "
    program += "sys.exit(not can_read_process_memory(int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3])))"
    arguments = [str(os.getpid()), str(ctypes.addressof(secret)), secret.raw.hex()]
    child = subprocess.run([sys.executable, "-c", program, *arguments], stderr=subprocess.DEVNULL, check=False)
    purpose = "large ordinary arrays of more than two ranks: process_vm_readv"
    return f"available ({purpose})" if child.returncode == 0 else f"refused, staging takes its place ({purpose})"


def _try_memfd() -> None:
    fd = os.memfd_create("reigen-check")
    try:
        os.ftruncate(fd, os.sysconf("SC_PAGE_SIZE"))
    finally:
        os.close(fd)


def _try_futex() -> None:
    import numpy as np

    from reigen.net.futex import FutexWord

    futex = FutexWord(np.zeros(64, np.uint8), 0)
    futex.wait(1, 0.0)  # its value is another, so it returns at once
    futex.wake()


def _host() -> list[CheckResult]:
    from reigen.launch.local_plan import detect_cpus
    from reigen.resources.memory import available_memory

    cores = detect_cpus()
    text = f"{len(cores.cpus)} of {os.cpu_count()} processors may be used"
    if cores.quota is not None:
        text += f", the control group allows the time of {cores.quota:g}"
    available = available_memory()
    total = 0
    with suppress(OSError, ValueError):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = f"{total / _GIB:.1f} GiB"
    if available.num_bytes is not None:
        memory += f", {available.num_bytes / _GIB:.1f} GiB available {available.limit}".rstrip()
    return [CheckResult("host", "processors", text), CheckResult("host", "memory", memory)]


def _launcher(environ: Mapping[str, str]) -> list[CheckResult]:
    """Find out in which engine this process is, how `reigen run` would start ranks there, and why not."""
    from reigen.launch.engines import ELASTIC_JOBS, check_engine, choose_launcher_in_engine, detect_engine
    from reigen.launch.nodes.launcher import count_slots, read_file
    from reigen.launch.nodes.sources import find_node_job

    try:
        job, choice = detect_engine(environ), choose_launcher_in_engine(None, environ)
    except ConfigError as error:  # the command itself can run as a rank
        return [CheckResult("launcher", "reigen run", str(error))]
    if job is None:
        try:
            node = find_node_job(environ, read_file)
        except ConfigError as error:  # this host alone can be used all the same
            return [CheckResult("launcher", "--nodes-from-env", str(error))]
        if node is not None:
            slots = count_slots(node, environ, None)
            role = "starts the job" if node.index == 0 else f"dials {node.leader}"
            summary = f"node {node.index} of {node.size} {role}, with {slots} ranks of -np auto"
            return [
                CheckResult("launcher", "engine", node.source),
                CheckResult("launcher", "--nodes-from-env", f"{summary}; {_secret_of_nodes(environ, node)}"),
                CheckResult("launcher", "elastic jobs", ELASTIC_JOBS["nodes"]),
            ]
        return [
            CheckResult("launcher", "engine", "none: `reigen run` uses this host, and others by ssh (-H)"),
            CheckResult("launcher", "elastic jobs", ELASTIC_JOBS[choice.launcher]),
        ]
    found = [CheckResult("launcher", "engine", job.description)]
    try:
        remark = check_engine(choice.launcher, environ) if choice.uses_hosts_of_engine else ""
    except ConfigError as error:
        return [*found, CheckResult("launcher", "reigen run", str(error), is_problem=True)]
    listed = ",".join(f"{host.name}:{host.slots}" for host in job.hosts)
    way = f"by --launcher {choice.launcher}" if choice.uses_hosts_of_engine else "without it: there is one host"
    found += [CheckResult("launcher", "remark", remark)] if remark else []
    elastic = ELASTIC_JOBS[choice.launcher if choice.uses_hosts_of_engine else job.launcher]
    return [
        *found,
        CheckResult("launcher", "reigen run", f"{job.num_slots} ranks on {listed}, {way}"),
        CheckResult("launcher", "elastic jobs", elastic),
    ]


def _ray(environ: Mapping[str, str]) -> list[CheckResult]:
    """Find out whether this process is in a cluster of Ray's, or has been given one; empty where there is no sign."""
    name = next((name for name in ("RAY_JOB_ID", "RAY_ADDRESS") if environ.get(name)), None)
    if name is None:
        return []
    version = _version("ray")
    way = (
        "reigen.ray starts ranks there, also of elastic jobs (min_workers)"
        if version
        else "reigen.ray would start ranks there: pip install 'reigen[ray]'"
    )
    evidence = f"{name}={environ[name]}, ray {version or 'is not installed here'}"
    return [CheckResult("launcher", "Ray", f"{evidence}; {way}, `reigen run` does not (docs/ray.md)")]


def _secret_of_nodes(environ: Mapping[str, str], job: NodeJob) -> str:
    """Describe the source of the nodes' secret, or its absence."""
    from reigen.launch.nodes.launcher import find_secret

    if job.size == 1:
        return "a secret is not needed"
    try:
        return find_secret(job, environ)[1]
    except ConfigError as error:
        return str(error)


def _backends(environ: Mapping[str, str]) -> list[CheckResult]:
    from reigen.backends.selection import BACKENDS, choose_backends
    from reigen.config import load_config

    found = [CheckResult("backends", "there are", ", ".join(BACKENDS))]
    try:
        config = load_config(environ)
        choice = choose_backends([2], config.backend)
    except ReigenError as error:
        return [*found, CheckResult("backends", "for -np 2", str(error), is_problem=True)]
    return [*found, CheckResult("backends", "for -np 2", f"{choice.name}: {choice.reason}"), _cuda_tensors(config.nccl)]


def _cuda_tensors(use_nccl: bool) -> CheckResult:
    library, reason = "", "REIGEN_NCCL=0"
    if use_nccl:
        try:
            from reigen.torch.cuda_tensors import nccl_library

            library, reason = nccl_library()
        except (ImportError, OSError) as error:  # OSError: a library that torch needs is missing
            reason = f"there is no torch ({error})"
    where = "reduced on the GPUs" if library else "staged through the host"
    return CheckResult("backends", "CUDA", f"tensors are {where}: {reason}")
