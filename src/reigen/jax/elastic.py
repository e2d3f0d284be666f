"""Elastic training with JAX: ``rj.elastic``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reigen.api.functions import broadcast_object
from reigen.api.job import rank
from reigen.elastic import HorovodInternalError, HostsUpdatedInterrupt, ObjectState, State, history, leave, membership
from reigen.elastic.loop import repeat_in_views
from reigen.jax.native import change_job, collective_errors

__all__ = [
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "JaxState",
    "ObjectState",
    "State",
    "history",
    "leave",
    "run",
]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function, as `reigen.elastic.run` does; failures in compiled programs count, too.

    Programs are compiled anew for other members: shapes in them, and branches by rank, were those of the ones before.
    A commit waits for what has been dispatched.
    """
    return repeat_in_views(func, reset=lambda: change_job(membership.reset), errors=collective_errors)


class JaxState(ObjectState):
    """State of a training with JAX: each keyword argument is an attribute.

    Args:
        kwargs: names and first values: pytrees of arrays (parameters, optimizer state, random keys), and other objects
            that pickle can write.

    Example::

        state = rj.elastic.JaxState(params=params, moments=optimizer.init(params), step=0)
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(broadcast_object, rank, **kwargs)
