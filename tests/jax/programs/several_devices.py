"""Collectives of arrays on two devices of each process, compared with closed forms and NumPy's results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import reigen.jax as rj

ROWS, WHOLE = PartitionSpec("devices"), PartitionSpec()


def own(rank: int) -> np.ndarray:
    return np.arange(8, dtype=np.float32).reshape(4, 2) + rank


def all_ranks() -> list[np.ndarray]:
    return [own(rank) for rank in range(rj.size())]


def check_results_vary_as_their_tensors(mesh: Mesh) -> None:
    """JAX's check of types (``check_vma``, which is on unless it is switched off) knows what differs by device."""

    def run(function, *arrays, in_specs=ROWS, out_specs=ROWS):
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs))(*arrays)

    def mean(x):
        return rj.allreduce(x)

    def grouped(x, y):
        return tuple(rj.grouped_allreduce([x, y]))

    x, same = own(rj.rank()), np.full(3, rj.rank(), np.float32)
    expected = np.mean(all_ranks(), 0)
    for function in (lambda x: rj.allreduce(x * 2), rj.allgather, rj.alltoall, lambda x: x * 2):
        with pytest.raises(ValueError, match="replicat"):
            run(function, x, out_specs=WHOLE)
    with pytest.raises(ValueError, match="replicat"):
        run(grouped, x, same, in_specs=(ROWS, WHOLE), out_specs=(WHOLE, WHOLE))
    first, second = run(grouped, x, same, in_specs=(ROWS, WHOLE), out_specs=(ROWS, WHOLE))
    np.testing.assert_allclose(first, expected)
    np.testing.assert_allclose(second, np.full(3, (rj.size() - 1) / 2))
    np.testing.assert_allclose(run(mean, same, in_specs=WHOLE, out_specs=WHOLE), second)
    np.testing.assert_allclose(jax.shard_map(mean, mesh=mesh, in_specs=ROWS, out_specs=ROWS)(x), expected)
    for function in (
        lambda x: jax.lax.scan(lambda carry, _: (mean(carry), None), x, None, length=3)[0],
        lambda x: jax.lax.fori_loop(0, 3, lambda _, carry: mean(carry), x),
        lambda x: jax.lax.cond(x.sum() > -1, mean, lambda x: x, x),
    ):
        np.testing.assert_allclose(run(function, x), expected)


def check_gradients(mesh: Mesh) -> None:
    def gradient(function, x):
        def each(x):
            return jax.grad(lambda x: (function(x) ** 2).sum() / 2)(x)

        return jax.jit(jax.shard_map(each, mesh=mesh, in_specs=ROWS, out_specs=ROWS))(x)

    x, size = own(rj.rank()), rj.size()
    mean, total = np.mean(all_ranks(), 0), np.sum(all_ranks(), 0)
    for function, expected in (
        (rj.allreduce, mean),
        (jax.checkpoint(rj.allreduce), mean),
        (lambda x: rj.grouped_allreduce([x, 2 * x])[0], mean),
        (rj.allgather, x),  # of what all ranks have, averaged
        (lambda x: rj.broadcast(x, 0), x if rj.rank() == 0 else 0 * x),
        (rj.alltoall, x),
        (lambda x: rj.alltoall(x, splits=(1,) * size)[0], x),
        (lambda x: rj.reducescatter(x, op=rj.Sum), size * total),
    ):
        np.testing.assert_allclose(gradient(function, x), expected, rtol=1e-6)
    tangent = jax.shard_map(
        lambda x: jax.jvp(rj.allreduce, (x,), (x,))[1], mesh=mesh, in_specs=ROWS, out_specs=ROWS, check_vma=True
    )
    np.testing.assert_allclose(jax.jit(tangent)(x), mean)


def check_shardings_of_results(mesh: Mesh) -> None:
    """Outside of programs: that of the tensor where it divides the result's rows, or else all of it on each device."""
    rank = rj.rank()
    sharded, whole = NamedSharding(mesh, ROWS), NamedSharding(mesh, WHOLE)

    def check(result, expected, sharding):
        np.testing.assert_array_equal(result, expected)
        assert result.sharding == sharding, result.sharding

    x = jax.device_put(jnp.full((2, 3), rank + 1.0), sharded)
    four = jax.device_put(jnp.arange(4.0), sharded)
    for function in (rj.reducescatter, lambda x, op: rj.synchronize(rj.reducescatter_async(x, op=op))):
        check(function(x, op=rj.Sum), np.full((1, 3), 3), whole)
        check(function(four, op=rj.Sum), np.arange(4).reshape(2, 2)[rank] * 2, sharded)
    first, second = rj.grouped_reducescatter([x, four], op=rj.Sum)
    check(first, np.full((1, 3), 3), whole)
    check(second, np.arange(4).reshape(2, 2)[rank] * 2, sharded)
    found, rows = rj.alltoall(x, splits=[1, 0] if rank == 0 else [0, 2])
    check(found, np.full((rank + 1, 3), rank + 1), sharded if rank else whole)
    assert rows.tolist() == [[1, 0], [0, 2]][rank]
    check(rj.allgather(x), np.repeat([1, 2], 2)[:, None] * np.ones(3), sharded)
    uneven = x if rank == 0 else jax.device_put(jnp.zeros((1, 3)), whole)
    check(rj.allgather(uneven), [[1] * 3, [1] * 3, [0] * 3], whole)
    check(rj.allreduce(x, op=rj.Sum), np.full((2, 3), 3), sharded)
    on_each = jax.pmap(lambda x: x + 1)(np.zeros((2, 3)))
    np.testing.assert_array_equal(rj.allgather(on_each), np.ones((4, 3)))
    assert rj.reducescatter(on_each).devices() == set(jax.devices())


def main() -> None:
    rj.init()
    assert len(jax.devices()) == rj.size() == 2
    mesh = Mesh(np.array(jax.devices()), ("devices",))
    check_results_vary_as_their_tensors(mesh)
    check_gradients(mesh)
    check_shardings_of_results(mesh)
    print("passed")


if __name__ == "__main__":
    main()
