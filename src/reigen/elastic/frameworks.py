"""`elastic.Job` of whatever framework a model is of."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from reigen.errors import ArgumentError

#: By the package of a model's class, the module that has its ``Job``.
_MODULES = {"torch": "reigen.torch.elastic.job", "keras": "reigen.keras.elastic"}


def Job(model: Any, *arguments: Any, **options: Any) -> Any:  # noqa: N802  a class to those who use it
    """Make an elastic job for a model: a `reigen.torch.elastic.Job` or a `reigen.keras.elastic.Job`, as theirs.

    Raises:
        ArgumentError: there is none for models of this kind; or as that class says.
    """
    packages = [kind.__module__.partition(".")[0] for kind in type(model).__mro__]
    module = next((_MODULES[name] for name in packages if name in _MODULES), None)
    if module is None:
        raise ArgumentError(
            f"there is no elastic.Job for a {type(model).__name__}, only for models of {' and '.join(_MODULES)}; "
            "those of reigen.tensorflow.elastic and reigen.jax.elastic take variables and pytrees"
        )
    return import_module(module).Job(model, *arguments, **options)
