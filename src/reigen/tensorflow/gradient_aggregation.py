"""Gradients of several backward passes, added up on this rank before they are reduced: in graphs and in eager code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from reigen.api.gradients.tracker import check_passes
from reigen.errors import ArgumentError


class PassCounter:
    """Counts backward passes, so that every so manieth does more; the count is a variable, of the graph that uses it.

    Args:
        passes: how many passes make a step; with 1 there is nothing to count.

    Raises:
        ArgumentError: ``passes`` is no positive integer.
    """

    def __init__(self, passes: int) -> None:
        self.passes = check_passes(passes)
        self._count: Any = None

    def prepare(self) -> bool:
        """Make the count, where variables live (`tf.init_scope`), once for a graph; returns whether it did."""
        known = self._count is not None
        if known and (tf.executing_eagerly() or self._count.graph is tf.compat.v1.get_default_graph()):
            return False
        self._count = local_variable(tf.zeros([], tf.int64))
        return True

    def add(self) -> Any:
        """Count one more."""
        return self._count.assign_add(1)

    def when(self, at: int, apply: Callable[[], Any], otherwise: Callable[[], Any] = tf.no_op) -> Any:
        """Call ``apply`` where the count, modulo the passes, is ``at``, else ``otherwise``; in a graph, when it runs.

        Returns:
            In a graph an operation, else None.
        """
        if self.passes == 1:
            return apply()

        def branch(function: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> Any:
                with after(function()):
                    return tf.constant(True)

            return run

        done = tf.cond(self.is_at(at), branch(apply), branch(otherwise))
        return None if tf.executing_eagerly() else tf.group(done)

    def is_at(self, at: int) -> Any:
        """Return a tensor: the count, modulo the passes, is ``at``."""
        return tf.equal(self._count.read_value() % self.passes, at)


class LocalGradientAggregator:
    """Adds up the gradients of so many backward passes; the last of them reduces the sums.

    Args:
        passes: how many; with 1 every pass reduces, and nothing is added up.
        average: divide the sums by ``passes``.
        reduce: reduces gradients, given those and their variables.

    Raises:
        ArgumentError: ``passes`` is no positive integer.
    """

    def __init__(self, passes: int, average: bool, reduce: Callable[[list[Any], list[Any]], list[Any]]) -> None:
        self._counter = PassCounter(passes)
        self._average = average
        self._reduce = reduce
        self._sums: list[Any] = []

    def aggregate(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Add one pass, and return the reduced sums if it was the last one; else the sums so far.

        Raises:
            ArgumentError: a variable has no known shape; or there are gradients for others than before.
        """
        gradients, variables = list(gradients), list(variables)
        if self._counter.passes == 1:
            return self._reduce(gradients, variables)
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        dense = [tf.convert_to_tensor(gradients[index]) for index in present]
        with tf.init_scope():
            if self._counter.prepare():
                self._sums = [zeros_like_variable(variables[index]) for index in present]
        if len(self._sums) != len(dense):
            had = len(self._sums)
            raise ArgumentError(f"the first backward pass had gradients of {had} variables, this one of {len(dense)}")
        with after(*[total.assign_add(each) for total, each in zip(self._sums, dense, strict=True)]):
            count = self._counter.add()
        with after(count):
            results = tf.cond(
                self._counter.is_at(0),
                lambda: self._finish(gradients, variables, present),
                lambda: [total.read_value() for total in self._sums],
            )
        for index, result in zip(present, results, strict=True):
            gradients[index] = result
        return gradients

    def when_reduced(self, apply: Callable[[], Any], otherwise: Callable[[], Any], gradients: Sequence[Any]) -> Any:
        """Call ``apply`` if the pass that made the gradients has reduced them, else ``otherwise``."""
        with after(*[each for each in gradients if each is not None]):
            return self._counter.when(0, apply, otherwise)

    def _finish(self, gradients: list[Any], variables: list[Any], present: list[int]) -> list[Any]:
        """Reduce the sums, and begin anew."""
        factor = 1 / self._counter.passes if self._average else 1.0
        given: list[Any] = [None] * len(gradients)
        for index, total in zip(present, self._sums, strict=True):
            given[index] = total.read_value() * factor
        reduced = self._reduce(given, variables)
        results = [tf.convert_to_tensor(reduced[index]) for index in present]
        with after(*results), after(*[total.assign(tf.zeros_like(total)) for total in self._sums]):
            return list(map(tf.identity, results))


def after(*done: Any) -> Any:
    """Context manager: operations made inside run after those made before it; eager code runs in order."""
    return tf.control_dependencies(None if tf.executing_eagerly() else [each for each in done if each is not None])


def zeros_like_variable(variable: Any) -> Any:
    """A local variable of zeros; raises ArgumentError if its shape is not known."""
    inner = getattr(variable, "_value", variable)  # in a variable of Keras 3
    if not inner.shape.is_fully_defined():
        raise ArgumentError(f"backward_passes_per_step > 1 needs variables of known shapes; {inner.name} has none")
    return local_variable(tf.zeros(inner.shape, inner.dtype.base_dtype))


def local_variable(value: Any) -> Any:
    """A variable that is in no checkpoint; sessions make it with ``local_variables_initializer``."""
    collections = None if tf.executing_eagerly() else [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
    return tf.compat.v1.Variable(value, trainable=False, use_resource=True, collections=collections)
