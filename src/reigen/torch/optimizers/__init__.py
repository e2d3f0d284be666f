"""DistributedOptimizer's classes: what stands in front of the class of an optimizer."""
