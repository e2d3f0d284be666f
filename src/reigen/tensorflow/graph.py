"""Collectives as operations of graphs, with their gradients.

What a call said is written into the operation as text (`NativeCall`); tensors come when the graph runs. The operation
is one of our own, asynchronous, where `reigen.tensorflow.native` is available, and else a function of Python that
TensorFlow calls (`reigen.tensorflow.fallback`). The gradients are Horovod's, as in `reigen.api.operations`, made of
collectives again: those of allgather and broadcast average.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import tensorflow as tf
from msgspec import structs
from tensorflow.python.eager import record

from reigen.api.native_calls import NativeCall
from reigen.api.operations import ALLGATHER, ALLREDUCE, REDUCESCATTER
from reigen.errors import ArgumentError, UnsupportedError
from reigen.tensorflow import compiled, fallback
from reigen.tensorflow.adapter import TensorFlowAdapter, record_operation
from reigen.tensorflow.errors import raises_tensorflow_errors
from reigen.tensorflow.native.c_api import CApi, MissingFunctionError
from reigen.tensorflow.native.collectives import NativeCollectives
from reigen.tensorflow.native.kernels import KernelError
from reigen.tensorflow.native.trust import judge
from reigen.tensorflow.queries import Query, decode
from reigen.types import ReduceOp

Tensors = list[tf.Tensor]

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_LINEAR = (ReduceOp.AVERAGE, ReduceOp.SUM)
#: What TensorFlow adds to the names of functions that it makes, a number that counts all traces.
_TRACE_NUMBER = re.compile(r"_\d+$")
#: Functions of TensorFlow's that do not return before forward mode has transposed a gradient, if it has to.
_FORWARD_MODE = ("record_operation", "record_operation_forwardprop_only", "record_gradient", "_jvp_helper")
#: Names that are in use, by graph.
_names: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()


def emit(call: NativeCall | Query, tensors: Sequence[tf.Tensor]) -> Tensors:
    """Add an operation to the graph that is being built; an alltoall has its splits behind its tensor, and its result.

    Splits are an int32 vector; an empty one asks for equal parts.

    Raises:
        UnsupportedError: XLA is to compile the graph, and cannot: see `reigen.tensorflow.compiled`.
    """
    if isinstance(call, NativeCall):
        call = structs.replace(call, name=_unique_name(call.name))
    native = None if compiled.is_compiling() else native_collectives()
    text = call.encode()
    if native is not None:
        results = native.emit(text, tensors)
        inputs = list(results[0].op.inputs)
    else:
        inputs = list(map(tf.identity, tensors))  # the tapes know what the graph captures here
        with record.stop_recording():
            if compiled.is_compiling():
                results = compiled.emit(call, inputs, gradients_of)
            else:
                results = fallback.emit(text, inputs, gradients_of)
    record_operation(
        results,
        inputs,
        lambda gradients: gradients_of(text, inputs, results, gradients),
        lambda tangents: tangents_of(text, inputs, tangents),
    )
    return results


def native_collectives() -> NativeCollectives | None:
    """Return the operations of our own, registered now, if they are not yet; None where there can be none."""
    with _lock:
        return _native_or_none()


@functools.cache
def _native_or_none() -> NativeCollectives | None:
    why_not = judge()
    if why_not is None:
        try:
            return NativeCollectives(CApi(), gradients_of)
        except (MissingFunctionError, KernelError, OSError) as error:
            why_not = str(error)
    _log.warning(
        "collectives in graphs run as functions of Python (tf.numpy_function), each of which holds a thread of "
        "TensorFlow, because there are no operations for them: %s",
        why_not,
    )
    return None


def ask(question: str, process_set: int = 0) -> tf.Tensor:
    """Add an operation that answers a question of `Query` when the graph runs; an int32 scalar."""
    return emit(Query(question, process_set), [tf.zeros([], tf.int32)])[0]


def name_of(kind: str) -> str:
    """Name an unnamed operation by its place: the functions and the scope of names that it is in.

    It is the same on every rank whose functions have the same names and operations, whatever else was traced before.
    """
    graph = tf.compat.v1.get_default_graph()
    scope = graph.get_name_scope()
    parts = [scope, kind] if scope else [kind]
    while getattr(graph, "outer_graph", None) is not None:
        parts.insert(0, _TRACE_NUMBER.sub("", graph.name))
        graph = graph.outer_graph
    return "/".join(parts)


def _unique_name(name: str) -> str:
    """Return the name, with a number if it was used before in the graph that is being built."""
    used = _names.setdefault(tf.compat.v1.get_default_graph(), {})
    count = used[name] = used.get(name, 0) + 1
    return name if count == 1 else _unique_name(f"{name}_{count - 1}")


# -- gradients --------------------------------------------------------------------------------------------------------


@raises_tensorflow_errors
def gradients_of(
    encoded: str, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor], gradients: Sequence[Any]
) -> list[tf.Tensor | None]:
    """Return the gradients of an operation's inputs, given those of its outputs; None for integers.

    Raises:
        ArgumentError: it has none: Min, for one.
    """

    def make(call: NativeCall, places: Sequence[int]) -> Tensors:
        given = [
            tf.zeros_like(outputs[index]) if gradients[index] is None else tf.convert_to_tensor(gradients[index])
            for index in places
        ]
        call = structs.replace(call, name=f"{call.name}.grad")
        return _RULES[call.collective](call, [inputs[index] for index in places], outputs, given)

    return _make_for_floating(encoded, inputs, make)


@raises_tensorflow_errors
def tangents_of(encoded: str, inputs: Sequence[tf.Tensor], tangents: Sequence[Any]) -> list[tf.Tensor | None]:
    """Return the tangents of an operation's results: the collective of those of its inputs; None for integers.

    Raises:
        ArgumentError: it has none: Min, for one.
    """

    def make(call: NativeCall, places: Sequence[int]) -> Tensors:
        if call.row.reduces:
            _check_linear(call)
        given = [tangents[index] for index in places]
        if call.row.returns_splits:
            given.append(inputs[1])
        return emit(structs.replace(call, name=f"{call.name}.jvp"), given)[: len(places)]  # without the splits

    return _make_for_floating(encoded, inputs, make)


def _make_for_floating(
    encoded: str, inputs: Sequence[tf.Tensor], make: Callable[[NativeCall, Sequence[int]], Tensors]
) -> list[tf.Tensor | None]:
    """Return what ``make`` gives for the places of the inputs that hold floating-point numbers; None for others."""
    call = decode(encoded)
    places = [index for index, tensor in enumerate(inputs) if tensor.dtype.is_floating]
    made: list[tf.Tensor | None] = [None] * len(inputs)
    if isinstance(call, NativeCall) and places:
        for index, result in zip(places, make(call, places), strict=True):
            made[index] = result
    return made


def _allreduce_gradient(call: NativeCall, inputs: Tensors, outputs: Sequence[tf.Tensor], gradients: Tensors) -> Tensors:
    _check_linear(call)
    return emit(call, gradients)


def _mean(call: NativeCall, gradients: Tensors) -> Tensors:
    """The average of gradients; forward mode, which transposes the gradient of a whole function, is refused.

    It would average the tangents, too, while the collective does not average its tensors.
    """
    reduction = (int(ReduceOp.AVERAGE), 1.0, 1.0)
    averaged = emit(structs.replace(call, collective=ALLREDUCE.name, reduction=reduction, root_rank=-1), gradients)
    what = call.collective

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def identity(*given: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Sequence[tf.Tensor]]]:
        def backward(*again: tf.Tensor) -> Sequence[tf.Tensor]:
            if _is_transposing():
                raise UnsupportedError(
                    f"forward mode cannot differentiate a tf.function, a loop or a branch that calls {what}: "
                    "TensorFlow would transpose its gradient, which averages; put tf.autodiff.ForwardAccumulator into "
                    f"the function, around {what}"
                )
            return again

        return list(map(tf.identity, given)), backward

    return list(identity(*averaged))


def _is_transposing() -> bool:
    """Return whether forward mode is making the tangents of a function, a loop or a branch, out of their gradients.

    TensorFlow tells a gradient's gradient nothing of it: what it is made for is seen in the stack alone. Reverse mode
    makes none while an operation is being recorded.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name not in _FORWARD_MODE:
        frame = frame.f_back
    return frame is not None


def _allgather_gradient(call: NativeCall, inputs: Tensors, outputs: Sequence[tf.Tensor], gradients: Tensors) -> Tensors:
    """Their average, and of it the rows that came from this rank, which cannot know without asking where they begin."""
    if compiled.is_compiling():  # the ranks' tensors have the same shapes
        reduction = (int(ReduceOp.AVERAGE), 1.0, 1.0)
        shares = emit(structs.replace(call, collective=REDUCESCATTER.name, reduction=reduction), gradients)
        return [tf.reshape(share, tensor.shape) for share, tensor in zip(shares, inputs, strict=True)]
    averaged = _mean(call, gradients)
    counts = [tf.shape(tensor)[0] if _has_rows(tensor) else tf.constant(1) for tensor in inputs]
    asking = structs.replace(call, name=f"{call.name}.rows", is_grouped=False)
    everywhere = emit(asking, [tf.stack(counts)[tf.newaxis]])[0]
    begins = tf.reduce_sum(everywhere[: ask("rank", call.process_set)], 0)
    return [
        tf.reshape(mean[begins[index] : begins[index] + counts[index]], tf.shape(tensor))
        for index, (mean, tensor) in enumerate(zip(averaged, inputs, strict=True))
    ]


def _broadcast_gradient(call: NativeCall, inputs: Tensors, outputs: Sequence[tf.Tensor], gradients: Tensors) -> Tensors:
    """Their average on the root, zeros elsewhere."""
    is_root = tf.equal(ask("rank"), call.root_rank)
    return [tf.where(is_root, mean, tf.zeros_like(mean)) for mean in _mean(call, gradients)]


def _alltoall_gradient(call: NativeCall, inputs: Tensors, outputs: Sequence[tf.Tensor], gradients: Tensors) -> Tensors:
    """They go back to where the rows came from; rows that were not sent get zeros."""
    if compiled.is_compiling():
        return emit(call, [gradients[0], tf.zeros([0], tf.int32)])[:1]
    returned = emit(call, [gradients[0], outputs[1]])[0]
    shape = tf.shape(inputs[0])
    rest = tf.concat([[shape[0] - tf.shape(returned)[0]], shape[1:]], 0)
    return [tf.concat([returned, tf.zeros(rest, returned.dtype)], 0)]


def _reducescatter_gradient(
    call: NativeCall, inputs: Tensors, outputs: Sequence[tf.Tensor], gradients: Tensors
) -> Tensors:
    """All ranks' gradients, times the number of ranks for Sum, and times the factors."""
    op, prescale, postscale = _check_linear(call)
    gathered = emit(structs.replace(call, collective=ALLGATHER.name, reduction=None), gradients)
    size = tf.cast(ask("size", call.process_set), tf.float64) if op is ReduceOp.SUM else 1.0
    return [each * tf.cast(size * prescale * postscale, each.dtype) for each in gathered]


_RULES: dict[str, Callable[[NativeCall, Tensors, Sequence[tf.Tensor], Tensors], Tensors]] = {
    "allreduce": _allreduce_gradient,
    "allgather": _allgather_gradient,
    "broadcast": _broadcast_gradient,
    "alltoall": _alltoall_gradient,
    "reducescatter": _reducescatter_gradient,
}


def _check_linear(call: NativeCall) -> tuple[ReduceOp, float, float]:
    op, prescale, postscale = call.argument
    if op not in _LINEAR:
        raise ArgumentError(
            f"{call.collective} with op={op.name.title()} has no gradient; {TensorFlowAdapter.stop_gradient}"
        )
    return op, prescale, postscale


def _has_rows(tensor: tf.Tensor) -> bool:
    if tensor.shape.rank is None:
        raise ArgumentError("the gradient of an allgather needs the number of dimensions of its tensor: set_shape()")
    return bool(tensor.shape.rank)
