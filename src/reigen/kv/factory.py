"""Stores by the names of their types."""

from __future__ import annotations

import logging
import math
import os
from difflib import get_close_matches
from typing import NamedTuple

from reigen.errors import ArgumentError, UnsupportedTypeError
from reigen.kv.local_store import LocalStore
from reigen.kv.store import KVStore

_log = logging.getLogger(__name__)


class StoreType(NamedTuple):
    """Meaning of a name: ``local``, ``ring`` or ``dist``, and the staleness of a ``dist`` one whose name says it."""

    where: str
    staleness: float | None = None


#: Every type. Those of MXNet 1.9 and 2.0 mean what they mean there.
STORE_TYPES: dict[str, StoreType] = {
    **dict.fromkeys(("local", "local_update_cpu", "local_allreduce_cpu", "teststore"), StoreType("local")),
    **dict.fromkeys(("device", "local_allreduce_device", "nccl"), StoreType("local")),
    **dict.fromkeys(("ring", "horovod"), StoreType("ring")),
    **dict.fromkeys(("dist", "dist_sync", "dist_sync_device", "dist_device_sync", "byteps"), StoreType("dist", 0)),
    **dict.fromkeys(("dist_async", "dist_async_device", "dist_device_async"), StoreType("dist", math.inf)),
    **dict.fromkeys(("dist_ssp", "dist_ssp_device"), StoreType("dist")),
}


def create(name: str = "local", *, staleness: float | None = None, **knobs: object) -> KVStore:
    """Make a store.

    In a process whose role is server or scheduler (DMLC_ROLE, `reigen server`), a distributed type serves until the job
    is over and then ends the process: it does not return. Another type, which has no servers, ends it at once.

    Args:
        name: its type, in any case: ``local``, ``device``, ``dist_sync``, ``dist_async``, ``dist_ssp``, ``ring``, or
            another spelling of these (`STORE_TYPES`).
        staleness: of ``dist_ssp``: by how many rounds a worker may be ahead of the slowest one; 0 is ``dist_sync``,
            ``math.inf`` is ``dist_async``.
        knobs: of a distributed store, in place of the environment's: see `reigen.config.Config`.

    Raises:
        UnsupportedTypeError: the name is no str.
        ArgumentError: there is no such type, or it has no staleness.
        ConfigError: ``dist``: nothing in the environment tells of servers, or a knob is wrong.
        DeadlineError: ``dist``: servers or workers did not come in time; names them.

    Example:
        >>> import numpy as np
        >>> kv = create("local")
        >>> kv.init("w", np.zeros(2, np.float32))
        >>> _ = kv.push("w", [np.ones(2, np.float32), np.ones(2, np.float32)])
        >>> out = np.empty(2, np.float32)
        >>> _ = kv.pull("w", out=out)
        >>> out
        array([2., 2.], dtype=float32)
    """
    if not isinstance(name, str):
        raise UnsupportedTypeError(f"the name of a store must be a string, got {type(name).__name__}")
    kind = name.lower()
    if kind not in STORE_TYPES:
        close = get_close_matches(kind, STORE_TYPES, 1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ArgumentError(f"unknown type of store {name!r}{hint}; there are: {', '.join(sorted(STORE_TYPES))}")
    where, fixed_staleness = STORE_TYPES[kind]
    is_stale = where == "dist" and fixed_staleness is None
    if is_stale and staleness is None:
        raise ArgumentError(f"{kind} needs staleness=: by how many rounds a worker may be ahead of the slowest one")
    if not is_stale and staleness is not None:
        raise ArgumentError(f"a store of type {kind!r} takes no staleness=; dist_ssp does")
    staleness = staleness if fixed_staleness is None else fixed_staleness
    # stores of some types are loaded when they are asked for: servers and launchers do without them
    if where == "dist" and staleness is not None:
        is_count = staleness == math.inf or (staleness >= 0 and staleness % 1 == 0)
        if isinstance(staleness, bool) or not is_count:
            raise ArgumentError(f"staleness is a whole number, at least 0, or math.inf; got {staleness!r}")
        from reigen.kv.job_session import create_dist_store

        return create_dist_store(kind, staleness, knobs)
    if knobs:
        raise ArgumentError(f"a store of type {kind!r} has no knobs, got {', '.join(sorted(knobs))}")
    if (role := os.environ.get("DMLC_ROLE", "").lower()) in {"server", "scheduler"}:
        _log.warning("a store of type %r needs no %s: this process ends", kind, role)
        raise SystemExit(0)
    if where == "local":
        return LocalStore(kind)
    from reigen.kv.allreduce_store import AllreduceStore

    return AllreduceStore(kind)
