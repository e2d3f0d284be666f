"""Grouped collectives on torch tensors, in real ranks, against closed forms; and sparse tensors, which are groups."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import reigen.torch as hvd
from reigen.errors import CollectiveError
from reigen.torch import sparse as sparse_gradients


def mixed(rank: int) -> list[torch.Tensor]:
    """Tensors of several dtypes, shapes and layouts, whose sums every dtype holds exactly."""
    return [
        torch.arange(6.0).reshape(2, 3) + rank,
        torch.tensor([3, -4]) * (rank + 1),
        torch.full((5,), 0.5 * rank, dtype=torch.float16),
        torch.tensor(float(rank)),
        torch.empty(0, 2),
        (torch.arange(12.0).reshape(3, 4) * (rank + 1)).t(),
        torch.full((70_000,), rank + 1.0, dtype=torch.float64),
        torch.tensor([1.5, 2.0], dtype=torch.bfloat16) * (rank + 1),
    ]


def over_ranks(combine: str) -> list[torch.Tensor]:
    """The truth for `mixed`, in float64."""
    columns = zip(*(mixed(rank) for rank in range(hvd.size())), strict=True)
    return [getattr(torch.stack([each.double() for each in column]), combine)(0) for column in columns]


def close(results: list[torch.Tensor], like: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert isinstance(results, list)
    for result, tensor, truth in zip(results, like, expected, strict=True):
        assert (result.dtype, result.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(result.double(), truth)


def allreduces() -> None:
    tensors, total = mixed(hvd.rank()), over_ranks("sum")
    with pytest.warns(DeprecationWarning, match="average"):
        close(hvd.grouped_allreduce(tensors, average=False), tensors, total)
    close(hvd.grouped_allreduce(tensors, op=hvd.Sum, name="named"), tensors, total)
    close(hvd.grouped_allreduce(iter(tensors), op=hvd.Min), tensors, over_ranks("amin"))  # type: ignore[arg-type]
    close(hvd.synchronize(hvd.grouped_allreduce_async(tensors, op=hvd.Sum)), tensors, total)
    floats, scaled = [tensors[0], tensors[6]], [total[0] * 2, total[6] * 2]
    close(hvd.grouped_allreduce(floats, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4), floats, scaled)
    mean = [
        truth / hvd.size() if t.is_floating_point() else (truth / hvd.size()).trunc()
        for t, truth in zip(tensors, total, strict=True)
    ]
    close(hvd.grouped_allreduce(tensors[:2]), tensors[:2], mean[:2])  # Average by default; integers truncated

    in_place = mixed(hvd.rank())
    returned = hvd.grouped_allreduce_(in_place, op=hvd.Sum)
    assert all(one is other for one, other in zip(returned, in_place, strict=True))
    close(in_place, tensors, total)
    in_place = mixed(hvd.rank())
    handle = hvd.grouped_allreduce_async_(in_place, op=hvd.Sum)
    returned = hvd.synchronize(handle)
    assert all(one is other for one, other in zip(returned, in_place, strict=True))
    close(in_place, tensors, total)

    numbers = [torch.tensor([1.0, 2.5]) * (hvd.rank() + 1), torch.tensor([2**20 + 1])]
    halves, counts = hvd.grouped_allreduce(numbers, op=hvd.Max, compression=hvd.Compression.fp16)
    assert halves.dtype == torch.float32
    assert halves.tolist() == [hvd.size(), 2.5 * hvd.size()]
    assert counts.item() == 2**20 + 1


def others() -> None:
    rank, n = hvd.rank(), hvd.size()
    tensors = [torch.full((rank + 1, 2), rank), torch.tensor([float(rank)]), torch.tensor(rank, dtype=torch.uint8)]
    expected = [[[r, r] for r in range(n) for _ in range(r + 1)], list(range(n)), list(range(n))]
    for results in (hvd.grouped_allgather(tensors), hvd.synchronize(hvd.grouped_allgather_async(tensors, "named"))):
        assert [result.tolist() for result in results] == expected
        assert [result.dtype for result in results] == [tensor.dtype for tensor in tensors]

    tables = [torch.arange(10.0).reshape(5, 2) * (rank + 1), torch.arange(n * 3) + rank]
    total = n * (n + 1) // 2
    rows = np.array_split(np.arange(10.0).reshape(5, 2) * total, n)[rank]
    numbers = (np.arange(n * 3) * n + n * (n - 1) // 2)[3 * rank : 3 * rank + 3]
    for results in (
        hvd.grouped_reducescatter(tables, op=hvd.Sum),
        hvd.synchronize(hvd.grouped_reducescatter_async(tables, op=hvd.Sum)),
        hvd.grouped_reducescatter(tables, op=hvd.Sum, compression=hvd.Compression.fp16),
    ):
        assert [result.tolist() for result in results] == [rows.tolist(), numbers.tolist()]
    halved = hvd.grouped_reducescatter(tables[:1], prescale_factor=0.5)[0]  # Average by default
    assert np.allclose(halved.numpy(), rows / n / 2)


def handles() -> None:
    """Several groups and single tensors under way, in an order of each rank's own; handles as scripts keep them."""
    names = [f"g{number}" for number in range(6)]
    order = names if hvd.rank() == 0 else names[::-1]
    pending = {}
    for name in order:
        group = [torch.full((number + 1,), float(name[1:])) for number in range(3)]
        pending[hvd.grouped_allreduce_async(group, name=name, op=hvd.Sum)] = name
        pending[hvd.allreduce_async(torch.ones(2), name=f"{name}.single", op=hvd.Sum)] = name
    assert len(set(pending)) == 12
    for handle, name in pending.items():
        result = hvd.synchronize(handle)
        assert hvd.poll(handle)
        assert hvd.synchronize(handle) is None
        if isinstance(result, list):
            assert [each.tolist() for each in result] == [[float(name[1:]) * hvd.size()] * (i + 1) for i in range(3)]


def gradients() -> None:
    """The rules of the specification, member by member; the members that are not of floating point have none."""
    rank, n = hvd.rank(), hvd.size()
    mean, total, weight = (n + 1) / 2, n * (n + 1) / 2, float(rank + 1)

    def leaves(*rows: int) -> list[torch.Tensor]:
        return [torch.ones(count, requires_grad=True) for count in rows]

    def backward(results: list[torch.Tensor]) -> None:
        sum((result * weight * (number + 1)).sum() for number, result in enumerate(results)).backward()

    counts = torch.tensor([rank])
    x, y = leaves(3, 2)
    results = hvd.grouped_allreduce([x, counts, y], op=hvd.Sum, prescale_factor=2.0)
    assert not results[1].requires_grad
    backward(results)
    assert (x.grad.tolist(), y.grad.tolist()) == ([2 * total] * 3, [6 * total] * 2)
    x, y = leaves(3, 2)
    backward(hvd.grouped_allreduce([x, y], compression=hvd.Compression.fp16)[:1])  # the second is not used
    assert (x.grad.tolist(), y.grad.tolist()) == ([mean] * 3, [0.0] * 2)

    x, y = leaves(rank + 1, 2)
    scalar = torch.tensor(1.0, requires_grad=True)
    gathered = hvd.grouped_allgather([x, counts, y, scalar], name="rows")
    rows = torch.arange(1.0, len(gathered[0]) + 1)
    (gathered[0] * rows * weight).sum().backward(retain_graph=True)
    begin = rank * (rank + 1) // 2
    assert x.grad.tolist() == [(begin + i + 1) * mean for i in range(rank + 1)]
    (gathered[2].sum() * weight + gathered[3].sum()).backward()
    assert (y.grad.tolist(), scalar.grad.item()) == ([mean] * 2, 1.0)

    for op, factor in ((hvd.Average, 1), (hvd.Sum, n)):
        x, y = leaves(n, 2 * n + 1)
        backward(hvd.grouped_reducescatter([x, y], op=op, postscale_factor=0.5))
        sizes = [len(part) for part in np.array_split(np.arange(2 * n + 1), n)]
        assert x.grad.tolist() == [0.5 * factor * (r + 1) for r in range(n)]
        assert y.grad.tolist() == [factor * (r + 1.0) for r in range(n) for _ in range(sizes[r])]
    with torch.no_grad():
        assert not hvd.grouped_allreduce([x])[0].requires_grad
    for function in (hvd.grouped_allreduce, hvd.grouped_reducescatter):
        with pytest.raises(ValueError, match="no gradient"):
            function(leaves(n), op=hvd.Max)[0].sum().backward()


@pytest.mark.parametrize("func", [allreduces, others, handles, gradients])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_groups(rank_pool, size, func):
    rank_pool(size).run(func, init=True)


def wrong_groups() -> None:
    x, on_device = torch.ones(2), torch.ones(2, device="meta")
    for call in (hvd.grouped_allreduce, hvd.grouped_allreduce_, hvd.grouped_allgather, hvd.grouped_reducescatter):
        with pytest.raises(RuntimeError, match="one kind of device, got cpu, meta"):
            call([x, on_device])
        for message, tensors in {
            "at least one tensor": [],
            "torch.Tensor is needed": [x, 1.0],
            "a list of tensors": 1.0,
            "complex64 is not supported": [x, x.to(torch.complex64)],
        }.items():
            with pytest.raises((ValueError, TypeError), match=message):
                call(tensors)
    with pytest.raises(ValueError, match="scalar"):
        hvd.grouped_reducescatter([x, torch.tensor(1.0)])
    with pytest.raises(RuntimeError, match="Adasum"):
        hvd.grouped_reducescatter([x], op=hvd.Adasum)
    assert hvd.grouped_allreduce([x], op=hvd.Sum)[0].tolist() == [hvd.size()] * 2  # nothing is out of step


def test_wrong_groups_raise_at_once_and_leave_no_trace(rank_pool):
    rank_pool(2).run(wrong_groups, init=True)


def differing_groups() -> None:
    """All members or none: where one differs, every rank gets an error and no tensor has changed."""
    rank = hvd.rank()

    def ones(*lengths: int) -> list[torch.Tensor]:
        return [torch.ones(length) for length in lengths]

    differing = {
        "number": [ones(2, 3), ones(2, 3, 4)],
        "shape": [ones(2, 3), ones(2, 4)],
        "dtype": [ones(2, 3), [*ones(2), torch.ones(3, dtype=torch.float64)]],
        "order": [ones(2, 3), ones(3, 2)],
        "no group": [ones(2), torch.ones(2)],
    }
    for name, sides in differing.items():
        own = sides[rank]
        with pytest.raises(hvd.HorovodInternalError, match=r"rank 0[\s\S]*rank 1"):
            (hvd.grouped_allreduce_ if isinstance(own, list) else hvd.allreduce_)(own, op=hvd.Sum, name=name)
        assert all((tensor == 1).all() for tensor in own)
    with pytest.raises(hvd.HorovodInternalError, match="scale"):
        hvd.grouped_allreduce(ones(2, 2), prescale_factor=1.0 + rank, name="scales")
    with pytest.raises(hvd.HorovodInternalError, match="operator"):
        hvd.grouped_reducescatter(ones(2, 2), op=[hvd.Sum, hvd.Max][rank], name="operators")
    with pytest.raises(hvd.HorovodInternalError, match="first dimension"):
        hvd.grouped_allgather([torch.ones(2, 2), torch.ones(1, 2 + rank)], name="columns")
    assert hvd.grouped_allreduce(ones(2, 3), op=hvd.Sum, name="shape")[1].tolist() == [2.0] * 3


def test_groups_that_differ_fail_as_a_whole_on_every_rank(rank_pool):
    rank_pool(2).run(differing_groups, init=True)


# -- sparse tensors ---------------------------------------------------------------------------------------------------


def sparse() -> None:
    rank, n = hvd.rank(), hvd.size()
    generator = torch.Generator().manual_seed(17)
    everybodys = [torch.rand(23, 10, generator=generator) for _ in range(n)]
    everybodys = [torch.where(table < 0.8, torch.zeros(()), table) for table in everybodys]
    mean = torch.stack(everybodys).mean(0)
    calls = [
        hvd.sparse_allreduce_async(everybodys[rank].to_sparse(), name=str(number), op=op)
        for number, op in enumerate((hvd.Average, hvd.Sum))
    ]
    average, total = [call() for call in calls]
    assert average.layout is torch.sparse_coo
    assert torch.allclose(average.to_dense(), mean)
    assert torch.allclose(total.to_dense(), mean * n)
    nnz = sum(int((table != 0).sum()) for table in everybodys)
    assert total._nnz() == nnz  # side by side, not merged
    rows = torch.sparse_coo_tensor([[rank]], torch.ones(1, 4), (n + 1, 4))  # sparse in one dimension of two
    assert hvd.sparse_allreduce_async(rows, None, hvd.Sum)().to_dense().tolist() == [[1.0] * 4] * n + [[0.0] * 4]
    with pytest.raises(ValueError, match="Average or Sum"):
        hvd.sparse_allreduce_async(rows, "max", hvd.Max)
    with pytest.raises(ValueError, match="sparse tensor"):
        hvd.sparse_allreduce_async(torch.ones(2), "dense", hvd.Sum)


@pytest.mark.parametrize("size", [1, 3])
def test_sparse_tensors(rank_pool, size):
    rank_pool(size).run(sparse, init=True)


@pytest.mark.parametrize("index", [3, -1, 10**12])
def test_indices_that_somebody_between_hosts_has_changed_write_nowhere(monkeypatch, index):
    """Tensors are not sealed without TLS; torch itself does not look, and writes beyond the tensor."""

    class Changed:
        def wait(self):
            return torch.tensor([[1], [index]]), torch.tensor([1.0, 2.0])

    monkeypatch.setattr(sparse_gradients, "grouped_allgather_async", lambda *arguments: Changed())
    hvd.init()
    try:
        tensor = torch.sparse_coo_tensor([[1]], [1.0], (3,), check_invariants=False)
        with pytest.raises(CollectiveError, match=r"indices make no sense for a tensor of shape \(3,\)"):
            hvd.sparse_allreduce_async(tensor, "sparse", hvd.Sum)()
    finally:
        hvd.shutdown()
