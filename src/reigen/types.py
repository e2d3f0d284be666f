"""Constants of every layer: reduction operators and element types."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from reigen.errors import UnsupportedTypeError


class ReduceOp(IntEnum):
    """Operator that combines elements of the same index. The numbers are Horovod's."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


@dataclass(frozen=True, slots=True)
class DType:
    """Element type on the wire and in shared memory.

    Attributes:
        name: NumPy's and torch's common name, for example ``float32``.
        storage: the NumPy dtype of the bytes. bfloat16 is stored as uint16, all others as themselves.
        is_floating: float16, bfloat16, float32 or float64.
    """

    name: str
    storage: np.dtype[np.generic]
    is_floating: bool

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.storage.itemsize


def _native(name: str) -> DType:
    storage = np.dtype(name)
    return DType(name, storage, storage.kind == "f")


_NATIVE = ("uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64", "bool")

#: Every element type that can be communicated, by name.
DTYPES: dict[str, DType] = {name: _native(name) for name in _NATIVE}
DTYPES["bfloat16"] = DType("bfloat16", np.dtype("uint16"), True)


def dtype_named(name: str) -> DType:
    """Return the element type called ``name``.

    Raises:
        UnsupportedTypeError: there is none; the message lists those there are.
    """
    try:
        return DTYPES[name]
    except KeyError:
        supported = ", ".join(sorted(DTYPES))
        raise UnsupportedTypeError(f"Tensor type {name} is not supported. Supported: {supported}.") from None
