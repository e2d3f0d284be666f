"""A process of another user that wants a port of a job."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

OTHER_USER = 65534
#: It tries all addresses and options over and over, tells when it was through once, and keeps what it gets.
_WANTS = """
import itertools, os, select, socket, sys
os.setuid(int(sys.argv[1])); os.nice(5)
hosts = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "")]
if socket.has_dualstack_ipv6():
    hosts += [(socket.AF_INET6, "::1"), (socket.AF_INET6, "::")]
options = ((), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT))
taken, num_rounds = [], 0
while not select.select([0], [], [], 0)[0]:
    for (family, host), some in itertools.product(hosts, options):
        wanted = socket.socket(family)
        for option in some:
            wanted.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            wanted.bind((host, int(sys.argv[2])))
            wanted.listen()
            taken.append(wanted)
        except OSError:
            wanted.close()
    num_rounds += 1
    if num_rounds == 1:
        print("through", flush=True)
print(len(taken))
"""


class Stranger:
    """It, while it tries."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def stop(self) -> int:
        """Have it stop; returns on how many sockets it listened there."""
        out, _ = self._process.communicate("\n", timeout=60)
        return int(out)


@contextmanager
def wants(port: int) -> Iterator[Stranger]:
    """A stranger, from its second try on."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    command = [sys.executable, "-Sc", _WANTS, str(OTHER_USER), str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "through\n"
            yield Stranger(process)
        finally:
            process.kill()
