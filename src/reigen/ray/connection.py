"""Ray's connection of this process, which the user has made: nothing here calls ``ray.init``."""

from __future__ import annotations

from typing import Any


def require_ray() -> Any:
    """Return the module ``ray``, which is connected to a cluster.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        RuntimeError: this process has no connection.
    """
    ray = import_ray()
    if not ray.is_initialized():
        raise RuntimeError("Ray is not initialized in this process: call ray.init(), or ray.init(address=...), before")
    return ray


def import_ray() -> Any:
    """Import Ray; raises ModuleNotFoundError, which says how to install it."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"reigen.ray needs Ray: pip install 'reigen[ray]' ({error})") from error
    return ray


def is_client() -> bool:
    """Return whether this process talks to the cluster through a Ray client (``ray.init("ray://...")``)."""
    from ray.util.client import ray as client

    return bool(client.is_connected())
