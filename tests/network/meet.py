"""A program for stand-in machines: a rank that somebody has started finds the others, and prints who shares a machine.

python meet.py          one line of JSON: rank, ranks by machine, host names by rank, where the service is
"""

from __future__ import annotations

import json
import os

from reigen.cluster.bootstrap.control import ServiceOptions, locate_service
from reigen.cluster.bootstrap.rank_lock import claim_rank
from reigen.cluster.environ import detect_job
from reigen.cluster.host_discovery import discover_hosts
from reigen.cluster.membership.rendezvous import RendezvousClient
from reigen.config import load_config


def main() -> None:
    job, config = detect_job(os.environ), load_config(os.environ)
    timeout = config.start_timeout_seconds
    access = locate_service(job, os.environ, ServiceOptions(timeout, config.network_interfaces))
    client = RendezvousClient(access.address, access.secret, job.rank, timeout)
    claim_rank(client, job.rank)
    layout = discover_hosts(client, job.rank, job.size, timeout, config.host_id or "")
    line = json.dumps([job.rank, layout.hosts, layout.hostnames, access.address])
    os.write(1, (line + "\n").encode())  # one write: ranks may share a pipe
    client.put(f"done/{job.rank}", b"")
    for rank in range(job.size if job.rank == 0 else 0):  # it may host the service
        client.get(f"done/{rank}", timeout)
    client.close()
    access.close()


if __name__ == "__main__":
    main()
