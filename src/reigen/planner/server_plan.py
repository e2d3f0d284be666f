"""Requests of one worker to the parameter servers in a step, made by the code of the store itself.

Keys are placed by `reigen.kv.client.sharding.ShardPlacer` and put into requests by the store's own `BatchBuilder` and
`RequestFactory`; only their worker, which would send them, is another one: it notes what it is given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from reigen.compression import Codec, from_params
from reigen.compression.base import Residual
from reigen.kv.client.key_table import MAX_BATCHED_KEY_BYTES, BatchBuilder, KeyState, RequestFactory
from reigen.kv.client.requests import BatchRequest, ClientRequest, KVOperation
from reigen.kv.client.sharding import ShardPlacer
from reigen.kv.client.worker import KVWorker
from reigen.kv.protocol import MessageKind
from reigen.kv.values import DENSE, TensorSpec
from reigen.planner.prediction import Strategy
from reigen.planner.profile import TrainingProfile
from reigen.types import DTYPES

#: A server's requests are simulated in at most so many pieces, each of one request or several.
MAX_PIECES = 32
#: Servers whose loads differ by less than this are simulated as one, which has the larger load.
_SAME_LOAD = 0.02
_OPERATION = KVOperation(lambda operation, until: None, "pushpull")


@dataclass(frozen=True, slots=True)
class RequestPiece:
    """Consecutive requests of one worker to one server.

    Attributes:
        requests: how many.
        push_bytes, value_bytes: that travel to the server, and back.
        sum_bytes: of the elements, decoded.
    """

    requests: int
    push_bytes: int
    value_bytes: int
    sum_bytes: int


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """Requests of a step.

    Attributes:
        classes: the class of each server; servers of one class have nearly the same load.
        pieces: by class, the requests to a server of it, in order.
        reason: how keys are placed, in words.
    """

    classes: tuple[int, ...]
    pieces: tuple[tuple[RequestPiece, ...], ...]
    reason: str

    @property
    def num_requests(self) -> int:
        """Requests of one worker in a step."""
        return sum(piece.requests for each in self.classes for piece in self.pieces[each])


class _SizeOnlyCodec(Codec):
    """Codec that gives codes of the right size, and computes nothing."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    @property
    def name(self) -> str:
        return self._codec.name

    def max_bytes(self, num_elements: int) -> int:
        return self._codec.max_bytes(num_elements)

    def pack(self, values: Any, out: Any, scratch: Any) -> None:
        pass

    def unpack(self, data: Any, out: Any) -> None:
        pass

    def begin(self, num_elements: int, dtype: Any, saved: Residual = None) -> Residual:
        return None

    def encode(self, array: NDArray[Any], state: Residual, out: Any) -> int:
        return self.max_bytes(len(array))


class _NotingWorker:
    """Worker that notes requests instead of sending them; it has what `RequestFactory` uses of a `KVWorker`."""

    def __init__(self) -> None:
        self.requests: list[ClientRequest] = []
        self.arena = self
        self.member = SimpleNamespace(counters=SimpleNamespace(encoded_bytes=0, code_bytes=0))

    def submit(self, requests: Sequence[ClientRequest], *orders: object) -> None:
        """Note the requests."""
        self.requests += requests

    def copy(self, *parts: NDArray[Any]) -> tuple[NDArray[np.uint8], None]:
        """Return memory for the parts."""
        return self.take(sum(part.nbytes for part in parts))

    def take(self, nbytes: int) -> tuple[NDArray[np.uint8], None]:
        """Return memory, which is never touched."""
        return _untouched(nbytes, np.dtype(np.uint8)), None


def _untouched(count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array for its size alone, which needs no memory where it is large."""
    if count * dtype.itemsize <= MAX_BATCHED_KEY_BYTES:
        return np.empty(count, dtype)
    return np.broadcast_to(np.zeros(1, dtype), (count,))


def make_requests(
    profile: TrainingProfile, strategy: Strategy, bound: int, slice_bytes: int, num_workers: int
) -> list[ClientRequest]:
    """Make the requests of a step, in which every parameter is pushed and its new value pulled, in one call.

    Args:
        profile: the parameters.
        strategy: how many servers, and how gradients are compressed.
        bound: keys of so many elements lie on all servers.
        slice_bytes: the largest shard.
        num_workers: that push.
    """
    worker = _NotingWorker()
    factory = RequestFactory(cast("KVWorker", worker))
    if strategy.compression:
        codec = from_params(strategy.compression)
        factory.codec = _SizeOnlyCodec(codec)
        if not strategy.update_on_servers:
            factory.answer_codec = _SizeOnlyCodec(codec.for_sums(num_workers))
    placer = ShardPlacer(strategy.num_servers, bound, slice_bytes)
    builder = BatchBuilder(factory, cast("KVWorker", worker), MessageKind.PUSHPULL, _OPERATION, 0, len(profile.tensors))
    for number, tensor in enumerate(profile.tensors):
        entry = KeyState(number, number, TensorSpec(DTYPES[tensor.dtype], (tensor.elements,), DENSE))
        entry.set_placement(placer.place(number, tensor.elements, tensor.itemsize))
        elements = _untouched(tensor.elements, DTYPES[tensor.dtype].storage)
        builder.add(entry, elements, elements)
    builder.end()
    return worker.requests


def plan_requests(
    profile: TrainingProfile, strategy: Strategy, bound: int, slice_bytes: int, num_workers: int
) -> ServerPlan:
    """Plan the requests of a step: those of `make_requests`, which has the arguments, by server."""
    by_server: list[list[RequestPiece]] = [[] for _ in range(strategy.num_servers)]
    for request in make_requests(profile, strategy, bound, slice_bytes, num_workers):
        by_server[request.server].append(_as_piece(request))
    classes, pieces = _classify([_merge(each) for each in by_server])
    reason = f"keys of {bound} elements and more lie on all servers, in shards of at most {slice_bytes} bytes"
    return ServerPlan(classes, pieces, reason)


def _as_piece(request: ClientRequest) -> RequestPiece:
    outs = request.outs if isinstance(request, BatchRequest) else [request.into]
    arrays = [out for out in outs if out is not None]
    sum_bytes = sum(out.nbytes for out in arrays)
    value_bytes = sum_bytes
    if request.codec is not None:
        value_bytes = sum(request.codec.max_bytes(len(out)) for out in arrays)
    return RequestPiece(1, len(request.body), value_bytes, sum_bytes)


def _merge(pieces: Sequence[RequestPiece]) -> tuple[RequestPiece, ...]:
    """Put consecutive requests together, so that there are not too many pieces."""
    step = max(1, math.ceil(len(pieces) / MAX_PIECES))
    return tuple(
        RequestPiece(
            sum(each.requests for each in part),
            sum(each.push_bytes for each in part),
            sum(each.value_bytes for each in part),
            sum(each.sum_bytes for each in part),
        )
        for part in (pieces[begin : begin + step] for begin in range(0, len(pieces), step))
    )


def _classify(
    servers: Sequence[tuple[RequestPiece, ...]],
) -> tuple[tuple[int, ...], tuple[tuple[RequestPiece, ...], ...]]:
    """Return the class of each server, and the requests to the server of each class that has most to do."""
    loads = [sum(piece.push_bytes + piece.value_bytes for piece in pieces) for pieces in servers]
    order = sorted(range(len(servers)), key=lambda server: -loads[server])
    classes, chosen, largest = [0] * len(servers), list[tuple[RequestPiece, ...]](), math.inf
    for server in order:
        if not chosen or loads[server] < largest * (1 - _SAME_LOAD):
            chosen.append(servers[server])
            largest = loads[server]
        classes[server] = len(chosen) - 1
    return tuple(classes), tuple(chosen)
