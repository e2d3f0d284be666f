"""Collectives in functions that XLA compiles."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import reigen.tensorflow as hvd
from reigen.errors import CollectiveError, MismatchError, PeerLostError, ReigenError
from reigen.tensorflow.errors import collective_error_of
from reigen.tensorflow.native.c_api import library_path
from reigen.testing import RankError, RankPool

HAS_INTERFACE = hasattr(ctypes.CDLL(str(library_path())), "XLA_FFI_GetApi")
pytestmark = pytest.mark.skipif(not HAS_INTERFACE, reason="this TensorFlow does not export XLA's interface")


def jit(function: Any) -> Any:
    return tf.function(function, jit_compile=True, autograph=False)


# -- values -----------------------------------------------------------------------------------------------------------


def values() -> None:
    """Every collective, in shapes and element types; what is around it is compiled, too."""
    rank, n = hvd.rank(), hvd.size()
    total = n * (n + 1) / 2
    dtypes = (tf.float32, tf.float16, tf.bfloat16, tf.int64, tf.uint8)
    given = [tf.cast(tf.fill(shape, rank + 1), dtype) for dtype in dtypes for shape in ([], [0, 2])]
    made = jit(lambda tensors: [hvd.allreduce(x * 2, op=hvd.Sum) + 1 for x in tensors])(given)
    for x, summed in zip(given, made, strict=True):
        assert (summed.dtype, summed.shape) == (x.dtype, x.shape)
        assert np.all(tf.cast(summed, tf.float64).numpy() == 2 * total + 1)
    x = tf.reshape(tf.range(6 * n, dtype=tf.float32), [2 * n, 3]) + 100.0 * rank

    @jit
    def all_of_them(x: tf.Tensor) -> Any:
        turned = hvd.allreduce(tf.transpose(x), op=hvd.Sum, name='a "name" \\ ü')
        grouped = hvd.grouped_allreduce([x, tf.cast(x[0], tf.int64)], op=hvd.Max)
        rows = hvd.allgather(x), hvd.allgather(x[0, 0]), hvd.reducescatter(x, op=hvd.Sum)
        several = hvd.grouped_allgather([x, x[0]]), hvd.grouped_reducescatter([x, x + 1.0], op=hvd.Average)
        return turned, grouped, hvd.broadcast(x, n - 1), rows, several, hvd.alltoall(x), hvd.rank_op(), hvd.size_op()

    everyone = [x.numpy() + 100.0 * (other - rank) for other in range(n)]
    turned, (most, integers), sent, (gathered, scalars, share), several, exchanged, own, size = all_of_them(x)
    mine = slice(2 * rank, 2 * rank + 2)
    np.testing.assert_array_equal(turned, sum(everyone).T)
    np.testing.assert_array_equal(most, everyone[-1])
    np.testing.assert_array_equal(integers, everyone[-1][0])
    np.testing.assert_array_equal(sent, everyone[-1])
    np.testing.assert_array_equal(gathered, np.concatenate(everyone))
    np.testing.assert_array_equal(scalars, [each[0, 0] for each in everyone])
    np.testing.assert_array_equal(share, sum(everyone)[mine])
    np.testing.assert_array_equal(several[0][1], np.concatenate([each[0] for each in everyone]))
    np.testing.assert_allclose(several[1][1], np.mean(everyone, 0)[mine] + 1.0)
    np.testing.assert_array_equal(exchanged, np.concatenate([each[mine] for each in everyone]))
    assert (int(own), int(size)) == (rank, n)


def gradients() -> None:
    """Those of the same functions that are not compiled; from a tape inside and from one outside."""
    n = hvd.size()
    x = tf.Variable(tf.reshape(tf.range(4.0 * n), [2 * n, 2]) + float(hvd.rank()))
    weights = tf.reshape(tf.range(4.0 * n * n), [2 * n * n, 2])
    functions = [
        lambda x: hvd.allreduce(x, op=hvd.Average, name="a") * weights[: 2 * n],
        lambda x: hvd.grouped_allreduce([x, x * x], op=hvd.Sum, name="b")[1] * weights[: 2 * n],
        lambda x: hvd.allgather(x, name="c") * weights,
        lambda x: hvd.broadcast(x, n - 1, name="d") * weights[: 2 * n],
        lambda x: hvd.reducescatter(x, op=hvd.Sum, name="e") * weights[:2],
        lambda x: hvd.alltoall(x, name="f") * weights[: 2 * n],
    ]
    for function in functions:

        def step(function: Any = function) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(function(x * 1.0))
            return tape.gradient(loss, x)

        truth = tf.function(step, autograph=False)()
        np.testing.assert_allclose(jit(step)(), truth, rtol=1e-6)
        compiled = jit(function)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(compiled(x * 1.0))
        np.testing.assert_allclose(tape.gradient(loss, x), truth, rtol=1e-6)


def control_flow() -> None:
    """Loops and branches; and results that nobody uses are communicated all the same."""
    n = hvd.size()

    @tf.function(jit_compile=True)
    def run(x: tf.Tensor, flag: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(3):
            x = hvd.allreduce(x, op=hvd.Sum)
        hvd.allreduce(x, name="unused")
        return hvd.allreduce(x, op=hvd.Max) + 1.0 if flag else hvd.broadcast(x, 0)

    for flag in (True, False, True):
        assert run(tf.constant([1.0]), tf.constant(flag)).numpy() == n**3 + flag


@pytest.mark.parametrize(("size", "func"), [(2, values), (3, values), (2, gradients), (3, control_flow)])
def test_functions(rank_pool, size, func):
    rank_pool(size).run(func, init=True)


# -- training ---------------------------------------------------------------------------------------------------------


def train() -> tuple[bytes, bytes]:
    """Steps of a distributed tape in one compiled function; the weights, and those of the same without XLA."""
    found = []
    for compiles in (True, False):
        tf.random.set_seed(1)
        inner, outer = tf.Variable(tf.random.normal([4, 8])), tf.Variable(tf.random.normal([8, 1]))
        random = np.random.default_rng(hvd.rank())

        @tf.function(jit_compile=compiles)
        def step(x: tf.Tensor, y: tf.Tensor, inner: tf.Variable, outer: tf.Variable) -> tf.Tensor:
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = tf.reduce_mean(tf.square(tf.tanh(x @ inner) @ outer - y))
            for variable, gradient in zip((inner, outer), tape.gradient(loss, [inner, outer]), strict=True):
                variable.assign_sub(0.1 * gradient)
            return loss

        for _ in range(5):
            x = tf.constant(random.standard_normal((6, 4)), tf.float32)
            step(x, tf.reduce_sum(x, 1, keepdims=True), inner, outer)
        found.append(np.concatenate([inner.numpy().ravel(), outer.numpy().ravel()]))
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-6)
    return found[0].tobytes(), found[1].tobytes()


@pytest.mark.parametrize("size", [2, 3])
def test_replicas_stay_equal(rank_pool, size):
    assert len(set(rank_pool(size).run(train, init=True))) == 1


def fit() -> bytes:
    """A Keras model whose step is compiled, with the distributed optimizer."""
    import keras

    import reigen.keras as hk

    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
    model.compile(hk.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse", jit_compile=True)
    rows = np.random.default_rng(hvd.rank()).standard_normal((22, 4)).astype(np.float32)
    model.fit(rows, rows.sum(1), batch_size=8, epochs=2, verbose=0)
    return np.concatenate([each.ravel() for each in model.get_weights()]).tobytes()


def test_keras_fits_compiled(rank_pool):
    assert len(set(rank_pool(2).run(fit, init=True))) == 1


# -- order ------------------------------------------------------------------------------------------------------------


def many_at_once() -> None:
    """More operations under way than XLA has threads: none of them holds one, and each comes when it can."""
    n, count = hvd.size(), 24

    @jit
    def run(x: tf.Tensor, work: tf.Tensor) -> list[tf.Tensor]:
        results = []
        for index in range(count):
            if index % 3 == 0:
                work = tf.tanh(work @ work)
            results.append(hvd.allreduce(x + float(index) + 0.0 * tf.reduce_sum(work), op=hvd.Sum))
        return results

    for step in range(5):
        made = run(tf.constant(float(step)), tf.ones([60, 60]) * 0.01)
        assert [float(each) for each in made] == [n * (step + index) for index in range(count)]


def from_several_threads() -> None:
    """Functions of different names that the ranks begin in different orders."""
    n, errors = hvd.size(), []
    functions = [
        jit(lambda x, index=index: hvd.allreduce(x, op=hvd.Sum, name=f"thread.{index}") + index) for index in range(6)
    ]

    def work(index: int) -> None:
        try:
            for step in range(10):
                assert float(functions[index](tf.constant(float(step)))) == n * step + index
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    order = range(6) if hvd.rank() % 2 else reversed(range(6))
    threads = [threading.Thread(target=work, args=(index,)) for index in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.parametrize("func", [many_at_once, from_several_threads])
def test_nothing_waits_for_a_thread(rank_pool, func):
    rank_pool(2).run(func, init=True)


# -- errors -----------------------------------------------------------------------------------------------------------


def mismatch() -> None:
    """It is one on all ranks; the next program runs."""
    with pytest.raises(tf.errors.FailedPreconditionError, match="rank") as raised:
        jit(lambda x: hvd.allreduce(x, name="m"))(tf.ones([2 + hvd.rank()]))
    assert isinstance(collective_error_of(raised.value), MismatchError)
    with pytest.raises(tf.errors.UnknownError, match="same shape on all ranks") as raised:
        jit(lambda x: hvd.allgather(x, name="rows"))(tf.ones([2 + hvd.rank()]))
    assert isinstance(collective_error_of(raised.value), CollectiveError)
    assert jit(lambda x: hvd.allreduce(x, name="fine"))(tf.ones([])).numpy() == 1.0


def refusals() -> None:
    """Errors of the trace say what is not compiled."""
    unknown = [tf.TensorSpec([None], tf.float32)]
    cases = {
        "unknown shapes.*jit_compile": lambda: tf.function(
            hvd.allreduce, unknown, jit_compile=True
        ).get_concrete_function(),
        "with splits": lambda: jit(lambda x: hvd.alltoall(x, [1] * hvd.size()))(tf.ones([hvd.size()])),
        "not equal": lambda: jit(hvd.reducescatter)(tf.ones([hvd.size() + 1])),
        "inner @tf.function": lambda: jit(tf.function(hvd.allreduce, autograph=False))(tf.ones([2])),
        "join": lambda: jit(lambda x: x + tf.cast(hvd.join(), tf.float32))(tf.ones([2])),
    }
    for pattern, call in cases.items():
        with pytest.raises(ReigenError, match=pattern):
            call()


@pytest.mark.parametrize("func", [mismatch, refusals])
def test_errors(rank_pool, func):
    rank_pool(2).run(func, init=True)


def lost_peer() -> str:
    run = jit(lambda x: hvd.allreduce(x, name="lost"))
    run(tf.ones([4]))
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(tf.errors.UnknownError) as caught:
        run(tf.ones([4]))
    known = collective_error_of(caught.value)
    assert isinstance(known, PeerLostError)
    assert known.ranks == (1,)
    return str(caught.value)


def test_a_rank_that_dies_while_a_program_waits():
    with RankPool(2) as pool, pytest.raises(RankError) as caught:
        pool.run(lost_peer, init=True, timeout=90)
    assert [failure.rank for failure in caught.value.failures] == [1]
    assert "rank(s) 1 died" in caught.value.results[0]
