"""Registration of XLA's foreign function interface in JAX, and host callbacks in its place.

It is used with the versions of XLA with which the tests have run, and with another one after a self-test in a process
of its own has succeeded. Where it cannot be used, and with REIGEN_JAX_NATIVE=0, collectives of programs are ordered
host callbacks of JAX (`io_callback`): each is called when the one before it is complete, in the order in which they
stand in the program.
That takes longer, and a program with them cannot be exported.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.experimental import io_callback

from reigen import context
from reigen.api.native_calls import NativeCall
from reigen.api.self_tests import SelfTest
from reigen.config import load_config
from reigen.errors import ReigenError
from reigen.jax.adapter import dtype_of
from reigen.jax.tracing import find_difference
from reigen.xla import FfiHandler
from reigen.xla.failures import RuntimeFailures
from reigen.xla.ffi_structs import KNOWN_VERSIONS

_log = logging.getLogger(__name__)
TARGET = "reigen_collective"
#: Versions of jaxlib with which the tests have run.
TESTED_VERSIONS = ("0.6.2", "0.10.2", "0.11.2")
_callback_failures = RuntimeFailures()
#: seconds that the end of a script waits for computations, beyond the deadline of each collective
_GRACE_SECONDS = 5.0


@functools.cache
def get_handler() -> FfiHandler | None:
    """Return the handler that is registered with JAX; None: it cannot be, or is not to be, and host callbacks are used.

    It begins with the first program that has a collective.
    """
    handler = None
    reason = _judge()
    if reason is None:
        handler, reason = register(TARGET, device_index=_local_index)
    if handler is None:
        _log.warning("collectives inside jax.jit go through host callbacks, which take longer: %s", reason)
        return None
    atexit.register(_drain_at_exit, os.getpid())
    return handler


def register(target: str, **options: Any) -> tuple[FfiHandler | None, str]:
    """Register a handler with JAX, for a version of the interface that XLA takes; None, and why: it takes none.

    Args:
        target: its name, once in a process.
        **options: as for `FfiHandler`.
    """
    jax.local_devices(backend="cpu")  # a handler that XLA refuses while it starts would keep it from that
    reason = ""
    for version in KNOWN_VERSIONS:
        handler = FfiHandler(version, checks_order=True, **options)
        try:
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler.function), platform="cpu")
        except Exception as error:  # noqa: BLE001  of JAX's classes, which depend on its version
            reason = str(error)
        else:
            return handler, ""
    return None, reason


@functools.cache
def self_test() -> SelfTest:
    """Return the self-test of XLA's foreign function interface."""
    environment = (("REIGEN_JAX_NATIVE", "1"), ("JAX_PLATFORMS", "cpu"))
    library = Path(jaxlib.__file__).with_name("libjax_common.so")
    return SelfTest("JAX's XLA", jaxlib.__version__, library, "reigen.jax.self_test", TESTED_VERSIONS, environment)


def _judge() -> str | None:
    """Return why the interface cannot be used; None: it can."""
    config = context.current().config if context.is_initialized() else load_config(os.environ)
    if config.jax_native == "0":
        return "REIGEN_JAX_NATIVE=0"
    return find_difference() or (None if config.jax_native == "1" else self_test().judge())


@functools.lru_cache(maxsize=256)
def _local_index(number: int) -> int:
    """Number of a device among those of this process; jax.distributed numbers the devices of all processes."""
    numbers = [device.id for device in jax.local_devices(backend="cpu")]
    return numbers.index(number) if number in numbers else number


def drain() -> None:
    """Wait for dispatched computations: no thread of JAX may need Python behind its end, or the job behind its own."""
    for array in jax.live_arrays():
        with contextlib.suppress(Exception):  # whoever needs the value gets it
            array.block_until_ready()
    with contextlib.suppress(Exception):
        jax.effects_barrier()
    handler = get_handler() if get_handler.cache_info().currsize else None
    if handler is not None and context.is_initialized():
        handler.drain(context.current().config.deadline_seconds + _GRACE_SECONDS)


def _drain_at_exit(pid: int) -> None:
    """Wait for dispatched computations; a forked child has none of the threads that would complete them."""
    if os.getpid() == pid:
        drain()


def shutdown() -> None:
    """Leave the job, when all dispatched computations are complete. ``init()`` may be called again.

    JAX forgets its compiled programs: shapes in them, and branches by rank, were those of this job.
    """
    change_job(context.shutdown)


def change_job(change: Callable[[], None]) -> None:
    """Leave the job by ``change``, which may enter another, as `shutdown` does."""
    drain()
    change()
    jax.clear_caches()


@contextlib.contextmanager
def collective_errors() -> Iterator[None]:
    """Raise failures of collectives inside compiled programs as CollectiveError.

    JAX raises a JaxRuntimeError where a result of a program is needed that failed, or a ValueError where the program
    failed before its call was over. In this context it is the
    CollectiveError (also named HorovodInternalError), with its fields, such as the ranks that were lost; wait there for
    the results (``jax.block_until_ready``).
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        handler = get_handler()
        found = (_callback_failures if handler is None else handler.failures).find(str(error))
        if found is None:
            raise
        raise found from error


def run_by_callback(
    operands: Sequence[Any], results: Sequence[jax.ShapeDtypeStruct], call: NativeCall, splits: tuple[int, ...] | None
) -> list[Any]:
    """Run a collective as an ordered host callback, in a program that is traced."""

    def run(*arrays: Any) -> list[np.ndarray[Any, Any]]:
        given = [np.ascontiguousarray(np.asarray(array)).reshape(np.shape(array)) for array in arrays]
        try:
            outcomes = run_on_host(given, call, splits)
        except ReigenError as error:
            raise RuntimeError(_callback_failures.text_of(error)) from error
        return [outcome.view(result.dtype) for outcome, result in zip(outcomes, results, strict=True)]

    return list(io_callback(run, list(results), *operands, ordered=True))


def run_on_host(arrays: Sequence[Any], call: NativeCall, splits: tuple[int, ...] | None) -> list[Any]:
    """Run a collective of NumPy arrays to its end; returns its results, in storage types."""
    dtypes = [dtype_of(array.dtype) for array in arrays]
    sources = [array.view(dtype.storage) for array, dtype in zip(arrays, dtypes, strict=True)]
    targets = [np.empty_like(source) for source in sources] if call.row.in_place else None
    outcome = call.start(sources, dtypes, targets, splits=splits, blocking=True).wait()
    found = [each.on_host for each in (outcome.members if call.is_grouped else (outcome,))]
    if call.row.returns_splits:
        found.append(np.array(outcome.received_splits, np.int32))
    return found


@functools.cache
def callback_effects() -> frozenset[Any]:
    """Return the effects with which JAX keeps host callbacks in order."""
    shape = jax.ShapeDtypeStruct((), np.float32)
    return frozenset(jax.make_jaxpr(lambda x: io_callback(np.asarray, shape, x, ordered=True))(shape).effects)
