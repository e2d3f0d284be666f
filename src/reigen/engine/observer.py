"""Observers of the engine's work, as it goes on: a timeline, metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from reigen.engine.messages import Operation, Response


class EngineObserver(Protocol):
    """Observer, called on the thread that does the work; methods must take microseconds and raise nothing.

    An operation is `submitted`, and then either `failed` or part of a batch that is `began` and `ended`. A rank that
    has joined sees only the latter, for operations of others in which it stands in.
    """

    def waiting(self, name: str) -> None:
        """A caller begins to wait for this operation: it can do nothing else now. Any thread."""
        ...

    def waited(self, name: str) -> None:
        """Record that an operation has its result, or an error. The same thread."""
        ...

    def submitted(self, operation: Operation) -> None:
        """Record that this rank has submitted an operation; from now on it waits for the others. Any thread."""
        ...

    def began(self, batch: Sequence[tuple[Operation, Response]]) -> None:
        """All ranks have come: these operations, which travel together, are about to be carried out."""
        ...

    def ended(self, batch: Sequence[tuple[Operation, Response]]) -> None:
        """They are over, well or not."""
        ...

    def phase_ended(self, name: str) -> None:
        """A part of carrying out the batch that was begun is over; see `reigen.backends.base.PhaseCallback`."""
        ...

    def failed(self, name: str) -> None:
        """The submission under this name was refused or given up; it was not carried out."""
        ...

    def announced(self) -> None:
        """A round of negotiation has come to something (Horovod's cycle): what follows is carried out or fails now."""
        ...
