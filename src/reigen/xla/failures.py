"""Errors that pass through a runtime as texts, and are found again where they come out of it."""

from __future__ import annotations

import re
from collections import OrderedDict

from reigen.errors import ArgumentError, MismatchError, ReigenError, UnsupportedTypeError

_MAX_REMEMBERED = 256
_MARK = re.compile(r"\[reigen error (\d+)\]")
#: `XLA_FFI_Error_Code`, which are absl::StatusCode's and TensorFlow's, too
_UNKNOWN, _INVALID_ARGUMENT, _FAILED_PRECONDITION, _INTERNAL = 2, 3, 9, 13


def status_code(error: BaseException) -> int:
    """Return the code with which Horovod reports an error of this kind to a runtime."""
    if isinstance(error, MismatchError):
        return _FAILED_PRECONDITION
    if isinstance(error, ArgumentError | UnsupportedTypeError):
        return _INVALID_ARGUMENT
    return _UNKNOWN if isinstance(error, ReigenError) else _INTERNAL


class RuntimeFailures:
    """Errors that were given to a runtime: the last ones."""

    def __init__(self) -> None:
        self._errors: OrderedDict[int, ReigenError] = OrderedDict()
        self._count = 0

    def text_of(self, error: BaseException) -> str:
        """Return the text for the runtime, by which `find` finds the error again."""
        if not isinstance(error, ReigenError):
            return f"{type(error).__name__}: {error}"
        self._count += 1
        self._errors[number := self._count] = error.anew()
        if len(self._errors) > _MAX_REMEMBERED:
            self._errors.popitem(last=False)
        return f"{type(error).__name__}: {error} [reigen error {number}]"

    def find(self, text: str) -> ReigenError | None:
        """Return the error of which the runtime says this; None: it has another one, or that was long ago."""
        numbers = (int(number) for number in _MARK.findall(text))
        found = next((self._errors[number] for number in numbers if number in self._errors), None)
        return None if found is None else found.anew()
