"""`elastic.Job` of whatever framework a model is of."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from reigen.errors import ArgumentError

#: By the package of a model's class, the module that has its ``Job``.
_MODULES = {"torch": "reigen.torch.elastic.job"}


def Job(model: Any, *arguments: Any, **options: Any) -> Any:  # noqa: N802  a class to those who use it
    """Make an elastic job for a model; for those of PyTorch a `reigen.torch.elastic.Job`, with its arguments.

    Raises:
        ArgumentError: there is none for models of this kind; or as that class says.
    """
    packages = [kind.__module__.partition(".")[0] for kind in type(model).__mro__]
    module = next((_MODULES[name] for name in packages if name in _MODULES), None)
    if module is None:
        raise ArgumentError(
            f"there is no elastic.Job for a {type(model).__name__}, only for modules of {', '.join(_MODULES)}; "
            "hvd.elastic.run is there for other frameworks, too"
        )
    return import_module(module).Job(model, *arguments, **options)
