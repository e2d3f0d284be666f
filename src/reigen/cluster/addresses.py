"""Address at which rank 0 listens for ranks of other hosts, when they know only its host's name."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from contextlib import suppress

from reigen.errors import ConfigError
from reigen.net.interfaces import choose_address, local_addresses

#: An address of no host: packets to it would leave by the default route (RFC 5737).
_REMOTE_TEST_ADDRESS = "192.0.2.1"


def is_local_address(host: str) -> bool:
    """Return whether a name or an address is one of this host's."""
    with suppress(OSError, UnicodeError):  # no such name
        for family, _, _, _, (address, *_) in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            if family in {socket.AF_INET, socket.AF_INET6}:
                if ipaddress.ip_address(address).is_loopback:
                    return True
                with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.bind((address, 0))
                    return True
    return False


def choose_listen_address(interfaces: Sequence[str], coordinator: str | None) -> tuple[str, str]:
    """Choose the address at which rank 0 listens for ranks of other hosts, with the reason.

    Args:
        interfaces: names of those that may be used, by preference.
        coordinator: this host's name in the others' environment, if that is known.

    Raises:
        ConfigError: none of these interfaces exists, or it is not clear which one to use.
    """
    if interfaces:
        return choose_address(interfaces, coordinator)
    if coordinator is not None and _means_loopback(coordinator):
        return choose_address((), coordinator)
    towards = [_REMOTE_TEST_ADDRESS] if coordinator is None else [coordinator, _REMOTE_TEST_ADDRESS]
    for host in towards:
        with suppress(ConfigError):
            address, reason = choose_address((), host)
            if not ipaddress.ip_address(address).is_loopback:
                return address, reason if host == coordinator else "packets to other networks leave from there"
    usable = {name: found[0] for name, found in local_addresses().items() if name != "lo" and found}
    if len(usable) == 1:
        ((name, address),) = usable.items()
        return address, f"there is no other interface than {name}"
    listed = ", ".join(f"{name} ({address})" for name, address in sorted(usable.items())) or "none"
    raise ConfigError(
        f"rank 0 cannot tell on which interface the other hosts will look for it; there are: {listed}. "
        "REIGEN_NETWORK_INTERFACES names it"
    )


def _means_loopback(host: str) -> bool:
    """Return whether a host is this one for every host, not only by some hosts' tables of names."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
