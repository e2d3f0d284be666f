"""Stores by the names of their types."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from reigen.errors import ArgumentError, UnsupportedTypeError
from reigen.kv.local_store import LocalStore
from reigen.kv.store import KVStore

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _StoreType:
    """Meaning of a name.

    Attributes:
        where: ``local``, ``ring`` or ``dist``.
        staleness: of a distributed one, where its name says it.
    """

    where: str
    staleness: float | None = None


_SYNC, _ASYNC = _StoreType("dist", 0), _StoreType("dist", math.inf)

#: Every type. Those of MXNet 1.9 and 2.0 mean what they mean there.
STORE_TYPES: dict[str, _StoreType] = {
    **dict.fromkeys(("local", "local_update_cpu", "local_allreduce_cpu", "teststore"), _StoreType("local")),
    **dict.fromkeys(("device", "local_allreduce_device", "nccl"), _StoreType("local")),
    **dict.fromkeys(("ring", "horovod"), _StoreType("ring")),
    **dict.fromkeys(("dist", "dist_sync", "dist_sync_device", "dist_device_sync", "byteps"), _SYNC),
    **dict.fromkeys(("dist_async", "dist_async_device", "dist_device_async"), _ASYNC),
    **dict.fromkeys(("dist_ssp", "dist_ssp_device"), _StoreType("dist")),
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
    meant = STORE_TYPES[kind]
    staleness = _resolve_staleness(kind, meant, staleness)
    if meant.where != "dist" and knobs:
        raise ArgumentError(f"a store of type {kind!r} has no knobs, got {', '.join(sorted(knobs))}")
    if meant.where != "dist":
        _exit_unless_worker(kind, os.environ)
    if meant.where == "local":
        return LocalStore(kind)
    # the others are loaded when they are asked for: servers and launchers do without them
    if meant.where == "ring":
        from reigen.kv.allreduce_store import AllreduceStore

        return AllreduceStore(kind)
    from reigen.kv.job_session import create_dist_store

    return create_dist_store(kind, staleness, knobs)


def _exit_unless_worker(kind: str, environ: Mapping[str, str]) -> None:
    """End a server or a scheduler that runs a program whose store has none.

    Raises:
        SystemExit: with 0: this is one.
    """
    role = environ.get("DMLC_ROLE", "").lower()
    if role in {"server", "scheduler"}:
        _log.warning("a store of type %r needs no %s: this process ends", kind, role)
        raise SystemExit(0)


def _resolve_staleness(kind: str, meant: _StoreType, given: float | None) -> float:
    """Return the staleness that a type and an argument mean together."""
    if meant.where == "dist" and meant.staleness is None:
        if given is None:
            raise ArgumentError(f"{kind} needs staleness=: by how many rounds a worker may be ahead of the slowest one")
        if isinstance(given, bool) or not (given == math.inf or (given >= 0 and given == int(given))):
            raise ArgumentError(f"staleness is a whole number, at least 0, or math.inf; got {given!r}")
        return given
    if given is not None:
        raise ArgumentError(f"a store of type {kind!r} takes no staleness=; dist_ssp does")
    return meant.staleness or 0
