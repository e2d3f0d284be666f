"""A test suite as people write them for Horovod with TensorFlow: init() in every test, loops over dtypes.

Run it in several processes: reigen run --as-horovod -np 2 python suite_tensorflow.py
"""
# ruff: noqa: I001, PT009, PT027

import itertools
import os
import unittest
import warnings

os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd
from horovod.common.process_sets import ProcessSet

SMALL = [tf.uint8, tf.int8]
INTEGERS = [tf.int32, tf.int64]
FLOATS = [tf.float16, tf.float32, tf.float64]
REDUCED = [*SMALL, *INTEGERS, *FLOATS]
MOVED = [*REDUCED, tf.uint16, tf.int16]
DIMS = [1, 2, 3]
SIZES = [17, 32, 81, 12, 15, 23, 22]

MISMATCH = tf.errors.FailedPreconditionError
ARGUMENT = tf.errors.InvalidArgumentError


def in_both_ways(function):
    """The same call eagerly, and compiled to a graph."""
    return (function, tf.function(function))


class TensorFlowTests(unittest.TestCase):
    def setUp(self):
        warnings.simplefilter("ignore", DeprecationWarning)
        hvd.init()
        self.rank, self.size = hvd.rank(), hvd.size()
        tf.random.set_seed(1234)
        np.random.seed(1234)

    def several(self):
        if self.size == 1:
            self.skipTest("needs more than one process")

    def cases(self, dtypes, dims=DIMS, edge=17):
        for dtype, dim in itertools.product(dtypes, dims):
            low = 0 if dtype.is_unsigned else -100
            values = tf.random.uniform([edge] * dim, low, 100, dtype=tf.int32)
            yield tf.cast(values, dtype), dtype, dim

    def assert_same(self, one, other):
        self.assertEqual(one.dtype, other.dtype)
        self.assertEqual(tuple(one.shape), tuple(other.shape))
        self.assertTrue(np.array_equal(np.asarray(one), np.asarray(other)), (one, other))

    # -- the job

    def test_rank_and_size(self):
        self.assertEqual(int(os.environ["HOROVOD_RANK"]), self.rank)
        self.assertEqual(int(os.environ["HOROVOD_SIZE"]), self.size)
        self.assertTrue(hvd.is_initialized())
        self.assertTrue(hvd.is_homogeneous())
        self.assertEqual(hvd.local_size() * hvd.cross_size(), self.size)
        self.assertIsInstance(hvd.nccl_built(), int)

    def test_rank_and_size_as_operations(self):
        def job():
            return hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()

        for call in in_both_ways(job):
            self.assertEqual([int(v) for v in call()], [self.rank, self.size, hvd.local_rank(), hvd.local_size()])

    def test_init_again(self):
        hvd.shutdown()
        self.assertFalse(hvd.is_initialized())
        with self.assertRaises(ValueError):
            hvd.rank()
        hvd.init()
        self.assertEqual(hvd.rank(), self.rank)
        self.assert_same(hvd.allreduce(tf.ones([3]), op=hvd.Sum), tf.fill([3], float(self.size)))

    # -- allreduce

    def test_allreduce(self):
        for tensor, dtype, _ in self.cases(REDUCED):
            for call in in_both_ways(lambda t: hvd.allreduce(t, average=False)):
                self.assert_same(call(tensor), tensor * tf.cast(self.size, dtype))

    def test_allreduce_average(self):
        for tensor, _, _ in self.cases([*INTEGERS, *FLOATS]):
            for call in in_both_ways(lambda t: hvd.allreduce(t, average=True)):
                self.assert_same(call(tensor), tensor)
        self.assert_same(hvd.allreduce(tf.constant(float(self.rank))), tf.constant((self.size - 1) / 2))

    def test_allreduce_min_max_product(self):
        for tensor, dtype, _ in self.cases([*INTEGERS, *FLOATS]):
            shifted = [tensor + tf.cast(rank, dtype) for rank in range(self.size)]
            mine = shifted[self.rank]
            for call in in_both_ways(lambda t: hvd.allreduce(t, op=hvd.Min)):
                self.assert_same(call(mine), shifted[0])
            for call in in_both_ways(lambda t: hvd.allreduce(t, op=hvd.Max)):
                self.assert_same(call(mine), shifted[-1])
        tensor = tf.cast(tf.random.uniform([17, 3], -5, 5, dtype=tf.int32), tf.float64)
        self.assert_same(hvd.allreduce(tensor, op=hvd.Product), tensor**self.size)

    def test_allreduce_of_what_can_become_a_tensor(self):
        self.assertEqual(float(hvd.allreduce(tf.Variable(2.0), op=hvd.Sum)), 2.0 * self.size)
        self.assertEqual(np.asarray(hvd.allreduce(np.ones(3), op=hvd.Sum)).tolist(), [float(self.size)] * 3)

    def test_allreduce_scaled(self):
        for tensor, dtype, _ in self.cases([*INTEGERS, *FLOATS]):
            factor = np.random.uniform()
            wide = {tf.int32: tf.float64, tf.int64: tf.float64, tf.float16: tf.float32}.get(dtype, dtype)
            scale = tf.constant(factor, wide)
            before = tf.cast(scale * tf.cast(tensor, wide), dtype) * tf.cast(self.size, dtype)
            after = tf.cast(scale * tf.cast(tensor * tf.cast(self.size, dtype), wide), dtype)
            for call in in_both_ways(lambda t, f=factor: hvd.allreduce(t, average=False, prescale_factor=f)):
                self.assert_same(call(tensor), before)
            for call in in_both_ways(lambda t, f=factor: hvd.allreduce(t, average=False, postscale_factor=f)):
                self.assert_same(call(tensor), after)

    def test_allreduce_many_at_once(self):
        tensors = [tensor for tensor, _, _ in self.cases(REDUCED)]

        @tf.function
        def all_of_them():
            return [hvd.allreduce(tensor, average=False, name=f"fused.{i}") for i, tensor in enumerate(tensors)]

        for _ in range(3):
            for result, tensor in zip(all_of_them(), tensors, strict=True):
                self.assert_same(result, tensor * tf.cast(self.size, tensor.dtype))

    def test_average_and_op_exclude_each_other(self):
        with self.assertRaises(ValueError):
            hvd.allreduce(tf.ones([2]), average=True, op=hvd.Sum)

    def test_allreduce_in_while_and_cond(self):
        @tf.function
        def looped(x):
            for _ in tf.range(5):
                x = hvd.allreduce(x, op=hvd.Average, name="in_a_loop") + 1.0
            if tf.reduce_sum(x) > 0.0:
                x = hvd.allreduce(x, op=hvd.Sum, name="in_a_branch")
            return x

        self.assert_same(looped(tf.zeros([4])), tf.fill([4], 5.0 * self.size))

    def test_allreduce_with_unknown_shape(self):
        @tf.function(input_signature=[tf.TensorSpec(None, tf.float32)])
        def reduced(x):
            return hvd.allreduce(x, op=hvd.Sum, name="unknown")

        for dim in DIMS:
            self.assert_same(reduced(tf.ones([2] * dim)), tf.ones([2] * dim) * self.size)

    def test_allreduce_errors(self):
        self.several()
        for way in (0, 1):
            with self.assertRaises(MISMATCH):
                in_both_ways(hvd.allreduce)[way](tf.random.uniform([17 + self.rank] * 3))
            with self.assertRaises(MISMATCH):
                in_both_ways(hvd.allreduce)[way](tf.ones([23, 17] if self.rank % 2 == 0 else [17, 23]))
            with self.assertRaises(MISMATCH):
                in_both_ways(hvd.allreduce)[way](tf.ones([17] * 3, [tf.int32, tf.float32][self.rank % 2]))
        with self.assertRaises(MISMATCH):
            hvd.allreduce(tf.ones([3]), op=[hvd.Sum, hvd.Min][self.rank % 2], name="another_operation")
        with self.assertRaises(MISMATCH):
            hvd.allreduce(tf.ones([3]), op=hvd.Sum, prescale_factor=1.0 + self.rank, name="another_factor")
        self.assert_same(hvd.allreduce(tf.ones([3]), op=hvd.Sum), tf.fill([3], float(self.size)))

    def test_another_operation_under_the_name(self):
        self.several()
        with self.assertRaises(MISMATCH):
            if self.rank == 0:
                hvd.allreduce(tf.ones([3, 2]), name="disputed", op=hvd.Sum, ignore_name_scope=True)
            else:
                hvd.allgather(tf.ones([3, 2]), name="disputed", ignore_name_scope=True)

    def test_allreduce_gradients(self):
        for tensor, dtype, dim in self.cases([tf.float32, tf.float64]):
            for op, factor in ((hvd.Sum, self.size), (hvd.Average, 1)):

                def gradient(x, op=op):
                    with tf.GradientTape() as tape:
                        tape.watch(x)
                        result = hvd.allreduce(x, op=op)
                    return tape.gradient(result, x, tf.ones_like(x))

                for call in in_both_ways(gradient):
                    expected = np.full([17] * dim, factor, dtype.as_numpy_dtype)
                    self.assertLess(np.linalg.norm(expected - np.asarray(call(tensor))), 1e-8)

    def test_allreduce_gradients_of_different_values(self):
        variable = tf.Variable([1.0, 2.0])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(hvd.allreduce(variable, op=hvd.Sum) * float(self.rank + 1))
        total = self.size * (self.size + 1) / 2
        self.assert_same(tf.convert_to_tensor(tape.gradient(loss, variable)), tf.fill([2], total))

    # -- grouped allreduce

    def test_grouped_allreduce(self):
        for dtype, dim in itertools.product([*INTEGERS, *FLOATS], DIMS):
            tensors = [tf.cast(tf.random.uniform([17] * dim, -100, 100, tf.int32), dtype) for _ in range(5)]
            for call in in_both_ways(lambda ts: hvd.grouped_allreduce(ts, average=False)):
                for result, tensor in zip(call(tensors), tensors, strict=True):
                    self.assert_same(result, tensor * tf.cast(self.size, dtype))
            for result, tensor in zip(hvd.grouped_allreduce(tensors), tensors, strict=True):
                self.assert_same(result, tensor)

    def test_grouped_allreduce_with_sparse_ones(self):
        sparse = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([self.rank, self.rank + 1]), tf.constant([8, 3]))
        dense, other = hvd.grouped_allreduce([tf.ones([4]), sparse], op=hvd.Sum)
        self.assert_same(dense, tf.fill([4], float(self.size)))
        self.assertIsInstance(other, tf.IndexedSlices)
        self.assertEqual(other.indices.numpy().tolist(), [i for r in range(self.size) for i in (r, r + 1)])

    def test_grouped_allreduce_gradients(self):
        tensors = [tf.random.uniform([5, 5], dtype=tf.float64) for _ in range(3)]
        for op, factor in ((hvd.Sum, self.size), (hvd.Average, 1)):

            def gradients(*xs, op=op):
                with tf.GradientTape() as tape:
                    tape.watch(xs)
                    results = hvd.grouped_allreduce(list(xs), op=op)
                    total = tf.add_n([tf.reduce_sum(r) * (i + 1.0) for i, r in enumerate(results)])
                return tape.gradient(total, xs)

            for call in in_both_ways(gradients):
                for i, gradient in enumerate(call(*tensors)):
                    self.assertTrue(np.allclose(gradient, (i + 1) * factor, atol=1e-12))

    def test_grouped_allreduce_errors(self):
        self.several()
        with self.assertRaises(MISMATCH):
            hvd.grouped_allreduce([tf.ones([17 + self.rank] * 2), tf.ones([2])], op=hvd.Sum)
        self.assert_same(hvd.grouped_allreduce([tf.ones([2])], op=hvd.Sum)[0], tf.fill([2], float(self.size)))

    # -- sparse gradients

    def test_allreduce_of_indexed_slices(self):
        for dtype, (op, divisor) in itertools.product(
            [tf.float32, tf.float64], [(hvd.Sum, 1), (hvd.Average, self.size)]
        ):
            values = tf.cast(tf.fill([self.rank + 1, 3], self.rank + 1), dtype)
            slices = tf.IndexedSlices(values, tf.range(self.rank + 1), tf.constant([10, 3]))
            result = hvd.allreduce(slices, op=op)
            self.assertIsInstance(result, tf.IndexedSlices)
            expected = np.zeros([10, 3])
            for rank in range(self.size):
                expected[: rank + 1] += (rank + 1) / divisor
            self.assertTrue(np.allclose(tf.convert_to_tensor(result), expected, atol=1e-6))

    def test_indexed_slices_do_not_know_other_operations(self):
        slices = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([0, 1]), tf.constant([4, 3]))
        for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
            with self.assertRaises(NotImplementedError):
                hvd.allreduce(slices, op=op)
        for factors in ({"prescale_factor": 2.0}, {"postscale_factor": 2.0}):
            with self.assertRaises(NotImplementedError):
                hvd.allreduce(slices, op=hvd.Sum, **factors)

    # -- allgather

    def test_allgather(self):
        for dtype, dim in itertools.product([*MOVED, tf.bool], DIMS):
            tensor = tf.cast(tf.fill([17] * dim, self.rank % 2 if dtype == tf.bool else self.rank), dtype)
            for call in in_both_ways(hvd.allgather):
                gathered = call(tensor)
                self.assertEqual(list(gathered.shape), [17 * self.size] + [17] * (dim - 1))
                self.assertEqual(gathered.dtype, dtype)
                for i in range(self.size):
                    part = np.asarray(gathered[i * 17 : (i + 1) * 17])
                    self.assertTrue((part == (i % 2 if dtype == tf.bool else i)).all())

    def test_allgather_of_different_sizes(self):
        sizes = SIZES[: self.size]
        for dtype, dim in itertools.product([tf.int32, tf.float32], DIMS):
            tensor = tf.cast(tf.fill([sizes[self.rank]] + [17] * (dim - 1), self.rank), dtype)
            for call in in_both_ways(hvd.allgather):
                gathered = call(tensor)
                self.assertEqual(list(gathered.shape), [sum(sizes)] + [17] * (dim - 1))
                for i, part in enumerate(tf.split(gathered, sizes)):
                    self.assertTrue(bool(tf.reduce_all(part == tf.cast(i, dtype))))

    def test_allgather_static_shape(self):
        @tf.function
        def gathered(x):
            result = hvd.allgather(x)
            assert result.shape.as_list()[1:] == [7, 5], result.shape
            return result

        self.assertEqual(list(gathered(tf.ones([3, 7, 5])).shape), [3 * self.size, 7, 5])

    def test_allgather_errors(self):
        self.several()
        shape = [17, 10 * (self.rank + 1), 17]
        with self.assertRaises(MISMATCH):
            hvd.allgather(tf.ones(shape))
        with self.assertRaises(MISMATCH):
            hvd.allgather(tf.ones([17, 17], [tf.int32, tf.float32][self.rank % 2]))

    def test_allgather_gradients(self):
        sizes = SIZES[: self.size]
        weights = tf.concat([tf.fill([rows, 4], float(r + 1)) for r, rows in enumerate(sizes)], 0)

        def gradient(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                gathered = hvd.allgather(x)
            return tape.gradient(gathered, x, weights)

        for call in in_both_ways(gradient):
            expected = np.full([sizes[self.rank], 4], self.rank + 1.0)
            self.assertLess(np.linalg.norm(call(tf.ones([sizes[self.rank], 4])) - expected), 1e-6)

    def test_grouped_allgather(self):
        sizes = SIZES[: self.size]
        tensors = [tf.fill([sizes[self.rank], 3], float(self.rank + 10 * i)) for i in range(4)]
        for call in in_both_ways(hvd.grouped_allgather):
            for i, result in enumerate(call(tensors)):
                expected = np.concatenate([np.full([rows, 3], r + 10.0 * i) for r, rows in enumerate(sizes)])
                self.assertTrue(np.array_equal(result, expected))
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            total = tf.add_n([tf.reduce_sum(r) for r in hvd.grouped_allgather(tensors)])
        for gradient in tape.gradient(total, tensors):
            self.assertTrue(np.allclose(gradient, 1.0))

    # -- broadcast

    def test_broadcast(self):
        for dtype, dim, root in itertools.product([*MOVED, tf.bool], DIMS, range(self.size)):
            mine, roots = ((r % 2 if dtype == tf.bool else r) for r in (self.rank, root))
            tensor = tf.cast(tf.fill([17] * dim, mine), dtype)
            for call in in_both_ways(lambda t, root=root: hvd.broadcast(t, root)):
                self.assert_same(call(tensor), tf.cast(tf.fill([17] * dim, roots), dtype))

    def test_broadcast_errors(self):
        self.several()
        with self.assertRaises(MISMATCH):
            hvd.broadcast(tf.ones([17 + self.rank] * 3), 0)
        with self.assertRaises(MISMATCH):
            hvd.broadcast(tf.ones([17], [tf.int32, tf.float32][self.rank % 2]), 0)
        with self.assertRaises(MISMATCH):
            hvd.broadcast(tf.ones([17] * 3), self.rank)

    def test_broadcast_gradients(self):
        for root in range(self.size):
            tensor = tf.ones([5, 5])
            with tf.GradientTape() as tape:
                tape.watch(tensor)
                result = hvd.broadcast(tensor, root)
            gradient = tape.gradient(result, tensor, tf.ones([5, 5]))
            self.assertTrue(np.allclose(gradient, 1.0 if self.rank == root else 0.0))

    def test_broadcast_of_variables(self):
        for dtype, root in itertools.product([tf.int32, tf.int64, tf.float16, tf.float32, tf.bool], range(self.size)):
            names = ("kernel", "bias", "step")
            variables = [
                tf.Variable(tf.cast(tf.fill([3] * dim, self.rank % 2), dtype), name=name)
                for dim, name in enumerate(names)
            ]
            hvd.broadcast_variables(variables, root_rank=root)
            for variable in variables:
                self.assertTrue(bool(tf.reduce_all(variable == tf.cast(root % 2, dtype))))
            in_place = [tf.Variable(tf.fill([4], float(self.rank))) for _ in range(3)]
            hvd.broadcast_variables(in_place, root_rank=root, inplace=True)
            for variable in in_place:
                self.assert_same(variable.read_value(), tf.fill([4], float(root)))
            for variable in in_place:
                variable.assign(tf.fill([4], float(self.rank) + 1.0))
            hvd.broadcast_(in_place, root)
            for variable in in_place:
                self.assert_same(variable.read_value(), tf.fill([4], float(root) + 1.0))

    def test_broadcast_in_a_function(self):
        variables = [tf.Variable(tf.fill([2, 2], float(self.rank + i))) for i in range(3)]

        @tf.function
        def started():
            hvd.broadcast_variables(variables, root_rank=self.size - 1)

        started()
        for i, variable in enumerate(variables):
            self.assert_same(variable.read_value(), tf.fill([2, 2], float(self.size - 1 + i)))

    def test_broadcast_global_variables_is_not_for_eager_mode(self):
        with self.assertRaises(RuntimeError):
            hvd.broadcast_global_variables(0)

    # -- alltoall

    def test_alltoall(self):
        for dtype, dim in itertools.product(MOVED, DIMS):
            rows = [i + 1 for i in range(self.size) for _ in range(self.rank + 1)]
            tensor = tf.reshape(tf.repeat(tf.constant(rows), 2 ** (dim - 1)), [len(rows)] + [2] * (dim - 1))
            splits = tf.constant([self.rank + 1] * self.size, tf.int32)
            for call in in_both_ways(hvd.alltoall):
                collected, received = call(tf.cast(tensor, dtype), splits)
                self.assertEqual(collected.dtype, dtype)
                self.assertTrue(bool(tf.reduce_all(collected == tf.cast(self.rank + 1, dtype))))
                self.assertEqual(collected.shape[0], sum(range(1, self.size + 1)))
                self.assertEqual(np.asarray(received).tolist(), [r + 1 for r in range(self.size)])

    def test_alltoall_equal_split(self):
        tensor = tf.repeat(tf.range(self.size), 3) + 100 * self.rank
        for call in in_both_ways(hvd.alltoall):
            expected = [self.rank + 100 * r for r in range(self.size) for _ in range(3)]
            self.assertEqual(np.asarray(call(tensor)).tolist(), expected)

    def test_alltoall_of_nothing(self):
        collected, received = hvd.alltoall(tf.zeros([0, 3]), splits=[0] * self.size)
        self.assertEqual(list(collected.shape), [0, 3])
        self.assertEqual(np.asarray(received).tolist(), [0] * self.size)
        sent = [0] * self.size
        if self.rank == self.size - 1:
            sent[0] = 4
        collected, received = hvd.alltoall(tf.ones([sum(sent), 2]), splits=tf.constant(sent, tf.int32))
        self.assertEqual(list(collected.shape), [4 if self.rank == 0 else 0, 2])
        self.assertEqual(np.asarray(received).tolist()[-1], 4 if self.rank == 0 else 0)

    def test_alltoall_errors_of_arguments(self):
        with self.assertRaises(ARGUMENT):
            hvd.alltoall(tf.ones([4]), splits=[3] * self.size + [2])
        with self.assertRaises(ARGUMENT):
            hvd.alltoall(tf.ones([2]), splits=[3] * self.size)
        if self.size > 1:
            with self.assertRaises(ARGUMENT):
                hvd.alltoall(tf.ones([self.size + 1]))
        self.assertEqual(np.asarray(hvd.alltoall(tf.ones([self.size]))).tolist(), [1.0] * self.size)

    def test_alltoall_errors_of_ranks(self):
        self.several()
        with self.assertRaises(MISMATCH):
            hvd.alltoall(tf.ones([self.size * 3], [tf.int32, tf.float32][self.rank % 2]))
        with self.assertRaises(MISMATCH):
            hvd.alltoall(tf.ones([self.size, 10 * (self.rank + 1)]))

    def test_alltoall_gradients(self):
        tensor = tf.ones([self.size * (self.rank + 1), 2])
        splits = tf.constant([self.rank + 1] * self.size, tf.int32)

        def gradient(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                collected, _ = hvd.alltoall(x, splits)
            return tape.gradient(collected, x, tf.ones_like(collected) * float(self.rank + 1))

        for call in in_both_ways(gradient):
            expected = np.repeat(np.arange(1.0, self.size + 1), self.rank + 1)[:, None] * np.ones([1, 2])
            self.assertTrue(np.allclose(call(tensor), expected))

    # -- reducescatter

    def test_reducescatter(self):
        for dtype, dim in itertools.product([*INTEGERS, *FLOATS], DIMS):
            tensor = tf.cast(tf.random.uniform([self.size * 4] * dim, -100, 100, tf.int32), dtype)
            mine = tensor[self.rank * 4 : self.rank * 4 + 4]
            for call in in_both_ways(lambda t: hvd.reducescatter(t, op=hvd.Sum)):
                self.assert_same(call(tensor), mine * tf.cast(self.size, dtype))
            self.assert_same(hvd.reducescatter(tensor), mine)
            for call in in_both_ways(lambda t: hvd.grouped_reducescatter([t, t], op=hvd.Sum)):
                for result in call(tensor):
                    self.assert_same(result, mine * tf.cast(self.size, dtype))

    def test_reducescatter_uneven(self):
        rows = self.size * 2 + 1
        counts = [3 if r == 0 else 2 for r in range(self.size)]
        start = sum(counts[: self.rank])
        tensor = tf.reshape(tf.range(rows * 3), [rows, 3])
        result = hvd.reducescatter(tensor, op=hvd.Sum)
        self.assert_same(result, tensor[start : start + counts[self.rank]] * self.size)

    def test_reducescatter_scaled(self):
        tensor = tf.random.uniform([self.size * 2, 3], -100, 100, tf.int32)
        mine = tf.cast(tensor, tf.float64)[2 * self.rank : 2 * self.rank + 2]
        result = hvd.reducescatter(tensor, op=hvd.Sum, prescale_factor=0.3)
        self.assert_same(result, tf.cast(mine * 0.3, tf.int32) * self.size)
        result = hvd.reducescatter(tensor, op=hvd.Sum, postscale_factor=0.3)
        self.assert_same(result, tf.cast(mine * self.size * 0.3, tf.int32))

    def test_reducescatter_errors(self):
        scalar_errors = (ARGUMENT, ValueError, MISMATCH)
        for call in (
            lambda: hvd.reducescatter(tf.constant(float(self.rank)), op=hvd.Sum),
            lambda: hvd.grouped_reducescatter([tf.constant(1.0)] * 2, op=hvd.Sum),
        ):
            with self.assertRaises(scalar_errors):
                call()
        if self.size > 1:
            with self.assertRaises(MISMATCH):
                hvd.reducescatter(tf.ones([self.size * 4 + self.rank] * 2))
            with self.assertRaises(MISMATCH):
                hvd.reducescatter(tf.ones([self.size * 4], [tf.int32, tf.float32][self.rank % 2]))
        self.assertEqual(np.asarray(hvd.reducescatter(tf.ones([self.size]), op=hvd.Sum)).tolist(), [float(self.size)])

    def test_reducescatter_gradients(self):
        for op, factor in ((hvd.Sum, self.size), (hvd.Average, 1)):

            def gradients(x, op=op):
                with tf.GradientTape(persistent=True) as tape:
                    tape.watch(x)
                    one = hvd.reducescatter(x, op=op)
                    two = hvd.grouped_reducescatter([x], op=op)[0]
                return [tape.gradient(result, x, tf.ones_like(result)) for result in (one, two)]

            for call in in_both_ways(gradients):
                for gradient in call(tf.ones([self.size * 4, 3])):
                    self.assertTrue(np.allclose(gradient, factor))

    # -- process sets

    def test_process_sets(self):
        self.several()
        evens = [rank for rank in range(self.size) if rank % 2 == 0]
        odds = [rank for rank in range(self.size) if rank % 2]
        even_set, odd_set = hvd.add_process_set(evens), hvd.add_process_set(hvd.ProcessSet(odds))
        mine, members = (even_set, evens) if self.rank in evens else (odd_set, odds)
        other = odd_set if mine is even_set else even_set
        self.assertTrue(mine.included())
        self.assertFalse(other.included())
        self.assertEqual((mine.size(), mine.rank()), (len(members), members.index(self.rank)))
        for call in in_both_ways(lambda: hvd.size_op(process_set_id=mine.process_set_id)):
            self.assertEqual(int(call()), len(members))
        self.assertEqual(int(hvd.process_set_included_op(process_set_id=mine.process_set_id)), 1)
        self.assertEqual(int(hvd.process_set_included_op(process_set_id=other.process_set_id)), 0)
        for tensor, dtype, _ in self.cases([tf.int32, tf.float16, tf.float64]):
            value = tensor * tf.cast(1 + self.rank % 2, dtype)
            for call in in_both_ways(lambda t: hvd.allreduce(t, average=False, process_set=mine)):
                self.assert_same(call(value), value * tf.cast(len(members), dtype))
            self.assert_same(hvd.allreduce(value, process_set=mine), value)
            self.assert_same(hvd.broadcast(value, members[-1], process_set=mine), value)
            self.assertEqual(hvd.allgather(value, process_set=mine).shape[0], 17 * len(members))
        for result in hvd.grouped_allreduce([tf.ones([2])] * 3, op=hvd.Sum, process_set=mine):
            self.assert_same(result, tf.fill([2], float(len(members))))
        rows = len(members)
        self.assertEqual(hvd.alltoall(tf.ones([rows * 2]), process_set=mine).shape[0], rows * 2)
        self.assertEqual(hvd.reducescatter(tf.ones([rows * 2]), process_set=mine).shape[0], 2)
        variable = tf.Variable(float(self.rank))
        hvd.broadcast_variables([variable], root_rank=members[0], process_set=mine)
        self.assertEqual(float(variable), float(members[0]))
        self.assertEqual(hvd.allgather_object(self.rank, process_set=mine), members)
        self.assertEqual(hvd.broadcast_object(self.rank, members[-1], process_set=mine), members[-1])
        with self.assertRaises(ARGUMENT):
            hvd.allreduce(tf.ones([2]), process_set=other)
        with self.assertRaises(ValueError):
            hvd.add_process_set(evens)
        self.assertTrue(hvd.remove_process_set(odd_set))
        self.assertTrue(hvd.remove_process_set(even_set))
        self.assertFalse(hvd.remove_process_set(even_set))
        self.assertIsNone(even_set.process_set_id)

    def test_process_sets_that_are_not_there(self):
        class UnknownSet(ProcessSet):
            process_set_id = 10

            def __init__(self):
                pass

        with self.assertRaises(ARGUMENT):
            hvd.allreduce(tf.ones([2]), process_set=UnknownSet())
        numbered = ProcessSet([0])
        numbered.process_set_id = 10
        with self.assertRaises(ARGUMENT):
            hvd.allreduce(tf.ones([2]), process_set=numbered)
        with self.assertRaises(ValueError):
            hvd.allreduce(tf.ones([2]), process_set=ProcessSet([0]))

    # -- join

    def test_join_allreduce(self):
        self.several()
        for (tensor, dtype, _), first, cached in itertools.product(
            list(self.cases([tf.float32, tf.float64])), [0, 1], [False, True]
        ):
            if cached:
                hvd.allreduce(tensor, name="tensor_a", average=True)
            if self.rank != first:
                expected = tensor * tf.cast(self.size - 1, dtype) / tf.cast(self.size, dtype)
                self.assertTrue(np.allclose(hvd.allreduce(tensor, name="tensor_a", average=True), expected, 1e-6))
                doubled = hvd.allreduce(tensor * 2, name="tensor_b", average=True)
                self.assertTrue(np.allclose(doubled, expected * 2, 1e-6))
            last = int(hvd.join())
            self.assertNotEqual(last, first)
            self.assertEqual(hvd.allgather_object(last), [last] * self.size)

    def test_join_and_others(self):
        self.several()
        for call in (lambda: hvd.allgather(tf.ones([17])), lambda: hvd.broadcast(tf.ones([17]), 1, name="b")):
            if self.rank != 0:
                with self.assertRaises(MISMATCH):
                    call()
            self.assertNotEqual(int(hvd.join()), 0)

    # -- objects, compression

    def test_objects(self):
        sent = {"a": [1, 2], "b": "text"}
        self.assertDictEqual(hvd.broadcast_object(sent if self.rank == 0 else {}, 0), sent)
        broadcast = hvd.broadcast_object_fn(root_rank=self.size - 1)
        for turn in range(3):
            self.assertEqual(broadcast({"from": self.rank, "turn": turn}), {"from": self.size - 1, "turn": turn})
        mine = {"rank": self.rank, "text": "x" * self.rank}
        expected = [{"rank": r, "text": "x" * r} for r in range(self.size)]
        self.assertListEqual(hvd.allgather_object(mine), expected)

    def test_compression_fp16(self):
        for dtype in (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64):
            tensor = tf.ones([5, 5, 5], dtype)
            compressed, context = hvd.Compression.fp16.compress(tensor)
            self.assertEqual(compressed.dtype, tf.float16 if dtype.is_floating else dtype)
            restored = hvd.Compression.fp16.decompress(compressed, context)
            self.assert_same(restored, tensor)
            same, context = hvd.Compression.none.compress(tensor)
            self.assert_same(hvd.Compression.none.decompress(same, context), tensor)
        for call in in_both_ways(lambda t: hvd.allreduce(t, compression=hvd.Compression.fp16)):
            self.assert_same(call(tf.ones([5])), tf.ones([5]))
        results = hvd.grouped_allreduce([tf.ones([5])] * 2, compression=hvd.Compression.fp16)
        self.assert_same(results[1], tf.ones([5]))

    # -- gradient tape

    def test_gradient_tape(self):
        x = tf.constant(float(self.rank + 1))
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = x * x
            z = x * 3.0
        average = 2 * sum(r + 1 for r in range(self.size)) / self.size
        tape = hvd.DistributedGradientTape(tape)
        self.assertAlmostEqual(float(tape.gradient(y, x)), average, 6)
        self.assertAlmostEqual(float(tape.gradient(z, [x])[0]), 3.0, 6)
        self.assertAlmostEqual(float(tape.gradient(y, {"x": x})["x"]), average, 6)

    def test_gradient_tape_as_a_context(self):
        x = tf.Variable([1.0, 2.0])
        with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum) as tape:
            y = tf.reduce_sum(x * float(self.rank + 1))
        gradient = tape.gradient(y, x)
        self.assert_same(gradient, tf.fill([2], self.size * (self.size + 1) / 2))

    def test_gradient_tape_options(self):
        variables = [tf.Variable(tf.ones([3, i + 1]), name=f"v{i}") for i in range(4)]
        unused = tf.Variable(1.0)
        mean = (self.size + 1) / 2
        for options in (
            {},
            {"num_groups": 2},
            {"groups": 2},
            {"groups": [variables[:2], variables[2:]]},
            {"compression": hvd.Compression.fp16},
            {"gradient_predivide_factor": 2.0},
            {"device_dense": "/cpu:0", "device_sparse": "/cpu:0"},
            {"process_set": hvd.global_process_set},
        ):

            def step(options=options):
                with tf.GradientTape() as tape:
                    loss = tf.add_n([tf.reduce_sum(v) for v in variables]) * float(self.rank + 1)
                tape = hvd.DistributedGradientTape(tape, **options)
                return tape.gradient(loss, [*variables, unused])

            for call in in_both_ways(step):
                *gradients, nothing = call()
                self.assertIsNone(nothing)
                for gradient, variable in zip(gradients, variables, strict=True):
                    self.assertTrue(np.allclose(gradient, np.full(variable.shape, mean)), options)

    def test_gradient_tape_refuses(self):
        with self.assertRaises(ValueError):
            hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum, gradient_predivide_factor=2.0)

    def test_gradient_tape_with_embeddings(self):
        table = tf.Variable(tf.ones([10, 3]))
        for sparse_as_dense in (False, True):

            def step(sparse_as_dense=sparse_as_dense):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(tf.gather(table, [self.rank, self.rank + 1]))
                tape = hvd.DistributedGradientTape(tape, sparse_as_dense=sparse_as_dense)
                return tape.gradient(loss, table)

            expected = np.zeros([10, 3])
            for rank in range(self.size):
                expected[rank : rank + 2] += 1 / self.size
            for call in in_both_ways(step):
                gradient = call()
                if self.size > 1:
                    self.assertEqual(isinstance(gradient, tf.IndexedSlices), not sparse_as_dense)
                self.assertTrue(np.allclose(tf.convert_to_tensor(gradient), expected, atol=1e-6))

    def test_gradient_tape_with_local_sources(self):
        for scaled in (True, False):
            local, shared = tf.Variable([1.0]), tf.Variable([1.0])
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(local + shared) * float(self.rank + 1)
            tape = hvd.DistributedGradientTape(tape, scale_local_gradients=scaled)
            tape.register_local_source(local)
            mine, everyones = tape.gradient(loss, [local, shared])
            self.assertAlmostEqual(float(mine[0]), (self.rank + 1) / (self.size if scaled else 1), 6)
            self.assertAlmostEqual(float(everyones[0]), (self.size + 1) / 2, 6)

    def test_partial_gradient_tape(self):
        layers = [tf.keras.layers.Dense(2, kernel_initializer="ones", use_bias=False) for _ in range(3)]
        model = tf.keras.Sequential([tf.keras.layers.Input((2,)), *layers])
        for (own, local), scaled in itertools.product(enumerate([None, layers[0], layers[:2]]), [True, False]):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(tf.ones([1, 2]))) * float(self.rank + 1)
            tape = hvd.PartialDistributedGradientTape(tape, local_layers=local, scale_local_gradients=scaled)
            gradients = tape.gradient(loss, model.trainable_variables)
            for i, gradient in enumerate(gradients):
                alone = (self.rank + 1) / (self.size if scaled else 1)
                factor = alone if i < own else (self.size + 1) / 2
                self.assertTrue(np.allclose(gradient, 4.0 * factor), (i, own, scaled))

    # -- batch normalization over all ranks

    def test_sync_batch_normalization(self):
        everything = np.random.RandomState(3).normal(2.0, 3.0, [4 * self.size, 5]).astype(np.float32)
        mine = tf.constant(everything[4 * self.rank : 4 * self.rank + 4])
        truth = tf.keras.layers.BatchNormalization()
        layer = hvd.SyncBatchNormalization()
        expected = truth(everything, training=True)[4 * self.rank : 4 * self.rank + 4]
        self.assertTrue(np.allclose(layer(mine, training=True), expected, atol=1e-4))
        self.assertTrue(np.allclose(layer.moving_mean, truth.moving_mean, atol=1e-4))
        self.assertTrue(np.allclose(layer.moving_variance, truth.moving_variance, atol=1e-4))
        self.assertEqual(tuple(layer(mine, training=False).shape), (4, 5))
        with self.assertRaises(ValueError):
            hvd.SyncBatchNormalization(fused=True)

    # -- graphs and sessions

    def test_session(self):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            tensor = tf.compat.v1.placeholder(tf.float32, [None, 3])
            summed, gathered = hvd.allreduce(tensor, op=hvd.Sum), hvd.allgather(tensor)
            moved = hvd.broadcast(tensor, 0)
            gradient = tf.compat.v1.gradients(hvd.allreduce(tensor, op=hvd.Sum, name="g"), [tensor])[0]
            for rows in (2, 5):
                value = np.full([rows, 3], self.rank + 1, np.float32)
                results = session.run([summed, gathered, moved, gradient], {tensor: value})
                self.assertTrue((results[0] == self.size * (self.size + 1) / 2).all())
                self.assertEqual(results[1].shape, (rows * self.size, 3))
                self.assertTrue((results[2] == 1).all())
                self.assertTrue((results[3] == self.size).all())

    def test_objects_in_a_session(self):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            self.assertEqual(hvd.broadcast_object({"r": self.rank}, 0, session=session), {"r": 0})
            self.assertEqual(hvd.allgather_object(self.rank, session=session), list(range(self.size)))

    def test_broadcast_global_variables(self):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            one = tf.compat.v1.get_variable("one", initializer=tf.fill([2], float(self.rank + 5)))
            two = tf.compat.v1.get_variable("two", initializer=tf.fill([2, 2], self.rank + 7))
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(hvd.broadcast_global_variables(0))
            self.assertEqual(session.run(one).tolist(), [5.0] * 2)
            self.assertEqual(session.run(two).tolist(), [[7] * 2] * 2)

    def train_in_a_session(self, optimizer, hooks=()):
        """Three steps on a loss whose gradient is the rank plus one: the variable's values after each of them."""
        with tf.Graph().as_default():
            step = tf.compat.v1.train.get_or_create_global_step()
            weight = tf.compat.v1.get_variable("weight", initializer=tf.fill([3], 10.0 * (self.rank + 1)))
            table = tf.compat.v1.get_variable("table", initializer=tf.ones([4, 2]))
            rows = tf.reduce_sum(tf.nn.embedding_lookup(table, [self.rank, self.rank + 1]))
            loss = tf.reduce_sum(weight) * float(self.rank + 1) + 0.0 * rows
            train = optimizer().minimize(loss, global_step=step)
            values = []
            with tf.compat.v1.train.MonitoredTrainingSession(hooks=[hook() for hook in hooks]) as session:
                for _ in range(4):
                    session.run(train)
                    values.append(session.run(weight).tolist())
        return values

    def test_optimizer_of_version_1(self):
        def optimizer(**options):
            return lambda: hvd.DistributedOptimizer(
                tf.compat.v1.train.GradientDescentOptimizer(1.0), **{"sparse_as_dense": False, **options}
            )

        hook = [lambda: hvd.BroadcastGlobalVariablesHook(0)]
        mean = (self.size + 1) / 2
        for options, gradient in (
            ({}, mean),
            ({"op": hvd.Sum}, mean * self.size),
            ({"compression": hvd.Compression.fp16}, mean),
            ({"sparse_as_dense": True, "name": "Named"}, mean),
            ({"num_groups": 1}, mean),
            ({"gradient_predivide_factor": 2.0}, mean),
        ):
            values = self.train_in_a_session(optimizer(**options), hook)
            expected = [[10.0 - gradient * (i + 1)] * 3 for i in range(4)]
            self.assertTrue(np.allclose(values, expected), (options, values, expected))

    def test_optimizer_of_version_1_accumulates(self):
        for averaged in (False, True):
            values = self.train_in_a_session(
                lambda averaged=averaged: hvd.DistributedOptimizer(
                    tf.compat.v1.train.GradientDescentOptimizer(1.0),
                    sparse_as_dense=True,
                    backward_passes_per_step=2,
                    average_aggregated_gradients=averaged,
                ),
                [lambda: hvd.BroadcastGlobalVariablesHook(root_rank=0)],
            )
            step = (self.size + 1) / 2 * (1 if averaged else 2)
            self.assertTrue(np.allclose([v[0] for v in values], [10, 10 - step, 10 - step, 10 - 2 * step]), values)

    def test_optimizer_refuses_what_is_none(self):
        with self.assertRaises(ValueError):
            hvd.DistributedOptimizer(object())
        with self.assertRaises(ValueError):
            hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), op=hvd.Adasum)
        with self.assertRaises(ValueError):
            hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), op=hvd.Sum, gradient_predivide_factor=2.0)


if __name__ == "__main__":
    unittest.main()
