"""What this process is in a job with parameter servers: found in the environment, with the reason.

Two families of variables say so:

1. Those of `reigen run -s`: REIGEN_KV_ROLE (``worker``, ``server``, ``scheduler``; without it a rank is a worker),
   REIGEN_KV_NUMBER (of a server), REIGEN_KV_NUM_WORKERS and REIGEN_KV_NUM_SERVERS. The scheduler is found at the job's
   rendezvous, the secret is the job's.
2. MXNet's, set by hand, by its launchers or by ours: DMLC_ROLE, DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT, DMLC_NUM_WORKER,
   DMLC_NUM_SERVER, and DMLC_TASK_ID for the number. The secret is made from REIGEN_SECRET or REIGEN_SECRET_FILE; where
   neither is set, the scheduler makes one and hands it to processes of its user on its host (`kv.access`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from reigen.cluster.environ import RENDEZVOUS_VARIABLE, detect
from reigen.cluster.given import SECRET_FILE_VARIABLE, Given, job_secret
from reigen.config import Config
from reigen.errors import ConfigError

Role = Literal["worker", "server", "scheduler"]
ROLES: tuple[Role, ...] = ("worker", "server", "scheduler")

ROLE_VARIABLE = "REIGEN_KV_ROLE"
NUMBER_VARIABLE = "REIGEN_KV_NUMBER"
NUM_WORKERS_VARIABLE = "REIGEN_KV_NUM_WORKERS"
NUM_SERVERS_VARIABLE = "REIGEN_KV_NUM_SERVERS"

_DMLC = ("DMLC_ROLE", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER")
_MOST_NODES = 1 << 16


@dataclass(frozen=True)
class Settings:
    """What a process needs to know in order to take its part.

    Attributes:
        role: what it is.
        number: which one, None where nobody said: then in the order of arrival.
        num_workers: how many workers the job has.
        num_servers: how many servers.
        scheduler: host (name or address) and port; None: the rendezvous tells.
        rendezvous: ``host:port`` of the job's rendezvous; None: there is none.
        secret: the job's 32 bytes; None: the scheduler hands one over on its host. Not shown in ``repr``.
        node_host: name or address by which this host wants to be found (DMLC_NODE_HOST), None for none in particular.
        reason: how all that was found out.
        config: the knobs.
    """

    role: Role
    number: int | None
    num_workers: int
    num_servers: int
    scheduler: tuple[str, int] | None
    rendezvous: str | None
    secret: bytes | None = field(repr=False)
    node_host: str | None
    reason: str
    config: Config

    @property
    def name(self) -> str:
        """For people: ``server 1``, ``worker``."""
        return self.role if self.number is None else f"{self.role} {self.number}"


def find(environ: Mapping[str, str], config: Config, role: Role | None = None) -> Settings:
    """What this process is.

    Args:
        environ: environment variables.
        config: the knobs, from the same environment.
        role: what it is in any case (`reigen server`), whatever the environment says.

    Raises:
        ConfigError: nothing tells of servers; or what does is incomplete or makes no sense: all problems are listed.
    """
    if environ.get(NUM_SERVERS_VARIABLE) or environ.get(ROLE_VARIABLE):
        return _from_reigen(environ, config, role)
    if any(environ.get(name) for name in _DMLC):
        return _from_dmlc(environ, config, role)
    raise ConfigError(
        "a store of type dist_* needs servers, and nothing tells of any. Start the job with them: `reigen run -np 4 -s "
        "2 COMMAND`; or by hand: `reigen scheduler`, `reigen server` and the workers, with "
        f"{', '.join(_DMLC[1:])} set for all of them and DMLC_ROLE for the workers (docs/kv.md). Without servers there "
        "are the types local, device and ring"
    )


def _from_reigen(environ: Mapping[str, str], config: Config, role: Role | None) -> Settings:
    problems: list[str] = []
    role = role or _role(environ, ROLE_VARIABLE, problems, "worker")
    given = Given.of(environ)
    size, number = environ.get("REIGEN_SIZE", ""), environ.get(NUMBER_VARIABLE)
    if role == "worker":
        number = environ.get("REIGEN_RANK") or number
    numbers = dict(environ) if environ.get(NUM_WORKERS_VARIABLE) else {**environ, NUM_WORKERS_VARIABLE: size}
    num_workers = _count(numbers, NUM_WORKERS_VARIABLE, problems)
    num_servers = _count(environ, NUM_SERVERS_VARIABLE, problems)
    if not environ.get(RENDEZVOUS_VARIABLE):
        problems.append(f"{RENDEZVOUS_VARIABLE} is not set")
    if given.secret is None:
        problems.append(f"neither REIGEN_SECRET nor {SECRET_FILE_VARIABLE} is set")
    which = _which(number, NUMBER_VARIABLE, num_workers if role == "worker" else num_servers, problems)
    _refuse(problems, "`reigen run -s` gives to each process")
    return Settings(
        role,
        None if role == "scheduler" else which,
        num_workers,
        num_servers,
        None,
        environ[RENDEZVOUS_VARIABLE],
        given.secret,
        None,
        f"`reigen run` started this process as {role}",
        config,
    )


def _from_dmlc(environ: Mapping[str, str], config: Config, role: Role | None) -> Settings:
    problems: list[str] = []
    role = role or _role(environ, "DMLC_ROLE", problems, None)
    host = environ.get("DMLC_PS_ROOT_URI", "").removeprefix("[").removesuffix("]")
    if not host:
        problems.append("DMLC_PS_ROOT_URI is not set: name or address of the host where the scheduler runs")
    port = _count(environ, "DMLC_PS_ROOT_PORT", problems)
    num_workers = _count(environ, "DMLC_NUM_WORKER", problems)
    num_servers = _count(environ, "DMLC_NUM_SERVER", problems)
    number, origin = _task(environ, role, num_workers, num_servers)
    which = _which(number, origin, num_workers if role == "worker" else num_servers, problems)
    _refuse(problems, "say what a process is (MXNet's: DMLC_ROLE and so on)")
    given = Given.of(environ).secret
    return Settings(
        role,
        None if role == "scheduler" else which,
        num_workers,
        num_servers,
        (host, port),
        None,
        None if given is None else job_secret(given, f"kv {port}"),
        environ.get("DMLC_NODE_HOST", "").removeprefix("[").removesuffix("]") or None,
        f"DMLC_ROLE is {role}" + (f", {origin} is {number}" if which is not None else ""),
        config,
    )


def _task(environ: Mapping[str, str], role: Role, num_workers: int, num_servers: int) -> tuple[str | None, str]:
    """The number that somebody gave to this process, and who: the task's, or its rank where workers have ranks."""
    for variable in (NUMBER_VARIABLE, "DMLC_TASK_ID"):
        text = environ.get(variable)
        if not text:
            continue
        is_mxnets = variable == "DMLC_TASK_ID" and environ.get("DMLC_JOB_CLUSTER") == "local"
        if is_mxnets and role == "server" and text.isdigit() and num_workers <= int(text) < num_workers + num_servers:
            return str(int(text) - num_workers), variable  # its local launcher counts servers on from the workers
        return text, variable
    try:
        job = detect(environ)
    except ConfigError:
        return None, ""
    num_nodes = num_workers if role == "worker" else num_servers
    if role != "scheduler" and job.launcher != "none" and job.size == num_nodes:
        return str(job.rank), f"the rank that {job.launcher} gave"
    return None, ""


def _role(environ: Mapping[str, str], variable: str, problems: list[str], default: Role | None) -> Role:
    text = environ.get(variable, "").lower()
    for role in ROLES:
        if text == role:
            return role
    if default is not None and not text:
        return default
    problems.append(f"{variable} is {text!r}" if text else f"{variable} is not set")
    problems[-1] += ": it must be worker, server or scheduler"
    return "worker"


def _count(environ: Mapping[str, str], variable: str, problems: list[str]) -> int:
    text = environ.get(variable, "")
    if text.isascii() and text.isdigit() and 0 < int(text) < _MOST_NODES:
        return int(text)
    what = "is not set" if not text else f"is {text!r}"
    hint = ": a job has at least one server" if text == "0" and variable.endswith(("SERVER", "SERVERS")) else ""
    problems.append(f"{variable} {what}, and must be a number from 1 to {_MOST_NODES - 1}{hint}")
    return 1


def _which(text: str | None, origin: str, num_nodes: int, problems: list[str]) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdigit()) or int(text) >= num_nodes:
        problems.append(f"{origin} is {text!r}, and must be a number from 0 to {num_nodes - 1}")
        return None
    return int(text)


def _refuse(problems: Sequence[str], which: str) -> None:
    if problems:
        raise ConfigError(f"the variables that {which} are not in order:\n  " + "\n  ".join(problems))
