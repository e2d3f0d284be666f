"""Collectives and queries as asynchronous operations of TensorFlow."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps, op_def_library, op_def_registry

from reigen import context
from reigen.api.native_calls import NativeCall
from reigen.api.runtime_threads import wait_until_left
from reigen.engine.handle import CollectiveResult, Handle
from reigen.errors import CollectiveError, ReigenError
from reigen.tensorflow.errors import remember, tensorflow_code
from reigen.tensorflow.native.c_api import CApi
from reigen.tensorflow.native.kernels import AsyncKernelOperation, KernelRun
from reigen.tensorflow.queries import decode
from reigen.types import DTYPES

_LIKE, _ROWS = "ReigenCollective", "ReigenCollectiveOfRows"
#: seconds for which an operation of so many bytes holds its thread of TensorFlow's
_WAIT_SECONDS, _SMALL_BYTES = 0.00005, 65536
#: not empty while one does
_waiting: list[None] = []
_INT32 = DTYPES["int32"]
#: Name of the first call of a function with collectives, by the graph that calls it.
_first_calls: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

Differentiate = Callable[[str, Sequence[tf.Tensor], Sequence[tf.Tensor], Sequence[Any]], list[Any]]


class NativeCollectives:
    """The operations of this process. One whose results have the shapes of its tensors, and one whose have not.

    Args:
        api: the C API.
        differentiate: makes the gradients of an operation: `reigen.tensorflow.graph.gradients_of`.

    Raises:
        KernelError: TensorFlow refuses them.
    """

    def __init__(self, api: CApi, differentiate: Differentiate) -> None:
        self._like = AsyncKernelOperation(api, _LIKE, _begin, has_rows=False)
        self._rows = AsyncKernelOperation(api, _ROWS, _begin, has_rows=True)

        def gradient(operation: Any, *gradients: Any) -> list[Any]:
            text = operation.get_attr("call")
            text = text.decode() if isinstance(text, bytes) else text
            return differentiate(text, list(operation.inputs), list(operation.outputs), gradients)

        for name in (_LIKE, _ROWS):
            op_def_registry.get(name)
            tf.RegisterGradient(name)(gradient)
        # They run whether their results are used or not, in any order: what matches them is their names.
        known = auto_control_deps.MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS
        auto_control_deps.MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS = known | {_LIKE, _ROWS}
        auto_control_deps.register_acd_resource_resolver(order_calls)
        atexit.register(self._at_exit, os.getpid())

    def emit(self, text: str, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Add an operation to the graph, and to no tape."""
        call = decode(text)
        is_like = not isinstance(call, NativeCall) or call.row.in_place
        name = call.collective if isinstance(call, NativeCall) else call.question
        kind = _LIKE if is_like else _ROWS
        made = op_def_library.apply_op(kind, inputs=list(tensors), call=text, name=f"Reigen{name.title()}")
        return list(made) if isinstance(made, list | tuple) else [made]

    def _at_exit(self, pid: int) -> None:
        """Leave the job, and return when no thread of TensorFlow's is in Python."""
        if os.getpid() == pid:
            context.shutdown()
            for operation in (self._like, self._rows):
                wait_until_left(operation.calls)


def order_calls(operation: Any, reads: Any, writes: Any) -> bool:
    """Have calls of functions with collectives follow one another: these have the same names in each call.

    TensorFlow asks it which variables an operation uses, when a function has been traced, and orders operations of one
    that is written. Calls that use no variables it orders by itself; others get one in common.

    Returns:
        Whether it has changed the sets.
    """
    if operation.type != "StatefulPartitionedCall" or not operation.outputs or not (reads or writes):
        return False
    if not _has_collectives(operation.graph, operation.get_attr("f").name):
        return False
    first = _first_calls.setdefault(operation.graph, operation.name)
    common = operation.graph.get_operation_by_name(first).outputs[0]
    if common in writes:
        return False
    writes.add(common)
    return True


def _has_collectives(graph: Any, name: str) -> bool:
    """Return whether a function, or one that it calls, has a collective."""
    if not graph._is_function(name):
        return False
    for node in graph._get_function(name).definition.node_def:
        if node.op in (_LIKE, _ROWS):
            return True
        called = [each.func.name for each in node.attr.values() if each.HasField("func")]
        called += [each.name for attribute in node.attr.values() for each in attribute.list.func]
        if any(_has_collectives(graph, each) for each in called):
            return True
    return False


def _begin(run: KernelRun, text: str) -> None:
    """Submit an operation; its end is reported by the thread that completes it."""
    run.take()
    try:
        call = decode(text)
        if isinstance(call, NativeCall):
            handle, complete = _submit(run, call)
        else:
            answer = call.answer()
            if isinstance(answer, int):
                _answer(run, answer)
                run.finish()
                return
            handle, complete = answer, lambda result: _answer(run, result.value)
    except ReigenError as error:
        run.finish(_status_of(error))
        return
    if handle.done:
        _end(run, handle, complete)
    else:
        handle.add_done_callback(partial(_end, run, handle, complete))


def _submit(run: KernelRun, call: NativeCall) -> tuple[Handle, Callable[[CollectiveResult], None]]:
    row, splits = call.row, None
    sources, dtypes = run.inputs()
    if row.returns_splits:
        splits = tuple(sources.pop().tolist()) or None
        dtypes.pop()
    makers = targets = None
    if row.in_place:
        targets = run.outputs_like(sources)
    else:
        makers = [partial(run.allocate, index, dtype) for index, dtype in enumerate(dtypes)]
    # One thread of TensorFlow's may wait a little: the other ranks' part in a small operation is there sooner than
    # another thread could be woken.
    waits = not _waiting and sum(source.nbytes for source in sources) <= _SMALL_BYTES
    if waits:
        _waiting.append(None)
    try:
        handle = call.start(sources, dtypes, targets, splits=splits, make_output=makers, blocking=waits)
        if waits:
            handle.wait_briefly(_WAIT_SECONDS)
    finally:
        if waits:
            _waiting.clear()
    if not row.returns_splits:
        return handle, lambda result: None

    def add_splits(result: CollectiveResult) -> None:
        received = result.received_splits
        run.allocate(1, _INT32, (len(received),))[...] = received

    return handle, add_splits


def _answer(run: KernelRun, answer: int) -> None:
    run.outputs_like(run.inputs()[0])[0][...] = answer


def _end(run: KernelRun, handle: Handle, complete: Callable[[CollectiveResult], None]) -> None:
    try:
        complete(handle.wait())
    except ReigenError as error:
        run.finish(_status_of(error))
    except Exception as error:  # noqa: BLE001  such as no memory for a result: the graph must not wait for ever
        run.finish((tf.errors.INTERNAL, f"{type(error).__name__}: {error}"))
    else:
        run.finish()


def _status_of(error: ReigenError) -> tuple[int, str]:
    text = remember(error) if isinstance(error, CollectiveError) else str(error)
    return tensorflow_code(error), text
