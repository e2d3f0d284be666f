"""Launcher of this process: reads the environment, decides, and gives the reason.

The order is: Reigen's own variables, then the launchers of others (`cluster.launcher_detection`, innermost first), then
alone. A process with signs of an unknown launcher is an error: a job of one, silently, would train on its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from reigen.cluster.launcher_detection import LAUNCHERS, JobInfo, VariableReader, explain_unsupported_launcher
from reigen.cluster.topology import Topology
from reigen.errors import ConfigError

__all__ = [
    "CANDIDATE_VARIABLE",
    "DEATH_FD_VARIABLE",
    "DEPARTURE_FD_VARIABLE",
    "ELASTIC_CHANGE_KEY",
    "ELASTIC_FINISHED_KEY",
    "ELASTIC_LEAVING_KEY",
    "ELASTIC_PAUSE_KEY",
    "ELASTIC_STRAGGLER_KEY",
    "ELASTIC_TIMEOUT_VARIABLE",
    "ELASTIC_VARIABLE",
    "ELASTIC_VIEW_KEY",
    "FIRST_WORKERS_VARIABLE",
    "HANDOVER_VARIABLE",
    "INCARNATION_VARIABLE",
    "MAX_SERVERS_VARIABLE",
    "MAX_SIZE_VARIABLE",
    "MIN_SIZE_VARIABLE",
    "PORT_IS_HELD_VARIABLE",
    "PREFIXED_VARIABLE",
    "RANK_VARIABLES",
    "RENDEZVOUS_VARIABLE",
    "ROSTER_FD_VARIABLE",
    "SECRET_VARIABLE",
    "SERVER_CONTROL_VARIABLE",
    "SLOT_VARIABLE",
    "STRAGGLER_VARIABLE",
    "VOTER_FD_VARIABLE",
    "WARM_SPARES_VARIABLE",
    "WITNESS_VARIABLE",
    "WORKERS_LOST_EXIT_CODE",
    "JobInfo",
    "detect_job",
    "job_from_arguments",
    "parse_secret",
]

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
#: Set to 1 in the processes of an elastic job.
ELASTIC_VARIABLE = "REIGEN_ELASTIC"
#: Set to 1 in those that are started when the job runs already, and have no rank until a view has them.
CANDIDATE_VARIABLE = "REIGEN_ELASTIC_CANDIDATE"
#: Number of a process's place in an elastic job, and how many processes have had it before.
SLOT_VARIABLE = "REIGEN_SLOT"
INCARNATION_VARIABLE = "REIGEN_INCARNATION"
#: Bounds of the number of members; the greatest one is missing where there is none.
MIN_SIZE_VARIABLE = "REIGEN_MIN_SIZE"
MAX_SIZE_VARIABLE = "REIGEN_MAX_SIZE"
#: How many of the greatest number take no samples, and are there to take the places of others; missing: none.
WARM_SPARES_VARIABLE = "REIGEN_WARM_SPARES"
#: Seconds for which there may be fewer.
ELASTIC_TIMEOUT_VARIABLE = "REIGEN_ELASTIC_TIMEOUT"
#: Number of an inherited descriptor: memory of the host's voter, the same for all processes of the job there.
VOTER_FD_VARIABLE = "REIGEN_VOTER_FD"
WITNESS_VARIABLE = "REIGEN_WITNESS"
#: ``FACTOR/STEPS``: who is late for so long is a straggler.
STRAGGLER_VARIABLE = "REIGEN_STRAGGLERS"
#: Keys of the rendezvous by which the members of an elastic job tell the launcher of their view, and of their ends.
ELASTIC_VIEW_KEY = "elastic/view"
ELASTIC_FINISHED_KEY = "elastic/finished"
#: Under this key a process says that it leaves: its slot and incarnation.
ELASTIC_LEAVING_KEY = "elastic/leaving"
#: Under this one rank 0 tells why members have changed, and what that has cost.
ELASTIC_CHANGE_KEY = "elastic/change"
#: Under this one rank 0 names a member that makes all steps slower.
ELASTIC_STRAGGLER_KEY = "elastic/straggler"
#: Under this one a member says that all are about to wait until others have the state.
ELASTIC_PAUSE_KEY = "elastic/pause"
#: Set to 1 where the launcher writes its rank before each line of a process's output.
PREFIXED_VARIABLE = "REIGEN_PREFIXED"
#: Set to 1 where the launcher holds the scheduler's port against other users (`launch.supervision.spawn.reserve_port`).
PORT_IS_HELD_VARIABLE = "REIGEN_PORT_IS_HELD"
#: Exit code of a parameter server, or its scheduler, when the job is over since its workers are lost: their end is the
#: reason, and the launcher may be about to see it.
WORKERS_LOST_EXIT_CODE = 79
#: A descriptor of the scheduler of parameter servers (`cluster.inherited_files`): a pipe, to which it writes the number
#: of each worker that leaves in good order, a line each, before any other process gets to know. The launcher reads it.
#: That of an elastic job also writes which slots' processes have joined, and that the job has begun
#: (`launch.elastic.supervision.parse_worker_report`). Lines that begin with ``holds`` say which keys a server has.
DEPARTURE_FD_VARIABLE = "REIGEN_LEFT_FD"
#: The other way round, in an elastic job: a descriptor of that scheduler, from which it reads slots, and the
#: latest incarnation of each that has ended, a line each, as the launcher has seen it.
DEATH_FD_VARIABLE = "REIGEN_ENDED_FD"
#: A descriptor of that scheduler: a file without a name, which the launcher holds, and in which each
#: scheduler of the job finds what the ones before it have recorded (`kv.membership.roster_record`).
ROSTER_FD_VARIABLE = "REIGEN_ROSTER_FD"
#: For that scheduler, in an elastic job: with how many workers it begins.
FIRST_WORKERS_VARIABLE = "REIGEN_FIRST_WORKERS"
#: In how many processes the servers of an elastic job may run at most, which is how many servers there are. Set where
#: their number may change.
MAX_SERVERS_VARIABLE = "REIGEN_MAX_SERVERS"
#: Number of a descriptor of such a process: a socket, over which the launcher says which servers to run
#: (`launch.elastic.server_placement`).
SERVER_CONTROL_VARIABLE = "REIGEN_SERVER_CONTROL_FD"
#: Directory in memory by which such processes hand over servers.
HANDOVER_VARIABLE = "REIGEN_KV_HANDOVER_DIR"

_SECRET_DIGITS = 64


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
    return replace(
        found,
        reason=found.reason + _explain_ignored(environ, found),
        local=found.local if found.size > 1 else (0, 1),
        coordinator=found.coordinator or environ.get("MASTER_ADDR") or None,
    )


def job_from_arguments(rank: int, size: int, coordinator: str) -> JobInfo:
    """Describe a job by arguments; ``coordinator`` is ``host:port`` where rank 0 can listen, the same on all ranks.

    Raises:
        ConfigError: there is no such rank, or the coordinator has another form.
    """
    if not 0 <= rank < size:
        raise ConfigError(f"init(rank={rank}, size={size}): ranks go from 0 to size - 1")
    if (address := _parse_address(coordinator)) is None:
        raise ConfigError(f"init(coordinator={coordinator!r}): it must be host:port")
    host, port = address
    reason = f"init(rank={rank}, size={size}, coordinator={coordinator!r})"
    local = (0, 1) if size == 1 else None
    return JobInfo(rank, size, None, None, "the program itself", reason, local, host, str(port), port=port)


def _explain_ignored(environ: Mapping[str, str], chosen: JobInfo) -> str:
    """Describe launchers further out with other numbers, which were ignored."""
    ignored = []
    for find in LAUNCHERS:
        try:
            found = find(environ)
        except ConfigError:
            continue
        if found is not None and (found.rank, found.size) != (chosen.rank, chosen.size) and found.size > 1:
            ignored.append(f"{found.launcher} ({found.reason})")
    return f"; ignored, as it is further out: {', '.join(ignored)}" if ignored else ""


def _from_reigen(environ: Mapping[str, str]) -> JobInfo:
    reader = VariableReader(environ, "reigen run")
    numbers = [reader.number(name) for name in RANK_VARIABLES]
    topology = Topology.alone()
    if not reader.problems:
        try:
            topology = Topology(*numbers)
        except ConfigError as error:
            reader.problems.append(str(error))
    rendezvous, secret_text = reader.text(RENDEZVOUS_VARIABLE), reader.text(SECRET_VARIABLE)
    if RENDEZVOUS_VARIABLE in environ and _parse_address(rendezvous) is None:
        reader.problems.append(f"{RENDEZVOUS_VARIABLE} is {rendezvous!r}, not host:port")
    secret = parse_secret(secret_text)
    if SECRET_VARIABLE in environ and secret is None:
        reader.problems.append(f"{SECRET_VARIABLE} is not {_SECRET_DIGITS} hexadecimal digits")
    reader.check(
        "the variables that `reigen run` gives to each process are not in order",
        "; to run one process alone, unset REIGEN_*, HOROVOD_*, RANK and WORLD_SIZE.",
    )
    reason = f"REIGEN_RANK is set: rank {topology.rank} of {topology.size}"
    local = topology.local_rank, topology.local_size
    return JobInfo(topology.rank, topology.size, rendezvous, secret, "reigen run", reason, local)


def _parse_address(text: str) -> tuple[str, int] | None:
    """Split ``host:port`` or ``[host]:port``; None if the text is something else."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        return None
    return host.removeprefix("[").removesuffix("]"), int(port)


def parse_secret(text: str) -> bytes | None:
    """Return the 32 bytes of 64 hexadecimal digits, None if the text is something else."""
    return bytes.fromhex(text) if re.fullmatch(f"[0-9a-fA-F]{{{_SECRET_DIGITS}}}", text) else None
