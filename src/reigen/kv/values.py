"""Arguments of users to a store: keys, tensors, lists of both, and tensors of which only some rows are there."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, SupportsIndex

import numpy as np

from reigen.api.adapter import Array
from reigen.api.numpy_adapter import get_adapter
from reigen.errors import ArgumentError, UnsupportedTypeError
from reigen.kernels.half_precision import converters
from reigen.kernels.reduce import BlockReducer, Reduction
from reigen.types import DType, ReduceOp

Key = int | str
#: What a caller may give as a key. NumPy's integers are integers.
KeyLike = SupportsIndex | str
#: What needs no look at whether it is one.
KEY_TYPES = frozenset({int, str})
#: The longest string key, in UTF-8.
MAX_KEY_BYTES = 1024
_NUM_IDS = 1 << 64

DENSE, ROW_SPARSE = "default", "row_sparse"

#: Elements that are added up at a time, so that they stay in the core's cache.
_BLOCK = 1 << 16


def key_id(key: KeyLike) -> int:
    """Return the number of 64 bits under which servers know a key, the same in every process.

    An integer is its own id; one below 0 has that of its two's complement. A string's is its BLAKE2b hash of 8 bytes
    (RFC 7693; big endian). The server that keeps the declaration compares the name itself, so that a collision is an
    error and never a shared value.

    Raises:
        ArgumentError: neither an int nor a str; an int of more than 64 bits; a str of more than `MAX_KEY_BYTES`, or one
            that UTF-8 cannot say.

    Example:
        >>> key_id(7), hex(key_id(-1)), hex(key_id("fc.weight"))
        (7, '0xffffffffffffffff', '0xca26ba05dbd3d273')
    """
    if isinstance(key, str):
        try:
            data = key.encode()
        except UnicodeEncodeError:
            raise ArgumentError(f"the key {key!r:.80} is not valid Unicode") from None
        if len(data) > MAX_KEY_BYTES:
            raise ArgumentError(f"the key {key[:40]!r}... has {len(data)} bytes; at most {MAX_KEY_BYTES} are allowed")
        return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")
    if isinstance(key, bool) or not hasattr(key, "__index__"):
        raise ArgumentError(f"a key is an int or a str, not {type(key).__name__} ({key!r:.80})")
    number = operator.index(key)
    if not -_NUM_IDS // 2 <= number < _NUM_IDS:
        raise ArgumentError(f"the key {number} is not between -2**63 and 2**64 - 1")
    return number % _NUM_IDS


@dataclass
class RowSparse:
    """Tensor of which only some rows are there; all others are zero.

    As a value to push, ``indices`` may be in any order, and rows with the same index are added up. As the ``out`` of
    `KVStore.row_sparse_pull` it receives the rows that were asked for, in ascending order.

    Attributes:
        indices: whole numbers, one for each row that is there: an array of NumPy or torch, or a list.
        values: the rows: a tensor of shape ``(len(indices), *shape[1:])``.
        shape: of the whole tensor; at least one dimension.

    Example:
        >>> RowSparse([0, 2], np.ones((2, 3), np.float32), (4, 3)).shape
        (4, 3)
    """

    indices: Any
    values: Any
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        self.shape = tuple(int(size) for size in self.shape)
        if not self.shape:
            raise ArgumentError("a row-sparse tensor has at least one dimension")
        rows, num_indices = tuple(self.values.shape), len(self.indices)
        if rows != (num_indices, *self.shape[1:]):
            raise ArgumentError(
                f"{num_indices} rows of a row-sparse tensor of shape {self.shape} have values of shape "
                f"{(num_indices, *self.shape[1:])}, not {rows}"
            )

    @classmethod
    def empty(cls, like: Any) -> RowSparse:
        """Return one without rows, with the dtype, framework and shape of the tensor ``like``: to receive some."""
        return cls(np.empty(0, np.int64), like[:0], tuple(like.shape))

    def checked_indices(self) -> Array:
        """Return the indices as int64; raises ArgumentError if one is not a row of the tensor."""
        return row_numbers(self.indices, self.shape[0])

    def receive(self, indices: Array, rows: Array) -> None:
        """Take rows: ``rows`` is in the storage type of the values."""
        adapter = get_adapter(self.values)
        self.values = adapter.wrap(rows, like=self.values)
        self.indices = adapter.wrap(indices, like=self.indices) if get_adapter(self.indices) is adapter else indices


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Element type, shape and storage of a key's value, the same for all workers.

    Attributes:
        stype: ``default`` (dense) or ``row_sparse``.
    """

    dtype: DType
    shape: tuple[int, ...]
    stype: str

    @property
    def num_elements(self) -> int:
        """Elements of the whole tensor."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def row_length(self) -> int:
        """Elements of one row."""
        return int(np.prod(self.shape[1:], dtype=np.int64))

    def __str__(self) -> str:
        return f"{self.dtype.name} {self.shape}" + (" (row-sparse)" if self.stype == ROW_SPARSE else "")


def as_value(value: object, *, writable: bool = False) -> Any:
    """Return a user's tensor: itself, a torch sparse tensor as `RowSparse`, a number or list as an array.

    Raises:
        UnsupportedTypeError: it is none, or cannot be communicated.
        ArgumentError: it cannot be written.
    """
    if type(value) is np.ndarray and (not writable or value.flags.writeable):
        return value  # the usual case, and the one that is timed
    if isinstance(value, RowSparse):
        return value
    if not isinstance(value, np.ndarray) and getattr(value, "is_sparse", False) is True:
        return _from_torch_sparse(value)
    return get_adapter(value).as_tensor(value, writable=writable)


def _from_torch_sparse(tensor: Any) -> RowSparse:
    if tensor.sparse_dim() != 1:
        raise UnsupportedTypeError(
            f"a sparse tensor with {tensor.sparse_dim()} sparse dimensions is not supported; rows must be whole: 1"
        )
    tensor = tensor.detach().coalesce()
    return RowSparse(tensor.indices()[0], tensor.values(), tuple(tensor.shape))


def tensor_spec(value: Any) -> TensorSpec:
    """Return the spec of a tensor of `as_value`; UnsupportedTypeError if its element type cannot be communicated."""
    if isinstance(value, RowSparse):
        return TensorSpec(get_adapter(value.values).dtype(value.values), value.shape, ROW_SPARSE)
    return TensorSpec(get_adapter(value).dtype(value), tuple(value.shape), DENSE)


def flatten_tensor(tensor: Any) -> tuple[Array, bool]:
    """Return a dense tensor's elements as a flat array of the storage type, and whether that is the tensor's memory."""
    array, aliases = get_adapter(tensor).array(tensor)
    return array.reshape(-1), aliases


def write_tensor(tensor: Any, elements: Array, aliases: bool) -> None:
    """Have the tensor hold ``elements``, which are its memory already if ``aliases``."""
    adapter = get_adapter(tensor)
    if aliases:
        adapter.mark_modified(tensor)
    else:
        adapter.write(tensor, elements.reshape(tuple(tensor.shape)))


def row_numbers(rows: Any, num_rows: int) -> Array:
    """Return numbers of rows, in whatever shape and type a user has them, as a flat int64 array.

    Raises:
        ArgumentError: they are no whole numbers, or one is not in ``[0, num_rows)``.
    """
    array, _ = flatten_tensor(as_value(rows))
    if array.size and array.dtype.kind not in "iu":
        whole = array.astype(np.int64)
        if array.dtype.kind != "f" or not np.array_equal(whole, array):
            raise ArgumentError(f"numbers of rows must be whole numbers, got {array.dtype}")
        array = whole
    array = array.astype(np.int64)
    lowest, highest = (int(array.min()), int(array.max())) if array.size else (0, -1)
    if lowest < 0 or highest >= num_rows:
        wrong = lowest if lowest < 0 else highest
        raise ArgumentError(f"row {wrong} does not exist; there are rows 0 to {num_rows - 1}")
    return array


def sum_duplicate_rows(indices: Array, rows: Array, dtype: DType) -> tuple[Array, Array]:
    """Return rows in ascending order of their indices, those of one index added up in the order in which they came.

    Args:
        indices: (n,), int64.
        rows: (n, elements of a row), in the storage type of ``dtype``. Halves are added up in float32, rounded once.
        dtype: their element type.

    Returns:
        Indices, (m,), and rows, (m, elements of a row).
    """
    order = np.argsort(indices, kind="stable")
    unique, begins = np.unique(indices[order], return_index=True)
    rows = rows[order]
    if len(unique) == len(indices):
        return unique, rows
    if dtype.is_floating and dtype.itemsize == 2:
        widen, narrow = converters(dtype.name)
        wide = np.empty(rows.shape, np.float32)
        widen(rows, wide)
        sums = np.empty((len(unique), rows.shape[1]), dtype.storage)
        narrow(np.add.reduceat(wide, begins, axis=0), sums)
        return unique, sums
    return unique, np.add.reduceat(rows, begins, axis=0)


def as_key(key: object) -> Key:
    """Return a key as Python's int or str; raises ArgumentError as `key_id` does."""
    key_id(key)  # type: ignore[arg-type]  # it looks
    return str(key) if isinstance(key, str) else operator.index(key)  # type: ignore[arg-type]


def group_by_key(
    keys: Any, values: object, what: str = "value", known: Container[Key] = ()
) -> list[tuple[Key, list[Any]]]:
    """Return the tensors of each key, in the order in which the keys first come.

    Args:
        keys: one, or a list.
        values: for one key a tensor, or a list with one for each device. For a list of keys a list of as many of that.
        what: name of the values in errors.
        known: keys that were looked at before.

    Raises:
        ArgumentError: the lengths differ, a list is empty, or int and str keys are mixed.

    Example:
        >>> group_by_key(["b", "a", "b"], [1, [2, 3], 4])
        [('b', [1, 4]), ('a', [2, 3])]
    """
    if not isinstance(keys, (list, tuple)):
        keys, values = [keys], [values]
    elif not isinstance(values, (list, tuple)) or len(values) != len(keys):
        given = len(values) if isinstance(values, (list, tuple)) else type(values).__name__
        raise ArgumentError(f"{len(keys)} keys need a list of {len(keys)} {what}s, got {given}")
    groups: dict[Key, list[Any]] = {}
    names = [key if type(key) in KEY_TYPES and key in known else as_key(key) for key in keys]
    check_key_type(names)
    for key, value in zip(names, values, strict=True):
        several = list(value) if isinstance(value, (list, tuple)) else [value]
        if not several:
            raise ArgumentError(f"key {key!r} needs at least one {what}, got an empty list")
        groups.setdefault(key, []).extend(several)
    return list(groups.items())


def check_key_type(keys: Iterable[Key], kind: type | None = None) -> type | None:
    """Return the one type of a store's keys, of which ``kind`` is that of earlier ones; ArgumentError if it is not."""
    for key in keys:
        if kind is not type(key) and kind is not None:
            raise ArgumentError(
                f"mixed key types are not allowed: this store's keys are {'str' if kind is str else 'int'}, got {key!r}"
            )
        kind = type(key)
    return kind


def check_tensor_specs(key: Key, expected: TensorSpec, tensors: Sequence[Any], *, can_be_sparse: bool = True) -> None:
    """Check that tensors agree with the spec of their key.

    Raises:
        ArgumentError: a shape or dtype differs from what `init` was given, or a sparse tensor meets a dense key that
            cannot take one.
    """
    for tensor in tensors:
        # the usual case, and the one that is timed
        is_alike = not isinstance(tensor, RowSparse) and tensor.shape == expected.shape
        if is_alike and get_adapter(tensor).dtype(tensor) is expected.dtype:
            continue
        spec = tensor_spec(tensor)
        if (spec.dtype, spec.shape) != (expected.dtype, expected.shape):
            raise ArgumentError(f"key {key!r} holds {expected}, got {spec}: shape and dtype stay those of init()")
        if spec.stype == ROW_SPARSE and not can_be_sparse:
            raise ArgumentError(f"key {key!r}: this operation takes dense tensors only, got a row-sparse one")


# ---- sums of one worker's own tensors of a key: of its devices, and of a key that is there several times in a call


def sum_tensors(tensors: Sequence[Any], spec: TensorSpec) -> tuple[Array, bool]:
    """Return the sum of dense tensors, in their order.

    Returns:
        The flat elements in the storage type, shape (elements,), and whether that is memory of the user's.
    """
    if len(tensors) == 1:
        return flatten_tensor(tensors[0])
    out = np.empty(spec.num_elements, spec.dtype.storage)
    sum_arrays([flatten_tensor(tensor)[0] for tensor in tensors], spec.dtype, out)
    return out, False


def sum_arrays(arrays: Sequence[Array], dtype: DType, out: Array) -> None:
    """Have ``out`` hold the sum of flat arrays of its length, in their order; rounded once where the type is a half."""
    reducer = BlockReducer(Reduction(dtype, ReduceOp.SUM, len(arrays)))
    for begin in range(0, len(out), _BLOCK):
        reducer.reduce([array[begin : begin + _BLOCK] for array in arrays], out[begin : begin + _BLOCK])


def sum_row_sparse(tensors: Sequence[Any], spec: TensorSpec) -> tuple[Array, Array]:
    """Return the sum of tensors of which at least one is row-sparse.

    Returns:
        Indices of rows, ascending, and these rows: (number of rows, elements of a row) in the storage type.
    """
    parts = [extract_rows(tensor, spec) for tensor in tensors]
    if len(parts) == 1:
        return sum_duplicate_rows(*parts[0], spec.dtype)
    indices = np.concatenate([part[0] for part in parts])
    return sum_duplicate_rows(indices, np.concatenate([part[1] for part in parts]), spec.dtype)


def extract_rows(tensor: Any, spec: TensorSpec) -> tuple[Array, Array]:
    """Return indices and rows of a tensor as it is; all rows of a dense one."""
    if isinstance(tensor, RowSparse):
        rows = flatten_tensor(tensor.values)[0].reshape(len(tensor.indices), spec.row_length)
        return tensor.checked_indices(), rows
    return np.arange(spec.shape[0]), flatten_tensor(tensor)[0].reshape(spec.shape[0], spec.row_length)
