"""Asynchronous operations whose kernels are Python, registered through TensorFlow's C API.

A run of such an operation:

a. A thread of TensorFlow calls `AsyncKernelOperation._compute` with the run's context, and a callback for its end.
b. That makes a `KernelRun` of it and gives it to the operation's work, which begins something and returns: the thread
   is free for the next operation.
c. When that is complete, on whichever thread, `KernelRun.finish` tells TensorFlow. The tensors' memory is valid until
   then, and not longer.

The callback is a C++ ``std::function<void()>`` that lives on the stack of the caller, and so only until step b ends. It
is moved to memory of our own, as its move constructor does it in libstdc++: its four words are copied, and the third,
the function that manages the object, becomes null in the old place. The C API promises nothing of that; see `trust`.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from reigen.api.runtime_threads import KnownThreads
from reigen.tensorflow.adapter import DTYPE_OF
from reigen.tensorflow.native.c_api import CApi
from reigen.types import DType

Array = NDArray[Any]
#: Begins a run of an operation, of which the text is the attribute; calls its `finish` once, then or later.
Work = Callable[["KernelRun", str], None]

_POINTER = ctypes.c_void_p
_CREATE = ctypes.CFUNCTYPE(_POINTER, _POINTER)
_COMPUTE = ctypes.CFUNCTYPE(None, _POINTER, _POINTER, _POINTER)
_SHAPES = ctypes.CFUNCTYPE(None, _POINTER, _POINTER)
_MANAGER = ctypes.CFUNCTYPE(ctypes.c_bool, _POINTER, _POINTER, ctypes.c_int)
#: `std::function` of libstdc++: its words, which of them are its manager and invoker, the manager's order to destroy
_FUNCTION = ctypes.c_uint64 * 4
_MANAGER_AT, _INVOKER_AT, _DESTROY = 2, 3, 3
_MAX_TEXT_BYTES = 16384
_FROM_MEMORY = ctypes.pythonapi.PyMemoryView_FromMemory
_FROM_MEMORY.restype, _FROM_MEMORY.argtypes = ctypes.py_object, (_POINTER, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200
#: The element types by their numbers in TensorFlow.
_DTYPES: dict[int, DType] = {tf_dtype.as_datatype_enum: ours for tf_dtype, ours in DTYPE_OF.items()}
_TYPES = "{float, double, half, bfloat16, int8, uint8, int16, uint16, int32, int64, bool}"
_FAILED_PRECONDITION = tf.errors.FAILED_PRECONDITION


class KernelError(Exception):
    """Error for a runtime without a needed ability."""


class KernelRun:
    """One run of an operation.

    Args:
        api: the C API.
        context: TensorFlow's, of the run; it keeps the inputs' memory until `finish`.
        done: the callback for its end; moved by `take`.
    """

    __slots__ = ("_api", "_context", "_done", "_own", "num_inputs")

    def __init__(self, api: CApi, context: int, done: int) -> None:
        self._api, self._context, self._done = api, context, done
        self._own: ctypes.Array[ctypes.c_uint64] | None = None
        self.num_inputs: int = api.NumInputs(context)

    def inputs(self) -> tuple[list[Array], list[DType]]:
        """Return the inputs' contents, in the storage types, and their element types."""
        api, context, tensor = self._api, self._context, _POINTER()
        get, where, status, dim = api.GetInput, ctypes.byref(tensor), api.status, api.Dim
        arrays: list[Array] = []
        dtypes: list[DType] = []
        for index in range(self.num_inputs):  # a step has hundreds of gradients: nothing is looked up for each of them
            tensor.value = 0
            get(context, index, where, status)
            address = tensor.value
            if not address:
                raise KernelError(f"there is no input {index}")
            dtype = _DTYPES[api.TensorType(address)]
            shape = tuple([dim(address, axis) for axis in range(api.NumDims(address))])
            arrays.append(self._take(address, dtype.storage, shape))
            dtypes.append(dtype)
        return arrays, dtypes

    def outputs_like(self, sources: Sequence[Array]) -> list[Array]:
        """Return memory for outputs in the inputs' places, of their shapes: a source itself, where it can be spared."""
        api, context, forwarded = self._api, self._context, ctypes.c_int()
        forward, where, status = api.ForwardInputOrAllocateOutput, ctypes.byref(forwarded), api.status
        outputs = []
        for index, source in enumerate(sources):
            shape = source.shape
            forwarded.value = -1
            tensor = forward(context, _number(index), 1, index, _dims(shape), len(shape), where, status)
            if tensor is None:
                raise KernelError(f"no memory for output {index} of shape {shape}")
            if forwarded.value == index:
                api.DeleteTensor(tensor)
                outputs.append(source)
            else:
                outputs.append(self._take(tensor, source.dtype, shape))
        return outputs

    def allocate(self, index: int, dtype: DType, shape: tuple[int, ...]) -> Array:
        """Return memory for an output."""
        api, number = self._api, _NUMBERS[dtype.name]
        nbytes = math.prod(shape) * dtype.itemsize
        tensor = api.AllocateOutput(self._context, index, number, _dims(shape), len(shape), nbytes, api.status)
        if tensor is None:
            raise KernelError(f"no memory for output {index} of shape {shape}")
        return self._take(tensor, dtype.storage, shape)

    def take(self) -> None:
        """Make the run outlive the call that began it."""
        words = _FUNCTION.from_address(self._done)
        check_layout(words[_MANAGER_AT], words[_INVOKER_AT])
        self._own = _FUNCTION(*words)
        words[_MANAGER_AT] = 0

    def finish(self, error: tuple[int, str] | None = None) -> None:
        """Tell TensorFlow that it is over: complete, or failed with a code of ``tf.errors`` and a text."""
        api = self._api
        if error is not None:
            status = api.NewStatus()
            api.SetStatus(status, error[0], error[1].encode())
            api.OpKernelContext_Failure(self._context, status)
            api.DeleteStatus(status)
        if self._own is None:
            api.RunAsyncOpKernelDoneCallback(self._done)
            return
        address = ctypes.addressof(self._own)
        api.RunAsyncOpKernelDoneCallback(address)
        _manager(self._own[_MANAGER_AT])(address, address, _DESTROY)

    def _take(self, tensor: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Return a tensor's memory and give the tensor back; the context keeps the memory."""
        api = self._api
        nbytes = math.prod(shape) * dtype.itemsize
        memory = _FROM_MEMORY(api.TensorData(tensor), nbytes, _WRITABLE) if nbytes else None
        api.DeleteTensor(tensor)
        return np.ndarray(shape, dtype, memory)


class AsyncKernelOperation:
    """An operation with a list of inputs and as many outputs, of the same element types, and a text as its attribute.

    Args:
        api: the C API.
        name: of the operation, for TensorFlow; it can be registered once in a process.
        work: begins a run.
        has_rows: the outputs' first dimension is not known before it runs; else the outputs have the inputs' shapes.

    Raises:
        KernelError: TensorFlow refuses it.
    """

    def __init__(self, api: CApi, name: str, work: Work, *, has_rows: bool) -> None:
        self._api, self.name, self._work = api, name, work
        #: numbers of texts, which TensorFlow's kernels hold
        self._numbers: dict[str, int] = {}
        self._texts: list[str] = [""]
        self._lock = threading.Lock()
        #: TensorFlow's calls that are in Python now
        self.calls: dict[object, None] = {}
        self._known_threads = KnownThreads()
        self._functions = _CREATE(self._create), _COMPUTE(self._compute), _SHAPES(self._set_shapes)
        _registered.append(self)
        self._register(has_rows)

    def _register(self, has_rows: bool) -> None:
        api, status = self._api, self._api.NewStatus()
        create, compute, set_shapes = self._functions
        self._has_rows = has_rows
        builder = api.NewOpDefinitionBuilder(self.name.encode())
        api.OpDefinitionBuilderAddAttr(builder, f"T: list({_TYPES})".encode())
        api.OpDefinitionBuilderAddAttr(builder, b"call: string")
        api.OpDefinitionBuilderAddInput(builder, b"inputs: T")
        api.OpDefinitionBuilderAddOutput(builder, b"outputs: T")
        api.OpDefinitionBuilderSetIsStateful(builder, True)
        api.OpDefinitionBuilderSetShapeInferenceFunction(builder, ctypes.cast(set_shapes, _POINTER))
        api.RegisterOpDefinition(builder, status)
        _check(api, status)
        kernel = api.NewAsyncKernelBuilder(
            self.name.encode(), b"CPU", ctypes.cast(create, _POINTER), ctypes.cast(compute, _POINTER), None
        )
        api.RegisterKernelBuilder(self.name.encode(), kernel, status)
        _check(api, status)
        api.DeleteStatus(status)

    # -- on threads of TensorFlow's ------------------------------------------------------------------------------------

    def _create(self, construction: int) -> int:
        api, text = self._api, ctypes.create_string_buffer(_MAX_TEXT_BYTES)
        status = api.NewStatus()
        api.OpKernelConstruction_GetAttrString(construction, b"call", text, _MAX_TEXT_BYTES, status)
        api.DeleteStatus(status)
        with self._lock:
            found = text.value.decode()
            number = self._numbers.get(found)
            if number is None:
                number = self._numbers[found] = len(self._texts)
                self._texts.append(found)
            return number

    def _compute(self, number: int, context: int, done: int) -> None:
        # To take it back is the last that the call does: see `wait_until_left`.
        call = object()
        self.calls[call] = None
        self._known_threads.stay()
        run = KernelRun(self._api, context, done)
        try:
            self._work(run, self._texts[number])
        except BaseException as error:  # noqa: BLE001  TensorFlow hears of it
            run.finish((tf.errors.INTERNAL, f"{type(error).__name__}: {error}"))
        del self.calls[call]

    def _set_shapes(self, context: int, status: int) -> None:
        api, shape = self._api, self._api.NewShapeHandle()
        for index in range(api.ShapeInferenceContextNumInputs(context)):
            api.ShapeInferenceContextGetInput(context, index, shape, status)
            if self._has_rows and api.ShapeInferenceContextRankKnown(context, shape):
                rows = api.ShapeInferenceContextVectorFromSize(context, ctypes.c_size_t(-1).value)
                if api.ShapeInferenceContextRank(context, shape):
                    api.ShapeInferenceContextSubshape(context, shape, 1, 2**63 - 1, shape, status)
                    api.ShapeInferenceContextConcatenateShapes(context, rows, shape, rows, status)
                api.ShapeInferenceContextSetOutput(context, index, rows, status)
                api.DeleteShapeHandle(rows)
            else:
                api.ShapeInferenceContextSetOutput(context, index, shape, status)
        api.DeleteShapeHandle(shape)


_NUMBERS = {dtype.name: number for number, dtype in _DTYPES.items()}


def check_layout(manager: int, invoker: int) -> None:
    """Check that the addresses in a ``std::function`` lie where libstdc++ has them.

    Raises:
        KernelError: there is something else.
    """
    if (manager, invoker) not in _known_functions:
        if not (manager and invoker and _is_code(manager) and _is_code(invoker)):
            raise KernelError("the callback of TensorFlow's asynchronous kernels is not a std::function of libstdc++")
        _known_functions.add((manager, invoker))


#: TensorFlow calls their functions for as long as the process lives
_registered: list[AsyncKernelOperation] = []
_known_functions: set[tuple[int, int]] = set()


def _is_code(address: int) -> bool:
    with Path("/proc/self/maps").open(encoding="utf-8") as maps:
        for line in maps:
            where, flags = line.split(None, 2)[:2]
            begin, _, end = where.partition("-")
            if int(begin, 16) <= address < int(end, 16):
                return "x" in flags
    return False


def _check(api: CApi, status: int) -> None:
    if api.GetCode(status):
        raise KernelError(api.Message(status).decode())


@functools.lru_cache(maxsize=64)
def _manager(address: int) -> Any:
    return _MANAGER(address)


@functools.lru_cache(maxsize=4096)
def _number(number: int) -> ctypes.Array[ctypes.c_int]:
    return (ctypes.c_int * 1)(number)


@functools.lru_cache(maxsize=4096)
def _dims(shape: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * max(len(shape), 1))(*shape)
