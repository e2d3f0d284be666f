"""Executor of functions on an engine's hosts: the ranks stay, and run one function after the other."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from typing import Any, Self

from reigen.cluster.membership.rendezvous import RendezvousClient, split_address
from reigen.errors import ArgumentError, AuthenticationError, LaunchError, RankFailedError, WireError
from reigen.launch.options import NetworkOptions
from reigen.launch.payload import PayloadFile
from reigen.net.auth import Identity, ProcessRole
from reigen.net.connection import Connection, ConnectionOptions
from reigen.net.listener import MessageListener
from reigen.runner.call import rank_raised_error
from reigen.runner.calls import (
    ADDRESS_KEY,
    CALLS_PURPOSE,
    DRIVER_CODEC,
    MAX_CALL_MESSAGE_BYTES,
    PIECE_BYTES,
    RANK_CODEC,
    CallBegins,
    CallEnded,
    CallPiece,
    DriverCallMessage,
    GetCallPiece,
    NextCall,
    NoMoreCalls,
    NoteBegins,
    ResultPiece,
    serve_calls,
)
from reigen.runner.engine_channel import RanksStarted
from reigen.runner.engine_jobs import Cancellation, EngineAgents, EngineJobOptions, run_on_engine
from reigen.runner.result_channel import RankReport
from reigen.runner.serialization import pack_object, unpack_object, unpickle_exception

#: Seconds that ranks may take to find the driver, at least.
_CONNECT_SECONDS = 30.0


class _Call:
    """Call in all its ranks."""

    def __init__(self, number: int, payload: int, with_state: bool, ranks: Sequence[int]) -> None:
        self.number, self.payload, self.with_state = number, payload, with_state
        self.futures: dict[int, Future[Any]] = {rank: Future() for rank in ranks}
        for future in self.futures.values():
            future.set_running_or_notify_cancel()  # it cannot be cancelled alone
        #: Ranks that have not fetched the pickle.
        self.unfetched = set(ranks)
        #: Until when ranks have to end it, once one has failed.
        self.deadline: float | None = None
        self.first_error: BaseException | None = None
        #: It came from a rank that failed because another one had gone.
        self.first_is_victim = False

    def mark_fetched(self, rank: int) -> None:
        if rank in self.unfetched:
            self.unfetched.discard(rank)
            if not self.unfetched:
                os.close(self.payload)

    def close(self) -> None:
        if self.unfetched:
            self.unfetched.clear()
            os.close(self.payload)

    def fail(self, error: BaseException) -> None:
        """Give every future that has no outcome this one."""
        self.first_error = self.first_error or error
        for future in self.futures.values():
            if not future.done():
                future.set_exception(error)


class _RankState:
    """Driver's view of a rank."""

    def __init__(self) -> None:
        self.client: Connection | None = None
        self.is_free = False
        self.queue: deque[_Call] = deque()
        self.running: _Call | None = None
        #: What is coming: its header and the pickle until now.
        self.incoming: tuple[CallEnded | NoteBegins, PayloadFile] | None = None


class EngineExecutor:
    """Ranks on an engine's hosts that stay, for functions that are run one after the other. A context manager.

    Each function that is submitted runs in the rank's main thread, in the order of submission. Where one raises, the
    others may end theirs; those that do not within ``options.grace_seconds`` are stopped, and so is the whole job:
    then, and when a rank's process dies, the executor is of no further use.

    Args:
        agents: the hosts, and how agents are started there.
        options: options of the job.
        state: makes a state in each rank, when it starts: a callable, its arguments and keyword arguments.
        on_note: gets a rank and what it has sent by `send_note`, in a thread of the executor's.
    """

    def __init__(
        self,
        agents: EngineAgents,
        options: EngineJobOptions | None = None,
        *,
        state: tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]] | None = None,
        on_note: Callable[[int, Any], None] | None = None,
    ) -> None:
        self._agents, self._options = agents, options or EngineJobOptions()
        self._state, self._on_note = state, on_note
        self._cancellation = Cancellation()
        self._calls = _CallService(self)
        self._thread: threading.Thread | None = None
        self._is_ready = threading.Event()
        self._error: BaseException | None = None
        #: Host of each rank, once they are started.
        self.hosts: list[str] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self._options.num_ranks or self._agents.num_slots

    def start(self) -> None:
        """Start the ranks, and wait until all of them are ready for calls; raises what `run_on_engine` does."""
        if self._thread is not None:
            raise ArgumentError("this executor was started before; make a new one")
        self._thread = threading.Thread(target=self._run, name="reigen-executor", daemon=True)
        self._thread.start()
        try:
            self._is_ready.wait()
        except BaseException:
            self.cancel("interrupted while it was starting")
            self._thread.join()
            raise
        if self._error is not None:
            self._thread.join()
            raise self._error

    def submit(
        self,
        func: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        with_state: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> list[Future[Any]]:
        """Have ``func(*args, **kwargs)`` called in ranks; returns a future for each of them.

        Args:
            func: the function.
            args: its arguments.
            kwargs: its keyword arguments.
            with_state: the rank's state comes before ``args``.
            ranks: where; None: everywhere.

        Raises:
            ArgumentError: there is no such rank, or no state; or the executor was not started, or has ended.
            UnsupportedTypeError: ``func`` or an argument cannot be pickled.
        """
        return list(self._submit(func, args, kwargs, with_state, ranks).futures.values())

    def run(
        self,
        func: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        with_state: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> list[Any]:
        """Call a function in ranks, as `submit` does, and return its results, by rank.

        Raises:
            RankFailedError: the first rank that failed by itself, with its host and traceback.
            LaunchError: the job was cancelled.
        """
        call = self._submit(func, args, kwargs, with_state, ranks)
        futures = list(call.futures.values())
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
            wait(futures)
        except KeyboardInterrupt:
            self.cancel("interrupted")
            raise
        if call.first_error is not None:
            raise call.first_error
        return [future.result() for future in futures]

    def cancel(self, reason: str = "") -> None:
        """End the job at once, from any thread; calls raise LaunchError."""
        self._cancellation.cancel(reason)

    def shutdown(self) -> None:
        """End the ranks after their last call, and wait until nothing is left. May be called twice."""
        if self._thread is None or not self._thread.is_alive():
            return
        self._calls.end()
        try:
            self._thread.join()
        except KeyboardInterrupt:
            self.cancel("interrupted")
            self._thread.join()
            raise

    def _submit(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        with_state: bool,
        ranks: Sequence[int] | None,
    ) -> _Call:
        if with_state and self._state is None:
            raise ArgumentError("the ranks of this executor have no state")
        chosen = range(self.num_ranks) if ranks is None else ranks
        if unknown := [rank for rank in chosen if not 0 <= rank < self.num_ranks]:
            raise ArgumentError(f"there is no rank {unknown[0]}: the job has {self.num_ranks}")
        if self._thread is None or self._error is not None or self._calls.is_ending:
            reason = f": {self._error}" if self._error is not None else ""
            raise ArgumentError(f"this executor was not started, or has ended{reason}")
        payload = pack_object((func, tuple(args), dict(kwargs or {})), "the function, or one of its arguments,")
        return self._calls.add(payload, with_state, chosen)

    def _run(self) -> None:
        """Run the job, in a thread."""
        seconds = max(_CONNECT_SECONDS, self._options.start_timeout_seconds or 0.0)
        error: BaseException = LaunchError("the executor was shut down")
        try:
            run_on_engine(
                serve_calls,
                (self._state, seconds),
                agents=self._agents,
                options=self._options,
                cancellation=self._cancellation,
                on_started=self._on_started,
            )
        except BaseException as failure:  # noqa: BLE001  it is raised where the user calls
            self._error = error = self._calls.failure or failure
        finally:
            self._calls.close(error)
            self._is_ready.set()

    def _on_started(self, services: RanksStarted, hosts: list[str]) -> None:
        self.hosts = list(hosts)
        self._calls.start(services, self.num_ranks)

    # ---------------------------------------------------------------- for the service

    def ready(self) -> None:
        """All ranks have connected."""
        self._is_ready.set()

    def host(self, rank: int) -> str:
        """Return the host of a rank."""
        return self.hosts[rank] if rank < len(self.hosts) else ""

    @property
    def grace_seconds(self) -> float:
        """Seconds that ranks have to end a call that has failed in another."""
        return self._options.grace_seconds

    def note(self, rank: int, payload: int) -> None:
        """Take a note of a rank."""
        if self._on_note is not None:
            self._on_note(rank, unpack_object(payload))


class _CallService:
    """Driver's end of the connections of all ranks; a thread of its own serves them."""

    def __init__(self, executor: EngineExecutor) -> None:
        self._executor = executor
        self._lock = threading.Lock()
        self._ranks: list[_RankState] = []
        self._num_calls = 0
        self._listener: MessageListener | None = None
        self._thread: threading.Thread | None = None
        self._calls: dict[int, _Call] = {}
        self._closing_error: BaseException | None = None
        self.is_ending = False
        #: The first failure of a function after which others did not end theirs.
        self.failure: BaseException | None = None

    def start(self, services: RanksStarted, num_ranks: int) -> None:
        """Listen for the ranks, and tell them where."""
        network = NetworkOptions.from_environ(os.environ)
        tls = network.make_tls()
        host = split_address(services.rendezvous)[0]
        me = Identity(ProcessRole.LAUNCHER, 0, CALLS_PURPOSE)
        options = ConnectionOptions(
            services.secret, me, MAX_CALL_MESSAGE_BYTES, tls, network.peer_timeout_seconds, bulk=True
        )
        self._ranks = [_RankState() for _ in range(num_ranks)]
        self._listener = MessageListener((host, 0), options, self._receive, self._gone)
        self._thread = threading.Thread(target=self._serve, name="reigen-calls", daemon=True)
        self._thread.start()
        client = RendezvousClient(services.rendezvous, services.secret, 0, _CONNECT_SECONDS, tls)
        try:
            client.put(ADDRESS_KEY, self._listener.address.encode())
        finally:
            client.close()

    def add(self, payload: int, with_state: bool, ranks: Sequence[int]) -> _Call:
        """Add a call; the payload is the service's from now on."""
        with self._lock:
            call = _Call(self._num_calls, payload, with_state, ranks)
            self._num_calls += 1
            if self._closing_error is not None:
                call.fail(self._closing_error)
                call.close()
                return call
            self._calls[call.number] = call
            for rank in ranks:
                self._ranks[rank].queue.append(call)
        self._wake()
        return call

    def end(self) -> None:
        """Let the ranks end after their last call."""
        self.is_ending = True
        self._wake()

    def close(self, error: BaseException) -> None:
        """End all connections; calls without an outcome get this one. May be called twice."""
        with self._lock:
            self._closing_error = error
        if self._listener is not None:
            self._listener.end()
        if self._thread is not None:
            self._thread.join()
        if self._listener is not None:
            self._listener.close()
        for call in self._calls.values():
            call.fail(error)
            call.close()
        for rank in self._ranks:
            if rank.incoming is not None:
                os.close(rank.incoming[1].descriptor)
                rank.incoming = None
        self._calls.clear()

    def _wake(self) -> None:
        if self._listener is not None:
            self._listener.wake()

    def _serve(self) -> None:
        assert self._listener is not None, "it was made"
        while self._listener.turn(self._due()):
            self._dispatch()

    def _due(self) -> float | None:
        with self._lock:
            return min((call.deadline for call in self._calls.values() if call.deadline is not None), default=None)

    def _dispatch(self) -> None:
        """Give free ranks their next calls; give up calls that ranks do not end."""
        with self._lock:
            for rank, state in enumerate(self._ranks):
                if state.is_free and state.client is not None and (state.queue or self.is_ending):
                    state.is_free = False
                    self._begin(rank, state)
            late = [call for call in self._calls.values() if call.deadline is not None]
        for call in late:
            if call.deadline is not None and time.monotonic() >= call.deadline:
                self.failure = call.first_error
                self._executor.cancel(f"{call.first_error}; other ranks did not end their call")
                call.deadline = None

    def _begin(self, rank: int, state: _RankState) -> None:
        assert state.client is not None, "it is free"
        if not state.queue:
            self._send(state.client, NoMoreCalls())
            return
        call = state.running = state.queue.popleft()
        self._send(state.client, CallBegins(call.number, os.fstat(call.payload).st_size, call.with_state))

    def _send(self, client: Connection, message: DriverCallMessage) -> None:
        assert self._listener is not None, "it was made"
        self._listener.send(client, DRIVER_CODEC.encode(message))

    def _receive(self, client: Connection, data: bytes) -> None:
        rank = client.peer.rank
        if client.peer.role is not ProcessRole.RANK or client.peer.purpose != CALLS_PURPOSE:
            raise AuthenticationError("a process that is no rank asks for calls")
        if rank >= len(self._ranks) or self._ranks[rank].client not in {None, client}:
            raise WireError(f"a second process says that it is rank {rank}")
        state = self._ranks[rank]
        state.client = client
        match RANK_CODEC.decode(data):
            case NextCall():
                state.is_free = True
                if all(each.client is not None for each in self._ranks):
                    self._executor.ready()
            case GetCallPiece(number, offset):
                self._send_piece(client, rank, state, number, offset)
            case CallEnded() | NoteBegins() as header:
                if isinstance(header, CallEnded) and (state.running is None or state.running.number != header.number):
                    raise WireError("a rank ends a call that it does not have")
                if state.incoming is not None:
                    raise WireError("a rank starts over before it has sent everything")
                state.incoming = header, PayloadFile()
                self._complete(rank, state)
            case ResultPiece(piece):
                if state.incoming is None:
                    raise WireError("a rank sends what belongs to nothing")
                state.incoming[1].write(piece)
                self._complete(rank, state)

    def _send_piece(self, client: Connection, rank: int, state: _RankState, number: int, offset: int) -> None:
        call = state.running
        if call is None or call.number != number or rank not in call.unfetched:
            raise WireError("a rank asks for a call that it does not have")
        data = os.pread(call.payload, PIECE_BYTES, offset)
        self._send(client, CallPiece(data))
        if offset + len(data) >= os.fstat(call.payload).st_size:
            call.mark_fetched(rank)

    def _complete(self, rank: int, state: _RankState) -> None:
        """Handle what has come if it is complete."""
        assert state.incoming is not None, "it has begun"
        header, payload = state.incoming
        if payload.num_bytes < header.num_bytes:
            return
        state.incoming = None
        try:
            payload.seal()
            if isinstance(header, NoteBegins):
                with suppress(Exception):  # the user's function
                    self._executor.note(rank, payload.descriptor)
            else:
                self._end_call(rank, state, header, payload.descriptor)
        finally:
            os.close(payload.descriptor)

    def _end_call(self, rank: int, state: _RankState, ended: CallEnded, payload: int) -> None:
        call, state.running = state.running, None
        assert call is not None, "looked at before"
        call.mark_fetched(rank)
        size, host = len(self._ranks), self._executor.host(rank)
        future = call.futures[rank]
        try:
            value = unpack_object(payload)
            error: BaseException | None = None
        except Exception as failure:  # noqa: BLE001  a class's __setstate__ can raise anything
            value, what = None, f"what the function returned in rank {rank} of {size} cannot be loaded here"
            error = RankFailedError(f"{what}: {type(failure).__name__}: {failure}", 0, rank=rank, host=host)
        if ended.failed and error is None:
            text, frozen = value
            report = RankReport(rank, True, ended.is_victim, ended.exit_code, ended.text)
            error = rank_raised_error(report, size, text, host)
            error.__cause__ = unpickle_exception(frozen)
        if error is None:
            future.set_result(value)
        else:
            if call.first_error is None or (call.first_is_victim and not ended.is_victim):
                call.first_error, call.first_is_victim = error, ended.is_victim
            call.deadline = call.deadline or time.monotonic() + self._executor.grace_seconds
            future.set_exception(error)
        if all(each.done() for each in call.futures.values()):
            with self._lock:
                self._calls.pop(call.number, None)
            call.close()

    def _gone(self, client: Connection, silent: bool) -> None:
        """Forget a connection; the job's monitor says why the rank has gone."""
        for state in self._ranks:
            if state.client is client:
                state.is_free = False
