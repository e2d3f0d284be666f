"""One job on Ray, supervised by the driver, or by an actor where the driver is a Ray client."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Protocol

from reigen.errors import LaunchError
from reigen.ray.agents import Placement
from reigen.ray.callbacks import NoteCallbacks
from reigen.ray.connection import import_ray, is_client, require_ray
from reigen.ray.elastic_job import ElasticRayJob
from reigen.ray.job_request import Call, JobRequest, job_options
from reigen.runner.engine_executor import EngineExecutor
from reigen.runner.serialization import pickle_exception, unpickle_exception

#: Seconds after which a request for notes is answered without any.
_NOTES_SECONDS = 1.0


class RayJob:
    """Ranks on Ray, which stay until `shutdown`.

    Args:
        request: what it needs.
        on_note: gets what ranks send by `reigen.ray.ray_logger.log`, in a thread of the job's.
    """

    def __init__(self, request: JobRequest, on_note: Callable[[Any], None] | None = None) -> None:
        settings = request.settings
        self._request, self._on_note = request, on_note
        self._placement = Placement(
            request.workers, settings.placement_group_timeout_seconds, request.use_current_group
        )
        self._executor: EngineExecutor | None = None
        #: Calls of `submit` that may not have ended.
        self._futures: list[Future[Any]] = []

    def start(self) -> None:
        """Get the resources and start the ranks; raises what `Placement.allocate` and `EngineExecutor.start` raise."""
        agents = self._placement.allocate()
        try:
            self._executor = EngineExecutor(
                agents, job_options(self._request), state=self._request.state, on_note=self._note
            )
            self._executor.start()
        except BaseException:
            self.shutdown()
            raise

    def _note(self, rank: int, note: object) -> None:
        if self._on_note is not None:
            self._on_note(note)

    def run(self, call: Call) -> list[Any]:
        """Call a function in all ranks; returns the results by rank, or raises the first failure."""
        return self._started.run(call.func, call.args, call.kwargs, with_state=call.with_state)

    def run_single(self, call: Call) -> Any:
        """Call a function in one rank; returns its result."""
        return self.submit(call)[0].result()

    def submit(self, call: Call) -> list[Future[Any]]:
        """Call a function in ranks; returns a future a rank."""
        executor = self._started
        futures = executor.submit(call.func, call.args, call.kwargs, with_state=call.with_state, ranks=call.ranks)
        self._futures = [each for each in self._futures if not each.done()] + futures
        return futures

    @property
    def _started(self) -> EngineExecutor:
        if self._executor is None:
            raise LaunchError("the job on Ray has not been started, or has been shut down: start()")
        return self._executor

    def shutdown(self) -> None:
        """End the ranks, also those that run a function, and give everything back; may be called again."""
        executor, self._executor = self._executor, None
        try:
            if executor is not None:
                if not all(future.done() for future in self._futures):
                    executor.cancel("shutdown() was called before its functions had ended")
                executor.shutdown()
        finally:
            self._placement.release()


class ExecutorJob(Protocol):
    """Ranks on Ray, for the driver, wherever they are supervised."""

    def start(self) -> None:
        """Get the resources and start the ranks."""

    def run(self, call: Call, callbacks: Sequence[Callable[[Any], object]]) -> list[Any]:
        """Call a function in all ranks, and hand their notes to the callbacks; returns the results by rank."""

    def run_single(self, call: Call) -> Any:
        """Call a function in one rank; returns its result."""

    def refs(self, call: Call) -> list[Any]:
        """Call a function in ranks; returns an ObjectRef of each result."""

    def shutdown(self) -> None:
        """End the ranks and give everything back; may be called again."""


def _make_supervised(request: JobRequest, on_note: Callable[[Any], None]) -> RayJob | ElasticRayJob:
    return RayJob(request, on_note) if request.elastic is None else ElasticRayJob(request, on_note)


def make_job(request: JobRequest) -> ExecutorJob:
    """Make the job of this driver.

    Raises:
        RuntimeError: Ray is not initialized.
    """
    require_ray()
    return ClientJob(request) if is_client() else DriverJob(request)


class DriverJob:
    """Job whose supervisor is a child of the driver."""

    def __init__(self, request: JobRequest) -> None:
        self._callbacks = NoteCallbacks()
        self._job = _make_supervised(request, self._callbacks.put)
        self._results: Any = None
        self._numbers = count()

    def start(self) -> None:
        """Get the resources and start the ranks."""
        self._job.start()

    def run(self, call: Call, callbacks: Sequence[Callable[[Any], object]]) -> list[Any]:
        """Call a function in all ranks."""
        with self._callbacks.called(callbacks):
            return self._job.run(resolve_refs(call))

    def run_single(self, call: Call) -> Any:
        """Call a function in one rank."""
        return self._job.run_single(resolve_refs(call))

    def refs(self, call: Call) -> list[Any]:
        """Call a function in ranks; an actor without CPUs holds the results."""
        futures = self._job.submit(resolve_refs(call))
        if self._results is None:
            self._results = import_ray().remote(ResultsActor).options(num_cpus=0, max_restarts=0).remote()
        number = next(self._numbers)
        refs = [self._results.result.remote((number, position)) for position in range(len(futures))]
        for position, future in enumerate(futures):
            future.add_done_callback(_ResultSender(self._results, (number, position)))
        return refs

    def shutdown(self) -> None:
        """End the ranks; the actor with results ends with its last reference."""
        self._results = None
        self._job.shutdown()


class _ResultSender:
    """Sender of a future's result to the actor with results."""

    def __init__(self, actor: Any, key: tuple[int, int]) -> None:
        self._actor, self._key = actor, key

    def __call__(self, future: Future[Any]) -> None:
        error = future.exception()
        self._actor.put.remote(self._key, future.result() if error is None else None, error)


class ResultsActor:
    """Actor that holds results until they are there, for `RayExecutor.run_remote`."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], asyncio.Future[Any]] = defaultdict(
            lambda: asyncio.get_running_loop().create_future()
        )

    async def put(self, key: tuple[int, int], value: object, error: Exception | None) -> None:
        """Take a result."""
        if error is None:
            self._found[key].set_result(value)
        else:
            self._found[key].set_exception(error)

    async def result(self, key: tuple[int, int]) -> Any:
        """Wait for a result, which is forgotten then."""
        try:
            return await self._found[key]
        finally:
            self._found.pop(key, None)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a call of the supervising actor: Ray would lose the ``cause`` of an error, which is pickled here."""

    value: Any = None
    error: Exception | None = None
    cause: bytes | None = None


async def _outcome_of(function: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(await asyncio.to_thread(function))
    except Exception as error:  # noqa: BLE001  raised again in the driver
        return Outcome(None, error, None if error.__cause__ is None else pickle_exception(error.__cause__))


class JobActor:
    """Actor that supervises a job for a driver outside of the cluster."""

    def __init__(self, request: JobRequest) -> None:
        self._notes: deque[Any] = deque()
        self._job = _make_supervised(request, self._notes.append)
        self._futures: dict[tuple[int, int], Future[Any]] = {}
        self._numbers = count()

    async def start(self) -> Outcome:
        """Get the resources and start the ranks."""
        return await _outcome_of(self._job.start)

    async def run(self, call: Call) -> Outcome:
        """Call a function in all ranks."""
        return await _outcome_of(lambda: self._job.run(resolve_refs(call)))

    async def run_single(self, call: Call) -> Outcome:
        """Call a function in one rank."""
        return await _outcome_of(lambda: self._job.run_single(resolve_refs(call)))

    async def submit(self, call: Call) -> Outcome:
        """Call a function in ranks; returns the call's number, and how many ranks there are."""
        return await _outcome_of(lambda: self._submit(call))

    def _submit(self, call: Call) -> tuple[int, int]:
        futures = self._job.submit(resolve_refs(call))
        number = next(self._numbers)
        self._futures |= {(number, position): future for position, future in enumerate(futures)}
        return number, len(futures)

    async def result(self, key: tuple[int, int]) -> Any:
        """Wait for a result, which is forgotten then."""
        return await asyncio.wrap_future(self._futures.pop(key))

    async def take_notes(self) -> list[Any]:
        """Return what ranks have logged since the last call; waits a little for something."""
        until = asyncio.get_running_loop().time() + _NOTES_SECONDS
        while not self._notes and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.05)
        return [self._notes.popleft() for _ in range(len(self._notes))]

    async def shutdown(self) -> Outcome:
        """End the ranks and give everything back."""
        return await _outcome_of(self._job.shutdown)


class ClientJob:
    """Job of a Ray client: an actor in the cluster, which needs no CPUs, supervises it."""

    def __init__(self, request: JobRequest) -> None:
        self._request = request
        self._actor: Any = None

    def start(self) -> None:
        """Start the supervising actor, and the ranks."""
        ray = require_ray()
        options = ray.remote(JobActor).options(num_cpus=0, max_restarts=0)
        self._actor = options.remote(replace(self._request, use_current_group=False))
        try:
            _get(self._actor.start.remote())
        except BaseException:
            self.shutdown()
            raise

    def run(self, call: Call, callbacks: Sequence[Callable[[Any], object]]) -> list[Any]:
        """Call a function in all ranks."""
        ray = require_ray()
        running = self._started.run.remote(call)
        ready: list[Any] = []
        while callbacks and not ready:
            ready, _ = ray.wait([running], timeout=0)
            for note in ray.get(self._actor.take_notes.remote()):
                for callback in callbacks:
                    callback(note)
        found: list[Any] = _get(running)
        return found

    def run_single(self, call: Call) -> Any:
        """Call a function in one rank."""
        return _get(self._started.run_single.remote(call))

    def refs(self, call: Call) -> list[Any]:
        """Call a function in ranks; returns an ObjectRef of each result."""
        number, size = _get(self._started.submit.remote(call))
        return [self._actor.result.remote((number, position)) for position in range(size)]

    @property
    def _started(self) -> Any:
        if self._actor is None:
            raise LaunchError("the job on Ray has not been started, or has been shut down: start()")
        return self._actor

    def shutdown(self) -> None:
        """End the ranks, and the actor."""
        actor, self._actor = self._actor, None
        ray = import_ray()
        if actor is None or not ray.is_initialized():
            return
        try:
            _get(actor.shutdown.remote())
        finally:
            ray.kill(actor)


def _get(ref: Any) -> Any:
    """Return the value of an outcome, or raise its error."""
    outcome: Outcome = import_ray().get(ref)
    if outcome.error is not None:
        raise outcome.error from unpickle_exception(outcome.cause)
    return outcome.value


def resolve_refs(call: Call) -> Call:
    """Replace the ObjectRefs in a call's arguments by their values: ranks are no workers of Ray's."""
    return replace(call, args=_resolve(call.args), kwargs=_resolve(dict(call.kwargs or {})))


def _resolve(value: Any) -> Any:
    """Resolve references, also in lists, tuples and dicts."""
    ray = import_ray()
    if isinstance(value, ray.ObjectRef):
        return ray.get(value)
    if type(value) in {list, tuple}:
        return type(value)(map(_resolve, value))
    if type(value) is dict:
        return {key: _resolve(each) for key, each in value.items()}
    return value
