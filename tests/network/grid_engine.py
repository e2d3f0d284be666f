"""A real Grid Engine cluster on stand-in machines: the qmaster on the first, an execution daemon on each."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.lab import Host, HostProcess, Hosts
from tests.network.waiting import wait_for

_PROGRAMS = ("sge_qmaster", "sge_execd", "qsub", "qrsh", "qconf", "qstat", "qdel")
_ROOT = "var/lib/gridengine"
_COMMON = f"{_ROOT}/default/common"
_QUEUE = {
    "qname": "all.q",
    "hostlist": "@allhosts",
    "seq_no": "0",
    "load_thresholds": "NONE",  # else nothing starts on a busy computer
    "suspend_thresholds": "NONE",
    "nsuspend": "1",
    "suspend_interval": "00:05:00",
    "priority": "0",
    "min_cpu_interval": "00:05:00",
    "processors": "UNDEFINED",
    "qtype": "BATCH INTERACTIVE",
    "ckpt_list": "NONE",
    "pe_list": "filling dealing pairs loose",
    "rerun": "FALSE",
    "slots": "4",
    "tmpdir": "/tmp",
    "shell": "/bin/sh",
    "prolog": "NONE",
    "epilog": "NONE",
    "shell_start_mode": "unix_behavior",
    "starter_method": "NONE",
    "suspend_method": "NONE",
    "resume_method": "NONE",
    "terminate_method": "NONE",
    "notify": "00:00:05",
    "owner_list": "NONE",
    "user_lists": "NONE",
    "xuser_lists": "NONE",
    "subordinate_list": "NONE",
    "complex_values": "NONE",
    "projects": "NONE",
    "xprojects": "NONE",
    "calendar": "NONE",
    "initial_state": "default",
    **{
        f"{kind}_{what}": "INFINITY"
        for what in ("rt", "cpu", "fsize", "data", "stack", "core", "rss", "vmem")
        for kind in ("s", "h")
    },
}
#: Name of each parallel environment, its allocation rule, and whether it controls slaves.
_ENVIRONMENTS = (
    ("filling", "$fill_up", "TRUE", "TRUE"),
    ("dealing", "$round_robin", "TRUE", "FALSE"),
    ("pairs", "2", "TRUE", "FALSE"),
    ("loose", "$fill_up", "FALSE", "TRUE"),
)
_ENVIRONMENT = {
    "slots": "999",
    "user_lists": "NONE",
    "xuser_lists": "NONE",
    "start_proc_args": "NONE",
    "stop_proc_args": "NONE",
    "urgency_slots": "min",
    "accounting_summary": "TRUE",
    "qsort_args": "NONE",
}


def why_no_grid_engine() -> str:
    """Why there can be no cluster here; empty if there can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [program for program in _PROGRAMS if shutil.which(program, path=path) is None]
    packages = "gridengine-master gridengine-exec gridengine-client of Debian"
    return f"not installed: {', '.join(missing)} ({packages})" if missing else ""


class GridEngine:
    """The cluster; it ends with the machines.

    Args:
        hosts: its execution hosts, with four slots each.
        directory: one that all of them share.
    """

    def __init__(self, hosts: Hosts, directory: Path) -> None:
        self.hosts, self.directory = hosts, directory
        self._master = hosts[0]
        for host in hosts:
            (host.root / _COMMON / "act_qmaster").write_text(f"{self._master.name}\n")
        self._daemons = [self._daemon(self._master, "sge_qmaster")]
        self._master.wait_until_listening(6444)
        self._configure()
        for host in hosts:
            self._daemons.append(self._daemon(host, "sge_execd"))
        wait_for(lambda: self._num_hosts() == len(hosts), "all hosts to report")

    def start(self, *command: str, env: dict[str, str] | None = None, cwd: str | Path = "/") -> HostProcess:
        """Starts a command on the first host."""
        return self._master.start(command, env=env, cwd=cwd)

    def run(
        self, *command: str, env: dict[str, str] | None = None, cwd: str | Path = "/", timeout: float = 60.0
    ) -> tuple[int, str, str]:
        """Runs a command on the first host to its end: exit code, stdout, stderr."""
        with contextlib.closing(self.start(*command, env=env, cwd=cwd)) as process:
            return process.wait(timeout), *process.output()

    def submit(self, name: str, lines: Sequence[str], *options: str, cwd: Path | None = None) -> tuple[str, Path]:
        """Submits a script of these lines; returns the job's number, and the file of its output."""
        script, output = self.directory / f"{name}.sh", self.directory / f"{name}.out"
        script.write_text("\n".join(["#!/bin/sh", *lines, ""]))
        arguments = ("-terse", "-cwd", "-j", "y", "-o", str(output), *options, str(script))
        code, out, err = self.run("qsub", *arguments, cwd=cwd or self.directory)
        assert code == 0, err
        return out.strip().partition(".")[0], output

    @contextlib.contextmanager
    def allocation(self, *options: str) -> Iterator[tuple[Host, dict[str, str]]]:
        """A job that only waits; yields its first host, and the variables that its script has there."""
        shown = self.directory / "allocation"
        shown.unlink(missing_ok=True)
        lines = ("cp $PE_HOSTFILE hosts", "env -0 >allocation.new; mv allocation.new allocation", "exec sleep 600")
        job_id, _ = self.submit("allocation", lines, *options)
        try:
            wait_for(shown.exists, "the job begins")
            pairs = dict(line.split("=", 1) for line in shown.read_text(errors="replace").split("\0") if line)
            own = {name: text for name, text in pairs.items() if name.startswith(_OF_A_JOB)}
            own["PE_HOSTFILE"] = str(self.directory / "hosts")  # that of Grid Engine is on the first host alone
            yield next(host for host in self.hosts if host.name == pairs["HOSTNAME"]), own
        finally:
            self.run("qdel", job_id)
            wait_for(lambda: self.num_jobs() == 0, "the job is gone")

    def num_jobs(self) -> int:
        """How many jobs there are, of any state."""
        code, out, _ = self.run("qstat", "-u", "*")
        return len(out.splitlines()[2:]) if code == 0 else -1

    def _configure(self) -> None:
        names = [host.name for host in self.hosts]
        for name in names:
            self._qconf("-ah", name)
            self._qconf("-as", name)
        self._set("-Msconf", "sconf", "schedule_interval 0:0:1", "flush_submit_sec 1", "flush_finish_sec 1")
        self._set("-Mconf", "global", "min_uid 0", "min_gid 0", "load_report_time 00:00:02", "reporting_params NONE")
        for name in names:
            self._add("-Ae", {"hostname": name, **dict.fromkeys(_HOST, "NONE")})
        self._add("-Ahgrp", {"group_name": "@allhosts", "hostlist": " ".join(names)})
        for name, rule, controls, first in _ENVIRONMENTS:
            own = {"pe_name": name, "allocation_rule": rule, "control_slaves": controls, "job_is_first_task": first}
            self._add("-Ap", own | _ENVIRONMENT)
        self._add("-Aq", _QUEUE)

    def _qconf(self, *arguments: str) -> str:
        code, out, err = self.run("qconf", *arguments)
        assert code == 0, f"qconf {arguments}: {out} {err}"
        return out

    def _add(self, option: str, lines: dict[str, str]) -> None:
        file = self.directory / f"qconf{option}"
        file.write_text("".join(f"{name} {text}\n" for name, text in lines.items()))
        self._qconf(option, str(file))

    def _set(self, option: str, name: str, *lines: str) -> None:
        """Changes lines of the configuration of that name."""
        changed = {line.split()[0]: line for line in lines}
        shown = self._qconf("-ssconf" if name == "sconf" else "-sconf").splitlines()
        kept = [line for line in shown if line and not line.startswith("#") and line.split()[0] not in changed]
        file = self.directory / name
        file.write_text("\n".join([*kept, *changed.values(), ""]))
        self._qconf(option, str(file))

    def _num_hosts(self) -> int:
        code, out, _ = self.run("qstat", "-f")
        lines = [line.split() for line in out.splitlines() if line.startswith("all.q@")]
        return sum(len(words) == 5 for words in lines) if code == 0 else 0

    def _daemon(self, host: Host, name: str) -> HostProcess:
        return host.start([f"/usr/sbin/{name}"], env={"SGE_ND": "1"})


_OF_A_JOB = ("SGE_", "JOB_", "PE", "NSLOTS", "NHOSTS", "NQUEUES", "QUEUE", "TMP", "RESTARTED")
_HOST = (
    "load_scaling",
    "complex_values",
    "user_lists",
    "xuser_lists",
    "projects",
    "xprojects",
    "usage_scaling",
    "report_variables",
)
