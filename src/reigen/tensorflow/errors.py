"""Errors that are Reigen's and TensorFlow's at once: scripts catch ``tf.errors``, and find our fields.

::

    MismatchError                            tf.errors.FailedPreconditionError
    every other CollectiveError              tf.errors.UnknownError
    ArgumentError, UnsupportedTypeError      tf.errors.InvalidArgumentError

An operation in a graph can fail with a code and a text alone. The error is remembered with that text, so that a caller
with a Python frame around the graph gets it back: `collective_error_of`.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import tensorflow as tf

from reigen.errors import (
    ArgumentError,
    CollectiveError,
    MismatchError,
    NotInitializedError,
    ReigenError,
    UnsupportedTypeError,
)

P = ParamSpec("P")
R = TypeVar("R")

_CLASSES: tuple[tuple[type[ReigenError], Any], ...] = (
    (MismatchError, tf.errors.FailedPreconditionError),
    (CollectiveError, tf.errors.UnknownError),
    (ArgumentError, tf.errors.InvalidArgumentError),
    (UnsupportedTypeError, tf.errors.InvalidArgumentError),
)
_MAX_REMEMBERED = 256
_remembered: OrderedDict[str, CollectiveError] = OrderedDict()


def tensorflow_code(error: ReigenError) -> int:
    """Return the code of ``tf.errors`` with which an operation of a graph fails; NotInitializedError, too, has one."""
    codes: tuple[tuple[type[ReigenError], int], ...] = (
        (MismatchError, tf.errors.FAILED_PRECONDITION),
        (CollectiveError, tf.errors.UNKNOWN),
        (NotInitializedError, tf.errors.FAILED_PRECONDITION),
        (ReigenError, tf.errors.INVALID_ARGUMENT),
    )
    return next(code for ours, code in codes if isinstance(error, ours))


def to_tensorflow_error(error: ReigenError) -> ReigenError:
    """Make the same error as one of ``tf.errors``, too."""
    tf_class = next((each for ours, each in _CLASSES if isinstance(error, ours)), None)
    if tf_class is None or isinstance(error, tf_class):
        return error
    ours: Any = type(error)
    kind: Any = _combined_class(ours, tf_class)
    copied: ReigenError = kind.__new__(kind)
    tf_class.__init__(copied, None, None, str(error))
    copied.args, copied.__cause__ = error.args, error.__cause__
    copied.__dict__.update(error.__dict__)
    return copied


def raises_tensorflow_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap ``function`` so that Reigen's errors are TensorFlow's, too; AutoGraph does not rewrite it."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except ReigenError as error:
            converted = to_tensorflow_error(error)
            if converted is error:
                raise
            raise converted from error

    unconverted: Callable[P, R] = tf.autograph.experimental.do_not_convert(wrapped)

    @functools.wraps(unconverted)  # with the mark by which AutoGraph knows it
    def chosen(*args: P.args, **kwargs: P.kwargs) -> R:
        run = wrapped if tf.executing_eagerly() else unconverted  # which takes 4 us more
        return run(*args, **kwargs)

    return chosen


def remember(error: CollectiveError) -> str:
    """Return the text of an error for an operation of a graph; `collective_error_of` knows it again."""
    text = str(error)
    _remembered[text] = error
    if len(_remembered) > _MAX_REMEMBERED:
        _remembered.popitem(last=False)
    return text


def collective_error_of(error: BaseException) -> CollectiveError | None:
    """Return the failed collective that ended a graph with an error of ``tf.errors``; None: it was something else."""
    if isinstance(error, CollectiveError):
        return error
    if not isinstance(error, tf.errors.OpError):
        return None
    found = next((known for text, known in reversed(_remembered.items()) if text in error.message), None)
    return None if found is None else found.anew()


@contextlib.contextmanager
def collective_errors() -> Iterator[None]:
    """Raise failures of collectives in graphs as CollectiveError, and other errors of TensorFlow unchanged."""
    try:
        yield
    except tf.errors.OpError as error:
        found = collective_error_of(error)
        if found is None or found is error:
            raise
        raise found from error


@functools.cache
def _combined_class(ours: Any, tf_class: Any) -> Any:
    def init(self: Any, node_def: object, op: object, message: str, *args: object) -> None:
        tf_class.__init__(self, node_def, op, message)

    doc = f"`reigen.errors.{ours.__name__}`, and a `tf.errors.{tf_class.__name__}`."
    return type(ours.__name__, (ours, tf_class), {"__doc__": doc, "__module__": __name__, "__init__": init})
