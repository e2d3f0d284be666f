"""The peer jax.distributed with Gloo, for `reigen bench frameworks`: pmean over all processes' devices.

`.../each` averages each gradient, as one writes it; `.../flat` all of them in one array, which spares Gloo's latencies.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.harness.jax_training import JaxTraining, Step
from benchmarks.harness.work import Case


class JaxGloo:
    def __init__(self, rank: int, size: int) -> None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        jax.distributed.initialize(address, num_processes=size, process_id=rank)
        self._rank, self._size = rank, size
        self._mesh = Mesh(np.array(jax.devices()), ("ranks",))
        self.versions = {"jax": jax.__version__}

    def open(self, case: Case) -> JaxTraining:
        return JaxTraining(
            case,
            self._rank,
            reduce_gradients=_flat if case.name.endswith("/flat") else _each,
            compile_step=self._compile,
            place_shared=lambda array: jax.make_array_from_process_local_data(self._sharding(), np.asarray(array)),
            place_own=lambda array: jax.make_array_from_process_local_data(self._sharding("ranks"), array),
        )

    def close(self) -> None:
        jax.distributed.shutdown()

    def _compile(self, step: Step) -> Step:
        """Weights and state on every device, a batch of its own on each."""
        shared, own = PartitionSpec(), PartitionSpec("ranks")
        return jax.jit(
            jax.shard_map(
                step, mesh=self._mesh, in_specs=(shared, shared, own, own), out_specs=(shared, shared), check_vma=False
            ),
            donate_argnums=(0, 1),
        )

    def _sharding(self, *axes: Any) -> NamedSharding:
        return NamedSharding(self._mesh, PartitionSpec(*axes))


def _each(gradients: Any) -> Any:
    return jax.lax.pmean(gradients, "ranks")


def _flat(gradients: Any) -> Any:
    array, restore = ravel_pytree(gradients)
    return restore(jax.lax.pmean(array, "ranks"))


def start(rank: int, size: int) -> JaxGloo:
    return JaxGloo(rank, size)
