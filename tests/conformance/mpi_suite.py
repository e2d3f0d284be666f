"""One rank's part of the conformance suite over MPI, started by mpirun: see `test_mpi_backend`.

Arguments: address of the rendezvous, whether MPI's own reductions are used, whether the suite is trimmed, a directory
for the results, and the ranks by machine in JSON: those of one group share memory. The secret is in REIGEN_TEST_SECRET.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from reigen.backends.base import Backend
from reigen.backends.hierarchical.backend import compose_backend
from reigen.backends.mpi.backend import CHUNK_BYTES
from reigen.backends.mpi.network import MpiNetwork
from reigen.cluster.bootstrap.mpi_library import mpi_comm_world
from reigen.cluster.membership.rendezvous import Rendezvous, RendezvousClient
from reigen.errors import CollectiveError
from reigen.testing import check_rank
from tests.machines import local_backend

NATIVE = {"ordered": False, "native": True, "default": None}
#: Small ones: large tensors need many.
CHUNKS = {"ordered": 1 << 18, "native": 1 << 18, "default": CHUNK_BYTES}


def main(address: str, native: str, trimmed: str, directory: str, grouped: str) -> None:
    everybody = mpi_comm_world(os.environ)
    rank, size = everybody.rank, everybody.size
    client = RendezvousClient(address, bytes.fromhex(os.environ["REIGEN_TEST_SECRET"]), rank, 60.0)

    @contextmanager
    def make(rank: int, size: int, rendezvous: Rendezvous) -> Iterator[Backend]:
        groups = json.loads(grouped)
        group = next(group for group in groups if rank in group)
        with local_backend(group, rank, rendezvous) as (local, neighbours):

            def failure(_: Sequence[int]) -> CollectiveError | None:
                return None if neighbours is None else neighbours.failure(range(neighbours.size))

            network = MpiNetwork(everybody, range(size), rank, rendezvous, failure=failure, native=NATIVE[native])
            backend = compose_backend(groups, rank, local, network, range(size), time.monotonic() + 60.0)
            try:
                yield backend
            finally:
                backend.close()
                network.close()

    digests = check_rank(make, rank, size, client, trimmed=trimmed == "trimmed")
    Path(directory, f"{rank}.json").write_text(json.dumps(digests))
    client.put(f"written/{rank}", b"")
    for other in range(size):  # the end of one will be the end of all
        client.get(f"written/{other}", 60.0)
    client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
