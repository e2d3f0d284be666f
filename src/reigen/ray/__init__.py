"""Reigen on Ray: `RayExecutor` with Horovod's interface, `run` for one function, and a backend for Ray Train.

Ray gives the places: one actor a node. Reigen's agent runs beneath it and starts the ranks, so that output, exit codes,
errors and clean-up are those of every other launcher. With Ray Train (`ReigenConfig`) the ranks are Ray's own workers.
Ray itself is imported when something of this is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from reigen.ray import ray_logger
from reigen.ray.call import run
from reigen.ray.elastic import ElasticRayExecutor, RayHostDiscovery
from reigen.ray.executor import RayExecutor
from reigen.ray.settings import RaySettings

if TYPE_CHECKING:
    from reigen.ray.train import ReigenConfig

__all__ = [
    "ElasticRayExecutor",
    "RayExecutor",
    "RayHostDiscovery",
    "RaySettings",
    "ReigenConfig",
    "ray_logger",
    "run",
]


def __getattr__(name: str) -> object:
    if name != "ReigenConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = import_module(f"{__name__}.train").ReigenConfig  # a subclass of one of Ray Train's classes
    globals()[name] = value
    return value
