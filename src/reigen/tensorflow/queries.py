"""Operations of a graph that ask something of the job when the graph runs, beside the collectives."""

from __future__ import annotations

import functools

import msgspec

from reigen import context
from reigen.api.native_calls import NativeCall, decode_call
from reigen.engine.handle import Handle
from reigen.errors import ArgumentError


class Query(msgspec.Struct, frozen=True):
    """A question; its answer is an integer.

    Attributes:
        question: ``rank`` and ``size``: of this process in the set, and of the set. ``included``: 1 if it is in the
            set, else 0. ``local_rank`` and ``local_size`` are of the host. ``join`` waits; see `Context.join`.
        process_set: number of the set.
    """

    question: str
    process_set: int = 0

    def encode(self) -> str:
        """Return it as text, for an attribute of an operation."""
        return f"?{self.question}:{self.process_set}"

    def answer(self) -> int | Handle:
        """Answer it, or return the handle of an operation whose ``value`` will be the answer.

        Raises:
            NotInitializedError: this process is in no job.
            ArgumentError: there is no such process set, or this process is not in it.
        """
        job = context.current()
        if self.question == "join":
            return job.join()
        if self.question in ("local_rank", "local_size"):
            return job.local_rank if self.question == "local_rank" else job.local_size
        ranks = job.process_sets.get(self.process_set)
        if ranks is None:
            raise ArgumentError(f"there is no process set {self.process_set}; it has to be added first, on all ranks")
        if self.question == "size":
            return len(ranks)
        if self.question == "included":
            return int(job.rank in ranks)
        if job.rank not in ranks:
            raise ArgumentError(f"rank {job.rank} is not in process set {self.process_set}, whose ranks are {ranks}")
        return ranks.index(job.rank)


@functools.lru_cache(maxsize=4096)
def decode(text: str) -> NativeCall | Query:
    """Read the text of an operation."""
    if text.startswith("?"):
        question, _, number = text[1:].partition(":")
        return Query(question, int(number))
    return decode_call(text)
