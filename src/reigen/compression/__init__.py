"""Gradient compression: numbers to fewer bytes and back, alike for servers and rings. Pure: NumPy and no I/O."""

from reigen.compression.base import Codec, Params, Residual
from reigen.compression.casts import Cast, Int8
from reigen.compression.decode_sum import add_up
from reigen.compression.error_feedback import ErrorFeedback
from reigen.compression.low_bit import Signs, Ternary
from reigen.compression.params import chain, from_params, means_none
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
    "add_up",
    "chain",
    "from_params",
    "means_none",
]
