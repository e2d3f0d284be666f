"""Which address is chosen, and that it is one of this machine's."""

import os
import shutil
import socket
import subprocess
import sys
from contextlib import suppress

import pytest

from reigen.errors import ConfigError
from reigen.net.interfaces import choose_address, local_addresses, pick_address

ADDRESSES = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["10.0.0.5", "fd00::5"],
    "ib0": ["fd01::7", "192.168.0.7"],
    "down0": [],
}


@pytest.mark.parametrize(
    ("names", "towards", "route", "expected"),
    [
        (["eth0"], "10.0.0.9", None, "10.0.0.5"),
        (["eth0"], "fd00::9", None, "fd00::5"),
        (["eth0"], "server", None, "10.0.0.5"),
        (["ib0"], None, None, "192.168.0.7"),
        (["nothing", "down0", "ib0", "eth0"], "10.0.0.9", None, "192.168.0.7"),
        ([], "10.0.0.9", "10.0.0.5", "10.0.0.5"),
        ([], None, None, "127.0.0.1"),
    ],
)
def test_named_interfaces_win_then_the_route_decides(names, towards, route, expected):
    address, reason = pick_address(names, ADDRESSES, towards, route, "here")
    assert address == expected
    assert reason


def test_the_reason_says_what_decided():
    assert pick_address(["ib0"], ADDRESSES, "server", None, "here")[1] == "interface ib0 was asked for"
    assert pick_address([], {}, "server", "10.0.0.5", "here")[1] == "packets to server leave from there"
    assert pick_address([], {}, None, None, "here")[1] == "no other host takes part"


@pytest.mark.parametrize("names", [["eth9"], ["eth9", "down0"]])
def test_an_interface_that_is_not_there(names):
    with pytest.raises(ConfigError) as caught:
        pick_address(names, ADDRESSES, "10.0.0.9", None, "node7")
    message = str(caught.value)
    for text in ("host node7", "eth9", "eth0 (10.0.0.5 fd00::5)", "down0 (no address)", "REIGEN_NETWORK_INTERFACES"):
        assert text in message


def listed_by_ip():
    listed = subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True, check=True).stdout
    found = {name: set() for _, name in socket.if_nameindex()}
    for fields in map(str.split, listed.splitlines()):
        if not fields[3].startswith("fe80:"):
            found[fields[1]].add(fields[3].partition("/")[0])
    return found


@pytest.mark.skipif(shutil.which("ip") is None, reason="iproute2, which says what is true, is not installed")
def test_own_addresses_are_those_that_ip_lists():
    for _ in range(20):  # interfaces may come and go meanwhile
        before, own, after = listed_by_ip(), local_addresses(), listed_by_ip()
        if before == after:
            break
    assert {name: set(addresses) for name, addresses in own.items()} == after


def stable_addresses():
    """Loopback's, and that of the way to the internet if there is one."""
    found = list(local_addresses()["lo"])
    with suppress(ConfigError):
        found.append(choose_address([], "192.0.2.1")[0])
    return found


def test_a_listener_can_be_bound_to_own_addresses():
    for address in stable_addresses():
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family):
            pass


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost"])
def test_towards_loopback_it_is_loopback(host):
    assert choose_address([], host)[0] in {"127.0.0.1", "::1"}


def test_towards_loopback_of_ipv6():
    if "::1" not in local_addresses().get("lo", []):
        pytest.skip("this machine has no IPv6 loopback")
    assert choose_address([], "::1")[0] == "::1"


def test_towards_oneself_it_is_that_address():
    for address in stable_addresses():
        assert choose_address([], address)[0] == address


def test_an_interface_by_name():
    assert choose_address(["lo"], "192.0.2.1")[0] == "127.0.0.1"
    with pytest.raises(ConfigError, match="no network interface nothing0"):
        choose_address(["nothing0"], None)


@pytest.mark.parametrize("host", ["", "a" * 300])
def test_a_host_that_does_not_exist(host):
    with pytest.raises(ConfigError, match="knows no way to"):
        choose_address([], host)


def test_a_machine_without_a_network():
    """In a network namespace of its own, where not even loopback is up."""
    code = (
        "from reigen.errors import ConfigError\n"
        "from reigen.net.interfaces import *\n"
        "try: print(choose_address([], '192.0.2.1'))\n"
        "except ConfigError as error: print('refused:', error)\n"
        "print(choose_address([], None)[0], local_addresses())\n"
    )
    command = ["unshare", "--net", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    if "unshare" in done.stderr:
        pytest.skip(f"network namespaces are not allowed here: {done.stderr.strip()}")
    assert "refused: host " in done.stdout
    assert "knows no way to 192.0.2.1" in done.stdout
    assert "127.0.0.1 {'lo': []}" in done.stdout
