"""Jobs on Ray."""

from reigen.ray import ElasticRayExecutor, RayExecutor, RayHostDiscovery, ray_logger

__all__ = ["ElasticRayExecutor", "RayExecutor", "RayHostDiscovery", "ray_logger"]
