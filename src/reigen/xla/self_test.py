"""Calls for self-tests of a runtime's foreign function interface: they stand for collectives, and need no job.

Each doubles its tensor: its handle is complete at once, after a moment on another thread, or fails, as the beginning of
its name says: ``now``, ``later`` or ``error``.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import msgspec
from numpy.typing import NDArray

from reigen.api.native_calls import NativeCall
from reigen.engine.handle import CollectiveResult, Handle, TensorTableEntry
from reigen.errors import CollectiveError
from reigen.types import DType

#: in the text of the error of those that fail
FAILURE = "it fails as it should"
_DELAY_SECONDS = 0.01


class DelayedCall(NativeCall, frozen=True):
    """A call of an allreduce whose result comes later."""

    @classmethod
    def named(cls, name: str) -> DelayedCall:
        """Make one."""
        return cls("allreduce", name, reduction=(1, 1.0, 1.0))

    def start(
        self,
        sources: Sequence[NDArray[Any]],
        dtypes: Sequence[DType],
        targets: Sequence[NDArray[Any]] | None = None,
        **options: Any,
    ) -> Handle:
        """Begin; returns at once."""
        handle = Handle(_Timers(), self.name, TensorTableEntry())
        assert targets is not None

        def end() -> None:
            for source, target in zip(sources, targets, strict=True):
                target[...] = source * 2
            handle.complete(CollectiveError(FAILURE) if self.name.startswith("error") else CollectiveResult())

        if self.name.startswith("now"):
            end()
        else:
            threading.Timer(_DELAY_SECONDS, end).start()
        return handle


def decode_delayed(text: str | bytes) -> DelayedCall:
    """Read what `NativeCall.encode` has written."""
    return msgspec.json.decode(text, type=DelayedCall)


class _Timers:
    """Stands for the engine: timers complete the handles."""

    def wait_for(self, handle: Handle) -> None:
        """Do nothing: only handles that are complete are waited for."""

    def wait_briefly(self, handle: Handle, seconds: float) -> None:
        """Do not wait."""
