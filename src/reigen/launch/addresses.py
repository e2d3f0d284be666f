"""At which address the other hosts reach this one."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from reigen.errors import LaunchError
from reigen.launch.hosts import is_own_address


def choose_address(interfaces: Sequence[str], towards: str, clients: Sequence[str]) -> tuple[str, str]:
    """The address, and why this one.

    Args:
        interfaces: names of those that may be used; empty: all.
        towards: another host.
        clients: from where the other hosts say that ssh's connections come; empty texts where they do not know.

    Raises:
        LaunchError: none can be found.
    """
    for client in clients:
        if client and is_own_address(client):
            return client, f"{client}: from there ssh has reached the other hosts"
    try:
        family, kind, _, _, address = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            own = str(probe.getsockname()[0])
    except OSError as error:
        raise LaunchError(f"this host's address towards {towards} cannot be found: {error}") from None
    return own, f"{own}: the route to {towards} begins there"
