"""A program for stand-in machines: a rank that somebody has started finds the others, and prints who shares a machine.

python meet.py          one line of JSON: rank, ranks by machine, host names by rank, where the service is
"""

from __future__ import annotations

import json
import os

from reigen.cluster.bootstrap import Accesses, Manner
from reigen.cluster.claim import claim
from reigen.cluster.environ import detect
from reigen.cluster.layout import exchange
from reigen.cluster.rendezvous import RendezvousClient
from reigen.config import load


def main() -> None:
    job, config = detect(os.environ), load(os.environ)
    timeout = config.start_timeout_seconds
    access = Accesses().reach(job, os.environ, Manner(timeout, config.network_interfaces))
    client = RendezvousClient(access.address, access.secret, job.rank, timeout)
    claim(client, job.rank)
    layout = exchange(client, job.rank, job.size, timeout, config.host_id or "")
    line = json.dumps([job.rank, layout.machines, layout.hostnames, access.address])
    os.write(1, (line + "\n").encode())  # one write: ranks may share a pipe
    client.put(f"done/{job.rank}", b"")
    for rank in range(job.size if job.rank == 0 else 0):  # it may host the service
        client.get(f"done/{rank}", timeout)
    client.close()


if __name__ == "__main__":
    main()
