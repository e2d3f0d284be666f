"""Calls of Keras 2 that scripts for Horovod make, and that Keras 3 refuses.

Horovod's own examples have them: ``compile(..., experimental_run_tf_function=False)``, which has meant nothing for
long, and ``hvd.broadcast_variables(optimizer.variables(), root_rank=0)``, where ``variables`` is no method any more.
Both are accepted once this module is imported, as it is by the modules of Horovod's names.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

_DONE = "_reigen_accepts_keras2_calls"


class CallableList(list[Any]):
    """A list that a call returns: Keras 2 has had one for these scripts, too."""

    def __call__(self) -> CallableList:
        """Return it."""
        return self


def _callable_list(listed: Callable[[Any], list[Any]]) -> property:
    return property(lambda self: CallableList(listed(self)))


def accept_keras2_calls() -> None:
    """Change the classes of Keras 3, if it is there, in this process."""
    if os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        return
    try:
        import keras
    except ImportError:
        return
    if not hasattr(keras, "ops") or getattr(keras.Model, _DONE, False):
        return
    # Keras asks whether a model has another compile() than this class.
    trainer = next(cls for cls in keras.Model.__mro__ if "compile" in vars(cls))
    compile_model = trainer.compile

    @functools.wraps(compile_model)
    def compile_without(self: Any, *args: Any, experimental_run_tf_function: bool = False, **kwargs: Any) -> None:
        compile_model(self, *args, **kwargs)

    trainer.compile = compile_without
    for optimizer in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer.variables = _callable_list(optimizer.variables.fget)
    setattr(keras.Model, _DONE, True)


accept_keras2_calls()
