"""The decision whether TensorFlow can have operations of our own in this process.

They rely on what the C API does not promise (`kernels`). So they are used with the versions of TensorFlow with which
the tests have run, and with another one after a self-test in a process of its own has succeeded. The same holds for
calls of XLA inside ``jit_compile=True``.
"""

from __future__ import annotations

import functools
import os

import tensorflow as tf

from reigen import context
from reigen.api.self_tests import SelfTest
from reigen.config import load_config
from reigen.tensorflow.native.c_api import library_path

#: Versions with which the tests have run.
TESTED_VERSIONS = ("2.16.2", "2.21.0")


@functools.cache
def kernels_test() -> SelfTest:
    """Return the self-test of our operations."""
    module = "reigen.tensorflow.native.self_test"
    return SelfTest("TensorFlow", tf.__version__, library_path(), module, TESTED_VERSIONS)


@functools.cache
def xla_test() -> SelfTest:
    """Return the self-test of what functions with ``jit_compile=True`` call."""
    module = "reigen.tensorflow.native.xla_self_test"
    return SelfTest("TensorFlow's XLA", tf.__version__, library_path(), module, TESTED_VERSIONS)


def judge() -> str | None:
    """Return why there can be no operations of our own; None: there can."""
    choice = _choice()
    if choice == "0":
        return "REIGEN_TENSORFLOW_NATIVE=0"
    return None if choice == "1" else kernels_test().judge()


def is_known() -> bool:
    """Return whether there can be operations of our own, without a self-test."""
    return _choice() != "0" and kernels_test().is_tested


def judge_xla() -> str | None:
    """Return why XLA cannot call collectives; None: it can."""
    return None if _choice() == "1" else xla_test().judge()


def _choice() -> str:
    return (context.current().config if context.is_initialized() else load_config(os.environ)).tensorflow_native
