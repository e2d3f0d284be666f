"""The optimizer that averages gradients."""

from reigen.torch import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
