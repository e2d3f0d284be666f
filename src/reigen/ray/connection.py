"""Ray's connection of this process, which the user has made: nothing here calls ``ray.init``."""

from __future__ import annotations

from typing import Any


def require_ray() -> Any:
    """Return the module ``ray``, which is connected to a cluster.

    Raises:
        ImportError: Ray is not installed.
        RuntimeError: this process has no connection.
    """
    ray = import_ray()
    if not ray.is_initialized():
        raise RuntimeError("Ray is not initialized in this process: call ray.init(), or ray.init(address=...), before")
    return ray


def import_ray() -> Any:
    """Import Ray; raises ImportError, which says how to install it."""
    try:
        import ray
    except ImportError as error:
        raise ImportError(f"reigen.ray needs Ray, which cannot be imported here ({error}): pip install 'reigen[ray]'") from error
    return ray


def is_client() -> bool:
    """Return whether this process talks to the cluster through a Ray client (``ray.init("ray://...")``)."""
    from ray.util.client import ray as client

    return bool(client.is_connected())
