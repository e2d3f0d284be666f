"""Ray's connection of this process, which the user has made: nothing here calls ``ray.init``."""

from __future__ import annotations

from importlib import import_module
from typing import Any

#: Classes of `reigen.ray.train`, which needs more of Ray than jobs do: a subclass of one of Ray Train's.
_TRAIN_CLASSES = ("ReigenConfig",)


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


def load_train_class(name: str) -> object:
    """Import a class of `reigen.ray.train` when it is used; the ``__getattr__`` of `reigen.ray`."""
    if name not in _TRAIN_CLASSES:
        raise AttributeError(f"module 'reigen.ray' has no attribute {name!r}")
    import_ray()
    value: object = getattr(import_module("reigen.ray.train"), name)
    return value
