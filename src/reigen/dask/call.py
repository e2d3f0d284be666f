"""`run`: a function in ranks beside Dask's workers; its results, by rank."""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reigen.errors import ConfigError, LaunchError, RankFailedError
from reigen.launch.elastic.options import ElasticRequest, resolve_elastic
from reigen.runner.agent_process import AgentProcess
from reigen.runner.engine_jobs import EngineAgents, EngineHost, EngineJobOptions, run_on_engine
from reigen.runner.serialization import check_call

if TYPE_CHECKING:
    from distributed import Client, Future

#: Workers that declare so much of this resource offer as many slots; others one for each thread.
RESOURCE = "reigen"
START_TIMEOUT_SECONDS = 60.0
#: Seconds that workers may take to say that their agents have ended.
_LAST_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class WorkerSlots:
    """Worker of Dask's: its address, the number of ranks that it can have, and whether it declares the resource."""

    address: str
    num_slots: int
    has_resource: bool = False


def run(
    client: Client,
    fn: Callable[..., Any],
    *args: Any,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    workers: Sequence[str] | None = None,
    start_timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    num_servers: int = 0,
    **kwargs: Any,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` in ``num_proc`` processes beside Dask's workers that form a job.

    One task in each worker starts an agent, and holds a thread of the worker until the job is over; the ranks are
    children of the agents, not of the worker's threads. Dask has no way to start several tasks at once or not at all:
    where a worker is busy for too long, the tasks are cancelled, and the error names it.

    Args:
        client: of the cluster; not an asynchronous one.
        fn: the function, which calls ``init()`` itself. It is pickled by cloudpickle.
        args: its arguments, the same in all ranks.
        num_proc: the number of ranks, by default one for each worker; they are spread evenly, and no
            worker has more than it has threads.
        min_num_proc: makes an elastic job: ranks that die, or whose worker goes, are replaced, workers that come are
            used, and the others go on while there are so many. The loop of ``fn`` is in a function that ``elastic.run``
            decorates. Each worker is a host of its own, so give a machine one worker with many threads.
        max_num_proc: the greatest number of ranks of an elastic job, by default ``num_proc``, or all threads.
        workers: addresses or names of the workers to use, by default all that there are now.
        start_timeout: seconds to wait for the workers, by default 60.
        env: variables for all ranks, above those of the workers.
        num_servers: parameter servers, which run beside the ranks, on their hosts in turn; Dask counts no threads for
            them. Their scheduler runs beside this process.
        kwargs: its keyword arguments, but for those named above.

    Returns:
        The values that the function returned, by rank.

    Raises:
        RankFailedError: a rank raised, exited, was killed, or lost its worker: the first one that failed by itself. Its
            ``__cause__`` is the exception of that rank, where it can be loaded here. The others were stopped.
        ConfigError: (a ValueError) there are no such workers, or they have fewer threads than there are to be ranks.
        LaunchError: a worker has not started its agent in time; the message names it.
        UnsupportedTypeError: ``fn`` or an argument cannot be pickled.

    Example::

        client = distributed.Client("scheduler:8786")
        losses = reigen.dask.run(client, train, 0.1, num_proc=4)
    """
    if getattr(client, "asynchronous", False):
        raise ConfigError("reigen.dask.run needs a Client that waits for its results: make one without asynchronous")
    if not hasattr(client, "scheduler_info"):
        raise ConfigError(f"run(client, function, ...): the first argument is not a distributed.Client: {client!r:.80}")
    check_call(fn)
    found = find_workers(client.scheduler_info(n_workers=-1)["workers"], workers)
    timeout = START_TIMEOUT_SECONDS if start_timeout is None else start_timeout
    request = ElasticRequest(
        num_proc,
        min_num_proc,
        max_num_proc,
        start_timeout_seconds=timeout,
        names=("num_proc", "min_num_proc", "max_num_proc", ""),
    )
    if (elastic := resolve_elastic(request)) is not None:
        environ = dict(env or {})
        options = EngineJobOptions(
            environ=environ, start_timeout_seconds=timeout, num_servers=num_servers, elastic=elastic
        )
        return _run_elastic(client, (fn, args, kwargs), options, workers)
    placement = place_ranks(found, num_proc)
    size = sum(placement.values())
    tasks = _Tasks(client, placement, {worker.address for worker in found if worker.has_resource})
    agents = EngineAgents(
        engine="Dask",
        hosts=size,
        start_agents=tasks.start,
        explain_exit=tasks.explain_exit,
        kept_variables=("",),
        exports_environ=False,
        listen_towards=host_of(found[0].address),
    )
    options = EngineJobOptions(
        num_ranks=size, environ=dict(env or {}), start_timeout_seconds=timeout, num_servers=num_servers
    )
    try:
        results = run_on_engine(fn, args, kwargs, agents=agents, options=options)
        tasks.wait()
    except RankFailedError:
        raise
    except LaunchError as error:
        raise LaunchError(tasks.name_workers(str(error)), error.exit_code) from None
    finally:
        tasks.cancel()
    return results


def _run_elastic(
    client: Client,
    call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]],
    options: EngineJobOptions,
    workers: Sequence[str] | None,
) -> list[Any]:
    hosts = _WorkerHosts(client, workers)
    found = hosts.discover()
    agents = EngineAgents(
        engine="Dask",
        hosts=found,
        start_agents=hosts.start,
        explain_exit=hosts.explain_exit,
        kept_variables=("",),
        exports_environ=False,
        listen_towards=found[0].address,
        discover=hosts.discover,
    )
    try:
        results = run_on_engine(*call, agents=agents, options=options)
        hosts.wait()
    finally:
        hosts.cancel()
    return results


def find_workers(known: Mapping[str, Mapping[str, Any]], wanted: Sequence[str] | None) -> list[WorkerSlots]:
    """Return the workers that the user names, or all, in the order of their addresses.

    Args:
        known: the scheduler's, by address.
        wanted: addresses or names; None: all.

    Raises:
        ConfigError: there is none, or some of those named are not there.
    """
    names = {str(info.get("name", address)): address for address, info in known.items()}
    chosen = sorted(known) if wanted is None else [str(each) for each in wanted]
    missing = [each for each in chosen if each not in known and each not in names]
    if missing:
        raise ConfigError(f"Dask has no worker {', '.join(missing)}; it has {', '.join(sorted(known)) or 'none'}")
    if not chosen:
        raise ConfigError("Dask has no workers now: wait for them, client.wait_for_workers(n)")
    addresses = dict.fromkeys(each if each in known else names[each] for each in chosen)
    return [_slots_of(address, known[address]) for address in addresses]


def host_of(address: str) -> str:
    """Return the host in an address of Dask's, ``tls://host:port``; this one's for a worker in this process."""
    scheme, _, rest = address.partition("://")
    return "127.0.0.1" if scheme == "inproc" else rest.rpartition(":")[0].strip("[]")


def place_ranks(workers: Sequence[WorkerSlots], num_proc: int | None) -> dict[str, int]:
    """Return the number of ranks of each worker that has any, by address: evenly, but no more than it has slots.

    Raises:
        ConfigError: ``num_proc`` is no positive number, or more than there are slots.
    """
    num_ranks = len(workers) if num_proc is None else num_proc
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or num_ranks < 1:
        raise ConfigError(f"num_proc must be a number of ranks, at least 1, not {num_proc!r}")
    num_slots = sum(worker.num_slots for worker in workers)
    if num_ranks > num_slots:
        raise ConfigError(f"num_proc is {num_ranks}; Dask's {len(workers)} workers have {num_slots} threads for ranks")
    placed = dict.fromkeys((worker.address for worker in workers), 0)
    while num_ranks:
        for worker in workers:
            if num_ranks and placed[worker.address] < worker.num_slots:
                placed[worker.address] += 1
                num_ranks -= 1
    return {address: number for address, number in placed.items() if number}


def _slots_of(address: str, info: Mapping[str, Any]) -> WorkerSlots:
    declared = info.get("resources", {}).get(RESOURCE)
    return WorkerSlots(address, int(info["nthreads"] if declared is None else declared), declared is not None)


def run_agents(inputs: Sequence[str]) -> int:
    """Hold slots of a worker, in one of its threads: start an agent with each input, and wait until all have ended.

    Returns:
        the number of agents that have not ended in good order.
    """
    agents: list[AgentProcess] = []
    try:
        agents.extend(map(AgentProcess, inputs))  # those before one that cannot be started are stopped, too
        return sum(agent.wait() != 0 for agent in agents)
    finally:
        for agent in agents:
            agent.stop()


class _WorkerHosts:
    """Workers of an elastic job, which come and go; each is a host, whose agent is a task there.

    Args:
        client: of the cluster.
        wanted: addresses or names of workers; None: all.
    """

    def __init__(self, client: Client, wanted: Sequence[str] | None) -> None:
        self._client, self._wanted = client, wanted
        self._workers: dict[str, WorkerSlots] = {}
        self._futures: dict[str, Future] = {}
        self._keys = (f"reigen-agent-{uuid.uuid4().hex}-{number}" for number in itertools.count())

    def discover(self) -> list[EngineHost]:
        """Return the workers that there are now; the latest ones where the scheduler does not answer."""
        with suppress(OSError, TimeoutError):
            known = self._client.scheduler_info(n_workers=-1)["workers"]
            names = {address: str(info.get("name", address)) for address, info in known.items()}
            wanted = None if self._wanted is None else set(map(str, self._wanted))
            self._workers = {
                address.partition("://")[2]: _slots_of(address, info)
                for address, info in sorted(known.items())
                if wanted is None or address in wanted or names[address] in wanted
            }
        return [EngineHost(name, each.num_slots, host_of(each.address)) for name, each in self._workers.items()]

    def start(self, inputs: Mapping[str, str]) -> None:
        """Submit a task to each of these workers; one that has gone meanwhile is heard of by `discover`."""
        for name, text in inputs.items():
            worker = self._workers.get(name)
            if worker is not None:
                self._futures[name] = self._client.submit(
                    run_agents,
                    [text],
                    workers=[worker.address],
                    allow_other_workers=False,
                    retries=0,
                    pure=False,
                    resources={RESOURCE: worker.num_slots} if worker.has_resource else None,
                    key=next(self._keys),
                )

    def explain_exit(self, name: str) -> str:
        """Explain why the agent of a worker has not come, or has gone."""
        if name not in self._workers:
            return f"Dask's worker {name} has gone"
        future = self._futures.get(name)
        if future is not None and future.status in {"error", "cancelled", "lost"}:
            return f"the task in Dask's worker {name} has ended: {future.status}"
        return ""

    def wait(self) -> None:
        """Wait until the tasks have ended."""
        _wait_for(self._futures.values())

    def cancel(self) -> None:
        """Cancel the tasks that have not ended."""
        _cancel(self._client, self._futures.values())
        self._futures.clear()


def _wait_for(futures: Iterable[Future]) -> None:
    """Wait until tasks have ended."""
    from distributed import wait

    with suppress(Exception):  # it takes too long, or the scheduler has gone
        wait(list(futures), timeout=_LAST_SECONDS)


def _cancel(client: Client, futures: Iterable[Future]) -> None:
    """Cancel the tasks that have not ended."""
    with suppress(Exception):  # the scheduler has gone
        client.cancel([future for future in futures if not future.done()], force=True)


class _Tasks:
    """Tasks in Dask's workers that hold the slots of a job.

    Args:
        client: of the cluster.
        placement: number of slots by worker.
        declaring: workers that declare the resource.
    """

    def __init__(self, client: Client, placement: Mapping[str, int], declaring: set[str]) -> None:
        self._client, self._placement, self._declaring = client, placement, declaring
        #: The worker of each slot, in the order of ranks.
        self._workers = [address for address, number in placement.items() for _ in range(number)]
        self._futures: dict[str, Future] = {}
        self._id = uuid.uuid4().hex  # of several clients' tasks in one scheduler

    def start(self, inputs: Mapping[str, str]) -> None:
        """Submit the tasks with the inputs of their agents, which are called by the numbers of their slots."""
        by_worker: dict[str, list[str]] = {}
        for number, address in enumerate(self._workers):
            by_worker.setdefault(address, []).append(inputs[str(number)])
        for address, texts in by_worker.items():
            self._futures[address] = self._client.submit(
                run_agents,
                texts,
                workers=[address],
                allow_other_workers=False,
                retries=0,
                pure=False,
                resources={RESOURCE: len(texts)} if address in self._declaring else None,
                key=f"reigen-agents-{self._id}-{address}",
            )

    def explain_exit(self, name: str) -> str:
        """Explain why the agent of a slot has not come, or has gone, by what Dask knows of its worker."""
        if not name.isdecimal() or int(name) >= len(self._workers):
            return ""
        address = self._workers[int(name)]
        with suppress(Exception):  # the scheduler has gone, too
            if address not in self._client.scheduler_info(n_workers=-1)["workers"]:
                return f"Dask's worker {address} has gone"
        future = self._futures.get(address)
        if future is not None and future.status in {"error", "cancelled", "lost"}:
            return f"the task in Dask's worker {address} has ended: {future.status}"
        return ""

    def name_workers(self, text: str) -> str:
        """Put the workers' addresses into an error that speaks of numbers of tasks."""
        known = dict(enumerate(self._workers))
        return re.sub(r"\btask (\d+)\b", lambda match: f"worker {known.get(int(match[1]), match[0])}", text)

    def wait(self) -> None:
        """Wait until the tasks have ended."""
        _wait_for(self._futures.values())

    def cancel(self) -> None:
        """Cancel the tasks that have not ended, and have Dask forget all."""
        _cancel(self._client, self._futures.values())
        self._futures.clear()
