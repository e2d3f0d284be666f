"""Witness of an elastic job: a voter on no host of the job, for an even number of hosts.

Its memory is a register: states with numbers, of which each is created once, by whoever is the first, and is never
changed. Any member that asks the witness is the witness for a moment: it reads the latest state, lets it answer
(`views.paxos.Acceptor`), creates the next state, and only then believes the answer. Where another one was faster, it
begins anew. So a witness needs no process of its own, and two members never get answers that contradict each other.

A state that is not needed any more is emptied, and not removed: a process that was stopped for hours, and goes on where
it was about to create a state, must still find it there.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from reigen.cluster.membership.elastic.messages import VoterReply, VoterRequest
from reigen.cluster.membership.rendezvous import Rendezvous
from reigen.cluster.membership.views.paxos import Acceptor
from reigen.cluster.membership.views.record import VoterId
from reigen.cluster.membership.views.slots import MAX_ACCEPTOR_BYTES
from reigen.errors import ConfigError, ReigenError, WireError
from reigen.files import check_can_be_written, privacy_problem
from reigen.net.codec import MessageCodec

_log = logging.getLogger(__name__)

#: Name of the witness as a voter; no host has it.
WITNESS_NAME = "(witness)"
_CODEC: MessageCodec[Acceptor] = MessageCodec(Acceptor, MAX_ACCEPTOR_BYTES)
#: So many of the latest states are kept whole.
_NUM_KEPT = 8
#: Others may be faster so often in a row.
_MOST_TRIES = 100
_CLOSE_SECONDS = 2.0


class WitnessRegister(Protocol):
    """Numbered states of a witness. Methods raise OSError or ReigenError where it cannot be reached."""

    def latest(self) -> tuple[int, bytes]:
        """Return the number of the latest state, and the state; -1 and nothing where there is none."""

    def create(self, number: int, state: bytes) -> bool:
        """Create a state; returns False if there is one of that number."""

    def empty(self, number: int) -> None:
        """Drop the contents of an old state, but not its number."""


class DirectoryRegister:
    """Register in a directory that all hosts share: link(2) makes a file of a name only once, also by NFS.

    Args:
        directory: it must be there, and is this job's alone.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def latest(self) -> tuple[int, bytes]:
        """Return the latest state; the list of files may be an old one, by NFS."""
        numbers = [int(name[6:]) for name in os.listdir(self._directory) if _is_state(name)]  # noqa: PTH208
        number, state = max(numbers, default=0) - 1, b""
        with suppress(FileNotFoundError):
            while True:
                state = (self._directory / f"state.{number + 1}").read_bytes()
                number += 1
        return number, state

    def create(self, number: int, state: bytes) -> bool:
        """Link a file under a name; the number of its links says whether that was done, also where a reply is lost."""
        temporary = self._directory / f".{secrets.token_hex(8)}.tmp"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(state)
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):  # where packets are lost, it may have been this very call
                os.link(temporary, self._directory / f"state.{number}")
            return os.stat(temporary).st_nlink == 2  # noqa: PTH116
        finally:
            temporary.unlink()

    def empty(self, number: int) -> None:
        """Shorten the file."""
        with suppress(FileNotFoundError):
            os.truncate(self._directory / f"state.{number}", 0)


def _is_state(name: str) -> bool:
    return name.startswith("state.") and name[6:].isdecimal()


class RendezvousRegister:
    """Register in the launcher's service, for a launcher on a host of its own; it is lost with the launcher.

    Args:
        rendezvous: of the launcher; used by this alone.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous

    def latest(self) -> tuple[int, bytes]:
        """Return the latest state, from the one that was the latest at some time on."""
        hint = self._rendezvous.peek("witness/latest") or b"0"
        number, found = (int(hint) if hint.isdigit() else 0) - 1, b""
        while (state := self._rendezvous.peek(f"witness/{number + 1}")) is not None:
            number, found = number + 1, state
        return number, found

    def create(self, number: int, state: bytes) -> bool:
        """Put a state, with a mark of its own in front: two that are equal must not be taken for one."""
        marked = secrets.token_bytes(8) + state
        is_first = self._rendezvous.put_first(f"witness/{number}", marked) == marked
        if is_first:
            self._rendezvous.put("witness/latest", str(number).encode())
        return is_first

    def empty(self, number: int) -> None:
        """Put nothing in its place."""
        self._rendezvous.put(f"witness/{number}", b"")


class WitnessVoter:
    """The witness, as a process asks it. One thread uses it.

    Args:
        register: its memory.
        num_mark_bytes: in front of a state as the register returns it.
    """

    def __init__(self, register: WitnessRegister, num_mark_bytes: int = 0) -> None:
        self._register, self._num_mark_bytes = register, num_mark_bytes

    @property
    def id(self) -> VoterId:
        """Identity of the witness; begins it where it has no memory."""
        return self._read()[1].id

    def handle(self, message: VoterRequest) -> tuple[VoterId, VoterReply | None]:
        """Take a message for the witness; returns who answers, and the answer, which is written then.

        Raises:
            OSError, ReigenError: it cannot be reached, or its memory is damaged.
        """
        for _ in range(_MOST_TRIES):
            number, before = self._read()
            after, reply = before.handle(message)
            if after is before:
                return before.id, reply
            if self._register.create(number + 1, _CODEC.encode(after)):
                if number >= _NUM_KEPT:
                    self._register.empty(number - _NUM_KEPT)
                return before.id, reply
        raise WireError("the witness is asked by too many at a time")

    def _read(self) -> tuple[int, Acceptor]:
        number, data = self._register.latest()
        while number < 0:
            first = Acceptor(VoterId(WITNESS_NAME, time.time_ns() // 1000))
            self._register.create(0, _CODEC.encode(first))
            number, data = self._register.latest()
        return number, _CODEC.decode(data[self._num_mark_bytes :])


class WitnessThread:
    """A process's questions to the witness, in a thread of its own: others do not wait while it cannot be reached.

    Args:
        voter: the witness.
        on_reply: gets answers, by that thread.
    """

    def __init__(self, voter: WitnessVoter, on_reply: Callable[[VoterId, VoterReply], None]) -> None:
        self._voter, self._on_reply = voter, on_reply
        self._changed = threading.Condition()
        #: By kind, the latest question: earlier ones are of no use.
        self._questions: dict[type[VoterRequest], VoterRequest] = {}
        self._is_closed = False
        self._problem = ""
        self._thread = threading.Thread(target=self._serve, name="reigen-witness", daemon=True)
        self._thread.start()

    def ask(self, message: VoterRequest) -> None:
        """Ask, soon; without an answer, the caller asks again."""
        with self._changed:
            self._questions.pop(type(message), None)
            self._questions[type(message)] = message
            self._changed.notify()

    def close(self) -> None:
        """Have the thread end, and wait for it a moment."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(_CLOSE_SECONDS)

    def _serve(self) -> None:
        while (message := self._next()) is not None:
            try:
                voter, reply = self._voter.handle(message)
            except (OSError, ReigenError) as error:
                if str(error) != self._problem:
                    self._problem = str(error)
                    _log.warning("the witness of this job cannot be asked: %s", error)
                continue
            self._problem = ""
            if reply is not None and not self._is_closed:
                self._on_reply(voter, reply)

    def _next(self) -> VoterRequest | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._questions)
            return None if self._is_closed else self._questions.pop(next(iter(self._questions)))


def witness_directory(directory: str, secret: bytes) -> Path:
    """Return a job's directory in the one that the user has named."""
    return Path(directory) / f"reigen-witness-{hashlib.sha256(b'witness ' + secret).hexdigest()[:16]}"


def check_witness_directory(directory: str) -> None:
    """Check, on a host of the job, that its witness can be in a directory.

    Raises:
        ConfigError: it is not there, or may not be written to; says what to do.
    """
    if not Path(directory).is_dir():
        raise ConfigError(
            f"--witness-dir {directory}: there is no such directory on this host; create one that all hosts share"
        )
    try:
        check_can_be_written(Path(directory) / "reigen-witness")
    except OSError as error:
        raise ConfigError(
            f"--witness-dir {directory}: it cannot be written to ({error.strerror}); all processes of the job need that"
        ) from None


def make_witness(spec: str, secret: bytes, rendezvous: Callable[[], Rendezvous]) -> WitnessVoter | None:
    """Make the witness that the launcher has named (REIGEN_WITNESS).

    Args:
        spec: ``launcher``, ``dir:PATH``, or empty: there is none.
        secret: the job's.
        rendezvous: makes a connection to the launcher's service.

    Raises:
        ConfigError: it is none of these, or the directory is not there.
    """
    kind, _, path = spec.partition(":")
    if not spec:
        return None
    if spec == "launcher":
        return WitnessVoter(RendezvousRegister(rendezvous()), num_mark_bytes=8)
    if kind != "dir" or not path.startswith("/"):
        raise ConfigError(f"REIGEN_WITNESS is {spec!r}: `reigen run --witness` or --witness-dir set it")
    if not Path(path).is_dir():
        raise ConfigError(f"--witness-dir {path}: there is no such directory on this host, and all hosts must share it")
    directory = witness_directory(path, secret)
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        problem = privacy_problem(directory.lstat())
    except OSError as error:
        problem = str(error.strerror)
    if problem:
        raise ConfigError(f"--witness-dir {path}: {directory} cannot be used: {problem}")
    return WitnessVoter(DirectoryRegister(directory))
