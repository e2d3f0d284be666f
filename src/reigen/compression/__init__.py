"""Gradient compression: numbers to fewer bytes and back, alike for servers and rings. Pure: NumPy and no I/O."""

from reigen.compression.base import Codec, Params, Residual
from reigen.compression.bits import Signs, Ternary
from reigen.compression.casts import Cast, Int8
from reigen.compression.feedback import ErrorFeedback
from reigen.compression.params import chain, from_params
from reigen.compression.topk import TopK

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
    "chain",
    "from_params",
]
