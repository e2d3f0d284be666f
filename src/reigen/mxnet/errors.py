"""Errors that are Reigen's and MXNet's at once: scripts catch ``MXNetError``, and find the fields of `reigen.errors`.

An operation in MXNet's engine can fail with a text alone. The text begins with the name of a class of ours, for which
MXNet asks us when an array is waited for that could not be written; we remember the error with that text.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from mxnet.base import MXNetError, register_error

from reigen.errors import ReigenError

P = ParamSpec("P")
R = TypeVar("R")

_PREFIX = "reigen."
_MAX_REMEMBERED = 256


def to_mxnet_error(error: ReigenError) -> ReigenError:
    """Make the same error as one that is an MXNetError, too."""
    kind: Any = type(error)
    return error if issubclass(kind, MXNetError) else _copy(error, _combined_class(kind))


def raises_mxnet_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap ``function`` so that Reigen's errors are MXNetErrors, too."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except ReigenError as error:
            if isinstance(error, MXNetError):
                raise
            raise to_mxnet_error(error) from error

    return wrapped


class EngineErrors:
    """Errors that were given to MXNet's engine as texts, and come back when an array is waited for."""

    def __init__(self) -> None:
        self._errors: OrderedDict[str, ReigenError] = OrderedDict()
        self._registered: set[str] = set()

    def text_of(self, error: BaseException) -> str:
        """Return the text for MXNet."""
        if not isinstance(error, ReigenError):
            return f"{type(error).__name__}: {error}"
        converted = to_mxnet_error(error)
        name = _PREFIX + type(error).__name__
        if name not in self._registered:
            self._registered.add(name)
            register_error(name, self._error_of)
        text = f"{name}: {error}".replace("\n", "; ")  # of several lines it makes a traceback
        self._errors[text] = converted
        if len(self._errors) > _MAX_REMEMBERED:
            self._errors.popitem(last=False)
        return text

    def _error_of(self, text: str) -> BaseException:
        """Return the error with MXNet's text; a new one each time, because raising it gives it a traceback."""
        known = [self._errors[line] for line in text.splitlines() if line in self._errors]
        return _copy(known[0], type(known[0])) if known else MXNetError(text)


def _copy(error: ReigenError, kind: Any) -> ReigenError:
    copied: ReigenError = kind.__new__(kind)
    copied.args, copied.__cause__ = error.args, error.__cause__
    copied.__dict__.update(error.__dict__)
    return copied


@functools.cache
def _combined_class(kind: Any) -> Any:
    doc = f"`reigen.errors.{kind.__name__}`, and an MXNetError."
    return type(kind.__name__, (kind, MXNetError), {"__doc__": doc, "__module__": __name__})
