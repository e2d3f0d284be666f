"""Names of ``horovod.ray.elastic``."""

from reigen.ray import ElasticRayExecutor, RayHostDiscovery

__all__ = ["ElasticRayExecutor", "RayHostDiscovery"]
