"""Jobs on Ray."""

from reigen.ray import ElasticRayExecutor, RayExecutor, RayHostDiscovery, ray_logger
from reigen.ray.connection import import_ray

import_ray()  # without Ray this module cannot be imported, as Horovod's cannot

__all__ = ["ElasticRayExecutor", "RayExecutor", "RayHostDiscovery", "ray_logger"]
