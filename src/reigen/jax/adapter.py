"""jax.Arrays, seen as NumPy arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.experimental
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.core import ShapedArray
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from reigen.api.adapter import Array, TensorAdapter
from reigen.errors import ArgumentError, UnsupportedTypeError
from reigen.types import DTYPES, DType

_DTYPE_OF = {dtype.storage: dtype for name, dtype in DTYPES.items() if name != "bfloat16"}
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_DTYPE_OF[_BFLOAT16] = DTYPES["bfloat16"]
#: XLA's alignment: memory with it becomes an array without a copy
_ALIGNMENT_BYTES = 64
#: a copy of so many bytes takes less time than to find aligned memory
_SMALL_BYTES = 1 << 16
#: of elements that JAX narrows unless x64 is on
_WIDE_BYTES = 8
_enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
try:  # what jax.device_put calls in the end: it takes a tenth of its time
    from jax._src.interpreters.pxla import batched_device_put as _device_put
except ImportError:
    _device_put = None


def dtype_of(dtype: Any) -> DType:
    """Return the element type that travels for one of JAX's; raises UnsupportedTypeError if there is none."""
    found = _DTYPE_OF.get(dtype)
    if found is None:
        supported = ", ".join(sorted(each.name for each in _DTYPE_OF.values()))
        raise UnsupportedTypeError(f"Tensor type {dtype} is not supported. Supported: {supported}.")
    return found


def is_communicable(dtype: Any) -> bool:
    """Return whether an element type travels as it is."""
    return dtype in _DTYPE_OF


def empty_aligned(shape: tuple[int, ...], storage: np.dtype[Any]) -> Array:
    """An uninitialised array; `over_memory` makes a jax.Array of it without a copy, unless it is small."""
    nbytes = math.prod(shape) * storage.itemsize
    if nbytes < _SMALL_BYTES:
        return np.empty(shape, storage)
    memory = np.empty(nbytes + _ALIGNMENT_BYTES, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT_BYTES
    return memory[begin : begin + nbytes].view(storage).reshape(shape)


def over_memory(array: Array, dtype: Any, like: jax.Array | None) -> jax.Array:
    """A jax.Array of an array that nothing else uses, in storage type, of JAX's ``dtype``, where ``like`` lies.

    It has the sharding of ``like`` if that divides its shape, and else each of the devices gets all of it.
    """
    if array.dtype != dtype:
        array = array.view(dtype)
    if like is None:
        return jnp.asarray(array) if array.nbytes < _SMALL_BYTES else jax.device_put(array)
    if array.dtype.itemsize == _WIDE_BYTES and not jax.config.jax_enable_x64:  # made while it was on: not narrowed
        with _enable_x64(True):
            return over_memory(array, dtype, like)
    if _device_put is None or not _is_at_default_place(like):
        return jax.device_put(array, _sharding_of_result(like, array.shape))
    aval = like.aval if like.shape == array.shape and not like.weak_type else ShapedArray(array.shape, array.dtype)
    return cast(jax.Array, _device_put(aval, like.sharding, [array], [like.device], False))


def _sharding_of_result(like: jax.Array, shape: tuple[int, ...]) -> Sharding:
    sharding = like.sharding
    if shape == like.shape:
        return sharding
    try:
        sharding.shard_shape(shape)
    except ValueError:  # other ranks have their results by now: this one has to get its own, too
        is_named = isinstance(sharding, NamedSharding)
        mesh = sharding.mesh if is_named else Mesh(sorted(like.devices(), key=lambda device: device.id), "devices")
        return NamedSharding(mesh, PartitionSpec(), memory_kind=sharding.memory_kind)
    return sharding


def _is_at_default_place(array: jax.Array) -> bool:
    devices = array.devices()
    if len(devices) != 1:
        return False
    (device,) = devices
    return bool(device.id == 0 and device.platform == "cpu")


class JaxAdapter(TensorAdapter[jax.Array]):
    """jax.Arrays that this process holds whole: on the host without a copy, those of other devices by one.

    Inside transformations of JAX the functions of `reigen.jax` do not come here; other code's collectives are
    differentiated by ``jax.grad`` outside of compiled programs.
    """

    is_immutable = True

    def as_tensor(self, value: Any, *, writable: bool = False) -> jax.Array:
        if writable:
            raise ArgumentError("a jax.Array cannot be written: use the function that returns a new one")
        if isinstance(value, jax.Array):
            return value
        if isinstance(value, np.ndarray | np.generic | bool | int | float):
            return jnp.asarray(value)
        raise UnsupportedTypeError(f"a jax.Array is needed, got {type(value).__name__}")

    def dtype(self, tensor: jax.Array) -> DType:
        return dtype_of(tensor.dtype)

    def array(self, tensor: jax.Array) -> tuple[Array, bool]:
        if isinstance(tensor, jax.core.Tracer):
            raise UnsupportedTypeError(
                "inside a transformation of JAX the blocking functions of reigen.jax are needed: "
                "a traced value has no contents yet"
            )
        if not tensor.is_fully_addressable:
            raise UnsupportedTypeError(
                "the array lies on devices of several processes of jax.distributed: reduce it by JAX's own collectives"
            )
        array: Array = np.asarray(tensor)
        if not array.flags.c_contiguous:
            return np.ascontiguousarray(array).reshape(array.shape), False
        return array.view(np.uint16) if array.dtype == _BFLOAT16 else array, True

    def wrap(self, array: Array, like: jax.Array | None) -> jax.Array:
        return over_memory(array, array.dtype if like is None else like.dtype, like)

    def write(self, tensor: jax.Array, array: Array) -> None:
        raise AssertionError("no jax.Array is ever written")

    def device(self, tensor: jax.Array) -> str:
        if isinstance(tensor, jax.core.Tracer):
            return "cpu"
        return str(next(iter(tensor.devices())).platform)

    def needs_gradient(self, tensors: Sequence[jax.Array]) -> bool:
        return any(isinstance(tensor, jax.core.Tracer) for tensor in tensors)

    def differentiate(
        self,
        forward: Callable[[Sequence[jax.Array]], list[jax.Array]],
        backward: Callable[[Sequence[jax.Array]], list[jax.Array | None]],
        tensors: Sequence[jax.Array],
    ) -> list[jax.Array]:
        run = jax.custom_vjp(lambda *arguments: list(forward(arguments)))

        def run_forward(*arguments: jax.Array) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
            return list(forward(arguments)), arguments

        def run_backward(arguments: tuple[jax.Array, ...], gradients: list[jax.Array]) -> tuple[Any, ...]:
            made = backward(gradients)
            return tuple(
                np.zeros(argument.shape, jax.dtypes.float0) if gradient is None else gradient
                for argument, gradient in zip(arguments, made, strict=True)
            )

        run.defvjp(run_forward, run_backward)
        return list(run(*tensors))
