"""A test suite as people write them for Horovod: unittest, init() in every test, loops over dtypes and dimensions.

Run it in several processes: reigen run --as-horovod -np 2 python suite_torch.py
"""
# ruff: noqa: I001, PT009, PT027

import itertools
import os
import unittest
import warnings

import numpy as np
import torch

import horovod.torch as hvd

os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"

INTEGERS = [torch.IntTensor, torch.LongTensor]
FLOATS = [torch.FloatTensor, torch.DoubleTensor, torch.HalfTensor]
MOVED = [*INTEGERS, *FLOATS, torch.ByteTensor, torch.CharTensor, torch.ShortTensor]
DIMS = [1, 2, 3]


class TorchTests(unittest.TestCase):
    def setUp(self):
        warnings.simplefilter("ignore", DeprecationWarning)
        hvd.init()
        self.rank, self.size = hvd.rank(), hvd.size()
        if self.size == 1:
            self.skipTest("needs more than one process")

    def cases(self, dtypes):
        for dtype, dim in itertools.product(dtypes, DIMS):
            torch.manual_seed(1234)
            yield torch.FloatTensor(*([17] * dim)).random_(-100, 100).type(dtype), dtype, dim

    def assert_equal_up_to(self, threshold, one, other):
        self.assertLessEqual((one.double() - other.double()).abs().max().item(), threshold)

    def assert_fails(self, call, *args, errors=(torch.FatalError, RuntimeError), **options):
        try:
            call(*args, **options)
        except errors:
            return
        self.fail(f"{call.__name__} did not throw an error")

    # -- the job

    def test_rank_and_size(self):
        self.assertEqual(int(os.getenv("HOROVOD_RANK", "-1")), self.rank)
        self.assertEqual(int(os.getenv("HOROVOD_SIZE", "-1")), self.size)
        self.assertTrue(hvd.is_initialized())
        self.assertEqual(hvd.local_size() * hvd.cross_size(), self.size)
        if hvd.mpi_enabled():
            self.skipTest("with MPI there is no second init")
        hvd.shutdown()
        self.assertFalse(hvd.is_initialized())
        with self.assertRaises(ValueError):
            hvd.rank()
        hvd.init()
        self.assertEqual(hvd.rank(), self.rank)

    # -- allreduce

    def test_allreduce(self):
        for tensor, _, _ in self.cases([*INTEGERS, *FLOATS]):
            self.assert_equal_up_to(0, hvd.allreduce(tensor, average=False), tensor * self.size)
            self.assert_equal_up_to(0, hvd.allreduce(tensor, average=True), tensor)
            in_place = tensor.clone()
            hvd.allreduce_(in_place, average=False)
            self.assert_equal_up_to(0, in_place, tensor * self.size)
            self.assert_equal_up_to(0, hvd.allreduce(tensor, op=hvd.Min), tensor)

    def test_allreduce_scaled(self):
        np.random.seed(1234)
        for tensor, dtype, _ in self.cases([*INTEGERS, *FLOATS]):
            factor = np.random.uniform()
            if dtype in INTEGERS:
                scaled = (tensor.double() * factor).type(dtype)
                after = (tensor.double() * self.size * factor).type(dtype)
            elif dtype is torch.HalfTensor:
                scaled = (tensor.float() * factor).type(dtype)
                after = (tensor.float() * self.size * factor).type(dtype)
            else:
                scaled, after = tensor * factor, tensor * self.size * factor
            self.assert_equal_up_to(0, hvd.allreduce(tensor, average=False, prescale_factor=factor), scaled * self.size)
            self.assert_equal_up_to(0, hvd.allreduce(tensor, average=False, postscale_factor=factor), after)

    def test_allreduce_async_fused(self):
        pending, was_busy = [], False
        for tensor, _, _ in self.cases([*INTEGERS, *FLOATS]):
            handle = hvd.allreduce_async(tensor, average=False)
            was_busy = was_busy or not hvd.poll(handle)
            pending.append((handle, tensor * self.size))
        self.assertTrue(was_busy, "poll() always returns True")
        for handle, expected in dict(pending).items():
            self.assert_equal_up_to(0, hvd.synchronize(handle), expected)

    def test_allreduce_errors(self):
        self.assert_fails(hvd.allreduce, torch.FloatTensor(*([17 + self.rank] * 3)).random_(-100, 100))
        self.assert_fails(hvd.allreduce, torch.FloatTensor(23, 17) if self.rank % 2 == 0 else torch.FloatTensor(17, 23))
        self.assert_fails(
            hvd.allreduce,
            (torch.ones if self.rank % 2 == 0 else torch.zeros)(17).type(
                torch.IntTensor if self.rank % 2 == 0 else torch.FloatTensor
            ),
        )
        self.assert_equal_up_to(0, hvd.allreduce(torch.ones(3), average=False), torch.full((3,), float(self.size)))

    def test_duplicate_name_error(self):
        tensor = torch.FloatTensor(*[17] * 3)

        def twice(name):
            hvd.allreduce_async(tensor, name=name)
            for _ in range(10):
                hvd.allreduce_async(tensor, name=name)

        if self.rank == 0:
            self.assert_fails(twice, "duplicate_name", errors=(torch.FatalError, ValueError))
        hvd.barrier()
        if self.rank > 0:
            self.assert_fails(twice, "duplicate_name", errors=(torch.FatalError, ValueError))
        hvd.barrier()

    def test_allreduce_grad(self):
        for tensor, _, dim in self.cases([torch.FloatTensor, torch.DoubleTensor]):
            for average in (False, True):
                leaf = tensor.clone().requires_grad_()
                result = hvd.allreduce(leaf, average=average)
                result.backward(torch.ones([17] * dim, dtype=leaf.dtype))
                expected = np.ones([17] * dim) * (1 if average else self.size)
                self.assertLess(np.linalg.norm(expected - leaf.grad.data.cpu().numpy()), 1e-8)

    def test_grouped_allreduce(self):
        for dtype, dim in itertools.product([*INTEGERS, *FLOATS], DIMS):
            torch.manual_seed(1234)
            tensors = [torch.FloatTensor(*([17] * dim)).random_(-100, 100).type(dtype) for _ in range(5)]
            expected = [tensor * self.size for tensor in tensors]
            copies = [tensor.clone() for tensor in tensors]
            for results in (
                hvd.grouped_allreduce(tensors, average=False),
                hvd.synchronize(hvd.grouped_allreduce_async(tensors, average=False)),
                hvd.grouped_allreduce_(copies, average=False),
            ):
                for result, truth in zip(results, expected, strict=True):
                    self.assert_equal_up_to(0, result, truth)

    # -- allgather, broadcast

    def test_allgather(self):
        for _, dtype, dim in self.cases(MOVED):
            tensor = torch.FloatTensor(*([17] * dim)).fill_(1).mul_(self.rank).type(dtype)
            gathered = hvd.allgather(tensor)
            self.assertEqual(list(gathered.shape), [17 * self.size] + [17] * (dim - 1))
            for i in range(self.size):
                part = gathered[i * 17 : (i + 1) * 17]
                self.assertEqual(list(part.shape), [17] * dim)
                self.assertTrue((part.data == i).all())

    def test_allgather_variable_size_and_grad(self):
        sizes = [17, 32, 81, 12, 15, 23, 22][: self.size]
        tensor = torch.ones(sizes[self.rank], 17).mul_(self.rank).requires_grad_()
        gathered = hvd.allgather(tensor)
        self.assertEqual(list(gathered.shape), [sum(sizes), 17])
        weights = torch.cat([torch.ones(rows, 17) * (r + 1) for r, rows in enumerate(sizes)])
        gathered.backward(weights)
        self.assertTrue((tensor.grad == self.rank + 1).all())
        handles = [hvd.grouped_allgather_async([tensor.detach(), tensor.detach() + 1], name=f"g{i}") for i in range(3)]
        for handle in handles:
            one, other = hvd.synchronize(handle)
            self.assertTrue(torch.equal(one + 1, other))

    def test_allgather_errors(self):
        shape = [17] * 3
        shape[1] = 10 * (self.rank + 1)
        self.assert_fails(hvd.allgather, torch.ones(*shape))
        dtype = torch.IntTensor if self.rank % 2 == 0 else torch.FloatTensor
        self.assert_fails(hvd.allgather, torch.ones(17, 17).type(dtype))

    def test_broadcast(self):
        for (_, dtype, dim), root in itertools.product(list(self.cases(MOVED)), range(self.size)):
            tensor = torch.FloatTensor(*([17] * dim)).fill_(1).mul_(self.rank).type(dtype)
            expected = torch.FloatTensor(*([17] * dim)).fill_(1).mul_(root).type(dtype)
            received = hvd.broadcast(tensor, root)
            self.assertTrue((tensor == self.rank).all())
            self.assertTrue((received == expected).all())
            hvd.broadcast_(tensor, root)
            self.assertTrue((tensor == expected).all())

    def test_broadcast_errors(self):
        self.assert_fails(hvd.broadcast, torch.ones(*([17 + self.rank] * 3)), 0)
        self.assert_fails(hvd.broadcast, torch.ones(17).type([torch.IntTensor, torch.FloatTensor][self.rank % 2]), 0)
        self.assert_fails(hvd.broadcast, torch.ones(17, 17), self.rank)

    def test_broadcast_grad(self):
        for root in range(self.size):
            tensor = torch.ones(17, 17, requires_grad=True)
            hvd.broadcast(tensor, root).backward(torch.ones(17, 17))
            self.assertTrue((tensor.grad == (1 if self.rank == root else 0)).all())

    # -- alltoall, reducescatter

    def test_alltoall(self):
        for _, dtype, dim in self.cases(MOVED):
            values = [i + 1 for i in range(self.size) for _ in range(self.rank + 1)]
            tensor = torch.Tensor(values)
            for _ in range(dim - 1):
                tensor = torch.cat((tensor.unsqueeze(1), tensor.unsqueeze(1)), dim=1).reshape(len(values), -1)
            splits = torch.tensor([self.rank + 1] * self.size, dtype=torch.int32)
            collected, received = hvd.alltoall(tensor.type(dtype), splits)
            self.assertTrue((collected == self.rank + 1).all())
            self.assertEqual(len(collected), sum(range(1, self.size + 1)))
            self.assertSequenceEqual(received.tolist(), [r + 1 for r in range(self.size)])

    def test_alltoall_corner_cases(self):
        nothing = torch.empty(0, 3)
        collected, received = hvd.alltoall(nothing, torch.zeros(self.size, dtype=torch.int32))
        self.assertEqual(list(collected.shape), [0, 3])
        self.assertEqual(received.tolist(), [0] * self.size)
        # only rank 1 sends, and only to rank 0
        rows = [0] * self.size
        rows[0] = 4 if self.rank == 1 else 0
        collected, received = hvd.alltoall(torch.ones(4 if self.rank == 1 else 0, 2), rows)
        self.assertEqual(list(collected.shape), [4 if self.rank == 0 else 0, 2])
        equal = hvd.alltoall(torch.arange(self.size * 2))
        self.assertEqual(equal.tolist(), [2 * self.rank, 2 * self.rank + 1] * self.size)

    def test_alltoall_errors(self):
        argument = (torch.FatalError, ValueError)
        dtype = torch.IntTensor if self.rank % 2 == 0 else torch.FloatTensor
        self.assert_fails(hvd.alltoall, torch.ones(self.size * 3).type(dtype))
        self.assert_fails(hvd.alltoall, torch.ones(self.size, 10 * (self.rank + 1)))
        self.assert_fails(hvd.alltoall, torch.ones(self.size + 1), errors=argument)
        self.assert_fails(
            hvd.alltoall, torch.ones(4), torch.tensor([3] * self.size, dtype=torch.int32), errors=argument
        )
        self.assert_fails(hvd.alltoall, torch.ones(4), torch.empty(self.size, dtype=torch.float32), errors=argument)
        self.assertEqual(hvd.alltoall(torch.ones(self.size)).tolist(), [1.0] * self.size)

    def test_alltoall_grad(self):
        tensor = torch.ones(self.size * (self.rank + 1), 2, requires_grad=True)
        collected, _ = hvd.alltoall(tensor, torch.tensor([self.rank + 1] * self.size, dtype=torch.int32))
        collected.backward(torch.ones(collected.shape))
        self.assertTrue((tensor.grad == 1).all())

    def test_reducescatter(self):
        for dtype, dim in itertools.product([*INTEGERS, *FLOATS], DIMS):
            torch.manual_seed(1234)
            tensor = torch.FloatTensor(*([self.size * 4] * dim)).random_(-100, 100).type(dtype)
            mine = tensor[self.rank * 4 : self.rank * 4 + 4]
            self.assert_equal_up_to(0, hvd.reducescatter(tensor, op=hvd.Sum), mine * self.size)
            self.assert_equal_up_to(0, hvd.reducescatter(tensor), mine)
            for result in hvd.grouped_reducescatter([tensor, tensor], op=hvd.Sum):
                self.assert_equal_up_to(0, result, mine * self.size)
            handle = hvd.reducescatter_async(tensor, op=hvd.Sum)
            self.assert_equal_up_to(0, hvd.synchronize(handle), mine * self.size)

    def test_reducescatter_errors(self):
        self.assert_fails(hvd.reducescatter, torch.ones(*([self.size * 4 + self.rank] * 2)))
        self.assert_fails(hvd.reducescatter, torch.ones(4), op=hvd.Adasum)
        self.assert_fails(hvd.reducescatter, torch.tensor(float(self.rank)), op=hvd.Sum)
        self.assert_fails(hvd.grouped_reducescatter, [torch.tensor(1.0)] * 2, op=hvd.Sum)
        self.assertEqual(hvd.reducescatter(torch.ones(self.size), op=hvd.Sum).tolist(), [float(self.size)])

    def test_reducescatter_grad(self):
        for op, factor in ((hvd.Sum, self.size), (hvd.Average, 1)):
            tensor = torch.ones(self.size * 4, 3, requires_grad=True)
            result = hvd.reducescatter(tensor, op=op)
            result.backward(torch.ones(4, 3))
            self.assertTrue((tensor.grad == factor).all())

    # -- process sets

    def test_process_sets(self):
        evens = [rank for rank in range(self.size) if rank % 2 == 0]
        odds = [rank for rank in range(self.size) if rank % 2]
        even_set, odd_set = hvd.add_process_set(evens), hvd.add_process_set(odds)
        mine, members = (even_set, evens) if self.rank in evens else (odd_set, odds)
        self.assertTrue(mine.included())
        self.assertEqual(mine.size(), len(members))
        for tensor, _, _ in self.cases([*INTEGERS, *FLOATS]):
            value = tensor if self.rank in evens else tensor * 2
            self.assert_equal_up_to(0, hvd.allreduce(value, average=False, process_set=mine), value * len(members))
            self.assert_equal_up_to(0, hvd.broadcast(value, members[0], process_set=mine), value)
            gathered = hvd.allgather(value, process_set=mine)
            self.assertEqual(len(gathered), 17 * len(members))
        results = hvd.grouped_allreduce([torch.ones(2)] * 3, op=hvd.Sum, process_set=mine)
        self.assertTrue(all((result == len(members)).all() for result in results))
        hvd.barrier(process_set=mine)
        other = odd_set if mine is even_set else even_set
        self.assert_fails(hvd.allreduce, torch.ones(2), process_set=other, errors=(torch.FatalError, ValueError))
        with self.assertRaises(ValueError):
            hvd.add_process_set(evens)
        self.assertTrue(hvd.remove_process_set(odd_set))
        self.assertTrue(hvd.remove_process_set(even_set))
        self.assertFalse(hvd.remove_process_set(even_set))
        self.assertIsNone(even_set.process_set_id)
        self.assertListEqual(hvd.global_process_set.ranks, list(range(self.size)))

    # -- join

    def test_join_allreduce(self):
        for (tensor, _, _), first, cached in itertools.product(
            list(self.cases([torch.FloatTensor, torch.DoubleTensor])), [0, 1], [False, True]
        ):
            if cached:
                hvd.allreduce(tensor, name="tensor_a", average=True)
            if self.rank == first:
                last = hvd.join()
            else:
                one = hvd.allreduce_async(tensor, name="tensor_a", average=True)
                other = hvd.allreduce_async(tensor * 2, name="tensor_b", average=True)
                expected = tensor * (self.size - 1) / self.size
                self.assert_equal_up_to(0, hvd.synchronize(one), expected)
                self.assert_equal_up_to(0, hvd.synchronize(other), expected * 2)
                last = hvd.join()
            self.assertNotEqual(last, first)
            self.assertSequenceEqual(hvd.allgather_object(last), [last] * self.size)

    def test_join_and_others(self):
        for call in (lambda: hvd.allgather(torch.ones(17)), lambda: hvd.broadcast(torch.ones(17), 1, name="b")):
            if self.rank == 0:
                last = hvd.join()
            else:
                self.assert_fails(call)
                last = hvd.join()
            self.assertNotEqual(last, 0)

    # -- sparse tensors, objects, compression

    def test_async_sparse_allreduce(self):
        def random_sparse(rows):
            tensor = torch.rand(rows, 10)
            tensor[tensor < 0.8] = 0
            return tensor.to_sparse()

        torch.manual_seed(self.rank)
        tensors = [random_sparse(rows) for rows in [17, 32, 81, 12, 15, 23, 22] * 3]
        dense = [hvd.allreduce(tensor.to_dense()) for tensor in tensors]
        calls = [hvd.sparse_allreduce_async(tensor, op=hvd.Average, name=str(i)) for i, tensor in enumerate(tensors)]
        for call, expected in zip(calls, dense, strict=True):
            self.assertTrue(torch.allclose(expected, call().to_dense(), 1e-6))

    def test_objects(self):
        self.assertDictEqual(hvd.broadcast_object({"a": [1, 2]} if self.rank == 0 else {}, 0), {"a": [1, 2]})
        self.assertListEqual(hvd.allgather_object({"rank": self.rank}), [{"rank": r} for r in range(self.size)])

    def test_compression_fp16(self):
        for dtype in (torch.float32, torch.float64):
            tensor = torch.ones(5, 5, 5, dtype=dtype)
            compressed, context = hvd.Compression.fp16.compress(tensor)
            self.assertEqual(compressed.dtype, torch.float16)
            restored = hvd.Compression.fp16.decompress(compressed, context)
            self.assertEqual(restored.dtype, dtype)
        self.assertEqual(hvd.allreduce(torch.ones(5), compression=hvd.Compression.fp16).tolist(), [1.0] * 5)


if __name__ == "__main__":
    unittest.main()
