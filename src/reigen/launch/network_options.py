"""Network knobs of the ranks for the launcher, which listens for them on the same network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from reigen.launch.agent.agent_protocol import KEEPALIVE_SECONDS

if TYPE_CHECKING:
    from reigen.net.tls import TlsContext

_ON = frozenset({"1", "true", "yes", "on"})
_INTERFACES = ("REIGEN_NETWORK_INTERFACES", "HOROVOD_GLOO_IFACE", "DMLC_INTERFACE", "SM_NETWORK_INTERFACE_NAME")
_PEER_TIMEOUT_SECONDS = 20.0
_START_TIMEOUT_SECONDS = 30.0
_LONGEST_SILENCE_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class NetworkOptions:
    """Options of the network between hosts. `reigen.config` has the knobs of the same names.

    Attributes:
        interfaces: names of those that may be used; empty: the one that leads there.
        peer_timeout_seconds: how long a host may be silent before it counts as lost.
        tls: encrypt every connection.
        start_timeout_seconds: how long ranks wait for each other in the beginning, and the launcher for hosts, too.
    """

    interfaces: tuple[str, ...] = ()
    peer_timeout_seconds: float = _PEER_TIMEOUT_SECONDS
    tls: bool = False
    start_timeout_seconds: float = _START_TIMEOUT_SECONDS

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Self:
        """Read the ranks' environment; values that make no sense are left to the ranks to complain about."""
        listed = _first(environ, *_INTERFACES)
        start = _first(environ, "REIGEN_START_TIMEOUT", "HOROVOD_START_TIMEOUT", "HOROVOD_GLOO_TIMEOUT_SECONDS")
        return cls(
            tuple(name.strip() for name in listed.split(",") if name.strip()),
            _parse_seconds(_first(environ, "REIGEN_PEER_TIMEOUT"), _PEER_TIMEOUT_SECONDS),
            _first(environ, "REIGEN_TLS").strip().lower() in _ON,
            _parse_seconds(start, _START_TIMEOUT_SECONDS),
        )

    @property
    def silence_seconds(self) -> float:
        """Seconds that an agent may be silent: longer than for ranks, so that these get their errors first."""
        return min(max(1.25 * self.peer_timeout_seconds + 1, 3 * KEEPALIVE_SECONDS), _LONGEST_SILENCE_SECONDS)

    @property
    def last_silence_seconds(self) -> float:
        """The same when the job has failed, and no rank waits for an error any more."""
        return min(max(self.peer_timeout_seconds, 3 * KEEPALIVE_SECONDS), _LONGEST_SILENCE_SECONDS)

    def make_tls(self) -> TlsContext | None:
        """Make the TLS context of this process, where it is wanted; raises ConfigError where a package is missing."""
        if not self.tls:
            return None
        from reigen.net.tls import TlsContext  # loads OpenSSL

        return TlsContext()


def _first(environ: Mapping[str, str], *names: str) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")


def _parse_seconds(text: str, default: float) -> float:
    try:
        seconds = float(text or default)
    except ValueError:
        return default
    return seconds if 0 < seconds < float("inf") else default
