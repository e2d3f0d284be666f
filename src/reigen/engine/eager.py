"""Eager allreduces: blocking calls for small tensors that were agreed on before, in one exchange.

They are step O of the protocol in `reigen.engine.coordinator`, only where this rank has nothing else outstanding, and
the ranks share memory: see `reigen.net.shm_eager`.
"""

from __future__ import annotations

import time

import msgspec
import numpy as np
from numpy.typing import NDArray

from reigen.engine.coordinator import Coordinator
from reigen.engine.handle import CollectiveResult, Handle
from reigen.engine.messages import Operation, OperationKind
from reigen.engine.process_set import get_reduction
from reigen.engine.rank_controller import CachedResponse, RankController
from reigen.engine.tensor_queue import TensorQueue
from reigen.kernels.reduce import BlockReducer
from reigen.net.futex import SpinLimit
from reigen.net.shm_eager import EagerSlots
from reigen.types import DTYPES, ReduceOp

#: So many collectives are prepared at a time.
_MAX_PREPARED = 1024
#: Responses with greater numbers are submitted by messages.
_MAX_SLOT = 1 << 31


class _PreparedAllreduce(msgspec.Struct, frozen=True, eq=False):
    """A cached allreduce, its views of the eager slots, and its reducer.

    Attributes:
        cached: what was agreed.
        contributions: by parity and rank, the beginnings of the eager slots.
        own: by parity, this rank's.
        reducer: adds them up.
        num_bytes: of this rank's part.
    """

    cached: CachedResponse
    contributions: tuple[list[NDArray[np.generic]], ...]
    own: tuple[NDArray[np.generic], ...]
    reducer: BlockReducer
    num_bytes: int


class EagerAllreduce:
    """Eager allreduces of one rank. For the thread that drives the engine.

    Args:
        rank: of how many.
        slots: carry submissions and answers.
        controller: knows what was agreed.
        coordinator: on rank 0.
        outstanding: the rank's operations.
        spin: how often to look for the others.
        overdue_seconds: after how long the coordinator's answer is overdue, even if it is slow.
    """

    def __init__(
        self,
        rank: int,
        slots: EagerSlots,
        controller: RankController,
        coordinator: Coordinator | None,
        outstanding: TensorQueue,
        spin: SpinLimit,
        overdue_seconds: float,
    ) -> None:
        self._rank = rank
        self._slots = slots
        self._controller, self._coordinator = controller, coordinator
        self._outstanding = outstanding
        self._spin, self._overdue_seconds = spin, overdue_seconds
        #: of what was done eagerly
        self.counters = controller.counters
        #: by the number of the response; None where it is no small allreduce
        self._prepared: dict[int, _PreparedAllreduce | None] = {}
        #: submitted, and not answered when this rank stopped looking
        self._unanswered: _PreparedAllreduce | None = None

    def submit(self, operation: Operation, handle: Handle) -> bool:
        """Submit a blocking call's operation eagerly, if possible; the handle may be done then.

        Args:
            operation: what is wanted.
            handle: its memory; its caller waits for it next.

        Returns:
            whether it was submitted; if not, nothing has changed.
        """
        cached = self._controller.cached.get(operation.name)
        if cached is None or cached.operation is not operation or handle.task.journal is not None:
            return False  # nobody could finish a sum in registered memory that was not made there
        slot, prepared = cached.slot, self._prepared
        call = prepared[slot] if slot in prepared else self._prepare(cached)
        if call is None or not self._outstanding.add_alone(operation.name, handle):
            return False
        task, parity, coordinator = handle.task, self._slots.count & 1, self._coordinator
        call.own[parity][:] = task.source  # type: ignore[assignment]  # in host memory: the operation has no device
        if coordinator is None:
            if not self._slots.submit(slot, self._spin.looks):
                self._controller.submitted_eagerly(cached)
                self._outstanding.overdue[operation.name] = time.monotonic() + self._overdue_seconds
                self._unanswered = call
                return True
        elif not (coordinator.may_answer_eagerly(slot) and self._slots.answer(slot, self._spin.looks)):
            self._outstanding.inbox.append(operation)
            return True
        call.reducer.reduce(call.contributions[parity], task.target)  # type: ignore[arg-type]  # likewise
        counters = self.counters
        counters.cache_hits += 1
        counters.eager += 1
        counters.eager_bytes += call.num_bytes
        self._outstanding.finish_alone(operation.name, handle, CollectiveResult(task.output))
        return True

    def finish(self) -> None:
        """Carry out the last submission, if it has been answered since; before messages that came behind the answer."""
        call = self._unanswered
        if call is None or not self._slots.take_answer():
            return
        self._unanswered = None
        self.counters.eager += 1
        self.counters.eager_bytes += call.num_bytes
        name = call.cached.operation.name
        self._controller.answered_eagerly(name)
        task = self._outstanding.handles[name].task
        parity = (self._slots.count - 1) & 1
        call.reducer.reduce(call.contributions[parity], task.target)  # type: ignore[arg-type]  # in host memory
        self._outstanding.finish([(name, CollectiveResult(task.output))])

    def _prepare(self, cached: CachedResponse) -> _PreparedAllreduce | None:
        operation, call = cached.operation, None
        is_allreduce = operation.kind is OperationKind.ALLREDUCE and operation.op is not ReduceOp.ADASUM
        is_plain = not (operation.members or operation.device or operation.process_set)
        if is_allreduce and is_plain and 0 < operation.nbytes <= self._slots.max_bytes and cached.slot < _MAX_SLOT:
            storage, slots = DTYPES[operation.dtype].storage, self._slots.slots
            contributions = tuple([slot[: operation.nbytes].view(storage) for slot in of_ranks] for of_ranks in slots)
            reduction = get_reduction(
                operation.dtype, operation.op, len(slots[0]), operation.prescale, operation.postscale
            )
            own = tuple(of_ranks[self._rank] for of_ranks in contributions)
            call = _PreparedAllreduce(cached, contributions, own, BlockReducer(reduction), operation.nbytes)
        if len(self._prepared) >= _MAX_PREPARED:
            self._prepared.clear()
        self._prepared[cached.slot] = call
        return call
