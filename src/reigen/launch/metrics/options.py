"""Options of `reigen run` about metrics."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from reigen.errors import ConfigError

#: Variable with the token that clients on other hosts have to know.
TOKEN_VARIABLE = "REIGEN_METRICS_TOKEN"
#: Page with the reports as they came, for `reigen top`: JSON, a list of key, age in seconds, and report.
REPORTS_PAGE = "/reports"
_LOOPBACK = "127.0.0.1"


def read_token(environ: Mapping[str, str]) -> str:
    """Return the token that clients have to know, without white space around it; empty: none.

    Raises:
        ConfigError: it cannot be in a header of HTTP.
    """
    token = environ.get(TOKEN_VARIABLE, "").strip()
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(f"{TOKEN_VARIABLE}: it must be of printable ASCII characters")
    return token


@dataclass(frozen=True, slots=True)
class MetricsAddress:
    """Address at which metrics are served.

    Attributes:
        host, port: of a socket; 0: the kernel chooses a port.
        token: that clients have to know; empty: none.
    """

    host: str
    port: int
    token: str = field(default="", repr=False)

    @classmethod
    def parse(cls, text: str, environ: Mapping[str, str]) -> Self:
        """Parse ``[HOST:]PORT``.

        Raises:
            ConfigError: it has another form, beyond loopback there is no token, or a package is missing.
        """
        host, _, number = text.rpartition(":")
        host, token = host.removeprefix("[").removesuffix("]") or _LOOPBACK, read_token(environ)
        if not (number.isascii() and number.isdigit() and int(number) < 1 << 16):
            raise ConfigError(f"--metrics-port {text}: it must be a port, or address:port")
        try:
            is_loopback = ipaddress.ip_address(host).is_loopback
        except ValueError:
            raise ConfigError(f"--metrics-port {text}: {host} is not the address of an interface") from None
        if not is_loopback and not token:
            raise ConfigError(
                f"--metrics-port {text}: others than this host are served with a token only: set {TOKEN_VARIABLE} for "
                "this command, and `authorization: {credentials: ...}` for Prometheus"
            )
        if find_spec("prometheus_client") is None:
            raise ConfigError("--metrics-port needs prometheus-client: pip install 'reigen[metrics]'")
        return cls(host, int(number), token)


@dataclass(frozen=True, slots=True)
class MetricsOptions:
    """Options of a job's metrics.

    Attributes:
        address: where they are served for Prometheus; None: nowhere.
        file: where they are written as JSON lines; None: nowhere.
        top: show them while the job runs: a table on a terminal, otherwise lines.
        verdict: say at the end who waited for whom, where they are wanted for something else.
    """

    address: MetricsAddress | None = None
    file: Path | None = None
    top: bool = False
    verdict: bool = False

    @property
    def is_wanted(self) -> bool:
        """Return whether processes have to report."""
        return self.address is not None or self.file is not None or self.top
