"""Python objects between ranks, as pickles; and other bytes that a rank reads, and does not only calculate with.

A pickle can run code when it is loaded. On one host its bytes never leave the memory of the job. Between hosts they
travel like tensors, which nothing authenticates without TLS; so, for every call:

a. Sizes and, between hosts, BLAKE2b hashes are exchanged by control messages. These are authenticated with keys of this
   life of the job, numbered, and of one sender each; the exchange is of one process set, name and root. So nothing that
   was said earlier, under another name, by another rank, in another set or before a ``shutdown()`` fits, and no size
   that an attacker in between announces is allocated.
   On one host few bytes are sent with their sizes; if all ranks' are few, that is all.
b. The bytes are moved by the backend, and every rank compares what it received with the hashes.
c. Between hosts the ranks exchange what they found. If something did not arrive anywhere as it was sent, all of them
   raise the same AuthenticationError, and none has read anything. The job can go on.

No rank counts calls by itself, so ranks need not have made the same calls before, errors included.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from reigen.engine.stall.inspector import name_ranks
from reigen.errors import AuthenticationError
from reigen.types import dtype_named

if TYPE_CHECKING:
    from reigen.context import Context

_BYTES = dtype_named("uint8")
_SIZE = struct.Struct("<Q")
_RANK = struct.Struct("<I")
_DIGEST_BYTES = 32
#: So many bytes of all ranks together travel with their sizes: a second collective would take longer.
_MAX_SMALL_BYTES = 16 << 10
#: How many ranks whose bytes did not arrive a rank names to the others.
_MAX_NAMED = 64


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
        AuthenticationError: they were changed on their way to some rank; raised on all.
    """
    is_root = context.rank == root_rank
    own = (data or b"") if is_root else b""
    exchanged = context.exchange(
        _announce(context, own, _MAX_SMALL_BYTES) if is_root else b"",
        root_rank=root_rank,
        name=_part_name(name, "size"),
        process_set=process_set,
    ).wait()
    description = exchanged.payloads[context.process_sets[process_set].index(root_rank)]
    if (small := _small_bytes(context, description)) is not None:
        return small
    target = np.empty(_SIZE.unpack_from(description)[0], np.uint8)
    source = np.frombuffer(own, np.uint8) if is_root else target
    where: dict[str, Any] = {"root_rank": root_rank, "process_set": process_set, "blocking": True}
    context.broadcast(source, target, _BYTES, name=_part_name(name, "bytes"), **where).wait()
    received = target.tobytes()
    altered = [] if is_root or description == _describe(context, received) else [root_rank]
    _compare(context, altered, name, process_set, root_rank)
    return received


def allgather_bytes(context: Context, data: bytes, name: str | None, process_set: int = 0) -> list[bytes]:
    """Every rank's bytes, by rank of the process set.

    Raises:
        AuthenticationError: they were changed on their way to some rank; raised on all.
    """
    announced = _announce(context, data, _MAX_SMALL_BYTES // context.size)
    exchanged = context.exchange(announced, name=_part_name(name, "size"), process_set=process_set).wait()
    small = [_small_bytes(context, each) for each in exchanged.payloads]
    if None not in small:
        return [each for each in small if each is not None]
    source = np.frombuffer(data, np.uint8)
    where: dict[str, Any] = {"process_set": process_set, "blocking": True}
    joined = context.allgather(source, _BYTES, name=_part_name(name, "bytes"), **where).wait().on_host
    sizes = [_SIZE.unpack_from(description)[0] for description in exchanged.payloads]
    ends = np.cumsum(sizes).tolist()
    parts = [joined[end - size : end].tobytes() for size, end in zip(sizes, ends, strict=True)]
    senders = zip(context.process_sets[process_set], exchanged.payloads, parts, strict=True)
    altered = [rank for rank, description, part in senders if description != _describe(context, part)]
    _compare(context, altered, name, process_set)
    return parts


def broadcast_object(context: Context, obj: Any, root_rank: int, name: str | None, process_set: int = 0) -> Any:
    """The root's object, on every rank of the set; the root gets ``obj`` itself, the others a copy."""
    is_root = context.rank == root_rank
    data = broadcast_bytes(context, dumps(obj) if is_root else None, root_rank, name, process_set)
    return obj if is_root else pickle.loads(data)  # noqa: S301 - see the module


def allgather_object(context: Context, obj: object, name: str | None, process_set: int = 0) -> list[Any]:
    """Every rank's object, by rank of the process set."""
    payloads = allgather_bytes(context, dumps(obj), name, process_set)
    return [pickle.loads(data) for data in payloads]  # noqa: S301 - see the module


def _describe(context: Context, data: bytes) -> bytes:
    """Description of some bytes for the other ranks (step a); no other bytes have it."""
    return _SIZE.pack(len(data)) + (blake2b(data, digest_size=_DIGEST_BYTES).digest() if context.has_network else b"")


def _announce(context: Context, data: bytes, most: int) -> bytes:
    """Describe some bytes for step a, and append them where they stay on this host and are not more than ``most``."""
    is_small = not context.has_network and len(data) <= most
    return _describe(context, data) + data * is_small


def _small_bytes(context: Context, announced: bytes) -> bytes | None:
    """Return the bytes that `_announce` has appended; None: there are none."""
    is_small = not context.has_network and len(announced) == _SIZE.size + _SIZE.unpack_from(announced)[0]
    return announced[_SIZE.size :] if is_small else None


def _compare(
    context: Context, altered: Sequence[int], name: str | None, process_set: int, root_rank: int | None = None
) -> None:
    """Step c: tell the others whose bytes did not arrive here as they were sent, and hear the same of them."""
    if not context.has_network:
        return
    own = b"".join(map(_RANK.pack, altered[:_MAX_NAMED]))
    exchanged = context.exchange(
        own, root_rank=root_rank, name=_part_name(name, "arrived"), process_set=process_set
    ).wait()
    if not any(exchanged.payloads):
        return
    senders = sorted({rank for payload in exchanged.payloads for (rank,) in _RANK.iter_unpack(payload)})
    ranks = context.process_sets[process_set]
    receivers = [rank for rank, payload in zip(ranks, exchanged.payloads, strict=True) if payload]
    raise AuthenticationError(
        f"{'an unnamed object' if name is None else name}: what {name_ranks(senders)} sent was changed on its way "
        f"to {name_ranks(receivers)}, or something else was put in its place, by an attacker between the hosts who "
        "does not know this job's secret. No rank has read it. Where others can change what hosts send to each other, "
        "set REIGEN_TLS=1: it protects tensors, too"
    )


def _part_name(name: str | None, part: str) -> str | None:
    return None if name is None else f"{name}.{part}"
