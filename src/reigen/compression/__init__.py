"""Gradient compression: numbers to fewer bytes and back, alike for servers and rings. Pure: NumPy and no I/O."""

from reigen.compression.base import Codec, Params, Residual, add_up
from reigen.compression.codecs import Cast, Int8, Signs, Ternary, TopK
from reigen.compression.error_feedback import ErrorFeedback
from reigen.compression.params import chain, from_params, means_none

__all__ = [
    "Cast",
    "Codec",
    "ErrorFeedback",
    "Int8",
    "Params",
    "Residual",
    "Signs",
    "Ternary",
    "TopK",
    "add_up",
    "chain",
    "from_params",
    "means_none",
]
