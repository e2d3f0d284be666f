"""Self-test of asynchronous operations with the TensorFlow that is installed; for a process of its own.

It runs what a crash of which would show that the runtime is another than the one that `kernels` knows: operations that
end at once, on another thread, with an error, and many at the same time.
"""

from __future__ import annotations

import sys
import threading

import tensorflow as tf
from tensorflow.python.framework import op_def_library, op_def_registry

from reigen.tensorflow.native.c_api import CApi
from reigen.tensorflow.native.kernels import AsyncKernelOperation, KernelRun

_NAME = "ReigenSelfTest"
_COUNT = 50


def main() -> int:
    """Run it; returns the exit code, 0 for success."""
    AsyncKernelOperation(CApi(), _NAME, _begin, has_rows=False)
    op_def_registry.get(_NAME)

    @tf.function  # type: ignore[untyped-decorator]
    def double(tensor: tf.Tensor, how: str) -> list[tf.Tensor]:
        made = [_emit(tensor + index, how) for index in range(_COUNT)]
        return [each * 1.0 for each in made]

    tensor = tf.range(1000.0)
    for how in ("now", "later"):
        for _ in range(3):
            for index, made in enumerate(double(tensor, how)):
                tf.debugging.assert_equal(made, (tensor + index) * 2)
    try:
        double(tensor, "error")
    except tf.errors.FailedPreconditionError as error:
        return 0 if "as it should" in error.message else 1
    return 1


def _emit(tensor: tf.Tensor, how: str) -> tf.Tensor:
    made = op_def_library.apply_op(_NAME, inputs=[tensor], call=how)
    return made[0] if isinstance(made, list | tuple) else made


def _begin(run: KernelRun, how: str) -> None:
    run.take()
    source = run.inputs()[0][0]
    target = run.outputs_like([source])[0]

    def end() -> None:
        target[...] = source * 2
        run.finish((tf.errors.FAILED_PRECONDITION, "fails as it should") if how == "error" else None)

    if how == "now":
        end()
    else:
        threading.Timer(0.01, end).start()


if __name__ == "__main__":
    sys.exit(main())
