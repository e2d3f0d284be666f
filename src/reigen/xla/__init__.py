"""Collectives as operations of programs that XLA compiles, by its foreign function interface and without a compiler.

It knows neither JAX nor TensorFlow, whose packages register the handler that it makes.
"""

from reigen.xla.failures import RuntimeFailures
from reigen.xla.handler import FfiHandler, FfiMismatchError, register_handler

__all__ = ["FfiHandler", "FfiMismatchError", "RuntimeFailures", "register_handler"]
