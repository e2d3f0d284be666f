"""Jobs on Ray."""

try:
    import ray  # noqa: F401  without it Horovod's module cannot be imported, either
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"reigen.ray needs Ray: pip install 'reigen[ray]' ({error})") from error

from reigen.ray import ElasticRayExecutor, RayExecutor, RayHostDiscovery, ray_logger

__all__ = ["ElasticRayExecutor", "RayExecutor", "RayHostDiscovery", "ray_logger"]
