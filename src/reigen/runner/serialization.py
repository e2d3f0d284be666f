"""Python objects between the caller of `reigen.run` and its ranks: pickles in files without a name.

A payload is a memfd: it is nowhere in the file system, only a process that was given its descriptor can open it, and it
is gone with its last user. When it is complete it is sealed: it can be neither changed nor shortened under its readers.
cloudpickle writes it, so that lambdas, closures and classes of ``__main__`` travel by value.

A pickle can run code when it is loaded. These come from the caller's own processes alone, through descriptors that only
they inherit.
"""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import cloudpickle

from reigen.errors import ConfigError, SharedMemoryError, UnsupportedTypeError
from reigen.launch.payload import PayloadFile
from reigen.resources.memory import KEEP_FREE_BYTES, AvailableMemory


def check_call(
    func: Callable[..., Any], args: Sequence[Any] | None = (), kwargs: Mapping[str, Any] | None = None
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return a function and its arguments as they travel, before anything is started for them.

    Raises:
        ConfigError: (a ValueError) ``func`` cannot be called, or ``args`` or ``kwargs`` is one argument, not all.
    """
    if not callable(func):
        raise ConfigError(f"the function cannot be called: {func!r:.80}")
    if args is not None and (not isinstance(args, Iterable) or isinstance(args, str | bytes)):
        raise ConfigError(f"args has the function's arguments in a tuple or list, ({args!r:.80},), not {args!r:.80}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ConfigError(f"kwargs has the function's keyword arguments in a dictionary, not {kwargs!r:.80}")
    return func, tuple(() if args is None else args), dict(kwargs or {})


def pack_object(value: object, what: str) -> int:
    """Pickle ``value`` into a sealed payload; returns its descriptor, which is the caller's to close.

    Raises:
        UnsupportedTypeError: ``value`` cannot be pickled.
        SharedMemoryError: the host has not enough memory for its pickle.
    """
    payload = _PickleFile(what)
    try:
        cloudpickle.dump(value, payload)
        payload.seal()
    except SharedMemoryError:
        os.close(payload.descriptor)
        raise
    except Exception as error:  # a class's __reduce__ can raise anything
        os.close(payload.descriptor)
        raise UnsupportedTypeError(f"{what} cannot be sent: {type(error).__name__}: {error}") from error
    return payload.descriptor


def unpack_object(descriptor: int) -> Any:
    """Load the object of a payload. Any number of processes may read one at the same time."""
    with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as content, memoryview(content) as view:
        return pickle.loads(view)


def pickle_exception(error: BaseException) -> bytes | None:
    """Pickle an exception, for a payload beside its text; None where it cannot be pickled."""
    try:
        data: bytes = cloudpickle.dumps(error)
    except Exception:  # noqa: BLE001  a class's __reduce__ can raise anything
        return None
    return data


def unpickle_exception(data: bytes | None) -> BaseException | None:
    """Load the exception of :func:`pickle_exception`; None where it cannot be loaded here."""
    try:
        error = None if data is None else pickle.loads(data)
    except Exception:  # noqa: BLE001  a class's __init__ can raise anything
        return None
    return error if isinstance(error, BaseException) else None


class _PickleFile(PayloadFile):
    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def shortage_error(self, length: int, available: AvailableMemory) -> SharedMemoryError:
        written_mib = self.num_bytes >> 20
        return SharedMemoryError.for_request(
            self.num_bytes + length,
            available.num_bytes,
            f"{self._what} ({written_mib} MiB are there)" if written_mib else self._what,
            available.limit,
            keep_free_bytes=KEEP_FREE_BYTES,
            where="by this process",
        )

    def refused_error(self, reason: str) -> SharedMemoryError:
        return SharedMemoryError.refused(self.num_bytes, self._what, reason)
