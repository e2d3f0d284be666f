"""Who started this process: reads the environment, decides, and gives the reason.

The order is: Reigen's own variables, then launchers that cannot start Reigen jobs yet (an error, never a silent job of
one), then alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from reigen.cluster.topology import Topology
from reigen.errors import ConfigError

#: Variables of the place in the job, in the order of Topology's fields.
PLACE_VARIABLES = (
    "REIGEN_RANK",
    "REIGEN_SIZE",
    "REIGEN_LOCAL_RANK",
    "REIGEN_LOCAL_SIZE",
    "REIGEN_CROSS_RANK",
    "REIGEN_CROSS_SIZE",
)
RENDEZVOUS_VARIABLE = "REIGEN_RENDEZVOUS"
SECRET_VARIABLE = "REIGEN_SECRET"
#: Set to 1 where the launcher writes its rank before each line that a process prints.
PREFIXED_VARIABLE = "REIGEN_PREFIXED"

_SECRET_DIGITS = 64

#: Launchers that are recognised: name, the variable of the size, the variable of the rank. Slurm's are those of the
#: *step*: SLURM_NTASKS is also set in a batch script, which is one process however many tasks were reserved.
_OTHER_LAUNCHERS = (
    ("torchrun", "WORLD_SIZE", "RANK"),
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpiexec of MPICH or Intel MPI", "PMI_SIZE", "PMI_RANK"),
    ("srun (a Slurm step)", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    ("horovodrun", "HOROVOD_SIZE", "HOROVOD_RANK"),
)


@dataclass(frozen=True, slots=True)
class Job:
    """What a process knows about its job when it starts.

    Attributes:
        topology: its place.
        rendezvous: ``host:port`` of the launcher's rendezvous service, None when alone.
        secret: the job's 32 bytes, None when alone. Not shown in ``repr``.
        launcher: who started it: ``reigen run`` or ``none``.
        reason: how that was found out, in words.
    """

    topology: Topology
    rendezvous: str | None
    secret: bytes | None = field(repr=False)
    launcher: str
    reason: str


def detect(environ: Mapping[str, str]) -> Job:
    """The job that ``environ`` speaks of.

    Raises:
        ConfigError: Reigen's variables are incomplete or contradict each other (all problems are listed), or another
            launcher started several processes.
    """
    names = (*PLACE_VARIABLES, RENDEZVOUS_VARIABLE, SECRET_VARIABLE)
    if any(name in environ for name in names):
        return _from_reigen(environ)
    for launcher, size_variable, rank_variable in _OTHER_LAUNCHERS:
        _refuse(environ, launcher, size_variable, rank_variable)
    reason = "no launcher's variables are set: a job of one process"
    return Job(Topology.alone(), None, None, "none", reason)


def _from_reigen(environ: Mapping[str, str]) -> Job:
    problems: list[str] = []
    numbers = [_number(environ, name, problems) for name in PLACE_VARIABLES]
    rendezvous = _rendezvous(environ, problems)
    secret = _secret(environ, problems)
    topology = Topology.alone()
    if all(number is not None for number in numbers):
        try:
            topology = Topology(*(number for number in numbers if number is not None))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(
            "the variables that `reigen run` gives to each process are not in order:\n  "
            + "\n  ".join(problems)
            + "\nStart the job with `reigen run -np N ...`; to run one process alone, unset REIGEN_*, HOROVOD_*, RANK "
            "and WORLD_SIZE."
        )
    return Job(
        topology, rendezvous, secret, "reigen run", f"REIGEN_RANK is set: rank {topology.rank} of {topology.size}"
    )


def _number(environ: Mapping[str, str], name: str, problems: list[str]) -> int | None:
    text = environ.get(name)
    if text is None:
        problems.append(f"{name} is not set")
        return None
    if not (text.isascii() and text.isdigit()):
        problems.append(f"{name} is {text!r}, not a number")
        return None
    return int(text)


def _rendezvous(environ: Mapping[str, str], problems: list[str]) -> str:
    text = environ.get(RENDEZVOUS_VARIABLE)
    if text is None:
        problems.append(f"{RENDEZVOUS_VARIABLE} is not set")
        return ""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        problems.append(f"{RENDEZVOUS_VARIABLE} is {text!r}, not host:port")
    return text


def _secret(environ: Mapping[str, str], problems: list[str]) -> bytes:
    text = environ.get(SECRET_VARIABLE)
    if text is None:
        problems.append(f"{SECRET_VARIABLE} is not set")
        return b""
    if len(text) == _SECRET_DIGITS:
        try:
            return bytes.fromhex(text)
        except ValueError:
            pass
    problems.append(f"{SECRET_VARIABLE} is not {_SECRET_DIGITS} hexadecimal digits")
    return b""


def _refuse(environ: Mapping[str, str], launcher: str, size_variable: str, rank_variable: str) -> None:
    size, rank = environ.get(size_variable), environ.get(rank_variable)
    if size is None or rank is None or size.strip() == "1":
        return
    raise ConfigError(
        f"this process was started by {launcher} ({rank_variable}={rank}, {size_variable}={size}), which Reigen cannot "
        "join yet. So far jobs are started with `reigen run -np N command ...`."
    )
