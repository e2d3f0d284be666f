"""Ports that launchers hold: given to nobody who asks for any, and open to those who are to listen there."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys

import pytest

from reigen.launch.supervision.spawn import reserve_port
from reigen.testing.environment import clean_environment
from tests.strangers import wants

#: In a network of its own, with two ports to be given away: one is held.
_ASK_FOR_ANY = """
import itertools, socket, subprocess, sys
from reigen.launch.supervision.spawn import reserve_port
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
with open("/proc/sys/net/ipv4/ip_local_port_range", "w") as range_of_ports:
    range_of_ports.write("40000 40001")
options = ((), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT))
hosts = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, ""), (socket.AF_INET6, "::1"), (socket.AF_INET6, "::")]
server = socket.create_server(("127.0.0.1", 30000))
found = set()
for for_reigen in (False, True):
    with reserve_port(for_reigen=for_reigen) as holder:
        free = {40000, 40001} - {holder.getsockname()[1]}
        for (family, host), some, _ in itertools.product(hosts, options, range(3)):
            with socket.socket(family) as asking:
                for option in some:
                    asking.setsockopt(socket.SOL_SOCKET, option, 1)
                asking.bind((host, 0))
                found.add(asking.getsockname()[1] in free)
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", 30000)) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 0, 0, 0, 0]))
                found.add(client.getsockname()[1] in free)
print(found)
"""


def test_a_held_port_is_given_to_nobody_who_asks_for_any() -> None:
    command = ["unshare", "--net", sys.executable, "-c", _ASK_FOR_ANY]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=False)
    if "unshare" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert (done.stdout, done.stderr) == ("{True}\n", "")


def test_only_servers_of_this_user_that_know_it_listen_at_a_port_for_reigen() -> None:
    with reserve_port(for_reigen=True) as holder:
        address = "127.0.0.1", holder.getsockname()[1]
        with pytest.raises(OSError, match=os.strerror(errno.EADDRINUSE)):
            socket.create_server(address)
        for _ in range(2):  # another life, behind connections of the first
            with (
                socket.create_server(address, reuse_port=True) as server,
                socket.create_connection(address, timeout=60) as client,
            ):
                with server.accept()[0] as accepted:
                    accepted.sendall(b"x")
                assert client.recv(1) == b"x"
        with wants(address[1]) as stranger:
            with socket.create_server(address, reuse_port=True):
                pass
            assert stranger.stop() == 0


_STORES = """
import torch.distributed
from reigen.launch.supervision.spawn import reserve_port
for uses_libuv in (True, False):
    with reserve_port() as holder:
        store = torch.distributed.TCPStore("127.0.0.1", holder.getsockname()[1], 1, True, use_libuv=uses_libuv)
        store.set("key", "value")
        print(store.get("key"))
"""


@pytest.mark.slow
def test_torchs_store_can_listen_at_the_master_port() -> None:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", _STORES], env=clean_environment(), capture_output=True, text=True, check=False
    )
    assert done.stdout == "b'value'\n" * 2, done.stderr
