"""Hosts of a SageMaker training job, by ``resourceconfig.json`` and the variables of its toolkits. Pure.

The file is the service's own, and is there in every container. The variables SM_* are what the training toolkit, or the
SDK's driver scripts, make of it; a container without either has none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reigen.errors import ConfigError
from reigen.launch.nodes.sources import NodeJob, ReadFile
from reigen.launch.nodes.variables import count_gpus, read_number

#: Where the service mounts its directories, unless the toolkit's variable says another place.
BASE_DIRECTORY = Path("/opt/ml")
BASE_VARIABLE = "SAGEMAKER_BASE_DIR"
#: The channel ``reigen``, whose one object is the secret, and the SDK's directory of driver scripts may have it.
SECRET_FILE = "input/data/reigen/secret"
#: A host's name may be unknown to the others for minutes: as long as the toolkit waits.
_RESOLVE_SECONDS = 900.0
#: From SIGTERM to SIGKILL.
_GRACE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class _Resources:
    """Resources of the job: its hosts, this one, its interface, and hosts by instance group; where this was read."""

    evidence: str
    hosts: tuple[str, ...]
    current: str
    interface: str
    groups: Mapping[str, tuple[str, ...]]


def find_training_job(environ: Mapping[str, str], read_file: ReadFile) -> NodeJob | None:
    """Find the hosts of a training job; None: this is none.

    Raises:
        ConfigError: file or variables are not in order.
    """
    base = Path(environ.get(BASE_VARIABLE) or BASE_DIRECTORY)
    resources = _read_resources(base / "input/config/resourceconfig.json", environ, read_file)
    resources = resources or _read_variables(environ)
    if resources is None:
        return None
    if not resources.hosts:
        raise ConfigError(f"{resources.evidence} names no hosts")
    if resources.current not in resources.hosts:
        listed = ", ".join(resources.hosts)
        raise ConfigError(f"{resources.evidence}: this host is {resources.current!r}, which is not among {listed}")
    hosts = _choose_hosts(resources, environ)
    name = environ.get("TRAINING_JOB_NAME", "")
    count = f"{len(hosts)} host{'s' if len(hosts) > 1 else ''}"
    return NodeJob(
        f"SageMaker training job{name and ' '}{name} on {count}, {resources.current} ({resources.evidence})",
        hosts.index(resources.current),
        len(hosts),
        hosts[0],
        job_id=name,
        names=hosts,
        slots=_parse_slots(environ),
        secret_file=str(base / SECRET_FILE),
        failure_file=str(base / "output/failure"),
        grace_seconds=_GRACE_SECONDS,
        resolve_seconds=_RESOLVE_SECONDS,
        is_private=True,  # what comes from S3 has mode 0644
        environ={"SM_NETWORK_INTERFACE_NAME": resources.interface} if resources.interface else {},
    )


def _read_resources(path: Path, environ: Mapping[str, str], read_file: ReadFile) -> _Resources | None:
    try:
        text = read_file(str(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    if text is None:
        return None
    content = _parse_json(str(path), text, dict)
    hosts = _parse_hosts(f"{path}: hosts", content.get("hosts"))
    groups = content.get("instance_groups") or []
    try:
        by_group = {str(group["instance_group_name"]): tuple(map(str, group["hosts"])) for group in groups}
    except (TypeError, KeyError) as error:
        raise ConfigError(f"{path}: instance_groups is not a list of names with hosts ({error!r})") from None
    current = str(content.get("current_host") or environ.get("SM_CURRENT_HOST", ""))
    return _Resources(str(path), hosts, current, str(content.get("network_interface_name") or ""), by_group)


def _read_variables(environ: Mapping[str, str]) -> _Resources | None:
    if "SM_HOSTS" not in environ and "SM_CURRENT_HOST" not in environ:
        return None
    missing = next((name for name in ("SM_HOSTS", "SM_CURRENT_HOST") if not environ.get(name)), None)
    if missing is not None:
        raise ConfigError(f"{missing} is not set, and there is no resourceconfig.json")
    hosts = _parse_hosts("SM_HOSTS", _parse_json("SM_HOSTS", environ["SM_HOSTS"], list))
    interface = environ.get("SM_NETWORK_INTERFACE_NAME", "")
    return _Resources("SM_HOSTS, SM_CURRENT_HOST", hosts, environ["SM_CURRENT_HOST"], interface, {})


def _parse_json(what: str, text: str, kind: type) -> Any:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{what} is no JSON: {error}") from None
    if not isinstance(value, kind):
        raise ConfigError(f"{what} is {text[:100]!r}: not {'a list' if kind is list else 'an object'} in JSON")
    return value


def _parse_hosts(what: str, value: object) -> tuple[str, ...]:
    """Return the hosts in the order of their nodes: sorted, as the toolkit and the SDK's scripts have them."""
    if not isinstance(value, list) or not all(isinstance(host, str) and host for host in value):
        raise ConfigError(f"{what} is {value!r}: not a list of names")
    return tuple(sorted(dict.fromkeys(value)))


def _choose_hosts(resources: _Resources, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Choose the hosts that train together: those of the groups for it, where they are named; else all.

    A host of another group is alone, as under the toolkit.
    """
    text = environ.get("SM_DISTRIBUTION_INSTANCE_GROUPS", "")
    chosen: Sequence[object] = _parse_json("SM_DISTRIBUTION_INSTANCE_GROUPS", text, list) if text else ()
    members = {host for name in chosen for host in resources.groups.get(str(name), ())}
    if not members:
        return resources.hosts
    if resources.current not in members:
        return (resources.current,)
    return tuple(host for host in resources.hosts if host in members)


def _parse_slots(environ: Mapping[str, str]) -> int | None:
    """Read how many ranks this host takes: as the SDK's ``distributed=`` says, or its GPUs; None: it has none."""
    text = environ.get("SM_DISTRIBUTED_CONFIG", "")
    config = _parse_json("SM_DISTRIBUTED_CONFIG", text, dict) if text else {}
    if count := config.get("process_count_per_node"):
        if not isinstance(count, int) or count < 1:
            raise ConfigError(f"SM_DISTRIBUTED_CONFIG: process_count_per_node is {count!r}, not a number above 0")
        return count
    return (read_number(environ, "SM_NUM_GPUS") if "SM_NUM_GPUS" in environ else count_gpus(environ)) or None
