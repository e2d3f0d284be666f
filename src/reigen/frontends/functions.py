"""Horovod's functions that are the same for every framework: all that is asynchronous or in place, barrier, join.

A framework's package makes one :class:`SharedFunctions` and takes its bound methods as its own functions. What differs
between frameworks (blocking collectives that are differentiable, compression, ``alltoall``) each of them writes itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from reigen import context
from reigen.frontends import objects
from reigen.frontends.adapter import Tensor
from reigen.frontends.collectives import Average, Collectives, Pending, as_root, reducing
from reigen.frontends.process_sets import ProcessSet, global_process_set, number_of

#: What may be passed as a tensor.
Given = TypeVar("Given")

#: What the asynchronous functions return; :func:`poll` and :func:`synchronize` take it.
Handle = Pending[Any]


class SharedFunctions(Generic[Given, Tensor]):
    """The asynchronous and the in-place collectives for one framework; none is differentiable.

    Args:
        collectives: the framework's.
    """

    def __init__(self, collectives: Collectives[Tensor]) -> None:
        self._collectives = collectives

    def allreduce_async(
        self,
        tensor: Given,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Handle:
        """Begin ``allreduce``; ``synchronize`` gives a new tensor."""
        how = reducing(average, op, prescale_factor, postscale_factor)
        return self._collectives.allreduce(tensor, how, name, process_set)

    def allreduce_(
        self,
        tensor: Tensor,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Tensor:
        """``allreduce`` in place: the result is written into ``tensor``, which is returned."""
        how = reducing(average, op, prescale_factor, postscale_factor)
        return self._collectives.allreduce(tensor, how, name, process_set, in_place=True, blocking=True).take()

    def allreduce_async_(
        self,
        tensor: Tensor,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Handle:
        """Begin ``allreduce_``. The tensor must not be touched before ``synchronize``, which completes it."""
        how = reducing(average, op, prescale_factor, postscale_factor)
        return self._collectives.allreduce(tensor, how, name, process_set, in_place=True)

    def grouped_allreduce_async(
        self,
        tensors: Sequence[Given],
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Handle:
        """Begin ``grouped_allreduce``; ``synchronize`` gives a list of new tensors."""
        how = reducing(average, op, prescale_factor, postscale_factor)
        return self._collectives.grouped_allreduce(tensors, how, name, process_set)

    def grouped_allreduce_(
        self,
        tensors: Sequence[Tensor],
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> list[Tensor]:
        """``grouped_allreduce`` in place: the results are written into ``tensors``, which are returned as a list."""
        how = reducing(average, op, prescale_factor, postscale_factor)
        return self._collectives.grouped_allreduce(tensors, how, name, process_set, in_place=True, blocking=True).take()

    def grouped_allreduce_async_(
        self,
        tensors: Sequence[Tensor],
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Handle:
        """Begin ``grouped_allreduce_``. The tensors must not be touched before ``synchronize``."""
        how = reducing(average, op, prescale_factor, postscale_factor)
        return self._collectives.grouped_allreduce(tensors, how, name, process_set, in_place=True)

    def allgather_async(
        self, tensor: Given, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:
        """Begin ``allgather``."""
        return self._collectives.allgather(tensor, name, process_set)

    def grouped_allgather_async(
        self, tensors: Sequence[Given], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:
        """Begin ``grouped_allgather``; ``synchronize`` gives a list of tensors."""
        return self._collectives.grouped_allgather(tensors, name, process_set)

    def broadcast_async(
        self, tensor: Given, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:
        """Begin ``broadcast``; ``synchronize`` gives a new tensor."""
        return self._collectives.broadcast(tensor, root_rank, name, process_set)

    def broadcast_(
        self, tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Tensor:
        """``broadcast`` in place: the root's contents are written into ``tensor``, which is returned."""
        return self._collectives.broadcast(tensor, root_rank, name, process_set, in_place=True, blocking=True).take()

    def broadcast_async_(
        self, tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:
        """Begin ``broadcast_``. The tensor must not be touched before ``synchronize``, which completes it."""
        return self._collectives.broadcast(tensor, root_rank, name, process_set, in_place=True)

    def reducescatter_async(
        self,
        tensor: Given,
        name: str | None = None,
        op: int = Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Handle:
        """Begin ``reducescatter``."""
        how = reducing(None, op, prescale_factor, postscale_factor)
        return self._collectives.reducescatter(tensor, how, name, process_set)

    def grouped_reducescatter_async(
        self,
        tensors: Sequence[Given],
        name: str | None = None,
        op: int = Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Handle:
        """Begin ``grouped_reducescatter``; ``synchronize`` gives a list of tensors."""
        how = reducing(None, op, prescale_factor, postscale_factor)
        return self._collectives.grouped_reducescatter(tensors, how, name, process_set)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the set has come here. What is outstanding need not be complete."""
    context.current().barrier(process_set=number_of(process_set), blocking=True).wait()


def join(device: int = -1) -> int:
    """This rank has no more data: wait until all ranks have said so.

    Until then it takes part in the others' allreduces, as if with tensors of zeros (ones for Product, and so on), while
    an average still divides by the number of all ranks. Any other collective of theirs raises an error there.

    Args:
        device: accepted for Horovod's sake.

    Returns:
        The last rank that joined: the one that has seen the most data. The same on every rank.
    """
    return context.current().join(blocking=True).wait().value


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's object, on every rank.

    Args:
        obj: read on the root alone; anything that pickle (or cloudpickle, if it is installed) can write.
        root_rank: whose object all get.
        name: matches the ranks' calls.
        process_set: whose ranks take part; ``root_rank`` is a rank of the job all the same.
    """
    current = context.current()
    return objects.broadcast_object(current, obj, as_root(root_rank), name, number_of(process_set))


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Every rank's object, as a list by rank."""
    return objects.allgather_object(context.current(), obj, name)
