"""Choice of the address at which the others reach this host: never all of them (0.0.0.0), always a chosen one."""

from __future__ import annotations

import ctypes
import ipaddress
import socket
from collections.abc import Mapping, Sequence

from reigen.errors import ConfigError

_DISCARD_PORT = 9


class _SocketAddress(ctypes.Structure):
    """struct sockaddr, and what of sockaddr_in and sockaddr_in6 is needed."""

    _fields_ = (("family", ctypes.c_ushort), ("port", ctypes.c_ushort), ("rest", ctypes.c_ubyte * 24))


class _InterfaceAddress(ctypes.Structure):
    """struct ifaddrs."""


_InterfaceAddress._fields_ = (
    ("next", ctypes.POINTER(_InterfaceAddress)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SocketAddress)),
    ("netmask", ctypes.c_void_p),
    ("other", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
)


def local_addresses() -> dict[str, list[str]]:
    """Return the addresses of this host by interface; an interface without any has an empty list.

    IPv6 addresses that are valid on one link only (fe80::) are left out: they mean nothing on another host.

    Raises:
        OSError: the kernel does not say.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    first = entry = ctypes.POINTER(_InterfaceAddress)()
    if libc.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), "cannot list this host's network interfaces")
    try:
        found: dict[str, list[str]] = {}
        while entry:  # type: ignore[truthy-bool]  # false where it is NULL
            addresses = found.setdefault(entry.contents.name.decode(errors="replace"), [])
            address = _decode_text(entry.contents.address)
            if address is not None and not ipaddress.ip_address(address).is_link_local:
                addresses.append(address)
            entry = entry.contents.next
        return found
    finally:
        libc.freeifaddrs(first)


def choose_address(names: Sequence[str], towards: str | None) -> tuple[str, str]:
    """Return the address of this host at which others shall reach it, and the reason.

    Args:
        names: interfaces that may be used, in order of preference; none: whichever leads to ``towards``.
        towards: address or name of a host that must be reached, None where no other host takes part.

    Raises:
        ConfigError: no such interface, or no way to ``towards``.
    """
    route = None if names or towards is None else _source_address_towards(towards)
    return pick_address(names, local_addresses() if names else {}, towards, route, socket.gethostname())


def pick_address(
    names: Sequence[str], addresses: Mapping[str, Sequence[str]], towards: str | None, route: str | None, host: str
) -> tuple[str, str]:
    """Decide `choose_address` from the addresses of this host by interface, and from its name, for the error.

    ``route`` is where packets to ``towards`` come from.

    Raises:
        ConfigError: none of the names has an address.
    """
    for name in names:
        if addresses.get(name):
            family_first = sorted(
                addresses[name], key=lambda one: (":" in one) != (towards is not None and ":" in towards)
            )
            return family_first[0], f"interface {name} was asked for"
    if names:
        there = ", ".join(f"{name} ({' '.join(own) or 'no address'})" for name, own in sorted(addresses.items()))
        raise ConfigError(
            f"host {host} has no network interface {' or '.join(names)} with an address; there are: {there}. Name one "
            "of them (--network-interfaces, REIGEN_NETWORK_INTERFACES), or none to use the one that leads to the others"
        )
    if route is not None:
        return route, f"packets to {towards} leave from there"
    return "127.0.0.1", "no other host takes part"


def _source_address_towards(host: str) -> str:
    """The address that packets to ``host`` come from. Nothing is sent: a datagram socket is connected, no more."""
    reason: Exception | None = None
    try:
        candidates = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        candidates, reason = [], error
    for family, kind, protocol, _, address in candidates:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError as error:
            reason = error
    raise ConfigError(f"host {socket.gethostname()} knows no way to {host}: {reason}")


def _decode_text(pointer: ctypes._Pointer[_SocketAddress]) -> str | None:
    """Return an address as text; None if there is none, or one of another family."""
    if not pointer:  # type: ignore[truthy-bool]  # false where it is NULL
        return None
    address = pointer.contents
    if address.family == socket.AF_INET:  # sin_addr follows the port
        return socket.inet_ntop(socket.AF_INET, bytes(address.rest[:4]))
    if address.family == socket.AF_INET6:  # sin6_addr follows the port and sin6_flowinfo
        return socket.inet_ntop(socket.AF_INET6, bytes(address.rest[4:20]))
    return None
