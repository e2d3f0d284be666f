"""Collectives on NDArrays; those with a result of known shape are operations of MXNet's engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from reigen import context
from reigen.api.collectives import Collectives, Form, Implementation
from reigen.api.operations import ALLREDUCE, BROADCAST, Collective, as_group, check_root
from reigen.api.process_sets import ProcessSet, process_set_number
from reigen.engine.handle import Handle
from reigen.engine.operation_builders import ReductionSpec
from reigen.errors import ArgumentError
from reigen.mxnet import arrays
from reigen.mxnet.adapter import EngineAdapter, MXNetAdapter, empty_like
from reigen.mxnet.engine import get_engine_queue

NDArray = Any

_IN_ENGINE: Collectives[NDArray] = Collectives(EngineAdapter())

#: Submits a collective, given the collectives to use, its name, and whether it is waited for.
_Submit = Callable[[Collectives[NDArray], str, bool], Handle[Any]]


class MXNetCollectives(Collectives[NDArray]):
    """Collectives on NDArrays, with one more argument, the ``priority`` of the operation in MXNet's engine."""

    in_place_waits = False

    def implementation(self, collective: Collective, grouped: bool, form: Form) -> Implementation:
        if collective.in_place:
            return self._in_engine(collective, grouped, form.in_place)
        run = super().implementation(collective, grouped, form)

        def run_now(value: Any, argument: Any, name: str | None, process_set: ProcessSet, priority: int) -> Any:
            return run(value, argument, name, process_set)

        return run_now

    def _in_engine(self, collective: Collective, grouped: bool, in_place: bool) -> Implementation:
        def push(value: Any, argument: Any, name: str | None, process_set: ProcessSet, priority: int) -> Any:
            if collective is BROADCAST:
                check_root(argument, context.current().size)
            group = as_group(value) if grouped else [value]
            outs = None if in_place else [empty_like(self.adapter.as_tensor(tensor)) for tensor in group]

            def submit(use: Collectives[NDArray], named: str, blocking: bool) -> Handle[Any]:
                if grouped:
                    return use.start_group(
                        collective, group, argument, named, process_set, in_place=in_place, outs=outs, blocking=blocking
                    )
                out = None if outs is None else outs[0]
                return use.start(
                    collective, value, argument, named, process_set, in_place=in_place, out=out, blocking=blocking
                )

            kind = f"grouped_{collective.name}" if grouped else collective.name
            self._push(kind, submit, [] if outs is None else group, outs or group, name, priority, process_set)
            results = group if outs is None else outs
            return results if grouped else results[0]

        return push

    def _push(
        self,
        kind: str,
        submit: _Submit,
        reads: Sequence[NDArray],
        writes: Sequence[NDArray],
        name: str | None,
        priority: int,
        process_set: ProcessSet,
    ) -> None:
        """Put a collective into MXNet's engine or, if its arrays are not in host memory, run it now.

        Mistakes that all ranks make are raised here, before it takes a number of the unnamed ones.
        """
        job, members = context.current(), process_set_number(process_set)
        if process_set.included() is False:
            raise ArgumentError(f"rank {job.rank} is not one of the ranks of {process_set}")
        for array in reads:
            self.adapter.dtype(self.adapter.as_tensor(array))
        for array in writes:
            self.adapter.dtype(self.adapter.as_tensor(array, writable=True))
        named = job.next_name(kind, members) if name is None else str(name)
        if not all(map(arrays.on_host, (*reads, *writes))):
            submit(self, named, True).wait()
            return
        for array in reads or writes:  # arrays that are only written are new
            arrays.reorder(array)
        get_engine_queue().push(lambda: submit(_IN_ENGINE, named, False), reads, writes, priority, named)


COLLECTIVES = MXNetCollectives(MXNetAdapter())


def reduce_in_place(
    group: Sequence[NDArray], reduction: ReductionSpec, name: str, priority: int, process_set: ProcessSet
) -> None:
    """Put the reduction of gradients into MXNet's engine: one array by itself, several as a group.

    Gradients lie in the ordinary layout; callers that cannot be sure of that use ``grouped_allreduce_``.
    """

    def submit(use: Collectives[NDArray], blocking: bool) -> Handle[Any]:
        if len(group) == 1:
            return use.start(ALLREDUCE, group[0], reduction, name, process_set, in_place=True, blocking=blocking)
        return use.start_group(ALLREDUCE, group, reduction, name, process_set, in_place=True, blocking=blocking)

    if all(map(arrays.on_host, group)):
        get_engine_queue().push(lambda: submit(_IN_ENGINE, False), [], group, priority, name)
    else:
        submit(COLLECTIVES, True).wait()
