"""Python objects between the caller of `reigen.run` and its ranks: pickles in files without a name.

A payload is a memfd: it is nowhere in the file system, only a process that was given its descriptor can open it, and it
is gone with its last user. When it is complete it is sealed: it can be neither changed nor shortened under its readers.
cloudpickle writes it, so that lambdas, closures and classes of ``__main__`` travel by value.

A pickle can run code when it is loaded. These come from the caller's own processes alone, through descriptors that only
they inherit.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import pickle
from typing import Any

import cloudpickle

from reigen.errors import SharedMemoryError, UnsupportedTypeError
from reigen.resources import memory
from reigen.resources.limits import explain_limit
from reigen.resources.memory import KEEP_FREE_BYTES

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
#: The available memory is looked at for blocks of at least this size.
_LOOK_BYTES = 1 << 20


def pack_object(value: object, what: str) -> int:
    """Pickle ``value`` into a sealed payload; returns its descriptor, which is the caller's to close.

    Raises:
        UnsupportedTypeError: ``value`` cannot be pickled.
        SharedMemoryError: the host has not enough memory for its pickle.
    """
    descriptor = os.memfd_create("reigen-payload", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        cloudpickle.dump(value, _PayloadWriter(descriptor, what))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except SharedMemoryError:
        os.close(descriptor)
        raise
    except Exception as error:  # a class's __reduce__ can raise anything
        os.close(descriptor)
        raise UnsupportedTypeError(f"{what} cannot be sent: {type(error).__name__}: {error}") from error
    return descriptor


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


class _PayloadWriter:
    """File for a pickler, which checks the available memory before it takes a large block.

    Otherwise a shortage would end a process (the kernel kills one) instead of raising an error.
    """

    def __init__(self, descriptor: int, what: str) -> None:
        self._descriptor, self._what = descriptor, what
        self._num_bytes = 0

    def write(self, data: bytes | memoryview) -> int:
        """Append ``data``."""
        view = memoryview(data).cast("B")
        length = len(view)
        self._num_bytes += length
        if length >= _LOOK_BYTES:
            available = memory.available_memory()
            if not available.allows(length + KEEP_FREE_BYTES):
                written_mib = (self._num_bytes - length) >> 20
                raise SharedMemoryError.for_request(
                    self._num_bytes,
                    available.num_bytes,
                    f"{self._what} ({written_mib} MiB are there)" if written_mib else self._what,
                    available.limit,
                    keep_free_bytes=KEEP_FREE_BYTES,
                    where="by this process",
                )
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError as error:
            raise SharedMemoryError.refused(self._num_bytes, self._what, str(explain_limit(error).strerror)) from error
        return length
