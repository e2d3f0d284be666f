"""Collectives in functions that XLA compiles (``jit_compile=True``), as calls through its foreign function interface.

Each is a module of StableHLO with one custom call, which TensorFlow puts into the program (`XlaCallModule`). The
handler, `reigen.xla`, holds no thread of XLA's pool while it waits. Shapes are those of the trace, as everywhere in
XLA: a program that gets a result of another shape ends with an error. XLA runs calls that do not depend on each other
in any order, so that each has a name of its own in its program: functions that the compiled one calls have none, for
they could be called twice.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

from reigen import context
from reigen.api.native_calls import NativeCall
from reigen.api.operations import ALLGATHER, ALLTOALL, REDUCESCATTER
from reigen.engine.handle import Handle
from reigen.errors import ArgumentError, CollectiveError, UnsupportedError
from reigen.tensorflow.errors import remember
from reigen.tensorflow.native.c_api import library_path
from reigen.tensorflow.native.trust import judge_xla
from reigen.tensorflow.queries import Query, decode
from reigen.xla import FfiHandler, FfiMismatchError, RuntimeFailures, register_handler

_TARGET = "reigen_collective"
_INSTEAD = (
    "; leave it outside of tf.function(jit_compile=True), which may compile the computation alone; compile() of a "
    "Keras model takes jit_compile=False"
)
#: seconds that the end of a script waits for calls, beyond the deadline of each collective
_GRACE_SECONDS = 5.0
#: of the operation `XlaCallModule`: the newest that TensorFlow 2.16 to 2.21 know
_MODULE_VERSION = 9
_LETTERS = {"bool": "i1", "bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}
_ELEMENT_TYPES = _LETTERS | {f"{kind}int{bits}": f"{kind}i{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)}
_lock = threading.Lock()

Differentiate = Callable[[str, Sequence[tf.Tensor], Sequence[tf.Tensor], Sequence[Any]], list[Any]]


def is_compiling() -> bool:
    """Return whether XLA is to compile the graph that is being built."""
    return bool(control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def emit(call: NativeCall | Query, tensors: Sequence[tf.Tensor], differentiate: Differentiate) -> list[tf.Tensor]:
    """Add a collective, or a query, to a graph that XLA is to compile.

    Args:
        call: its name is once in the graph.
        tensors: of known shapes; behind that of an alltoall an empty one: equal parts.
        differentiate: makes the gradients: `graph.gradients_of`.

    Raises:
        UnsupportedError: a shape is not known, or not the same on all ranks, or XLA cannot call Reigen here.
        ArgumentError: there is no such process set.
    """
    what = call.collective if isinstance(call, NativeCall) else call.question
    label = call.name if isinstance(call, NativeCall) else what
    _check_place(what)
    if what == "join":
        raise UnsupportedError(f"XLA compiles no join(){_INSTEAD}")
    if what == ALLTOALL.name:
        if tensors[1].shape.as_list() != [0]:
            raise UnsupportedError(f"XLA compiles no alltoall with splits ({label}){_INSTEAD}")
        tensors = tensors[:1]
    if not all(tensor.shape.is_fully_defined() for tensor in tensors):
        shapes = ", ".join(str(tensor.shape) for tensor in tensors)
        raise UnsupportedError(f"XLA compiles no {what} of tensors of unknown shapes: {label} has {shapes}{_INSTEAD}")
    specs = _results_of(call, tensors)
    _handler()
    text = call.encode()

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def collective(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[Any]]]:
        outputs = call_target(_TARGET, text, inputs, specs, f"Reigen{what.title()}")
        return outputs, lambda *gradients: differentiate(text, inputs, outputs, gradients)

    return list(collective(*tensors))


def call_target(
    target: str, text: str, inputs: Sequence[tf.Tensor], results: Sequence[tf.TensorSpec], name: str
) -> list[tf.Tensor]:
    """Add a call of a handler, on tensors of known shapes, to the graph; returns its results."""
    made: list[tf.Tensor] = gen_xla_ops.xla_call_module(
        inputs,
        version=_MODULE_VERSION,
        module=_module_of(target, text, inputs, results),
        Sout=[spec.shape for spec in results],
        Tout=[spec.dtype for spec in results],
        platforms=["CPU"],
        name=name,
    )
    return made


def _check_place(what: str) -> None:
    """Refuse a function that a compiled one calls, perhaps more than once; bodies of loops and branches are not that.

    Raises:
        UnsupportedError: it is in one.
    """
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, ControlFlowFuncGraph):
        graph = graph.outer_graph
    places = (graph, graph.outer_graph) if isinstance(graph, FuncGraph) else (graph,)
    if not any(map(control_flow_util.InXlaContext, places)):
        raise UnsupportedError(
            f"XLA compiles no {what} in a tf.function ({graph.name}) that one with jit_compile=True calls: leave out "
            "the inner @tf.function, or jit_compile=True"
        )


def _results_of(call: NativeCall | Query, tensors: Sequence[tf.Tensor]) -> list[tf.TensorSpec]:
    if not isinstance(call, NativeCall) or call.row.in_place:
        return [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
    ranks = context.current().process_sets.get(call.process_set)
    if ranks is None:
        raise ArgumentError(f"there is no process set {call.process_set}; it has to be added first, on all ranks")
    size, specs = len(ranks), []
    for tensor in tensors:
        rows, *rest = tensor.shape.as_list() or [1]
        if call.collective == ALLGATHER.name:
            rows *= size
        elif rows % size:
            raise UnsupportedError(
                f"XLA compiles no {call.collective} of {rows} rows in {size} parts, which are not equal "
                f"({call.name}){_INSTEAD}"
            )
        elif call.collective == REDUCESCATTER.name:
            rows //= size
        specs.append(tf.TensorSpec([rows, *rest], tensor.dtype))
    if call.row.returns_splits:
        specs.append(tf.TensorSpec([size], tf.int32))
    return specs


def _module_of(target: str, text: str, inputs: Sequence[tf.Tensor], results: Sequence[tf.TensorSpec]) -> str:
    """Return a module of StableHLO with one call of the handler, on buffers in the order of C."""
    given, made = ([_type_of(each) for each in tensors] for tensors in (inputs, results))
    names = ", ".join(f"%arg{index}" for index in range(len(given)))
    arguments = ", ".join(f"%arg{index}: {kind}" for index, kind in enumerate(given))
    outcomes = ", ".join(f"%0#{index}" for index in range(len(made))) if len(made) > 1 else "%0"
    types = ", ".join(made)
    count = f":{len(made)}" if len(made) > 1 else ""
    layouts = [", ".join(map(_layout_of, tensors)) for tensors in (inputs, results)]
    attributes = (
        f'api_version = 4 : i32, has_side_effect = true, backend_config = {{call = "{_escape(text)}"}}, '
        f"operand_layouts = [{layouts[0]}], result_layouts = [{layouts[1]}]"
    )
    return (
        f"module @reigen {{ func.func public @main({arguments}) -> ({types}) {{\n"
        f"  %0{count} = stablehlo.custom_call @{target}({names}) {{{attributes}}} "
        f": ({', '.join(given)}) -> ({types})\n"
        f"  return {outcomes} : {types}\n}} }}"
    )


def _type_of(tensor: tf.Tensor | tf.TensorSpec) -> str:
    dimensions = "".join(f"{length}x" for length in tensor.shape.as_list())
    return f"tensor<{dimensions}{_ELEMENT_TYPES[tensor.dtype.name]}>"


def _layout_of(tensor: tf.Tensor | tf.TensorSpec) -> str:
    rank = tensor.shape.rank
    return f"dense<{[*reversed(range(rank))] if rank else ''}> : tensor<{rank}xindex>"


def _escape(text: str) -> str:
    plain = set(range(32, 127)) - set(b'"\\')
    return "".join(chr(code) if code in plain else f"\\{code:02X}" for code in text.encode())


class _Failures(RuntimeFailures):
    """Errors that TensorFlow's XLA was given: the same texts as of other graphs."""

    def text_of(self, error: BaseException) -> str:
        if isinstance(error, CollectiveError):
            return remember(error)
        return str(error) or type(error).__name__


def _handler() -> FfiHandler:
    with _lock:
        return _registered()


@functools.cache
def _registered() -> FfiHandler:
    """Register the handler with TensorFlow's XLA.

    Raises:
        UnsupportedError: there is no interface, or another one.
    """
    try:
        address = api_address()
        if (reason := judge_xla()) is not None:
            raise FfiMismatchError(reason)
        handler = register_handler(address, _TARGET, answer=_answer)
    except (AttributeError, OSError, FfiMismatchError) as error:
        raise UnsupportedError(
            f"XLA of TensorFlow {tf.__version__} cannot call collectives ({error}){_INSTEAD}"
        ) from error
    handler.failures = _Failures()
    atexit.register(_at_exit, handler, os.getpid())
    return handler


def api_address() -> int:
    """Return the address of the functions of TensorFlow's XLA.

    Raises:
        AttributeError, OSError: there are none.
    """
    get_api = ctypes.CDLL(str(library_path())).XLA_FFI_GetApi
    get_api.restype = ctypes.c_void_p
    return int(get_api())


def _answer(text: str) -> int:
    query = decode(text)
    answer = query.answer() if isinstance(query, Query) else None
    if answer is None or isinstance(answer, Handle):
        raise ArgumentError(f"{text} is not a question that XLA can ask")
    return answer


def _at_exit(handler: FfiHandler, pid: int) -> None:
    """Leave the job, and return when no thread of XLA's is in Python; it would end the process."""
    if os.getpid() == pid:
        seconds = context.current().config.deadline_seconds if context.is_initialized() else 0.0
        context.shutdown()
        handler.drain(seconds + _GRACE_SECONDS)
