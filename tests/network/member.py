"""A program for stand-in machines: hosts the control service of a job, or is a member of it.

python member.py serve ADDRESS          prints the service's address; ends with its input
python member.py join SERVICE RANK SIZE prints "in", and when somebody has failed: when, who and why, as JSON

The variable SILENCE_SECONDS says how long a machine may be silent.
"""

from __future__ import annotations

import json
import os
import sys
import time

from reigen.cluster.membership.client import MembershipClient
from reigen.cluster.membership.control_service import ControlService

SECRET = b"s" * 32
PEER_TIMEOUT_SECONDS = float(os.environ.get("SILENCE_SECONDS", "3"))


def serve(address: str) -> None:
    server = ControlService(SECRET, address, peer_timeout_seconds=PEER_TIMEOUT_SECONDS)
    server.start()
    print(server.address, flush=True)
    sys.stdin.read()
    server.close()


def join(service: str, rank: int, size: int) -> None:
    one = MembershipClient(
        service, SECRET, "room", rank, size, timeout_seconds=60.0, peer_timeout_seconds=PEER_TIMEOUT_SECONDS
    )
    print("in", flush=True)
    while (error := one.failure(range(size))) is None:
        one.wait_for_death(1.0)
    print(json.dumps([time.time(), type(error).__name__, list(error.ranks), error.reason]), flush=True)
    one.close()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        join(sys.argv[2], *map(int, sys.argv[3:5]))
