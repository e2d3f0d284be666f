"""Role of this process in a job with parameter servers, from the environment, with the reason.

The variables are MXNet's, regardless of what sets them: `reigen run -s`, `reigen launch`, MXNet's launchers or a
person. DMLC_ROLE is ``worker``, ``server`` or ``scheduler``; DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT say where the
scheduler is, DMLC_NUM_WORKER and DMLC_NUM_SERVER how many there are, DMLC_TASK_ID which one this is, DMLC_NODE_HOST,
DMLC_INTERFACE where it is to be found, DMLC_NUM_ATTEMPT how often it has been started before.

The job's secret is made from REIGEN_SECRET or REIGEN_SECRET_FILE. Where neither is set, the scheduler makes one and
hands it to processes of its user on its host, in its container (`kv.membership.discovery`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from reigen.cluster.bootstrap.job_credentials import JobCredentials, derive_job_secret
from reigen.cluster.environ import (
    ELASTIC_TIMEOUT_VARIABLE,
    FIRST_WORKERS_VARIABLE,
    INCARNATION_VARIABLE,
    MAX_SERVERS_VARIABLE,
    PORT_IS_HELD_VARIABLE,
    RENDEZVOUS_VARIABLE,
    SLOT_VARIABLE,
    detect_job,
)
from reigen.cluster.membership.members import LossPolicy
from reigen.config import Config
from reigen.errors import ConfigError

if TYPE_CHECKING:  # OpenSSL is loaded by those who want TLS
    from reigen.net.tls import TlsContext

KVRole = Literal["worker", "server", "scheduler"]
KV_ROLES: tuple[KVRole, ...] = ("worker", "server", "scheduler")

_VARIABLES = ("DMLC_ROLE", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER")
_MOST_NODES = 1 << 16


@dataclass(frozen=True)
class ProcessConfig:
    """Configuration of a process in a job with parameter servers.

    Attributes:
        number: which one, None where it is not set: then in the order of arrival.
        num_workers, num_servers: how many the job has.
        scheduler: host (name or address) and port.
        secret: the job's 32 bytes; None: the scheduler hands one over on its host. Not shown in ``repr``.
        node_host: name or address by which this host wants to be found (DMLC_NODE_HOST), None for none in particular.
        reason: how all that was found out.
        config: the knobs.
        job: its number, the same for every scheduler that it has; 0: the first one chooses it. It follows from the
            secret where Reigen's launchers made that; one that a user has set may be that of several jobs.
        is_restart: the launcher has started this process before (DMLC_NUM_ATTEMPT).
        port_is_held: a launcher of Reigen's holds the scheduler's port against other users.
        first_workers: with how many workers an elastic job begins; ``num_workers`` is how many it may have.
        slot: of a worker of an elastic job: the launcher's number for its place, and how often that was used before.
        elastic_timeout_seconds: how long a scheduler waits for workers when all of an elastic job are lost.
        servers_move: the servers of an elastic job move from process to process (`kv.server.server_process`).
    """

    role: KVRole
    number: int | None
    num_workers: int
    num_servers: int
    scheduler: tuple[str, int]
    secret: bytes | None = field(repr=False)
    node_host: str | None
    reason: str
    config: Config
    job: int = 0
    is_restart: bool = False
    port_is_held: bool = False
    first_workers: int = 1
    slot: tuple[int, int] | None = None
    elastic_timeout_seconds: float | None = None
    servers_move: bool = False

    @property
    def is_elastic(self) -> bool:
        """Return whether workers come and go."""
        return self.config.kv_on_worker_loss == LossPolicy.ELASTIC.value

    @property
    def name(self) -> str:
        """For people: ``server 1``, ``worker``."""
        return self.role if self.number is None else f"{self.role} {self.number}"

    def create_tls_context(self) -> TlsContext | None:
        """Create what encrypts all of this process's connections, if they are to be."""
        if not self.config.tls:
            return None
        from reigen.net.tls import TlsContext

        return TlsContext()


def read_process_config(environ: Mapping[str, str], config: Config, role: KVRole | None = None) -> ProcessConfig:
    """Read the configuration of this process from the environment.

    ``config`` are the knobs, from the same environment; ``role`` is what it is in any case (`reigen server`).

    Raises:
        ConfigError: nothing tells of servers; or what does is incomplete or makes no sense: all problems are listed.
    """
    if not any(environ.get(name) for name in _VARIABLES):
        raise ConfigError(
            "a store of type dist_* needs servers, and nothing tells of any. Start the job with them: `reigen run -np "
            "4 -s 2 COMMAND`; or by hand: `reigen scheduler`, `reigen server` and the workers, with "
            f"{', '.join(_VARIABLES[1:])} set for all of them and DMLC_ROLE for the workers (docs/kv-launch.md). "
            "Without servers there are the types local, device and ring"
        )
    problems: list[str] = []
    role = role or _parse_role(environ, problems)
    host = environ.get("DMLC_PS_ROOT_URI", "").removeprefix("[").removesuffix("]")
    if not host:
        problems.append("DMLC_PS_ROOT_URI is not set: name or address of the host where the scheduler runs")
    port = _parse_count(environ, "DMLC_PS_ROOT_PORT", problems)
    num_workers = _parse_count(environ, "DMLC_NUM_WORKER", problems)
    num_servers = _parse_count(environ, "DMLC_NUM_SERVER", problems)
    number, origin = _task_number(environ, role, num_workers, num_servers)
    if role == "worker" and config.kv_on_worker_loss == LossPolicy.ELASTIC.value:
        number = None  # the scheduler knows which places are free
    if role == "server" and environ.get(MAX_SERVERS_VARIABLE):
        number = None  # it is that of a process, which has several servers
    which = _parse_number(number, origin, num_servers if role == "server" else num_workers, problems)
    interval, timeout = config.kv_heartbeat_seconds, config.kv_heartbeat_timeout_seconds
    if 0 < timeout <= interval:
        problems.append(
            f"PS_HEARTBEAT_TIMEOUT is {timeout:g}: it must be longer than PS_HEARTBEAT_INTERVAL, {interval:g}"
        )
    if problems:
        raise ConfigError("the variables that say what a process is are not in order:\n  " + "\n  ".join(problems))
    given = JobCredentials.of(environ).secret
    job = 0
    if given is not None and RENDEZVOUS_VARIABLE in environ:
        job = 1 + int.from_bytes(derive_job_secret(given, f"number of kv {port}")[:7], "big")
    return ProcessConfig(
        role,
        which,
        num_workers,
        num_servers,
        (host, port),
        None if given is None else derive_job_secret(given, f"kv {port}"),
        environ.get("DMLC_NODE_HOST", "").removeprefix("[").removesuffix("]") or None,
        f"DMLC_ROLE is {role}" + (f", {origin} is {number}" if which is not None else ""),
        config,
        job,
        environ.get("DMLC_NUM_ATTEMPT", "0") not in {"", "0"},
        bool(environ.get(PORT_IS_HELD_VARIABLE)),
        _read_first_workers(environ, num_workers),
        _read_slot(environ),
        _read_seconds(environ.get(ELASTIC_TIMEOUT_VARIABLE, "")),
        bool(environ.get(MAX_SERVERS_VARIABLE)),
    )


def _read_first_workers(environ: Mapping[str, str], num_workers: int) -> int:
    text = environ.get(FIRST_WORKERS_VARIABLE, "")
    return min(int(text), num_workers) if text.isascii() and text.isdigit() and int(text) > 0 else 1


def _read_slot(environ: Mapping[str, str]) -> tuple[int, int] | None:
    texts = environ.get(SLOT_VARIABLE, ""), environ.get(INCARNATION_VARIABLE, "")
    if not all(text.isascii() and text.isdigit() for text in texts):
        return None
    return int(texts[0]), int(texts[1])


def _read_seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 < seconds < float("inf") else None


def _task_number(
    environ: Mapping[str, str], role: KVRole, num_workers: int, num_servers: int
) -> tuple[str | None, str]:
    """Return this process's number and its origin: the task's, or its rank where workers have ranks."""
    if role == "scheduler":
        return None, ""
    if text := environ.get("DMLC_TASK_ID"):
        is_counted_on = role == "server" and environ.get("DMLC_JOB_CLUSTER") == "local"
        if is_counted_on and text.isdigit() and num_workers <= int(text) < num_workers + num_servers:
            text = str(int(text) - num_workers)  # dmlc's local launcher counts servers on from the workers
        return text, "DMLC_TASK_ID"
    try:
        job = detect_job(environ)
    except ConfigError:
        return None, ""
    num_nodes = num_workers if role == "worker" else num_servers
    if job.launcher != "none" and job.size == num_nodes:
        return str(job.rank), f"the rank that {job.launcher} gave"
    return None, ""


def _parse_role(environ: Mapping[str, str], problems: list[str]) -> KVRole:
    text = environ.get("DMLC_ROLE", "")
    for role in KV_ROLES:
        if text.lower() == role:
            return role
    problems.append(f"DMLC_ROLE {f'is {text!r}' if text else 'is not set'}: it must be worker, server or scheduler")
    return "worker"


def _parse_count(environ: Mapping[str, str], variable: str, problems: list[str]) -> int:
    text = environ.get(variable, "")
    if text.isascii() and text.isdigit() and 0 < int(text) < _MOST_NODES:
        return int(text)
    what = "is not set" if not text else f"is {text!r}"
    hint = ": a job has at least one server" if text == "0" and variable == "DMLC_NUM_SERVER" else ""
    problems.append(f"{variable} {what}, and must be a number from 1 to {_MOST_NODES - 1}{hint}")
    return 1


def _parse_number(text: str | None, origin: str, num_nodes: int, problems: list[str]) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdigit()) or int(text) >= num_nodes:
        problems.append(f"{origin} is {text!r}, and must be a number from 0 to {num_nodes - 1}")
        return None
    return int(text)
