"""Eager allreduces of ranks in one thread: when they are carried out at once, and what becomes of all others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray

from reigen.engine.coordinator import Coordinator
from reigen.engine.eager import EagerAllreduce
from reigen.engine.handle import Handle, TensorTableEntry
from reigen.engine.messages import CacheEviction, Operation, OperationKind, ResponseList, SubmitRequest
from reigen.engine.rank_controller import ExecuteBatch, RankController
from reigen.engine.tensor_queue import TensorQueue
from reigen.errors import CollectiveError
from reigen.net.futex import SpinLimit
from reigen.net.shm_eager import max_eager_bytes
from reigen.types import DTYPES, ReduceOp
from tests.unit.net.test_shm_ring import star

X = Operation(OperationKind.ALLREDUCE, "x", "float32", (4,))


class Ranks:
    """Controllers, queues and eager allreduces of a few ranks, and their coordinator; nobody drives them."""

    def __init__(self, size: int, capacity: int = 8, looks: int = 3) -> None:
        self.coordinator = Coordinator(size, capacity, 1 << 20, 60.0)
        self.controllers = [RankController(rank) for rank in range(size)]
        self.queues = [TensorQueue() for _ in range(size)]
        self.transports = star(size)
        self.eager = [
            EagerAllreduce(
                r, self.transports[r].eager, self.controllers[r], None if r else self.coordinator, self.queues[r],
                SpinLimit(looks), 60.0,
            )
            for r in range(size)
        ]  # fmt: skip

    def agree(self, *operations: Operation) -> None:
        """Have operations negotiated by all ranks, so that they are cached."""
        for operation in operations:
            for controller in self.controllers:
                controller.submit(operation)
            self.announce()

    def announce(self) -> list[Any]:
        """Bring reports to the coordinator and what it says to all ranks; return that."""
        for rank, controller in enumerate(self.controllers):
            self.coordinator.receive(rank, controller.outgoing, 0.0)
            controller.outgoing = []
        said = self.coordinator.announce(0.0)
        self.instructions = [[i for a in said for i in controller.receive(a)] for controller in self.controllers]
        return said

    def take(self) -> None:
        """Rank 0 takes what was submitted eagerly as cache hits."""
        for rank, reports in self.transports[0].receive():
            self.coordinator.receive(rank, reports, 0.0)  # type: ignore[arg-type]

    def submit(self, rank: int, operation: Operation = X, value: float = 1.0) -> tuple[bool, Handle, NDArray[Any]]:
        """Submit eagerly an array of ``value``; return whether it was, the handle and the array."""
        array = np.full(operation.shape, value, DTYPES[operation.dtype].storage)
        handle: Handle = Handle(None, operation.name, TensorTableEntry(array.reshape(-1), array.reshape(-1), array))  # type: ignore[arg-type]
        return self.eager[rank].submit(operation, handle), handle, array


def test_the_last_to_come_is_rank_0() -> None:
    ranks = Ranks(3)
    ranks.agree(X)
    early = [ranks.submit(rank, value=rank) for rank in (2, 1)]
    assert all(submitted and not handle.done for submitted, handle, _ in early)
    submitted, handle, array = ranks.submit(0, value=10)
    assert submitted
    assert handle.done
    assert array.tolist() == [13.0] * 4
    for rank, (_, handle, array) in zip((2, 1), early, strict=True):
        assert set(ranks.controllers[rank].pending) == {"x"}
        ranks.eager[rank].finish()
        assert handle.done
        assert array.tolist() == [13.0] * 4
        assert not ranks.controllers[rank].pending
    assert not any(queue.handles or queue.overdue or queue.inbox for queue in ranks.queues)
    assert handle.wait().array is array


def test_where_not_all_come_rank_0_submits_as_ever_and_takes_the_others_as_hits() -> None:
    ranks = Ranks(3)
    ranks.agree(X)
    ranks.submit(1)
    submitted, handle, _ = ranks.submit(0)
    assert submitted
    assert not handle.done
    assert list(ranks.queues[0].inbox) == [X]
    ranks.controllers[0].submit(ranks.queues[0].inbox.popleft())
    ranks.controllers[2].submit(X)
    ranks.take()
    assert ranks.announce() == [ResponseList(((0,),))]
    assert all(isinstance(i, ExecuteBatch) for (i,) in ranks.instructions)
    ranks.eager[1].finish()  # there is no answer
    assert not ranks.controllers[1].pending


def test_ranks_that_submit_different_things_are_not_mixed_up() -> None:
    y = structs.replace(X, name="y")
    ranks = Ranks(2)
    ranks.agree(X, y)
    ranks.submit(1, y)
    submitted, handle, _ = ranks.submit(0, X)
    assert submitted
    assert not handle.done
    assert ranks.transports[0].receive() == [(1, (1,))]


def test_a_submission_that_crossed_an_eviction_is_said_again_in_full() -> None:
    ranks = Ranks(2, capacity=1)
    ranks.agree(X)
    ranks.submit(1)
    for rank in (0, 1):  # which needs the only slot; rank 1 has not read so when it submits
        ranks.coordinator.receive(rank, [SubmitRequest(structs.replace(X, name="y"))], 0.0)
    said = ranks.coordinator.announce(0.0)
    assert said[-1] == CacheEviction((0,))
    assert not ranks.coordinator.may_answer_eagerly(0)
    ranks.take()
    ranks.controllers[1].receive(said[-1])
    assert ranks.controllers[1].outgoing == [SubmitRequest(X, 0)]


def test_nothing_is_answered_after_the_end() -> None:
    ranks = Ranks(2)
    ranks.agree(X)
    assert ranks.coordinator.may_answer_eagerly(0)
    ranks.controllers[1].leave()
    ranks.announce()
    assert not ranks.coordinator.may_answer_eagerly(0)


@pytest.mark.parametrize(
    "operation",
    [
        structs.replace(X, shape=(max_eager_bytes(2) // 4 + 1,)),
        structs.replace(X, shape=(0,)),
        structs.replace(X, op=ReduceOp.ADASUM),
        structs.replace(X, kind=OperationKind.BROADCAST, root=0),
        structs.replace(X, device="cuda"),
        structs.replace(X, dtype="", shape=(), members=(structs.replace(X, name=""),)),
    ],
)
def test_what_is_not_submitted_eagerly(operation: Operation) -> None:
    ranks = Ranks(2)
    ranks.agree(operation)
    assert operation.name in ranks.controllers[1].cached
    for _ in range(2):
        assert not ranks.submit(1, operation)[0] if not operation.members else True
    assert not ranks.queues[1].handles
    assert not ranks.transports[0].pending()


def test_neither_what_is_not_cached_nor_beside_something_outstanding() -> None:
    ranks = Ranks(2)
    assert not ranks.submit(1)[0]
    ranks.agree(X)
    assert not ranks.submit(1, structs.replace(X, prescale=2.0))[0], "another operation than was agreed on"
    ranks.queues[1].handles["y"] = Handle(None, "y", TensorTableEntry())  # type: ignore[arg-type]
    assert not ranks.submit(1)[0]
    del ranks.queues[1].handles["y"]
    ranks.queues[1].set_broken(CollectiveError("over"))
    assert not ranks.submit(1)[0]
    assert not ranks.transports[0].pending()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int8", "int64", "bool"])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MAX, ReduceOp.PRODUCT])
def test_every_type_and_operator(dtype: str, op: ReduceOp) -> None:
    operation = structs.replace(X, dtype=dtype, op=op)
    ranks = Ranks(2)
    ranks.agree(operation)
    one = 0x3F80 if dtype == "bfloat16" else 1  # its storage is uint16
    _, _, second = ranks.submit(1, operation, one)
    _, _, first = ranks.submit(0, operation, one)
    ranks.eager[1].finish()
    expected = 1 if op is not ReduceOp.SUM or dtype == "bool" else 2
    if dtype == "bfloat16":
        expected = {1: 0x3F80, 2: 0x4000}[expected]
    assert first.tolist() == second.tolist() == [expected] * 4
