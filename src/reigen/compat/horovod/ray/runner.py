"""Names of ``horovod.ray.runner``."""

from reigen.ray import RayExecutor

__all__ = ["RayExecutor"]
