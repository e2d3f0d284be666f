"""Launcher of this process: reads the environment, decides, and gives the reason.

The order is: Reigen's own variables, then the launchers of others (`cluster.launcher_detection`, innermost first), then
alone. A process with signs of an unknown launcher is an error: a job of one, silently, would train on its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from reigen.cluster.launcher_detection import LAUNCHERS, LauncherInfo, explain_unsupported_launcher
from reigen.cluster.topology import Topology
from reigen.errors import ConfigError

#: Variables of the topology, in the order of Topology's fields.
RANK_VARIABLES = (
    "REIGEN_RANK",
    "REIGEN_SIZE",
    "REIGEN_LOCAL_RANK",
    "REIGEN_LOCAL_SIZE",
    "REIGEN_CROSS_RANK",
    "REIGEN_CROSS_SIZE",
)
RENDEZVOUS_VARIABLE = "REIGEN_RENDEZVOUS"
SECRET_VARIABLE = "REIGEN_SECRET"
#: Set to 1 where the launcher writes its rank before each line of a process's output.
PREFIXED_VARIABLE = "REIGEN_PREFIXED"
#: Set to 1 where the launcher holds the scheduler's port against other users (`launch.supervision.spawn.reserve_port`).
PORT_IS_HELD_VARIABLE = "REIGEN_PORT_IS_HELD"
#: Exit code of a parameter server, or its scheduler, when the job is over since its workers are lost: their end is the
#: reason, and the launcher may be about to see it.
WORKERS_LOST_EXIT_CODE = 79
#: Number of a descriptor of the scheduler of parameter servers: a pipe, to which it writes the number of each worker
#: that leaves in good order, a line each, before any other process gets to know. The launcher reads it.
DEPARTURE_FD_VARIABLE = "REIGEN_LEFT_FD"

_SECRET_DIGITS = 64


@dataclass(frozen=True, slots=True)
class JobInfo:
    """Facts that a process knows about its job when it starts.

    Attributes:
        rank: this process's number.
        size: the number of processes.
        rendezvous: ``host:port`` of the launcher's control service; None: there is none, or the job is one process.
        secret: the job's 32 bytes, None where there is no service. Not shown in ``repr``.
        launcher: its name, ``none`` when alone.
        reason: why it was chosen.
        local: this process's number among those of its host, and their number, from the launcher; None: unknown. Which
            ranks share a host, they find out by themselves (`cluster.host_discovery`).
        coordinator: host of rank 0, None where it is not known.
        job_id: distinguishes jobs of one user, the same on all ranks; may be empty.
        by_mpi: started in a way that lets the ranks use MPI.
        port: where rank 0 shall listen, None: any.
    """

    rank: int
    size: int
    rendezvous: str | None
    secret: bytes | None = field(repr=False)
    launcher: str
    reason: str
    local: tuple[int, int] | None = None
    coordinator: str | None = None
    job_id: str = ""
    by_mpi: bool = False
    port: int | None = None

    @property
    def is_on_one_host(self) -> bool:
        """True if the launcher says that all ranks are on one host."""
        return self.local is not None and self.local[1] == self.size


def detect_job(environ: Mapping[str, str]) -> JobInfo:
    """Read the job from ``environ``.

    Raises:
        ConfigError: the launcher's variables are incomplete or contradict each other; all problems are listed.
    """
    if any(name in environ for name in (*RANK_VARIABLES, RENDEZVOUS_VARIABLE)):
        return _from_reigen(environ)
    found = next((found for find in LAUNCHERS if (found := find(environ)) is not None), None)
    if found is None:
        problem = explain_unsupported_launcher(environ)
        if problem is not None:
            raise ConfigError(f"{problem}. Start the job with `reigen run -np N ...`; or unset them, to run it alone.")
        reason = "no launcher's variables are set: a job of one process"
        return JobInfo(0, 1, None, None, "none", reason, (0, 1))
    return _make_job_info(found, _explain_choice(environ, found), environ)


def job_from_arguments(rank: int, size: int, coordinator: str) -> JobInfo:
    """Describe a job by arguments; ``coordinator`` is ``host:port`` where rank 0 can listen, the same on all ranks.

    Raises:
        ConfigError: there is no such rank, or the coordinator has another form.
    """
    host, _, port = coordinator.rpartition(":")
    if not 0 <= rank < size:
        raise ConfigError(f"init(rank={rank}, size={size}): ranks go from 0 to size - 1")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ConfigError(f"init(coordinator={coordinator!r}): it must be host:port")
    host = host.removeprefix("[").removesuffix("]")
    reason = f"init(rank={rank}, size={size}, coordinator={coordinator!r})"
    local = (0, 1) if size == 1 else None
    return JobInfo(rank, size, None, None, "the program itself", reason, local, host, port, port=int(port))


def _explain_choice(environ: Mapping[str, str], chosen: LauncherInfo) -> str:
    """Describe the chosen launcher, and launchers further out with other numbers, which were ignored."""
    ignored = []
    for find in LAUNCHERS:
        try:
            found = find(environ)
        except ConfigError:
            continue
        if found is not None and (found.rank, found.size) != (chosen.rank, chosen.size) and found.size > 1:
            ignored.append(f"{found.launcher} ({found.variables})")
    behind = f"; ignored, as it is further out: {', '.join(ignored)}" if ignored else ""
    return chosen.variables + behind


def _make_job_info(found: LauncherInfo, reason: str, environ: Mapping[str, str]) -> JobInfo:
    return JobInfo(
        found.rank,
        found.size,
        None,
        None,
        found.launcher,
        reason,
        local=found.local if found.size > 1 else (0, 1),
        coordinator=found.coordinator or environ.get("MASTER_ADDR") or None,
        job_id=found.job_id,
        by_mpi=found.by_mpi,
    )


def _from_reigen(environ: Mapping[str, str]) -> JobInfo:
    problems: list[str] = []
    numbers = [_read_number(environ, name, problems) for name in RANK_VARIABLES]
    rendezvous = _read_rendezvous(environ, problems)
    secret = _read_secret(environ, problems)
    topology = Topology.alone()
    if all(number is not None for number in numbers):
        try:
            topology = Topology(*(number for number in numbers if number is not None))
        except ConfigError as error:
            problems.append(str(error))
    _raise_problems(problems)
    reason = f"REIGEN_RANK is set: rank {topology.rank} of {topology.size}"
    local = topology.local_rank, topology.local_size
    return JobInfo(topology.rank, topology.size, rendezvous, secret, "reigen run", reason, local)


def _raise_problems(problems: Sequence[str]) -> None:
    if problems:
        raise ConfigError(
            "the variables that `reigen run` gives to each process are not in order:\n  "
            + "\n  ".join(problems)
            + "\nStart the job with `reigen run -np N ...`; to run one process alone, unset REIGEN_*, HOROVOD_*, RANK "
            "and WORLD_SIZE."
        )


def _read_number(environ: Mapping[str, str], name: str, problems: list[str]) -> int | None:
    text = environ.get(name)
    if text is None:
        problems.append(f"{name} is not set")
        return None
    if not (text.isascii() and text.isdigit()):
        problems.append(f"{name} is {text!r}, not a number")
        return None
    return int(text)


def _read_rendezvous(environ: Mapping[str, str], problems: list[str]) -> str:
    text = environ.get(RENDEZVOUS_VARIABLE)
    if text is None:
        problems.append(f"{RENDEZVOUS_VARIABLE} is not set")
        return ""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        problems.append(f"{RENDEZVOUS_VARIABLE} is {text!r}, not host:port")
    return text


def _read_secret(environ: Mapping[str, str], problems: list[str]) -> bytes:
    text = environ.get(SECRET_VARIABLE)
    if text is None:
        problems.append(f"{SECRET_VARIABLE} is not set")
        return b""
    secret = parse_secret(text)
    if secret is None:
        problems.append(f"{SECRET_VARIABLE} is not {_SECRET_DIGITS} hexadecimal digits")
    return secret or b""


def parse_secret(text: str) -> bytes | None:
    """Return the 32 bytes of 64 hexadecimal digits, None if the text is something else."""
    if len(text) == _SECRET_DIGITS:
        try:
            secret = bytes.fromhex(text)
        except ValueError:
            return None
        return secret if len(secret) == _SECRET_DIGITS // 2 else None  # blanks may be between digits
    return None
