"""One rank's part of the conformance suite over MPI, started by mpirun: see `test_mpi_plane`.

Arguments: address of the rendezvous, whether MPI's own reductions are used, whether the suite is trimmed, and a
directory for the results. The secret is in REIGEN_TEST_SECRET.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from reigen.cluster.mpi_world import world
from reigen.cluster.rendezvous import Rendezvous, RendezvousClient
from reigen.errors import CollectiveError
from reigen.planes.base import DataPlane
from reigen.planes.mpi import MpiNetwork
from reigen.testing import check_rank

NATIVE = {"ordered": False, "native": True, "default": None}


def nobody_died(needed: Sequence[int]) -> CollectiveError | None:
    return None


def main(address: str, native: str, trimmed: str, directory: str) -> None:
    everybody = world(os.environ)
    rank, size = everybody.rank, everybody.size
    client = RendezvousClient(address, bytes.fromhex(os.environ["REIGEN_TEST_SECRET"]), rank, 60.0)

    @contextmanager
    def make(rank: int, size: int, rendezvous: Rendezvous) -> Iterator[DataPlane]:
        network = MpiNetwork(everybody, range(size), rank, rendezvous, failure=nobody_died, native=NATIVE[native])
        plane = network.among(range(size), time.monotonic() + 60.0)
        try:
            yield plane
        finally:
            plane.close()
            network.close()

    digests = check_rank(make, rank, size, client, trimmed=trimmed == "trimmed")
    Path(directory, f"{rank}.json").write_text(json.dumps(digests))
    client.put(f"written/{rank}", b"")
    for other in range(size):  # the end of one will be the end of all
        client.get(f"written/{other}", 60.0)
    client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
