"""Credentials by which the ranks of a job find and authenticate each other; derived secrets and ports."""

from __future__ import annotations

import hmac
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field

from reigen.cluster.environ import SECRET_VARIABLE, parse_secret
from reigen.errors import ConfigError
from reigen.files import privacy_problem
from reigen.net.auth import SECRET_BYTES

SECRET_FILE_VARIABLE = "REIGEN_SECRET_FILE"
PORT_VARIABLE = "REIGEN_RENDEZVOUS_PORT"

_NUM_PORTS = 8
#: Below the ports that kernels give to connections, and below those that Kubernetes gives to services.
_FIRST_PORT, _PORTS_IN_ALL = 20_000, 9_000
_MAX_FILE_BYTES = 4096


@dataclass(frozen=True)
class JobCredentials:
    """Credentials in the environment.

    Attributes:
        secret: 32 bytes that all of them have, or None. Not shown in ``repr``.
        port: where rank 0 shall listen, or None.
    """

    secret: bytes | None = field(repr=False)
    port: int | None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> JobCredentials:
        """Read from the environment.

        Raises:
            ConfigError: a value makes no sense, or the file of the secret is not as private as it must be.
        """
        secret = None
        if environ.get(SECRET_VARIABLE):
            secret = parse_secret(environ[SECRET_VARIABLE])
            if secret is None:
                raise ConfigError(f"{SECRET_VARIABLE} is not {2 * SECRET_BYTES} hexadecimal digits")
        elif environ.get(SECRET_FILE_VARIABLE):
            secret = read_secret(environ[SECRET_FILE_VARIABLE])
        text = environ.get(PORT_VARIABLE)
        if text and not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 16):
            raise ConfigError(f"{PORT_VARIABLE} is {text!r}, not a port")
        return cls(secret, int(text) if text else None)


def read_secret(path: str) -> bytes:
    """Read the secret from a file that only this user can read.

    Raises:
        ConfigError: there is no such file, others may read it, or it holds something else.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{SECRET_FILE_VARIABLE}={path}: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            problem = "is not a file"
        elif private_problem := _privacy_problem(status):
            problem = f"{private_problem}: chmod 600" if status.st_uid == os.geteuid() else private_problem
        else:
            secret = parse_secret(os.read(descriptor, _MAX_FILE_BYTES).decode("ascii", "replace").strip())
            if secret is not None:
                return secret
            problem = f"does not hold {2 * SECRET_BYTES} hexadecimal digits"
    finally:
        os.close(descriptor)
    raise ConfigError(f"{SECRET_FILE_VARIABLE}={path} {problem}")


def _privacy_problem(status: os.stat_result) -> str | None:
    """Return what keeps a file from being private. One of root's may be for a group of this process alone.

    That is how Kubernetes mounts a Secret for a pod whose user is not root (``securityContext.fsGroup``).
    """
    groups = {os.getegid(), *os.getgroups()}
    if status.st_uid == 0 and os.geteuid() != 0 and status.st_gid in groups and not status.st_mode & 0o037:
        return None
    return privacy_problem(status)


def derive_job_secret(given: bytes, job_id: str) -> bytes:
    """Derive the secret of one job from one that several may share."""
    return hmac.digest(given, b"reigen job\0" + job_id.encode(), "sha256")


def derive_ports(secret: bytes) -> list[int]:
    """Derive the ports of a job's service: all different, in the order of trying."""
    ports: dict[int, None] = {}
    number = 0
    while len(ports) < _NUM_PORTS:
        digest = hmac.digest(secret, b"reigen port\0" + number.to_bytes(4), "sha256")
        ports[_FIRST_PORT + int.from_bytes(digest[:8]) % _PORTS_IN_ALL] = None
        number += 1
    return list(ports)
