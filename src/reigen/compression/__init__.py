"""Gradient compression: numbers to fewer bytes and back, alike for servers and rings. Pure: NumPy and no I/O."""

from reigen.compression.base import Codec, Params, Residual
from reigen.compression.bits import Signs, Ternary
from reigen.compression.casts import Cast, Int8
from reigen.compression.feedback import ErrorFeedback
from reigen.compression.params import chain, from_params, means_none
from reigen.compression.topk import TopK
from reigen.compression.totals import add_up

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
