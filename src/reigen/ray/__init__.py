"""Reigen on Ray: `RayExecutor` with Horovod's interface, `run` for one function, and a backend for Ray Train.

Ray gives the places: one actor a node. Reigen's agent runs beneath it and starts the ranks, so that output, exit codes,
errors and clean-up are those of every other launcher. With Ray Train (`ReigenConfig`) the ranks are Ray's own workers.
Ray itself is imported when something of this is used.
"""

from reigen.ray import ray_logger
from reigen.ray.call import run
from reigen.ray.connection import load_train_class as __getattr__  # noqa: F401  loads classes when they are used
from reigen.ray.elastic import ElasticRayExecutor, RayHostDiscovery
from reigen.ray.executor import RayExecutor
from reigen.ray.settings import RaySettings

__all__ = [
    "ElasticRayExecutor",
    "RayExecutor",
    "RayHostDiscovery",
    "RaySettings",
    "ReigenConfig",
    "ray_logger",
    "run",
]
