"""A process that belongs to a job of jax.distributed, too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import reigen.jax as rj
from reigen.errors import UnsupportedTypeError
from reigen.launch.supervision.spawn import reserve_port
from reigen.testing import RankPool


def beside_jax_distributed() -> None:
    rank, size = rj.rank(), rj.size()
    held = reserve_port() if rank == 0 else None
    port = rj.broadcast_object(None if held is None else held.getsockname()[1])
    if held is not None:
        held.close()
    jax.distributed.initialize(f"127.0.0.1:{port}", size, rank)
    try:
        assert (jax.process_index(), jax.process_count()) == (rank, size)
        mine = jnp.full(3, float(rank))
        assert rj.allreduce(mine, op=rj.Sum).tolist() == [sum(range(size))] * 3
        assert jax.jit(lambda x: rj.allreduce(x, op=rj.Sum))(mine).tolist() == [sum(range(size))] * 3
        mesh = Mesh(np.array(jax.devices()), ("x",))
        spread = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("x")), np.ones(1, np.float32))
        with pytest.raises(UnsupportedTypeError):
            rj.allreduce(spread)
        rj.barrier()
    finally:
        jax.distributed.shutdown()


def test_local_arrays_are_reduced_and_those_of_several_processes_refused() -> None:
    with RankPool(2) as pool:  # of their own: a process can join jax.distributed once, before it has any device
        pool.run(beside_jax_distributed, init=True)
