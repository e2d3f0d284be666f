"""Reduce one block of arrays: sums in rank order, half precision, scaling. No I/O."""

from reigen.kernels.reduce import Reducer, Reduction

__all__ = ["Reducer", "Reduction"]
