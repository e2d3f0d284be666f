"""Pools of real rank processes that tests share: starting Python and importing a framework once is enough."""

from __future__ import annotations

import contextlib
import pickle
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, Self

import cloudpickle

from reigen.cluster.membership.control_service import ControlService
from reigen.launch.local_plan import AvailableCpus, JobServices, plan_ranks, single_host_topologies
from reigen.launch.supervision.spawn import reserve_port
from reigen.runner.serialization import unpickle_exception
from reigen.testing.environment import clean_environment
from reigen.testing.failures import RankError, RankFailure
from reigen.testing.leaks import Resources
from reigen.testing.rank_process import RankProcess
from reigen.testing.worker import RankTask

#: Seconds that ranks may still take once one of them has died.
_LAST_SECONDS = 30.0


class RankPool:
    """``size`` rank processes that run one function after another, all at the same time.

    The processes are new interpreters, never forks of the test. Each call has a rendezvous, a secret and an environment
    of its own (docs/design.md names the variables), and its changes of environment, directory and module path are
    undone after it. After a call that failed, the processes are replaced, with all their state.
    For one thread at a time, and the processes end with the thread that started them.

    Args:
        size: the number of ranks.
        env: variables for all calls, on top of the test's own environment without its launcher's variables.
        processes: a list that this pool shares with others of the same environment: they use the same processes.

    Example::

        def topology() -> tuple[int, int]:
            return reigen.rank(), reigen.size()

        with RankPool(2) as pool:
            assert pool.run(topology, init=True) == [(0, 2), (1, 2)]
    """

    def __init__(
        self, size: int, *, env: Mapping[str, str] | None = None, processes: list[RankProcess] | None = None
    ) -> None:
        if size < 1:
            raise ValueError(f"a pool needs at least 1 rank, not {size}")
        self.size = size
        self._environment = {**clean_environment(), **(env or {})}
        #: by rank; there may be more than this pool needs
        self._processes: list[RankProcess] = [] if processes is None else processes
        self._outputs: list[tuple[str, str]] = [("", "")] * size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def resources(self) -> Resources:
        """Descriptors and processes that the pool keeps between calls; for :class:`LeakCheck`."""
        kept = Resources()
        for process in self._processes:
            kept |= process.resources
        return kept

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank; empty before the first call and after one that failed."""
        return tuple(process.pid for process in self._processes[: self.size])

    def output(self, rank: int) -> tuple[str, str]:
        """Return a rank's stdout and stderr of the last call."""
        return self._outputs[rank]

    def run(
        self,
        func: Callable[..., Any],
        *args: Any,
        timeout: float = 120.0,
        init: bool = False,
        check_leaks: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call ``func(*args)`` in every rank at the same time.

        Args:
            func: any function; closures and those of ``__main__`` travel by value.
            args: its arguments, the same everywhere.
            timeout: seconds that all ranks together may take. Once a rank has died, the others get thirty.
            init: call Reigen's init before and shutdown after it. Without, ``func`` does, or does not.
            check_leaks: fail the ranks where the call leaves threads, descriptors, children or shared memory.
            env: variables for this call alone.

        Returns:
            The results, by rank.

        Raises:
            RankError: ranks raised, died or were late; it has the failure of each of them.
        """
        self.start()
        call = cloudpickle.dumps((func, args))
        with _job(self.size, self._environment) as environments:
            processes = self._processes[: self.size]
            for process, environment in zip(processes, environments, strict=True):
                task = RankTask(call, {**environment, **(env or {})}, list(sys.path), init, check_leaks)
                with contextlib.suppress(OSError):  # it is gone: _collect sees that
                    process.begin(task)
            results, failures = self._collect(set(processes), time.monotonic() + timeout, timeout)
            self._outputs = [process.output() for process in processes]
            if failures:
                self.close(kill=True)
        if failures:
            raise RankError(failures, results, self.size)
        return [results[rank] for rank in range(self.size)]

    def start(self) -> None:
        """Start the processes if there are none. ``run`` does it, too."""
        while len(self._processes) < self.size:
            self._processes.append(RankProcess(len(self._processes), self._environment))

    def close(self, *, kill: bool = False) -> None:
        """End the processes, by SIGKILL if ``kill``; waits until they are gone. A later ``run`` starts new ones."""
        for process in self._processes:
            process.connection.close()  # all of them learn at once
        for process in self._processes:
            process.close(kill=kill)
        self._processes.clear()

    def _collect(
        self, waiting: set[RankProcess], deadline: float, timeout: float
    ) -> tuple[dict[int, Any], list[RankFailure]]:
        """Collect results and failures by rank, until all ranks have one or the deadline has passed."""
        results: dict[int, Any] = {}
        failures: list[RankFailure] = []
        while waiting:
            ready = wait(
                [p.connection for p in waiting] + [p.pidfd for p in waiting], max(0.0, deadline - time.monotonic())
            )
            if not ready:
                failures += [_timeout_failure(process, timeout) for process in waiting]
                break
            for process in [p for p in waiting if p.connection in ready or p.pidfd in ready]:
                waiting.remove(process)
                try:
                    reply = process.reply()
                except EOFError:
                    failures.append(_died_failure(process))
                    deadline = min(deadline, time.monotonic() + _LAST_SECONDS)
                    continue
                if reply.result is not None:
                    results[process.rank] = pickle.loads(reply.result)
                    continue
                error = unpickle_exception(reply.error)
                failures.append(
                    RankFailure(process.rank, "raised", reply.traceback, error, stderr=process.stderr_tail())
                )
        return results, failures


def run_ranks(
    func: Callable[..., Any],
    size: int,
    *args: Any,
    timeout: float = 120.0,
    init: bool = False,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call ``func(*args)`` in ``size`` new rank processes; see :meth:`RankPool.run`.

    Returns:
        The results, by rank.
    """
    with RankPool(size, env=env) as pool:
        return pool.run(func, *args, timeout=timeout, init=init)


class PoolCache:
    """Pools that live as long as a test session, one for each size. A rank is the same process in all of them."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}
        self._processes: list[RankProcess] = []

    def get(self, size: int) -> RankPool:
        """Return the pool of ``size`` ranks, made when it is first asked for."""
        return self._pools.setdefault(size, RankPool(size, processes=self._processes))

    @property
    def resources(self) -> Resources:
        """Resources that the pools keep between calls."""
        return RankPool(1, processes=self._processes).resources

    def close(self, *, kill: bool = False) -> None:
        """End all processes; see `RankPool.close`."""
        RankPool(1, processes=self._processes).close(kill=kill)
        self._pools.clear()


@contextlib.contextmanager
def _job(size: int, environment: Mapping[str, str]) -> Iterator[list[dict[str, str]]]:
    """Set up one call's job as the launcher does: a rendezvous service, a port, the environment of each rank."""
    secret = secrets.token_bytes(32)
    server = ControlService(secret)
    with reserve_port() as port:
        server.start()
        try:
            services = JobServices(rendezvous=server.address, secret=secret, master_port=port.getsockname()[1])
            specs, _ = plan_ranks(single_host_topologies(size), services, environment, AvailableCpus(()), bind="none")
            yield [dict(spec.environ) for spec in specs]
        finally:
            server.close()


def _died_failure(process: RankProcess) -> RankFailure:
    code = process.wait()
    text = f"exited with status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
    return RankFailure(process.rank, "died", text, exit_code=code, stderr=process.stderr_tail())


def _timeout_failure(process: RankProcess, timeout: float) -> RankFailure:
    stderr = process.stderr_tail()
    text = f"had not finished (allowed: {timeout:g} s); it was here:\n{process.stack()}"
    return RankFailure(process.rank, "late", text, stderr=stderr)
