"""Self-test of calls of XLA inside ``jit_compile=True`` with the TensorFlow that is installed; in a process of its own.

Calls that end at once, later on another thread, or with an error, and many at the same time.
"""

from __future__ import annotations

import sys

import tensorflow as tf

from reigen.tensorflow import compiled
from reigen.xla import register_handler
from reigen.xla.self_test import FAILURE, DelayedCall, decode_delayed

_TARGET = "reigen_self_test"
_COUNT, _EXECUTIONS = 50, 3


def main() -> int:
    """Run it; returns the exit code, 0 for success."""
    handler = register_handler(compiled.api_address(), _TARGET, decode=decode_delayed)
    for how in ("now", "later"):
        for number in range(_EXECUTIONS):
            for index, made in enumerate(_double(tf.fill([1000], 1.0 * number), how)):
                tf.debugging.assert_equal(made, tf.fill([1000], 2.0 * (number + index)))
    try:
        _double(tf.ones([1000]), "error")
    except tf.errors.OpError as error:
        return 0 if FAILURE in error.message and handler.drain(10.0) else 1
    return 1


@tf.function(jit_compile=True, autograph=False)  # type: ignore[untyped-decorator]
def _double(tensor: tf.Tensor, how: str) -> list[tf.Tensor]:
    spec = tf.TensorSpec(tensor.shape, tensor.dtype)
    texts = [DelayedCall.named(f"{how} {index}").encode() for index in range(_COUNT)]
    return [
        compiled.call_target(_TARGET, text, [tensor + float(index)], [spec], "SelfTest")[0]
        for index, text in enumerate(texts)
    ]


if __name__ == "__main__":
    sys.exit(main())
