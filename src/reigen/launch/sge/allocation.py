"""Grid Engine's variables of a job, and its list of hosts."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from reigen.errors import ConfigError
from reigen.launch.batch import BatchJob, read_host_file
from reigen.launch.engines import EngineJob
from reigen.launch.hosts import HostInfo

_ADVICE = "qsub -pe PE N"


def find_allocation(environ: Mapping[str, str]) -> BatchJob | None:
    """Read the parallel job that this process is in; None: it is in none.

    Raises:
        ConfigError: the list of hosts cannot be read, or has another form.
    """
    job_id, file = environ.get("JOB_ID"), environ.get("PE_HOSTFILE")
    if not job_id or not file or not environ.get("NSLOTS"):
        return None
    text = read_host_file(file, f"PE_HOSTFILE of Grid Engine job {job_id}")
    return BatchJob("sge", "Grid Engine", job_id, "JOB_ID", parse_pe_hostfile(text, file), _ADVICE, _remark(environ))


def find_engine_job(environ: Mapping[str, str]) -> EngineJob | None:
    """Find Grid Engine's job for `launch.engines`, one without a parallel environment, too: it has this host alone."""
    job = find_allocation(environ)
    if job is not None:
        return job.engine_job
    if not is_serial_job(environ):
        return None
    description = f"Grid Engine job {environ['JOB_ID']} (JOB_ID), not a parallel one: submit it with -pe for more slots"
    return EngineJob("sge", description, (HostInfo(socket.gethostname(), 1),))


def is_serial_job(environ: Mapping[str, str]) -> bool:
    """Return whether this is a job of Grid Engine's that is not parallel."""
    return "PE_HOSTFILE" not in environ and all(environ.get(name) for name in ("JOB_ID", "SGE_TASK_ID", "QUEUE"))


def parse_pe_hostfile(text: str, file: str = "PE_HOSTFILE") -> tuple[HostInfo, ...]:
    r"""Parse lines of ``host slots queue processors``; slots of a host in several queues are added.

    Raises:
        ConfigError: a line has another form (with its number), or there is none.

    Example:
        >>> parse_pe_hostfile("h2 3 all.q@h2 UNDEFINED\nh1 1 all.q@h1 UNDEFINED\nh2 1 big.q@h2 UNDEFINED\n")
        (HostInfo(name='h2', slots=4), HostInfo(name='h1', slots=1))
    """
    slots: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words:
            continue
        if len(words) < 2 or not (words[1].isascii() and words[1].isdigit()) or int(words[1]) < 1:
            raise ConfigError(f"line {number} of {file} is {line!r}, not a host and its number of slots")
        slots[words[0]] = slots.get(words[0], 0) + int(words[1])
    if not slots:
        raise ConfigError(f"{file} names no host")
    return tuple(HostInfo(name, num) for name, num in slots.items())


def _remark(environ: Mapping[str, str]) -> str:
    task, restarted = environ.get("SGE_TASK_ID", "undefined"), environ.get("RESTARTED", "0")
    facts = [f"in the parallel environment {environ['PE']}"] if environ.get("PE") else []
    facts += [f"task {task} of an array, each of whose tasks is a job of its own"] if task != "undefined" else []
    facts += ["started again"] if restarted not in {"", "0"} else []
    return ", ".join(facts)
