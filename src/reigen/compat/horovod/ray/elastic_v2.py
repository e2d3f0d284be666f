"""Names of ``horovod.ray.elastic_v2``."""

from reigen.ray import RayHostDiscovery

__all__ = ["RayHostDiscovery"]
