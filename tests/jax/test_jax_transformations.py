"""The collectives inside JAX's transformations, compared with NumPy's results for all ranks' arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reigen.jax as rj
from reigen.errors import ArgumentError, MismatchError, UnsupportedTypeError

#: the latter where the program fails within its call
_RUNTIME_ERRORS = (jax.errors.JaxRuntimeError, ValueError)


def sum_(x, **options):
    return rj.allreduce(x, op=rj.Sum, **options)


def own(rank: int | None = None) -> np.ndarray:
    return np.arange(6, dtype=np.float32).reshape(3, 2) + (rj.rank() if rank is None else rank)


def total() -> np.ndarray:
    return np.sum([own(rank) for rank in range(rj.size())], 0)


def same(found, expected) -> None:
    np.testing.assert_allclose(np.asarray(found, np.float64), np.asarray(expected, np.float64), rtol=1e-6)


def check_programs() -> None:
    x, n = jnp.asarray(own()), rj.size()
    inner = jax.jit(sum_)
    same(sum_(x), total())
    same(inner(x), total())
    same(jax.jit(jax.vmap(sum_))(x), total())
    same(jax.vmap(sum_, 1, 1)(x), total())
    same(jax.jit(lambda x: jax.lax.scan(lambda c, _: (sum_(c) / n, None), x, None, length=5)[0])(x), total() / n)
    same(jax.lax.scan(lambda c, _: (sum_(c) / n, None), x, None, length=5)[0], total() / n)
    same(jax.jit(lambda x: jax.lax.cond(x.sum() > 0, sum_, lambda a: a, x))(x), total())
    same(jax.jit(lambda x: inner(x) + inner(2 * x) + sum_(x))(x), 4 * total())
    until = jax.jit(lambda x: jax.lax.while_loop(lambda c: sum_(c).sum() < 1e4, lambda c: sum_(c) + 1, x))(x)
    assert float(until.sum()) * n >= 1e4
    donated = jax.jit(lambda x: sum_(x) * 2, donate_argnums=0)(x + 0)
    same(donated, 2 * total())


def check_gradients() -> None:
    x, rank, n = jnp.asarray(own()), rj.rank(), rj.size()

    def loss(x):
        return (sum_(x) * (rank + 1)).sum()

    def deep(x):
        return (sum_(x * x) ** 2).sum()

    def looped(x):
        return jax.lax.scan(lambda c, _: (sum_(c * c) / n, None), x, None, length=2)[0].sum()

    def remade(x):
        return jnp.sin(sum_(jnp.sin(x))).sum()

    expected = np.full((3, 2), n * (n + 1) / 2)
    same(jax.grad(loss)(x), expected)
    same(jax.jit(jax.grad(loss))(x), expected)
    tangent = jax.jit(lambda x: jax.jvp(sum_, (x,), (jnp.full_like(x, rank + 1),))[1])(x)
    same(tangent, expected)
    # d/dx of sum over ranks r of (sum_q x_q^2)^2: 2 s 2 x, and the sum over ranks of it
    squares = np.sum([own(each) ** 2 for each in range(n)], 0)
    same(jax.jit(jax.grad(deep))(x), 4 * n * squares * own())
    second = jax.jit(jax.grad(lambda x: jax.grad(deep)(x).sum()))
    same(second(x), jax.grad(lambda x: jax.grad(deep)(x).sum())(x))
    same(jax.jit(jax.grad(looped))(x), jax.grad(looped)(x))
    same(jax.jit(jax.grad(jax.checkpoint(remade)))(x), jax.grad(remade)(x))


def check_tangents_in_their_order() -> None:
    """Several have one name. What does not depend on another begins in any order: here, in another on each rank."""
    x, wide = jnp.asarray(own()), jnp.asarray(np.arange(200_000, dtype=np.float32))

    def late(value, rank: int, wide):
        return value + jnp.sin(jnp.cumsum(jnp.sort(-wide))).sum() * 0 if rj.rank() == rank else value

    def linear(x, wide):
        _, tangent_of = jax.linearize(lambda x: sum_(x, name="linear"), x)
        return tangent_of(late(3 * x, 1, wide)), tangent_of(late(5 * x, 0, wide))

    def twice(x, wide):
        def inner(y):
            return jax.jvp(lambda y: sum_(y, name="twice"), (y,), (late(3 * x, 1, wide),))

        (_, first), (second, _) = jax.jvp(inner, (x,), (late(5 * x, 0, wide),))
        return first, second

    def with_metric(x):
        return (sum_(x * x) ** 2).sum(), sum_(3 * x, name="metric").sum()

    program = jax.jit(jax.value_and_grad(with_metric, has_aux=True))
    assert str(jax.make_jaxpr(program)(x)).count("call=NativeCall") == 3, "a metric has no gradient"
    same(program(x)[0][1], 3 * total().sum())
    for program in map(jax.jit, (linear, twice)):
        for _ in range(10):
            first, second = program(x, wide)
            same(first, 3 * total())
            same(second, 5 * total())


def check_other_collectives() -> None:
    jax.clear_caches()  # of jobs of other sizes, in which this process was a rank
    x, rank, n = jnp.asarray(own()), rj.rank(), rj.size()
    rows = np.arange(2.0 * n, dtype=np.float32)
    y = jnp.asarray(rows + 100 * rank)
    everything = np.stack([rows + 100 * each for each in range(n)])
    same(jax.jit(rj.allgather)(x), np.concatenate([own(each) for each in range(n)]))
    same(jax.jit(rj.allgather)(jnp.float32(rank)), np.arange(n))
    same(jax.vmap(rj.allgather, 0, 1)(jnp.arange(4.0)), np.tile(np.arange(4.0), (n, 1)))
    same(jax.jit(lambda x: rj.broadcast(x, n - 1))(x), own(n - 1))
    same(jax.jit(rj.alltoall)(y), everything[:, 2 * rank : 2 * rank + 2].reshape(-1))
    found, received = jax.jit(lambda y: rj.alltoall(y, [1] * n))(y)
    same(found, everything[:, rank])
    same(received, [1] * n)
    same(jax.jit(lambda y: rj.reducescatter(y, op=rj.Sum))(y), everything.sum(0)[2 * rank : 2 * rank + 2])
    for function in (
        rj.allgather,
        lambda y: rj.broadcast(y, n - 1),
        rj.alltoall,
        lambda y: rj.alltoall(y, [1] * n)[0],
        lambda y: rj.reducescatter(y, op=rj.Sum),
    ):
        weights = jnp.cos(jnp.arange(4.0 * n * n) + rank)

        def loss(y, function=function, weights=weights):
            result = function(y)
            return (result * weights[: result.shape[0]]).sum()

        same(jax.jit(jax.grad(loss))(y), jax.grad(loss)(y))


def check_trees() -> None:
    x, n = jnp.asarray(own()), rj.size()
    tree = {"a": x, "b": (2 * x, jnp.int32(3)), "none": None}
    for function in (sum_, jax.jit(sum_)):
        found = function(tree)
        same(found["a"], total())
        same(found["b"][0], 2 * total())
        assert int(found["b"][1]) == 3 * n
        assert found["none"] is None
    grouped = jax.jit(lambda a, b: rj.grouped_allreduce([a, b], op=rj.Sum))(x, 2 * x)
    same(grouped[1], 2 * total())
    keys = {"key": jax.random.key(rj.rank()), "number": jnp.uint32(rj.rank())}
    for function in (rj.broadcast, jax.jit(rj.broadcast, static_argnums=1)):
        found = function(keys, 0)
        assert jax.random.key_data(found["key"]).tolist() == jax.random.key_data(jax.random.key(0)).tolist()
        assert int(found["number"]) == 0


def check_dtypes() -> None:
    n = rj.size()
    for name in ("bfloat16", "float16", "float32", "int8", "uint8", "int16", "int32", "float8_e4m3fn", "float8_e5m2"):
        for function in (sum_, jax.jit(sum_)):
            found = function(jnp.ones(3, name))
            assert found.dtype == name
            same(found, np.full(3, n))
    assert jax.jit(sum_)(jnp.ones(3, bool)).tolist() == [True] * 3
    for name in ("complex64", "uint32"):
        for function in (sum_, jax.jit(sum_)):
            with pytest.raises(UnsupportedTypeError, match=name):
                function(jnp.ones(3, name))
    enable = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    for dtype in (np.int64, np.float64):  # made while x64 was on, reduced after that
        wide = (np.arange(3) * (2.0**40 + 1)).astype(dtype)
        with enable(True):
            given = jnp.asarray(wide)
        for function, expected in ((sum_, n * wide), (rj.allgather, np.tile(wide, n)), (rj.broadcast, wide)):
            found = function(given, **({"root_rank": 0} if function is rj.broadcast else {}))
            assert np.asarray(found).dtype == dtype
            assert np.asarray(found).tolist() == expected.tolist()
            with enable(True):
                assert (found + 1).tolist() == (expected + 1).tolist()
    exact = jnp.asarray([1.0, 1.0 + 2**-9], jnp.float32)
    assert sum_(exact, compression=rj.Compression.bf16).tolist() == [n, n]
    assert jax.jit(lambda x: sum_(x, compression=rj.Compression.fp16))(exact).tolist() == (n * exact).tolist()


def check_process_sets() -> list[float]:
    number = rj.add_process_set([0, 2])
    try:
        if rj.rank() == 1:
            return []
        function = jax.jit(lambda x: rj.allreduce(x, op=rj.Sum, process_set=number))
        return function(jnp.full(2, 1.0 + rj.rank())).tolist()
    finally:
        rj.remove_process_set(number)


def check_errors() -> None:
    rank, x = rj.rank(), jnp.ones(3)
    with pytest.raises(ArgumentError, match="no gradient"):
        jax.jit(jax.grad(lambda x: rj.allreduce(x, op=rj.Max).sum()))(x)
    with pytest.raises(ArgumentError):
        jax.jit(lambda x: rj.broadcast(x, 7))(x)
    with pytest.raises(ArgumentError, match="splits must be known when the program is traced"):
        jax.jit(lambda x, splits: rj.alltoall(x, splits=splits))(jnp.ones(2), jnp.ones(2, jnp.int32))
    static = jax.jit(lambda x, splits: rj.alltoall(x, splits=splits)[0], static_argnames="splits")
    assert static(jnp.arange(2.0), splits=(1, 1)).tolist() == [rank] * 2
    with pytest.raises(UnsupportedTypeError, match="blocking functions"):
        jax.jit(lambda x: rj.allreduce_async(x).wait())(x)
    with pytest.raises(ArgumentError):
        jax.vmap(lambda x: rj.allreduce(x, op=rj.Adasum))(jnp.ones((2, 2)))
    with pytest.raises(_RUNTIME_ERRORS, match=r"(?s)shapes differ.*rank 1: \[4\]"):
        jax.block_until_ready(jax.jit(sum_)(jnp.ones(3 + rank)))
    with pytest.raises(MismatchError) as caught, rj.collective_errors():
        jax.block_until_ready(jax.jit(sum_)(jnp.ones(3 + rank)))
    assert set(caught.value.details) == {0, 1}
    with pytest.raises(_RUNTIME_ERRORS, match="same shape on all ranks"):
        jax.block_until_ready(jax.jit(rj.allgather)(jnp.ones(3 + rank)))
    assert jax.jit(sum_)(x).tolist() == [2.0] * 3


CHECKS = (
    check_programs,
    check_gradients,
    check_tangents_in_their_order,
    check_other_collectives,
    check_trees,
    check_dtypes,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("size", [1, 3])
def test_transformations(check, size: int, rank_pool) -> None:
    rank_pool(size).run(check, init=True)


def test_process_sets(rank_pool) -> None:
    assert rank_pool(3).run(check_process_sets, init=True, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}) == [
        [4.0, 4.0],
        [],
        [4.0, 4.0],
    ]


def test_errors_come_on_all_ranks(rank_pool) -> None:
    rank_pool(2).run(check_errors, init=True)
