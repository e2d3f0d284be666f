"""Calls of functions in ranks that stay: messages between a driver and each rank, and the rank's end.

Each rank makes one connection to the driver (``net.auth``, the job's secret), whose address it finds at the rendezvous:

a. A rank that is free sends NextCall. The driver answers with CallBegins when there is a call for this rank, or with
   NoMoreCalls, after which the rank's function returns.
b. The rank asks for the pickle of the function in parts (GetCallPiece, CallPiece), so that it is in memory once only.
c. While the function runs, it may send notes (NoteBegins, ResultPieces).
d. The rank sends CallEnded and, in ResultPieces, the pickle of what the function returned, or of its exception.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from reigen.cluster.environ import detect_job
from reigen.cluster.membership.rendezvous import RendezvousClient, split_address
from reigen.errors import LaunchError
from reigen.launch.options import NetworkOptions
from reigen.launch.payload import PayloadFile
from reigen.net.auth import Identity, ProcessRole
from reigen.net.codec import MessageCodec
from reigen.net.connection import Connection, open_connection
from reigen.runner.notes import send_notes_by
from reigen.runner.serialization import pack_object, unpack_object
from reigen.runner.task import failure_report, pack_error

#: Key at the rendezvous of the driver's address.
ADDRESS_KEY = "reigen/calls"
CALLS_PURPOSE = "calls"
PIECE_BYTES = 1 << 20
MAX_CALL_MESSAGE_BYTES = PIECE_BYTES + (1 << 16)
_LONG_SECONDS = 1e6
_MAX_TEXT = 4000


class _CallMessage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Base of these messages."""


class NextCall(_CallMessage, tag=1, frozen=True):
    """Rank is free."""


class CallBegins(_CallMessage, tag=2, frozen=True):
    """Call for the rank: its number, the size of the pickle, and whether the rank's state is the first argument."""

    number: int
    num_bytes: int
    with_state: bool


class NoMoreCalls(_CallMessage, tag=3, frozen=True):
    """Answer that no more calls will come."""


class GetCallPiece(_CallMessage, tag=4, frozen=True):
    """Request for the next part of a call's pickle."""

    number: int
    offset: int


class CallPiece(_CallMessage, tag=5, frozen=True):
    """Part of a call's pickle."""

    data: bytes


class CallEnded(_CallMessage, tag=6, frozen=True):
    """End of a call, as ``runner.result_channel.RankReport``; the pickle of ``num_bytes`` follows."""

    number: int
    failed: bool
    is_victim: bool
    exit_code: int
    text: str
    num_bytes: int


class NoteBegins(_CallMessage, tag=7, frozen=True):
    """Note of a rank, whose pickle of ``num_bytes`` follows."""

    num_bytes: int


class ResultPiece(_CallMessage, tag=8, frozen=True):
    """Part of what follows CallEnded, or NoteBegins."""

    data: bytes


RankCallMessage = NextCall | GetCallPiece | CallEnded | NoteBegins | ResultPiece
DriverCallMessage = CallBegins | NoMoreCalls | CallPiece
RANK_CODEC: MessageCodec[RankCallMessage] = MessageCodec(RankCallMessage, MAX_CALL_MESSAGE_BYTES)
DRIVER_CODEC: MessageCodec[DriverCallMessage] = MessageCodec(DriverCallMessage, MAX_CALL_MESSAGE_BYTES)


class _DriverConnection:
    """Rank's connection to the driver; its main thread receives, and any thread may send."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: RankCallMessage, payload: int | None = None) -> None:
        """Send a message and what follows it; the payload stays the caller's."""
        with self._lock:
            self._send(message)
            size = 0 if payload is None else os.fstat(payload).st_size
            for offset in range(0, size, PIECE_BYTES):
                assert payload is not None, "it has a size"
                self._send(ResultPiece(os.pread(payload, PIECE_BYTES, offset)))

    def receive(self) -> DriverCallMessage:
        """Receive the next message; it may take any time."""
        while True:
            try:
                return DRIVER_CODEC.decode(self._connection.receive(time.monotonic() + _LONG_SECONDS))
            except TimeoutError:
                continue

    def close(self) -> None:
        self._connection.close()

    def _send(self, message: RankCallMessage) -> None:
        self._connection.send(RANK_CODEC.encode(message), time.monotonic() + _LONG_SECONDS)


#: Connection of this process while it serves calls.


def serve_calls(state: tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]] | None, seconds: float) -> None:
    """Serve as a rank: make the state, connect to the driver, and run its calls until the last one.

    Args:
        state: makes the rank's state: a callable, its arguments and keyword arguments; None: there is none.
        seconds: how long the driver may take to be there.
    """
    job, network = detect_job(os.environ), NetworkOptions.from_environ(os.environ)
    assert job.rendezvous is not None, "the launcher starts this"
    assert job.secret is not None, "the launcher starts this"
    tls, deadline = network.make_tls(), time.monotonic() + seconds
    client = RendezvousClient(job.rendezvous, job.secret, job.rank, seconds, tls)
    try:
        address = client.get(ADDRESS_KEY, seconds).decode()
    finally:
        client.close()
    made = None if state is None else state[0](*state[1], **state[2])
    me = Identity(ProcessRole.RANK, job.rank, CALLS_PURPOSE)
    deadline = max(deadline, time.monotonic() + seconds)
    connection = open_connection(split_address(address), job.secret, me, MAX_CALL_MESSAGE_BYTES, deadline, tls)
    connection.keep_alive(network.peer_timeout_seconds)
    driver = _DriverConnection(connection)
    send_notes_by(lambda note: driver.send(NoteBegins(os.fstat(note).st_size), note))
    try:
        while True:
            driver.send(NextCall())
            call = driver.receive()
            if not isinstance(call, CallBegins):
                return
            _serve(driver, call, job.rank, made)
    except ConnectionError as error:
        raise LaunchError(f"the driver has gone: {error}") from None
    finally:
        send_notes_by(None)
        driver.close()


def _serve(driver: _DriverConnection, call: CallBegins, rank: int, state: Any) -> None:
    payload = _fetch(driver, call)
    try:
        func, args, kwargs = _load(payload)
        result = func(state, *args, **kwargs) if call.with_state else func(*args, **kwargs)
        packed = pack_object(result, f"what the function returned in rank {rank} ({type(result).__name__})")
        ended = CallEnded(call.number, False, False, 0, "", os.fstat(packed).st_size)
    except BaseException as error:  # noqa: BLE001  all of them are reported
        report, packed = failure_report(rank, error), pack_error(error)
        ended = CallEnded(
            call.number, True, report.is_victim, report.exit_code, report.text[:_MAX_TEXT], os.fstat(packed).st_size
        )
    try:
        driver.send(ended, packed)
    finally:
        os.close(packed)


def _fetch(driver: _DriverConnection, call: CallBegins) -> int:
    """Fetch the pickle of a call; returns its descriptor."""
    payload = PayloadFile()
    while payload.num_bytes < call.num_bytes:
        driver.send(GetCallPiece(call.number, payload.num_bytes))
        piece = driver.receive()
        assert isinstance(piece, CallPiece), "it was asked for"
        payload.write(piece.data)
    payload.seal()
    return payload.descriptor


def _load(payload: int) -> tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]:
    try:
        func, args, kwargs = unpack_object(payload)
    except Exception as error:
        error.add_note("the function, or an argument, cannot be loaded in the rank")
        raise
    finally:
        os.close(payload)
    return func, args, kwargs
