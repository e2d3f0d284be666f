"""Elastic job on Ray: each call of a function is a job of its own, in slots that stay between calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from reigen.errors import LaunchError, UnsupportedError
from reigen.launch.elastic.options import ElasticOptions
from reigen.ray.job_request import Call, JobRequest, job_options
from reigen.ray.slot_actors import SlotActors
from reigen.runner.engine_jobs import Cancellation, EngineAgents, run_on_engine


class ElasticRayJob:
    """Slots on Ray, and the jobs that run in them, one at a time; as `RayJob`.

    Args:
        request: what it needs; it has ``elastic``.
        on_note: gets what ranks send by `reigen.ray.ray_logger.log`, in the thread that runs the job.
    """

    def __init__(self, request: JobRequest, on_note: Callable[[Any], None] | None = None) -> None:
        assert request.elastic is not None, "it is elastic"
        self._request, self._on_note, self._elastic = request, on_note, request.elastic
        settings, discovery = request.settings, request.discovery
        self._slots = SlotActors(
            request.workers,
            self._elastic.min_ranks,
            request.max_workers,
            min(settings.placement_group_timeout_seconds, self._elastic.start_timeout_seconds),
            use_current_group=request.use_current_group,
            find_hosts=None if discovery is None else discovery.find_available_hosts_and_slots,
        )
        self._agents: EngineAgents | None = None
        self._lock = threading.Lock()
        self._cancellation: Cancellation | None = None

    def start(self) -> None:
        """Get the least number of slots; raises what `SlotActors.start` raises."""
        self._agents = self._slots.start()

    def run(self, call: Call) -> list[Any]:
        """Run a job of this function; returns the results of the last view's ranks."""
        return self._run(call, self._elastic)

    def run_single(self, call: Call) -> Any:
        """Run a job of one rank; returns its result."""
        return self._run(call, replace(self._elastic, min_ranks=1, max_ranks=1))[0]

    def submit(self, call: Call) -> list[Future[Any]]:
        """Raise UnsupportedError: how many results there are is known at the end of an elastic job."""
        raise UnsupportedError(
            "run_remote: in an elastic job the number of results is not known before its end: use run(), in a "
            "thread or a task of Ray's"
        )

    def shutdown(self) -> None:
        """End the job that runs, and give the slots back; may be called again."""
        if self._cancellation is not None:
            self._cancellation.cancel("shutdown() was called before its function had ended")
        with self._lock:  # it has ended
            self._agents = None
            self._slots.release()

    def _run(self, call: Call, elastic: ElasticOptions) -> list[Any]:
        request = self._request
        with self._lock:
            if self._agents is None:
                raise LaunchError("the job on Ray has not been started, or has been shut down: start()")
            self._cancellation = Cancellation()
            try:
                return run_on_engine(
                    call_in_rank,
                    (request.state if call.with_state else None, call.func, call.args, dict(call.kwargs or {})),
                    agents=self._agents,
                    options=replace(job_options(request), elastic=elastic),
                    cancellation=self._cancellation,
                    on_note=None if self._on_note is None else self._note,
                )
            finally:
                self._cancellation = None

    def _note(self, slot: int, note: object) -> None:
        assert self._on_note is not None, "asked before"
        self._on_note(note)


def call_in_rank(
    state: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call the function in a rank, with the object that ``state`` makes there, if there is one."""
    made = () if state is None else (state[0](*state[1], **state[2]),)
    return func(*made, *args, **kwargs)
