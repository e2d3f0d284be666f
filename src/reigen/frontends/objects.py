"""Python objects between ranks, as pickles: their size first, then their bytes.

A pickle can run code when it is loaded. On one host these never leave the memory of the job. Between hosts they are
sealed with the job's secret, and whatever was changed on its way is not loaded but an AuthenticationError.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np

from reigen.types import dtype_named

if TYPE_CHECKING:
    from reigen.context import Context

_BYTES = dtype_named("uint8")
_COUNT = dtype_named("int64")


def dumps(obj: object) -> bytes:
    """A pickle of ``obj``: by cloudpickle, which knows lambdas and local classes, if it is installed."""
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    data: bytes = cloudpickle.dumps(obj)
    return data


def broadcast_bytes(
    context: Context, data: bytes | None, root_rank: int, name: str | None, process_set: int = 0
) -> bytes:
    """The root's bytes, on every rank of the process set. ``data`` is read on the root alone.

    Raises:
        ArgumentError: the root is no rank of the set.
        AuthenticationError: they were changed on their way.
    """
    where: dict[str, Any] = {"root_rank": root_rank, "process_set": process_set, "blocking": True}
    payload = np.frombuffer(_sealed(context, data or b""), np.uint8)
    size = np.array([payload.size], np.int64)
    context.broadcast(size, size, _COUNT, name=_part(name, "size"), **where).wait()
    target = np.empty(int(size[0]), np.uint8)
    source = payload if context.rank == root_rank else target
    context.broadcast(source, target, _BYTES, name=_part(name, "bytes"), **where).wait()
    return _opened(context, target.tobytes())


def allgather_bytes(context: Context, data: bytes, name: str | None, process_set: int = 0) -> list[bytes]:
    """Every rank's bytes, by rank of the process set.

    Raises:
        AuthenticationError: they were changed on their way.
    """
    where: dict[str, Any] = {"process_set": process_set, "blocking": True}
    payload = np.frombuffer(_sealed(context, data), np.uint8)
    count = np.array([payload.size], np.int64)
    sizes = context.allgather(count, _COUNT, name=_part(name, "size"), **where).wait().on_host
    joined = context.allgather(payload, _BYTES, name=_part(name, "bytes"), **where).wait().on_host
    ends = np.cumsum(sizes)
    parts = [joined[end - size : end].tobytes() for size, end in zip(sizes.tolist(), ends.tolist(), strict=True)]
    return [_opened(context, part) for part in parts]


def broadcast_object(context: Context, obj: Any, root_rank: int, name: str | None, process_set: int = 0) -> Any:
    """The root's object, on every rank of the set; the root gets ``obj`` itself, the others a copy."""
    is_root = context.rank == root_rank
    data = broadcast_bytes(context, dumps(obj) if is_root else None, root_rank, name, process_set)
    return obj if is_root else pickle.loads(data)  # noqa: S301 - see the module


def allgather_object(context: Context, obj: object, name: str | None, process_set: int = 0) -> list[Any]:
    """Every rank's object, by rank of the process set."""
    everybodys = allgather_bytes(context, dumps(obj), name, process_set)
    return [pickle.loads(data) for data in everybodys]  # noqa: S301 - see the module


def _sealed(context: Context, data: bytes) -> bytes:
    return data if context.seal is None else context.seal.close(data)


def _opened(context: Context, data: bytes) -> bytes:
    return data if context.seal is None else context.seal.open(data)


def _part(name: str | None, part: str) -> str | None:
    return None if name is None else f"{name}.{part}"
