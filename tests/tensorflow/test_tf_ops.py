"""Collectives on tensors of TensorFlow, in real ranks, against closed forms: at once, in functions, and in sessions."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import reigen.tensorflow as hvd
from reigen.errors import MismatchError, UnsupportedError
from reigen.tensorflow import graph
from reigen.tensorflow.errors import collective_error_of

DTYPES = ["uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
Function = Callable[[Any], Any]


# -- where a function of tensors runs ---------------------------------------------------------------------------------


def at_once(function: Function, tensor: tf.Tensor) -> Any:
    return tf.nest.map_structure(lambda each: each.numpy(), function(tensor))


def in_a_function(function: Function, tensor: tf.Tensor) -> Any:
    return tf.nest.map_structure(lambda each: each.numpy(), tf.function(function)(tensor))


def in_a_function_of_any_shape(function: Function, tensor: tf.Tensor) -> Any:
    traced = tf.function(function, input_signature=[tf.TensorSpec([None] * len(tensor.shape), tensor.dtype)])
    return tf.nest.map_structure(lambda each: each.numpy(), traced(tensor))


def in_a_session(function: Function, tensor: tf.Tensor) -> Any:
    value = tensor.numpy()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        given = tf.compat.v1.placeholder(tensor.dtype, tensor.shape)
        return session.run(function(given), {given: value})


PLACES = [at_once, in_a_function, in_a_function_of_any_shape, in_a_session]


@contextlib.contextmanager
def operations(native: bool) -> Iterator[None]:
    """Graphs have operations of our own, or functions of Python."""
    if native:
        assert graph.native_collectives() is not None
        yield
        return
    with mock.patch.object(graph, "native_collectives", return_value=None):
        yield


NATIVE = pytest.mark.parametrize("native", [True, False], ids=["native", "fallback"])


def tensor(dtype: str, rank: int, shape: tuple[int, ...] = (3, 4)) -> tf.Tensor:
    """Small whole numbers, so that every dtype holds them and their sums exactly."""
    numbers = np.arange(int(np.prod(shape))).reshape(shape) % 7 + rank
    return tf.cast(tf.constant(numbers), dtype)


def as_floats(value: Any) -> Any:
    return np.asarray(value).astype(np.float64)


# -- signatures --------------------------------------------------------------------------------------------------------

REDUCTION = "average device_dense device_sparse compression op prescale_factor postscale_factor"
SIGNATURES = {
    "allreduce": f"tensor {REDUCTION} name process_set ignore_name_scope",
    "grouped_allreduce": f"tensors {REDUCTION} process_set ignore_name_scope name",
    "allgather": "tensor name ignore_name_scope process_set",
    "grouped_allgather": "tensors name ignore_name_scope process_set",
    "broadcast": "tensor root_rank name ignore_name_scope process_set",
    "broadcast_": "variables root_rank name process_set",
    "alltoall": "tensor splits name ignore_name_scope process_set",
    "reducescatter": "tensor device_dense compression op name process_set ignore_name_scope prescale_factor "
    "postscale_factor",
    "grouped_reducescatter": "tensors device_dense compression op name process_set ignore_name_scope prescale_factor "
    "postscale_factor",
    "broadcast_variables": "variables root_rank process_set inplace",
    "broadcast_global_variables": "root_rank",
    "broadcast_object": "obj root_rank session name process_set",
    "broadcast_object_fn": "root_rank session name process_set",
    "allgather_object": "obj session name process_set",
    "size_op": "process_set_id name",
    "process_set_included_op": "process_set_id name",
    "rank_op": "name",
    "local_rank_op": "name",
    "local_size_op": "name",
    "gpu_available": "ext_base_name verbose",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_are_horovods_in_its_order(name):
    assert list(inspect.signature(getattr(hvd, name)).parameters) == SIGNATURES[name].split()


# -- values -----------------------------------------------------------------------------------------------------------


def every_dtype_and_op(native: bool) -> None:
    n = hvd.size()
    for dtype in DTYPES:
        mine = tensor(dtype, hvd.rank())
        everyone = np.stack([as_floats(tensor(dtype, r)) for r in range(n)])
        truth = {hvd.Min: everyone.min(0), hvd.Max: everyone.max(0)}
        if dtype != "bool":
            mean = everyone.mean(0) if dtype in FLOATS else np.trunc(everyone.mean(0))
            truth |= {hvd.Sum: everyone.sum(0), hvd.Product: everyone.prod(0), hvd.Average: mean}
        ops = list(truth)

        def reduce_all(x: Any, ops: list[int] = ops, dtype: str = dtype) -> Any:
            return [hvd.allreduce(x, op=op, name=f"{dtype}.{op}") for op in ops]

        with operations(native):
            for place in (at_once, in_a_function, in_a_session):
                for op, result in zip(ops, place(reduce_all, mine), strict=True):
                    assert result.dtype == mine.dtype.as_numpy_dtype
                    assert np.array_equal(as_floats(result), truth[op]), (dtype, op, place)


def every_dtype_moves(native: bool) -> None:
    rank, n = hvd.rank(), hvd.size()
    for dtype in DTYPES:
        everyone = [as_floats(tensor(dtype, r, (n, 2))) for r in range(n)]
        rows = [each[rank : rank + 1] for each in everyone]

        def move(x: Any) -> Any:
            exchanged, splits = hvd.alltoall(x, splits=tf.ones([hvd.size()], tf.int32))
            return (
                hvd.broadcast(x, hvd.size() - 1),
                hvd.allgather(x),
                hvd.alltoall(x),
                exchanged,
                splits,
                hvd.reducescatter(x, op=hvd.Max),
                hvd.grouped_allgather([x, tf.cast(x[:1], tf.int32)])[1],
            )

        with operations(native):
            for place in PLACES:
                root, gathered, even, uneven, splits, scattered, heads = place(move, tensor(dtype, rank, (n, 2)))
                assert np.array_equal(as_floats(root), everyone[-1])
                assert np.array_equal(as_floats(gathered), np.concatenate(everyone))
                assert np.array_equal(as_floats(even), np.concatenate(rows))
                assert np.array_equal(as_floats(uneven), np.concatenate(rows))
                assert splits.tolist() == [1] * n
                assert np.array_equal(as_floats(scattered), np.max(rows, axis=0))
                assert np.array_equal(heads, np.concatenate([each[:1] for each in everyone]))


def shapes_and_factors(native: bool) -> None:
    rank, n = hvd.rank(), hvd.size()
    total = sum(range(1, n + 1))

    def many(x: Any) -> Any:
        scaled = hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
        narrow = hvd.allreduce(x, compression=hvd.Compression.bf16)
        empty = hvd.allgather(x[:0])
        group = hvd.grouped_allreduce([x, x[0], tf.zeros([0, 3])], op=hvd.Sum, compression=hvd.Compression.fp16)
        rows = hvd.allgather(tf.repeat(x[:1], hvd.rank() + 1))
        return scaled, narrow, empty, *group, rows, hvd.allgather(x[0])

    with operations(native):
        for place in PLACES:
            made = place(many, tf.constant([1.0, -3.0]) * (rank + 1))
            assert made[0].tolist() == [2.0 * total, -6.0 * total]
            assert made[1].tolist() == [total / n, -3.0 * total / n]
            assert made[2].shape == (0,)
            assert made[3].tolist() == [total, -3.0 * total]
            assert made[4] == total
            assert made[5].shape == (0, 3)
            assert made[6].tolist() == [each for each in range(1, n + 1) for _ in range(each)]
            assert made[7].tolist() == list(range(1, n + 1))


@NATIVE
@pytest.mark.parametrize("func", [every_dtype_and_op, every_dtype_moves, shapes_and_factors])
@pytest.mark.parametrize("size", [1, 2])
def test_values(rank_pool, size, func, native):
    rank_pool(size).run(func, native, init=True)


def static_shapes() -> None:
    """What is known of the shapes before a graph runs."""

    @tf.function(input_signature=[tf.TensorSpec([4, 3]), tf.TensorSpec(None), tf.TensorSpec([])])
    def shapes(known: tf.Tensor, unknown: tf.Tensor, scalar: tf.Tensor) -> list[Any]:
        found.append(hvd.allreduce(known).shape.as_list())
        found.append(hvd.allgather(known).shape.as_list())
        found.append(hvd.allgather(scalar).shape.as_list())
        found.append(hvd.alltoall(known, splits=[4])[1].shape.as_list())
        found.append(hvd.allgather(unknown).shape.rank)
        return []

    for native in (True, False):
        found: list[Any] = []
        with operations(native):
            tf.function(shapes.python_function, input_signature=shapes.input_signature).get_concrete_function()
        assert found == [[4, 3], [None, 3], [None], [None], None], native


def test_static_shapes(rank_pool):
    rank_pool(1).run(static_shapes, init=True)


# -- gradients --------------------------------------------------------------------------------------------------------


def gradients(native: bool) -> None:
    """In graphs they are the same as those of eager tensors, which the conformance suite compares with closed forms."""
    n, rank = hvd.size(), hvd.rank()
    functions: dict[str, Function] = {
        "allreduce": lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0),
        "grouped": lambda x: hvd.grouped_allreduce([x, x * x])[1],
        "allgather": lambda x: hvd.allgather(x * x),
        "allgathers": lambda x: hvd.grouped_allgather([x, x[: hvd.rank() + 1] * 2.0])[1],
        "scalar": lambda x: hvd.allgather(x[0, 0]),
        "broadcast": lambda x: hvd.broadcast(x * 3.0, hvd.size() - 1),
        "alltoall": lambda x: hvd.alltoall(x, splits=[1] * hvd.size())[0],
        "reducescatter": lambda x: hvd.reducescatter(x * x, op=hvd.Sum, postscale_factor=0.5),
        "compressed": lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16),
    }

    def differentiate(function: Function) -> Function:
        def gradient(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                made = function(x)
                loss = tf.reduce_sum(made * (1.0 + tf.cast(tf.range(tf.size(made)), tf.float32)[0] + rank))
            return tape.gradient(loss, x)

        return gradient

    x = tf.reshape(tf.range(2.0 * (n + 1)), [n + 1, 2]) + float(rank)
    for name, function in functions.items():
        truth = at_once(differentiate(function), x)
        with operations(native):
            for place in PLACES[1:3]:
                assert np.array_equal(place(differentiate(function), x), truth), (name, place)

            def by_session(y: Any, function: Function = function) -> Any:
                made = function(y)
                return tf.gradients(made * (1.0 + rank), y)[0]

            assert np.array_equal(in_a_session(by_session, x), truth), name
    for place in PLACES[:2]:
        with pytest.raises(ValueError, match=r"op=Min has no gradient; use tf\.stop_gradient\(\)"), operations(native):
            place(differentiate(lambda x: hvd.allreduce(x, op=hvd.Min)), x)


def second_gradients(native: bool) -> None:
    def curvature(x: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(hvd.allreduce(x**3, op=hvd.Sum))
            slope = inner.gradient(loss, x)
        return outer.gradient(slope, x)

    with operations(native):
        for place in (at_once, in_a_function):
            assert place(curvature, tf.constant([1.0, 2.0])).tolist() == [6.0 * hvd.size(), 12.0 * hvd.size()]


def second_gradients_of_broadcast(native: bool) -> None:
    """The root's gradient of sum(y**3) is the average of 3 y**2; averaged again, its own is 6 y / n."""
    root = hvd.size() - 1

    def slope_and_curvature(x: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(hvd.broadcast(x, root) ** 3)
            slope = inner.gradient(loss, x)
        return slope, outer.gradient(slope, x)

    is_root = float(hvd.rank() == root)
    with operations(native):
        for place in (at_once, in_a_function):
            slope, curvature = place(slope_and_curvature, tf.constant([1.0, 2.0]))
            assert slope.tolist() == [3.0 * is_root, 12.0 * is_root], place
            assert curvature.tolist() == [6.0 / hvd.size() * is_root, 12.0 / hvd.size() * is_root], place
            assert hvd.allreduce(tf.constant([5.0])).numpy().tolist() == [5.0]  # the ranks' calls still match


def tangents(native: bool) -> None:
    """In forward mode they are the collective of the tangents; those of x * x are 2 x v."""
    n, rank = hvd.size(), hvd.rank()

    def numbers(r: int) -> np.ndarray:
        return np.arange(1.0, 2 * n + 1).reshape(n, 2) + r

    everyone = [2 * numbers(r) * (r + 2) for r in range(n)]
    total, own = sum(everyone), slice(rank, rank + 1)
    cases: dict[str, tuple[Function, Any]] = {
        "allreduce": (lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0), 2.0 * total),
        "grouped": (lambda x: hvd.grouped_allreduce([tf.cast(x, tf.int32), x], name="pair")[1], total / n),
        "allgather": (hvd.allgather, np.concatenate(everyone)),
        "broadcast": (lambda x: hvd.broadcast(x, n - 1), everyone[-1]),
        "alltoall": (
            lambda x: hvd.alltoall(x, splits=[1] * n)[0],
            np.concatenate([each[own] for each in everyone]),
        ),
        "reducescatter": (lambda x: hvd.reducescatter(x, op=hvd.Average), total[own] / n),
    }

    def differentiate(function: Function) -> Function:
        def tangent(x: Any) -> Any:
            with tf.autodiff.ForwardAccumulator(x, tf.fill([n, 2], rank + 2.0)) as accumulator:
                made = function(x * x)
            return accumulator.jvp(made)

        return tangent

    x = tf.constant(numbers(rank), tf.float32)
    with operations(native):
        for place in PLACES[:2]:
            for name, (function, truth) in cases.items():
                assert np.array_equal(place(differentiate(function), x), truth), (name, place)
            with pytest.raises(ValueError, match=r"op=Max has no gradient; use tf\.stop_gradient\(\)"):
                place(differentiate(lambda x: hvd.allreduce(x, op=hvd.Max)), x)


def tangents_of_functions() -> None:
    """TensorFlow makes them by transposing the function's gradient: an error where that would give something else."""
    n, rank = hvd.size(), hvd.rank()
    x = tf.constant([1.0, 2.0]) * (rank + 1.0)

    def tangent(function: Function) -> Any:
        with tf.autodiff.ForwardAccumulator(x, tf.ones([2])) as accumulator:
            made = function(x)
        return accumulator.jvp(made)

    def in_a_loop(y: Any) -> Any:
        return tf.while_loop(lambda i, _: i < 1, lambda i, z: (i + 1, hvd.broadcast(z, 0)), (0, y))[1]

    total = tangent(tf.function(lambda y: hvd.allreduce(y * y, op=hvd.Sum)))
    assert total.numpy().tolist() == [n * (n + 1.0), 2.0 * n * (n + 1)]
    for function, what in (
        (tf.function(lambda y: hvd.broadcast(y * y, 0)), "broadcast"),
        (tf.function(lambda y: hvd.allgather(y * y)), "allgather"),
    ):
        for outer in (tangent, tf.function(tangent, autograph=False)):
            with pytest.raises(UnsupportedError, match=rf"forward mode cannot differentiate .* calls {what}"):
                outer(function)
    with pytest.raises(UnsupportedError, match=r"forward mode cannot differentiate .* calls broadcast"):
        tf.function(lambda: tangent(in_a_loop), autograph=False)()
    assert hvd.allreduce(tf.constant([5.0])).numpy().tolist() == [5.0]  # the ranks' calls still match


def test_tangents_of_functions(rank_pool):
    rank_pool(2).run(tangents_of_functions, init=True)


@NATIVE
@pytest.mark.parametrize("func", [tangents, gradients, second_gradients, second_gradients_of_broadcast])
def test_gradients(rank_pool, func, native):
    rank_pool(2).run(func, native, init=True)


# -- IndexedSlices -----------------------------------------------------------------------------------------------------


def slices(native: bool) -> None:
    rank, n = hvd.rank(), hvd.size()

    def reduce(x: Any) -> Any:
        own = tf.IndexedSlices(x, tf.constant([rank, 5]), tf.constant([8, 2]))
        mean = hvd.allreduce(own)
        group = hvd.grouped_allreduce([x, own, x[0]], op=hvd.Sum)
        return mean.values, mean.indices, mean.dense_shape, group[0], group[1].values, group[2]

    with operations(native):
        for place in PLACES:
            x = tf.constant([[1.0, 2.0], [3.0, 4.0]]) * (rank + 1)
            values, indices, shape, dense, summed, row = place(reduce, x)
            everyone = np.concatenate([[[1.0, 2.0], [3.0, 4.0]]] * n) * np.repeat(np.arange(1, n + 1), 2)[:, None]
            assert np.array_equal(values, everyone / n)
            assert np.array_equal(summed, everyone)
            assert indices.tolist() == [each for r in range(n) for each in (r, 5)]
            assert shape.tolist() == [8, 2]
            assert dense.tolist() == [[3.0, 6.0], [9.0, 12.0]]
            assert row.tolist() == [3.0, 6.0]
    own = tf.IndexedSlices(tf.zeros([1, 2]), tf.constant([0]))
    for wrong in ({"op": hvd.Min}, {"op": hvd.Adasum}, {"prescale_factor": 2.0}, {"postscale_factor": 2.0}):
        with pytest.raises(NotImplementedError):
            hvd.allreduce(own, **wrong)


@NATIVE
def test_indexed_slices(rank_pool, native):
    rank_pool(2).run(slices, native, init=True)


# -- errors -----------------------------------------------------------------------------------------------------------


def disagree(native: bool) -> None:
    """Every rank is told; the next collective works."""
    rank, n = hvd.rank(), hvd.size()
    different: dict[str, Function] = {
        "shapes": lambda x: hvd.allreduce(tf.zeros([hvd.rank() + 1]) + x[0], name="m"),
        "types": lambda x: hvd.allreduce(tf.cast(x, [tf.int32, tf.float32][hvd.rank()]), name="m"),
        "roots": lambda x: hvd.broadcast(x, hvd.rank(), name="m"),
        "rows": lambda x: hvd.allgather(tf.zeros([1, hvd.rank() + 1]) + x[0], name="m"),
        "kinds": lambda x: (hvd.allreduce if hvd.rank() else hvd.allgather)(x, name="m"),
        "sparse": lambda x: hvd.allreduce(tf.IndexedSlices(x, tf.range(2)) if hvd.rank() else x, name="m"),
    }
    kind = tf.errors.FailedPreconditionError
    with operations(native):
        for place in (at_once, in_a_function, in_a_session):
            for what, function in different.items():
                with pytest.raises(kind if native or place is at_once else tf.errors.UnknownError) as caught:
                    place(function, tf.ones([2]))
                known = collective_error_of(caught.value)
                assert isinstance(known, hvd.HorovodInternalError), (what, place)
                assert known.tensor == "m"
                assert set(known.details) == set(range(n))
            assert place(lambda x: hvd.allreduce(x, op=hvd.Sum), tf.ones([2])).tolist() == [n, n]
        with pytest.raises(MismatchError) as mapped, hvd.collective_errors():
            in_a_function(different["shapes"], tf.ones([2]))
        assert mapped.value.tensor == "m"
        with pytest.raises(tf.errors.InvalidArgumentError), hvd.collective_errors():
            tf.reshape(tf.ones([2]), [3])  # none of ours
    with pytest.raises(kind) as raised:
        hvd.allreduce(tf.zeros([rank + 1]), name="eager")
    assert isinstance(raised.value, hvd.HorovodInternalError)


def wrong_arguments(native: bool) -> None:
    invalid = tf.errors.InvalidArgumentError
    n = hvd.size()
    foreign = hvd.ProcessSet([0])
    wrong: list[Function] = [
        lambda x: hvd.alltoall(x[:1]),
        lambda x: hvd.alltoall(x, splits=[5] * hvd.size()),
        lambda x: hvd.alltoall(x, splits=[1]),
        lambda x: hvd.broadcast(x, 7),
    ]
    with operations(native):
        for place in (at_once, in_a_function, in_a_session):
            for function in wrong:
                with pytest.raises(invalid):
                    place(function, tf.ones([2 * n]))
            with pytest.raises(ValueError, match="not registered"):
                place(lambda x: hvd.allreduce(x, process_set=foreign), tf.ones([2]))
            with pytest.raises(invalid):
                place(lambda x: hvd.alltoall(x, splits=tf.ones([hvd.size()], tf.int64)), tf.ones([n]))
            with pytest.raises((invalid, ValueError), match="complex64"):
                place(lambda x: hvd.allreduce(tf.cast(x, tf.complex64)), tf.ones([2]))
            assert place(lambda x: hvd.allreduce(x, op=hvd.Sum), tf.ones([2])).tolist() == [n, n]
    for value in (object(), tf.sparse.from_dense([1.0])):
        with pytest.raises(TypeError):
            hvd.allreduce(value)
    with pytest.raises(ValueError, match="supersedes"):
        hvd.allreduce(tf.ones([2]), average=True, op=hvd.Sum)


@NATIVE
@pytest.mark.parametrize("func", [disagree, wrong_arguments])
def test_errors(rank_pool, func, native):
    rank_pool(2).run(func, native, init=True)


def before_init(native: bool) -> None:
    with operations(native):
        for place in (at_once, in_a_function):
            with pytest.raises((ValueError, tf.errors.OpError), match="has not been initialized"):
                place(lambda x: hvd.allreduce(x, name="too early"), tf.ones([2]))


@NATIVE
def test_a_graph_that_runs_before_init(rank_pool, native):
    rank_pool(1).run(before_init, native)


# -- process sets, queries, objects ------------------------------------------------------------------------------------


def in_sets(native: bool) -> None:
    rank = hvd.rank()
    own = hvd.ProcessSet([0, 2])
    hvd.shutdown()
    hvd.init(process_sets=[own])
    number = own.process_set_id

    def places(x: Any) -> Any:
        return (
            hvd.size_op(number),
            hvd.process_set_included_op(number),
            hvd.rank_op(),
            hvd.size_op(),
            hvd.local_rank_op(),
        )

    with operations(native):
        for place in PLACES:
            assert [int(each) for each in place(places, tf.zeros([]))] == [2, int(rank != 1), rank, 3, rank]
            if rank != 1:
                total, mine = place(
                    lambda x: (hvd.allreduce(x, op=hvd.Sum, process_set=own), hvd.broadcast(x, 2, process_set=own)),
                    tf.constant([float(rank)]),
                )
                assert total.tolist() == mine.tolist() == [2.0]
            else:
                with pytest.raises(tf.errors.InvalidArgumentError, match="rank 1 is not"):
                    place(lambda x: hvd.allreduce(x, process_set=own), tf.zeros([]))
        hvd.allreduce(tf.zeros([]), name="the end")  # who leaves before would end the others' collectives


@NATIVE
def test_process_sets(rank_pool, native):
    rank_pool(3).run(in_sets, native, init=True)


def variables(native: bool) -> None:
    rank = hvd.rank()
    with operations(native):
        own = [tf.Variable([rank, 1.0]), tf.Variable(rank, dtype=tf.int64), tf.Variable([rank > 0])]
        hvd.broadcast_variables(own, 1)
        assert [each.numpy().tolist() for each in own] == [[1.0, 1.0], 1, [True]]
        with pytest.raises(tf.errors.FailedPreconditionError, match="different variables"):
            hvd.broadcast_variables(own[rank:], 1)  # the ranks have different numbers of them
        hvd.broadcast_variables(own, 1)
        own[0].assign([rank + 3.0, rank])

        @tf.function
        def broadcast() -> Any:
            return hvd.broadcast_(own[:1], root_rank=1)

        assert broadcast()[0].numpy().tolist() == own[0].numpy().tolist() == [4.0, 1.0]
        with pytest.raises(RuntimeError):
            hvd.broadcast_global_variables(0)
        with tf.Graph().as_default():
            variable = tf.compat.v1.get_variable("v", initializer=tf.constant([1.0 * rank, 5.0]))
            hook = hvd.BroadcastGlobalVariablesHook(1)
            with tf.compat.v1.train.MonitoredSession(hooks=[hook]) as session:
                assert session.run(variable).tolist() == [1.0, 5.0]


def objects() -> None:
    rank = hvd.rank()
    assert hvd.broadcast_object({"of": rank}, 1) == {"of": 1}
    assert hvd.broadcast_object_fn(1)([rank]) == [1]
    assert hvd.allgather_object(rank, name="ranks") == [0, 1]
    with tf.Graph().as_default():
        assert hvd.broadcast_object(rank, root_rank=1, session=None, name="in a graph") == 1


def joins(native: bool) -> None:
    """A rank without data takes part with zeros."""
    last = None
    with operations(native):
        for place in (at_once, in_a_function):
            if hvd.rank() == 0:
                assert place(lambda x: hvd.allreduce(x, op=hvd.Sum, name="j"), tf.ones([2])).tolist() == [1.0, 1.0]
            last = place(lambda x: hvd.join(), tf.zeros([]))
            assert last == 0
    assert last is not None


@NATIVE
@pytest.mark.parametrize("func", [variables, joins])
def test_variables_and_joins(rank_pool, func, native):
    rank_pool(2).run(func, native, init=True)


def test_objects(rank_pool):
    rank_pool(2).run(objects, init=True)
