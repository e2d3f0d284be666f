"""Names of ``horovod.torch.optimizer``: the optimizer that averages gradients."""

from reigen.torch import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
