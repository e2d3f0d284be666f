"""Name of a module of Horovod's: gradients of several backward passes are added up by ``DistributedOptimizer``."""

from reigen.tensorflow.gradient_aggregation import LocalGradientAggregator

__all__ = ["LocalGradientAggregator"]
