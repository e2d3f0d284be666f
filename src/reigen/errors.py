"""Errors that Reigen raises on purpose.

::

    ReigenError
    +-- NotInitializedError (ValueError)        init() has not been called, or shutdown() has
    +-- ArgumentError (ValueError)              one rank's own argument is wrong; nothing was sent
    |   +-- DuplicateNameError                  the name is still in flight on this rank
    |   +-- UnsupportedError (NotImplementedError)   the operation cannot be done by these ranks, or in this setting
    +-- StepOrderError (AssertionError)         backward, zero_grad and step came in an order that would lose gradients
    +-- UnsupportedTypeError (ValueError, TypeError)   the dtype or kind of tensor is not supported
    +-- ConfigError (ValueError)                an environment variable or option has a wrong value
    +-- CollectiveError (RuntimeError)          a collective failed; also named HorovodInternalError
    |   +-- MismatchError                       ranks disagree; every rank that submitted gets it, the job carries on
    |   |   +-- JoinedError                     another rank has joined: it has no data for this operation
    |   +-- DeadlineError                       a rank did not come in time
    |   +-- PeerLostError                       a rank died, left or was stopped by its launcher
    |   +-- ReplicaError                        the ranks hold different parameters
    |   +-- SharedMemoryError                   the host has not enough memory for a segment
    |   +-- DeviceError                         the ranks' GPUs cannot work together as they were chosen
    +-- LaunchError (RuntimeError)              the launcher could not do what it was asked
    |   +-- RankFailedError                     a rank of run() raised, exited or was killed
    +-- AuthenticationError                     the sender does not know the job's secret
    +-- WireError                               bytes of another process are no message, or too many
    +-- HostsUpdatedInterrupt (RuntimeError)    the hosts of an elastic job have changed
    +-- HorovodVersionMismatchError (ImportError)   a framework of another version than the one that was built for

Beside it stands JobLeft (SystemExit): the end of a process that has left its elastic job in good order.

Facts are fields; the message is made from them, so that programs never parse English.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Self


def format_ranks(ranks: Iterable[int]) -> str:
    """Format numbers of ranks for a message, in ascending order: ``0-2, 5``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


class ReigenError(Exception):
    """Base of everything that Reigen raises on purpose."""

    def anew(self) -> Self:
        """Return the same error, to be raised by the keeper of this one.

        An error that was raised holds the frames that it went through, and these hold their owner: a reference cycle.
        """
        same = type(self).__new__(type(self), *self.args)
        same.__dict__.update(self.__dict__)
        same.__cause__ = self.__cause__
        return same


class NotInitializedError(ReigenError, ValueError):
    """Error for a function that needs the job, called before ``init()`` or after ``shutdown()``."""

    def __init__(self, message: str | None = None) -> None:
        # Scripts for Horovod recognise this error by its text.
        horovod = str(getattr(sys.modules.get("horovod"), "__version__", ""))
        product = "Horovod" if horovod.endswith("+reigen") else "Reigen"
        super().__init__(f"{product} has not been initialized; use hvd.init()." if message is None else message)


class ArgumentError(ReigenError, ValueError):
    """Error for an argument that is wrong on this rank alone. Nothing was sent; other ranks see nothing."""


class DuplicateNameError(ArgumentError):
    """Error for a tensor with a name that is still being processed on this rank."""

    def __init__(self, tensor: str) -> None:
        self.tensor = tensor
        super().__init__(
            f"a tensor named {tensor!r} is still being processed on this rank; "
            "wait for it (synchronize) or give this one another name"
        )


class UnsupportedError(ArgumentError, NotImplementedError):
    """Error for an operation that cannot be done with this number of ranks, this process set or these options."""


class StepOrderError(ReigenError, AssertionError):
    """Error for an optimizer's methods in an order that would lose or corrupt gradients that are on their way."""


class UnsupportedTypeError(ReigenError, ValueError, TypeError):
    """Error for a dtype, or a kind of object, that cannot be communicated."""


class ConfigError(ReigenError, ValueError):
    """Error for an option, environment variable or configuration file with a value that makes no sense."""


class CollectiveError(ReigenError, RuntimeError):
    """Failure of a collective operation.

    Attributes:
        tensor: name of the tensor or operation, or None where the failure concerns them all.
        ranks: the ranks at fault, in ascending order.
        details: one line per rank where ranks differ, by rank.
    """

    def __init__(
        self,
        message: str,
        *,
        tensor: str | None = None,
        ranks: Sequence[int] = (),
        details: Mapping[int, str] | None = None,
    ) -> None:
        self.reason = message
        self.tensor = tensor
        self.ranks = tuple(sorted(ranks))
        self.details = dict(details or {})
        lines = [message if tensor is None else f"{tensor}: {message}"]
        lines += [f"  rank {rank}: {text}" for rank, text in sorted(self.details.items())]
        super().__init__("\n".join(lines))

    def of(self, tensor: str) -> CollectiveError:
        """Return the same error about one tensor, unless it is about one already."""
        if self.tensor is not None:
            return self.anew()
        error = type(self)(self.reason, tensor=tensor, ranks=self.ranks, details=self.details)
        error.__dict__ = {**self.__dict__, "tensor": tensor}
        error.__cause__ = self.__cause__
        return error


class MismatchError(CollectiveError):
    """Error for ranks that submitted different things under one name. Later collectives work."""


class JoinedError(MismatchError):
    """Error for ``ranks`` that have joined and wait for the others; only an allreduce can do without their data."""


class DeadlineError(CollectiveError):
    """Error for ``ranks`` that did not come before the deadline."""


class PeerLostError(CollectiveError):
    """Error for ``ranks`` that died or left. Nothing works until ``shutdown()`` and ``init()``.

    Attributes:
        has_left: the ranks left in good order (shutdown, or the end of the script): they had done their part in
            everything before, and data that they sent over a network may still be on its way.
    """

    has_left: bool = False


class ReplicaError(CollectiveError):
    """Error of a check that found different values on ranks; every rank gets it. Later collectives work.

    ``tensor`` is the first one that differs, ``ranks`` hold another value than most ranks (than the lowest rank, where
    no value has a majority).
    """


class SharedMemoryError(CollectiveError):
    """Error for a shared segment without enough memory.

    Attributes:
        needed_bytes: requested by this rank.
        available_bytes: left on the host, or in a cgroup; None where that is unknown, or was not short.
    """

    needed_bytes: int = 0
    available_bytes: int | None = None

    @classmethod
    def for_request(
        cls,
        needed_bytes: int,
        available_bytes: int | None,
        what: str,
        limit: str = "",
        *,
        keep_free_bytes: int = 0,
        where: str = "on this rank",
    ) -> SharedMemoryError:
        """Make an error with the needed and the available memory (None: unknown), its purpose, and its limit.

        ``limit`` is that of `reigen.resources.memory.AvailableMemory`; ``keep_free_bytes`` of the rest were not to be
        taken; ``where`` is ``on this host`` if all of its ranks together have asked.
        """
        mib = 1 << 20
        have = "unknown" if available_bytes is None else f"{available_bytes / mib:.1f} MiB"
        kept = f", less {keep_free_bytes / mib:.1f} MiB that are kept free" if keep_free_bytes else ""
        error = cls(
            f"not enough shared memory for {what}: {needed_bytes / mib:.1f} MiB needed {where}, {have} available"
            f"{limit and ' '}{limit}{kept}; use a host or container with more memory, or fewer ranks"
        )
        error.needed_bytes, error.available_bytes = needed_bytes, available_bytes
        return error

    @classmethod
    def refused(cls, needed_bytes: int, what: str, reason: str) -> SharedMemoryError:
        """Make an error from the kernel's reason: a limit other than the memory that is left."""
        error = cls(f"no shared memory for {what} ({needed_bytes / (1 << 20):.1f} MiB): {reason}")
        error.needed_bytes = needed_bytes
        return error


class DeviceError(CollectiveError):
    """Error for the ranks' choice of devices; every rank gets it. Collectives on the host work."""


HorovodInternalError = CollectiveError


class LaunchError(ReigenError, RuntimeError):
    """Error of a launcher that could not start or keep the job.

    ``exit_code`` is the launcher's, as a shell's: 127 for no such command, 126 for not executable.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        self.exit_code = exit_code
        super().__init__(message)


class RankFailedError(LaunchError):
    """Error for a function of ``run()`` that did not return in one rank, which failed first and by itself.

    Attributes:
        rank: its number.
        host: where it ran; empty: this one, or unknown.
        exit_code: of its process; 128 + n where a signal n ended it.
        signum: the signal that ended it, or None.
        traceback: of a rank that raised, as Python prints it, else empty.
        __cause__: the exception of that rank, or None where it raised none or it cannot be loaded here.
    """

    def __init__(
        self,
        message: str,
        exit_code: int = 1,
        *,
        rank: int = -1,
        signum: int | None = None,
        traceback: str = "",
        host: str = "",
    ) -> None:
        self.rank, self.signum, self.traceback, self.host = rank, signum, traceback, host
        super().__init__(message, exit_code)


class AuthenticationError(ReigenError):
    """Error for a peer that did not prove that it knows the job's secret, or for data that was changed on its way."""


class WireError(ReigenError):
    """Error for bytes between two processes that are no message of the protocol, or too many."""


class HostsUpdatedInterrupt(ReigenError, RuntimeError):  # noqa: N818  Horovod's name
    """Interrupt because the hosts of an elastic job have changed: its state is kept, and training goes on with them.

    ``skip_sync``: hosts were only removed, so that no rank needs the state of another.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        self.skip_sync = skip_sync
        super().__init__("the hosts of the job have changed")


class JobLeft(SystemExit):
    """End of this process, which has left its elastic job in good order; the exit code is 0.

    Attributes:
        rank, size: what they were in the last view; 0 and 0: it was in none.
        all_leave: so have all other members; nobody goes on.
    """

    def __init__(self, rank: int, size: int, *, all_leave: bool) -> None:
        self.rank, self.size, self.all_leave = rank, size, all_leave
        super().__init__(0)


class HorovodVersionMismatchError(ReigenError, ImportError):
    """Error for a framework of another version than the build's, for scripts that name it; nothing here is built."""
