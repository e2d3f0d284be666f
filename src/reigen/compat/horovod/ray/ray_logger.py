"""Names of ``horovod.ray.ray_logger``."""

from reigen.ray.ray_logger import log

__all__ = ["log"]
