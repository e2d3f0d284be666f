"""Work on one block of arrays: sums in rank order, half precision, scaling, optimizer updates. No I/O."""

from reigen.kernels.reduce import BlockReducer, Reduction

__all__ = ["BlockReducer", "Reduction"]
