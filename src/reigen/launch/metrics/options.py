"""Options of `reigen run` about metrics."""

from __future__ import annotations

import ipaddress
import re
import secrets
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
#: Variable with the token of the dashboard, where it is to be another one than a random one.
DASHBOARD_TOKEN_VARIABLE = "REIGEN_DASHBOARD_TOKEN"
#: Variables that belong to the launcher alone.
TOKEN_VARIABLES = frozenset({TOKEN_VARIABLE, DASHBOARD_TOKEN_VARIABLE})
_LOOPBACK = "127.0.0.1"
#: A token that a user chooses for the dashboard is in a URL.
_URL_TOKEN = re.compile(r"[\w.~-]{16,200}", re.ASCII)
_DASHBOARD_PACKAGES = ("starlette", "uvicorn", "plotly")


def read_token(environ: Mapping[str, str]) -> str:
    """Return the token that clients have to know, without white space around it; empty: none.

    Raises:
        ConfigError: it cannot be in a header of HTTP.
    """
    token = environ.get(TOKEN_VARIABLE, "").strip()
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(f"{TOKEN_VARIABLE}: it must be of printable ASCII characters")
    return token


def _parse_address(option: str, text: str) -> tuple[str, int, bool]:
    """Parse ``[HOST:]PORT``; returns host, port, and whether only this host is served. Raises ConfigError."""
    host, _, number = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or _LOOPBACK
    if not (number.isascii() and number.isdigit() and int(number) < 1 << 16):
        raise ConfigError(f"{option} {text}: it must be a port, or address:port")
    try:
        return host, int(number), ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise ConfigError(f"{option} {text}: {host} is not the address of an interface") from None


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
        token = read_token(environ)
        host, port, is_loopback = _parse_address("--metrics-port", text)
        if not is_loopback and not token:
            raise ConfigError(
                f"--metrics-port {text}: others than this host are served with a token only: set {TOKEN_VARIABLE} for "
                "this command, and `authorization: {credentials: ...}` for Prometheus"
            )
        if find_spec("prometheus_client") is None:
            raise ConfigError("--metrics-port needs prometheus-client: pip install 'reigen[metrics]'")
        return cls(host, port, token)


@dataclass(frozen=True, slots=True)
class DashboardAddress:
    """Address at which the dashboard is served.

    Attributes:
        host, port: of a socket; 0: the kernel chooses a port.
        token: that browsers have to know.
        is_loopback: only this host is served.
    """

    host: str
    port: int
    token: str = field(repr=False)
    is_loopback: bool = True

    @classmethod
    def parse(cls, text: str, environ: Mapping[str, str], option: str = "--dashboard") -> Self:
        """Parse ``[[HOST:]PORT]``.

        Args:
            text: what the user has given; empty: any port.
            environ: may have a token.
            option: for messages.

        Raises:
            ConfigError: it has another form, the token is none, or a package is missing.
        """
        host, port, is_loopback = _parse_address(option, text or "0")
        token = environ.get(DASHBOARD_TOKEN_VARIABLE, "").strip()
        if token and not _URL_TOKEN.fullmatch(token):
            raise ConfigError(
                f"{DASHBOARD_TOKEN_VARIABLE}: a token has at least 16 letters, digits and characters of -._~; without "
                "the variable it is a random one"
            )
        missing = [name for name in _DASHBOARD_PACKAGES if find_spec(name) is None]
        if missing:
            raise ConfigError(f"{option} needs {', '.join(missing)}: pip install 'reigen[dashboard]'")
        return cls(host, port, token or secrets.token_urlsafe(24), is_loopback)


@dataclass(frozen=True, slots=True)
class MetricsOptions:
    """Options of a job's metrics.

    Attributes:
        address: where they are served for Prometheus; None: nowhere.
        file: where they are written as JSON lines; None: nowhere.
        dashboard: where they are served to browsers; None: nowhere.
        top: show them while the job runs: a table on a terminal, otherwise lines.
        verdict: say at the end who waited for whom, where they are wanted for something else.
    """

    address: MetricsAddress | None = None
    file: Path | None = None
    dashboard: DashboardAddress | None = None
    top: bool = False
    verdict: bool = False

    @property
    def is_wanted(self) -> bool:
        """Return whether processes have to report."""
        wishes = self.address, self.file, self.dashboard
        return self.top or any(each is not None for each in wishes)
