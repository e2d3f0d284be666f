"""Collectives of compiled programs: the text in a native operation of a runtime (TensorFlow, XLA), and its start.

A program is traced once and runs many times, on threads of the runtime. What the call in its source said is written
into the operation, as text; the tensors, memory of the runtime, come with each run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from numpy.typing import NDArray

from reigen import context
from reigen.api.adapter import as_rows
from reigen.api.operations import COLLECTIVES, Collective
from reigen.engine.handle import Handle
from reigen.engine.operation_builders import ReductionSpec
from reigen.errors import DuplicateNameError
from reigen.types import DType, ReduceOp

MakeOutput = Callable[[tuple[int, ...]], NDArray[Any]]

_BY_NAME = {collective.name: collective for collective in COLLECTIVES}


class NativeCall(msgspec.Struct, frozen=True):
    """A call of a collective in the source of a program that a runtime runs; the same on every rank.

    Attributes:
        collective: by its name in the table.
        name: matches the ranks' operations; without one they match in the order of their submission.
        process_set: number of the set whose ranks take part.
        is_grouped: the tensors are reduced all or none; otherwise there is one.
        labels: of a group, may say which tensor each one is, for a message where ranks differ.
        reduction: operator and factors, of a collective that reduces.
        root_rank: of a broadcast; -1: it is none.
    """

    collective: str
    name: str
    process_set: int = 0
    is_grouped: bool = False
    reduction: tuple[int, float, float] | None = None
    root_rank: int = -1
    labels: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, collective: Collective, argument: Any, name: str, process_set: int, *, is_grouped: bool = False
    ) -> NativeCall:
        """Describe a call by the argument of the collective's own; the splits of an alltoall are not part of it."""
        reduction = (int(argument[0]), argument[1], argument[2]) if collective.reduces else None
        root_rank = argument if isinstance(argument, int) else -1
        return cls(collective.name, name, process_set, is_grouped, reduction, root_rank)

    @property
    def row(self) -> Collective:
        """The collective's row in the table."""
        return _BY_NAME[self.collective]

    @property
    def argument(self) -> Any:
        """The argument of the collective's own: a `ReductionSpec`, the root, or None."""
        return _argument_of(self)

    def encode(self) -> str:
        """Return it as text, for an attribute of an operation."""
        return msgspec.json.encode(self).decode()

    def start(
        self,
        sources: Sequence[NDArray[Any]],
        dtypes: Sequence[DType],
        targets: Sequence[NDArray[Any]] | None = None,
        *,
        splits: tuple[int, ...] | None = None,
        make_output: MakeOutput | Sequence[MakeOutput] | None = None,
        blocking: bool = False,
        in_program: bool = True,
    ) -> Handle:
        """Submit it; returns at once.

        Args:
            sources: the tensors' contents, C-contiguous, in storage dtypes; they stay until the handle is complete.
            dtypes: their element types.
            targets: of the same shapes, for results of that shape; each may be its source.
            splits: of an alltoall, the rows for each rank.
            make_output: gives memory for a result of a shape that is not known beforehand, on whichever thread
                completes the operation; one for all tensors, or one for each.
            blocking: the caller waits for the handle next.
            in_program: see `Handle.is_in_program`.

        Raises:
            ReigenError: see `Context.start`; nothing was sent. Where the name is still in flight in a program, the job
                ends: the others wait for this rank's part, and which of the two they should get is not known.
        """
        job, collective = context.current(), _BY_NAME[self.collective]
        argument = splits if collective.returns_splits else self.argument
        given = [*map(as_rows, sources)] if collective.takes_scalars else sources
        options: Any = {"name": self.name or None, "process_set": self.process_set, "blocking": blocking}
        try:
            if self.is_grouped:
                options |= {"targets": targets, "labels": self.labels, "make_output": make_output}
                handle = job.start_group(collective.build, given, dtypes, argument, **options)
            else:
                options["target"] = None if targets is None else targets[0]
                options["make_output"] = make_output[0] if isinstance(make_output, Sequence) else make_output
                handle = job.start(collective.build, given[0], dtypes[0], argument, **options)
        except DuplicateNameError as error:
            if in_program:
                job.give_up(error)
            raise
        handle.is_in_program = in_program
        return handle


@functools.lru_cache(maxsize=4096)
def decode_call(text: str | bytes) -> NativeCall:
    """Read what `NativeCall.encode` has written; the same object again for the same text.

    Raises:
        msgspec.DecodeError: it is something else.
    """
    return msgspec.json.decode(text, type=NativeCall)


@functools.lru_cache(maxsize=4096)
def _argument_of(call: NativeCall) -> Any:
    if call.reduction is not None:
        op, prescale, postscale = call.reduction
        return ReductionSpec(ReduceOp(op), prescale, postscale)
    return None if call.root_rank < 0 else call.root_rank
