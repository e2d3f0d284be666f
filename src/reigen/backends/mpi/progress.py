"""Wait for MPI operations, with deadlines and detection of ranks that are missing or have given up.

MPI reports the end of an operation, or nothing. So ranks that wait for longer than a moment send each other small
messages beside the data:

* _PRESENT: the rank is in the middle of its n-th operation. Ranks that do not send it are missing.
* _GIVEN_UP: the rank cannot go on, and why.

Each begins with a name that the backend's ranks agreed upon, because MPI may use the numbers of a communicator again
that has been freed, messages of which were still on their way.
"""

from __future__ import annotations

import hashlib
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from reigen.cluster.bootstrap.mpi_library import MpiExitHandler
from reigen.cluster.membership.abort_message import AbortMessage, error_from_abort, has_left, make_abort_message
from reigen.errors import CollectiveError, DeadlineError, PeerLostError, format_ranks

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm, Request

    from reigen.backends.base import FailureCheck, MissingRanksCallback, ProgressHook

#: Seconds between looks at the other ranks, and the deadline.
LOOK_SECONDS = 0.1
#: Seconds of looking for the end of an operation without sleeping, giving way to others of this host.
_YIELD_SECONDS = 0.002
#: Seconds that data of a rank that has left may be on their way.
_LEAVING_SECONDS = 2.0
_SHORTEST_SLEEP, _LONGEST_SLEEP = 50e-6, 500e-6
#: Seconds of asking which rank has gone after MPI reported that one has.
_ASK_SECONDS = 1.0
_TAG = 1
_MAX_BYTES = 4096  # an `AbortMessage` has less than 3950


class _StatusMessage(msgspec.Struct, array_like=True, frozen=True):
    """Message between ranks beside the data; ``abort`` is that of one that cannot go on."""

    backend: bytes
    operation: int
    abort: AbortMessage | None = None


class MpiSharedState:
    """State that all MPI backends of a process share.

    ``exit_handler`` handles operations that are given up; ``failure`` and ``looks`` are those of `MpiNetwork`.
    """

    def __init__(self, failure: FailureCheck, exit_handler: MpiExitHandler, looks: int) -> None:
        self.failure, self.exit_handler, self.looks = failure, exit_handler, looks
        #: Held during every call of MPI: it need not allow two threads at once.
        self.lock = threading.RLock()
        #: The reason why nothing works any more.
        self.error: CollectiveError | None = None

    def fail(self, error: CollectiveError) -> None:
        """Fail every operation from now on; the first error counts."""
        if self.error is None:
            self.error = error
            self.exit_handler.failed(error.reason)


class MpiProgress:
    """Progress of the requests of one backend, on this rank and the others.

    Args:
        communicator: of the backend alone.
        name: the same on its ranks, and different from that of any backend before.
        ranks: their numbers in the job.
        shared_state: shared by the backends of the process.
    """

    def __init__(
        self, communicator: Intracomm, name: bytes, ranks: Sequence[int], shared_state: MpiSharedState
    ) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self.name, self.ranks = name, tuple(ranks)
        self.rank, self.size = communicator.rank, communicator.size
        self.communicator = communicator
        self._shared_state = shared_state
        self._ranks_missing: MissingRanksCallback | None = None
        self._hook: ProgressHook | None = None
        #: number of operations that this rank has begun, and whether it has sent _PRESENT for this one
        self._operation, self._has_reported = 0, False
        #: the last operation for which each rank has sent _PRESENT
        self._present = [0] * self.size
        #: requests on their way, with the memory that they use
        self._pending: dict[int, tuple[Request, Any]] = {}
        self._sent: list[tuple[Request, Any]] = []
        self._buffer = np.empty(_MAX_BYTES, np.uint8)
        #: when it was first known that a rank that is waited for has left
        self._departed_at: float | None = None
        self._closed = False

    # -- operations ---------------------------------------------------------------------------------------------------

    def begin(self, ranks_missing: MissingRanksCallback | None, hook: ProgressHook | None) -> None:
        """Begin the next operation, with the backend's callbacks; raises CollectiveError if some rank has given up."""
        self._ranks_missing, self._hook = ranks_missing, hook
        self._operation += 1
        self._has_reported = False
        with self._shared_state.lock:
            self._receive_status()
        if self._shared_state.error is not None:
            raise self._shared_state.error.anew()

    def post(self, start: Callable[[], Request], *memory: object) -> Request:
        """Start a request, and keep its memory until it has been waited for; raises CollectiveError: MPI refused."""
        try:
            with self._shared_state.lock:
                request = start()
        except self._mpi.Exception as error:
            raise self._broken_by(error) from error
        self._pending[id(request)] = (request, memory)
        return request

    def wait(self, request: Request, deadline: float) -> None:
        """Wait until a request is complete. Errors are those of `reigen.backends.base`; they break the backend."""
        try:
            for _ in range(self._shared_state.looks + 1):
                if self._is_complete(request):
                    break
            else:
                self._wait_long(request, deadline)
        except self._mpi.Exception as error:
            raise self._broken_by(error) from error
        except BaseException as error:
            self.break_off(error)
            raise
        self._pending.pop(id(request), None)

    def _is_complete(self, request: Request) -> bool:
        with self._shared_state.lock:
            return request.Test()

    def _wait_long(self, request: Request, deadline: float) -> None:
        now = time.monotonic()
        spin_until, look, pause = now + _YIELD_SECONDS, now + LOOK_SECONDS, _SHORTEST_SLEEP
        hook, poll = self._hook, select.poll()
        if hook is not None:
            poll.register(hook.descriptor, select.POLLIN)
        while not self._is_complete(request):
            if hook is not None and poll.poll(0):
                hook.work()
            now = time.monotonic()
            if now >= look or now >= deadline:
                look = now + LOOK_SECONDS
                error = self._look(now, deadline)
                if error is not None and not self._is_complete(request):
                    raise error
            elif now < spin_until:
                os.sched_yield()
            else:
                time.sleep(min(pause, max(0.0, deadline - now)))
                pause = min(pause * 1.25, _LONGEST_SLEEP)

    # -- the other ranks ----------------------------------------------------------------------------------------------

    def _look(self, now: float, deadline: float) -> CollectiveError | None:
        """Return the reason to give up, or None. Calls ``ranks_missing``."""
        with self._shared_state.lock:
            if not self._has_reported:
                self._has_reported = True
                self._send_status(_StatusMessage(self.name, self._operation))
            self._receive_status()
        missing = [rank for rank, last in enumerate(self._present) if rank != self.rank and last < self._operation]
        if self._shared_state.error is not None:
            return self._shared_state.error
        if missing and self._ranks_missing is not None:
            self._ranks_missing(missing)
        others = [self.ranks[member] for member in missing or range(self.size) if member != self.rank]
        error = self._shared_state.failure(others)
        if has_left(error):
            self._departed_at = self._departed_at or now
            if now < min(deadline, self._departed_at + _LEAVING_SECONDS):
                return None
        if error is not None or now < deadline:
            return error
        if not missing:
            return DeadlineError("all ranks take their part, but MPI did not bring the data in time (REIGEN_DEADLINE)")
        return DeadlineError(
            f"rank(s) {format_ranks(others)} did not take their part in time (REIGEN_DEADLINE)", ranks=others
        )

    def _receive_status(self) -> None:
        """Take the ranks' messages beside the data."""
        status = self._mpi.Status()
        while self.communicator.Iprobe(self._mpi.ANY_SOURCE, _TAG, status):
            sender, length = status.Get_source(), status.Get_count(self._mpi.BYTE)
            if length > _MAX_BYTES:
                raise CollectiveError(f"rank {self.ranks[sender]} sent {length} bytes where a note was expected")
            self.communicator.Recv([self._buffer, length, self._mpi.BYTE], sender, _TAG)
            try:
                note = msgspec.msgpack.decode(self._buffer[:length].tobytes(), type=_StatusMessage)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise CollectiveError(f"a note of rank {self.ranks[sender]} cannot be read") from error
            if note.backend != self.name:
                continue  # of a backend that is no more
            self._present[sender] = max(self._present[sender], note.operation)
            if note.abort is not None:
                self._shared_state.fail(error_from_abort(note.abort, f"rank {self.ranks[sender]}"))

    def give_up(self, error: CollectiveError) -> None:
        """Report to the other ranks of this backend, and to its waiting thread here, that this one cannot go on."""
        self._shared_state.fail(error)
        abort = make_abort_message(error, self.ranks[self.rank])
        with self._shared_state.lock:
            self._send_status(_StatusMessage(self.name, self._operation, abort))

    def _send_status(self, note: _StatusMessage) -> None:
        self._drop_sent()
        data = np.frombuffer(msgspec.msgpack.encode(note), np.uint8)
        for other in range(self.size):
            if other != self.rank:
                try:
                    request = self.communicator.Isend([data, self._mpi.BYTE], other, _TAG)
                except self._mpi.Exception:  # it is gone; the others get it nevertheless
                    continue
                self._sent.append((request, data))

    def _drop_sent(self) -> None:
        self._sent = [(request, data) for request, data in self._sent if not request.Test()]

    def part(self, members: Sequence[int], number: int) -> MpiProgress | None:
        """Make the progress of some of the ranks, ascending; None where this is none of them. All members call it.

        ``number`` counts those that have been made so far, this one too.
        """
        if self.rank not in members:
            return None
        with self._shared_state.lock:
            communicator = self.communicator.Create_group(self.communicator.Get_group().Incl(list(members)))
        name = hashlib.sha256(self.name + number.to_bytes(8)).digest()[: len(self.name)]
        return MpiProgress(communicator, name, [self.ranks[member] for member in members], self._shared_state)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _broken_by(self, error: Exception) -> CollectiveError:
        """Translate an error of MPI."""
        text = str(error).replace("\n", " ")
        until, pause = time.monotonic() + _ASK_SECONDS, threading.Event()
        others = [rank for rank in self.ranks if rank != self.ranks[self.rank]]
        while (known := self._shared_state.failure(others)) is None and time.monotonic() < until:
            pause.wait(LOOK_SECONDS / 2)
        gone = [self.ranks[member] for member in self._dead()]
        if known is None and gone:
            known = PeerLostError(f"rank(s) {format_ranks(gone)} died, says MPI ({text})", ranks=gone)
        known = known or CollectiveError(f"MPI failed: {text}")
        self.break_off(known)
        return known

    def _dead(self) -> list[int]:
        """Return ranks that died, as far as MPI knows: Open MPI does with --with-ft ulfm."""
        try:
            with self._shared_state.lock:
                failed, group = self.communicator.Get_failed(), self.communicator.Get_group()
                return failed.Translate_ranks(None, group)
        except (self._mpi.Exception, NotImplementedError, AttributeError):
            return []

    def break_off(self, error: BaseException) -> None:
        """Give up pending requests: they may still write to their memory, which is kept therefore."""
        known = error if isinstance(error, CollectiveError) else CollectiveError(f"interrupted: {error!r}")
        self._shared_state.fail(known)
        self._shared_state.exit_handler.keep(self.communicator, *self._pending.values(), *self._sent)
        self._pending.clear()
        self._sent.clear()

    def close(self) -> None:
        """Free the communicator, unless something went wrong."""
        if self._closed or self._mpi.Is_finalized():  # by the script: nothing is left to free then
            return
        self._closed = True
        with self._shared_state.lock:
            self._drop_sent()
            if self._shared_state.error is None and not self._sent and not self._pending:
                self.communicator.Free()
            else:
                self._shared_state.exit_handler.keep(self.communicator, *self._pending.values(), *self._sent)
