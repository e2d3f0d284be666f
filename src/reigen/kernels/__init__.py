"""Work on one block of arrays: sums in rank order, half precision, scaling, optimizer updates. No I/O."""

from reigen.kernels.reduce import Reducer, Reduction

__all__ = ["Reducer", "Reduction"]
