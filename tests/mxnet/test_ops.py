"""The collectives on NDArrays, between two real ranks; the truth is NumPy's."""

from __future__ import annotations

import os
import signal
import sys

import mxnet as mx
import numpy as np
import pytest
from mxnet.base import MXNetError

import reigen.mxnet as hvd
from reigen.errors import ArgumentError, MismatchError, PeerLostError, UnsupportedTypeError
from reigen.testing import RankError

pytestmark = pytest.mark.slow  # several processes

DTYPES = ["uint8", "int8", "int32", "int64", "float16", "float32", "float64"]
OPS = {hvd.Sum: np.sum, hvd.Min: np.min, hvd.Max: np.max, hvd.Product: np.prod}


def _all(dtype: str, shape: tuple[int, ...] = (3, 5)) -> np.ndarray:
    """What all ranks have, by rank."""
    random = np.random.default_rng(7)
    return random.integers(0, 9, (hvd.size(), *shape)).astype(dtype)


def reduce_everything() -> None:
    for dtype in DTYPES:
        everybodys = _all(dtype)
        own = mx.nd.array(everybodys[hvd.rank()], dtype=dtype)
        for op, truth in OPS.items():
            result = hvd.allreduce(own, op=op)
            assert result.dtype == own.dtype
            np.testing.assert_array_equal(result.asnumpy(), truth(everybodys, axis=0).astype(dtype))
        np.testing.assert_array_equal(own.asnumpy(), everybodys[hvd.rank()])
        assert hvd.allreduce_(own, op=hvd.Sum, prescale_factor=2.0) is own
        np.testing.assert_array_equal(own.asnumpy(), everybodys.sum(axis=0).astype(dtype) * 2)
    halves = hvd.allreduce(mx.nd.full((2, 2), hvd.rank())).asnumpy()
    np.testing.assert_array_equal(halves, np.full((2, 2), 0.5))
    assert hvd.allreduce(mx.nd.ones((3,)), average=False, postscale_factor=0.25).asnumpy().tolist() == [0.5] * 3


def groups_slices_and_other_arrays() -> None:
    rank = hvd.rank()
    group = [mx.nd.full((2, index + 1), rank + index, dtype="int32") for index in range(3)]
    sums = [hvd_result.asnumpy() for hvd_result in hvd.grouped_allreduce(group, op=hvd.Sum)]
    assert [each.tolist() for each in sums] == [np.full((2, i + 1), 1 + 2 * i).tolist() for i in range(3)]
    base = mx.nd.arange(6).reshape((3, 2)) + rank
    hvd.grouped_allreduce_([base[0], base[2]], op=hvd.Sum)  # two slices of one array
    np.testing.assert_array_equal(base.asnumpy(), [[1, 3], [2 + rank, 3 + rank], [9, 11]])
    scalar = hvd.allreduce(mx.np.array(3.0 + rank), op=hvd.Sum)
    assert isinstance(scalar, mx.np.ndarray)
    assert scalar.item() == 7
    image = mx.nd.full((2, 16, 8, 8), rank + 1)
    kernel = mx.nd.ones((16, 16, 1, 1))
    convolved = mx.nd.Convolution(image, kernel, no_bias=True, kernel=(1, 1), num_filter=16)  # in a layout of oneDNN
    np.testing.assert_array_equal(hvd.allreduce(convolved, op=hvd.Sum).asnumpy(), np.full((2, 16, 8, 8), 48))


def move_everything() -> None:
    rank, everybodys = hvd.rank(), _all("float32", (4, 3))
    own = mx.nd.array(everybodys[rank])
    np.testing.assert_array_equal(hvd.broadcast(own, 1).asnumpy(), everybodys[1])
    assert hvd.broadcast_(own, 0) is own
    np.testing.assert_array_equal(own.asnumpy(), everybodys[0])
    rows = mx.nd.full((rank + 1, 2), rank, dtype="int64")
    assert hvd.allgather(rows).asnumpy().tolist() == [[0, 0], [1, 1], [1, 1]]
    assert [each.asnumpy().tolist() for each in hvd.grouped_allgather([rows[0], rows[:1]])] == [
        [0, 0, 1, 1],
        [[0, 0], [1, 1]],
    ]
    np.testing.assert_array_equal(
        hvd.alltoall(mx.nd.array(everybodys[rank])).asnumpy(), everybodys[:, 2 * rank : 2 * rank + 2].reshape(4, 3)
    )
    received, splits = hvd.alltoall(mx.nd.arange(4) + 10 * rank, splits=mx.nd.array([1, 3], dtype="int32"))
    assert received.asnumpy().tolist() == ([0, 10] if rank == 0 else [1, 2, 3, 11, 12, 13])
    assert splits.asnumpy().tolist() == ([1, 1] if rank == 0 else [3, 3])
    part = hvd.reducescatter(mx.nd.array(everybodys[rank]), op=hvd.Sum).asnumpy()
    np.testing.assert_array_equal(part, everybodys.sum(axis=0)[2 * rank : 2 * rank + 2])
    parts = hvd.grouped_reducescatter([mx.nd.arange(3), mx.nd.ones((2, 2))])
    assert [each.asnumpy().tolist() for each in parts] == [[0, 1] if rank == 0 else [2], [[1, 1]]]
    assert hvd.broadcast_object({"rank": rank}, 1) == {"rank": 1}
    assert hvd.allgather_object(rank) == [0, 1]


def in_process_sets() -> None:
    alone = hvd.add_process_set([1])
    if hvd.rank() == 1:
        assert hvd.allreduce(mx.nd.ones((2,)), op=hvd.Sum, process_set=alone).asnumpy().tolist() == [1, 1]
        assert hvd.allgather(mx.nd.ones((2,)), process_set=alone).asnumpy().tolist() == [1, 1]
    else:
        with pytest.raises(ArgumentError, match="rank 0") as caught:
            hvd.allreduce(mx.nd.ones((2,)), process_set=alone)
        assert isinstance(caught.value, MXNetError)
    assert hvd.allreduce(mx.nd.ones((2,)), op=hvd.Sum).asnumpy().tolist() == [2, 2]
    assert hvd.remove_process_set(alone)


def overlap() -> None:
    """What waits for a collective waits, and nothing else: rank 1 comes when rank 0 has gone on."""
    value = mx.nd.full((1000,), hvd.rank() + 1)
    if hvd.rank() == 0:
        # what reads it comes further down: MXNet puts operations in a row together, and they wait for each other
        late = hvd.allreduce_(value * 2, op=hvd.Sum, name="late")
        others = [(mx.nd.ones((10, 10)) * number).asnumpy() for number in range(20)]  # MXNet's engine goes on
        assert others[3].tolist() == np.full((10, 10), 3).tolist()
        assert hvd.allreduce(mx.nd.ones((2,)), op=hvd.Sum, name="other").asnumpy().tolist() == [2, 2]
        assert hvd.broadcast_object("now", 0) == "now"
    else:
        assert hvd.allreduce(mx.nd.ones((2,)), op=hvd.Sum, name="other").asnumpy().tolist() == [2, 2]
        assert hvd.broadcast_object(None, 0) == "now"
        late = hvd.allreduce_(value * 2, op=hvd.Sum, name="late")
    np.testing.assert_array_equal((late + 1).asnumpy(), np.full(1000, 7))


def fork_in_the_middle() -> None:
    """As gluon's DataLoader does: MXNet's engine stops for it, with reductions on their way."""
    for _ in range(3):
        several = [mx.nd.ones((100_000,)) * 2 for _ in range(8)]
        for number, array in enumerate(several):
            hvd.allreduce_(array, op=hvd.Sum, name=f"at a fork {number}")
        child = os.fork()
        if child == 0:
            os._exit(int(hvd.is_initialized()))
        assert os.waitpid(child, 0)[1] == 0
        assert several[7].asnumpy()[5] == 4


def disagree() -> None:
    """Every rank is told, where it waits for the result or for what was made of it; the next collective works."""
    rank = hvd.rank()
    array = mx.nd.ones((2 + rank,))
    for act in (hvd.allreduce, hvd.allreduce_, lambda a, name: hvd.broadcast(a, 0, name)):
        result = act(array, name="different")
        with pytest.raises(MXNetError, match="shapes differ") as caught:
            (result * 2).wait_to_read()
        assert isinstance(caught.value, MismatchError)
        assert isinstance(caught.value, hvd.HorovodInternalError)
        assert caught.value.details == {0: "[2]", 1: "[3]"}
    for act in (hvd.reducescatter, hvd.allgather, hvd.alltoall):
        with pytest.raises(MXNetError) as caught:
            act(mx.nd.ones((2, 2 + rank)), name="wide")
        assert isinstance(caught.value, MismatchError)
    ready = mx.nd.ones((2,))
    assert hvd.allreduce(ready, op=hvd.Sum).asnumpy().tolist() == [2, 2]


def make_mistakes() -> None:
    array = mx.nd.ones((3,))
    for act, kind in (
        (lambda: hvd.allreduce(np.ones(3)), UnsupportedTypeError),
        (lambda: hvd.allreduce(mx.nd.ones((3, 2)).tostype("row_sparse")), UnsupportedTypeError),
        (lambda: hvd.allreduce(array, average=True, op=hvd.Sum), ArgumentError),
        (lambda: hvd.allreduce_(array, op=17), ArgumentError),
        (lambda: hvd.broadcast(array, 2), ArgumentError),
        (lambda: hvd.alltoall(array), ArgumentError),
        (lambda: hvd.alltoall(array, splits=[3, 3]), ArgumentError),
        (lambda: hvd.alltoall(array, splits=mx.nd.ones((2,))), ArgumentError),
        (lambda: hvd.reducescatter(mx.np.array(1.0)), ArgumentError),
    ):
        with pytest.raises(MXNetError) as caught:
            act()
        assert isinstance(caught.value, kind)
        assert isinstance(caught.value, ValueError)
    assert hvd.allreduce(array, op=hvd.Sum).asnumpy().tolist() == [2, 2, 2]


def everything() -> None:
    reduce_everything()
    groups_slices_and_other_arrays()
    move_everything()
    in_process_sets()
    overlap()
    fork_in_the_middle()
    disagree()
    make_mistakes()
    assert "torch" not in sys.modules


def test_every_collective(rank_pool):
    rank_pool(2).run(everything, init=True, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})


def die_and_tell() -> tuple[str, tuple[int, ...], str]:
    hvd.allreduce(mx.nd.ones((2,)), name="before").wait_to_read()
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    updated = hvd.allreduce_(mx.nd.ones((1000,)), name="gradient") * 0.1
    with pytest.raises(MXNetError) as caught:
        updated.wait_to_read()
    assert isinstance(caught.value, PeerLostError)
    with pytest.raises(MXNetError):
        hvd.allgather(mx.nd.ones((2,)))
    return type(caught.value).__name__, caught.value.ranks, str(caught.value)


def test_the_death_of_a_rank_is_told_where_somebody_waits(rank_pool):
    with pytest.raises(RankError) as caught:
        rank_pool(2).run(die_and_tell, init=True)
    assert [failure.rank for failure in caught.value.failures] == [1]
    name, ranks, text = caught.value.results[0]
    assert (name, ranks) == ("PeerLostError", (1,))
    assert "gradient" in text


def at_once() -> None:
    """With MXNet's engine for debugging there is nothing to wait for."""
    assert hvd.allreduce_(mx.nd.full((2,), hvd.rank()), op=hvd.Sum).asnumpy().tolist() == [1, 1]
    with pytest.raises(MXNetError, match="shapes differ") as caught:
        hvd.allreduce(mx.nd.ones((2 + hvd.rank(),)), name="different")
    assert isinstance(caught.value, MismatchError)


def alone() -> None:
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (0, 1)
    assert hvd.allreduce(mx.nd.ones((2,))).asnumpy().tolist() == [1, 1]
    assert hvd.allgather(mx.nd.ones((2,))).asnumpy().tolist() == [1, 1]
    hvd.shutdown()
    for act in (lambda: hvd.allreduce(mx.nd.ones((2,))), hvd.rank):
        with pytest.raises(ValueError, match="not been initialized"):
            act()


def test_other_settings():
    from reigen.testing import RankPool

    with RankPool(2, env={"MXNET_ENGINE_TYPE": "NaiveEngine"}) as pool:
        pool.run(at_once, init=True)
    with RankPool(1) as pool:
        pool.run(alone)
