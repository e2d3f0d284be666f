"""Reduction of one step's gradients: dense ones as a group, IndexedSlices gathered, local variables' left alone.

Names are the same on all ranks, whatever they have traced before: a group is called after the path of its first
variable, without the numbers that Keras appends (they count the models that a process has built), and, where a graph
has several of that name, by its position among them.

All ranks must have gradients for the same variables, dense for the same and sparse for the same. Every variable has a
member of the group, with its path as a label and no elements if it has no dense gradient, so that a difference is an
error on every rank, which names the variable.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from reigen import context
from reigen.api.compression import as_compressor
from reigen.api.gradients.reduce_group import choose_reduction
from reigen.api.operations import Average
from reigen.api.process_sets import ProcessSet, global_process_set, process_set_number
from reigen.elastic import membership
from reigen.errors import ArgumentError, UnsupportedError
from reigen.tensorflow.collectives import reduce_gradients
from reigen.tensorflow.compression import COMPRESSION_NAMES, Compression
from reigen.tensorflow.errors import raises_tensorflow_errors
from reigen.tensorflow.graph import ask
from reigen.tensorflow.ops import grouped_allgather
from reigen.types import ReduceOp

#: The number that Keras gives a layer or a model of a name that it has given before.
_SERIAL_NUMBER = re.compile(r"_\d+(?=/|$)")


class GradientReducer:
    """Reduces gradients over the ranks of a process set, as the arguments of Horovod's wrappers say.

    Args:
        op: Average, Sum, Min, Max, Product or Adasum.
        gradient_predivide_factor: with Average, gradients are divided by it before they are added, multiplied after.
        compression: the element type in which they travel.
        sparse_as_dense: reduce IndexedSlices as dense tensors.
        num_groups: deprecated; use ``groups``.
        groups: how many groups, or lists of variables, each reduced as one operation; the other variables are one more.
        process_set: whose ranks take part; any other keeps its own gradients.
        scale_local_gradients: gradients of local variables are divided by the number of ranks.

    Raises:
        ArgumentError: an argument makes no sense.
    """

    def __init__(
        self,
        op: int = Average,
        gradient_predivide_factor: float = 1.0,
        compression: Any = Compression.none,
        *,
        sparse_as_dense: bool = False,
        num_groups: int = 0,
        groups: int | Sequence[Sequence[Any]] | None = None,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
    ) -> None:
        if num_groups:
            warnings.warn("Parameter `num_groups` is deprecated; use `groups`", DeprecationWarning, stacklevel=3)
        self.reduction = choose_reduction(op, gradient_predivide_factor)
        self.compression = as_compressor(compression, COMPRESSION_NAMES)
        self.process_set = process_set
        self._sparse_as_dense = sparse_as_dense
        self._groups = _check_groups(groups if groups is not None else num_groups or None)
        self._scale_local_gradients = scale_local_gradients
        self._local: dict[int, Any] = {}

    def register_local(self, variable: Any) -> None:
        """The variable is this rank's own: its gradient is never reduced."""
        self._local[_key(variable)] = variable

    def is_local(self, variable: Any) -> bool:
        """Return whether the variable is this rank's own."""
        return _key(variable) in self._local

    @property
    def num_ranks(self) -> int:
        """Number of ranks that reduce together; 1 for a rank outside the process set."""
        job = context.current()
        ranks = job.process_sets[process_set_number(self.process_set)]
        return len(ranks) if job.rank in ranks else 1

    @raises_tensorflow_errors
    def reduce(self, gradients: Iterable[Any], variables: Iterable[Any], name: str = "gradients") -> list[Any]:
        """Reduce gradients: tensors, IndexedSlices or None, which stays None.

        Args:
            gradients: of the variables, in their order.
            variables: what the gradients belong to; the same on every rank, in the same order.
            name: the names of the operations begin with it.

        Raises:
            ArgumentError: the job has warm spares.
            FailedPreconditionError: ranks have gradients for different variables, or of different kinds, dtypes or
                shapes; on every rank.
        """
        membership.check_plain_step()
        results, variables, size = list(gradients), list(variables), self.num_ranks
        if not results or self._is_alone():
            return list(map(self._as_asked, results, variables))
        shared = []
        for index, variable in enumerate(variables):
            if not self.is_local(variable):
                shared.append(index)
            elif self._scale_local_gradients and results[index] is not None:
                results[index] = self._divide(results[index], size)
        if not shared:
            return results
        name = f"{name}.{path_of(variables[shared[0]])}"
        for number, group in enumerate(self._split(shared, variables)):
            labels = [path_of(variables[index]) for index in group]
            reduced = self._reduce_group([results[index] for index in group], labels, f"{name}.{number}", size)
            for index, gradient in zip(group, reduced, strict=True):
                results[index] = gradient
        return results

    def _split(self, indices: list[int], variables: Sequence[Any]) -> list[list[int]]:
        if self._groups is None:
            return [indices]
        if isinstance(self._groups, int):
            parts = [part.tolist() for part in np.array_split(indices, self._groups)]
        else:
            group_of = {_key(variable): number for number, group in enumerate(self._groups) for variable in group}
            parts = [[] for _ in range(len(self._groups) + 1)]
            for index in indices:
                parts[group_of.get(_key(variables[index]), len(self._groups))].append(index)
        return [part for part in parts if part]

    def _reduce_group(self, gradients: list[Any], paths: list[str], name: str, size: int) -> list[Any]:
        """Reduce dense gradients; then gather sparse ones, once all ranks agree which those are."""
        tensors, labels, sparse = [], [], []
        for index, (gradient, path) in enumerate(zip(gradients, paths, strict=True)):
            is_sparse = isinstance(gradient, tf.IndexedSlices) and not self._sparse_as_dense
            is_dense = gradient is not None and not is_sparse
            if is_sparse:
                sparse.append(index)
            tensors.append(tf.convert_to_tensor(gradient) if is_dense else tf.zeros((0,), tf.float32))
            labels.append(path if is_dense else f"{path} ({'no' if gradient is None else 'sparse'} gradient)")
        pairs = list(map(self.compression.compress, tensors))
        sent = reduce_gradients([each for each, _ in pairs], self.reduction, name, self.process_set, labels)
        reduced = [self.compression.decompress(each, ctx) for each, (_, ctx) in zip(sent, pairs, strict=True)]
        results = [None if gradient is None else tensor for gradient, tensor in zip(gradients, reduced, strict=True)]
        with tf.control_dependencies(reduced):
            for index in sparse:
                results[index] = self._gather(gradients[index], f"{name}.sparse.{index}", size)
        return results

    def _gather(self, slices: tf.IndexedSlices, name: str, size: int) -> tf.IndexedSlices:
        """Bring all ranks' slices together, in rank order; an index that several ranks have is there several times."""
        if self.reduction.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise UnsupportedError(
                f"IndexedSlices can be reduced with op=Average or Sum, not {self.reduction.op.name.title()}; "
                "sparse_as_dense=True makes them dense"
            )
        values, ctx = self.compression.compress(slices.values)
        values, indices = grouped_allgather([values, slices.indices], name=name, process_set=self.process_set)
        values = self.compression.decompress(values, ctx)
        gathered = tf.IndexedSlices(values, indices, slices.dense_shape)
        return self._divide(gathered, size) if self.reduction.op is ReduceOp.AVERAGE else gathered

    def _as_asked(self, gradient: Any, variable: Any) -> Any:
        """One rank's gradient, of the kind that it has with others: clipping must not depend on their number."""
        is_wrong = self._sparse_as_dense and isinstance(gradient, tf.IndexedSlices) and not self.is_local(variable)
        return tf.convert_to_tensor(gradient) if is_wrong else gradient

    def _is_alone(self) -> bool:
        """Return whether there is nothing to reduce with; a graph of an elastic job may run with others later."""
        outlives = membership.may_change() and not tf.executing_eagerly()
        return self.num_ranks == 1 and not (outlives and self.process_set.included())

    def _divide(self, gradient: Any, size: int) -> Any:
        """Divide by the number of ranks; in a graph of an elastic job, by that at the time when it runs."""
        if not membership.may_change() or tf.executing_eagerly():
            return _scale(gradient, 1 / size)
        dtype = (gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient).dtype
        return _scale(gradient, 1 / tf.cast(ask("size", process_set_number(self.process_set)), dtype))


def _key(variable: Any) -> int:
    """Identity of a variable; the same for one of Keras 3 and TensorFlow's that it holds."""
    return id(getattr(variable, "_value", variable))


def path_of(variable: Any) -> str:
    """Name of a variable on every rank: its path without serial numbers."""
    path = getattr(variable, "path", None)
    if not isinstance(path, str):
        path = variable.name if isinstance(variable, tf.Variable) else "tensor"
    return without_serial_numbers(path)


@functools.lru_cache(maxsize=4096)
def without_serial_numbers(path: str) -> str:
    """A path without the numbers that Keras appends, and of a length that can travel."""
    return _SERIAL_NUMBER.sub("", path.removesuffix(":0"))[-300:] or "variable"


def _scale(gradient: Any, factor: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def _check_groups(groups: Any) -> int | list[list[Any]] | None:
    if groups is None:
        return None
    if isinstance(groups, int) and not isinstance(groups, bool) and groups > 0:
        return groups
    if isinstance(groups, (list, tuple)) and all(isinstance(group, (list, tuple)) for group in groups):
        members = [_key(variable) for group in groups for variable in group]
        if len(set(members)) < len(members):
            raise ArgumentError("a variable can be in one of the groups only")
        return [list(group) for group in groups]
    raise ArgumentError(f"groups should be a positive integer or a list of lists of variables, got {groups!r}")
